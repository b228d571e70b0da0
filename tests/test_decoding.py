"""The loop against plain generate: oracle candidates, the draft's own logits round by round, and random settings."""

import pytest
import torch
from conftest import CACHE, VOCAB, WINDOW, make_draft, make_target, prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import count_forwards, expected_forwards, oracle
from transformers import AutoModel, DynamicCache

from transformers_dflash.target import decoder_layers

NEW_TOKENS = 4 * WINDOW  # far past every sliding window


def plain(target, ids, **kwargs):
    return target.generate(ids, do_sample=False, **({"max_new_tokens": NEW_TOKENS} | kwargs))


@pytest.mark.parametrize("num_right", range(6))
def test_oracle_candidates_give_plain_output_in_the_fewest_forwards(targets, family, num_right):
    target = targets[family]
    draft, ids = make_draft(target), prompt(7)
    answer = plain(target, ids)
    with oracle(answer, num_right, VOCAB), count_forwards(target) as forwards:
        drafted = plain(target, ids, assistant_model=draft)
    assert torch.equal(drafted, answer)
    assert len(forwards) == expected_forwards(NEW_TOKENS, num_right)


def stateless_draft_logits(target, draft, ids, k, **inputs):
    """The draft's logits after `ids`, from a target forward without cache and a draft forward without cache.

    `inputs` are what else the target is given, such as images.
    """
    states = {}
    hooks = [
        layer.register_forward_hook(
            lambda _m, _i, out, n=n: states.update({n: out[0] if isinstance(out, tuple | list) else out})
        )
        for n, layer in enumerate(decoder_layers(target))
    ]
    target(ids, use_cache=False, **inputs)
    for hook in hooks:
        hook.remove()
    features = torch.cat([states[tap] for tap in draft.config.target_layer_ids], dim=-1)[:, :-1]  # all but the anchor
    block = torch.tensor([[int(ids[0, -1])] + [draft.config.mask_token_id] * k])
    own = draft.get_input_embeddings()
    embedding = target.get_input_embeddings() if own is None else own
    # Drafts of a family with a norm in its embedding are given the raw rows.
    embeds = embedding.weight[block] if hasattr(embedding, "embed_norm") else embedding(block)
    hidden = draft(embeds, features).last_hidden_state[:, 1:]
    if draft.config.draft_vocab_size is not None:
        return draft.expand_reduced_logits(hidden, VOCAB)[0]
    return target_logits(target, hidden)[0]


def target_logits(target, hidden):
    """What a target makes of final hidden states `(1, k, H)`: its own forward, with its decoder's result replaced."""

    def replace(_module, _inputs, output):
        output.last_hidden_state = hidden

    hook = target.get_decoder().register_forward_hook(replace)
    try:
        return target(torch.zeros(hidden.shape[:2], dtype=torch.long), use_cache=False).logits
    finally:
        hook.remove()


@pytest.mark.parametrize("injection", ["fused", "layer_aligned"])
@pytest.mark.parametrize("num_right", [0, 2, 5])
def test_draft_logits_of_every_round_equal_a_stateless_recompute(targets, family, injection, num_right):
    target = targets[family]
    draft, ids = make_draft(target, context_injection=injection), prompt(7)
    answer = plain(target, ids)
    with torch.no_grad(), oracle(answer, num_right, VOCAB) as rounds:
        plain(target, ids, assistant_model=draft)
        assert len(rounds) >= 8
        for drafted in rounds:
            expected = stateless_draft_logits(target, draft, drafted["input_ids"], len(drafted["logits"]))
            torch.testing.assert_close(drafted["logits"], expected, atol=1e-4, rtol=1e-4)


def test_context_holds_exactly_the_committed_tokens_but_the_anchor(target, draft):
    ids = prompt(7)
    with oracle(plain(target, ids), 2, VOCAB) as rounds:
        plain(target, ids, assistant_model=draft)
    assert rounds[0]["context_before"] == 0
    for drafted in rounds:
        assert drafted["context"] == drafted["input_ids"].shape[1] - 1


def test_block_is_cut_where_the_budget_ends(target, draft):
    ids = prompt(7)
    with oracle(plain(target, ids, max_new_tokens=10), 0, VOCAB) as rounds:
        plain(target, ids, max_new_tokens=10, assistant_model=draft)
    assert [len(drafted["logits"]) for drafted in rounds] == [5, 5, 5, 5, 4, 3, 2, 1]


def test_num_assistant_tokens_of_the_draft_caps_a_round(target):
    draft, ids = make_draft(target), prompt(7)
    draft.generation_config.num_assistant_tokens = 2
    out = plain(target, ids, assistant_model=draft, return_dict_in_generate=True)
    assert len(out.speculation.drafted_at) == 2
    assert torch.equal(out.sequences, plain(target, ids))


@pytest.mark.parametrize("threshold", [0.0, 0.1, 1.0])
def test_a_confidence_threshold_cuts_the_block(target, draft, threshold):
    ids, answer = prompt(7), plain(target, prompt(7))
    draft.generation_config.assistant_confidence_threshold = threshold
    with oracle(answer, 0, VOCAB):  # counts what is drafted, before the oracle speaks
        out = plain(target, ids, assistant_model=draft, return_dict_in_generate=True)
    assert torch.equal(out.sequences, answer)
    whole = sum(min(draft.config.num_candidates, NEW_TOKENS - 2 - n) for n in range(NEW_TOKENS - 1))
    if threshold == 0:
        assert out.speculation.drafted == whole
    elif threshold == 1:
        assert out.speculation.drafted == 0
    else:
        assert 0 < out.speculation.drafted < whole


def test_a_draft_that_predicts_from_the_anchor_gives_block_size_candidates(target):
    draft, ids = make_draft(target, sample_from_anchor=True), prompt(7)
    out = plain(target, ids, assistant_model=draft, return_dict_in_generate=True)
    assert len(out.speculation.drafted_at) == draft.config.block_size
    assert torch.equal(out.sequences, plain(target, ids))


def test_reduced_vocabulary_proposes_only_its_own_tokens(target):
    draft = make_draft(target, draft_vocab_size=5)
    torch.nn.init.normal_(draft.lm_head.weight)
    draft.d2t.copy_(torch.tensor([3, 3, 7, 7, 20]))  # target ids 3, 4, 9, 10, 24
    ids = prompt(7)
    answer = plain(target, ids)
    with oracle(answer, 1, VOCAB) as rounds:
        assert torch.equal(plain(target, ids, assistant_model=draft), answer)
    for drafted in rounds:
        finite = drafted["logits"].isfinite()
        assert finite[0].nonzero().flatten().tolist() == [3, 4, 9, 10, 24]
        assert (finite == finite[0]).all()


@pytest.mark.parametrize("own_head", [False, True])
def test_a_draft_with_an_embedding_of_its_own_uses_it(target, tmp_path, own_head):
    """Of a hidden size of its own too, where the head is its own."""
    shape = {"draft_vocab_size": VOCAB, "hidden_size": 16, "target_hidden_size": 32} if own_head else {}
    made = make_draft(target, own_embedding=True, **shape)
    made.save_pretrained(tmp_path)
    draft, ids = AutoModel.from_pretrained(tmp_path, attn_implementation="eager"), prompt(7)
    answer = plain(target, ids)
    with torch.no_grad(), oracle(answer, 2, VOCAB) as rounds:
        assert torch.equal(plain(target, ids, assistant_model=draft), answer)
        for one in rounds:
            expected = stateless_draft_logits(target, draft, one["input_ids"], len(one["logits"]))
            torch.testing.assert_close(one["logits"], expected, atol=1e-4, rtol=1e-4)
    assert draft.get_input_embeddings() is draft.embed_tokens


@pytest.mark.parametrize("budget", [None, 8], ids=["chains", "trees"])
@pytest.mark.parametrize("option", ["suppress_tokens", "bad_words_ids"])
def test_a_draft_all_of_whose_tokens_are_forbidden_only_guesses_wrong(target, option, budget):
    draft = make_draft(target, draft_vocab_size=2)
    draft.d2t.copy_(torch.tensor([3, 3]))  # target ids 3 and 4
    draft.generation_config.tree_budget = budget
    forbidden = {option: [3, 4] if option == "suppress_tokens" else [[3], [4]]}
    out = target.generate(prompt(7), assistant_model=draft, do_sample=True, max_new_tokens=9, **forbidden)
    assert {3, 4}.isdisjoint(out[0, 7:].tolist())
    assert out.shape == (1, 16)


def num_hooks(target) -> int:
    return sum(len(module._forward_hooks) for module in target.modules())


def test_only_taps_are_hooked_and_nothing_stays_on_the_target(target, draft):
    before, during = num_hooks(target), []
    plain(
        target, prompt(7), assistant_model=draft, logits_processor=[lambda _, s: during.append(num_hooks(target)) or s]
    )
    assert num_hooks(target) == before
    assert set(during) == {before + len(draft.config.target_layer_ids)}


class Fails(Exception):
    pass


@pytest.mark.parametrize("calls_before", [0, 1, 7])
def test_a_retry_after_an_exception_gives_the_right_output(target, draft, calls_before):
    ids, hooks_before = prompt(7), num_hooks(target)
    calls = []

    def fail(_ids, scores):
        calls.append(1)
        if len(calls) > calls_before:
            raise Fails
        return scores

    with pytest.raises(Fails):
        plain(target, ids, assistant_model=draft, logits_processor=[fail])
    assert num_hooks(target) == hooks_before
    assert torch.equal(plain(target, ids, assistant_model=draft), plain(target, ids))


def test_a_second_shorter_call_is_not_touched_by_the_first(target, draft):
    plain(target, prompt(30), assistant_model=draft)
    ids = prompt(4, seed=5)
    assert torch.equal(plain(target, ids, assistant_model=draft), plain(target, ids))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    family=st.sampled_from(["llama", "gemma3", "gpt_oss"]),
    prompt_length=st.integers(1, 20),
    new_tokens=st.integers(1, 30),
    block_size=st.integers(2, 9),
    taps=st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True),
    causal=st.sampled_from([[], ["sliding_attention"], ["full_attention", "sliding_attention"]]),
    num_right=st.integers(0, 8),
    eos=st.none() | st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3),
    seed=st.integers(0, 5),
)
def test_greedy_equals_plain_for_any_shape(
    targets, family, prompt_length, new_tokens, block_size, taps, causal, num_right, eos, seed
):
    target = targets[family]
    draft = make_draft(target, block_size=block_size, target_layer_ids=taps, causal_layer_types=causal, seed=seed)
    ids = prompt(prompt_length, seed)
    options = {"max_new_tokens": new_tokens, "eos_token_id": eos}
    answer = plain(target, ids, **options)
    longer = plain(target, ids, max_new_tokens=new_tokens + block_size)
    with oracle(longer, num_right, VOCAB):
        assert torch.equal(plain(target, ids, assistant_model=draft, **options), answer)
    assert torch.equal(plain(target, ids, assistant_model=draft, **options), answer)


def test_position_table_ends_the_speculation_not_the_generation():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4, n_positions=24, initializer_range=0.2)
    target = GPT2LMHeadModel(config).eval()
    target.generation_config.eos_token_id = None
    draft, ids = make_draft(target, intermediate_size=48, num_key_value_heads=2), prompt(7)
    answer = plain(target, ids, max_new_tokens=17, eos_token_id=None, pad_token_id=0)
    drafted = plain(target, ids, max_new_tokens=17, eos_token_id=None, pad_token_id=0, assistant_model=draft)
    assert torch.equal(drafted, answer)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0},
        {
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "original_max_position_embeddings": 24,
            "factor": 4.0,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_that_changes_with_length_gives_plain_output(rope):
    from conftest import COMMON
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    longest = 24 if rope["rope_type"] == "dynamic" else 96
    target = LlamaForCausalLM(
        LlamaConfig(**COMMON | {"max_position_embeddings": longest, "rope_parameters": rope})
    ).eval()
    draft, ids = make_draft(target, rope_parameters={"rope_type": "default", "rope_theta": 100.0}), prompt(7)
    answer = plain(target, ids, max_new_tokens=40)
    with oracle(answer, 3, VOCAB):
        assert torch.equal(plain(target, ids, max_new_tokens=40, assistant_model=draft), answer)


@pytest.mark.skipif(CACHE != "cache", reason="older Transformers give Phi-3 its last token alone: wrong by itself")
@pytest.mark.parametrize("budget", [None, 12], ids=["chains", "trees"])
@pytest.mark.parametrize("padding", [0, 4])
def test_a_target_that_reads_everything_anew_gives_plain_output(padding, budget):
    """Phi-3 drops its cache where its rope changes, which padding moves away from where the angles change."""
    from conftest import COMMON
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 32, "factor": 4.0}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    shape = {name: value for name, value in COMMON.items() if name != "head_dim"}
    config = Phi3Config(**shape, sliding_window=20, original_max_position_embeddings=32, rope_parameters=rope)
    target = Phi3ForCausalLM(config).eval()
    draft = make_draft(target, rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    draft.generation_config.tree_budget = budget
    ids, mask = prompt(20), torch.ones(1, 20, dtype=torch.long)
    mask[:, :padding] = 0
    options = {"attention_mask": mask, "max_new_tokens": 40, "return_dict_in_generate": True}
    if budget is None:
        options["output_hidden_states"] = True
    expected, drafted = plain(target, ids, **options), plain(target, ids, **options, assistant_model=draft)
    assert torch.equal(drafted.sequences, expected.sequences)
    if budget is None:
        shapes = [[states[-1].shape for states in out.hidden_states] for out in (drafted, expected)]
        assert shapes[0] == shapes[1]
    cache, turn = DynamicCache(config=config), prompt(20)
    for _ in range(2):  # the second prompt goes over the bound
        out = plain(target, turn, assistant_model=draft, max_new_tokens=6, **{CACHE: cache})
        assert torch.equal(out, plain(target, turn, max_new_tokens=6))
        turn = torch.cat([out, prompt(12, seed=3)], dim=1)


def test_seeds_make_targets_differ():
    """The tests above mean something only if targets do not all say the same."""
    ids = prompt(7)
    assert not torch.equal(plain(make_target("llama", seed=3), ids), plain(make_target("llama", seed=4), ids))

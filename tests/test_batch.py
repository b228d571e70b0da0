"""Batches: every row is what it would be alone, whatever its neighbours accept."""

import threading

import pytest
import torch
from conftest import CACHE, VOCAB, WINDOW, make_draft, make_target, prompt
from oracle import count_forwards, oracle
from scipy.stats import chisquare
from test_decoding import stateless_draft_logits
from test_dflash2 import randomized
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    MBartConfig,
    MBartForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)

NEW = 3 * WINDOW
LENGTHS = (9, 4, 17)  # the longest is past the window from the start


def batch(lengths=LENGTHS, pad=0):
    """Left-padded ids and mask `(b, n)`."""
    longest = max(lengths)
    ids = torch.full((len(lengths), longest), pad)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = prompt(length, row + 5)
    return {
        "input_ids": ids,
        "attention_mask": (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long(),
    }


def alone(target, inputs, row, **options):
    """What plain generate gives for one row without its padding."""
    kept = inputs["attention_mask"][row].bool()
    ids = inputs["input_ids"][row][kept][None]
    out = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
    return out[0, ids.shape[1] :].tolist()


def new_tokens(out, inputs):
    return out[:, inputs["input_ids"].shape[1] :].tolist()


def test_rows_are_what_plain_generate_gives_them(targets, family):
    target, inputs = targets[family], batch()
    plain = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    drafted = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=make_draft(target))
    assert drafted.tolist() == plain.tolist()
    for row, tokens in enumerate(new_tokens(drafted, inputs)):
        assert tokens == alone(target, inputs, row, max_new_tokens=NEW)


@pytest.mark.parametrize("injection", ["fused", "layer_aligned", "dflash 2"])
@pytest.mark.parametrize("counts", [[0, 3, 5], [5, 0, 0], [1, 1, 1], [4, 5, 2]])
def test_uneven_acceptance_keeps_output_forwards_and_the_drafts_own_logits(targets, family, injection, counts):
    if injection == "dflash 2" and family != "gemma3":
        pytest.skip("one family is enough for the parts of DFlash 2")
    target, inputs = targets[family], batch()
    shape = {"context_injection": injection}
    if injection == "dflash 2":
        shape = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 6}
    draft = randomized(make_draft(target, sliding_window=5, **shape))
    plain = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    with oracle(plain, counts, VOCAB) as rounds, count_forwards(target) as forwards:
        drafted = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
    assert drafted.tolist() == plain.tolist()
    slowest = min(counts)
    assert len(forwards) == 1 + -(-(NEW - 1) // (slowest + 1))
    assert len({len(one["rows"]) for one in rounds}) == (
        1 if len(set(counts)) == 1 else 2 if counts[1] == counts[2] else 3
    )
    checked = 0
    for one in rounds[:: max(1, len(rounds) // 4)]:
        k = one["all_logits"].shape[1]
        for row, ids in enumerate(one["rows"]):
            which = next(i for i, whole in enumerate(plain) if whole[: ids.shape[1]].tolist() == ids[0].tolist())
            own = ids[:, inputs["input_ids"].shape[1] - LENGTHS[which] :]
            expected = stateless_draft_logits(target, draft, own, k)
            torch.testing.assert_close(one["all_logits"][row], expected, atol=1e-4, rtol=1e-3)
            checked += 1
    assert checked >= 4


def test_rows_that_end_early_leave_and_are_padded(target):
    inputs = batch((6, 7, 8, 5))
    free = new_tokens(target.generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs)
    eos = [free[1][4], free[3][9]]  # ends two rows amid
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0}
    plain = target.generate(**inputs, **options)
    assert (plain == 0).sum() > (inputs["input_ids"] == 0).sum()
    widths = []
    hook = target.register_forward_pre_hook(
        lambda _m, _a, kwargs: widths.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    drafted = target.generate(**inputs, assistant_model=make_draft(target), **options)
    hook.remove()
    assert drafted.tolist() == plain.tolist()
    assert widths[0] == 4
    assert widths[-1] < 4


def test_what_a_row_that_leaves_had_accepted_does_not_stay_in_the_drafts_context(target):
    """The other row, as long at first, goes on with fewer new tokens."""
    inputs, draft = batch((9, 9)), make_draft(target)
    inputs["input_ids"] = torch.cat([prompt(9, 20), prompt(9, 3)])
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    answer = target.generate(**inputs, **options)
    eos, place = int(answer[0, 13]), 13  # amid the first block
    assert eos not in answer[0, 9:place].tolist() + answer[1, 9:].tolist()
    answer[0, place + 1 :] = 0
    with oracle(answer, [draft.config.num_candidates, 1], VOCAB) as rounds:
        drafted = target.generate(**inputs, assistant_model=draft, eos_token_id=eos, **options)
    assert drafted.tolist() == answer[:, : drafted.shape[1]].tolist()
    alone = [one for one in rounds if len(one["rows"]) == 1]
    assert len(alone) > 3
    for one in alone:
        expected = stateless_draft_logits(target, draft, one["rows"][0], len(one["logits"]))
        torch.testing.assert_close(one["logits"], expected, atol=1e-4, rtol=1e-3)


class CountsItsCalls(LogitsProcessor):
    """Keeps a state of one sequence: every third token is forced."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls % 3 == 0:
            scores = torch.full_like(scores, float("-inf")).index_fill(1, torch.tensor([self.calls % 20 + 2]), 0.0)
        return scores


OPTIONS = {
    "repetition": {"repetition_penalty": 1.4},
    "n-grams": {"no_repeat_ngram_size": 2},
    "of the prompt": {"encoder_repetition_penalty": 1.5},
    "n-grams of the prompt": {"encoder_no_repeat_ngram_size": 2},
    "minimum": {"min_new_tokens": 20, "eos_token_id": [5, 6, 7, 8]},
    "allowed": {"prefix_allowed_tokens_fn": lambda row, ids: [3 + row, 7, 9, 11 + len(ids) % 5]},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_processors_see_their_own_row(target, name):
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, **OPTIONS[name]}
    inputs = batch((12, 12, 12))
    plain = target.generate(**inputs, **options)
    assert target.generate(**inputs, assistant_model=make_draft(target), **options).tolist() == plain.tolist()


def test_allowed_tokens_are_asked_for_by_prompt_where_each_has_several_sequences(target):
    """Older releases of Transformers count the sequences themselves; so it is then with a draft too."""

    def asked(**options):
        numbers = set()

        def allowed(number, _ids):
            numbers.add(number)
            return [3 + number, 7, 9]

        options |= {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 2, "eos_token_id": None}
        out = target.generate(**batch((6, 4)), prefix_allowed_tokens_fn=allowed, **options)
        for row, tokens in enumerate(out[:, 6:].tolist()):
            assert set(tokens) <= {3 + row * len(numbers) // 4, 7, 9}
        return numbers

    assert asked(assistant_model=make_draft(target)) == asked()


class HoldsALock(LogitsProcessor):
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, input_ids, scores):
        return scores


def test_a_processor_that_cannot_be_copied_is_refused(target):
    options = {"max_new_tokens": 5, "logits_processor": LogitsProcessorList([HoldsALock()])}
    with pytest.raises(ValueError, match="a HoldsALock each, which cannot be copied"):
        target.generate(**batch(), assistant_model=make_draft(target), **options)


def test_a_processor_with_a_state_keeps_one_for_each_row(target):
    inputs = batch()
    processors = LogitsProcessorList([CountsItsCalls()])
    drafted = target.generate(
        **inputs, max_new_tokens=20, do_sample=False, assistant_model=make_draft(target), logits_processor=processors
    )
    for row, tokens in enumerate(new_tokens(drafted, inputs)):
        mine = LogitsProcessorList([CountsItsCalls()])
        assert tokens == alone(target, inputs, row, max_new_tokens=20, logits_processor=mine)


class EndsAfter(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1] == 11) | (input_ids[:, -1] == 12)


def test_stopping_criteria_stop_their_own_row(target):
    inputs = batch((6, 7, 8, 5))
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": 3, "pad_token_id": 0}
    options["stopping_criteria"] = StoppingCriteriaList([EndsAfter()])
    plain = target.generate(**inputs, **options)
    assert target.generate(**inputs, assistant_model=make_draft(target), **options).tolist() == plain.tolist()
    with pytest.raises(ValueError, match="without an eos token"):
        target.generate(**inputs, assistant_model=make_draft(target), **(options | {"eos_token_id": None}))


def test_outputs_of_a_batch(target):
    inputs = batch()
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    options |= {"output_scores": True, "output_logits": True, "repetition_penalty": 1.2}
    plain = target.generate(**inputs, **options)
    with oracle(plain.sequences, [0, 5, 2], VOCAB):
        drafted = target.generate(**inputs, assistant_model=make_draft(target), **options)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits"):
        assert len(getattr(drafted, name)) == len(getattr(plain, name)) == 20
        for mine, theirs in zip(getattr(drafted, name), getattr(plain, name), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)
    speculation = drafted.speculation
    assert [len(one) for one in speculation.acceptance_lengths_by_sequence] == [19, 4, 7]
    assert [sum(one) for one in speculation.acceptance_lengths_by_sequence] == [19, 19, 19]
    assert (speculation.rounds, speculation.forwards) == (30, 19)
    assert drafted.past_key_values is None


@pytest.mark.parametrize("budget", [None, 5], ids=["chains", "trees"])
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_sampled_rows_follow_the_targets_law(temperature, budget):
    """Rows of one batch against the exactly enumerated law of two tokens; a wrong law must fail."""
    target = make_target("llama")
    draft = make_draft(target, block_size=3)
    draft.generation_config.tree_budget = budget
    ids = prompt(5, 3)
    options = {"do_sample": True, "temperature": temperature, "top_k": 4, "max_new_tokens": 3}
    torch.manual_seed(0)
    out = target.generate(
        ids, attention_mask=torch.ones_like(ids), assistant_model=draft, num_return_sequences=3000, **options
    )[:, 5:8]
    law = {}

    def enumerate_law(prefix, chance):
        if len(prefix) == 3:
            law[tuple(prefix)] = chance
            return
        whole = torch.cat([ids, torch.tensor([prefix], dtype=torch.long)], dim=1)
        logits = target(whole).logits[0, -1] / temperature
        best = logits.topk(4)
        for p, token in zip(best.values.softmax(-1).tolist(), best.indices.tolist(), strict=True):
            enumerate_law([*prefix, token], chance * p)

    with torch.no_grad():
        enumerate_law([], 1.0)
    seen = [tuple(row) for row in out.tolist()]
    assert set(seen) <= set(law)

    def p_value(chances):
        counts, expected, rest_counts, rest_expected = [], [], 0, 0.0
        for key, chance in chances.items():
            if chance * 3000 >= 5:
                counts.append(seen.count(key))
                expected.append(chance * 3000)
            else:
                rest_counts += seen.count(key)
                rest_expected += chance * 3000
        if rest_expected > 0:
            counts.append(rest_counts)
            expected.append(rest_expected)
        scale = sum(counts) / sum(expected)
        return chisquare(counts, [one * scale for one in expected]).pvalue

    assert p_value(law) > 1e-3
    flat = {key: chance**0.6 for key, chance in law.items()}
    total = sum(flat.values())
    assert p_value({key: chance / total for key, chance in flat.items()}) < 1e-3


def test_a_cache_is_left_empty_by_a_batch_that_breaks_off(target):
    inputs, draft = batch(), make_draft(target)
    cache = DynamicCache(config=target.config)
    options = {"max_new_tokens": 12, "do_sample": False, "assistant_model": draft}
    first = target.generate(**inputs, **options)

    def fails(_ids, scores):
        if cache.get_seq_length() > inputs["input_ids"].shape[1] + 3:
            raise RuntimeError("in the middle")
        return scores

    with pytest.raises(RuntimeError, match="in the middle"):
        target.generate(**inputs, **{CACHE: cache}, logits_processor=LogitsProcessorList([fails]), **options)
    assert cache.get_seq_length() == 0
    assert target.generate(**inputs, **{CACHE: cache}, **options).tolist() == first.tolist()


def test_a_cache_that_was_passed_in_is_left_empty_and_serves_again(target):
    inputs, draft = batch(), make_draft(target)
    cache = DynamicCache(config=target.config)
    options = {"max_new_tokens": 12, "do_sample": False, "assistant_model": draft}
    first = target.generate(**inputs, **{CACHE: cache}, **options)
    assert cache.get_seq_length() == 0
    assert target.generate(**inputs, **{CACHE: cache}, **options).tolist() == first.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions and output_hidden_states"),
        ({"cache_implementation": "static"}, "layers of type StaticLayer"),
        ({"guidance_scale": 1.5}, "keeps a state for the batch as a whole"),
    ],
)
def test_what_a_batch_cannot_have_is_refused(target, draft, options, message):
    with pytest.raises(ValueError, match=message):
        target.generate(**batch(), max_new_tokens=5, do_sample=False, assistant_model=draft, **options)


def test_an_offloaded_cache_is_refused(target, draft):
    cache = DynamicCache(config=target.config)
    cache.offloading = True  # as on an accelerator, where its layers are on their way back while rows move
    with pytest.raises(ValueError, match="cache is offloaded"):
        target.generate(**batch(), **{CACHE: cache}, max_new_tokens=5, assistant_model=draft)


def test_a_streamer_is_refused_as_in_plain_generate(target, draft, smollm2_tokenizer):
    with pytest.raises(ValueError, match="batch"):
        target.generate(**batch(), max_new_tokens=5, assistant_model=draft, streamer=TextStreamer(smollm2_tokenizer))


def test_a_cache_that_holds_tokens_of_a_batch_is_refused(target, draft):
    cache = DynamicCache(config=target.config)
    inputs = batch((6, 6))
    target(inputs["input_ids"][:, :3], **{CACHE: cache})
    with pytest.raises(ValueError, match="holds 3 tokens of a batch"):
        target.generate(**inputs, **{CACHE: cache}, max_new_tokens=5, do_sample=False, assistant_model=draft)


def test_a_target_that_takes_positions_from_its_cache_is_refused():
    config = MBartConfig(
        vocab_size=VOCAB,
        d_model=32,
        encoder_layers=4,
        decoder_layers=4,
        decoder_attention_heads=4,
        decoder_ffn_dim=48,
        max_position_embeddings=128,
        is_decoder=True,
        is_encoder_decoder=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    target = MBartForCausalLM(config).eval()
    draft = make_draft(target, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48)
    with pytest.raises(ValueError, match="takes positions from its cache's length"):
        target.generate(**batch((9, 9)), max_new_tokens=8, do_sample=False, assistant_model=draft)
    one = {name: value[:1] for name, value in batch((9, 9)).items()}
    plain = target.generate(**one, max_new_tokens=8, do_sample=False)
    assert target.generate(**one, max_new_tokens=8, do_sample=False, assistant_model=draft).tolist() == plain.tolist()


@pytest.mark.parametrize("option", [{"encoder_repetition_penalty": 2.0}, {"encoder_no_repeat_ngram_size": 2}])
def test_several_answers_share_their_prompts_processors(target, option):
    options = {"do_sample": True, "top_k": 1, "num_return_sequences": 3, "max_new_tokens": 12, **option}
    inputs = batch((9, 9))
    plain = target.generate(**inputs, **options)
    drafted = target.generate(**inputs, assistant_model=make_draft(target), **options)
    assert drafted[0].tolist() == drafted[1].tolist() == drafted[2].tolist()  # one prompt, and no choice
    if plain[0].tolist() != plain[2].tolist():
        pytest.skip("this Transformers applies the processor to the first rows alone")
    assert drafted.tolist() == plain.tolist()

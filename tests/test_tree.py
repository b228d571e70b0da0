"""Trees of candidates: the likeliest prefixes, verified exactly, and chains where a target cannot take a tree."""

import copy
import itertools
import math

import pytest
import torch
from conftest import CACHE, COMMON, FAMILIES, VOCAB, make_draft, make_target, prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import DFLASH2
from test_batch import LENGTHS, batch
from test_decoding import stateless_draft_logits
from test_dflash2 import randomized
from test_sampling import DRAWS, ONE, PROMPT, enumerated_law, p_value, sampled_counts, temperature
from test_sampling import pair as pair  # a fixture
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LogitsProcessor,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    TextStreamer,
)
from transformers.utils import logging

from transformers_dflash import DFlashCandidateGenerator, DFlashDraftConfig, DFlashDraftModel, decoding, tree
from transformers_dflash.rollback import Rollback
from transformers_dflash.tree import DraftTree, best_first_tree

NEW_TOKENS = 40
GREEDY = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None}


def greedy(target, ids, draft=None, budget=None, **options):
    if draft is not None:
        draft.generation_config.tree_budget = budget
    return target.generate(ids, assistant_model=draft, **GREEDY | options)


# Which nodes


def prefix_of(tree: DraftTree, node: int) -> tuple[int, ...]:
    parent = tree.parents[node]
    return (*(prefix_of(tree, parent - 1) if parent else ()), tree.tokens[node])


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(0, 4), st.integers(1, 40), st.sampled_from([-math.inf, -1.5, -0.1]), st.booleans())
def test_the_nodes_are_the_likeliest_prefixes(data, num_places, budget, least, depends):
    """Of laws that depend on the place alone, and on the token before it too."""
    drawn = {}
    anchor, vocabulary = 7, [0, 1, 2]
    weights = st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3)
    for place in range(num_places):
        shared = data.draw(weights)
        for before in vocabulary if place else [anchor]:
            row = data.draw(weights) if depends else shared
            drawn[place, before] = {token: math.log(x / sum(row)) for token, x in enumerate(row)}
    asked = []

    def law(place, before):
        asked.append((place, before))
        ranked = sorted(vocabulary, key=lambda token: -drawn[place, before][token])
        return [drawn[place, before][token] for token in ranked], ranked

    chosen = best_first_tree(law, anchor, num_places, budget, least)
    every = {}
    for depth in range(1, num_places + 1):
        for prefix in itertools.product(vocabulary, repeat=depth):
            befores = (anchor, *prefix)
            every[prefix] = sum(drawn[place, befores[place]][token] for place, token in enumerate(prefix))
    best = sorted((score for score in every.values() if score >= least - 1e-9), reverse=True)[:budget]
    prefixes = [prefix_of(chosen, node) for node in range(len(chosen))]
    assert len(set(prefixes)) == len(prefixes)
    assert [every[prefix] for prefix in prefixes] == pytest.approx(best, abs=1e-6)
    assert chosen.probabilities == pytest.approx([math.exp(score) for score in best], abs=1e-6)
    assert all(parent <= node for node, parent in enumerate(chosen.parents))
    assert chosen.depths == [len(prefix) for prefix in prefixes]
    assert len(asked) <= 1 + len(chosen)


@pytest.mark.parametrize("options", [{}, {"suppress_tokens": [3, 4, 5, 9]}], ids=["bare", "processed"])
def test_with_a_selector_the_nodes_are_the_likeliest_prefixes_by_its_scores(target, options, monkeypatch):
    """Against every prefix's probability, scored token by token over the whole vocabulary."""
    draft = randomized(make_draft(target, **DFLASH2))
    draft.generation_config.num_assistant_tokens = 3
    logits, seen = [], []
    head = DFlashCandidateGenerator._logits
    monkeypatch.setattr(
        DFlashCandidateGenerator,
        "_logits",
        lambda self, hidden: logits.append((hidden, head(self, hidden))) or logits[-1][1],
    )
    monkeypatch.setattr(
        decoding.Verifier,
        "commit_tree",
        lambda self, ids, tree, out, whole=decoding.Verifier.commit_tree: (
            seen.append((ids, tree)) or whole(self, ids, tree, out)
        ),
    )
    answer = greedy(target, prompt(9), **options)
    assert torch.equal(greedy(target, prompt(9), draft, 25, **options), answer)
    checked = 0
    for (ids, chosen), (hidden, block_logits) in zip(seen, logits, strict=False):
        if len(chosen) < 25:
            continue
        every = {(): 0.0}
        for place in range(hidden.shape[1]):
            for prefix in [prefix for prefix in every if len(prefix) == place]:
                before = torch.tensor([prefix[-1] if prefix else int(ids[0, -1])])
                scores = draft.candidate_selector.score(block_logits[0, place, None], hidden[0, place, None], before)
                scores[0, options.get("suppress_tokens", [])] = -math.inf
                law = scores[0].log_softmax(-1).tolist()
                every |= {
                    (*prefix, token): every[prefix] + value for token, value in enumerate(law) if value > -math.inf
                }
        best = sorted((math.exp(value) for prefix, value in every.items() if prefix), reverse=True)[:25]
        assert chosen.probabilities == pytest.approx(best, abs=1e-5)
        prefixes = [prefix_of(chosen, node) for node in range(len(chosen))]
        assert [math.exp(every[prefix]) for prefix in prefixes] == pytest.approx(best, abs=1e-5)
        checked += 1
    assert checked >= 4


def test_a_place_whose_tokens_are_all_forbidden_ends_the_tree():
    laws = [([-0.1, -3.0], [4, 5]), ([math.nan, math.nan], [4, 5])]
    chosen = best_first_tree(lambda place, _before: laws[place], anchor=3, num_places=2, budget=20)
    assert (chosen.tokens, chosen.depths) == ([4, 5], [1, 1])


def test_a_node_sees_its_ancestors_and_itself():
    chosen = DraftTree(tokens=[5, 6, 7, 8], parents=[0, 0, 1, 3], depths=[1, 1, 2, 3])
    assert chosen.ancestors().int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
    assert chosen.children() == [{5: 1, 6: 2}, {7: 3}, {}, {8: 4}, {}]


# Verified exactly


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_output_is_plain_output(name, implementation, monkeypatch):
    """Past the sliding window, with branches that are not the draft's first choice."""
    if (name, implementation) == ("gpt_oss", "sdpa"):
        pytest.skip("its attention has sinks, which sdpa does not know")
    target = make_target(name)
    target.set_attn_implementation(implementation)
    draft, ids = make_draft(target), prompt(20)
    answer = greedy(target, ids)
    kept = []
    original = Rollback.straighten
    monkeypatch.setattr(
        Rollback, "straighten", lambda self, n, path: (kept.append(path[0].tolist()), original(self, n, path))[1]
    )
    for budget in (1, 5, 40):
        out = greedy(target, ids, draft, budget, return_dict_in_generate=True)
        assert torch.equal(out.sequences, answer)
    assert out.speculation.acceptance_length > 1.3
    assert any(rows != list(range(len(rows))) for rows in kept)
    for num_right in range(5):
        plant(monkeypatch, answer, num_right)
        out = greedy(target, ids, draft, 40, return_dict_in_generate=True)
        assert torch.equal(out.sequences, answer)
        assert set(out.speculation.acceptance_lengths[:-1]) == {num_right + 1}
        assert kept[-2] == [2 * place for place in range(num_right + 1)]


def plant(monkeypatch, answers, *num_right, original=DFlashCandidateGenerator.draft_trees):
    """Trees in which so many tokens of a row of `answers (b, n)` follow each other, each after a wrong sibling."""

    def draft_trees(self, rows, max_candidates=None):
        original(self, rows, max_candidates)  # the draft runs all the same
        trees = []
        for ids in rows:
            which = next(i for i, answer in enumerate(answers) if torch.equal(answer[: ids.shape[1]], ids[0]))
            depth = min(num_right[which], self._num_candidates(rows, max_candidates))
            tree = DraftTree()
            for place, token in enumerate(answers[which, ids.shape[1] :].tolist()[:depth]):
                tree.tokens += [(token + 1) % VOCAB, token]
                tree.parents += [2 * place] * 2
                tree.depths += [place + 1] * 2
                tree.probabilities += [0.5, 0.4]
            trees.append(tree)
        return trees

    monkeypatch.setattr(DFlashCandidateGenerator, "draft_trees", draft_trees)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_draft_logits_of_every_round_equal_a_stateless_recompute(targets, name, monkeypatch):
    """The context that the draft gets is that of the branch that was taken."""
    target = targets[name]
    draft, ids = make_draft(target), prompt(9)
    rounds = []
    plant(monkeypatch, greedy(target, ids), 3)
    original = DFlashCandidateGenerator.draft_trees
    logits = DFlashCandidateGenerator._logits

    def draft_trees(self, rows, max_candidates=None):
        rounds.append([rows[0]])
        return original(self, rows, max_candidates)

    def noted(self, hidden):
        rounds[-1].append(logits(self, hidden)[0])
        return rounds[-1][1][None]

    monkeypatch.setattr(DFlashCandidateGenerator, "draft_trees", draft_trees)
    monkeypatch.setattr(DFlashCandidateGenerator, "_logits", noted)
    out = greedy(target, ids, draft, 30, return_dict_in_generate=True)
    assert out.speculation.acceptance_length > 3
    with torch.no_grad():
        for ids, drafted in (one for one in rounds if len(one) == 2):
            expected = stateless_draft_logits(target, draft, ids, len(drafted))
            torch.testing.assert_close(drafted, expected, atol=1e-4, rtol=1e-4)


# Batches


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_row_of_a_batch_gets_its_tree(name, implementation):
    """Past the sliding window, from padded prompts, with rows that end early."""
    if (name, implementation) == ("gpt_oss", "sdpa"):
        pytest.skip("its attention has sinks, which sdpa does not know")
    target = make_target(name)
    target.set_attn_implementation(implementation)
    draft, inputs = make_draft(target), batch()
    for options in ({}, {"eos_token_id": list(range(8)), "pad_token_id": 0}):
        plain = target.generate(**inputs, **GREEDY | options)
        for budget in (1, 5, 40):
            draft.generation_config.tree_budget = budget
            out = target.generate(**inputs, assistant_model=draft, return_dict_in_generate=True, **GREEDY | options)
            assert torch.equal(out.sequences, plain)
    assert out.speculation.drafted > out.speculation.rounds * draft.config.num_candidates


@pytest.mark.parametrize("counts", [(0, 3, 5), (5, 0, 0), (1, 1, 1), (4, 5, 2)])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_go_their_own_ways_down_their_trees(targets, name, counts, monkeypatch):
    """What a row keeps is what its own way went through, and its draft's logits are those of the row alone."""
    target, inputs = targets[name], batch()
    draft, rounds = make_draft(target, sliding_window=5), []
    plain = target.generate(**inputs, **GREEDY)
    plant(monkeypatch, plain, *counts)
    drafting, logits = DFlashCandidateGenerator.draft_trees, DFlashCandidateGenerator._logits

    def draft_trees(self, rows, max_candidates=None):
        rounds.append([rows])
        return drafting(self, rows, max_candidates)

    def noted(self, hidden):
        rounds[-1].append(logits(self, hidden))
        return rounds[-1][1]

    monkeypatch.setattr(DFlashCandidateGenerator, "draft_trees", draft_trees)
    monkeypatch.setattr(DFlashCandidateGenerator, "_logits", noted)
    draft.generation_config.tree_budget = 30
    out = target.generate(**inputs, assistant_model=draft, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(out.sequences, plain)
    for row, lengths in enumerate(out.speculation.acceptance_lengths_by_sequence):
        assert set(lengths[:-1]) == {counts[row] + 1}
    checked = 0
    for rows, block in (one for one in rounds if len(one) == 2):
        for ids, own in zip(rows, block, strict=True):
            which = next(i for i, whole in enumerate(plain) if torch.equal(whole[: ids.shape[1]], ids[0]))
            kept = ids[:, inputs["input_ids"].shape[1] - LENGTHS[which] :]
            expected = stateless_draft_logits(target, draft, kept, len(own))
            torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-3)
            checked += 1
    assert checked >= 10


def test_a_rows_own_laws_shape_its_tree(target, draft):
    """Rows of a batch with processors that tell them apart: with another's, no node could be right."""
    inputs = batch()
    options = GREEDY | {"prefix_allowed_tokens_fn": lambda row, _ids: [3 + row, 9 + row, 15 + row]}
    draft.generation_config.tree_budget = 40
    out = target.generate(**inputs, assistant_model=draft, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, target.generate(**inputs, **options))
    assert out.speculation.acceptance_length > 1.5


def test_cache_after_generate_is_that_of_plain_generate(targets):
    for name in ("llama", "gemma3"):
        target, caches = targets[name], []
        for draft in (None, make_draft(target)):
            cache = DynamicCache(config=target.config)
            greedy(target, prompt(9), draft, 30, **{CACHE: cache})
            caches.append(cache)
        for plain, drafted in zip(caches[0].layers, caches[1].layers, strict=True):
            torch.testing.assert_close(drafted.keys, plain.keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(drafted.values, plain.values, atol=1e-4, rtol=1e-4)


class OddPlacesOnly(LogitsProcessor):
    """Looks at how many tokens there are, and at the last one."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, (input_ids.shape[1] + int(input_ids[0, -1])) % 2 :: 2] -= 3.0
        return scores


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"logits_processor": [OddPlacesOnly()]},
        {"eos_token_id": list(range(8))},
        {"eos_token_id": 5, "min_new_tokens": 9},
        {"max_new_tokens": 3},
        {"stopping_criteria": [lambda ids, _scores: torch.tensor([int(ids[0, -1]) % 5 == 0])]},
        {"attention_mask": (torch.arange(12) >= 4).long()[None]},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generate_options_give_plain_output(targets, name, options):
    target, ids = targets[name], prompt(12)
    answer = greedy(target, ids, **options)
    assert torch.equal(greedy(target, ids, make_draft(target), 30, **options), answer)


def test_scores_and_logits_are_those_of_plain_generate(target, draft):
    options = {
        "output_scores": True,
        "output_logits": True,
        "return_dict_in_generate": True,
        "repetition_penalty": 1.3,
    }
    plain, drafted = greedy(target, prompt(9), **options), greedy(target, prompt(9), draft, 30, **options)
    for name in ("scores", "logits"):
        ours, expected = torch.stack(getattr(drafted, name)), torch.stack(getattr(plain, name))
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_streams_and_goes_on_with_a_passed_cache(target, draft, smollm2_tokenizer, capsys):
    caches = [DynamicCache(config=target.config) for _ in range(2)]
    turns = [prompt(9)] * 2
    for _ in range(2):
        outs = [
            greedy(target, ids, assistant, 30, max_new_tokens=9, **{CACHE: cache})
            for ids, assistant, cache in zip(turns, (None, draft), caches, strict=True)
        ]
        assert torch.equal(*outs)
        turns = [torch.cat([out, prompt(4, seed=5)], dim=1) for out in outs]
    greedy(target, prompt(9), draft, 30, streamer=TextStreamer(smollm2_tokenizer, skip_prompt=True))
    streamed = capsys.readouterr().out
    assert streamed.strip() == smollm2_tokenizer.decode(greedy(target, prompt(9))[0, 9:]).strip()


def test_statistics_count_nodes_and_places(target, draft):
    draft.generation_config.num_assistant_tokens = 3
    out = greedy(target, prompt(9), draft, 20, return_dict_in_generate=True)
    statistics = out.speculation
    assert statistics.drafted > 10 * statistics.rounds
    assert len(statistics.acceptance_rates) <= 3
    assert sum(statistics.accepted_at) == statistics.accepted == NEW_TOKENS - 1 - statistics.rounds
    assert statistics.drafted_at[0] <= statistics.rounds


def test_a_threshold_leaves_unlikely_nodes_out(target, draft):
    drafted = []
    for threshold in (None, 0.01, 0.1):
        draft.generation_config.assistant_confidence_threshold = threshold
        out = greedy(target, prompt(9), draft, 40, return_dict_in_generate=True)
        assert torch.equal(out.sequences, greedy(target, prompt(9)))
        drafted.append(out.speculation.drafted / out.speculation.rounds)
    assert drafted[0] > drafted[1] > drafted[2]


# Sampling


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "alone", "cold", "one-by-one", "selector"])
def test_sampled_sequences_follow_the_law_of_the_target(pair, case, monkeypatch):
    target, draft = pair
    if case == "selector":
        sizes = {"selector_rank": 4, "selector_top_k": 3}
        draft = randomized(DFlashDraftModel(DFlashDraftConfig(**draft.config.to_dict() | sizes)).eval())
    value = 0.5 if case == "cold" else 1.0
    if case == "one-by-one":
        monkeypatch.setattr(decoding, "all_row_wise", lambda _processors: False)
    monkeypatch.setattr(draft.generation_config, "tree_budget", 6, raising=False)
    alone = ONE if case == "alone" else {}
    counts = sampled_counts(target, draft, top_k=0, temperature=value, **alone)
    assert p_value(counts, enumerated_law(target, temperature(value))) > 1e-3


@pytest.mark.slow
def test_a_verification_that_favours_nodes_is_seen(pair, monkeypatch):
    """A negative control: of two draws, the one that stays in the tree."""
    target, draft = pair
    monkeypatch.setattr(draft.generation_config, "tree_budget", 2, raising=False)
    original = decoding.Verifier.commit_tree

    def favouring(self, ids, tree, logits):
        likeliest = tree.tokens[0] if tree.tokens else 0
        monkeypatch.setattr(
            decoding.Verifier,
            "_choose",
            lambda _self, scores: torch.where(
                (draws := torch.multinomial(scores.softmax(-1), 2, replacement=True)).eq(likeliest).any(1),
                likeliest,
                draws[:, 0],
            ),
        )
        return original(self, ids, tree, logits)

    monkeypatch.setattr(decoding.Verifier, "commit_tree", favouring)
    counts = sampled_counts(target, draft, top_k=0)
    assert counts.sum() == DRAWS
    assert p_value(counts, enumerated_law(target, temperature(1.0))) < 1e-3


def test_the_pair_of_the_law_accepts_now_and_then(pair, monkeypatch):
    target, draft = pair
    monkeypatch.setattr(draft.generation_config, "tree_budget", 6, raising=False)
    torch.manual_seed(0)
    options = {"do_sample": True, "max_new_tokens": 60, "eos_token_id": None, "return_dict_in_generate": True}
    statistics = target.generate(PROMPT, assistant_model=draft, **options).speculation
    assert len(set(statistics.acceptance_lengths)) > 1


# Where there is no tree


@pytest.fixture
def warnings(monkeypatch):
    said = []
    monkeypatch.setattr(decoding.logger, "warning_once", lambda text: said.append(text))
    return said


def hybrid():
    layers = {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2}
    heads = {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**COMMON, **layers, **heads))


def bloom():
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 4, "n_head": 4, "initializer_range": 0.2}
    return BloomForCausalLM(BloomConfig(**shape, bos_token_id=1, eos_token_id=None, pad_token_id=0))


def gpt_neo():
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 4, "num_heads": 4, "initializer_range": 0.2}
    layers = {"attention_types": [[["global", "local"], 2]], "window_size": 8}
    return GPTNeoForCausalLM(GPTNeoConfig(**shape, **layers, bos_token_id=1, eos_token_id=None, pad_token_id=0))


SHAPE = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (hybrid, "LinearAttentionLayer"),
        (bloom, "counts positions by itself"),
        (gpt_neo, "makes its windows by itself"),
    ],
)
def test_targets_that_cannot_take_a_tree_get_chains_and_say_so(make, reason, warnings):
    torch.manual_seed(0)
    target = make().eval()
    draft, ids = make_draft(target, **SHAPE), prompt(9)
    out = greedy(target, ids, draft, 20, return_dict_in_generate=True)
    assert torch.equal(out.sequences, greedy(target, ids))
    assert len(warnings) == 1
    assert reason in warnings[0]
    assert out.speculation.drafted <= out.speculation.rounds * draft.config.num_candidates


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cache_implementation": "static"}, "StaticLayer"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "attentions or hidden states"),
        ({"sequence_bias": {(3, 4): 1.0}}, "looks at the tokens before"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_go_with_trees_gets_chains(target, draft, warnings, options, reason):
    drafted, plain = greedy(target, prompt(9), draft, 20, **options), greedy(target, prompt(9), **options)
    sequences = [out if isinstance(out, torch.Tensor) else out.sequences for out in (drafted, plain)]
    assert torch.equal(*sequences)
    assert reason in warnings[0]


def test_an_offloaded_cache_gets_chains(target):
    cache = DynamicCache(config=target.config)
    cache.offloading = True
    assert "is offloaded" in tree.why_no_tree(target, cache, CACHE, None)


@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_a_cache_that_knows_no_windows_gets_chains(targets, name, warnings):
    """Its layers keep everything, so that they do not say how far the target's own see."""
    target, ids = targets[name], prompt(30)
    out = greedy(target, ids, make_draft(target), 12, **{CACHE: DynamicCache()})
    assert torch.equal(out, greedy(target, ids))
    assert "not made for its config" in warnings[0]


def test_a_target_is_probed_once(target, draft, monkeypatch):
    monkeypatch.setattr(tree, "_takes_trees", type(tree._takes_trees)())
    probes = []
    original = tree._verifies_a_small_tree
    monkeypatch.setattr(tree, "_verifies_a_small_tree", lambda *given: probes.append(1) or original(*given))
    for _ in range(2):
        greedy(target, prompt(9), draft, 8)
    assert len(probes) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_the_probe_sees_a_mask_and_positions_that_have_no_effect(targets, name, monkeypatch):
    """Negative controls: what a class does that makes its own masks, or counts rows for positions."""
    assert tree._verifies_a_small_tree(targets[name], CACHE, torch.device("cpu"))
    half = copy.deepcopy(targets[name]).to(torch.bfloat16)
    assert tree._verifies_a_small_tree(half, CACHE, torch.device("cpu"))
    original = tree._seen
    with monkeypatch.context() as patch:
        patch.setattr(
            tree, "_seen", lambda ancestors, *given: original(ancestors.new_ones(ancestors.shape).tril(), *given)
        )
        assert not tree._verifies_a_small_tree(targets[name], CACHE, torch.device("cpu"))
        assert not tree._verifies_a_small_tree(half, CACHE, torch.device("cpu"))
    inputs = tree.tree_inputs
    monkeypatch.setattr(
        tree, "tree_inputs", lambda *given: inputs(*given) | {"position_ids": given[-1]["position_ids"]}
    )
    assert not tree._verifies_a_small_tree(targets[name], CACHE, torch.device("cpu"))


# The option


def test_the_budget_is_saved_with_the_draft_and_checked(target, draft, tmp_path):
    draft.generation_config.tree_budget = 12
    draft.save_pretrained(tmp_path)
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    assert loaded.generation_config.tree_budget == 12
    statistics = target.generate(
        prompt(9), assistant_model=loaded, do_sample=False, max_new_tokens=9, return_dict_in_generate=True
    ).speculation
    assert statistics.drafted > draft.config.num_candidates * statistics.rounds
    for wrong in (0, -1, 2.5, "many", True, 1_000_000):
        with pytest.raises(ValueError, match="tree_budget .* is no number of nodes"):
            greedy(target, prompt(9), draft, wrong)


@pytest.mark.real
def test_the_real_models_answer_is_plain_generates_in_fewer_rounds(smollm2, smollm2_draft):
    target, tokenizer = smollm2
    logging.set_verbosity_error()
    chat = [{"role": "user", "content": "A box holds 12 eggs. How many eggs are in 10 boxes?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    options = {"do_sample": False, "max_new_tokens": 48, "return_dict_in_generate": True}
    plain = target.generate(**inputs, **options)
    rounds = []
    try:
        for budget in (None, 24):
            smollm2_draft.generation_config.tree_budget = budget
            out = target.generate(**inputs, **options, assistant_model=smollm2_draft)
            assert torch.equal(out.sequences, plain.sequences)
            rounds.append(out.speculation.rounds)
    finally:
        smollm2_draft.generation_config.tree_budget = None
    assert rounds[1] < rounds[0]

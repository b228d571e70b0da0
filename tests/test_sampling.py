"""Sampling through generate follows the target's law: sampled sequences against the exactly enumerated law."""

import itertools
from contextlib import contextmanager

import pytest
import torch
from conftest import COMMON
from scipy.stats import chisquare
from transformers import LlamaConfig, LlamaForCausalLM

from transformers_dflash import DFlashDraftConfig, DFlashDraftModel, candidate_generator, decoding, verification

VOCAB, LENGTH, DRAWS, ROWS = 5, 4, 2400, 24
PROMPT = torch.tensor([[1, 2]])


@pytest.fixture(scope="module")
def pair():
    """A target and a draft of one layer each; blocks of 3, so that 4 new tokens take more than one round."""
    torch.manual_seed(3)
    small = COMMON | {"vocab_size": VOCAB, "num_hidden_layers": 1, "initializer_range": 0.3}
    target = LlamaForCausalLM(LlamaConfig(**small)).eval()
    fields = {"block_size": 3, "num_hidden_layers": 1, "target_layer_ids": [0], "initializer_range": 0.5}
    # Another rotary base than the target's: the two must differ enough for the broken verifications below to show.
    fields |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    draft = DFlashDraftModel(DFlashDraftConfig.from_target(target.config, VOCAB - 1, **fields)).eval()
    return target, draft


def enumerated_law(target, warp) -> torch.Tensor:
    """The probability of every continuation of LENGTH tokens, one number per sequence in lexicographic order."""
    sequences = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))
    ids = torch.cat([PROMPT.expand(len(sequences), -1), sequences], dim=1)
    with torch.no_grad():
        logits = target(ids).logits[:, PROMPT.shape[1] - 1 : -1].double()  # (sequences, LENGTH, V)
    law = torch.ones(len(sequences), dtype=torch.double)
    for place in range(LENGTH):
        rows = warp(ids[:, : PROMPT.shape[1] + place], logits[:, place]).softmax(-1)
        law *= rows.gather(1, sequences[:, place : place + 1])[:, 0]
    return law


def sampled_counts(target, draft, draws=DRAWS, rows=ROWS, **options) -> torch.Tensor:
    """How often each sequence comes out, `rows` drawn in one batch."""
    torch.manual_seed(0)
    counts = torch.zeros(VOCAB**LENGTH)
    places = VOCAB ** torch.arange(LENGTH - 1, -1, -1)
    fixed = {"do_sample": True, "max_new_tokens": LENGTH, "eos_token_id": None, "num_return_sequences": rows}
    for _ in range(draws // rows):
        ids = target.generate(PROMPT, assistant_model=draft, **fixed, **options)  # (rows, n)
        numbers = (ids[:, PROMPT.shape[1] :] * places).sum(1)
        counts += numbers.bincount(minlength=len(counts))
    return counts


def p_value(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Chi-square, sequences too rare for it lumped together."""
    expected = law * counts.sum()
    assert counts[law == 0].sum() == 0  # never a sequence that the target cannot say
    common = expected >= 5
    observed = torch.cat([counts[common].double(), counts[~common].sum()[None].double()])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    keep = expected > 1e-6
    observed, expected = observed[keep], expected[keep]
    return chisquare(observed, expected * observed.sum() / expected.sum()).pvalue


def temperature(value):
    return lambda _ids, scores: scores / value


def repetition(penalty):
    def warp(ids, scores):
        scores = scores.clone()
        picked = scores.gather(1, ids)
        return scores.scatter(1, ids, torch.where(picked < 0, picked * penalty, picked / penalty))

    return warp


def top_2(_ids, scores):
    return scores.masked_fill(scores < scores.topk(2).values[:, -1:], float("-inf"))


ONE = {"rows": 1, "draws": 1200}  # sequences alone in their call
CASES = {
    "plain": ({"top_k": 0}, {}, temperature(1.0)),
    "alone": ({"top_k": 0} | ONE, {}, temperature(1.0)),
    "temperature": ({"top_k": 0, "temperature": 0.5}, {}, temperature(0.5)),
    "draft-temperature": ({"top_k": 0}, {"temperature": 2.0}, temperature(1.0)),
    "confidence-threshold": ({"top_k": 0}, {"assistant_confidence_threshold": 0.5}, temperature(1.0)),
    "greedy-draft": ({"top_k": 0}, {"do_sample": False}, temperature(1.0)),
    "top-k": ({"top_k": 2}, {}, top_2),
    "repetition-penalty": ({"top_k": 0, "repetition_penalty": 1.8}, {}, repetition(1.8)),
}


@contextmanager
def drafting(draft, **options):
    before = {name: getattr(draft.generation_config, name) for name in options}
    draft.generation_config.update(**options)
    try:
        yield
    finally:
        draft.generation_config.update(**before)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_sampled_sequences_follow_the_law_of_the_target(pair, case):
    target, draft = pair
    options, draft_options, warp = CASES[case]
    with drafting(draft, **draft_options):
        counts = sampled_counts(target, draft, **options)
    assert p_value(counts, enumerated_law(target, warp)) > 1e-3


def picks_greedily(_self, scores):
    """A fault: candidates are chosen greedily, and verified as if they were drawn from q."""
    return scores.argmax(-1, keepdim=True)


def no_residual(p, _q, _candidate):
    """A fault: a refused candidate is replaced by a token drawn from p itself."""
    return p


def weights_that_grow(p_x, q_x):
    """A fault: a prefix that the target likes more than the draft does is weighted above 1."""
    return torch.cat([p_x.new_ones(1), (p_x / q_x).cumprod(0)])


def no_weights(p_x, q_x):
    """A fault: each candidate is weighted by itself, whatever stands before it."""
    return torch.cat([p_x.new_ones(1), (p_x / q_x).clamp(max=1)])


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["wrong-q", "no-residual", "weights-that-grow", "no-weights"])
def test_a_broken_verification_is_seen(pair, monkeypatch, fault):
    """Negative controls: with a known fault the same test must fail."""
    target, draft = pair
    if fault == "wrong-q":
        monkeypatch.setattr(candidate_generator.DFlashCandidateGenerator, "_pick", picks_greedily)
    elif fault == "no-residual":
        monkeypatch.setattr(verification, "residual", no_residual)
        monkeypatch.setattr(decoding, "residual", no_residual)
    else:
        weights = weights_that_grow if fault == "weights-that-grow" else no_weights
        monkeypatch.setattr(verification, "block_weights", weights)
    draws = 3 * DRAWS if fault == "weights-that-grow" else DRAWS  # it bends the law least
    counts = sampled_counts(target, draft, draws=draws, top_k=0)
    assert p_value(counts, enumerated_law(target, temperature(1.0))) < 1e-3


def test_a_seed_gives_the_same_sample_again(pair):
    target, draft = pair
    first, second = (sampled_counts(target, draft, draws=5, rows=1, top_k=0) for _ in range(2))
    assert torch.equal(first, second)


def test_sampled_drafts_are_accepted_now_and_then(pair):
    """The tests above mean something only if both outcomes of a verification happen."""
    target, draft = pair
    torch.manual_seed(0)
    runs = [
        target.generate(
            PROMPT, assistant_model=draft, do_sample=True, max_new_tokens=20, eos_token_id=None,
            return_dict_in_generate=True,
        ).speculation
        for _ in range(5)
    ]  # fmt: skip
    accepted, drafted = sum(run.accepted for run in runs), sum(run.drafted for run in runs)
    assert 0.1 < accepted / drafted < 0.9

"""Verification as pure functions: the law of what comes out is exactly the target's."""

import itertools

import pytest
import torch
from reference.verification import as_a_block, forgets_the_weight, law_of_output, lets_weights_grow, token_by_token
from scipy.stats import chisquare
from torch.utils._python_dispatch import TorchDispatchMode

from transformers_dflash.verification import (
    acceptance_probability,
    match_greedily,
    prefix_probabilities,
    residual,
    sample_block,
)

VOCAB = 5
SMALL, K = 3, 3  # of enumerations over all that can happen in a round


def laws(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    p, q = (2 * torch.randn(2, VOCAB)).softmax(-1)
    p[0] = 0  # a token that a warper took away
    return p / p.sum(), q


def law_of_next_token(p, q, candidate_law) -> torch.Tensor:
    """The law of a token that is proposed by `candidate_law` and verified with `q`, by enumeration."""
    out = torch.zeros(VOCAB)
    for x in range(VOCAB):
        candidate = torch.tensor(x)
        accept = acceptance_probability(p[x], None if q is None else q[x])
        out[x] += candidate_law[x] * accept
        out += candidate_law[x] * (1 - accept) * residual(p, q, candidate)
    return out


@pytest.mark.parametrize("seed", range(5))
def test_sampled_candidates_keep_the_law_of_the_target(seed):
    p, q = laws(seed)
    torch.testing.assert_close(law_of_next_token(p, q, candidate_law=q), p)


@pytest.mark.parametrize("token", range(VOCAB))
def test_greedy_candidates_keep_the_law_of_the_target(token):
    p, _ = laws(0)
    point = torch.zeros(VOCAB)
    point[token] = 1
    torch.testing.assert_close(law_of_next_token(p, None, candidate_law=point), p)


def test_the_wrong_q_bends_the_law():
    p, q = laws(0)
    wrong = (q + 1).softmax(-1)
    assert not torch.allclose(law_of_next_token(p, wrong, candidate_law=q), p, atol=1e-2)


def test_residual_where_laws_are_equal_is_the_law_itself():
    p, _ = laws(1)
    torch.testing.assert_close(residual(p, p, torch.tensor(2)), p)


@pytest.mark.parametrize(
    ("candidates", "target", "expected"),
    [([1, 2, 3], [1, 2, 3, 4], 3), ([1, 2, 3], [1, 9, 3, 4], 1), ([1], [2, 1], 0), ([], [5], 0)],
)
def test_greedy_match_counts_the_common_prefix(candidates, target, expected):
    assert match_greedily(torch.tensor(candidates, dtype=torch.long), torch.tensor(target)) == expected


# ---------------------------------------------------------------------------------------------------------------------
# block verification


def laws_by_prefix(seed: int, kind: str):
    """Two functions, p and q of a prefix: random laws over SMALL tokens."""
    generator = torch.Generator().manual_seed(seed)
    known: dict[tuple, list[float]] = {}

    def law(model, prefix):
        if (model, prefix) not in known:
            scores = 1.5 * torch.randn(SMALL, generator=generator, dtype=torch.double)
            if kind == "zeros":  # as after top-k; not the same tokens in both
                scores[torch.randint(SMALL, (1,), generator=generator)] = -torch.inf
            known[model, prefix] = scores.softmax(-1).tolist()
        return known[model, prefix]

    def p(prefix):
        return law("q" if kind == "sometimes equal" and len(prefix) != 1 else "p", prefix)

    def q(prefix):
        if kind == "greedy":
            return [float(x == len(prefix)) for x in range(SMALL)]
        return law("q", (len(prefix),) if kind == "independent places" else prefix)

    return p, q


def ours(candidates, p, q):
    """The outcomes of `sample_block`, from its parts."""
    drafted, p, q = torch.tensor(candidates), torch.tensor(p, dtype=torch.double), torch.tensor(q, dtype=torch.double)
    k = len(candidates)
    enough, weights = prefix_probabilities(drafted, p, q)
    outcomes = {}
    none_longer = 1.0
    for length in range(k, -1, -1):
        rest = p[k] if length == k else residual(weights[length] * p[length], q[length], drafted[length])
        chance = none_longer * float(enough[length - 1] if length else 1)
        outcomes |= {(length, token): chance * float(rest[token]) for token in range(SMALL)}
        none_longer -= chance
    return outcomes


def distance(law: dict, p) -> float:
    """How far the probability of any sequence is from the target's."""
    farthest = 0.0
    for sequence in itertools.product(range(SMALL), repeat=K + 1):
        exact = 1.0
        for place, token in enumerate(sequence):
            exact *= p(sequence[:place])[token]
        farthest = max(farthest, abs(law.get(sequence, 0.0) - exact))
    return farthest


KINDS = ["plain", "independent places", "zeros", "sometimes equal", "greedy"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verify", [token_by_token, as_a_block, ours])
def test_all_that_can_happen_in_a_round_adds_up_to_the_law_of_the_target(verify, kind):
    for seed in range(3):
        p, q = laws_by_prefix(seed, kind)
        law, _ = law_of_output(verify, p, q, SMALL, K)
        assert distance(law, p) < 1e-9


@pytest.mark.parametrize("verify", [token_by_token, as_a_block, ours])
def test_a_chain_may_end_by_what_was_drafted_before_its_end(verify):
    """As a confidence threshold ends it, where the places of a block depend on each other."""
    p, q = laws_by_prefix(0, "plain")
    law, _ = law_of_output(verify, p, q, SMALL, K, goes_on=lambda prefix: prefix[-1] != 1)
    assert distance(law, p) < 1e-9


@pytest.mark.parametrize("fault", [forgets_the_weight, lets_weights_grow])
def test_a_fault_in_block_verification_bends_the_law(fault):
    distances = []
    for seed in range(3):
        p, q = laws_by_prefix(seed, "plain")
        law, _ = law_of_output(fault, p, q, SMALL, K)
        distances.append(distance(law, p))
    assert max(distances) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_never_accepted_less_than_token_by_token(kind):
    gains = []
    for seed in range(5):
        p, q = laws_by_prefix(seed, kind)
        by_token, by_block, by_ours = (
            law_of_output(verify, p, q, SMALL, K)[1] for verify in (token_by_token, as_a_block, ours)
        )
        assert by_ours == pytest.approx(by_block, abs=1e-9)
        gains.append(by_block - by_token)
    assert min(gains) > -1e-12
    # A weight below 1 is what a later place can make up for: there is none that counts with a point mass, where no
    # ratio is above 1, and none if only the middle place has p other than q.
    assert max(gains) > 1e-2 if kind in ("plain", "independent places", "zeros") else max(gains) < 1e-9


def block(seed: int, k: int, vocab_size: int, sharpness: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    scores = sharpness * torch.randn(k + 1, vocab_size)
    q = (scores[:k] + torch.randn(k, vocab_size)).softmax(-1)
    return torch.multinomial(q, 1)[:, 0], scores.softmax(-1), q


@pytest.mark.parametrize("seed", range(3))
def test_blocks_are_sampled_as_the_reference_says(seed):
    candidates, p, q = block(seed, K, SMALL, 1.0)
    draws = 4000
    counts = torch.zeros(K + 1, SMALL, dtype=torch.double)
    for _ in range(draws):
        counts[sample_block(candidates, p, q)] += 1
    outcomes = as_a_block(candidates.tolist(), p.tolist(), q.tolist())
    expected = torch.tensor([[outcomes.get((i, x), 0.0) for x in range(SMALL)] for i in range(K + 1)]).double()
    assert counts[expected < 1e-9].sum() == 0
    kept = expected > 1e-9
    assert chisquare(counts[kept], expected[kept] / expected.sum() * draws).pvalue > 1e-3


def test_a_point_mass_is_what_no_law_stands_for():
    candidates, p, _ = block(0, 6, 20, 2.0)
    point = torch.nn.functional.one_hot(candidates, 20).float()
    torch.testing.assert_close(prefix_probabilities(candidates, p, None), prefix_probabilities(candidates, p, point))


@pytest.mark.parametrize("sharpness", [0.1, 2.0, 30.0])
def test_float32_decides_as_float64_does(sharpness):
    for seed in range(5):
        candidates, p, q = block(seed, 15, 2000, sharpness)
        enough, weights = prefix_probabilities(candidates, p, q)
        exactly = prefix_probabilities(candidates, p.double(), q.double())
        torch.testing.assert_close(weights.double(), exactly[1], atol=1e-4, rtol=0)
        # where w = 1 and p is nearly q, "enough" is a quotient of roundings, and longer prefixes are accepted anyway
        fewer = [(1 - chances.double()).flip(0).cumprod(0) for chances in (enough, exactly[0])]
        torch.testing.assert_close(*fewer, atol=1e-4, rtol=0)


def test_equal_laws_accept_whole_blocks():
    for seed in range(20):
        _, p, _ = block(seed, 8, 100, 2.0)
        candidates = torch.multinomial(p[:-1], 1)[:, 0]
        accepted, _ = sample_block(candidates, p, p[:-1].clone())
        assert accepted == 8


def test_a_candidate_that_the_target_cannot_say_ends_the_block():
    candidates, p, q = block(0, 4, VOCAB, 0.1)
    p[2] = 0
    p[2, (candidates[2] + 1) % VOCAB] = 1
    for seed in range(50):
        torch.manual_seed(seed)
        accepted, following = sample_block(candidates, p, q)
        assert accepted <= 2
        assert accepted < 2 or following == (candidates[2] + 1) % VOCAB


def test_a_candidate_without_a_law_is_replaced_by_the_targets():
    """Processors may leave a draft nothing to say: see `DFlashCandidateGenerator._pick`."""
    _, p, q = block(0, 3, VOCAB, 1.0)
    q[:1], q[1:] = p[:1], torch.nan
    counts = torch.zeros(VOCAB, dtype=torch.double)
    for _ in range(2000):
        candidates = torch.cat([torch.multinomial(q[0], 1), torch.tensor([1, 1])])
        accepted, following = sample_block(candidates, p, q)
        assert accepted == 1
        counts[following] += 1
    assert chisquare(counts, p[1].double() / p[1].double().sum() * 2000).pvalue > 1e-3


class ReadBacks(TorchDispatchMode):
    """Counts how often a number is read back from the device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("greedy", [False, True])
def test_nothing_is_read_back_from_the_device(greedy):
    candidates, p, q = block(0, 6, 20, 2.0)
    with ReadBacks() as reads:
        sample_block(candidates, p, None if greedy else q)
        match_greedily(candidates, p.argmax(-1))
    assert reads.count == 0


def test_a_block_without_candidates_draws_from_the_target():
    accepted, following = sample_block(torch.zeros(0, dtype=torch.long), torch.eye(VOCAB)[2:3], None)
    assert (int(accepted), int(following)) == (0, 2)

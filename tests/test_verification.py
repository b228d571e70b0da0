"""Verification as pure functions: the law of what comes out is exactly the target's."""

import pytest
import torch

from transformers_dflash.verification import acceptance_probability, match_greedily, residual, sample_speculatively

VOCAB = 5


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


def test_block_sampling_draws_as_many_accepted_tokens_as_the_law_says():
    """Whole blocks at once against the probability, by position, that all before it were accepted."""
    torch.manual_seed(0)
    k, draws = 3, 4000
    p, q = (1.5 * torch.randn(k + 1, VOCAB)).softmax(-1), (1.5 * torch.randn(k, VOCAB)).softmax(-1)
    lengths = torch.zeros(k + 1)
    last = torch.zeros(VOCAB)
    for _ in range(draws):
        candidates = torch.multinomial(q, 1)[:, 0]
        accepted, following = sample_speculatively(candidates, p, q)
        lengths[accepted] += 1
        if accepted == k:
            last[following] += 1
    accept = torch.minimum(p[:k], q).sum(-1)
    reach = torch.cat([torch.ones(1), accept.cumprod(0)])
    expected = reach - torch.cat([reach[1:], torch.zeros(1)])
    torch.testing.assert_close(lengths / draws, expected, atol=0.03, rtol=0)
    torch.testing.assert_close(last / last.sum(), p[k], atol=0.05, rtol=0)


def test_a_block_without_candidates_draws_from_the_target():
    accepted, following = sample_speculatively(torch.zeros(0, dtype=torch.long), torch.eye(VOCAB)[2:3], None)
    assert (int(accepted), int(following)) == (0, 2)

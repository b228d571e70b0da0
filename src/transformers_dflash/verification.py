"""How many candidates of a block the target accepts, and the token that follows them. Pure functions on tensors.

p is the target's law and q the draft's, both after their processors. Greedy verification keeps the candidates that the
target would have chosen. Sampled candidates are kept in a way that makes the result follow p exactly:

- Token by token, "speculative sampling" (arXiv 2211.17192, algorithm 1) keeps candidate x with probability
  min(1, p(x) / q(x)) and, at the first refusal, draws from max(0, p - q) divided by its sum.
- A block at once, "block verification" (arXiv 2403.10444) lets a prefix that p likes more than q does make up for a
  later candidate that p likes less. No valid way of verifying a chain accepts more on average.

A candidate that was chosen greedily has q = 1 on itself; then both accept alike.

Why block verification is exact. Let w_i be the share of the draws x_1 ... x_i from q that may pass for draws from p:
w_0 = 1 and w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)). Suppose that given x_1 ... x_i at least i candidates are
accepted with probability w_i; so it is for i = 0. At least i + 1 are with probability Σ_x min(q(x), w_i p(x)) over the
next place's laws, that is w_i - s_i with s_i = Σ_x max(0, w_i p(x) - q(x)), so that exactly i have to be with
probability s_i. A token drawn from max(0, w_i p - q) / s_i then adds to each x what min(q(x), w_i p(x)) lacks of
w_i p(x): whatever stood at the first i places, the next one follows p. Exactly i come about with probability s_i where
"i are enough" is decided with chance h_i = s_i / (1 - (w_i - s_i)), independently for every i, and the largest i is
taken.
"""

import torch


def match_greedily(candidates: torch.Tensor, target_tokens: torch.Tensor) -> torch.Tensor:
    """Length of the longest prefix of `candidates (k,)` that equals the target's choices `target_tokens (k + 1,)`."""
    return (candidates == target_tokens[:-1]).long().cumprod(0).sum()


def residual(p: torch.Tensor, q: torch.Tensor | None, candidate: torch.Tensor) -> torch.Tensor:
    """The law of the token that replaces a refused candidate: max(0, p - q) over its sum.

    Args:
        p: `(V,)`, times its weight in block verification.
        q: `(V,)`, or None where the candidate was chosen greedily (all of q lies on it).
        candidate: its id, a 0-d tensor.

    Returns:
        `(V,)`. Where p = q a refusal has probability 0; should rounding bring one about, p itself is returned.
    """
    rest = p.scatter(0, candidate[None], 0.0) if q is None else (p - q).clamp_(min=0)
    total = rest.sum()
    return torch.where(total > 0, rest / total.clamp(min=torch.finfo(p.dtype).tiny), p)


def acceptance_probability(p_x: torch.Tensor, q_x: torch.Tensor | None) -> torch.Tensor:
    """min(1, p(x) / q(x)) for candidates x, element by element; `q_x` None stands for 1."""
    return p_x if q_x is None else torch.where(q_x > 0, p_x / q_x, 0.0).clamp(max=1)


def block_weights(p_x: torch.Tensor, q_x: torch.Tensor | None) -> torch.Tensor:
    """w_0 ... w_k of block verification, `(k + 1,)`, from the candidates' probabilities `(k,)`.

    The logarithm of w is a walk that is held down at 0: a running sum less how far it has ever been above 0.
    """
    log_ratio = p_x.log() if q_x is None else torch.where(q_x > 0, p_x.log() - q_x.log(), -torch.inf)
    walk = torch.cat([log_ratio.new_zeros(1), log_ratio.cumsum(0)])
    return (walk - walk.cummax(0).values).exp()


def prefix_probabilities(
    candidates: torch.Tensor, p: torch.Tensor, q: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """How block verification decides about each prefix of a block, all at once.

    Args:
        candidates: `(k,)`.
        p: `(k + 1, V)`.
        q: `(k, V)`, or None for candidates that were chosen greedily.

    Returns:
        h_1 ... h_k `(k,)`, the chances that the first i candidates are enough, and w_0 ... w_k `(k + 1,)`.
    """
    place = torch.arange(len(candidates), device=p.device)
    weights = block_weights(p[place, candidates], None if q is None else q[place, candidates])
    # With a point mass, all of w p is spare but what lies on the candidate.
    w = weights[:-1]
    spare = w - weights[1:] if q is None else (w[:, None] * p[:-1] - q).clamp_(min=0).sum(-1)
    refused = 1 - w + spare  # the chance that no longer prefix is accepted
    enough = torch.where(refused > 0, spare / refused, 1.0)
    return torch.cat([enough[1:], weights[-1:]]), weights


def sample_block(
    candidates: torch.Tensor, p: torch.Tensor, q: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block verification, all positions at once.

    Args:
        candidates: `(k,)`, drawn from q (or chosen greedily).
        p: `(k + 1, V)`, the target's law at each candidate's place and after the last one.
        q: `(k, V)`, or None for candidates that were chosen greedily. A row without a law (nan, where processors left
            nothing to a draft) counts as zeros: its candidate is never accepted.

    Returns:
        How many candidates are accepted, and the token that follows them: 0-d tensors.
    """
    k = candidates.shape[0]
    if k == 0:
        return candidates.new_zeros(()), torch.multinomial(p[0], 1)[0]
    q = None if q is None else q.nan_to_num(nan=0.0)
    enough, weights = prefix_probabilities(candidates, p, q)
    is_enough = torch.rand(k, device=p.device) < enough
    accepted = (is_enough * torch.arange(1, k + 1, device=p.device)).amax()
    refused = accepted.clamp(max=k - 1)  # meaningful only where accepted < k
    # take and index_select, since brackets would read an index of no dimensions back from the device
    weighted = weights.take(refused) * p.index_select(0, refused)[0]
    q_row = None if q is None else q.index_select(0, refused)[0]
    rest = residual(weighted, q_row, candidates.take(refused))
    law = torch.where(accepted < k, rest, p[k])
    return accepted, torch.multinomial(law, 1)[0]


__all__ = [
    "acceptance_probability",
    "block_weights",
    "match_greedily",
    "prefix_probabilities",
    "residual",
    "sample_block",
]

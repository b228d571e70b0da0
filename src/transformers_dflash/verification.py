"""How many candidates of a block the target accepts, and the token that follows them. Pure functions on tensors.

p is the target's law and q the draft's, both after their processors. Greedy verification keeps the candidates that the
target would have chosen. Speculative sampling (arXiv 2211.17192, algorithm 1) keeps candidate x with probability
min(1, p(x) / q(x)) and, at the first refusal, draws from max(0, p - q) divided by its sum: the result follows p
exactly. A candidate that was chosen greedily has q = 1 on itself.
"""

import torch


def match_greedily(candidates: torch.Tensor, target_tokens: torch.Tensor) -> torch.Tensor:
    """Length of the longest prefix of `candidates (k,)` that equals the target's choices `target_tokens (k + 1,)`."""
    return (candidates == target_tokens[:-1]).long().cumprod(0).sum()


def residual(p: torch.Tensor, q: torch.Tensor | None, candidate: torch.Tensor) -> torch.Tensor:
    """The law of the token that replaces a refused candidate: max(0, p - q) over its sum.

    Args:
        p: `(V,)`.
        q: `(V,)`, or None where the candidate was chosen greedily (all of q lies on it).
        candidate: its id, a 0-d tensor.

    Returns:
        `(V,)`. Where p = q a refusal has probability 0; should rounding bring one about, p itself is returned.
    """
    if q is None:
        rest = p.clone()
        rest[candidate] = 0
    else:
        rest = (p - q).clamp_(min=0)
    total = rest.sum()
    return torch.where(total > 0, rest / total.clamp(min=torch.finfo(p.dtype).tiny), p)


def acceptance_probability(p_x: torch.Tensor, q_x: torch.Tensor | None) -> torch.Tensor:
    """min(1, p(x) / q(x)) for candidates x, element by element; `q_x` None stands for 1."""
    return p_x if q_x is None else torch.where(q_x > 0, p_x / q_x, 0.0).clamp(max=1)


def sample_speculatively(
    candidates: torch.Tensor, p: torch.Tensor, q: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling of one block, all positions at once.

    Args:
        candidates: `(k,)`, drawn from q (or chosen greedily).
        p: `(k + 1, V)`, the target's law at each candidate's place and after the last one.
        q: `(k, V)`, or None for candidates that were chosen greedily.

    Returns:
        How many candidates are accepted, and the token that follows them: 0-d tensors. Acceptance and the following
        token are drawn independently.
    """
    k = candidates.shape[0]
    if k == 0:
        return candidates.new_zeros(()), torch.multinomial(p[0], 1)[0]
    place = torch.arange(k, device=p.device)
    accept = torch.rand(k, device=p.device) < acceptance_probability(
        p[place, candidates], None if q is None else q[place, candidates]
    )
    accepted = accept.long().cumprod(0).sum()
    refused = accepted.clamp(max=k - 1)  # meaningful only where accepted < k
    rest = residual(p[refused], None if q is None else q[refused], candidates[refused])
    law = torch.where(accepted < k, rest, p[k])
    return accepted, torch.multinomial(law, 1)[0]


__all__ = ["acceptance_probability", "match_greedily", "residual", "sample_speculatively"]

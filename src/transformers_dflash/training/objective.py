"""What a draft is trained to do: guess the target's next tokens, the nearest ones first.

Place j of a block counts only if all places before it were right, so the places are weighted: by a fixed decay
exp(-j / γ) (DFlash, arXiv 2602.06036), or by how much each place adds to the expected acceptance length while the
draft is as sure as it is now (D-PACE, arXiv 2605.18810). A place's loss is the cross-entropy to the token that the
target wrote, or the divergence from the target's whole law (KL).

Logits of all places at once would need gigabytes, so they are made and left again in chunks, with their gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ..modeling_dflash import DFlashDraftModel
from ..target import Target, draft_logits
from .blocks import IGNORED

LOSSES = ("ce", "kl", "dpace")
_GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}  # the paper's, by block size


def needs_teacher(loss: str) -> bool:
    """Whether a loss takes the target's last hidden states, for its law."""
    return loss == "kl"


def decay_weights(num_places: int, gamma: float, device: torch.device) -> torch.Tensor:
    """exp(-j / γ) for places j = 0, 1, ..., as shares that sum to 1: `(K,)`."""
    weights = torch.exp(-torch.arange(num_places, device=device) / gamma)
    return weights / weights.sum()


def default_gamma(block_size: int) -> float:
    """γ of a block size: the paper's for 8, 10 and 16, and the line through 8 and 16 for others."""
    return _GAMMA.get(block_size, 1.0 + 0.375 * block_size)


def dpace_weights(confidence: torch.Tensor, supervised: torch.Tensor, alpha: float) -> torch.Tensor:
    """D-PACE's weights (arXiv 2605.18810, equations 7 and 8): w_j = Σ_{m >= j} Π_{i <= m} ((1 - α) q_i + α).

    Args:
        confidence: `(N, K)`, the draft's probability of the right token.
        supervised: bool `(N, K)`, True on a prefix of each row.
        alpha: smoothing, between 0 and 1.

    Returns:
        `(N, K)`, 0 where not supervised.
    """
    smooth = (1 - alpha) * confidence + alpha
    reached = smooth.masked_fill(~supervised, 0.0).cumprod(1)  # (N, K)
    return reached.flip(1).cumsum(1).flip(1)


@dataclass
class Objective:
    """The loss of a draft's guesses.

    Args:
        loss: `"ce"`, `"kl"` (both with the fixed decay) or `"dpace"` (cross-entropy with D-PACE's weights).
        gamma: of the decay, in places.
        alpha: smoothing of D-PACE.
        selector_weight: what a DFlash 2 draft's selector counts beside the rest.
        chunk: places whose logits exist at one time.
    """

    loss: str
    gamma: float
    alpha: float = 0.5
    selector_weight: float = 1.0
    chunk: int = 1024

    def __call__(
        self,
        draft: DFlashDraftModel,
        target: Target,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        previous: torch.Tensor,
        teacher: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sum of the blocks' losses.

        Args:
            draft: for its own head or selector, if it has them.
            target: for its head.
            hidden: `(N, K, H)`, the draft's hidden states of the places.
            labels: `(N, K)`.
            previous: `(N, K)`, the token before each place.
            teacher: `(N, K, H_target)`, the target's last hidden states that predict the labels; with `"kl"`.

        Returns:
            The sum over blocks (0-d, with gradient), and per place how many labels there were and how many were the
            draft's first choice, `(K,)` each.
        """
        supervised = labels != IGNORED
        right = torch.zeros(labels.shape[1], device=labels.device)

        def block_losses(rows: slice, states: torch.Tensor) -> torch.Tensor:
            wanted = labels[rows]
            logits = draft_logits(draft, target, states).float()  # (m, K, V)
            losses, possible = cross_entropy(logits, wanted)  # (m, K)
            if self.loss == "dpace":
                confidence = torch.exp(-losses.detach()) * possible
                weights = dpace_weights(confidence, supervised[rows], self.alpha)
            else:
                weights = decay_weights(wanted.shape[1], self.gamma, wanted.device) * supervised[rows]
            if needs_teacher(self.loss):
                losses = divergence(target.scale_logits(target.head(teacher[rows])).float(), logits)
            total = (losses * weights).sum()
            choice = logits
            if draft.config.selector_rank is not None:
                choice = selector_scores(draft, logits, states, previous[rows])  # (m, K, V)
                losses, _ = cross_entropy(choice, wanted)
                total = total + self.selector_weight * (losses * weights).sum()
            right.add_(((choice.detach().argmax(-1) == wanted) & supervised[rows]).sum(0))
            return total

        # Of the draft's own weights only those that stand after its hidden states get gradients here.
        names = ("lm_head", "candidate_selector")
        late = [parameter for name in names if (part := getattr(draft, name, None)) for parameter in part.parameters()]
        blocks = max(1, self.chunk // labels.shape[1])
        total = _InChunks.apply(block_losses, blocks, hidden, *late)
        return total, supervised.sum(0), right


class _InChunks(torch.autograd.Function):
    """A sum over rows of a function with large intermediates, its gradients computed chunk by chunk on the way."""

    @staticmethod
    def forward(ctx, function: Callable, rows_at_once: int, hidden: torch.Tensor, *parameters: torch.Tensor):
        wanted = [parameter for parameter in parameters if parameter.requires_grad]
        total = hidden.new_zeros((), dtype=torch.float32)
        gradient = torch.zeros_like(hidden)
        sums = [torch.zeros_like(parameter) for parameter in wanted]
        needs_gradient = ctx.needs_input_grad[2] or bool(wanted)
        for start in range(0, len(hidden), rows_at_once):
            rows = slice(start, start + rows_at_once)
            with torch.set_grad_enabled(needs_gradient):
                states = hidden[rows].detach().requires_grad_(needs_gradient)
                part = function(rows, states)
            total += part.detach()
            if needs_gradient:
                first, *others = torch.autograd.grad(part, [states, *wanted], allow_unused=True)
                gradient[rows] = first
                for kept, new in zip(sums, others, strict=True):
                    if new is not None:
                        kept += new
        ctx.gradients = [gradient, *(sums.pop(0) if p.requires_grad else None for p in parameters)]
        return total

    @staticmethod
    def backward(ctx, upstream: torch.Tensor):
        return None, None, *(None if one is None else one * upstream for one in ctx.gradients)


def cross_entropy(scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of scores `(m, K, V)` to labels `(m, K)`, and whether a label can be chosen at all.

    Returns:
        `(m, K)` each. The loss is 0 where there is no label, or where its score is -inf: outside a reduced vocabulary,
        or not among the tokens that a selector scores.
    """
    possible = (labels != IGNORED) & scores.detach().gather(-1, labels.clamp(min=0)[..., None])[..., 0].isfinite()
    chosen = labels.masked_fill(~possible, IGNORED).flatten()
    losses = F.cross_entropy(scores.flatten(0, 1), chosen, reduction="none", ignore_index=IGNORED)
    return losses.view_as(labels), possible


def divergence(target_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL from the draft's law to the target's, over the tokens that the draft can choose: `(..., V) -> (...)`."""
    reachable = logits.detach().isfinite()
    p = target_logits.masked_fill(~reachable, float("-inf")).log_softmax(-1)
    q = logits.log_softmax(-1)
    return torch.where(reachable, p.exp() * (p - q), 0.0).sum(-1)


def selector_scores(
    draft: DFlashDraftModel, logits: torch.Tensor, hidden: torch.Tensor, previous: torch.Tensor
) -> torch.Tensor:
    """A selector's scores `(m, K, V)` where every place follows the right token `previous (m, K)`."""
    scores = draft.candidate_selector.score(logits.flatten(0, 1), hidden.flatten(0, 1), previous.flatten())
    return scores.view_as(logits)


__all__ = [
    "LOSSES",
    "Objective",
    "cross_entropy",
    "decay_weights",
    "default_gamma",
    "divergence",
    "dpace_weights",
    "needs_teacher",
]

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
    chunk: int = 256

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

        def block_losses(rows: slice, states: torch.Tensor) -> tuple[torch.Tensor, list[tuple]]:
            wanted = labels[rows]
            logits = draft_logits(draft, target, states)  # (m, K, V)
            wanted_law = None
            if needs_teacher(self.loss):
                wanted_law = target.scale_logits(target.head(teacher[rows])).float()
            losses, gradient = losses_and_gradient(logits.detach().float(), wanted, wanted_law)  # (m, K), (m, K, V)
            if self.loss == "dpace":
                weights = dpace_weights(torch.exp(-losses), supervised[rows], self.alpha)
            else:
                weights = decay_weights(wanted.shape[1], self.gamma, wanted.device) * supervised[rows]
            total = (losses.masked_fill(losses.isinf(), 0.0) * weights).sum()
            pulled = [(logits, gradient.mul_(weights[..., None]).to(logits.dtype))]
            choice = logits
            if draft.config.selector_rank is not None:
                choice = selector_scores(draft, logits.float(), states, previous[rows])  # (m, K, V)
                selected = self.selector_weight * (cross_entropy(choice, wanted) * weights).sum()
                total = total + selected.detach()
                pulled.append((selected, torch.ones_like(selected)))
            right.add_(((choice.detach().argmax(-1) == wanted) & supervised[rows]).sum(0))
            return total, pulled

        # Of the draft's own weights only those that stand after its hidden states get gradients here.
        names = ("lm_head", "candidate_selector")
        late = [parameter for name in names if (part := getattr(draft, name, None)) for parameter in part.parameters()]
        blocks = max(1, self.chunk // labels.shape[1])
        total = _InChunks.apply(block_losses, blocks, hidden, *late)
        return total, supervised.sum(0), right


class _InChunks(torch.autograd.Function):
    """A sum over rows of a function with large intermediates, its gradients computed chunk by chunk on the way.

    For some rows the function gives its value and tensors of its graph, each with the value's gradient by it.
    """

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
                part, pulled = function(rows, states)
            total += part
            if needs_gradient:
                outputs, gradients = zip(*pulled, strict=True)
                first, *others = torch.autograd.grad(outputs, [states, *wanted], gradients, allow_unused=True)
                gradient[rows] = first
                for kept, new in zip(sums, others, strict=True):
                    if new is not None:
                        kept += new
        ctx.gradients = [gradient, *(sums.pop(0) if p.requires_grad else None for p in parameters)]
        return total

    @staticmethod
    def backward(ctx, upstream: torch.Tensor):
        return None, None, *(None if one is None else one * upstream for one in ctx.gradients)


def losses_and_gradient(
    scores: torch.Tensor, labels: torch.Tensor, target_scores: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss per place and its gradient by the scores, in few passes over the vocabulary.

    Args:
        scores: float32 `(m, K, V)`, without gradient; -inf for tokens outside a reduced vocabulary.
        labels: `(m, K)`.
        target_scores: float32 `(m, K, V)`, which is written over. With it the loss is the divergence from its law over
            the tokens that the draft can choose, without it the cross-entropy to the labels.

    Returns:
        `(m, K)` and `(m, K, V)`. A label that cannot be chosen has an infinite cross-entropy, and gradient 0; what
        places without a label have means nothing.
    """
    log_q = scores.log_softmax(-1)
    if target_scores is None:
        labels = labels.clamp(min=0)[..., None]
        losses = -log_q.gather(-1, labels)  # (m, K, 1)
        gradient = log_q.exp_().scatter_add_(-1, labels, torch.full_like(losses, -1.0)).mul_(losses.isfinite())
        return losses[..., 0], gradient
    log_p = target_scores.masked_fill_(scores.isneginf(), float("-inf")).log_softmax(-1)
    p = log_p.exp()
    ratio = log_p.sub_(log_q).nan_to_num_(nan=0.0)  # where neither law goes
    return (p * ratio).sum(-1), log_q.exp_().sub_(p)


def cross_entropy(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of scores `(m, K, V)` to labels `(m, K)`, with gradient: `(m, K)`.

    It is 0 where there is no label, or where its score is -inf, not being among the tokens that a selector scores.
    """
    possible = (labels != IGNORED) & scores.detach().gather(-1, labels.clamp(min=0)[..., None])[..., 0].isfinite()
    chosen = labels.masked_fill(~possible, IGNORED).flatten()
    losses = F.cross_entropy(scores.flatten(0, 1), chosen, reduction="none", ignore_index=IGNORED)
    return losses.view_as(labels)


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
    "dpace_weights",
    "losses_and_gradient",
    "needs_teacher",
]

"""The two parts that DFlash 2 adds to a draft: convolutions inside the block, and a selector of candidates.

A draft that predicts all slots at once does not see what it chose for the slot before. DFlash 2 mends this twice:
around every sublayer a short causal convolution mixes neighbouring slots, and after the head a selector walks the
block from left to right and prefers, among each slot's best tokens, those that follow well on the token chosen before.
"""

import torch
from torch import nn
from torch.nn import functional as F


class GroupedDynamicCausalConv(nn.Module):
    """Two causal convolutions over a block's slots, on a sublayer's input and on its output before the residual.

    out_i = Σ_t (base[t] + δ_i[t, group]) · x_{i-t}, zero before the block's first slot. The deltas δ of both come from
    one projection of the sublayer's (normed) input. Untrained, both are the identity.

    Args:
        hidden_size: H.
        kernel_size: k, slots that one output sees, itself included.
        group_size: neighbouring channels that share a delta.
    """

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int):
        super().__init__()
        self.kernel_size = kernel_size
        self.num_groups = hidden_size // group_size
        self.base_kernel = nn.Parameter(torch.empty(2, kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * kernel_size * self.num_groups, bias=False)

    def around(self, sublayer, hidden_states: torch.Tensor, num_blocks: int = 1) -> torch.Tensor:
        """Convolve each block of `hidden_states (b, N·B, H)`, apply the sublayer, convolve what it gives."""
        deltas = self.kernel_projection(hidden_states)
        deltas = deltas.view(-1, hidden_states.shape[1] // num_blocks, 2, self.kernel_size, self.num_groups)
        before = self._convolve(hidden_states, self.base_kernel[0], deltas[:, :, 0])  # deltas (b·N, B, 2, k, groups)
        return self._convolve(sublayer(before), self.base_kernel[1], deltas[:, :, 1])

    def _convolve(self, hidden_states: torch.Tensor, base: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
        """One convolution of `(b, N·B, H)` with a base kernel `(k, H)` and deltas `(b·N, B, k, groups)`."""
        grouped = hidden_states.reshape(*deltas.shape[:2], self.num_groups, -1)  # (b·N, B, groups, group_size)
        base = base.to(hidden_states.dtype).unflatten(-1, (self.num_groups, -1))  # (k, groups, group_size)
        out = (base[0] + deltas[:, :, 0, :, None]) * grouped
        for t in range(1, min(self.kernel_size, grouped.shape[1])):  # a last block may be shorter than the kernel
            earlier = F.pad(grouped[:, :-t], (0, 0, 0, 0, t, 0))  # zeros before the first slot
            out = out + (base[t] + deltas[:, :, t, :, None]) * earlier
        return out.reshape(hidden_states.shape)


class CandidateSelector(nn.Module):
    """Scores a slot's best tokens by the logit and by how well they follow on the token before.

    score = logit + Σ_r A[previous]_r · (P h)_r · B[candidate]_r, with codebooks A and B and a projection P of the
    slot's hidden state.

    Args:
        vocab_size: V.
        hidden_size: H.
        rank: r.
        top_k: K, tokens that are scored in a slot.
    """

    def __init__(self, vocab_size: int, hidden_size: int, rank: int, top_k: int):
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def score(self, logits: torch.Tensor, hidden_states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Selector scores of one slot over the whole vocabulary; tokens outside its K best get -inf.

        Args:
            logits: `(b, V)` float32.
            hidden_states: `(b, H)`.
            previous: `(b,)`, the token chosen for the slot before, or the anchor.

        Returns:
            `(b, V)` float32.
        """
        device = self.predecessor_codebook.device
        best, candidates = logits.topk(self.top_k, dim=-1)  # (b, K)
        projected = self.hidden_projection(hidden_states)  # (b, r)
        context = F.embedding(previous.to(device), self.predecessor_codebook) * projected  # (b, r)
        successors = F.embedding(candidates.to(device), self.successor_codebook)  # (b, K, r)
        follows = (successors * context[:, None]).sum(-1).to(logits.device, logits.dtype)  # (b, K)
        return torch.full_like(logits, float("-inf")).scatter(-1, candidates, best + follows)

    def score_pairs(
        self, logits: torch.Tensor, hidden_states: torch.Tensor, anchor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Selector scores of each slot's K best tokens after each of the K best of the slot before.

        Args:
            logits: `(k, V)` float32, of a block's slots.
            hidden_states: `(k, H)`.
            anchor: `(1,)`, the one token before the first slot.

        Returns:
            The K best tokens `(k, K)`, and scores `(k, K, K)` float32: slot, token before, token. All tokens before
            the first slot are the anchor.
        """
        device = self.predecessor_codebook.device
        best, candidates = logits.topk(self.top_k, dim=-1)  # (k, K)
        previous = torch.cat([anchor.expand(1, self.top_k), candidates[:-1]])  # (k, K)
        projected = self.hidden_projection(hidden_states)[:, None]  # (k, 1, r)
        context = F.embedding(previous.to(device), self.predecessor_codebook) * projected  # (k, K, r)
        successors = F.embedding(candidates.to(device), self.successor_codebook)  # (k, K, r)
        follows = (context @ successors.mT).to(logits.device, logits.dtype)  # (k, K, K)
        return candidates, best[:, None] + follows


__all__ = ["CandidateSelector", "GroupedDynamicCausalConv"]

"""The blocks that a draft is trained on: where they start, what they hold, and what each of their slots may see.

As at decode time, a block starts at an anchor, a token that is known, and all its other slots hold the mask token. A
slot sees the features of the tokens strictly before the anchor and the slots of its own block, and nothing else: not
the anchor's own features, which do not exist yet when the draft runs, and no other block or document.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..configuration_dflash import DFlashDraftConfig

IGNORED = -100  # the label of a slot that is not supervised, as in Transformers
# The name of `attend_blocks` among Transformers' attention functions, where one with "flash" in it means a kernel.
ATTENTION = "block_diffusion"
_PADDING = -1  # an anchor that stands for none


def possible_anchors(response_mask: torch.Tensor) -> torch.Tensor:
    """Where a block may start: at response tokens that are followed by another one of the same response.

    Args:
        response_mask: bool `(n,)`, True at tokens that the target wrote.

    Returns:
        Ascending indices `(m,)`.
    """
    return (response_mask[:-1] & response_mask[1:]).nonzero()[:, 0]


def sample_anchors(response_mask: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """At most `count` random anchors of a document, without repetition, ascending.

    Args:
        response_mask: bool `(n,)`.
        count: how many are wanted; all that are possible where there are fewer.
        generator: what the choice depends on.
    """
    anchors = possible_anchors(response_mask)
    if len(anchors) > count:
        anchors = anchors[torch.randperm(len(anchors), generator=generator)[:count]].sort().values
    return anchors


def block_labels(
    ids: torch.Tensor, response_mask: torch.Tensor, anchors: torch.Tensor, num_candidates: int
) -> torch.Tensor:
    """What the places of each block should predict: place j the token at anchor + 1 + j, up to the response's end.

    Args:
        ids, response_mask: `(n,)`, a document.
        anchors: `(N,)`.
        num_candidates: K, places of one block.

    Returns:
        `(N, K)`, `IGNORED` after the end of the response that the anchor lies in.
    """
    places = anchors[:, None] + 1 + torch.arange(num_candidates)  # (N, K)
    inside = places.clamp(max=len(ids) - 1)
    supervised = (response_mask[inside] & (places < len(ids))).long().cumprod(1).bool()
    return ids[inside].masked_fill(~supervised, IGNORED)


def pad_anchors(anchors: list[torch.Tensor]) -> torch.Tensor:
    """Anchors of several documents as one tensor `(b, N)`."""
    return torch.nn.utils.rnn.pad_sequence(anchors, batch_first=True, padding_value=_PADDING)


@dataclass
class Blocks:
    """The blocks of a batch of documents, side by side, as a draft's forward pass takes them.

    Args:
        ids: `(b, N·B)`: anchor and mask tokens.
        position_ids: `(b, n + N·B)`: those of the documents' tokens, then the slots' own.
        layout: what the slots may see.
    """

    ids: torch.Tensor
    position_ids: torch.Tensor
    layout: "BlockLayout"

    @classmethod
    def at(cls, anchors: torch.Tensor, input_ids: torch.Tensor, config: DFlashDraftConfig) -> "Blocks":
        """Blocks at `anchors (b, N)` of the documents `input_ids (b, n)`, which are padded on the right."""
        batch, num_blocks = anchors.shape
        anchors = anchors.clamp(min=0)  # a block that stands for none sees nothing but itself, and has no labels
        size = config.block_size
        ids = torch.full((batch, num_blocks, size), config.mask_token_id, device=input_ids.device)
        ids[:, :, 0] = input_ids.gather(1, anchors)
        slots = anchors[:, :, None] + torch.arange(size, device=anchors.device)  # (b, N, B)
        context = torch.arange(input_ids.shape[1], device=anchors.device).expand(batch, -1)
        return cls(
            ids=ids.flatten(1),
            position_ids=torch.cat([context, slots.flatten(1)], dim=1),
            layout=BlockLayout(anchors, input_ids.shape[1], size),
        )


class BlockLayout:
    """What each slot of many blocks may see, in place of an attention mask.

    A mask over all slots and keys would be mostly empty, since no block sees another. Blocks are therefore attended in
    groups of neighbours, each against the context before its last anchor and against its own slots.

    Args:
        anchors: `(b, N)`, ascending in every row.
        context_length: n, tokens of the padded documents.
        block_size: B.
    """

    def __init__(self, anchors: torch.Tensor, context_length: int, block_size: int):
        self.anchors = anchors
        self.context_length = context_length
        self.block_size = block_size
        num_blocks = anchors.shape[1]
        step = max(1, context_length // (2 * block_size))
        starts = range(0, num_blocks, step)
        # How much context a group sees, read back once for all layers.
        ends = [anchors[:, start : start + step].max() for start in starts]
        seen = torch.stack(ends).tolist() if ends else []
        self.groups = [(start, min(start + step, num_blocks), end) for start, end in zip(starts, seen, strict=True)]
        self.masks: dict[tuple, list[torch.Tensor]] = {}

    def mask(self, group: tuple[int, int, int], causal: bool, window: int | None) -> torch.Tensor:
        """Which keys the slots of a group of G blocks see: bool `(b, 1, G·B, context + G·B)`.

        The rule is that of `modeling_dflash.block_attention_mask`: slot j of a block at anchor a stands at a + j and
        sees key i where `|a + j - i| < window`.
        """
        first, last, end = group
        anchors = self.anchors[:, first:last]  # (b, G)
        slot = torch.arange(self.block_size, device=anchors.device)
        positions = (anchors[:, :, None] + slot).flatten(1)[:, :, None]  # (b, G·B, 1)
        starts = anchors.repeat_interleave(self.block_size, dim=1)[:, :, None]
        context = torch.arange(end, device=anchors.device)
        seen = context < starts  # (b, G·B, context)
        block = torch.arange(last - first, device=anchors.device).repeat_interleave(self.block_size)
        slots = slot.repeat(last - first)
        own = block[:, None] == block[None, :]  # (G·B, G·B)
        if causal:
            own = own & (slots[None, :] <= slots[:, None])
        if window is not None:
            seen = seen & (positions - context < window)
            own = own & ((slots[:, None] - slots[None, :]).abs() < window)
        return torch.cat([seen, own.expand(len(anchors), -1, -1)], dim=2)[:, None]

    def group_masks(self, causal: bool, window: int | None) -> list[torch.Tensor]:
        """The masks of all groups, made once for all layers of a kind."""
        if (causal, window) not in self.masks:
            self.masks[causal, window] = [self.mask(group, causal, window) for group in self.groups]
        return self.masks[causal, window]


def attend_blocks(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention of many blocks at once, on the interface of Transformers' attention functions.

    Args:
        module: a draft's attention.
        query: `(b, heads, N·B, d)`.
        key, value: `(b, kv_heads, n + N·B, d)`.
        attention_mask: a `BlockLayout`; any other mask is that of a single block and goes to scaled dot products.

    Returns:
        `(b, N·B, heads, d)`, and None for the weights.
    """
    if not isinstance(attention_mask, BlockLayout):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    layout, size, n = attention_mask, attention_mask.block_size, attention_mask.context_length
    outputs = []
    masks = layout.group_masks(kwargs.pop("is_causal"), kwargs.pop("sliding_window"))
    for (first, last, end), mask in zip(layout.groups, masks, strict=True):
        block = slice(n + first * size, n + last * size)
        output, _ = sdpa_attention_forward(
            module,
            query[:, :, first * size : last * size],
            torch.cat([key[:, :, :end], key[:, :, block]], dim=2),
            torch.cat([value[:, :, :end], value[:, :, block]], dim=2),
            mask,
            is_causal=False,
            **kwargs,
        )
        outputs.append(output)
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(ATTENTION, attend_blocks)


__all__ = [
    "ATTENTION",
    "IGNORED",
    "BlockLayout",
    "Blocks",
    "attend_blocks",
    "block_labels",
    "pad_anchors",
    "possible_anchors",
    "sample_anchors",
]

"""The draft's context cache: keys and values of committed tokens, and of nothing else.

The target's cache is Transformers' own and is rolled back with its `crop`. This one is ours because a draft's cache
differs from a decoder's: the block's keys and values are used once and forgotten, only the context persists, and the
context grows by as many tokens as the target accepted.
"""

import torch


class ContextLayer:
    """Context keys and values of one draft layer, in buffers that double when they are full.

    `offset` counts context tokens that a sliding layer has dropped for good, so that `length` is absolute.
    """

    def __init__(self, sliding_window: int | None):
        self.sliding_window = sliding_window
        self.length = 0  # committed context tokens, dropped ones included
        self.offset = 0  # tokens dropped from the buffers' front
        self.keys: torch.Tensor | None = None  # (b, kv_heads, capacity, d)
        self.values: torch.Tensor | None = None

    def update(self, keys: torch.Tensor, values: torch.Tensor, block_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[new context ; block]` and return what the block's queries may see.

        Args:
            keys, values: `(b, kv_heads, n + block_length, d)`.
            block_length: how many of the last positions are the block's and are overwritten by the next call.

        Returns:
            Keys and values `(b, kv_heads, visible, d)`: views, the block last.
        """
        start = self.length - self.offset
        end = start + keys.shape[2]
        if self.keys is None or end > self.keys.shape[2]:
            start, end = self._grow(keys, values)
        self.keys[:, :, start:end] = keys  # (b, kv_heads, n + B, d)
        self.values[:, :, start:end] = values
        self.length += keys.shape[2] - block_length
        first = 0
        if self.sliding_window is not None:  # slot 0 sees the window - 1 tokens before it
            first = max(0, self.length - self.offset - self.sliding_window + 1)
        return self.keys[:, :, first:end], self.values[:, :, first:end]

    def _grow(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[int, int]:
        """Move the context that can still be seen to larger buffers; returns where the new positions go."""
        keep_from = self.offset
        if self.sliding_window is not None:
            keep_from = max(self.offset, self.length - self.sliding_window + 1)
        kept = self.length - keep_from
        end = kept + keys.shape[2]
        shape = (keys.shape[0], keys.shape[1], max(256, 2 * end), keys.shape[3])
        for name, like in (("keys", keys), ("values", values)):
            buffer = like.new_empty(shape)
            if kept:
                old = getattr(self, name)[:, :, keep_from - self.offset : self.length - self.offset]
                buffer[:, :, :kept] = old
            setattr(self, name, buffer)
        self.offset = keep_from
        return kept, end


class ContextCache:
    """Keys and values of the committed tokens in every draft layer.

    Its length is the number of committed tokens but the anchor, once a draft has run: the anchor's features do not
    exist yet, and rejected candidates never enter.

    Args:
        layer_windows: the sliding window of each draft layer, None where it is full.
    """

    def __init__(self, layer_windows: list[int | None]):
        self.layers = [ContextLayer(window) for window in layer_windows]
        self.block_length = 0

    def __len__(self) -> int:
        """Committed context tokens."""
        return self.layers[0].length

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `transformers.Cache.update`, but the last `block_length` positions are not kept."""
        return self.layers[layer_idx].update(keys, values, self.block_length)

    def get_seq_length(self) -> int:
        """Committed context tokens, under the name that Transformers' caches use."""
        return len(self)


__all__ = ["ContextCache"]

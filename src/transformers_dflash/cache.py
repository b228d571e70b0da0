"""The draft's context cache: keys and values of committed tokens, and of nothing else.

The target's cache is Transformers' own and is rolled back with its `crop`. This one is ours because a draft's cache
differs from a decoder's: the block's keys and values are used once and forgotten, only the context persists, and the
context grows by as many tokens as the target accepted.

Rows of a batch accept different numbers of tokens. Each row's columns are kept at the right end, so that the block
follows them without a gap and distances between columns are distances between tokens; shorter rows have padding on the
left. The target's cache is laid out in the same way (see `rollback`), by the same rule.
"""

import torch


def right_aligned(held: int, valid: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    """Which columns to keep, so that every row's own ones end at the right.

    Args:
        held: columns before the new ones.
        valid: `(b,)`, how many of these, from the right, are the row's own.
        taken: `(b,)`, how many of the new columns, from the left, become the row's own.

    Returns:
        `(b, n)`, indices into the old and the new columns, for the longest row's n; what a shorter row has on its left
        is any column.
    """
    length = valid + taken  # (b,)
    longest = int(length.max())
    place = torch.arange(longest, device=valid.device) - (longest - length)[:, None]  # (b, n), < 0 in the padding
    return (held - valid[:, None] + place).clamp(min=0)  # the row's own old columns end where the new ones begin


def take_columns(states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """`(b, heads, n, d)` and indices `(b, m)` into n: `(b, heads, m, d)`."""
    return states.take_along_dim(columns.to(states.device)[:, None, :, None], dim=2)


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

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, block_length: int, columns: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[new context ; block]` and return what the block's queries may see.

        Args:
            keys, values: `(b, kv_heads, n + block_length, d)`.
            block_length: how many of the last positions are the block's and are overwritten by the next call.
            columns: `(b, m)`, which of the context's columns, new ones included, are kept; all where None.

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
        if columns is not None:
            end = self._keep(columns, end - block_length, block_length)
        first = 0
        if self.sliding_window is not None:  # slot 0 sees the window - 1 tokens before it
            first = max(0, self.length - self.offset - self.sliding_window + 1)
        return self.keys[:, :, first:end], self.values[:, :, first:end]

    def _keep(self, columns: torch.Tensor, stored: int, block_length: int) -> int:
        """Rearrange the context by `columns`, with the block behind it; returns where the block ends."""
        kept = min(columns.shape[1], stored)
        wanted = (columns[:, columns.shape[1] - kept :] - self.offset).clamp(min=0)
        for buffer in (self.keys, self.values):
            block = buffer[:, :, stored : stored + block_length].clone()
            buffer[:, :, :kept] = take_columns(buffer[:, :, :stored], wanted)
            buffer[:, :, kept : kept + block_length] = block
        self.length = columns.shape[1]
        self.offset = self.length - kept
        return kept + block_length

    def select_rows(self, rows: torch.Tensor) -> None:
        """Keep some rows of the batch."""
        if self.keys is not None:
            self.keys, self.values = self.keys[rows.to(self.keys.device)], self.values[rows.to(self.keys.device)]

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
        self.columns: torch.Tensor | None = None  # (b, n) for the next update, where rows differ

    def __len__(self) -> int:
        """Committed context tokens."""
        return self.layers[0].length

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `transformers.Cache.update`, but the last `block_length` positions are not kept."""
        return self.layers[layer_idx].update(keys, values, self.block_length, self.columns)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Keep some rows of the batch, by their indices `(m,)`."""
        for layer in self.layers:
            layer.select_rows(rows)

    def get_seq_length(self) -> int:
        """Committed context tokens, under the name that Transformers' caches use."""
        return len(self)


__all__ = ["ContextCache", "right_aligned", "take_columns"]

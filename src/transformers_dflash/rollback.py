"""Taking rejected candidates out of a target's cache, whatever its layers are.

Attention layers are cropped. A recurrent state cannot be: it has every token of the block in it. Such a layer is put
back as it was before the block, and the target runs over the accepted tokens once more ("replay"). That is right for
any kind of layer that can be copied, at the cost of a second, shorter forward in rounds that reject something.

Rows of a batch keep different numbers of a block's tokens. The cache is then what it would be had the prompts been of
these lengths from the start: every row ends at the right, shorter ones have padding on the left. This moves columns of
the whole cache, one read and one write of it beside the read of the attention. Leaving gaps instead, or rows that
begin at the left, would need no move, but a sliding window counts columns, and so do layers that drop what no window
sees.
"""

import copy
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from .cache import take_columns


class Rollback:
    """Rolls a target's cache back after each block. To be made after the prefill, when layers know what they hold.

    Args:
        cache: the target's cache.
    """

    def __init__(self, cache: Cache):
        self.layers = cache.layers
        self.cropped = [layer for layer in cache.layers if layer.is_croppable]
        self.copied = [layer for layer in cache.layers if not layer.is_croppable]
        self.copies: list[dict[str, Any]] = []
        self._recording = [layer for layer in self.cropped if "record_past" in vars(layer)]
        for layer in self._recording:  # only now, so that sliding layers never hold the whole prompt
            layer.activate_past_recording()

    @property
    def needs_replay(self) -> bool:
        """Whether some layer cannot be cropped, so that a block that was not accepted whole is run again."""
        return len(self.copied) > 0

    def before_block(self) -> None:
        """Copy what cannot be cropped."""
        self.copies = [_copy_state(layer) for layer in self.copied]

    def after_block(self, num_rows: int, num_committed: int) -> bool:
        """Take rejected rows out.

        Args:
            num_rows: tokens of the block that the target ran over.
            num_committed: how many of them, from the first, stay.

        Returns:
            Whether the committed tokens must be run again: then the cache is as it was before the block.
        """
        if not self.needs_replay or num_committed == num_rows:
            for layer in self.cropped:
                layer.crop(num_committed - num_rows)  # 0 trims sliding layers
            return False
        for layer in self.cropped:
            layer.crop(-num_rows)
        for layer, state in zip(self.copied, self.copies, strict=True):
            vars(layer).update(state)
        return True

    def after_ragged_block(self, columns: torch.Tensor, num_columns: int) -> None:
        """Keep different tokens in each row.

        Args:
            columns: `(b, n)`, which of the cache's columns, the block's included, become its new ones.
            num_columns: how many there were, those that sliding layers no longer hold included.
        """
        for layer in self.layers:
            if not layer.is_initialized:  # it shares another one's keys
                continue
            kept = columns
            if layer.is_sliding:
                kept = columns[:, max(0, columns.shape[1] - layer.sliding_window + 1) :]
                layer.cumulative_length = columns.shape[1]
            kept = (kept - (num_columns - layer.keys.shape[2])).clamp(min=0)
            layer.keys, layer.values = take_columns(layer.keys, kept), take_columns(layer.values, kept)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Keep some rows of the batch, by their indices `(m,)`."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.batch_select_indices(rows.to(layer.keys.device))

    def empty(self) -> None:
        """Forget everything, so that a cache whose rows have left it is not taken for a whole one."""
        for layer in self.layers:
            layer.keys = layer.values = None
            layer.is_initialized = False
            if layer.is_sliding:
                layer.cumulative_length = 0

    def close(self) -> None:
        """Leave the cache's layers as plain generate leaves them."""
        for layer in self._recording:
            layer.record_past = False


def takes_ragged_rows(cache: Cache) -> bool:
    """Whether rows of this cache can keep different numbers of tokens: plain dynamic layers, sliding or not."""
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)


def _copy_state(layer: Any) -> dict[str, Any]:
    """A layer's attributes, with copies of all that a forward changes in place."""
    # A dynamic layer grows by new tensors, so the old ones can stand as they are.
    untouched = ("keys", "values") if isinstance(layer, DynamicLayer) else ()
    return {name: value if name in untouched else copy.deepcopy(value) for name, value in vars(layer).items()}


__all__ = ["Rollback", "takes_ragged_rows"]

"""Taking rejected candidates out of a target's cache, whatever its layers are.

Attention layers are cropped. A recurrent state cannot be: it has every token of the block in it. It is put back as it
was before the block, and its layer alone runs over the accepted tokens once more, with projections that are known (see
`recurrence`). Layers that are neither croppable nor recurrent, such as static sliding ones, are put back too, and then
the whole target runs again ("replay"): right for any layer that can be copied, at the cost of a second and shorter
forward in rounds that reject something.

Rows of a batch keep different numbers of a block's tokens. The cache is then what it would be had the prompts been of
these lengths from the start: every row ends at the right, shorter ones have padding on the left. This moves columns of
the whole cache, one read and one write of it beside the read of the attention. Leaving gaps instead, or rows that
begin at the left, would need no move, but a sliding window counts columns, and so do layers that drop what no window
sees.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
    QuantizedLayer,
)

from .cache import take_columns
from .recurrence import Recurrence

RECURRENT_LAYERS = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)


class Rollback:
    """Rolls a target's cache back after each block. Use as a context manager: leaving it removes its hooks and
    lets the cache be as plain `generate` leaves it. A block that was not decided, since something raised before it
    was, is taken out. After a batch, whose rows may have left, the cache is empty.

    Args:
        cache: the target's cache.
        mixers: the target's modules that update recurrent states, by the index of the cache's layer.
        batch_size: rows of the batch.
    """

    def __init__(self, cache: Cache, mixers: dict[int, nn.Module], batch_size: int = 1):
        self.cache = cache
        self.mixers = mixers
        self.batch_size = batch_size
        self.undecided = 0  # rows of a block that the cache holds and nothing has decided on
        self.layers = cache.layers
        self.cropped: list[Any] = []
        self.copied: list[Any] = []
        self.copies: list[dict[str, Any]] = []
        self.recurrences: list[Recurrence] = []  # of the copied layers, or none
        self._recording: list[Any] = []

    def __enter__(self) -> "Rollback":
        return self

    def __exit__(self, *_error) -> None:
        for recurrence in self.recurrences:
            recurrence.close()
        if self.batch_size > 1:
            self._empty()
        elif self.undecided:
            self._put_back(self.undecided)
        for layer in self._recording:  # as plain generate leaves a cache
            layer.record_past = False

    def begin(self) -> None:
        """To be called after the prefill, when layers know what they hold."""
        self.layers = self.cache.layers
        self.cropped = [layer for layer in self.layers if _is_croppable(layer)]
        places = [place for place, layer in enumerate(self.layers) if not _is_croppable(layer) and _holds(layer)]
        self.copied = [self.layers[place] for place in places]
        if all(place in self.mixers and type(self.layers[place]) in RECURRENT_LAYERS for place in places):
            self.recurrences = [Recurrence(self.mixers[place]) for place in places]
        self._recording = [layer for layer in self.cropped if "record_past" in vars(layer)]
        for layer in self._recording:  # only now, so that sliding layers never hold the whole prompt
            layer.activate_past_recording()

    def before_block(self) -> None:
        """Copy what cannot be cropped."""
        self.copies = [_copy_state(layer) for layer in self.copied]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Remember what the block's forward, made inside, computes; no other forward of the target may get in."""
        for recurrence in self.recurrences:
            recurrence.recording = True
        try:
            yield
        finally:
            for recurrence in self.recurrences:
                recurrence.recording = False

    def note_block(self, num_rows: int) -> None:
        """To be called when the target has run over a block of `num_rows`."""
        self.undecided = num_rows

    def straighten(self, num_rows: int, path: torch.Tensor) -> None:
        """Move what a tree's path went through to the front of a block of `num_rows`, so that the block is a chain.

        Args:
            path: `(b, m)`, rows of the block.
        """
        if bool((path == torch.arange(path.shape[1])).all()):
            return
        for layer in self.layers:
            if layer.is_initialized:  # else it shares another one's keys
                for states in (layer.keys, layer.values):
                    tail = states[:, :, -num_rows:]
                    tail[:, :, : path.shape[1]] = take_columns(tail, path)

    def after_block(self, num_rows: int, num_committed: int) -> bool:
        """Take rejected rows out.

        Args:
            num_rows: tokens of the block that the target ran over.
            num_committed: how many of them, from the first, stay.

        Returns:
            Whether the committed tokens must be run again: then the cache is as it was before the block.
        """
        if bool(self.copied) and num_committed < num_rows and not self.recurrences:
            self._put_back(num_rows)
            return True
        self.undecided = 0
        for layer in self.cropped:
            layer.crop(num_committed - num_rows)  # 0 trims sliding layers
        if num_committed == num_rows:
            return False
        for place, (layer, state) in enumerate(zip(self.copied, self.copies, strict=True)):
            if self.recurrences and isinstance(layer, DynamicLayer):  # it has keys beside its state
                kept = layer.keys.shape[2] - (num_rows - num_committed)
                state |= {"keys": layer.keys[:, :, :kept], "values": layer.values[:, :, :kept]}
            vars(layer).update(state)
            if self.recurrences:
                self.recurrences[place].run_again(num_committed)
        return False

    def _put_back(self, num_rows: int) -> None:
        """Let the cache be as it was before a block of `num_rows`."""
        for layer in self.cropped:
            layer.crop(-num_rows)
        for layer, state in zip(self.copied, self.copies, strict=True):
            vars(layer).update(state)
        self.undecided = 0

    def after_ragged_block(self, columns: torch.Tensor, num_columns: int) -> None:
        """Keep different tokens in each row.

        Args:
            columns: `(b, n)`, which of the cache's columns, the block's included, become its new ones.
            num_columns: how many there were, those that sliding layers no longer hold included.
        """
        self.undecided = 0
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

    def _empty(self) -> None:
        """Forget everything, so that a cache whose rows have left it is not taken for a whole one."""
        for layer in self.layers:
            layer.keys = layer.values = None
            layer.is_initialized = False
            if layer.is_sliding:
                layer.cumulative_length = 0


def takes_ragged_rows(cache: Cache) -> bool:
    """Whether rows of this cache can keep different numbers of tokens: plain dynamic layers, sliding or not."""
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)


def _is_croppable(layer: Any) -> bool:
    """Quantised layers say so in Transformers before 5.24, and forget then to count what is left."""
    return layer.is_croppable and not isinstance(layer, QuantizedLayer)


def _holds(layer: Any) -> bool:
    """Whether a layer holds anything; some families keep an empty recurrent one for layers that are none."""
    return type(layer) is not LinearAttentionLayer or layer.device is not None


def _copy_state(layer: Any) -> dict[str, Any]:
    """A layer's attributes, with copies of all that a forward changes in place."""
    # A dynamic layer grows by new tensors, so the old ones can stand as they are.
    untouched = ("keys", "values") if isinstance(layer, DynamicLayer) else ()
    return {name: value if name in untouched else copy.deepcopy(value) for name, value in vars(layer).items()}


__all__ = ["Rollback", "takes_ragged_rows"]

"""Taking rejected candidates out of a target's cache, whatever its layers are.

Attention layers are cropped. A recurrent state cannot be: it has every token of the block in it. Such a layer is put
back as it was before the block, and the target runs over the accepted tokens once more ("replay"). That is right for
any kind of layer that can be copied, at the cost of a second, shorter forward in rounds that reject something.
"""

import copy
from typing import Any

from transformers.cache_utils import Cache, DynamicLayer


class Rollback:
    """Rolls a target's cache back after each block. To be made after the prefill, when layers know what they hold.

    Args:
        cache: the target's cache.
    """

    def __init__(self, cache: Cache):
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

    def close(self) -> None:
        """Leave the cache's layers as plain generate leaves them."""
        for layer in self._recording:
            layer.record_past = False


def _copy_state(layer: Any) -> dict[str, Any]:
    """A layer's attributes, with copies of all that a forward changes in place."""
    # A dynamic layer grows by new tensors, so the old ones can stand as they are.
    untouched = ("keys", "values") if isinstance(layer, DynamicLayer) else ()
    return {name: value if name in untouched else copy.deepcopy(value) for name, value in vars(layer).items()}


__all__ = ["Rollback"]

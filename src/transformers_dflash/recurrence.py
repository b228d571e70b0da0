"""Running a recurrent layer again over the first rows of a block, without its projections.

A rejected token cannot be taken out of a recurrent state; the state is put back as it was before the block and the
layer runs again over the rows that stay. What is costly in that, the projections of the rows, was computed by the
block's forward already: it is remembered and taken from there, so that only the convolution and the recurrence run, in
the model's own code, whatever its family's arithmetic is. No weight is read but the small ones of these.
"""

import threading
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_BY_ROW = ("attention_mask", "hidden_states")  # what of a mixer's arguments has an entry per token


class Recurrence:
    """The module that updates one recurrent layer of a cache, with what its last block went through.

    Only forwards of the thread that made it, while `recording` is set, are remembered. `close` removes every hook.

    Args:
        mixer: called with hidden states `(b, n, H)`, the cache and masks; its output is not used here.
    """

    def __init__(self, mixer: nn.Module):
        self.mixer = mixer
        self.recording = False
        self.thread = threading.get_ident()
        self.arguments: tuple[tuple, dict[str, Any]] = ((), {})
        self.projections: dict[int, torch.Tensor | None] = {}  # by the weight's identity: (b, n, out)
        self._weights: list[Any] = []  # kept, since one that is offloaded goes, and another takes its identity
        self._hooks = [mixer.register_forward_pre_hook(self._remember_call, with_kwargs=True)]
        for module in mixer.modules():
            if isinstance(module, nn.Linear):
                self._hooks.append(module.register_forward_hook(self._remember_projection))

    def _remember_call(self, _module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> None:
        # While a hook comes or goes, another thread's forward may see it before torch notes that it takes `kwargs`.
        if kwargs is not None and self.recording and threading.get_ident() == self.thread:
            self.arguments, self.projections, self._weights = (args, kwargs), {}, []

    def _remember_projection(self, module: nn.Module, _args: tuple, output: torch.Tensor) -> None:
        if self.recording and threading.get_ident() == self.thread:
            weight = module.weight
            self._weights.append(weight)
            # Called twice, it is not known which output belongs where.
            self.projections[id(weight)] = None if id(weight) in self.projections else output

    def run_again(self, num_rows: int) -> None:
        """Update the cache's layer, which stands as it did before the block, with the block's first rows."""
        args, kwargs = self.arguments
        block_rows = (args[0] if args else kwargs["hidden_states"]).shape[1]
        first = partial(_first_rows, num_rows=num_rows, block_rows=block_rows)
        with _Remembered(self.projections, num_rows):
            self.mixer(
                *(first(one) for one in args),
                **{name: first(one) if name in _BY_ROW else one for name, one in kwargs.items()},
            )

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


class _Remembered(TorchFunctionMode):
    """Linear layers whose output is known give it; of this thread alone."""

    def __init__(self, projections: dict[int, torch.Tensor | None], num_rows: int):
        super().__init__()
        self.projections = projections
        self.num_rows = num_rows

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear:
            known = self.projections.get(id(args[1]))
            if known is not None:
                return known[:, : self.num_rows]
        return func(*args, **(kwargs or {}))


def _first_rows(value: Any, num_rows: int, block_rows: int) -> Any:
    """Rows of the block's hidden states `(b, n, H)` or of its mask `(b, n)`; anything else as it is."""
    is_of_block = isinstance(value, torch.Tensor) and value.dim() in (2, 3) and value.shape[1] == block_rows
    return value[:, :num_rows] if is_of_block else value


__all__ = ["Recurrence"]

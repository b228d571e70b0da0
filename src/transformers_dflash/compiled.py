"""The target's forward over a block as one compiled graph, where plain `generate` compiles its single steps.

That is so with a static cache on an accelerator (see `GenerationMixin._valid_auto_compile_criteria`). Every compiled
block has the same number of rows, so that it is compiled once: a shorter one gets rows behind it that are thrown away.

The graph is made by `torch.compile` from a function of this module, to which the model and the recorder of taps are
arguments: what Dynamo keeps, it keeps with that function, and the next generation finds it there.
"""

from typing import Any
from weakref import WeakSet

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported, UserError
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput, logging

from .rollback import Rollback
from .target import TapRecorder

logger = logging.get_logger(__name__)
_uncompilable: WeakSet[PreTrainedModel] = WeakSet()  # targets that are no single graph: found out once, which is slow


class CompiledForward:
    """A target's forward over blocks of one length; its taps go to the recorder.

    Args:
        model: the target.
        taps: the recorder whose hooks are on it.
        num_rows: of a block.
        config: of the compilation; None for that of plain `generate`.
    """

    def __init__(self, model: PreTrainedModel, taps: TapRecorder, num_rows: int, config: CompileConfig | None):
        self.model = model
        self.taps = taps
        self.num_rows = num_rows
        # In one graph, since where a graph is cut hooks are looked up by handles that no later generation has.
        options = (config or CompileConfig()).to_dict() | {"fullgraph": True}
        self._call = torch.compile(_with_taps, **options)

    def __call__(self, inputs: dict[str, Any]) -> ModelOutput:
        """The target's outputs, as `model(**inputs, return_dict=True)` gives them."""
        if self.model not in _uncompilable:
            try:
                outputs, states = self._call(self.model, self.taps, inputs)
            except (FailOnRecompileLimitHit, Unsupported, UserError) as error:  # before anything has run
                logger.warning_once(f"{type(self.model).__name__} cannot be compiled here, and runs eagerly: {error}")
                _uncompilable.add(self.model)
            else:
                self.taps.add(states)
                outputs.logits = outputs.logits.clone()  # a CUDA graph writes its next logits where these lie
                return outputs
        with self.taps.recording():
            return self.model(**inputs, return_dict=True)


def compiled_forward(
    model: PreTrainedModel,
    taps: TapRecorder,
    num_rows: int,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    rollback: Rollback,
) -> CompiledForward | None:
    """The target's forward over blocks of `num_rows`, compiled; None where it is to run eagerly.

    Args:
        config: of this generation.
        model_kwargs: the target's inputs, its cache among them.
        rollback: of that cache, after the prefill.
    """
    # Layers that cannot be cropped are replaced when they are rolled back, and a graph would keep the old ones: static
    # sliding ones that may fill up, and all static ones of older Transformers.
    wants_states = config.output_attentions or config.output_hidden_states
    if wants_states or rollback.copied or not model._valid_auto_compile_criteria(model_kwargs, config):
        return None
    return CompiledForward(model, taps, num_rows, config.compile_config)


def _with_taps(
    model: PreTrainedModel, taps: TapRecorder, inputs: dict[str, Any]
) -> tuple[ModelOutput, list[torch.Tensor]]:
    """What is compiled: the target's outputs, and the tapped states `(b, n, H)`."""
    taps.traced = {}
    outputs = model(**inputs, return_dict=True)
    # By layer, so that Dynamo guards on which ones are tapped: on hooks it does not.
    states = [taps.traced[layer_id] for layer_id in taps.layer_ids]
    taps.traced = None
    return outputs, states


__all__ = ["CompiledForward", "compiled_forward"]

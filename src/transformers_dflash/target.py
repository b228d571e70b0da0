"""Everything that is asked of a target: its decoder layers, block embeddings, head, limits, and the taps on it.

Families differ in where an embedding is scaled or normed and in what is done to logits after the head; all that
knowledge is here. Modules are called, never read (`.weight` of a quantised, sharded or offloaded module is not what it
computes); the one exception is an embedding with a norm inside, which must be left out without touching a module that
other threads may be using.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from .configuration_dflash import DFlashDraftConfig
from .modeling_dflash import DFlashDraftModel

# Recurrent and hybrid families whose forward over several tokens on a cached state equals single steps, by test, and
# what they call the module that updates a layer's state. Mamba 1 (mamba, falcon_mamba, jamba) starts every forward of
# several tokens from an empty state, and recurrent_gemma keeps its state in the model.
EXACT_RECURRENT_FAMILIES = {
    "bailing_hybrid": "self_attn",
    "bamba": "mamba",
    "falcon_h1": "mamba",
    "granitemoehybrid": "mamba",
    "kimi_linear": "self_attn",
    "lfm2": "conv",
    "lfm2_moe": "conv",
    "mamba2": "mixer",
    "nemotron_h": "mixer",
    "olmo_hybrid": "linear_attn",
    "qwen3_5_moe_text": "linear_attn",
    "qwen3_5_text": "linear_attn",
    "qwen3_next": "linear_attn",
    "zamba2": "mamba",
}
# Attention families whose forward over several tokens on a cache does not equal single steps, or that keep no cache.
# Mllama's mask from text to image grows by one row at a time.
INEXACT_FAMILIES = {"mllama_text_model", "moshi", "openai-gpt", "prophetnet"}
# Models of images and text whose logits are scaled or capped as the text config says; the others give the bare head's.
SCALING_WRAPPERS = {
    "cohere_compass",
    "gemma3n",
    "gemma4",
    "gemma4_unified",
    "granite4_vision",
    "granite_docling",
    "hyperclovax_vision_v2",
    "inkling",
    "inkling2",
    "inkling2_loop",
    "mistral_large4",
    "muse_glimmer",
    "muse_spark",
    "paligemma",
}


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a causal language model: the one list of modules in its decoder of the configured length.

    Raises:
        ValueError: there is no such list, or more than one.
    """
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    decoder = model.get_decoder()
    found = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == expected]
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__} cannot be a DFlash target: its decoder {type(decoder).__name__} has {len(found)} "
            f"lists of {expected} layers where one was expected"
        )
    return found[0]


class Target:
    """A causal language model seen from the draft's side.

    Args:
        model: the model that `generate` was called on.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.layers = decoder_layers(model)
        self.embedding = model.get_input_embeddings()
        self.output_embedding = model.get_output_embeddings()

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding; of one that is wrapped, what the config says."""
        wrapped = not isinstance(self.embedding, nn.Embedding)
        return self.config.vocab_size if wrapped else self.embedding.num_embeddings

    def embed(self, ids: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Embeddings of a block as drafts were trained on: scaled where the family scales, never normed.

        Args:
            ids: `(b, B)`.
            scale: `input_embedding_scale` of the draft: raw rows times this; None for the family's own way.

        Returns:
            `(b, B, H)` in the target's dtype, on the embedding's device.
        """
        ids = _beside(self.embedding, ids)
        if isinstance(getattr(self.embedding, "embed_norm", None), nn.Module):  # Muse: drafts use the raw rows
            embeds = nn.Embedding.forward(self.embedding, ids)
            return embeds if scale is None else embeds * scale
        embeds = self.embedding(ids)
        if scale is not None:  # Gemma's module scales by itself
            embeds = embeds * (scale / float(getattr(self.embedding, "embed_scale", 1.0)))
        return embeds

    def mixers(self) -> dict[int, nn.Module]:
        """The modules that update recurrent states, by the index of their layer in the cache."""
        name = EXACT_RECURRENT_FAMILIES.get(self.config.model_type)
        named = [module for path, module in self.layers.named_modules() if path.rpartition(".")[2] == name]
        return {module.layer_idx: module for module in named if "layer_idx" in vars(module)}

    def head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The bare output head, `(b, n, H) -> (b, n, V)`, wherever the hidden states come from."""
        return self.output_embedding(_beside(self.output_embedding, hidden_states.to(self.model.dtype)))

    def scale_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """What the family does to logits after its head: Cohere's, Granite's and Muse's factors, Gemma's soft cap."""
        config = self.config
        if self.model.config is not config and self.model.config.model_type not in SCALING_WRAPPERS:
            return logits
        if (factor := getattr(config, "logit_scale", None)) is not None:
            logits = logits * factor
        if (divisor := getattr(config, "logits_scaling", None)) is not None:
            logits = logits * divisor if config.model_type == "hyperclovax" else logits / divisor  # others: Granite's
        if (factor := getattr(config, "output_multiplier", None)) is not None:
            logits = logits * factor
        return soft_cap(logits, getattr(config, "final_logit_softcapping", None))

    def last_exact_position(self, position: int) -> int | None:
        """The last position that a block starting at `position` may reach and still equal single steps; None: any.

        A learned position table ends; "dynamic" rope changes every angle past its trained length, "longrope" where its
        original length is crossed, so that a block over such a bound would not compute what single steps compute.
        """
        longest = getattr(self.config, "max_position_embeddings", None)
        kinds = self._ropes()
        if not kinds:
            return None if longest is None else longest - 1
        bounds = []
        for kind in kinds:
            if kind.get("rope_type") == "dynamic":
                bounds.append(longest - 1)
            elif kind.get("rope_type") == "longrope":
                crossing = kind.get("original_max_position_embeddings", longest) - 1
                if position <= crossing + 1:  # there Phi-3 reads all tokens anew, for one token at a time
                    bounds.append(max(crossing, position))
        return min(bounds, default=None)

    def _ropes(self) -> list[dict]:
        """The rotary parameters, one kind of layer after another; none where positions are learned or absent."""
        rope = getattr(self.config, "rope_parameters", None)
        if not rope:
            return []
        return [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]

    @property
    def rope_depends_on_length(self) -> bool:
        """Whether a token's rotary angles depend on how long the sequences of its batch are."""
        return any(kind.get("rope_type") in ("dynamic", "longrope") for kind in self._ropes())

    def check(self, draft: DFlashDraftModel) -> None:
        """Refuse a draft that cannot belong to this target.

        Raises:
            ValueError: with both numbers and the mend.
        """
        config: DFlashDraftConfig = draft.config
        made_for = f" (it was made for {config.target_name_or_path})" if config.target_name_or_path else ""
        mend = f"use the draft that was trained for {self.model.config._name_or_path or type(self.model).__name__}"
        if max(config.target_layer_ids) >= len(self.layers):
            raise ValueError(
                f"the draft taps layer {max(config.target_layer_ids)}, but the target has {len(self.layers)} decoder "
                f"layers{made_for}: {mend}"
            )
        shared = not config.own_embedding or config.draft_vocab_size is None  # an embedding or a head
        for name in ("hidden_size", "target_hidden_size") if shared else ("target_hidden_size",):
            if getattr(config, name) != self.config.hidden_size:
                raise ValueError(
                    f"the draft's {name} is {getattr(config, name)}, but the target's hidden_size is "
                    f"{self.config.hidden_size}{made_for}: {mend}"
                )
        rows = self.num_embeddings
        if config.mask_token_id >= rows and not config.own_embedding:
            raise ValueError(
                f"the draft's mask_token_id {config.mask_token_id} is not a row of the target's embedding, which has "
                f"{rows} rows{made_for}: {mend}, or resize the target's embedding"
            )
        if self.output_embedding is None:
            raise ValueError(f"{type(self.model).__name__} has no output head: it cannot be a DFlash target")


def _beside(module: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the device of a module's weights; as it is where they are offloaded: a hook moves it then."""
    device = next(chain(module.parameters(), module.buffers()), tensor).device
    return tensor if device.type == "meta" else tensor.to(device)


def soft_cap(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """`cap * tanh(logits / cap)`, or the logits as they are where there is no cap."""
    return logits if not cap else torch.tanh(logits / cap) * cap


def block_embeds(draft: DFlashDraftModel, target: Target, ids: torch.Tensor) -> torch.Tensor:
    """`(b, B) -> (b, B, H)`: by the draft's own embedding if it has one, else by the target's."""
    scale = draft.config.input_embedding_scale
    if not draft.config.own_embedding:
        return target.embed(ids, scale)
    embeds = draft.embed_tokens(_beside(draft.embed_tokens, ids))
    return embeds if scale is None else embeds * scale


def draft_logits(draft: DFlashDraftModel, target: Target, hidden: torch.Tensor) -> torch.Tensor:
    """`(b, k, H) -> (b, k, V)`: the draft's own head if it has one, else the target's, with all that follows it."""
    config = draft.config
    if config.draft_vocab_size is not None:
        logits = draft.expand_reduced_logits(hidden, target.config.vocab_size)
    else:
        logits = target.head(hidden)
    if config.output_multiplier is None and config.final_logit_softcapping is None:
        return target.scale_logits(logits)
    return soft_cap(logits * (config.output_multiplier or 1.0), config.final_logit_softcapping)


def checked_cache(cache: Cache | None, model: PreTrainedModel) -> Cache:
    """The target's cache; one that cannot be rolled back is refused before any work.

    Args:
        cache: as `generate` prepared it.
        model: the target.

    Raises:
        ValueError: naming the culprit and the mend.
    """
    if cache is None:
        raise ValueError(
            "a DFlash draft needs the target's cache, and there is none: leave out use_cache=False (a target that has "
            "no transformers Cache cannot be used)"
        )
    if not isinstance(cache, Cache):
        raise ValueError(f"a DFlash draft needs a transformers Cache on the target, got {type(cache).__name__}")
    if not cache.is_croppable and all(layer.is_croppable for layer in cache.layers):
        raise ValueError(
            f"{type(cache).__name__} says that it cannot be cropped, so rejected candidates would stay in it: use the "
            "dynamic cache"
        )
    family = model.config.get_text_config(decoder=True).model_type
    recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
    if family in INEXACT_FAMILIES:
        raise ValueError(
            f"{type(model).__name__} ({family}) does not give the same for a block as for its tokens one by one, so "
            "its output could differ: drop assistant_model"
        )
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.ao.nn.quantized.dynamic"):
            raise ValueError(
                f"the target's {name} was quantised by torch's quantize_dynamic, which scales all rows of a call "
                "alike, so that a block differs from its tokens one by one: quantise with torchao or bitsandbytes"
            )
    if (recurrent or model._is_stateful) and family not in EXACT_RECURRENT_FAMILIES:
        raise ValueError(
            f"{type(model).__name__} has recurrent layers that are not known to take several tokens on top of a "
            f"cached state ({family}), so its output could differ: drop assistant_model"
        )
    return cache


class TapRecorder:
    """Reads the outputs of the tapped decoder layers by forward hooks, and nothing else of the target.

    Only forwards inside `recording()` and of the same thread are read, so that a logits processor that calls the
    target, or another thread that generates with it, does not get in. `close` removes every hook.

    Args:
        layers: the target's decoder layers.
        layer_ids: the taps, in the order in which the draft wants them.
        width: hidden size of one tap.
        device, dtype: where features are kept: the draft's.
    """

    def __init__(self, layers: nn.ModuleList, layer_ids: list[int], width: int, device, dtype: torch.dtype):
        self.layer_ids = tuple(layer_ids)
        self.num_taps = len(layer_ids)
        self.width = width
        self.device, self.dtype = device, dtype
        self.buffers: list[torch.Tensor] = []
        self.traced: dict[int, torch.Tensor] | None = None  # by layer, while `compiled` traces a forward
        self._written = 0
        self._recording_thread: int | None = None
        self._hooks = [
            layers[layer_id].register_forward_hook(partial(self._read, tap)) for tap, layer_id in enumerate(layer_ids)
        ]

    def _read(self, tap: int, _module: nn.Module, _args: tuple, output: torch.Tensor | tuple) -> None:
        state = output[0] if isinstance(output, tuple | list) else output  # (b, n, H)
        if torch.compiler.is_dynamo_compiling() and self.traced is not None:
            self.traced[self.layer_ids[tap]] = state
            return
        # None by itself, for another recorder's trace: a graph cannot ask for the thread.
        if self._recording_thread is None or self._recording_thread != threading.get_ident():
            return
        if state.dim() != 3 or state.shape[-1] != self.width:
            raise ValueError(
                f"the target's decoder layers give states of shape {tuple(state.shape)}, where a DFlash draft needs "
                f"(batch, tokens, {self.width}): it cannot be a DFlash target"
            )
        if self._written % self.num_taps == 0:  # the first tap of a forward pass
            shape = (*state.shape[:2], self.num_taps * self.width)
            self.buffers.append(torch.empty(shape, device=self.device, dtype=self.dtype))
        self.buffers[-1][..., tap * self.width : (tap + 1) * self.width].copy_(state)
        self._written += 1

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Read the taps of the target forwards made inside, by this thread."""
        self._recording_thread = threading.get_ident()
        try:
            yield
        finally:
            self._recording_thread = None

    def add(self, states: list[torch.Tensor]) -> None:
        """Take over the tapped states `(b, n, H)` of one forward, read by other means than the hooks; copies them."""
        self.buffers.append(torch.cat([state.to(self.device, self.dtype) for state in states], dim=-1))

    def take(self) -> torch.Tensor:
        """The features read since the last `take`: `(b, n, taps * H)`."""
        if not self.buffers:
            raise ValueError(
                "the target ran without the hooks that read its hidden states, as a model does that was compiled by "
                "hand: leave its own torch.compile out; with cache_implementation='static' blocks are compiled for you"
            )
        features = self.buffers[0] if len(self.buffers) == 1 else torch.cat(self.buffers, dim=1)
        self.buffers = []
        return features

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


__all__ = ["TapRecorder", "Target", "block_embeds", "checked_cache", "decoder_layers", "draft_logits", "soft_cap"]

"""The DFlash draft model (arXiv 2602.06036): a few Qwen3-like layers whose attention also sees the target's features.

What is particular to it: queries come from the block alone; keys and values come from the block *and* from the
target's features, which are projected by `fc` and normed once and then injected into every layer ("fused"), or handed
one tap to one layer as they are ("layer_aligned"). The model has no embedding, and no head unless its vocabulary is
reduced: both are the target's, so it maps block embeddings to hidden states and knows nothing of a target's class.

This file and the flat siblings that it imports are all that a pushed draft needs to run without this package.
"""

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers import GenerationConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from .cache import ContextCache
from .configuration_dflash import DFlashDraftConfig
from .modeling_dflash2 import CandidateSelector, GroupedDynamicCausalConv

_CONTEXT_PART = 4096  # tokens whose features are projected at once

# Weight names of other layouts that differ from ours, as regular expressions.
WEIGHT_RENAMES = {r"^encoder\.fc\.": "fc.", r"^encoder\.output_norm_enc\.": "hidden_norm."}


def block_attention_mask(
    block_length: int,
    num_keys: int,
    *,
    causal: bool,
    sliding_window: int | None,
    device: torch.device,
) -> torch.Tensor | None:
    """Which keys each slot of a block sees. The block's own keys are the last `block_length` ones.

    Slot j sits at key index `num_keys - block_length + j`. A window of w counts the slot itself: it sees key i where
    `|slot - i| < w`.

    Returns:
        bool `(block_length, num_keys)`, True where seen; None where every slot sees every key.
    """
    context = num_keys - block_length
    if not causal and (sliding_window is None or num_keys <= sliding_window):
        return None
    slot = torch.arange(context, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None, :]
    seen = torch.ones(block_length, num_keys, dtype=torch.bool, device=device)
    if causal:
        seen &= key <= slot
    if sliding_window is not None:
        seen &= (slot - key).abs() < sliding_window
    return seen


def _as_attention_argument(
    seen: torch.Tensor | None, padding: torch.Tensor | None, implementation: str, query: torch.Tensor
) -> Any:
    """Put a block's mask into the form that an attention implementation takes.

    Args:
        seen: bool `(B, num_keys)` or None, from `block_attention_mask`.
        padding: `(b, num_keys)`, zero where a key is padding; or None.
        implementation: the name under which Transformers knows the attention function.
        query: `(b, heads, B, d)`.
    """
    if "flash" in implementation:  # its kernels take the window and causality as arguments, and padding as it is
        return padding
    if padding is not None:
        padded = padding[:, None, None, :].to(torch.bool)  # (b, 1, 1, num_keys)
        seen = padded if seen is None else padded & seen
    if seen is None:
        return None
    mask = seen if seen.dim() == 4 else seen[None, None]  # (b or 1, 1, B or 1, num_keys)
    if implementation == "eager":
        return query.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(query.dtype).min)
    if implementation == "flex_attention":
        batch, _, block_length, _ = query.shape
        dense = mask.expand(batch, 1, block_length, -1).contiguous()
        return create_block_mask(
            lambda b, h, slot, key: dense[b, 0, slot, key], batch, None, block_length, mask.shape[3], query.device
        )
    return mask


def _describe(key: str | tuple) -> str:
    """A weight's name, and both shapes where they differ."""
    if isinstance(key, str):
        return key
    name, found, expected = key
    return f"{name} (shape {list(found)} in the file, {list(expected)} by the config)"


class BlockMasks:
    """The masks of one forward pass, built when a layer first asks and shared between layers of one kind.

    A layer asks with the number of keys that it holds, so that no cache has to foretell it.
    """

    def __init__(self, attention_mask: torch.Tensor | dict | None, block_length: int, implementation: str):
        self.given = attention_mask
        self.block_length = block_length
        self.implementation = implementation
        self.built: dict[tuple, Any] = {}

    def of_layer(self, attention: "DFlashAttention", query: torch.Tensor, num_keys: int) -> Any:
        given = self.given[attention.layer_type] if isinstance(self.given, dict) else self.given
        if given is not None and not (isinstance(given, torch.Tensor) and given.dim() == 2):
            return given  # made by the caller, who knows what it stands for (training)
        kind = (attention.layer_type, num_keys, query.device)
        if kind not in self.built:
            seen = block_attention_mask(
                self.block_length,
                num_keys,
                causal=attention.is_causal,
                sliding_window=attention.sliding_window,
                device=query.device,
            )
            padding = None if given is None else given[:, -num_keys:].to(query.device)
            self.built[kind] = _as_attention_argument(seen, padding, self.implementation, query)
        return self.built[kind]


class DFlashAttention(nn.Module):
    """Attention of a block's slots over the injected context and the block itself."""

    def __init__(self, config: DFlashDraftConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.layer_type = config.layer_types[layer_idx]
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.is_causal = self.layer_type in config.causal_layer_types
        self.sliding_window = config.sliding_window if self.layer_type == "sliding_attention" else None
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        masks: BlockMasks,
        cache: Any | None,
    ) -> torch.Tensor:
        batch, block_length, _ = hidden_states.shape
        sources = torch.cat([context, hidden_states], dim=1)  # (b, n + B, H)
        heads = (batch, -1, self.head_dim)

        query = self.q_proj(hidden_states).view(batch, block_length, *heads[1:])  # (b, B, heads, d)
        key = self.k_proj(sources).view(batch, sources.shape[1], *heads[1:])  # (b, n + B, kv_heads, d)
        value = self.v_proj(sources).view(batch, sources.shape[1], *heads[1:])
        query = self.q_norm(query).transpose(1, 2)  # (b, heads, B, d)
        key = self.k_norm(key).transpose(1, 2)  # (b, kv_heads, n + B, d)
        value = value.transpose(1, 2)

        cos, sin = position_embeddings  # (b or 1, 1, n + B, d)
        key = key * cos + rotate_half(key) * sin
        cos, sin = cos[:, :, -block_length:], sin[:, :, -block_length:]
        query = query * cos + rotate_half(query) * sin

        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)  # (b, kv_heads, context + B, d)

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, _ = attend(
            self,
            query,
            key,
            value,
            masks.of_layer(self, query, key.shape[2]),
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            is_causal=self.is_causal,
        )  # (b, B, heads, d)
        return self.o_proj(output.reshape(batch, block_length, -1))  # (b, B, H)


class DFlashDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: DFlashDraftConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.conv_kernel_size is not None:
            sizes = (config.hidden_size, config.conv_kernel_size, config.conv_group_size)
            self.attention_conv = GroupedDynamicCausalConv(*sizes)
            self.mlp_conv = GroupedDynamicCausalConv(*sizes)
        self.has_convs = config.conv_kernel_size is not None

    def forward(
        self, hidden_states: torch.Tensor, context: torch.Tensor, num_blocks: int = 1, **kwargs
    ) -> torch.Tensor:
        attend = partial(self.self_attn, context=context, **kwargs)
        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + (
            self.attention_conv.around(attend, normed, num_blocks) if self.has_convs else attend(normed)
        )
        normed = self.post_attention_layernorm(hidden_states)
        return hidden_states + (
            self.mlp_conv.around(self.mlp, normed, num_blocks) if self.has_convs else self.mlp(normed)
        )


class TapRMSNorm(nn.Module):
    """RMS norm of each tap of `(b, n, taps * H_target)` by itself, with a weight of its own."""

    def __init__(self, num_taps: int, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_taps, width))
        self.eps = eps

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        taps = features.unflatten(-1, self.weight.shape).float()  # (b, n, taps, H_target)
        normed = nn.functional.rms_norm(taps, taps.shape[-1:], eps=self.eps).to(features.dtype)
        return (self.weight * normed).flatten(2)


class DFlashPreTrainedModel(PreTrainedModel):
    config_class = DFlashDraftConfig
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DFlashDecoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, GroupedDynamicCausalConv):  # the identity
            identity = torch.zeros_like(module.base_kernel)
            identity[:, 0] = 1
            init.copy_(module.base_kernel, identity)
            init.zeros_(module.kernel_projection.weight)
        elif isinstance(module, CandidateSelector):
            for codebook in (module.predecessor_codebook, module.successor_codebook):
                init.normal_(codebook, std=self.config.initializer_range)


class DFlashDraftModel(DFlashPreTrainedModel):
    """The draft: block embeddings and target features in, hidden states of the block's slots out.

    `generation_config` holds how it drafts: `num_assistant_tokens` caps the candidates of a round,
    `assistant_confidence_threshold` cuts a block where the product of the draft's confidences falls under it, and
    `do_sample` and `temperature` set how candidates are drawn where that should differ from the target's way.

    Args:
        config: a `DFlashDraftConfig`.
    """

    # What writes cards and publishes, filled in by transformers_dflash; None where this file runs alone from the Hub.
    hub: ClassVar[Any] = None
    # speculators keeps a mask of the reduced vocabulary beside the offsets d2t that say the same.
    _keys_to_ignore_on_load_unexpected = [r"^t2d$"]

    def __init__(self, config: DFlashDraftConfig):
        super().__init__(config)
        self.layers = nn.ModuleList([DFlashDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        if config.context_injection == "fused":
            features = len(config.target_layer_ids) * config.target_hidden_size
            self.fc = nn.Linear(features, config.hidden_size, bias=False)
            self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.tap_norm:
            self.tap_norm = TapRMSNorm(len(config.target_layer_ids), config.target_hidden_size, config.rms_norm_eps)
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        if config.selector_rank is not None:
            self.candidate_selector = CandidateSelector(
                config.vocab_size, config.hidden_size, config.selector_rank, config.selector_top_k
            )
        self.generation_config = GenerationConfig()
        self.post_init()

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        cache: Any | None = None,
        past_key_values: Any | None = None,
        num_blocks: int = 1,
        **kwargs,
    ) -> BaseModelOutput:
        """One drafting pass, by the contract of Transformers' own DFlash candidate generator.

        Args:
            noise_embeds: `(b, B, H)`, the target's embeddings of [anchor, mask, ...].
            context_hidden_states: `(b, n, taps * H_target)`, tapped target states of the `n` tokens committed since
                the last pass, taps side by side in the order of `config.target_layer_ids`.
            position_ids: `(b, n + B)`, absolute and 1-D; 0, 1, ... (after the cache's length) where not given. Of
                position triples, as multimodal targets have, the first row is taken.
            attention_mask: `(b, context + B)`, zero where a key is padding; or a mask made for the attention
                implementation, one for all layers or a dict by layer type.
            cache: a `ContextCache`, or Transformers' `DFlashCache`; `past_key_values` is its older name.
            num_blocks: `noise_embeds` holds so many blocks of equal size, as in training, whose mask is given.

        Returns:
            `last_hidden_state` `(b, B, H)`, normed: ready for the target's head.
        """
        cache = past_key_values if cache is None else cache
        block_length, context_length = noise_embeds.shape[1], context_hidden_states.shape[1]
        if position_ids is None:
            start = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(start, start + context_length + block_length, device=noise_embeds.device)[None]
        elif position_ids.dim() == 3:
            position_ids = position_ids[0]
        if isinstance(cache, ContextCache):
            cache.block_length = block_length

        cos, sin = self.rotary_emb(noise_embeds, position_ids)  # (b, n + B, d)
        masks = BlockMasks(attention_mask, block_length, self.config._attn_implementation)
        hidden_states = noise_embeds
        for layer, context in zip(self.layers, self._layer_contexts(context_hidden_states), strict=True):
            hidden_states = layer(
                hidden_states,
                context,
                num_blocks,
                position_embeddings=(cos[:, None], sin[:, None]),
                masks=masks,
                cache=cache,
            )
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))

    def get_input_embeddings(self) -> nn.Module | None:
        """The draft's own, if it has one; most are given those of their target. (FSDP and adapters ask for it.)"""
        return self.embed_tokens if self.config.own_embedding else None

    def get_output_embeddings(self) -> None:
        """None: the head is the target's, or one over a vocabulary of its own, which is no embedding's counterpart."""

    def _layer_contexts(self, features: torch.Tensor) -> list[torch.Tensor]:
        """What is injected into each layer, `(b, n, H)` each, from features `(b, n, taps * H_target)`."""
        fused = self.config.context_injection == "fused"
        if fused or self.config.tap_norm:
            # A long prompt's in parts: normed at once, in float32, its taps would take four times their memory.
            features = torch.cat([self._project(part) for part in features.split(_CONTEXT_PART, dim=1)], dim=1)
        return [features] * len(self.layers) if fused else list(features.split(self.config.target_hidden_size, dim=-1))

    def _project(self, features: torch.Tensor) -> torch.Tensor:
        """Features `(b, n, taps * H_target)`, normed and fused where the draft does so."""
        if self.config.tap_norm:
            features = self.tap_norm(features)
        return self.hidden_norm(self.fc(features)) if self.config.context_injection == "fused" else features

    def make_cache(self) -> ContextCache:
        """An empty context cache for this draft."""
        config = self.config
        windows = [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]
        return ContextCache(windows)

    def expand_reduced_logits(self, hidden_states: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Logits of the draft's own head over the target's vocabulary; tokens that the draft lacks get -inf.

        Args:
            hidden_states: `(b, n, H)`.
            vocab_size: V of the target.

        Returns:
            `(b, n, V)`.
        """
        reduced = self.lm_head(hidden_states)  # (b, n, V_draft)
        target_ids = torch.arange(reduced.shape[-1], device=reduced.device) + self.d2t
        full = reduced.new_full((*reduced.shape[:-1], vocab_size), float("-inf"))
        full[..., target_ids] = reduced
        return full

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load a draft from a folder or a Hub id, in this layout or (with the package imported) in a known other one.

        Takes what `PreTrainedModel.from_pretrained` takes.

        Raises:
            ValueError: a weight is missing, left over or of the wrong shape, or the config is not a draft's.
            OSError: a weight file is missing or cut short.
        """
        source = pretrained_model_name_or_path  # None where config and state_dict are given instead
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs["key_mapping"] = WEIGHT_RENAMES | (kwargs.get("key_mapping") or {})
        kwargs["ignore_mismatched_sizes"] = True  # they are refused below, by name
        try:
            model, info = super().from_pretrained(source, *args, output_loading_info=True, **kwargs)
        except SafetensorError as error:
            raise OSError(f"a weight file of {source} is damaged or cut short ({error}): get it again") from error
        for kind in ("missing", "unexpected", "mismatched"):
            if names := [_describe(key) for key in sorted(info[f"{kind}_keys"])]:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                raise ValueError(f"the weights of {source} do not fit its config: {kind} {', '.join(names[:5])}{more}")
        if source is not None:
            hub_options = ("cache_dir", "local_files_only", "revision", "subfolder", "token")
            try:
                model.generation_config = GenerationConfig.from_pretrained(
                    source, **{name: kwargs[name] for name in hub_options if name in kwargs}
                )
            except OSError as error:  # most published drafts have none
                if isinstance(error.__context__, ValueError):  # what is there is no JSON
                    raise OSError(
                        f"generation_config.json of {source} is damaged: get it again, or remove it to draft without "
                        "its options"
                    ) from error
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory, *args, push_to_hub: bool = False, **kwargs) -> None:
        """As `PreTrainedModel.save_pretrained`, with the drafting options if any is set, in our weight names, and with
        a model card unless the folder has one that a person wrote."""
        names = ("commit_message", "create_pr", "private", "repo_id", "revision", "tags")
        hub_options = {name: kwargs.pop(name) for name in names if name in kwargs} if push_to_hub else {}
        kwargs.setdefault("save_original_format", False)  # else a draft read from another layout gets its names back
        super().save_pretrained(save_directory, *args, **kwargs)
        if not kwargs.get("is_main_process", True):
            return
        if self.generation_config.to_diff_dict().keys() - {"transformers_version"}:
            self.generation_config.save_pretrained(save_directory)
        else:  # one of an earlier save would set what is no longer set
            (Path(save_directory) / "generation_config.json").unlink(missing_ok=True)
        if self.hub is not None:
            self.hub.write_card(save_directory, self.config)
        if push_to_hub:
            repo_id = hub_options.pop("repo_id", Path(save_directory).name)
            self.push_to_hub(repo_id, token=kwargs.get("token"), **hub_options)

    def push_to_hub(self, repo_id: str, **kwargs) -> Any:
        """Publish the draft: weights, config, card, and the code that it needs where this package is not installed.

        Takes what `PreTrainedModel.push_to_hub` takes. See `transformers_dflash.hub.push_to_hub`, which takes adapters
        too.
        """
        return (
            super().push_to_hub(repo_id, **kwargs)
            if self.hub is None
            else self.hub.push_to_hub(self, repo_id, **kwargs)
        )


__all__ = ["DFlashDraftModel", "DFlashPreTrainedModel"]

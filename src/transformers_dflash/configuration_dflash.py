"""The configuration of a DFlash draft.

Every number that decides what a draft computes lies in this file's fields, so that a saved draft is read back without
guessing: the taps, the mask token, the block size and which layers are causal are never derived from a formula on
loading (a formula is wrong for most published drafts). It does not know other layouts: those are translated into this
one by `transformers_dflash.conversion`, which fills `foreign_layouts` below when the package is imported.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LAYER_TYPES = ("full_attention", "sliding_attention")
CONTEXT_INJECTIONS = ("fused", "layer_aligned")
# What decides what a saved draft computes: a file without one of these is not completed by a default.
MANDATORY_FIELDS = (
    "block_size",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "mask_token_id",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "target_layer_ids",
)


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> list[int]:
    """Spread `num_taps` taps over a target of `num_target_layers` decoder layers, as the DFlash authors do.

    For *creating* a draft only: one tap lies in the middle, several run evenly from layer 1 to the third from last.

    Returns:
        `num_taps` 0-based decoder layer indices, ascending.

    Raises:
        ValueError: the target has too few layers for so many distinct taps.
    """
    if num_taps == 1:
        return [num_target_layers // 2]
    taps = [round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps)]
    if num_target_layers < 5 or len(set(taps)) < num_taps:
        raise ValueError(
            f"{num_taps} taps do not fit a target of {num_target_layers} layers by the default formula: pass "
            "target_layer_ids"
        )
    return taps


@strict
class DFlashDraftConfig(PreTrainedConfig):
    r"""Configuration of a [`DFlashDraftModel`] (DFlash, arXiv 2602.06036).

    Parameters that control the block and what is injected:
        block_size (`int`): slots of one block: the anchor and `block_size - 1` mask slots. At least 2.
        mask_token_id (`int`): row of the target's embedding that stands for "not yet known".
        target_layer_ids (`list[int]`): the taps. Tap `i` is the output of the target's 0-based decoder layer `i`,
            before any final norm (`hidden_states[i + 1]` in Transformers' numbering, except after the last layer).
        target_hidden_size (`int`, *optional*): width of one tap; `hidden_size` where not given.
        num_target_layers (`int`, *optional*): decoder layers of the target, to check the taps against.
        context_injection (`str`): `"fused"`: all taps are concatenated, projected by `fc`, normed, and become keys and
            values of every draft layer. `"layer_aligned"`: tap `i` goes as it is to draft layer `i`, no projection.
        tap_norm (`bool`): every tap is normed, with a weight of its own, before it is projected or handed on.
        sample_from_anchor (`bool`): slot `k` predicts token anchor + k + 1 (so that a block of B gives B candidates)
            instead of anchor + k (B - 1 candidates).

    Parameters that control the layers (a Qwen3 decoder layer each):
        hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim,
        hidden_act, rms_norm_eps, attention_bias, attention_dropout, rope_parameters, max_position_embeddings,
        initializer_range: as in Qwen3. The rotary embedding is the draft's own, always 1-D and over the whole head.
        layer_types (`list[str]`, *optional*): `"full_attention"` or `"sliding_attention"` per layer; all full if
            absent.
        sliding_window (`int`, *optional*): tokens that a query of a sliding layer sees, itself included.
        causal_layer_types (`list[str]`): layer types that are causal *inside the block*; all others see the whole
            block.

    Parameters that control the vocabulary and the logits:
        vocab_size, bos_token_id, eos_token_id, pad_token_id: the target's.
        draft_vocab_size (`int`, *optional*): the draft has a head of its own over so many tokens, and `d2t` offsets
            that give the target's ids (target id = id + d2t[id]); without it the draft uses the target's head.
        own_embedding (`bool`): the draft embeds its blocks by a table of its own, `embed_tokens` of `vocab_size` rows,
            instead of the target's. With a head of its own too, its hidden size need not be the target's.
        input_embedding_scale (`float`, *optional*): block embeddings are the target's raw rows times this; without it
            they are what the target's embedding module gives (scaled where the family scales), less any norm in it.
        output_multiplier (`float`, *optional*), final_logit_softcapping (`float`, *optional*): applied to the draft's
            logits in place of what the target does to its own.

    Parameters that control the parts of DFlash 2, each pair given or absent together:
        conv_kernel_size, conv_group_size (`int`, *optional*): convolutions inside the block around every sublayer:
            slots that one output sees, and channels that share a dynamic kernel.
        selector_rank, selector_top_k (`int`, *optional*): the candidate selector: rank of its codebooks, and tokens
            that it scores in a slot.

    Parameters that control the pairing:
        target_name_or_path, target_revision (`str`, *optional*): the target that the draft was made for.
        model_card (`dict`, *optional*): what a model card says beyond these fields: `license`, `language`, `datasets`
            (Hub ids), `thinking` (whether the target thought in the training answers), `training` (a table of its
            own), `results` (rows of `transformers-dflash evaluate`).

    Raises:
        ValueError: a field is missing or contradicts another; the message names it.
        StrictDataclassError: a field has the wrong type; the message names it.
    """

    model_type = "dflash"
    default_theta = 1_000_000.0
    has_no_defaults_at_init: ClassVar[bool] = True  # transformers < 5.24 would compare with `DFlashDraftConfig()`
    # Layouts of other systems, filled by transformers_dflash on import; empty where this file runs alone from the Hub.
    foreign_layouts: ClassVar[Sequence[Any]] = ()

    block_size: int = 16
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    target_hidden_size: int | None = None
    num_target_layers: int | None = None
    context_injection: str = "fused"
    tap_norm: bool = False
    sample_from_anchor: bool = False

    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    rope_parameters: dict | None = None
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    causal_layer_types: list[str] | None = None

    vocab_size: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False
    draft_vocab_size: int | None = None
    own_embedding: bool = False
    input_embedding_scale: float | int | None = None
    output_multiplier: float | int | None = None
    final_logit_softcapping: float | int | None = None

    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None

    target_name_or_path: str | None = None
    target_revision: str | None = None
    model_card: dict | None = None

    def __post_init__(self, **kwargs):
        self._check_sizes()
        if self.target_layer_ids is None and self.num_target_layers is not None:
            taps = self.num_hidden_layers if self.context_injection == "layer_aligned" else 5
            self.target_layer_ids = default_target_layer_ids(self.num_target_layers, taps)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.causal_layer_types is None:
            self.causal_layer_types = []
        super().__post_init__(**kwargs)
        self._check()

    def _check_sizes(self) -> None:
        """Refuse sizes that are not positive, before anything is divided by them."""
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "target_hidden_size",
            "draft_vocab_size",
            "conv_kernel_size",
            "conv_group_size",
            "selector_rank",
            "selector_top_k",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def _check(self) -> None:
        """Refuse what cannot be a draft, naming the field and the mend."""
        for name in ("target_layer_ids", "mask_token_id"):
            if getattr(self, name) is None:
                raise ValueError(f"a DFlash draft config needs `{name}`: no formula gives it for an existing draft")
        taps, layers = self.target_layer_ids, self.num_hidden_layers
        if not taps or min(taps) < 0 or len(set(taps)) != len(taps):
            raise ValueError(f"target_layer_ids must be distinct 0-based decoder layers, at least one; got {taps}")
        if self.num_target_layers is not None and max(taps) >= self.num_target_layers:
            raise ValueError(
                f"target_layer_ids has {max(taps)}, but the target has {self.num_target_layers} layers "
                f"(num_target_layers): the last one is {self.num_target_layers - 1}"
            )
        if self.own_embedding and self.vocab_size is None:
            raise ValueError("a draft with an embedding of its own needs `vocab_size`, the number of its rows")
        if self.block_size < 2:
            raise ValueError(f"block_size must be at least 2 (the anchor and one mask slot), got {self.block_size}")
        if self.mask_token_id < 0 or (self.vocab_size is not None and self.mask_token_id >= self.vocab_size):
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is not a row of the target's embedding of {self.vocab_size} rows"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        for name in ("layer_types", "causal_layer_types"):
            for layer_type in getattr(self, name):
                if layer_type not in LAYER_TYPES:
                    raise ValueError(f"{name} has {layer_type!r}; a draft layer is one of {', '.join(LAYER_TYPES)}")
        if len(self.layer_types) != layers:
            raise ValueError(f"layer_types names {len(self.layer_types)} layers, num_hidden_layers is {layers}")
        if "sliding_attention" in self.layer_types and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(
                "layer_types has sliding layers, so sliding_window must be a positive integer; got "
                f"{self.sliding_window}"
            )
        for one, other in (("conv_kernel_size", "conv_group_size"), ("selector_rank", "selector_top_k")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                missing = one if getattr(self, one) is None else other
                raise ValueError(f"{one} and {other} come together: `{missing}` is missing")
        if self.conv_group_size is not None and self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of conv_group_size {self.conv_group_size}"
            )
        if self.selector_rank is not None:
            if self.vocab_size is None or self.draft_vocab_size is not None:
                raise ValueError("a candidate selector needs `vocab_size`, and no `draft_vocab_size`")
            if self.selector_top_k > self.vocab_size:
                raise ValueError(f"selector_top_k {self.selector_top_k} exceeds vocab_size {self.vocab_size}")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act {self.hidden_act!r} is no activation that Transformers knows")
        rope_type, theta = (self.rope_parameters.get(name) for name in ("rope_type", "rope_theta"))
        if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
            raise ValueError(
                f"rope_parameters has rope_type {rope_type!r}; it is one of default, {', '.join(ROPE_INIT_FUNCTIONS)}"
            )
        if isinstance(theta, bool) or not isinstance(theta, int | float):
            raise ValueError(f"rope_parameters has rope_theta {theta!r}, which is no number")
        if self.context_injection not in CONTEXT_INJECTIONS:
            raise ValueError(
                f"context_injection is one of {', '.join(CONTEXT_INJECTIONS)}; got {self.context_injection!r}"
            )
        if self.context_injection == "layer_aligned":
            if len(taps) != layers:
                raise ValueError(
                    f"layer_aligned injection needs one tap per draft layer: {len(taps)} taps, {layers} layers"
                )
            if self.target_hidden_size != self.hidden_size:
                raise ValueError(
                    "layer_aligned injection has no projection, so target_hidden_size must equal hidden_size: "
                    f"{self.target_hidden_size} and {self.hidden_size}"
                )

    @property
    def num_candidates(self) -> int:
        """The most candidates of one block: `block_size - 1`, or `block_size` if the anchor's slot predicts too."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @classmethod
    def _dict_from_json_file(cls, json_file) -> dict[str, Any]:
        config_dict = super()._dict_from_json_file(json_file)
        if not isinstance(config_dict, dict):
            raise ValueError(f"{json_file} holds a JSON {type(config_dict).__name__} instead of an object of fields")
        return config_dict

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a `config.json` and translate it into this layout if it is in another one that is known.

        Raises:
            ValueError: the folder holds no draft, or one that cannot be translated.
        """
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        for layout in cls.foreign_layouts:
            if layout.matches(config_dict):
                return layout.convert_config(config_dict), kwargs
        if config_dict.get("model_type") != cls.model_type:
            found = f"has model_type {config_dict.get('model_type')!r} and no DFlash fields"
            raise ValueError(
                f"{pretrained_model_name_or_path} holds no DFlash draft: its config.json "
                f"{found if config_dict else 'is missing or empty'}"
            )
        return config_dict, kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """The config of a saved draft. Fields given as keywords replace those of the file before anything is checked.

        Raises:
            ValueError: a mandatory field is missing.
        """
        given = {name: kwargs.pop(name) for name in list(kwargs) if name in DFlashDraftConfig.__annotations__}
        config_dict = config_dict | given
        for name in MANDATORY_FIELDS:
            if config_dict.get(name) is None:
                raise ValueError(
                    f"the draft's config.json lacks `{name}`: add the value that the draft was trained with, or pass "
                    f"{name}=... to from_pretrained"
                )
        return super().from_dict(config_dict, **kwargs)

    @classmethod
    def from_target(cls, target_config: PreTrainedConfig, mask_token_id: int, **overrides) -> "DFlashDraftConfig":
        """The config of a new draft for a target: its width, rotary base, vocabulary and special tokens, default taps.

        Args:
            target_config: the target's config; the text part of it if it has several.
            mask_token_id: an embedding row that the target's data does not use.
            **overrides: any field of this config.

        Raises:
            ValueError: the target does not say its width or number of heads, and they are not given.
        """
        text = target_config.get_text_config(decoder=True)
        same = (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        )
        fields = {name: getattr(text, name, None) for name in same if name not in overrides}
        fields = {name: value for name, value in fields.items() if value is not None}
        for name in ("hidden_size", "num_attention_heads"):
            if name not in fields | overrides:
                raise ValueError(f"{type(text).__name__} says no {name}: pass {name}=... for the draft's own")
        if "intermediate_size" not in fields:  # GPT-2 and kin do not say it
            fields["intermediate_size"] = 4 * (fields | overrides)["hidden_size"]
        if "head_dim" not in overrides:  # of some families it differs by layer, and asking for it is an error
            fields["head_dim"] = getattr(text, "head_dim", None)  # not every family has the field
        rope = getattr(text, "rope_parameters", None) or {}  # of some families one for each type of layer
        if "rope_theta" in rope:
            fields["rope_parameters"] = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        fields |= {
            "num_target_layers": text.num_hidden_layers,
            "vocab_size": text.vocab_size,
            "target_name_or_path": target_config._name_or_path or None,
        }
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # of the whole where the text part has none
            fields[name] = getattr(text, name, getattr(target_config, name, None))
        return cls(mask_token_id=mask_token_id, **(fields | overrides))


__all__ = ["DFlashDraftConfig"]

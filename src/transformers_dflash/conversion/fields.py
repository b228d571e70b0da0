"""Fields that several layouts share, and what is done with them alike."""

from typing import Any

from ..configuration_dflash import DFlashDraftConfig

# Named and meant alike everywhere; the rest of a foreign config belongs to the target or to its training.
COMMON_FIELDS = (
    "_commit_hash",
    "attention_bias",
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "quantization_config",
    "rms_norm_eps",
    "sliding_window",
    "torch_dtype",
    "transformers_version",
    "vocab_size",
)
DFLASH2_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def require_dflash2_fields(fields: dict[str, Any]) -> None:
    """Refuse a DFlash 2 draft without the sizes of its parts.

    Raises:
        ValueError: naming the missing field.
    """
    for name in DFLASH2_FIELDS:
        if fields.get(name) is None:
            raise ValueError(f"the DFlash 2 draft's config.json lacks `{name}`: add the value it was trained with")


def common_fields(source: dict[str, Any]) -> dict[str, Any]:
    """The fields of a foreign config that are ours as they stand, and the draft's own rope."""
    fields = {name: source[name] for name in COMMON_FIELDS if name in source}
    fields["model_type"] = "dflash"
    fields["architectures"] = ["DFlashDraftModel"]
    fields["rope_parameters"] = rope_parameters(source)
    return fields


def exported_fields(config: DFlashDraftConfig) -> dict[str, Any]:
    """The other way: our fields that others name alike, as far as they are given, without the rope."""
    ours = [name for name in COMMON_FIELDS if name in DFlashDraftConfig.__annotations__]
    fields = {name: getattr(config, name) for name in ours if getattr(config, name) is not None}
    fields["use_sliding_window"] = "sliding_attention" in config.layer_types
    fields["tie_word_embeddings"] = False
    return fields


def rope_parameters(source: dict[str, Any]) -> dict[str, Any]:
    """The draft's rope from `rope_parameters`, or from the older `rope_scaling` and `rope_theta`.

    Parts of a target's rope that leak into draft configs (a partial rotary factor, sections of multimodal positions)
    are left out: a draft rotates its whole heads, with 1-D positions.

    Raises:
        ValueError: no base is given, for which there is no safe default.
    """
    rope = dict(source.get("rope_parameters") or source.get("rope_scaling") or {})
    for leaked in ("partial_rotary_factor", "mrope_section", "mrope_interleaved"):
        rope.pop(leaked, None)
    kind = rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or kind or "default"
    if rope["rope_type"] == "mrope":
        rope["rope_type"] = "default"
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = source.get("rope_theta")
    if rope["rope_theta"] is None:
        raise ValueError("the draft's config.json lacks `rope_theta` (alone or in `rope_parameters`)")
    return rope


__all__ = ["DFLASH2_FIELDS", "common_fields", "exported_fields", "require_dflash2_fields", "rope_parameters"]

"""z-lab's layout, and its variants from NeMo Automodel, ModelOpt and SpecForge.

Flat Qwen3 fields under `model_type: qwen3`, with a `dflash_config` for the rest. `block_size` stands at the top, in
`dflash_config` or in both. A sliding layer is causal inside the block unless `is_causal` (or ModelOpt's `causal`) says
otherwise; ModelOpt marks windows by `use_swa` and `swa_window_size` without naming layer types.
"""

from typing import Any

from .fields import common_fields


def matches(config_dict: dict[str, Any]) -> bool:
    """A `dflash_config`, or an architecture with DFlash in its name under a foreign model type."""
    if config_dict.get("model_type") == "dflash":
        return False
    named = any("dflash" in name.lower() for name in config_dict.get("architectures") or ())
    return named or "dflash_config" in config_dict


def convert_config(config_dict: dict[str, Any]) -> dict[str, Any]:
    """Translate to our fields. z-lab reads `dflash_config[name]`, then the top level.

    Raises:
        ValueError: a field contradicts itself, is missing, or asks for what is not supported.
    """
    nested = config_dict.get("dflash_config") or {}

    def value(name: str, default: Any = None) -> Any:
        return nested[name] if nested.get(name) is not None else config_dict.get(name, default)

    if any("dflash2" in name.lower() for name in config_dict.get("architectures") or ()) or value("selector_rank"):
        raise ValueError(
            "this is a DFlash 2 draft (convolutions and a candidate selector), which is not supported yet"
        )
    sizes = {place["block_size"] for place in (nested, config_dict) if place.get("block_size") is not None}
    if len(sizes) > 1:
        raise ValueError(
            f"the draft's config.json gives two block sizes, {sizes}: `block_size` at the top and in dflash_config"
        )

    fields = common_fields(config_dict)
    for name in (
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "num_target_layers",
        "target_hidden_size",
        "input_embedding_scale",
        "output_multiplier",
        "final_logit_softcapping",
    ):
        if value(name) is not None:
            fields[name] = value(name)
    if value("use_swa"):
        window = value("swa_window_size")
        if window is None:
            raise ValueError("the draft's config.json has `use_swa` without `swa_window_size`")
        fields["sliding_window"] = window
        fields["layer_types"] = ["sliding_attention"] * fields["num_hidden_layers"]
        is_causal = value("causal", value("is_causal", False))
    else:
        is_causal = value("is_causal", value("causal"))
    fields["causal_layer_types"] = {
        None: ["sliding_attention"],  # z-lab's reading: sliding layers are causal, full ones are not
        False: [],
        True: ["full_attention", "sliding_attention"],
    }[is_causal]
    return fields

"""z-lab's layout, and its variants from NeMo Automodel, ModelOpt and SpecForge.

Flat Qwen3 fields under `model_type: qwen3`, with a `dflash_config` for the rest. `block_size` stands at the top, in
`dflash_config` or in both. What layers see is read as vLLM does, which knows all the variants: a sliding layer is
causal inside the block and a full one is not, unless `is_causal` or `dflash_config.causal` says otherwise for all;
`use_swa` without a sliding layer in `layer_types` makes all layers sliding and none causal.
"""

from typing import Any

from ..configuration_dflash import DFlashDraftConfig
from .fields import DFLASH2_FIELDS, common_fields, exported_fields, require_dflash2_fields

# What the class that z-lab's code reads its configs with, Qwen3Config, takes for an absent field.
QWEN3_DEFAULTS = {"head_dim": 128, "max_position_embeddings": 32768, "max_window_layers": 28}


# Fields of ours that stand in `dflash_config` under the same names.
NESTED_FIELDS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    *DFLASH2_FIELDS,
)


def matches(config_dict: Any) -> bool:
    """A `dflash_config`, or an architecture with DFlash in its name under a foreign model type."""
    if not isinstance(config_dict, dict) or config_dict.get("model_type") == "dflash":
        return False
    named = any("dflash" in name.lower() for name in config_dict.get("architectures") or ())
    return named or "dflash_config" in config_dict


def convert_config(config_dict: dict[str, Any]) -> dict[str, Any]:
    """Translate to our fields. z-lab reads `dflash_config[name]`, then the top level.

    Raises:
        ValueError: a field contradicts itself or asks for what is not supported.
    """
    source = QWEN3_DEFAULTS | config_dict
    nested = source.get("dflash_config") or {}

    def value(name: str) -> Any:
        return nested[name] if nested.get(name) is not None else source.get(name)

    if value("is_neox_style") is False:
        raise ValueError("the draft's config.json has `is_neox_style: false`: interleaved rope is not supported")
    sizes = [place["block_size"] for place in (source, nested) if place.get("block_size") is not None]
    if len(sizes) == 2 and sizes[0] != sizes[1]:
        raise ValueError(
            f"the draft's config.json gives two block sizes: `block_size` is {sizes[0]} and "
            f"`dflash_config.block_size` is {sizes[1]}; remove the wrong one"
        )

    fields = common_fields(source)
    for name in (*NESTED_FIELDS, "num_target_layers", "target_hidden_size"):
        if value(name) is not None:
            fields[name] = value(name)
    if any("dflash2" in name.lower() for name in source.get("architectures") or ()):
        require_dflash2_fields(fields)
    return fields | _layer_fields(source, nested)


def export_config(config: DFlashDraftConfig, _architectures: list[str]) -> dict[str, Any]:
    """Translate from our fields, with the block size in both places where readers look for it.

    Raises:
        ValueError: the target's number of layers is not known, without which z-lab's class does not load.
    """
    if config.num_target_layers is None:
        raise ValueError(
            "z-lab's layout needs the target's number of layers, which this draft does not say: give the "
            "target (--target)"
        )
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    exported = exported_fields(config) | {
        "architectures": ["DFlashDraftModel" if config.conv_kernel_size is None else "DFlash2DraftModel"],
        "block_size": config.block_size,
        "dflash_config": {name: getattr(config, name) for name in NESTED_FIELDS if getattr(config, name) is not None},
        "model_type": "qwen3",
        "num_target_layers": config.num_target_layers,
        "rope_scaling": None if rope == {"rope_type": "default"} else rope,
        "rope_theta": theta,
    }
    causal = set(config.layer_types) & set(config.causal_layer_types)
    if causal in (set(), set(config.layer_types)):  # all alike; else only the layout's default can say it
        exported["is_causal"] = bool(causal)
    return exported


def _layer_fields(source: dict[str, Any], nested: dict[str, Any]) -> dict[str, Any]:
    """Which layers are sliding, how wide, and which are causal."""
    layers = source.get("num_hidden_layers")
    if not isinstance(layers, int):  # refused by name when the config is built
        layers = 0
    layer_types = source.get("layer_types")
    if layer_types is None:
        first_sliding = source["max_window_layers"] if source.get("use_sliding_window") else layers
        layer_types = ["sliding_attention" if i >= first_sliding else "full_attention" for i in range(layers)]
    causal_layer_types = ["sliding_attention"]
    if (nested.get("use_swa") or source.get("use_swa")) and "sliding_attention" not in layer_types:
        layer_types, causal_layer_types = ["sliding_attention"] * layers, []
    for place, name in ((source, "is_causal"), (nested, "is_causal"), (nested, "causal")):
        if place.get(name) is not None:
            if not isinstance(place[name], bool):
                raise ValueError(f"the draft's config.json has `{name}: {place[name]!r}` where true or false belongs")
            causal_layer_types = ["full_attention", "sliding_attention"] if place[name] else []
            break

    window = nested.get("swa_window_size") or source.get("swa_window_size")
    if window is None and source.get("use_sliding_window") is not False:
        window = source.get("sliding_window")
    if "sliding_attention" in layer_types and window is None:
        raise ValueError(
            "the draft's config.json asks for sliding layers (`layer_types` or `use_swa`) but gives no window: "
            f"`swa_window_size` is absent, and `sliding_window` is {source.get('sliding_window')} with "
            f"`use_sliding_window` {source.get('use_sliding_window')}"
        )
    return {"layer_types": layer_types, "sliding_window": window, "causal_layer_types": causal_layer_types}

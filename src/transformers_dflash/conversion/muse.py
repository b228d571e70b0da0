"""Transformers' own `muse_glimmer_assistant` layout: flat fields, all layers sliding and bidirectional.

Its embedding rows are the target's before their norm. The context projection has other weight names, which
`modeling_dflash.WEIGHT_RENAMES` covers. Its window does not count the slot itself, ours does.
"""

from typing import Any

from transformers import AutoConfig

from .fields import common_fields


def matches(config_dict: Any) -> bool:
    """The model type says it."""
    return isinstance(config_dict, dict) and config_dict.get("model_type") == "muse_glimmer_assistant"


def convert_config(config_dict: dict[str, Any]) -> dict[str, Any]:
    """Translate to our fields; what the file leaves out has the defaults of Transformers' class."""
    source = dict(config_dict)
    native = AutoConfig.for_model(source.pop("model_type"), **source).to_dict()
    fields = common_fields(native)
    for name in ("block_size", "mask_token_id", "target_layer_ids"):
        fields[name] = native[name]
    fields["sliding_window"] = native["sliding_window"] + 1
    fields["causal_layer_types"] = []
    return fields

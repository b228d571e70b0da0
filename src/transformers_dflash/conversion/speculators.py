"""speculators' layout (vLLM): nested layer config, taps numbered one higher, a reduced vocabulary with its own head.

`aux_hidden_state_layer_ids` counts as `hidden_states` does, where 0 is the embedding: id i is layer i - 1's output.
`transformer_layer_config` is stored as a difference to its class's defaults.
"""

from typing import Any

from transformers import AutoConfig

from .fields import DFLASH2_FIELDS, common_fields, require_dflash2_fields


def matches(config_dict: Any) -> bool:
    """Any speculators config that names a DFlash algorithm."""
    return isinstance(config_dict, dict) and str(config_dict.get("speculators_model_type")).startswith("dflash")


def convert_config(config_dict: dict[str, Any]) -> dict[str, Any]:
    """Translate to our fields.

    Raises:
        ValueError: a field is missing or asks for what is not supported.
    """
    algorithm = config_dict["speculators_model_type"]
    if algorithm not in ("dflash", "dflash2"):
        raise ValueError(f"this is a {algorithm} draft, which is not supported: dflash and dflash2 are")
    nested = dict(config_dict.get("transformer_layer_config") or {})
    if not nested:
        raise ValueError(
            "the draft's config.json lacks `transformer_layer_config`: its layers cannot be built without it"
        )
    model_type = nested.pop("model_type", "qwen3")
    layer = AutoConfig.for_model(model_type, **nested).to_dict()
    taps = config_dict.get("aux_hidden_state_layer_ids")
    if taps is None:
        raise ValueError(
            "the draft's config.json lacks `aux_hidden_state_layer_ids`: add the taps it was trained with"
        )
    if not isinstance(taps, list) or not all(isinstance(tap, int) and tap > 0 for tap in taps):
        raise ValueError(
            "aux_hidden_state_layer_ids must be a list of layers from 1 on (0, the target's embedding, is not "
            f"supported as a tap); got {taps}"
        )

    fields = common_fields(layer)
    fields["dtype"] = config_dict.get("dtype", config_dict.get("torch_dtype"))
    fields["target_layer_ids"] = [tap - 1 for tap in taps]
    fields["block_size"] = config_dict.get("block_size")
    fields["mask_token_id"] = config_dict.get("mask_token_id")
    fields["target_hidden_size"] = config_dict.get("target_hidden_size")
    fields["sample_from_anchor"] = bool(config_dict.get("sample_from_anchor", False))
    non_causal = config_dict.get("sliding_window_non_causal", algorithm == "dflash2")
    fields["causal_layer_types"] = [] if non_causal else ["sliding_attention"]
    if algorithm == "dflash2":
        fields |= {name: config_dict.get(name) for name in DFLASH2_FIELDS}
        require_dflash2_fields(fields)
    draft_vocab_size = config_dict.get("draft_vocab_size")
    if draft_vocab_size is not None and draft_vocab_size != layer["vocab_size"]:
        fields["draft_vocab_size"] = draft_vocab_size
    verifier = (config_dict.get("speculators_config") or {}).get("verifier") or {}
    fields["target_name_or_path"] = verifier.get("name_or_path")
    if config_dict.get("quantization_config") is not None:
        fields["quantization_config"] = config_dict["quantization_config"]
    return fields

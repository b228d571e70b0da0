"""speculators' layout (vLLM): nested layer config, taps numbered one higher, a reduced vocabulary with its own head.

`aux_hidden_state_layer_ids` counts as `hidden_states` does, where 0 is the embedding: id i is layer i - 1's output.
`transformer_layer_config` is stored as a difference to its class's defaults.
"""

from typing import Any

from transformers import AutoConfig

from ..configuration_dflash import DFlashDraftConfig
from .fields import DFLASH2_FIELDS, common_fields, exported_fields, require_dflash2_fields


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


def export_config(config: DFlashDraftConfig, architectures: list[str]) -> dict[str, Any]:
    """Translate from our fields, with all of the layer config spelled out.

    Raises:
        ValueError: the target's name is not known, from which speculators and vLLM take embedding and head.
    """
    if config.target_name_or_path is None:
        raise ValueError("speculators' layout names the target, which this draft does not: give it (--target)")
    algorithm = "dflash" if config.conv_kernel_size is None else "dflash2"
    sizes = {name: getattr(config, name) for name in DFLASH2_FIELDS} if algorithm == "dflash2" else {}
    layer = exported_fields(config) | {"model_type": "qwen3", "rope_parameters": config.rope_parameters}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.num_candidates,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {"name_or_path": config.target_name_or_path, "architectures": architectures}
    return sizes | {
        "architectures": ["DFlashDraftModel" if algorithm == "dflash" else "DFlash2DraftModel"],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "block_size": config.block_size,
        "draft_vocab_size": config.vocab_size if config.draft_vocab_size is None else config.draft_vocab_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": "sliding_attention" not in config.causal_layer_types,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "speculators_model_type": algorithm,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
    }

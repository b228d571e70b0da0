"""Tiny drafts on disk in the layouts of other systems."""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from transformers_dflash import DFlashDraftConfig, DFlashDraftModel

ZLAB = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 6,
    "bos_token_id": 1,
    "dflash_config": {"mask_token_id": 31, "target_layer_ids": [1, 3]},
    "dtype": "float32",
    "eos_token_id": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 512,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.3",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 32,
}
SPECULATORS = {
    "architectures": ["DFlashDraftModel"],
    "aux_hidden_state_layer_ids": [2, 4],
    "block_size": 6,
    "draft_vocab_size": 32,
    "dtype": "float32",
    "mask_token_id": 31,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1}
        ],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
    },
    "speculators_model_type": "dflash",
    "speculators_version": "0.9.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    # a difference to Qwen3Config's defaults: head_dim 128 and rms_norm_eps 1e-6 are left out
    "transformer_layer_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "vocab_size": 32,
    },
    "transformers_version": "5.18.0",
}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "use_sliding_window": True,
}

DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}


def changed(config: dict, without: tuple[str, ...] = (), **changes) -> dict:
    """A copy of a config without some fields, wherever they stand, and with others added; nested dicts are merged."""
    config = copy.deepcopy(config)
    for place in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name in without:
            place.pop(name, None)
    for name, value in changes.items():
        merge = isinstance(value, dict) and isinstance(config.get(name), dict)
        config[name] = config[name] | value if merge else value
    return config


def write_config(folder: Path, config: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_weights(folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights that fit the config in a folder, by our names, which v1 layouts share."""
    torch.manual_seed(seed)
    weights = DFlashDraftModel(DFlashDraftConfig.from_pretrained(folder)).state_dict()
    return {
        name: tensor.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2) if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }


def write_draft(folder: Path, config: dict, seed: int = 0) -> Path:
    """A folder with a config and random weights that fit it."""
    write_config(folder, config)
    save_file(random_weights(folder, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder

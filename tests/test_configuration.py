"""DFlashDraftConfig: what it derives, what it refuses, and that it is read back as it was written."""

import json

import pytest
from conftest import MASK, VOCAB, make_draft
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, BloomConfig, FalconConfig, GPT2Config, GPTNeoXConfig, MambaConfig, OPTConfig

from transformers_dflash import DFlashDraftConfig
from transformers_dflash.configuration_dflash import default_target_layer_ids

FIELDS = {
    "block_size": 6,
    "mask_token_id": MASK,
    "target_layer_ids": [1, 3],
    "num_target_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
}
SLIDING = ["sliding_attention", "full_attention"]


def config(**changes) -> DFlashDraftConfig:
    return DFlashDraftConfig(**FIELDS | changes)


# creating


@pytest.mark.parametrize(
    ("layers", "taps", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (32, 5, [1, 8, 15, 22, 29]),
        (48, 8, [1, 7, 14, 20, 26, 32, 39, 45]),
        (30, 5, [1, 8, 14, 20, 27]),  # Python rounds 7.5 up and 20.5 down
        (36, 1, [18]),
        (5, 2, [1, 2]),
    ],
)
def test_default_taps_are_the_authors(layers, taps, expected):
    assert default_target_layer_ids(layers, taps) == expected


@pytest.mark.parametrize(("layers", "taps"), [(4, 2), (6, 5), (1, 3)])
def test_default_taps_that_do_not_fit_are_refused(layers, taps):
    with pytest.raises(ValueError, match="pass target_layer_ids"):
        default_target_layer_ids(layers, taps)


def test_a_new_config_takes_the_default_taps_of_its_target():
    assert config(target_layer_ids=None, num_target_layers=36).target_layer_ids == [1, 9, 17, 25, 33]


def test_what_is_left_out_is_derived():
    made = config(head_dim=None, num_key_value_heads=None)
    assert (made.head_dim, made.num_key_value_heads, made.target_hidden_size) == (8, 4, 32)
    assert made.layer_types == ["full_attention"] * 2
    assert made.causal_layer_types == []
    assert made.rope_parameters == {"rope_type": "default", "rope_theta": 1_000_000.0}


@pytest.mark.parametrize(("from_anchor", "expected"), [(False, 5), (True, 6)])
def test_sampling_from_the_anchor_gives_one_candidate_more(from_anchor, expected):
    assert config(sample_from_anchor=from_anchor).num_candidates == expected


def test_from_target_takes_the_targets_shape_and_tokens(target):
    made = DFlashDraftConfig.from_target(target.config, MASK, target_layer_ids=[0, 3], block_size=4)
    assert made.rope_parameters["rope_theta"] == target.config.rope_parameters["rope_theta"]
    for name in ("hidden_size", "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(made, name) == getattr(target.config, name)
    assert made.num_target_layers == target.config.num_hidden_layers
    assert (made.mask_token_id, made.target_layer_ids, made.block_size) == (MASK, [0, 3], 4)


@pytest.mark.parametrize("kind", [GPT2Config, GPTNeoXConfig, OPTConfig, BloomConfig, FalconConfig])
def test_from_target_fills_in_what_older_families_do_not_say(kind):
    target = kind(hidden_size=32, num_attention_heads=4, num_hidden_layers=8, vocab_size=64)
    made = DFlashDraftConfig.from_target(target, MASK)
    assert (made.hidden_size, made.num_attention_heads, made.num_key_value_heads) == (32, 4, 4)
    assert made.intermediate_size == (target.intermediate_size if kind is GPTNeoXConfig else 128)


def test_from_target_asks_for_what_a_target_does_not_say():
    target = MambaConfig(hidden_size=32, num_hidden_layers=8, vocab_size=64)
    with pytest.raises(ValueError, match="MambaConfig says no num_attention_heads: pass num_attention_heads="):
        DFlashDraftConfig.from_target(target, MASK)
    assert DFlashDraftConfig.from_target(target, MASK, num_attention_heads=4).num_attention_heads == 4


# refusing


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": None, "num_target_layers": None}, "needs `target_layer_ids`"),
        ({"mask_token_id": None}, "needs `mask_token_id`"),
        ({"target_layer_ids": []}, "target_layer_ids must be distinct"),
        ({"target_layer_ids": [-1, 3]}, r"target_layer_ids must be distinct 0-based .* got \[-1, 3\]"),
        ({"target_layer_ids": [3, 3]}, r"target_layer_ids must be distinct .* got \[3, 3\]"),
        ({"target_layer_ids": [1, 4]}, r"target_layer_ids has 4, but the target has 4 layers .* the last one is 3"),
        ({"block_size": 1}, "block_size must be at least 2 .* got 1"),
        ({"block_size": -3}, "block_size must be at least 2 .* got -3"),
        ({"mask_token_id": VOCAB}, f"mask_token_id {VOCAB} is not a row of the target's embedding of {VOCAB} rows"),
        ({"mask_token_id": -1}, "mask_token_id -1 is not a row"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads must be at least 1, got 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be at least 1, got 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ({"head_dim": -8}, "head_dim must be at least 1, got -8"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers is 2"),
        ({"layer_types": ["full_attention", "mamba2"]}, "layer_types has 'mamba2'"),
        ({"causal_layer_types": ["all"]}, "causal_layer_types has 'all'"),
        ({"layer_types": SLIDING}, "sliding_window must be a positive integer; got None"),
        ({"layer_types": SLIDING, "sliding_window": 0}, "sliding_window must be a positive integer; got 0"),
        ({"hidden_act": "nope"}, "hidden_act 'nope' is no activation"),
        ({"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e6}}, "rope_type 'mrope'; it is one of default"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "1e6"}}, "rope_theta '1e6', which is no number"),
        ({"context_injection": "both"}, "context_injection is one of fused, layer_aligned; got 'both'"),
        (
            {"context_injection": "layer_aligned", "target_layer_ids": [1]},
            "layer_aligned injection needs one tap per draft layer: 1 taps, 2 layers",
        ),
        (
            {"context_injection": "layer_aligned", "target_hidden_size": 16},
            "target_hidden_size must equal hidden_size: 16 and 32",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_a_draft_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", "32"),
        ("hidden_size", 32.5),
        ("block_size", "16"),
        ("block_size", True),
        ("mask_token_id", "<mask>"),
        ("target_layer_ids", "1,3"),
        ("target_layer_ids", ["1", 3]),
        ("target_layer_ids", 3),
        ("num_attention_heads", None),
        ("layer_types", "full_attention"),
        ("sliding_window", "8"),
        ("sample_from_anchor", "no"),
        ("rms_norm_eps", "1e-6"),
        ("rope_parameters", [1]),
        ("final_logit_softcapping", "30"),
    ],
)
def test_a_wrong_type_is_refused_with_the_fields_name(name, value):
    with pytest.raises(StrictDataclassError, match=f"field '{name}'"):
        config(**{name: value})


def test_a_rope_without_its_factor_is_refused():
    with pytest.raises(KeyError, match=r"'yarn': \{'factor'\}"):
        config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e6})


# writing and reading back


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_size": 16, "num_key_value_heads": 4},  # the class's defaults are written too
        {"layer_types": SLIDING, "sliding_window": 8, "causal_layer_types": ["sliding_attention"]},
        {"context_injection": "layer_aligned"},
        {
            "sample_from_anchor": True,
            "draft_vocab_size": 16,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 20.0,
        },
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 50000.0,
                "factor": 64.0,
                "original_max_position_embeddings": 4096,
            }
        },
        {"target_name_or_path": "org/target", "target_revision": "abc", "eos_token_id": [2, 3], "dtype": "bfloat16"},
        {"input_embedding_scale": 2, "target_hidden_size": 64},
    ],
    ids=["plain", "defaults", "sliding causal", "layer-aligned", "reduced head", "yarn", "pairing", "scales"],
)
def test_a_saved_config_is_read_back_equal(tmp_path, changes):
    made = config(**changes)
    made.save_pretrained(tmp_path)
    for read in (DFlashDraftConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(read) is DFlashDraftConfig
        assert read.to_dict() | {"_name_or_path": ""} == made.to_dict()


def test_a_saved_config_is_explicit(tmp_path):
    config(target_layer_ids=None, num_target_layers=36, num_hidden_layers=5, head_dim=None).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["target_layer_ids"] == [1, 9, 17, 25, 33]
    assert (written["mask_token_id"], written["block_size"], written["head_dim"]) == (MASK, 6, 8)
    assert written["model_type"] == "dflash"


def test_a_config_can_be_printed_and_compared():
    assert '"mask_token_id": 31' in repr(config())
    assert config() == config()
    assert config() != config(block_size=7)


@pytest.mark.parametrize(
    "name",
    [
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
        "target_layer_ids",  # never the default formula, though num_target_layers is there
    ],
)
@pytest.mark.parametrize("read", [DFlashDraftConfig, AutoConfig], ids=["DFlashDraftConfig", "AutoConfig"])
def test_a_file_without_a_mandatory_field_is_refused(tmp_path, read, name):
    config().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    del written[name]
    path.write_text(json.dumps(written))
    with pytest.raises(ValueError, match=f"lacks `{name}`"):
        read.from_pretrained(tmp_path)


@pytest.mark.parametrize("read", [DFlashDraftConfig, AutoConfig], ids=["DFlashDraftConfig", "AutoConfig"])
def test_keywords_replace_fields_of_the_file_and_are_checked_alike(tmp_path, read):
    config().save_pretrained(tmp_path)
    assert read.from_pretrained(tmp_path, block_size=4).block_size == 4
    with pytest.raises(ValueError, match="block_size must be at least 2"):
        read.from_pretrained(tmp_path, block_size=1)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    del written["mask_token_id"]
    path.write_text(json.dumps(written))
    read_config, unused = read.from_pretrained(tmp_path, mask_token_id=3, other=1, return_unused_kwargs=True)
    assert read_config.mask_token_id == 3
    assert unused.items() >= {"other": 1}.items()
    assert "mask_token_id" not in unused


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('{"model_type": ', OSError, "config.json' is not a valid JSON file"),
        ("[1, 2]", ValueError, "config.json holds a JSON list instead of an object"),
        ('"dflash"', ValueError, "config.json holds a JSON str instead of an object"),
        ("{}", ValueError, "holds no DFlash draft: its config.json is missing or empty"),
        ('{"model_type": "qwen3"}', ValueError, "holds no DFlash draft: its config.json has model_type 'qwen3'"),
    ],
    ids=["cut short", "list", "string", "empty", "another model"],
)
def test_a_file_that_is_no_drafts_config_is_refused(tmp_path, text, error, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(error, match=message):
        DFlashDraftConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("text", ["[1, 2]", '"dflash"', "{}", '{"model_type": '])
def test_auto_config_says_about_garbage_what_it_says_without_us(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises((OSError, ValueError), match=r"Unrecognized model|not a valid JSON file"):
        AutoConfig.from_pretrained(tmp_path)


def test_the_models_config_names_its_class(tmp_path, target):
    make_draft(target).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["DFlashDraftModel"]
    assert written["dtype"] == "float32"

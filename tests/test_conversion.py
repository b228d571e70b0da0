"""Configs in the layouts of other systems, translated while they are read."""

import pytest
from huggingface_hub.errors import StrictDataclassError
from layouts import DFLASH2, SLIDING, SPECULATORS, ZLAB, changed, write_config
from transformers import AutoConfig, Qwen3Config

from transformers_dflash import DFlashDraftConfig
from transformers_dflash.configuration_dflash import default_target_layer_ids

FULL_TYPE, SLIDING_TYPE = "full_attention", "sliding_attention"
K26_YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "rope_theta": 50000.0,
    "rope_type": "yarn",
}


def read(folder, config: dict) -> DFlashDraftConfig:
    """Write a config and read it through both doors, which must agree."""
    write_config(folder, config)
    ours, auto = DFlashDraftConfig.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    assert type(auto) is DFlashDraftConfig
    assert ours.to_dict() | {"_name_or_path": ""} == auto.to_dict() | {"_name_or_path": ""}
    return ours


# z-lab


def test_zlab_v1_is_read_field_by_field(tmp_path):
    config = read(tmp_path, ZLAB)
    for name in (
        "block_size",
        "bos_token_id",
        "eos_token_id",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "num_target_layers",
        "rms_norm_eps",
        "vocab_size",
    ):
        assert getattr(config, name) == ZLAB[name], name
    assert (config.mask_token_id, config.target_layer_ids) == (31, [1, 3])
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1000000}
    assert (config.context_injection, config.sample_from_anchor) == ("fused", False)
    assert config.target_hidden_size == config.hidden_size


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (changed(ZLAB, block_size=12), 12),
        (changed(ZLAB, without=("block_size",), dflash_config={"block_size": 12}), 12),
        (changed(ZLAB, block_size=12, dflash_config={"block_size": 12}), 12),
        (changed(ZLAB, block_size=None, dflash_config={"block_size": 12}), 12),
    ],
    ids=["at the top", "nested", "both", "null at the top"],
)
def test_block_size_is_found_where_it_stands(tmp_path, config, expected):
    assert read(tmp_path, config).block_size == expected


def test_two_block_sizes_are_refused_with_both_numbers(tmp_path):
    write_config(tmp_path, changed(ZLAB, block_size=16, dflash_config={"block_size": 8}))
    with pytest.raises(ValueError, match=r"`block_size` is 16 and `dflash_config.block_size` is 8"):
        AutoConfig.from_pretrained(tmp_path)


def test_nested_fields_win_over_the_top_level(tmp_path):
    config = read(tmp_path, changed(ZLAB, mask_token_id=3, target_layer_ids=[0], final_logit_softcapping=30))
    assert (config.mask_token_id, config.target_layer_ids, config.final_logit_softcapping) == (31, [1, 3], 30)


def test_mask_and_taps_may_stand_at_the_top(tmp_path):
    flat = changed(ZLAB, without=("dflash_config",), mask_token_id=30, target_layer_ids=[0, 2])
    config = read(tmp_path, flat)
    assert (config.mask_token_id, config.target_layer_ids) == (30, [0, 2])


@pytest.mark.parametrize(
    "config",
    [
        changed(ZLAB, auto_map={"AutoModel": "dflash.DFlashDraftModel"}),
        changed(ZLAB, architectures=["Qwen3ForDFlashDraft"]),
        changed(ZLAB, architectures=["LlamaForCausalLMDraft"]),
        changed(ZLAB, architectures=None),
        changed(ZLAB, without=("architectures",), model_type="llama"),
    ],
    ids=["auto_map", "Automodel's name", "another name", "no architectures", "another model type"],
)
def test_variants_of_the_zlab_layout_are_known(tmp_path, config, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("Transformers asked to trust remote code"))
    assert read(tmp_path, config).architectures == ["DFlashDraftModel"]


CAUSAL = {"sliding": [SLIDING_TYPE], "none": [], "both": [FULL_TYPE, SLIDING_TYPE]}
MIXED = [SLIDING_TYPE, FULL_TYPE]
ALL_SLIDING = [SLIDING_TYPE, SLIDING_TYPE]
ALL_FULL = [FULL_TYPE, FULL_TYPE]


@pytest.mark.parametrize(
    ("config", "layer_types", "window", "causal"),
    [
        (ZLAB, ALL_FULL, None, "sliding"),
        (changed(ZLAB, is_causal=True), ALL_FULL, None, "both"),
        (changed(ZLAB, **SLIDING), MIXED, 8, "sliding"),
        (changed(ZLAB, **SLIDING, is_causal=None), MIXED, 8, "sliding"),
        (changed(ZLAB, **SLIDING, is_causal=False), MIXED, 8, "none"),
        (changed(ZLAB, **SLIDING, is_causal=True), MIXED, 8, "both"),
        (changed(ZLAB, **SLIDING, dflash_config={"causal": False}), MIXED, 8, "none"),
        (changed(ZLAB, **SLIDING, is_causal=True, dflash_config={"causal": False}), MIXED, 8, "both"),
        # the layers named by the flags that Qwen3Config reads
        (changed(ZLAB, layer_types=None, use_sliding_window=True, sliding_window=8, max_window_layers=1),
         [FULL_TYPE, SLIDING_TYPE], 8, "sliding"),
        (changed(ZLAB, ("layer_types",), use_sliding_window=True, sliding_window=8), ALL_FULL, 8, "sliding"),
        (changed(ZLAB, ("layer_types", "use_sliding_window"), sliding_window=8), ALL_FULL, 8, "sliding"),
        # ModelOpt, older and newer
        (changed(ZLAB, sliding_window=8, dflash_config={"use_swa": True, "swa_window_size": 8, "causal": False}),
         ALL_SLIDING, 8, "none"),
        (changed(ZLAB, layer_types=ALL_SLIDING, sliding_window=8,
                 dflash_config={"use_swa": True, "swa_window_size": 8, "causal": False}),
         ALL_SLIDING, 8, "none"),
        (changed(ZLAB, dflash_config={"use_swa": True, "swa_window_size": 8, "causal": True}),
         ALL_SLIDING, 8, "both"),
        (changed(ZLAB, **SLIDING, dflash_config={"use_swa": True}), MIXED, 8, "sliding"),
        (changed(ZLAB, layer_types=MIXED, dflash_config={"swa_window_size": 4}), MIXED, 4, "sliding"),
        # MiMo
        (changed(ZLAB, ("layer_types", "sliding_window"), dflash_config={"use_swa": True, "swa_window_size": 8}),
         ALL_SLIDING, 8, "none"),
        (changed(ZLAB, ("layer_types", "sliding_window"), use_swa=True, swa_window_size=8), ALL_SLIDING, 8, "none"),
    ],
    ids=[
        "full",
        "full causal",
        "mixed",
        "mixed, is_causal null",
        "mixed, is_causal false",
        "mixed, is_causal true",
        "mixed, nested causal false",
        "mixed, is_causal over nested causal",
        "max_window_layers",
        "max_window_layers by default",
        "window without flag or layer types",
        "ModelOpt, layer types full",
        "ModelOpt, layer types sliding",
        "ModelOpt, causal",
        "use_swa beside layer types",
        "swa_window_size beside layer types",
        "MiMo, nested",
        "MiMo, at the top",
    ],
)  # fmt: skip
def test_what_layers_see_is_read_as_the_variant_means_it(tmp_path, config, layer_types, window, causal):
    ours = read(tmp_path, config)
    assert ours.layer_types == layer_types
    if SLIDING_TYPE in layer_types:
        assert ours.sliding_window == window
    seen_causally = [kind for kind in set(layer_types) if kind in ours.causal_layer_types]
    assert sorted(seen_causally) == sorted(set(CAUSAL[causal]) & set(layer_types))


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_scaling": None, "rope_theta": 1e7}, {"rope_type": "default", "rope_theta": 1e7}),
        ({"rope_scaling": {}, "rope_theta": 1e7}, {"rope_type": "default", "rope_theta": 1e7}),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
            {"rope_type": "default", "rope_theta": 1e7},
        ),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_theta": 1e7},
            {"rope_type": "default", "rope_theta": 1e7},
        ),
        ({"rope_parameters": K26_YARN}, K26_YARN),
        (
            {
                "rope_scaling": {name: K26_YARN[name] for name in K26_YARN if name not in ("rope_theta", "rope_type")}
                | {"type": "yarn"},
                "rope_theta": 50000.0,
            },
            K26_YARN,
        ),
        (
            {
                "rope_parameters": {
                    "mrope_interleaved": True,
                    "mrope_section": [11, 11, 10],
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1e7,
                    "rope_type": "default",
                },
                "partial_rotary_factor": 0.25,
            },
            {"rope_type": "default", "rope_theta": 1e7},
        ),
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}, "rope_theta": 1e6},
            {"rope_type": "default", "rope_theta": 1e6},
        ),
    ],
    ids=[
        "null rope_scaling",
        "empty rope_scaling",
        "nested theta",
        "theta beside",
        "yarn",
        "yarn in rope_scaling",
        "leaked target fields",
        "leaked mrope",
    ],
)
def test_the_draft_has_its_own_rope(tmp_path, rope, expected):
    config = read(tmp_path, changed(ZLAB, ("rope_scaling", "rope_theta")) | rope)
    assert config.rope_parameters == expected
    assert "partial_rotary_factor" not in config.to_dict()


def test_a_draft_without_a_rope_base_is_refused(tmp_path):
    write_config(tmp_path, changed(ZLAB, ("rope_theta",)))
    with pytest.raises(ValueError, match="lacks `rope_theta`"):
        AutoConfig.from_pretrained(tmp_path)


def test_absent_fields_have_the_defaults_of_the_class_that_zlab_reads_them_with(tmp_path):
    config = read(tmp_path, changed(ZLAB, ("head_dim", "max_position_embeddings", "hidden_act")))
    theirs = Qwen3Config()
    for name in ("head_dim", "max_position_embeddings", "hidden_act"):
        assert getattr(config, name) == getattr(theirs, name)


def test_target_and_training_fields_are_left_out(tmp_path):
    config = read(tmp_path, changed(ZLAB, image_token_id=5, mtp_num_hidden_layers=1, tie_word_embeddings=True))
    assert not {"image_token_id", "mtp_num_hidden_layers", "use_cache", "dflash_config"} & config.to_dict().keys()
    assert config.tie_word_embeddings is False  # it has nothing to tie


def test_tap_count_is_independent_of_layer_count(tmp_path):
    taps = [0, 1, 2, 3]
    config = read(tmp_path, changed(ZLAB, dflash_config={"target_layer_ids": taps}, target_hidden_size=64))
    assert (config.target_layer_ids, config.num_hidden_layers, config.target_hidden_size) == (taps, 2, 64)


def test_dtype_and_quantization_are_kept(tmp_path):
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = read(tmp_path, changed(ZLAB, ("dtype",), torch_dtype="bfloat16", quantization_config=quantization))
    assert str(config.dtype) == "torch.bfloat16"
    assert config.quantization_config == quantization


# refusals, through both doors


def refused(folder, config, message):
    write_config(folder, config)
    for door in (DFlashDraftConfig, AutoConfig):
        with pytest.raises(ValueError, match=message):
            door.from_pretrained(folder)


@pytest.mark.parametrize(
    "name",
    [
        "block_size",
        "hidden_size",
        "intermediate_size",
        "mask_token_id",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "target_layer_ids",
    ],
)
def test_a_missing_field_is_refused_by_name(tmp_path, name):
    refused(tmp_path, changed(ZLAB, (name,)), f"lacks `{name}`")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {"target_layer_ids": [-1, 3]}}, r"target_layer_ids must be distinct 0-based"),
        ({"dflash_config": {"target_layer_ids": [3, 3]}}, r"target_layer_ids must be distinct 0-based"),
        ({"dflash_config": {"target_layer_ids": [1, 4]}}, r"target_layer_ids has 4, but the target has 4 layers"),
        ({"dflash_config": {"mask_token_id": 32}}, "mask_token_id 32 is not a row of .* 32 rows"),
        ({"block_size": 1}, "block_size must be at least 2"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers is 2"),
        ({"layer_types": MIXED}, "gives no window: .* `sliding_window` is None with `use_sliding_window` False"),
        (
            {"layer_types": MIXED, "sliding_window": 8, "use_sliding_window": False},
            "gives no window: .* `sliding_window` is 8 with `use_sliding_window` False",
        ),
        ({"dflash_config": {"use_swa": True}}, "gives no window: `swa_window_size` is absent"),
        ({"is_causal": "no"}, "`is_causal: 'no'` where true or false belongs"),
        ({"is_neox_style": False}, "interleaved rope is not supported"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash 2 draft's config.json lacks `conv_kernel_size`"),
        ({"dflash_config": {"selector_rank": 256}}, "come together: `selector_top_k` is missing"),
        ({"dflash_config": DFLASH2 | {"conv_group_size": 5}}, "32 is not a multiple of conv_group_size 5"),
        ({"dflash_config": DFLASH2 | {"selector_top_k": 33}}, "selector_top_k 33 exceeds vocab_size 32"),
    ],
    ids=[
        "negative tap",
        "tap twice",
        "tap past the target",
        "mask outside the embedding",
        "block of one",
        "layer_types too short",
        "no window",
        "window switched off",
        "use_swa without a window",
        "is_causal no boolean",
        "interleaved rope",
        "DFlash 2 without its sizes",
        "half a selector",
        "groups that do not fit",
        "more candidates than tokens",
    ],
)
def test_wrong_values_are_refused_by_name(tmp_path, changes, message):
    refused(tmp_path, changed(ZLAB, **changes), message)


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "block_size", "rms_norm_eps", "vocab_size"])
def test_a_string_where_a_number_belongs_is_refused_with_the_fields_name(tmp_path, name):
    write_config(tmp_path, changed(ZLAB, **{name: "16"}))
    for door in (DFlashDraftConfig, AutoConfig):
        with pytest.raises(StrictDataclassError, match=f"field '{name}'"):
            door.from_pretrained(tmp_path)


# speculators


def test_speculators_is_read_field_by_field(tmp_path):
    config = read(tmp_path, SPECULATORS)
    nested = SPECULATORS["transformer_layer_config"]
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "rope_parameters"):
        assert getattr(config, name) == nested[name]
    defaults = Qwen3Config()
    for name in ("head_dim", "rms_norm_eps", "hidden_act", "max_position_embeddings"):
        assert getattr(config, name) == getattr(defaults, name), "a field that the diff leaves out"
    assert config.target_layer_ids == [1, 3]
    assert (config.block_size, config.mask_token_id, config.vocab_size) == (6, 31, 32)
    assert (config.draft_vocab_size, config.sample_from_anchor) == (None, False)
    assert config.target_name_or_path == "Qwen/Qwen3-8B"
    assert config.target_hidden_size == 32
    assert str(config.dtype) == "torch.float32"


@pytest.mark.parametrize("architecture", ["DFlashDraftModel", "DFlashSpeculator"])
def test_speculators_layout_is_known_by_its_type_whatever_the_architecture(tmp_path, architecture):
    config = changed(SPECULATORS, architectures=[architecture], sample_from_anchor=True, draft_vocab_size=16)
    ours = read(tmp_path, config)
    assert (ours.sample_from_anchor, ours.num_candidates, ours.draft_vocab_size) == (True, 6, 16)
    assert ours.target_layer_ids == [1, 3]


@pytest.mark.parametrize(("non_causal", "causal"), [(False, [SLIDING_TYPE]), (True, [])])
def test_speculators_sliding_layers_are_causal_unless_said(tmp_path, non_causal, causal):
    config = changed(SPECULATORS, transformer_layer_config=SLIDING, sliding_window_non_causal=non_causal)
    ours = read(tmp_path, config)
    assert (ours.layer_types, ours.sliding_window, ours.causal_layer_types) == (MIXED, 8, causal)


def test_speculators_fills_the_defaults_of_another_layer_class(tmp_path):
    llama = {"model_type": "llama", "num_key_value_heads": 4, "head_dim": None}
    config = read(tmp_path, changed(SPECULATORS, transformer_layer_config=llama))
    assert (config.head_dim, config.num_key_value_heads) == (8, 4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            changed(SPECULATORS, speculators_model_type="dflash2"),
            "DFlash 2 draft's config.json lacks `conv_kernel_size`",
        ),
        (changed(SPECULATORS, speculators_model_type="dflash3"), "this is a dflash3 draft, which is not supported"),
        (changed(SPECULATORS, ("aux_hidden_state_layer_ids",)), "lacks `aux_hidden_state_layer_ids`"),
        (changed(SPECULATORS, aux_hidden_state_layer_ids=[0, 2]), r"aux_hidden_state_layer_ids must .* got \[0, 2\]"),
        (changed(SPECULATORS, aux_hidden_state_layer_ids=["2"]), r"aux_hidden_state_layer_ids must .* got \['2'\]"),
        (changed(SPECULATORS, ("transformer_layer_config",)), "lacks `transformer_layer_config`"),
        (changed(SPECULATORS, ("block_size",)), "lacks `block_size`"),
        (changed(SPECULATORS, mask_token_id=None), "lacks `mask_token_id`"),
        (changed(SPECULATORS, mask_token_id=32), "mask_token_id 32 is not a row"),
    ],
    ids=[
        "dflash2",
        "dflash3",
        "no taps",
        "embedding tap",
        "tap no number",
        "no layers",
        "no block size",
        "no mask",
        "mask out",
    ],
)
def test_wrong_speculators_configs_are_refused_by_name(tmp_path, config, message):
    refused(tmp_path, config, message)


# published drafts


def draft(layers, sizes, heads, block, taps, targets, mask, sliding=0, window=None, **extra):
    """A row of the table of published drafts: its config, and what must come out of it."""
    config = changed(
        ZLAB,
        ("vocab_size",),
        block_size=block,
        num_hidden_layers=layers,
        hidden_size=sizes[0],
        intermediate_size=sizes[1],
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=heads[2],
        layer_types=[SLIDING_TYPE] * sliding + [FULL_TYPE] * (layers - sliding),
        sliding_window=window,
        use_sliding_window=window is not None,
        max_window_layers=layers,
        num_target_layers=targets,
        dflash_config={"mask_token_id": mask, "target_layer_ids": taps},
    )
    return config | extra


UNKNOWN_MASK = 3  # not on public pages
PUBLISHED = {
    "Qwen3-4B-b16": draft(
        5, (2560, 9728), (32, 8, 128), 16, [1, 9, 17, 25, 33], 36, 151669, vocab_size=151936, tie_word_embeddings=True,
        auto_map={"AutoModel": "dflash.DFlashDraftModel"},
    ),
    "Qwen3-8B-b16": draft(5, (4096, 12288), (32, 8, 128), 16, [1, 9, 17, 25, 33], 36, 151669),
    "LLaMA3.1-8B-UltraChat": draft(5, (4096, 12288), (32, 8, 128), 10, [1, 8, 15, 22, 29], 32, 128002),
    "Qwen3-Coder-30B-A3B": draft(8, (2048, 6144), (32, 4, 128), 16, [1, 12, 23, 34, 45], 48, UNKNOWN_MASK),
    "Qwen3-Coder-Next": draft(8, (2048, 6144), (32, 4, 128), 16, [3, 11, 23, 35, 43], 48, UNKNOWN_MASK),
    "gpt-oss-20b": draft(8, (2880, 7680), (64, 8, 64), 8, [1, 6, 11, 16, 21], 24, 200000),
    "gpt-oss-120b": draft(8, (2880, 7680), (64, 8, 64), 10, [1, 9, 17, 25, 33], 36, 200000),
    "Kimi-K2.5": draft(6, (7168, 18432), (64, 8, 128), 8, [1, 12, 24, 35, 47, 58], 61, 163838),
    "Kimi-K2.6": draft(
        6, (7168, 18432), (64, 8, 128), 8, [1, 12, 24, 35, 47, 58], 61, 163838, rope_parameters=K26_YARN,
    ),
    "Qwen3.5-4B, first": draft(
        5, (2560, 9216), (32, 8, 128), 16, default_target_layer_ids(32, 8), 32, 248070, vocab_size=248320,
    ),
    "Qwen3.5-9B": draft(
        6, (4096, 12288), (32, 8, 128), 16, default_target_layer_ids(32, 8), 32, 248070, 5, 4096, vocab_size=248320,
    ),
    "Qwen3.5-27B": draft(
        6, (5120, 17408), (32, 8, 128), 16, default_target_layer_ids(64, 8), 64, 248070, 5, 4096, vocab_size=248320,
    ),
    "Qwen3.6-27B": draft(5, (5120, 17408), (32, 8, 128), 16, [1, 16, 31, 46, 61], 64, 248070, 4, 2048),
    "Qwen3.6-35B-A3B": draft(
        6, (2048, 6144), (32, 8, 128), None, [1, 6, 11, 16, 22, 27, 32, 37], 40, UNKNOWN_MASK, 5, 4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000000},
    ),
    "gemma-4-31B": draft(
        5, (5376, 10752), (64, 8, 128), 16, default_target_layer_ids(60, 6), 60, 4, 4, 2048, vocab_size=262144,
        final_logit_softcapping=30.0,
    ),
    "gemma-4-26B-A4B": draft(
        5, (2816, 5632), (32, 8, 128), 16, default_target_layer_ids(30, 6), 30, 4, 4, 2048, vocab_size=262144,
        final_logit_softcapping=30.0,
    ),
    "MiMo-V2.5-Pro": draft(
        5, (6144, 16384), (128, 8, 128), 8, [0, 15, 31, 47, 69], 70, 151669, layer_types=None,
        partial_rotary_factor=0.5, attention_value_scale=0.612,
    ),
}  # fmt: skip
PUBLISHED["Qwen3.6-35B-A3B"]["dflash_config"]["block_size"] = 16
PUBLISHED["MiMo-V2.5-Pro"]["dflash_config"] |= {"use_swa": True, "swa_window_size": 1024}


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=PUBLISHED)
def test_published_configs_are_read(tmp_path, published):
    config = read(tmp_path, published)
    nested = published["dflash_config"]
    for name in (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_target_layers",
    ):
        assert getattr(config, name) == published[name], name
    assert config.block_size == (published["block_size"] or nested["block_size"])
    assert config.target_layer_ids == nested["target_layer_ids"]
    assert config.mask_token_id == nested["mask_token_id"]
    assert config.vocab_size == published.get("vocab_size")
    assert config.final_logit_softcapping == published.get("final_logit_softcapping")
    assert config.rope_parameters == published.get("rope_parameters", {"rope_type": "default", "rope_theta": 1000000})
    if published["layer_types"] is None:  # MiMo
        assert config.layer_types == [SLIDING_TYPE] * 5
        assert (config.sliding_window, config.causal_layer_types) == (1024, [])
    else:
        assert config.layer_types == published["layer_types"]
        assert config.sliding_window == published["sliding_window"]
        assert config.causal_layer_types == [SLIDING_TYPE]


@pytest.mark.parametrize(
    "published",
    [
        draft(
            5, (5120, 17408), (32, 8, 128), 8, [5, 19, 33, 47, 61], 64, 248070, 5, 2048, is_causal=False,
            architectures=["DFlash2DraftModel"], vocab_size=248320,
        ),
        draft(
            5, (6656, 19968), (32, 8, 128), 16, [1, 13, 25, 37, 49], 52, 201818, 5, 2048, is_causal=False,
            architectures=["DFlash2DraftModel"], output_multiplier=0.19611613513818404, final_logit_softcapping=20,
            vocab_size=202048,
        ),
        draft(
            6, (6144, 12288), (64, 8, 128), 8, [5, 19, 33, 47, 61, 75], 78, 154856, 6, 2048, is_causal=False,
            architectures=["DFlash2DraftModel"], vocab_size=154880,
        ),
    ],
    ids=["Qwen3.8-27B", "Muse-Glimmer-30B", "GLM-5.3"],
)  # fmt: skip
def test_published_dflash2_configs_are_read(tmp_path, published):
    sizes = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
    config = read(tmp_path, changed(published, dflash_config=sizes))
    assert {name: getattr(config, name) for name in sizes} == sizes
    assert config.causal_layer_types == []
    assert config.output_multiplier == published.get("output_multiplier")


def test_the_published_native_config_is_read(tmp_path):
    config = read(
        tmp_path,
        {
            "architectures": ["MuseGlimmerAssistantModel"],
            "model_type": "muse_glimmer_assistant",
            "num_hidden_layers": 5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    )
    assert (config.hidden_size, config.intermediate_size, config.block_size) == (6656, 19968, 16)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, 128)
    assert (config.mask_token_id, config.target_layer_ids) == (201818, [1, 13, 25, 37, 49])
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (1e-5, 500000.0)
    assert config.layer_types == [SLIDING_TYPE] * 5
    assert config.sliding_window == 2049  # the native mask sees distances up to and with 2048
    assert config.causal_layer_types == []


# everything else is left alone


def test_a_plain_qwen3_config_stays_one(tmp_path):
    Qwen3Config(hidden_size=32, num_hidden_layers=1).save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is Qwen3Config

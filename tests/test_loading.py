"""Drafts on disk, read through AutoModel and through their own class: every layout, every option, every damage."""

import json
import shutil

import pytest
import torch
from conftest import MASK, REAL_DRAFT, make_draft
from layouts import SLIDING, SPECULATORS, ZLAB, changed, write_config, write_draft
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)
from transformers.cache_utils import DFlashCache
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from transformers_dflash import DFlashDraftModel, install, uninstall

DOORS = pytest.mark.parametrize("door", [AutoModel, DFlashDraftModel], ids=["AutoModel", "DFlashDraftModel"])


def assert_same_weights(ours, expected: dict[str, torch.Tensor]) -> None:
    """Bitwise."""
    weights = ours.state_dict()
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name


def assert_same_config(ours, expected) -> None:
    """Equal but for what loading notes down: where from, and how attention is computed."""
    assert ours.to_dict() | {"_name_or_path": ""} == expected.to_dict() | {"_name_or_path": ""}


@pytest.fixture(scope="module")
def zlab_folder(tmp_path_factory):
    """A draft in z-lab's layout; tests that change it copy it."""
    return write_draft(tmp_path_factory.mktemp("zlab"), ZLAB)


@pytest.fixture
def broken(zlab_folder, tmp_path):
    """A copy of it to damage."""
    return shutil.copytree(zlab_folder, tmp_path / "broken")


def rewrite(folder, change) -> None:
    """Apply a change to the weights in a folder."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# our own layout


@DOORS
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"block_size": 16, "num_key_value_heads": 4, "head_dim": 12},
        {"causal_layer_types": ["sliding_attention"]},
        {"context_injection": "layer_aligned"},
        {"attention_bias": True},
        {"target_layer_ids": [0, 1, 2, 3]},
        {"draft_vocab_size": 12},
    ],
    ids=["plain", "defaults", "sliding causal", "layer-aligned", "bias", "four taps", "reduced head"],
)
def test_a_saved_draft_is_read_back_exactly(tmp_path, target, door, fields):
    draft = make_draft(target, **fields)
    if "draft_vocab_size" in fields:
        draft.d2t.copy_(torch.arange(12))
    draft.save_pretrained(tmp_path)
    ours, info = door.from_pretrained(tmp_path, output_loading_info=True)
    assert type(ours) is DFlashDraftModel
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same_weights(ours, draft.state_dict())
    assert_same_config(ours.config, draft.config)
    assert not ours.training
    assert ours.name_or_path == str(tmp_path)


@DOORS
def test_drafting_options_are_saved_with_the_draft(tmp_path, draft, door):
    draft.generation_config.num_assistant_tokens = 3
    draft.generation_config.do_sample = True
    draft.save_pretrained(tmp_path)
    ours = door.from_pretrained(tmp_path)
    assert (ours.generation_config.num_assistant_tokens, ours.generation_config.do_sample) == (3, True)


def test_a_draft_without_drafting_options_saves_no_file_of_them(tmp_path, draft):
    draft.save_pretrained(tmp_path)
    assert not (tmp_path / "generation_config.json").exists()


def test_options_that_were_taken_back_do_not_stay_in_the_folder(tmp_path, draft):
    draft.generation_config.num_assistant_tokens = 3
    draft.save_pretrained(tmp_path)
    draft.generation_config.num_assistant_tokens = None
    draft.save_pretrained(tmp_path)
    assert DFlashDraftModel.from_pretrained(tmp_path).generation_config.num_assistant_tokens is None


@DOORS
def test_damaged_drafting_options_are_refused_by_name(tmp_path, draft, door):
    draft.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"tree_budget": 1')
    with pytest.raises(OSError, match=r"generation_config.json of .* is damaged"):
        door.from_pretrained(tmp_path)


@DOORS
def test_shards_are_put_together(tmp_path, draft, door):
    draft.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same_weights(door.from_pretrained(tmp_path), draft.state_dict())


@DOORS
def test_a_missing_shard_is_refused_by_name(tmp_path, draft, door):
    draft.save_pretrained(tmp_path, max_shard_size="20KB")
    gone = sorted(tmp_path.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(OSError, match=gone.name):
        door.from_pretrained(tmp_path)


@DOORS
@pytest.mark.parametrize(
    ("saved", "asked", "expected"),
    [
        (torch.bfloat16, None, torch.bfloat16),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.float32, torch.float16, torch.float16),
    ],
    ids=str,
)
def test_dtype_is_the_files_or_the_one_asked_for(tmp_path, target, door, saved, asked, expected):
    draft = make_draft(target, draft_vocab_size=12).to(saved)
    draft.d2t.copy_(torch.arange(12))
    draft.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.get_tensor("fc.weight").dtype == saved  # nothing is rounded on the way out
    ours = door.from_pretrained(tmp_path, dtype=asked) if asked else door.from_pretrained(tmp_path)
    assert ours.dtype == ours.config.dtype == expected
    assert ours.d2t.dtype == torch.long
    assert torch.equal(ours.fc.weight, draft.fc.weight.to(expected))


@DOORS
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
def test_attention_implementation_is_the_one_asked_for(zlab_folder, door, implementation):
    ours = door.from_pretrained(zlab_folder, attn_implementation=implementation)
    assert ours.config._attn_implementation == implementation


@DOORS
@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}], ids=str)
def test_device_map_is_taken(zlab_folder, door, device_map):
    pytest.importorskip("accelerate")
    ours = door.from_pretrained(zlab_folder, device_map=device_map)
    assert_same_weights(ours, load_file(zlab_folder / "model.safetensors"))
    features = torch.randn(1, 3, 64)
    assert ours(torch.randn(1, 6, 32), features).last_hidden_state.shape == (1, 6, 32)


def test_a_draft_spread_by_a_device_map_keeps_its_layers_whole(zlab_folder):
    accelerate = pytest.importorskip("accelerate")
    ours = DFlashDraftModel.from_pretrained(zlab_folder)
    sizes = {0: 30_000, 1: 30_000, "cpu": 10**9}
    split = accelerate.infer_auto_device_map(ours, max_memory=sizes, no_split_module_classes=ours._no_split_modules)
    assert all(name.count(".") <= 1 for name in split if name.startswith("layers"))


def test_a_state_dict_stands_in_for_a_folder(draft):
    ours = DFlashDraftModel.from_pretrained(None, config=draft.config, state_dict=draft.state_dict())
    assert_same_weights(ours, draft.state_dict())


@DOORS
def test_fields_can_be_replaced_while_loading(zlab_folder, door):
    assert door.from_pretrained(zlab_folder, block_size=4).config.block_size == 4
    with pytest.raises(ValueError, match="block_size must be at least 2"):
        door.from_pretrained(zlab_folder, block_size=1)


@register_quantization_config("stub")
class StubQuantizationConfig(QuantizationConfigMixin):
    def __init__(self, **kwargs):
        super().__init__(quant_method="stub")


@register_quantizer("stub")
class StubQuantizer(HfQuantizer):
    """Marks the model and changes nothing."""

    requires_calibration = False

    def is_serializable(self, *args, **kwargs):
        return True

    @property
    def is_trainable(self):
        return False

    def _process_model_before_weight_loading(self, model, **kwargs):
        model.was_quantized_by = type(self).__name__


@DOORS
def test_a_quantization_config_given_while_loading_is_used(zlab_folder, door):
    ours = door.from_pretrained(zlab_folder, quantization_config=StubQuantizationConfig())
    assert ours.was_quantized_by == "StubQuantizer"
    assert_same_weights(ours, load_file(zlab_folder / "model.safetensors"))


@DOORS
def test_a_quantization_config_in_the_file_is_used(broken, door):
    write_config(broken, changed(ZLAB, quantization_config={"quant_method": "stub"}))
    assert door.from_pretrained(broken).was_quantized_by == "StubQuantizer"


# the Hub, offline


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub cache on disk with two revisions of org/draft, and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repo = tmp_path / "hub" / "models--org--draft"
    (repo / "refs").mkdir(parents=True)
    (repo / "snapshots").mkdir()
    for seed, (name, commit) in enumerate((("main", "a" * 40), ("v2", "b" * 40))):
        (repo / "refs" / name).write_text(commit)
        write_draft(repo / "snapshots" / commit, changed(ZLAB, block_size=4 + seed), seed)
    return tmp_path / "hub"


@DOORS
@pytest.mark.parametrize(
    ("revision", "commit"),
    [(None, "a"), ("main", "a"), ("v2", "b"), ("b" * 40, "b")],
    ids=["none", "main", "branch", "commit"],
)
def test_a_hub_id_is_read_at_its_revision(hub, door, revision, commit):
    options = {"revision": revision} if revision else {}
    ours = door.from_pretrained("org/draft", cache_dir=hub, **options)
    snapshot = hub / "models--org--draft" / "snapshots" / (commit * 40)
    assert ours.config.block_size == {"a": 4, "b": 5}[commit]
    assert_same_weights(ours, load_file(snapshot / "model.safetensors"))


@DOORS
def test_drafting_options_come_from_the_same_revision(hub, door):
    for commit, tokens in (("a", 2), ("b", 3)):
        snapshot = hub / "models--org--draft" / "snapshots" / (commit * 40)
        (snapshot / "generation_config.json").write_text(json.dumps({"num_assistant_tokens": tokens}))
    ours = door.from_pretrained("org/draft", cache_dir=hub, revision="v2")
    assert ours.generation_config.num_assistant_tokens == 3


@DOORS
def test_an_unknown_revision_is_refused(hub, door):
    with pytest.raises(OSError, match="org/draft|couldn't find them in the cached files"):
        door.from_pretrained("org/draft", cache_dir=hub, revision="v3")


@DOORS
def test_a_subfolder_is_read(tmp_path, draft, door):
    draft.generation_config.num_assistant_tokens = 3
    draft.save_pretrained(tmp_path / "inner")
    ours = door.from_pretrained(tmp_path, subfolder="inner")
    assert_same_weights(ours, draft.state_dict())
    assert ours.generation_config.num_assistant_tokens == 3


# other layouts

FOLDERS = {
    "z-lab": ZLAB,
    "z-lab, nested block size": changed(ZLAB, ("block_size",), dflash_config={"block_size": 6}),
    "z-lab, sliding": changed(ZLAB, **SLIDING),
    "z-lab, more taps than layers": changed(ZLAB, dflash_config={"target_layer_ids": [0, 1, 2, 3]}),
    "z-lab, fewer taps than layers": changed(ZLAB, dflash_config={"target_layer_ids": [2]}),
    "z-lab, attention bias": changed(ZLAB, attention_bias=True),
    "z-lab, tied": changed(ZLAB, tie_word_embeddings=True),
    "SpecForge": changed(ZLAB, auto_map={"AutoModel": "dflash.DFlashDraftModel"}),
    "Automodel": changed(ZLAB, architectures=["Qwen3DFlashDraft"], **SLIDING),
    "ModelOpt": changed(ZLAB, dflash_config={"use_swa": True, "swa_window_size": 8, "causal": False}),
    "speculators": changed(SPECULATORS, transformer_layer_config={"head_dim": 8}),
}


@DOORS
@pytest.mark.parametrize("config", FOLDERS.values(), ids=FOLDERS)
def test_every_layout_loads_with_no_key_left_over(tmp_path, door, config, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("Transformers asked to trust remote code"))
    folder = write_draft(tmp_path, config)
    ours, info = door.from_pretrained(folder, output_loading_info=True)
    assert type(ours) is DFlashDraftModel
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same_weights(ours, load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("trust", [None, False, True], ids=lambda value: f"trust {value}")
def test_remote_code_is_neither_needed_nor_run(tmp_path, trust):
    folder = write_draft(tmp_path, changed(ZLAB, auto_map={"AutoModel": "dflash.DFlashDraftModel"}))
    (folder / "dflash.py").write_text("raise RuntimeError('remote code ran')")
    assert type(AutoModel.from_pretrained(folder, trust_remote_code=trust)) is DFlashDraftModel


@pytest.mark.parametrize("config", FOLDERS.values(), ids=FOLDERS)
def test_every_layout_is_saved_in_ours(tmp_path, config):
    ours = AutoModel.from_pretrained(write_draft(tmp_path / "theirs", config))
    ours.save_pretrained(tmp_path / "ours")
    again = AutoModel.from_pretrained(tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "dflash"
    assert_same_config(again.config, ours.config)
    assert_same_weights(again, ours.state_dict())


@DOORS
def test_a_reduced_vocabulary_keeps_its_head_and_offsets(tmp_path, door):
    config = changed(SPECULATORS, transformer_layer_config={"head_dim": 8}, draft_vocab_size=4)
    folder = write_draft(tmp_path, config)
    kept = torch.zeros(32, dtype=torch.bool)
    kept[[0, 3, 4, 23]] = True

    def as_speculators_saves(weights):
        weights["t2d"] = kept
        weights["d2t"] = kept.nonzero()[:, 0] - torch.arange(4)

    rewrite(folder, as_speculators_saves)
    saved = load_file(folder / "model.safetensors")
    ours = door.from_pretrained(folder, dtype=torch.bfloat16)
    assert torch.equal(ours.lm_head.weight, saved["lm_head.weight"].bfloat16())
    assert ours.d2t.tolist() == [0, 2, 2, 20]
    logits = ours.expand_reduced_logits(torch.randn(1, 2, 32).bfloat16(), 32)
    assert logits.isfinite()[0, 0].nonzero()[:, 0].tolist() == [0, 3, 4, 23]


@DOORS
@pytest.mark.real
def test_the_real_draft_loads_with_no_key_left_over(door):
    ours, info = door.from_pretrained(REAL_DRAFT, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same_weights(ours, load_file(REAL_DRAFT / "model.safetensors"))
    assert (ours.config.block_size, ours.config.target_layer_ids) == (8, [1, 8, 14, 20, 27])
    assert ours.dtype == torch.bfloat16


MUSE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 8,
    "block_size": 5,
    "mask_token_id": MASK,
    "target_layer_ids": [1, 3],
}


@pytest.fixture(scope="module")
def muse(tmp_path_factory):
    """A random native draft, and the folder that Transformers' own class saved."""
    torch.manual_seed(0)
    native = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**MUSE)).eval()
    with torch.no_grad():
        for name, parameter in native.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    folder = tmp_path_factory.mktemp("muse")
    native.save_pretrained(folder)
    return native, folder


@DOORS
@torch.no_grad()
@pytest.mark.parametrize("prompt", [3, 8, 20], ids=lambda n: f"prompt{n}")
def test_the_native_class_and_ours_agree_round_by_round(muse, door, prompt):
    native, folder = muse
    ours = door.from_pretrained(folder)
    assert type(ours) is DFlashDraftModel
    mine, theirs = ours.make_cache(), DFlashCache(config=native.config)
    theirs.activate_past_recording()
    start = 0
    for accepted in (prompt, 1, 5, 3, 2, 5, 4):
        noise, features = torch.randn(1, 5, 32), torch.randn(1, accepted, 64)
        theirs.set_previous_accepted_tokens(accepted)
        positions = torch.arange(start, start + accepted + 5)[None]
        expected = native(noise, features, None, positions, theirs).last_hidden_state
        theirs.crop(-5)
        start += accepted
        got = ours(noise, features, position_ids=positions, cache=mine).last_hidden_state
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_a_native_draft_is_saved_under_our_names(muse, tmp_path):
    _, folder = muse
    ours = AutoModel.from_pretrained(folder)
    ours.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(ours.state_dict())
    assert_same_weights(AutoModel.from_pretrained(tmp_path), ours.state_dict())


# wrong weights


@DOORS
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("fc.weight"), "missing fc.weight"),
        (lambda w: w.pop("layers.1.mlp.up_proj.weight"), "missing layers.1.mlp.up_proj.weight"),
        (lambda w: w.update({"embed_tokens.weight": torch.zeros(32, 32)}), "unexpected embed_tokens.weight"),
        (
            lambda w: w.update({"fc.weight": torch.zeros(32, 96)}),
            r"mismatched fc.weight \(shape \[32, 96\] in the file, \[32, 64\] by the config\)",
        ),
        (
            lambda w: w.update({f"layers.{i}.self_attn.sinks": torch.zeros(4) for i in (0, 1)}),
            "unexpected layers.0.self_attn.sinks, layers.1.self_attn.sinks",
        ),
        (lambda w: w.clear() or w.update(x=torch.zeros(1)), r"missing fc.weight, .* and 20 more"),
    ],
    ids=["no fc", "no up_proj", "an embedding", "fc of three taps", "MiMo's sinks", "nothing of it"],
)
def test_weights_that_do_not_fit_are_refused_by_name(broken, door, change, message):
    rewrite(broken, change)
    with pytest.raises(ValueError, match=f"the weights of .*broken do not fit its config: {message}"):
        door.from_pretrained(broken)


@DOORS
def test_attention_biases_that_the_config_leaves_out_are_refused(tmp_path, door):
    write_draft(tmp_path, changed(ZLAB, attention_bias=True))
    write_config(tmp_path, ZLAB)
    with pytest.raises(ValueError, match=r"unexpected layers.0.self_attn.k_proj.bias, .* and 3 more"):
        door.from_pretrained(tmp_path)


@DOORS
def test_a_reduced_head_without_its_offsets_is_refused(tmp_path, door):
    config = changed(SPECULATORS, transformer_layer_config={"head_dim": 8}, draft_vocab_size=4)
    rewrite(write_draft(tmp_path, config), lambda weights: weights.pop("d2t"))
    with pytest.raises(ValueError, match="missing d2t"):
        door.from_pretrained(tmp_path)


@DOORS
@pytest.mark.parametrize("kept", [0, 4, 100, 30_000], ids=lambda n: f"{n} bytes")
def test_a_weight_file_cut_short_is_refused(broken, door, kept):
    path = broken / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(OSError, match=r"a weight file of .*broken is damaged or cut short"):
        door.from_pretrained(broken)


@DOORS
def test_a_folder_without_weights_is_refused(broken, door):
    (broken / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"no file named model.safetensors.* found in directory .*broken"):
        door.from_pretrained(broken)


# folders that hold no draft


@DOORS
def test_a_folder_that_does_not_exist_is_refused_by_name(tmp_path, door):
    with pytest.raises(OSError, match="nowhere"):
        door.from_pretrained(tmp_path / "nowhere")


@DOORS
def test_an_empty_folder_is_refused_by_name(tmp_path, door):
    with pytest.raises((OSError, ValueError), match=str(tmp_path)):
        door.from_pretrained(tmp_path)


def test_another_model_is_refused_by_the_drafts_class(qwen3_folder):
    with pytest.raises(ValueError, match="holds no DFlash draft: its config.json has model_type 'qwen3'"):
        DFlashDraftModel.from_pretrained(qwen3_folder)


@DOORS
@pytest.mark.parametrize(
    "config",
    [
        changed(ZLAB, architectures=["DFlash2DraftModel"]),
        changed(SPECULATORS, speculators_model_type="dflash2"),
    ],
    ids=["z-lab", "speculators"],
)
def test_a_dflash2_draft_without_its_sizes_is_refused(tmp_path, door, config):
    with pytest.raises(ValueError, match="DFlash 2 draft's config.json lacks `conv_kernel_size`"):
        door.from_pretrained(write_config(tmp_path, config))


# everything else is left alone


@pytest.fixture(scope="module")
def qwen3_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    config = Qwen3Config(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, head_dim=8
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("installed", [True, False], ids=["installed", "uninstalled"])
def test_a_plain_qwen3_folder_stays_what_it_is(qwen3_folder, installed):
    try:
        if not installed:
            uninstall()
        assert type(AutoConfig.from_pretrained(qwen3_folder)) is Qwen3Config
        assert type(AutoModel.from_pretrained(qwen3_folder)) is Qwen3Model
        model, info = AutoModelForCausalLM.from_pretrained(qwen3_folder, output_loading_info=True)
        assert type(model) is Qwen3ForCausalLM
        assert not info["missing_keys"]
    finally:
        install()


def test_auto_config_passes_its_options_on(qwen3_folder):
    config, unused = AutoConfig.from_pretrained(
        qwen3_folder, rms_norm_eps=1e-3, other=1, return_unused_kwargs=True, trust_remote_code=False
    )
    assert config.rms_norm_eps == 1e-3
    assert unused["other"] == 1


def test_installing_and_uninstalling_leave_auto_config_as_it_was():
    try:
        hooked = AutoConfig.__dict__["from_pretrained"]
        install()  # once more changes nothing
        assert AutoConfig.__dict__["from_pretrained"] is hooked
        uninstall()
        original = AutoConfig.__dict__["from_pretrained"]
        assert original.__func__.__module__ == "transformers.models.auto.configuration_auto"
        assert hooked.__func__.__wrapped__ is original.__func__
        install()
        assert AutoConfig.__dict__["from_pretrained"] is not original
        uninstall()
        uninstall()
        assert AutoConfig.__dict__["from_pretrained"] is original
    finally:
        install()


def test_without_the_hook_our_own_layout_still_loads(tmp_path, draft):
    draft.save_pretrained(tmp_path)
    try:
        uninstall()
        assert type(AutoModel.from_pretrained(tmp_path)) is DFlashDraftModel
    finally:
        install()


@DOORS
@pytest.mark.parametrize(
    "config",
    [
        changed(
            ZLAB, ("dflash_config",), architectures=["Qwen3DSparkModel"], mask_token_id=31, target_layer_ids=[1, 3]
        ),
        changed(ZLAB, ("dflash_config",), architectures=["Gemma4DSparkModel"], model_type="gemma4_text"),
        changed(ZLAB, architectures=["DSparkDraftModel"]),
        changed(SPECULATORS, architectures=["DSparkDraftModel"], speculators_model_type="dspark"),
    ],
    ids=["DeepSpec", "DeepSpec, Gemma", "SpecForge", "speculators"],
)
def test_a_dspark_draft_is_refused_by_name(tmp_path, door, config):
    with pytest.raises(ValueError, match=f"this is a DSpark draft .{config['architectures'][0]}"):
        door.from_pretrained(write_config(tmp_path, config))


@DOORS
@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_a_draft_with_an_embedding_or_a_full_head_of_its_own_is_refused_by_name(broken, door, name):
    rewrite(broken, lambda weights: weights.update({name: torch.randn(32, 32)}))
    with pytest.raises(ValueError, match=f"do not fit its config: unexpected {name}"):
        door.from_pretrained(broken)

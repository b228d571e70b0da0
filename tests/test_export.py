"""Drafts written in other layouts: read back exactly, or refused in a sentence and nothing written."""

import json
import os
import subprocess

import pytest
import torch
from conftest import make_target
from layouts import DFLASH2, SLIDING, SPECULATORS, ZLAB, changed, write_draft
from safetensors.torch import load_file, save_file
from test_cli import ENVIRONMENT, PROGRAM
from test_loading import assert_same_weights

from transformers_dflash import DFlashDraftConfig, DFlashDraftModel, cli
from transformers_dflash.conversion import export
from transformers_dflash.conversion.export import convert

SPECULATORS_8 = changed(SPECULATORS, transformer_layer_config={"head_dim": 8})
WINDOWED = SLIDING | {"sliding_window": 12}
V2 = changed(ZLAB, **WINDOWED, is_causal=False, architectures=["DFlash2DraftModel"], dflash_config=DFLASH2)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
DRAFTS = {
    "full": ZLAB,
    "mixed, sliding causal": changed(ZLAB, **WINDOWED),
    "mixed, none causal": changed(ZLAB, **WINDOWED, is_causal=False),
    "all sliding, causal": changed(ZLAB, **WINDOWED | {"layer_types": ["sliding_attention"] * 2}),
    "all sliding, none causal": changed(ZLAB, dflash_config={"use_swa": True, "swa_window_size": 12, "causal": False}),
    "more taps than layers": changed(ZLAB, dflash_config={"target_layer_ids": [0, 1, 2, 3]}),
    "attention bias": changed(ZLAB, attention_bias=True),
    "yarn": changed(ZLAB, rope_scaling=YARN, rope_theta=5e4),
    "DFlash 2": V2,
}
ONLY_ZLAB = {
    "full causal": changed(ZLAB, is_causal=True),
    "mixed, all causal": changed(ZLAB, **WINDOWED, is_causal=True),
    "logit scaling": changed(
        ZLAB, dflash_config={"output_multiplier": 0.2, "final_logit_softcapping": 20, "input_embedding_scale": 2.0}
    ),
}
ONLY_SPECULATORS = {
    "sample from anchor": changed(SPECULATORS_8, sample_from_anchor=True),
    "reduced vocabulary": changed(SPECULATORS_8, draft_vocab_size=4),
}
TARGET_FIELDS = {"num_target_layers": None, "target_name_or_path": None, "target_revision": None, "_name_or_path": ""}


def read(folder) -> tuple[DFlashDraftModel, dict, dict]:
    """The draft in a folder, its fields less those that name its target, and its file."""
    draft = DFlashDraftModel.from_pretrained(folder)
    fields = draft.config.to_dict() | TARGET_FIELDS
    fields["causal_layer_types"] = sorted(set(fields["causal_layer_types"]) & set(fields["layer_types"]))
    return draft, fields, load_file(folder / "model.safetensors")


def assert_same_draft(folder, other, extra: frozenset = frozenset()) -> None:
    """Config by field, weights bit by bit and in their dtype."""
    (_, fields, weights), (_, expected, originals) = read(folder), read(other)
    assert fields == expected
    assert weights.keys() - extra == originals.keys() - extra
    for name in originals.keys() - extra:
        assert weights[name].dtype == originals[name].dtype, name
        assert torch.equal(weights[name], originals[name]), name


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    make_target("qwen3").config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["Qwen3ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("layout", "config"),
    [
        *(pytest.param(to, config, id=f"{name}-{to}") for name, config in DRAFTS.items() for to in export.LAYOUTS),
        *(pytest.param("zlab", config, id=f"{name}-zlab") for name, config in ONLY_ZLAB.items()),
        *(pytest.param("speculators", config, id=f"{name}-speculators") for name, config in ONLY_SPECULATORS.items()),
    ],
)
def test_a_draft_goes_to_a_layout_and_back(tmp_path, target_folder, layout, config):
    source = write_draft(tmp_path / "source", config)
    convert(source, tmp_path / "ours", "dflash")
    convert(tmp_path / "ours", tmp_path / "theirs", layout, target_folder)
    assert "\n# theirs\n" in (tmp_path / "theirs" / "README.md").read_text()
    convert(tmp_path / "theirs", tmp_path / "again", "dflash")
    assert_same_draft(tmp_path / "ours", source)
    assert_same_draft(tmp_path / "theirs", source, extra=frozenset({"t2d"}))
    assert_same_draft(tmp_path / "again", source)


@pytest.mark.parametrize("config", DRAFTS.values(), ids=DRAFTS)
def test_zlab_to_speculators_and_back(tmp_path, target_folder, config):
    source = write_draft(tmp_path / "source", config)
    convert(source, tmp_path / "first", "zlab")
    convert(tmp_path / "first", tmp_path / "theirs", "speculators", target_folder)
    convert(tmp_path / "theirs", tmp_path / "back", "zlab", target_folder)
    assert_same_draft(tmp_path / "back", source)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()


def test_the_zlab_config_field_by_field(tmp_path):
    convert(write_draft(tmp_path / "source", V2), tmp_path / "out", "zlab")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("dflash_config") == {"block_size": 6, "mask_token_id": 31, "target_layer_ids": [1, 3], **DFLASH2}
    left_out = {"dflash_config", "max_window_layers", "transformers_version", "use_cache"}
    assert config == {name: value for name, value in V2.items() if name not in left_out}


def test_the_speculators_config_field_by_field(tmp_path, target_folder):
    source = write_draft(tmp_path / "source", changed(ZLAB, **SLIDING))
    convert(source, tmp_path / "out", "speculators", target_folder)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    layer = config.pop("transformer_layer_config")
    assert config.pop("speculators_config") == SPECULATORS["speculators_config"] | {
        "verifier": {"name_or_path": target_folder, "architectures": ["Qwen3ForCausalLM"]}
    }
    left_out = {"speculators_config", "transformer_layer_config", "speculators_version", "transformers_version"}
    assert config == {name: value for name, value in SPECULATORS.items() if name not in left_out}
    same = (
        "hidden_size",
        "head_dim",
        "layer_types",
        "sliding_window",
        "use_sliding_window",
        "vocab_size",
        "eos_token_id",
    )
    assert {name: layer[name] for name in same} == {name: (ZLAB | SLIDING)[name] for name in same}
    assert layer["rope_parameters"] == {"rope_type": "default", "rope_theta": 1000000}


def test_a_reduced_vocabulary_gets_its_mask(tmp_path):
    source = write_draft(tmp_path / "source", ONLY_SPECULATORS["reduced vocabulary"])
    weights = load_file(source / "model.safetensors") | {"d2t": torch.tensor([0, 2, 2, 20])}
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "out", "speculators")
    t2d = load_file(tmp_path / "out" / "model.safetensors")["t2d"]
    assert t2d.dtype == torch.bool
    assert t2d.nonzero()[:, 0].tolist() == [0, 3, 4, 23]
    assert len(t2d) == 32


@pytest.mark.parametrize("layout", export.LAYOUTS)
@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_trained_dtype_is_kept_whatever_the_config_says(tmp_path, target_folder, layout, saved):
    source = write_draft(tmp_path / "source", changed(ZLAB, dtype="float16" if saved != torch.float16 else "bfloat16"))
    weights = {name: tensor.to(saved) for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "out", layout, target_folder)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == weights.keys()
    for name, tensor in weights.items():
        assert written[name].dtype == saved
        assert torch.equal(written[name], tensor)
    assert DFlashDraftConfig.from_pretrained(tmp_path / "out").dtype == saved


def test_mixed_dtypes_lose_nothing(tmp_path):
    source = write_draft(tmp_path / "source", changed(ZLAB, dtype="bfloat16"))
    weights = load_file(source / "model.safetensors")
    weights = {name: tensor if "norm" in name else tensor.bfloat16() for name, tensor in weights.items()}
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "out", "zlab")
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in weights.items():
        assert torch.equal(written[name], tensor.float()), name


def test_drafting_options_go_along(tmp_path, target_folder):
    draft = DFlashDraftModel.from_pretrained(write_draft(tmp_path / "source", ZLAB))
    draft.generation_config.num_assistant_tokens = 3
    draft.save_pretrained(tmp_path / "ours")
    for layout in export.LAYOUTS:
        convert(tmp_path / "ours", tmp_path / layout, layout, target_folder)
        assert DFlashDraftModel.from_pretrained(tmp_path / layout).generation_config.num_assistant_tokens == 3


def test_our_layout_takes_the_name_of_the_target_and_its_number_of_layers(tmp_path, target_folder):
    source = write_draft(tmp_path / "source", changed(ZLAB, num_target_layers=9))
    convert(source, tmp_path / "out", "dflash", target_folder)
    config = DFlashDraftConfig.from_pretrained(tmp_path / "out")
    assert (config.target_name_or_path, config.num_target_layers) == (target_folder, 4)


# refusals


def save_ours(folder, **fields):
    """A draft in our layout with some fields changed."""
    base = DFlashDraftConfig.from_dict(export.zlab.convert_config(ZLAB)).to_dict()
    config = DFlashDraftConfig.from_dict(base | {"target_name_or_path": "org/target"} | fields)
    DFlashDraftModel(config).save_pretrained(folder)
    return folder


CONVOLUTIONS = {"conv_kernel_size": 2, "conv_group_size": 8}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
BOTH = {
    "layer-aligned": ({"context_injection": "layer_aligned"}, "context_injection 'layer_aligned'"),
    "normed taps": ({"tap_norm": True}, "tap_norm True would become False"),
    "only full causal": (MIXED | {"causal_layer_types": ["full_attention"]}, "causal_layer_types ['full_attention']"),
    "taps of another width": ({"target_hidden_size": 48}, "target_hidden_size 48 would become 32"),
    "half of DFlash 2": (CONVOLUTIONS, "conv_kernel_size and conv_group_size alone"),
}
REFUSED = {
    **{f"{name}-{layout}": (layout, *case) for name, case in BOTH.items() for layout in ("zlab", "speculators")},
    "reduced": ("zlab", {"draft_vocab_size": 4}, "draft_vocab_size 4 would become None"),
    "embedding zlab": ("zlab", {"own_embedding": True}, "own_embedding True would become False"),
    "embedding": ("speculators", {"own_embedding": True}, "own_embedding True would become False"),
    "from anchor": ("zlab", {"sample_from_anchor": True}, "sample_from_anchor True would become False"),
    "number of layers": ("zlab", {"num_target_layers": None}, "--target"),
    "target": ("speculators", {"target_name_or_path": None}, "--target"),
    "full causal": (
        "speculators",
        {"causal_layer_types": ["full_attention"]},
        "causal_layer_types ['full_attention']",
    ),
    "all causal": (
        "speculators",
        MIXED | {"causal_layer_types": ["full_attention", "sliding_attention"]},
        "causal_layer_types ['full_attention', 'sliding_attention'] would become ['sliding_attention']",
    ),
    "multiplier": ("speculators", {"output_multiplier": 0.5}, "output_multiplier 0.5 would become None"),
    "softcap": ("speculators", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 would become None"),
    "scale": ("speculators", {"input_embedding_scale": 2.0}, "input_embedding_scale 2.0 would become None"),
}


@pytest.mark.parametrize(("layout", "fields", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_a_layout_cannot_say_is_refused_and_nothing_written(tmp_path, capsys, layout, fields, reason):
    source = save_ours(tmp_path / "source", **fields)
    said = refused(capsys, str(source), str(tmp_path / "out"), "--to", layout)
    assert reason in said
    assert os.listdir(tmp_path) == ["source"]


def refused(capsys, *arguments: str) -> str:
    """The sentence on stderr."""
    capsys.readouterr()  # progress bars of what was saved before
    try:
        code = cli.main(["convert", *arguments])
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("transformers-dflash: ")
    return captured.err


def test_a_full_folder_is_not_written_into(tmp_path, capsys):
    source = write_draft(tmp_path / "source", ZLAB)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    said = refused(capsys, str(source), str(source), "--to", "zlab")
    assert "exists and is not an empty folder" in said
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    (tmp_path / "file").touch()
    assert "exists and is not an empty folder" in refused(capsys, str(source), str(tmp_path / "file"), "--to", "zlab")
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty", "zlab")
    assert_same_draft(tmp_path / "empty", source)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")], ids=str)
def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch, capsys, error):
    source = write_draft(tmp_path / "source", ZLAB)
    save = DFlashDraftModel.save_pretrained

    def fail_late(self, folder, **kwargs):
        save(self, folder, **kwargs)
        raise error

    monkeypatch.setattr(DFlashDraftModel, "save_pretrained", fail_late)
    code = cli.main(["convert", str(source), str(tmp_path / "out"), "--to", "zlab"])
    assert code == (130 if error is KeyboardInterrupt else 2)
    assert os.listdir(tmp_path) == ["source"]
    assert "Traceback" not in capsys.readouterr().err


def test_damaged_sources_are_refused_in_a_sentence(tmp_path, capsys):
    cut = write_draft(tmp_path / "cut", ZLAB)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:100])
    assert "is damaged or cut short" in refused(capsys, str(cut), str(tmp_path / "out"), "--to", "zlab")
    draft = save_ours(tmp_path / "typed")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"block_size": "8"}))
    assert "'block_size'" in (said := refused(capsys, str(draft), str(tmp_path / "out"), "--to", "zlab"))
    assert "expected int" in said
    assert not (tmp_path / "out").exists()


def test_a_revision_is_forgotten_with_the_target_that_it_is_of(tmp_path, target_folder):
    source = save_ours(tmp_path / "source", target_name_or_path="org/target", target_revision="abc")
    convert(source, tmp_path / "same", "dflash")
    assert DFlashDraftConfig.from_pretrained(tmp_path / "same").target_revision == "abc"
    convert(source, tmp_path / "other", "dflash", target_folder)
    assert DFlashDraftConfig.from_pretrained(tmp_path / "other").target_revision is None


def test_other_targets_and_sources_are_refused(tmp_path, capsys, target_folder):
    to = (str(tmp_path / "out"), "--to", "speculators", "--target", target_folder)
    wide = save_ours(tmp_path / "wide", target_hidden_size=48)
    assert "has hidden_size 32, the draft was made for one with 48" in refused(capsys, str(wide), *to)
    deep = write_draft(
        tmp_path / "deep", changed(ZLAB, num_target_layers=9, dflash_config={"target_layer_ids": [1, 8]})
    )
    assert "target_layer_ids has 8, but the target has 4 layers" in refused(capsys, str(deep), *to)
    quantized = write_draft(tmp_path / "quantized", ZLAB)
    (quantized / "config.json").write_text(json.dumps(ZLAB | {"quantization_config": {"quant_method": "fp8"}}))
    assert "is quantized" in refused(capsys, str(quantized), *to)
    (deep / "model.safetensors").unlink()
    assert "holds no safetensors file" in refused(capsys, str(deep), str(tmp_path / "out"), "--to", "dflash")
    assert "is not converted" in refused(capsys, target_folder, *to)
    assert "is not converted" in refused(capsys, str(tmp_path / "missing"), *to)
    assert "invalid choice: 'onnx'" in refused(capsys, str(wide), str(tmp_path / "out"), "--to", "onnx")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command_converts(tmp_path):
    source = write_draft(tmp_path / "source", ZLAB)
    command = [PROGRAM, "convert", str(source), str(tmp_path / "new" / "out"), "--to", "zlab"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.count("\n") == 1
    assert_same_draft(tmp_path / "new" / "out", source)
    assert_same_weights(
        DFlashDraftModel.from_pretrained(tmp_path / "new" / "out"), load_file(source / "model.safetensors")
    )

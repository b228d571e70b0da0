"""From any layout that loads to one that another system reads, so that nothing is lost or nothing is written.

Weights have the same names in all layouts, so only the config is translated; it is translated back by the loader's own
code and compared before anything is written.
"""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from ..configuration_dflash import DFlashDraftConfig
from ..modeling_dflash import DFlashDraftModel
from . import speculators, zlab
from .fields import DFLASH2_FIELDS

LAYOUTS = {"dflash": None, "zlab": zlab, "speculators": speculators}
# What a draft was made for; it decides nothing that a draft computes, and the other layouts say only parts of it.
PROVENANCE = {"model_card", "num_target_layers", "target_name_or_path", "target_revision"}


def convert(source: str | Path, destination: str | Path, layout: str, target: str | None = None) -> None:
    """Write a draft into a folder in another layout, with its weights bit for bit as they are.

    Args:
        source: folder or Hub id of a draft with safetensors files, in any layout that loads.
        destination: the folder to make. It appears when it is complete.
        layout: one of `LAYOUTS`.
        target: folder or Hub id of the draft's target, where the draft does not name it or names another.

    Raises:
        FileExistsError: the destination exists and is not an empty folder.
        ValueError: the layout cannot say what this draft is, or the target is not the draft's.
        OSError: source or target cannot be read, or the destination not written.
    """
    destination = Path(destination).resolve()
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise FileExistsError(f"{destination} exists and is not an empty folder: name another, or remove it first")
    folder = _local_folder(source)
    config = DFlashDraftConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{source} is quantized: convert the draft that it was made from")
    target_fields: dict[str, Any] = {}
    architectures: list[str] = []
    if target is not None:
        target_fields, architectures = _describe_target(target, config)
        config = DFlashDraftConfig.from_dict(config.to_dict() | target_fields)  # checks the taps anew
    exported = None if layout == "dflash" else export_config(config, layout, architectures)

    draft = load_exactly(folder, **target_fields)
    weights = draft.state_dict()
    if layout == "speculators" and config.draft_vocab_size is not None:
        weights["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        weights["t2d"][torch.arange(config.draft_vocab_size) + draft.d2t] = True
    part = destination.with_name(f".{destination.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        draft.save_pretrained(part, state_dict=weights)
        draft.hub.write_card(part, draft.config, destination.name)  # the one there names this folder
        if exported is not None:
            exported["dtype"] = str(draft.dtype).removeprefix("torch.")
            (part / "config.json").write_text(json.dumps(exported, indent=2, sort_keys=True) + "\n")
        part.rename(destination)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def load_exactly(source: str | Path, **fields) -> DFlashDraftModel:
    """A draft in the dtype that holds all its weights as they are, whatever its config says of them.

    Args:
        source: folder or Hub id of a draft with safetensors files.
        **fields: of its config, in place of those that it has.

    Raises:
        ValueError, OSError: as `DFlashDraftModel.from_pretrained`.
    """
    folder = _local_folder(source)
    return DFlashDraftModel.from_pretrained(folder, dtype=_saved_dtype(folder), **fields)


def export_config(config: DFlashDraftConfig, layout: str, architectures: list[str]) -> dict[str, Any]:
    """A draft's config in another layout, less its dtype.

    Args:
        config: of the draft.
        layout: "zlab" or "speculators".
        architectures: class names of the target, as its config gives them.

    Raises:
        ValueError: the layout cannot say a field of this draft, or needs one that the draft does not know.
    """
    given = [name for name in DFLASH2_FIELDS if getattr(config, name) is not None]
    if given and len(given) < len(DFLASH2_FIELDS):
        raise ValueError(
            f"the {layout} layout has the convolutions and the candidate selector of DFlash 2 only together: this "
            f"draft has {' and '.join(given)} alone"
        )
    exported = LAYOUTS[layout].export_config(config, architectures)
    expected, read = _meaning(config), _meaning(DFlashDraftConfig.from_dict(LAYOUTS[layout].convert_config(exported)))
    lost = [f"{name} {expected[name]!r} would become {read[name]!r}" for name in read if read[name] != expected[name]]
    if lost:
        raise ValueError(f"the {layout} layout cannot say what this draft is: {', '.join(lost)}")
    return exported


def _meaning(config: DFlashDraftConfig) -> dict[str, Any]:
    """All fields that decide what a draft computes; what is said of layer types that it lacks means nothing."""
    own = [field.name for field in dataclasses.fields(config) if field.name in DFlashDraftConfig.__annotations__]
    fields = {name: getattr(config, name) for name in own if name not in PROVENANCE}
    fields["causal_layer_types"] = sorted(set(config.causal_layer_types) & set(config.layer_types))
    if "sliding_attention" not in config.layer_types:
        fields["sliding_window"] = None
    return fields


def _describe_target(name: str, config: DFlashDraftConfig) -> tuple[dict[str, Any], list[str]]:
    """The draft's fields about its target, and the target's class names."""
    target = AutoConfig.from_pretrained(name)
    text = target.get_text_config(decoder=True)
    if text.hidden_size != config.target_hidden_size:
        raise ValueError(
            f"the target {name} has hidden_size {text.hidden_size}, the draft was made for one with "
            f"{config.target_hidden_size}: name its own target"
        )
    known = {"target_name_or_path": name, "num_target_layers": text.num_hidden_layers}
    if name != config.target_name_or_path:
        known["target_revision"] = None  # which is a commit of the other one
    return known, list(target.architectures or [])


def _local_folder(source: str | Path) -> Path:
    """The folder of a draft, brought from the Hub if it is none here."""
    if Path(source).is_dir():
        return Path(source)
    return Path(snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors"]))


def _saved_dtype(folder: Path) -> torch.dtype:
    """The dtype that holds all floating weights of a folder exactly."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise OSError(f"{folder} holds no safetensors file: other weights are not converted")
    dtypes = set()
    for path in files:
        try:
            with safe_open(path, framework="pt") as weights:
                dtypes |= {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118  not a dict
        except SafetensorError as error:
            raise OSError(f"{path} is damaged or cut short ({error}): get it again") from error
    floating = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    widest, *others = [floating[name] for name in dtypes & floating.keys()]
    for dtype in others:
        widest = torch.promote_types(widest, dtype)
    return widest


__all__ = ["LAYOUTS", "convert", "export_config", "load_exactly"]

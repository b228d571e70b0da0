"""The model card of a draft, rendered from its config alone: what it is, for which target, how good and how made.

`DFlashDraftConfig.model_card` carries what the other fields do not say (see there), so that a card follows a draft
through saving, loading and pushing. A card that a person has written or changed is never overwritten: those that are
written here carry a digest of themselves.
"""

import hashlib
import os
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import HTTPError
from jinja2 import Environment, StrictUndefined
from transformers.utils.hub import cached_file, extract_commit_hash

from ..configuration_dflash import DFlashDraftConfig
from ..conversion.export import export_config

CARD = "README.md"
TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
TAGS = ["dflash", "speculative-decoding", "draft-model", "block-diffusion"]
_MARK = "\n<!-- Written by transformers-dflash; once edited, never overwritten. sha256 {} -->\n"


def render_card(
    config: DFlashDraftConfig,
    place: str,
    *,
    has_code: bool = False,
    adapter_of: str | None = None,
    tags: list[str] | None = None,
) -> str:
    """The card of a draft, or of adapters for one.

    Args:
        config: of the draft.
        place: Hub id or folder name under which it will be loaded.
        has_code: the code to run it without this package lies beside it.
        adapter_of: Hub id of the draft that adapters belong to; None for a draft itself.
        tags: more tags for the metadata.
    """
    details = {"license": None, "datasets": None, "language": None, "thinking": None} | (config.model_card or {})
    results = details.get("results") or []
    target = config.target_name_or_path
    on_hub = is_hub_id(target)
    name = place.rstrip("/").rpartition("/")[2]
    base = adapter_of or target
    metadata = ModelCardData(
        language=details["language"],
        license=details["license"],
        library_name="peft" if adapter_of else "transformers",
        pipeline_tag="text-generation",
        base_model=base if is_hub_id(base) else None,
        base_model_relation=("adapter" if adapter_of else "finetune") if is_hub_id(base) else None,
        datasets=details["datasets"],
        tags=[*TAGS, *(tag for tag in tags or () if tag not in TAGS)],
        model_name=name if results else None,  # both or none, by the format of a model index
        eval_results=[one for row in results for one in _eval_results(row)] or None,
    )
    layout: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = Environment(undefined=StrictUndefined, **layout)
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        metadata=metadata.to_yaml(line_break="\n").strip(),
        config=config,
        details=details,
        name=name,
        place=place,
        target=target_name(config),
        target_link=_link(target) if on_hub else target_name(config),
        adapter_of=adapter_of,
        adapter_of_link=_link(adapter_of) if is_hub_id(adapter_of) else adapter_of,
        has_code=has_code,
        results=results,
        training=details.get("training"),
        layouts=[] if adapter_of else _layouts(config),
        version=_version(),
    )
    head, _, rest = text.partition("\n---\n")  # the metadata must come first
    return f"{head}\n---\n{_MARK.format(_digest(head, rest))}{rest}"


def write_card(folder: str | os.PathLike, config: DFlashDraftConfig, place: str | None = None, **options) -> None:
    """Write the card into a folder, unless one lies there that a person wrote.

    Args:
        folder: where the draft is saved.
        place: as in `render_card`; the folder's name where not given.
        **options: of `render_card`.
    """
    path = Path(folder) / CARD
    if path.exists() and is_by_hand(read_card(path)):
        return
    part = path.with_name(f".{CARD}.{os.getpid()}.part")
    part.write_text(render_card(config, place or Path(folder).resolve().name, **options), encoding="utf-8")
    part.replace(path)


def read_card(path: Path) -> str:
    """The text of a card that anybody may have written, in whatever encoding."""
    return path.read_text(encoding="utf-8", errors="replace")


def is_by_hand(card: str) -> bool:
    """Whether a person wrote a card, or changed one of ours."""
    found = re.search(_MARK.format("([0-9a-f]{64})"), card)
    if found is None:
        return True
    head, rest = card[: found.start()].removesuffix("\n---\n"), card[found.end() :]
    return _digest(head, rest) != found.group(1)


def is_hub_id(name: str | None) -> bool:
    """Whether a name is written as a Hub id and is no folder here."""
    return bool(name) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()


def commit_of(name: str) -> str | None:
    """The commit that a Hub id stands for now; None for anything else, or where the Hub has no such model."""
    if not is_hub_id(name):
        return None
    with suppress(OSError, HTTPError):
        return extract_commit_hash(cached_file(name, "config.json"), None)
    return None


def target_name(config: DFlashDraftConfig) -> str:
    """The target as a card may show it: never a path of the machine where the draft was made."""
    name = config.target_name_or_path
    if not name:
        return "TARGET"
    return name if is_hub_id(name) else Path(name).name


def _layouts(config: DFlashDraftConfig) -> list[str]:
    """Layouts of other engines that can say what a draft is, once its target is named."""
    fields = config.to_dict()
    fields["target_name_or_path"] = fields["target_name_or_path"] or "owner/name"
    fields["num_target_layers"] = fields["num_target_layers"] or max(config.target_layer_ids) + 1
    named, layouts = DFlashDraftConfig.from_dict(fields), []
    for layout in ("speculators", "zlab"):
        with suppress(ValueError):
            export_config(named, layout, [])
            layouts.append(layout)
    return layouts


def _link(hub_id: str) -> str:
    return f"[{hub_id}](https://huggingface.co/{hub_id})"


def _eval_results(row: dict[str, Any]) -> list[EvalResult]:
    """Entries of a model index for one row of results."""
    known: dict[str, Any] = {
        "task_type": "text-generation",
        "dataset_type": re.sub(r"[^\w.-]+", "-", row["dataset"]).lower(),
        "dataset_name": row["dataset"],
    }
    entries = [("acceptance_length", "acceptance length τ"), ("speedup", "speedup over plain generate")]
    return [
        EvalResult(metric_type=kind, metric_name=title, metric_value=round(row[kind], 3), **known)
        for kind, title in entries
        if row.get(kind)
    ]


def _digest(head: str, rest: str) -> str:
    return hashlib.sha256(f"{head}\n{rest}".encode()).hexdigest()


def _version() -> str:
    try:
        return version("transformers-dflash")
    except PackageNotFoundError:  # run from its source
        return "(from source)"


__all__ = ["CARD", "commit_of", "is_by_hand", "is_hub_id", "read_card", "render_card", "target_name", "write_card"]

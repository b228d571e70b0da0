"""Publish a draft, or adapters for one, so that a stranger can use the repository from its card alone."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitInfo, HfApi, hf_hub_download
from huggingface_hub.errors import RemoteEntryNotFoundError, RevisionNotFoundError
from transformers.dynamic_module_utils import get_relative_import_files

from ..configuration_dflash import DFlashDraftConfig
from ..integration import draft_of
from ..modeling_dflash import DFlashDraftModel
from .card import CARD, is_by_hand, is_hub_id, read_card, write_card

_PACKAGE = Path(__file__).parents[1]
# What an older draft of the repository must not leave behind: a repository that holds whole weights and an index of
# shards is read as whole, and drafting options that the new draft does not set would be taken for its own.
_REPLACED = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json", "generation_config.json"]


def push_to_hub(
    model: Any,
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str = "50GB",
    tags: Sequence[str] | str | None = None,
) -> CommitInfo:
    """Publish a draft in one commit: weights, config, card, and the code to run it without this package.

    Args:
        model: a `DFlashDraftModel`, or a `PeftModel` of one, of which the adapters are published.
        repo_id: on the Hub; made if it does not exist.
        commit_message, commit_description, private, token, revision, create_pr, max_shard_size, tags: as in
            `PreTrainedModel.push_to_hub`.

    Returns:
        What the Hub says of the commit.

    Raises:
        ValueError: the draft does not say its target by a name that others can load.
        HfHubHTTPError: the Hub refuses; nothing is published then.
    """
    draft = draft_of(model)
    config, adapter_of = draft.config, None
    if not is_hub_id(config.target_name_or_path):
        raise ValueError(
            f"the draft's target is {config.target_name_or_path!r}, which is no Hub id, so that nobody else finds it: "
            'set draft.config.target_name_or_path = "owner/name" before pushing'
        )
    if model is not draft:
        adapter_of = model.active_peft_config.base_model_name_or_path
        if not is_hub_id(adapter_of):
            raise ValueError(
                f"the adapters belong to the draft {adapter_of!r}, which is no Hub id: push that draft first, and set "
                "base_model_name_or_path of the adapters' peft_config to its id"
            )
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    is_branch = revision is not None and not revision.startswith("refs/")
    if is_branch and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder, **({} if adapter_of else {"max_shard_size": max_shard_size}))
        if adapter_of is None:
            write_code(folder, repo_id)
        write_published_card(
            folder,
            api,
            repo_id,
            revision,
            config,
            has_code=adapter_of is None,
            adapter_of=adapter_of,
            tags=[tags] if isinstance(tags, str) else list(tags or ()),
        )
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=commit_message or ("Upload adapters" if adapter_of else "Upload draft"),
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
            delete_patterns=None if adapter_of else _REPLACED,
        )


def push_export(folder: str | Path, repo_id: str, layout: str, *, token: str | bool | None = None) -> CommitInfo:
    """Publish a draft in another layout, on a branch of that layout's name, for the engines that read it.

    Args:
        folder: what `convert` has written.
        repo_id: an existing repository.
        layout: that of the folder, "speculators" or "zlab".
        token: of the Hub.

    Raises:
        HfHubHTTPError: the Hub refuses; nothing is published then.
    """
    api = HfApi(token=token)
    api.create_branch(repo_id, branch=layout, exist_ok=True)
    return api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        revision=layout,
        commit_message=f"Draft in the layout {layout}",
        ignore_patterns=[CARD],  # the branch keeps that of the repository
        delete_patterns=[*_REPLACED, "*.py"],
    )


def write_published_card(
    folder: str | Path, api: HfApi, repo_id: str, revision: str | None, config: DFlashDraftConfig, **options
) -> None:
    """Put into a folder that is about to be uploaded its card, or none if a person wrote the one that is there."""
    (Path(folder) / CARD).unlink(missing_ok=True)
    try:
        published = hf_hub_download(
            repo_id, CARD, revision=revision, token=api.token, local_dir=Path(folder) / ".card"
        )
        keep = is_by_hand(read_card(Path(published)))
    except (RemoteEntryNotFoundError, RevisionNotFoundError):  # and not that the Hub cannot be reached
        keep = False
    finally:
        shutil.rmtree(Path(folder) / ".card", ignore_errors=True)
    if not keep:
        write_card(folder, config, repo_id, **options)


def write_code(folder: str | Path, repo_id: str) -> None:
    """Put what runs a draft without this package beside it, and say so in its config.

    Args:
        folder: of a saved draft.
        repo_id: where the folder will be published.
    """
    folder = Path(folder)
    copy_module(_PACKAGE / "modeling_dflash.py", folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    classes = {"AutoConfig": DFlashDraftConfig, "AutoModel": DFlashDraftModel}
    config["auto_map"] = {name: f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}" for name, cls in classes.items()}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    loop = folder / "custom_generate"
    loop.mkdir(exist_ok=True)
    copy_module(_PACKAGE / "custom_generate.py", loop)
    text = (loop / "custom_generate.py").read_text(encoding="utf-8")
    (loop / "custom_generate.py").unlink()
    text = re.sub(r'^REPO_ID = ""$', f'REPO_ID = "{repo_id}"', text, count=1, flags=re.MULTILINE)
    (loop / "generate.py").write_text(text, encoding="utf-8")


def copy_module(module: Path, folder: Path) -> None:
    """Copy a module, and the flat ones that it imports, into a folder."""
    for path in (module, *map(Path, get_relative_import_files(module))):
        shutil.copyfile(path, folder / path.name)


__all__ = ["push_export", "push_to_hub", "write_code", "write_published_card"]

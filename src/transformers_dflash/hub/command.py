"""`transformers-dflash card` and `transformers-dflash push`."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub.errors import HfHubHTTPError, HTTPError

from ..configuration_dflash import DFlashDraftConfig
from ..conversion.export import LAYOUTS, convert, load_exactly
from ..modeling_dflash import DFlashDraftModel
from .card import CARD, is_by_hand, read_card, write_card
from .push import push_export, push_to_hub


def add_parsers(commands: Any, runs: Callable[[Callable], Callable]) -> None:
    """Add both commands to the program's parser; `runs` makes what the program runs of a command's function."""
    card = commands.add_parser(
        "card", help="write a draft's model card", description="Write the model card of a draft in its folder."
    )
    card.set_defaults(run=runs(card_command))
    card.add_argument("draft", metavar="DRAFT", help="folder of a draft that this package saved")
    card.add_argument("--results", metavar="FILE", help="report.json of transformers-dflash evaluate")
    card.add_argument("--license", metavar="NAME", help="licence, as the Hub names it")
    card.add_argument(
        "--dataset", metavar="ID", action="append", help="Hub id of a training data set; may be repeated"
    )
    card.add_argument("--target", metavar="ID", help="Hub id of the target, if the draft names it otherwise")

    push = commands.add_parser(
        "push", help="publish a draft on the Hub", description="Publish a draft on the Hub, with its model card."
    )
    push.set_defaults(run=runs(push_command))
    push.add_argument("draft", metavar="DRAFT", help="folder of the draft, in any layout that loads")
    push.add_argument("repo", metavar="REPO", help="owner/name; made if it does not exist")
    push.add_argument("--target", metavar="ID", help="Hub id of the target, if the draft names it otherwise")
    push.add_argument("--private", action="store_true", default=None, help="if the repository is made")
    push.add_argument("--revision", metavar="NAME", help="branch; default: main")
    push.add_argument("--create-pr", action="store_true", help="open a pull request")
    push.add_argument("--message", metavar="TEXT", help="of the commit")
    exported = [layout for layout in LAYOUTS if layout != "dflash"]
    push.add_argument("--export", choices=exported, help="publish this layout too, on a branch of its name")


def card_command(options: argparse.Namespace) -> int:
    """Write what is known into the draft's config and card.

    Raises:
        ValueError, OSError: what the user can mend, in one sentence.
    """
    folder = Path(options.draft)
    draft_config = DFlashDraftModel.config_class.from_pretrained(folder)
    path = folder / "config.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    if stored.get("model_type") != draft_config.model_type:
        raise ValueError(
            f"{folder} holds a draft in another system's layout, whose config.json has no room for a card's facts: "
            "write it in this one first, with transformers-dflash convert --to dflash"
        )
    if (folder / CARD).exists() and is_by_hand(read_card(folder / CARD)):
        raise ValueError(f"{folder / CARD} was written or changed by a person: move it away to have one written")
    details = dict(draft_config.model_card or {})
    if options.results is not None:
        details["results"] = read_results(Path(options.results))
        measured = {Path(row["draft"]).name for row in details["results"] if "draft" in row}
        if measured - {folder.resolve().name}:
            print(
                f"{options.results} measured {', '.join(measured)}: make sure that {folder} holds the same weights",
                file=sys.stderr,
            )
    details |= {name: value for name, value in (("license", options.license), ("datasets", options.dataset)) if value}
    draft_config.model_card = stored["model_card"] = details
    if options.target is not None:
        name_target(draft_config, options.target)
        stored["target_name_or_path"], stored["target_revision"] = options.target, draft_config.target_revision
    part = path.with_name(f".config.{os.getpid()}.part")
    part.write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    part.replace(path)
    write_card(folder, draft_config)
    print(f"{folder / CARD} is written", file=sys.stderr)
    return 0


def read_results(path: Path) -> list[dict[str, Any]]:
    """The rows of an evaluation's report that a card shows.

    Raises:
        ValueError: the file is no report.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))["results"]
        needed = {"dataset", "num_prompts", "acceptance_length", "tokens_per_second", "temperature", "dtype", "device"}
        complete = bool(results) and all(needed <= row.keys() for row in results)
    except (ValueError, KeyError, TypeError, AttributeError):
        complete = False
    if not complete:
        raise ValueError(f"{path} is no report of transformers-dflash evaluate: name its report.json")
    for row in results:
        if not isinstance(row["acceptance_length"], float | int):  # null: every answer was one token
            raise ValueError(
                f"{path} measured no round of the draft on {row['dataset']}: evaluate with more new tokens"
            )
    drafts = {row.get("draft") for row in results}
    if len(drafts) > 1:
        raise ValueError(f"{path} reports on {len(drafts)} drafts: evaluate the one of this card alone")
    return results


def push_command(options: argparse.Namespace) -> int:
    """Publish a draft; raises as `card_command`."""
    if options.export is not None and options.create_pr:
        raise ValueError("--export goes to a branch, past any review: leave out --create-pr, or export later")
    draft = load_exactly(options.draft)
    if options.target is not None:
        name_target(draft.config, options.target)
    try:
        with TemporaryDirectory() as parent:
            exported = Path(parent) / Path(options.repo).name
            if options.export is not None:  # first, so that nothing is published where the layout refuses the draft
                convert(options.draft, exported, options.export, options.target)
            commit = push_to_hub(
                draft,
                options.repo,
                commit_message=options.message,
                private=options.private,
                revision=options.revision,
                create_pr=options.create_pr,
            )
            print(commit.pr_url or commit.commit_url)
            if options.export is not None:
                print(push_export(exported, options.repo, options.export).commit_url)
    except HfHubHTTPError as error:
        reason = error.server_message or str(error).splitlines()[0]
        raise ValueError(f"the Hub refuses {options.repo}: {reason}") from error
    except HTTPError as error:  # no answer at all
        raise ValueError(
            f"the connection to the Hub broke off ({error}): push again, what is there already is not sent twice"
        ) from error
    return 0


def name_target(config: DFlashDraftConfig, target: str) -> None:
    """Let a draft's target have another name; what is recorded as its revision is a commit of the one before."""
    if target != config.target_name_or_path:
        config.target_revision = None
    config.target_name_or_path = target


__all__ = ["add_parsers", "card_command", "push_command", "read_results"]

"""The report of an evaluation: its numbers as one object, as a table for the screen and as a page for a browser.

`report.json` holds

- `results`: a flat list, one entry per draft and data set with `dataset`, `num_prompts`, `acceptance_length`,
  `speedup`, `tokens_per_second`, `plain_tokens_per_second`, `temperature`, `max_new_tokens`, `dtype`, `device`,
  `batch_size` and `draft`; model cards are filled from it;
- `sets` and `overall`: all numbers, see `measures` for each, per draft and data set, and per draft over all prompts;
- `settings`: what the answers were made with, and the command;
- `comparison`, if one was asked for.

What was not measured or cannot be computed is null.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .measures import acceptance_length, acceptance_rates, losslessness, speedup

Entry = dict[str, Any]
# The parts of an answer's time, and what an answer calls them.
TIMES = {
    "prefill": "prefill_seconds",
    "drafting": "drafting_seconds",
    "verifying": "verifying_seconds",
    "rolling back": "rolling_back_seconds",
}
PARTS = (*TIMES, "other")
COMPARED = ("acceptance_length", "speedup", "tokens_per_second")
MISSING = "–"


def build_report(
    settings: Entry,
    dtype: str,
    sets: dict[str, list[int]],
    block_sizes: dict[str, int],
    rows: Mapping[tuple[str, int, str], Entry],
    gaps: Mapping[tuple[str, int, str], float],
    tolerance: float,
) -> Entry:
    """All numbers of a run.

    Args:
        settings: of the run.
        dtype: the target's.
        sets: places of the prompts of each data set.
        block_sizes: of each draft, by its name.
        rows: the answers by data set, place and method; the method without a draft is `plain`.
        gaps: of greedy answers that part from the plain one.
        tolerance: the largest gap that is a tie.
    """
    everything = [(name, place) for name, places in sets.items() for place in places]
    groups = {name: [(name, place) for place in places] for name, places in sets.items()}
    greedy = settings["temperature"] == 0
    report: Entry = {"results": [], "sets": [], "overall": [], "settings": settings}
    for draft, block_size in block_sizes.items():

        def numbers(prompts: list[tuple[str, int]], draft: str = draft, block_size: int = block_size) -> Entry:
            answers = [rows[name, place, draft] for name, place in prompts]
            plain = [rows[name, place, "plain"] for name, place in prompts] if settings["plain"] else None
            values = summarise(answers, plain, block_size)
            if plain is not None and greedy:
                own = [gaps.get((name, place, draft)) for name, place in prompts]
                tokens, expected = ([row["token_ids"] for row in kind] for kind in (answers, plain))
                values |= losslessness(tokens, expected, own, tolerance) | {"gaps": own, "tolerance": tolerance}
            return values

        for name, prompts in groups.items():
            entry = {"dataset": name, "draft": draft} | numbers(prompts)
            report["sets"].append(entry)
            flat = ("dataset", "num_prompts", "acceptance_length", "speedup", "tokens_per_second")
            result = {one: entry[one] for one in (*flat, "plain_tokens_per_second")}
            result |= {one: settings[one] for one in ("temperature", "max_new_tokens")}
            result |= {"dtype": dtype, "device": settings["device"], "batch_size": settings["batch_size"]}
            report["results"].append(result | {"draft": draft})
        report["overall"].append({"draft": draft} | numbers(everything))
    return without_nan(report)


def without_nan(value: Any) -> Any:
    """The same with None for what JSON cannot say."""
    if isinstance(value, dict):
        return {name: without_nan(one) for name, one in value.items()}
    if isinstance(value, list):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summarise(answers: list[Entry], plain: list[Entry] | None, block_size: int) -> Entry:
    """The numbers of some prompts' answers, but for whether they are the plain ones."""
    seconds, tokens = [row["seconds"] for row in answers], [len(row["token_ids"]) for row in answers]
    values: Entry = {"num_prompts": len(answers), "new_tokens": sum(tokens), "block_size": block_size}
    values |= acceptance_length([row["acceptance_lengths"] for row in answers], block_size)
    values["rounds"] = sum(len(row["acceptance_lengths"]) for row in answers)
    values |= acceptance_rates(*([row[f"{kind}_by_round"] for row in answers] for kind in ("drafted", "accepted")))
    values["tokens_per_second"] = sum(tokens) / sum(seconds)
    comparable = ("speedup", "speedup_median", "speedup_lowest", "speedup_highest", "identical")
    values |= dict.fromkeys(("plain_tokens_per_second", *comparable))
    if plain is not None:
        plain_seconds, plain_tokens = [row["seconds"] for row in plain], [len(row["token_ids"]) for row in plain]
        values["plain_tokens_per_second"] = sum(plain_tokens) / sum(plain_seconds)
        values |= speedup(plain_seconds, plain_tokens, seconds, tokens)
    shares = {part: sum(row[column] for row in answers) / sum(seconds) for part, column in TIMES.items()}
    values["time_shares"] = shares | {"other": 1 - sum(shares.values())}
    return values


def read_report(path: Path, names: Iterable[str], drafts: Iterable[str]) -> Entry:
    """Another run's report, to compare with one of the sets `names` and of `drafts`.

    Raises:
        ValueError: it is none, has none of the sets, or several drafts and none of these.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in report["results"] if row["draft"] and set(COMPARED) <= row.keys()]
        shared, theirs = {row["dataset"] for row in rows}, {row["draft"] for row in rows}
        report["settings"].items()
    except OSError as error:
        raise ValueError(f"--compare {path} cannot be read ({error.strerror}): check the path") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--compare {path} is no report of transformers-dflash evaluate: name its report.json"
        ) from error
    if not shared & set(names):
        raise ValueError(
            f"--compare {path} has none of these data sets, but {', '.join(sorted(shared))}: give --data as there"
        )
    if len(theirs) > 1 and not theirs & set(drafts):
        raise ValueError(
            f"--compare {path} has none of these drafts, but {', '.join(sorted(theirs))}: rename a draft's folder, or "
            "compare with a report on one draft"
        )
    return report | {"path": str(path)}


def comparison(report: Entry, other: Entry) -> Entry:
    """What differs from another run, set by set.

    A draft is compared with the one of its name, or with the only one that the other run has.
    """
    theirs = {(row["dataset"], row["draft"]): row for row in other["results"]}
    drafts = {draft for _, draft in theirs}
    entries = []
    for row in report["results"]:
        draft = next(iter(drafts)) if len(drafts) == 1 else row["draft"]
        if (there := theirs.get((row["dataset"], draft))) is None:
            continue
        entry = {"dataset": row["dataset"], "draft": row["draft"], "other_draft": draft}
        for name in COMPARED:
            known = row[name] is not None and there[name] is not None
            entry[name] = {
                "here": row[name],
                "there": there[name],
                "difference": row[name] - there[name] if known else None,
            }
        entries.append(entry)
    here, there = flat_settings(report["settings"]), flat_settings(other["settings"])
    names = [one for one in here | there if here.get(one) != there.get(one)]
    names = [one for one in names if one != "command" and not one.startswith(("drafts.", "draft_states."))]
    differing = [{"name": one, "here": here.get(one), "there": there.get(one)} for one in names]
    return {"other": other["path"], "sets": entries, "settings": differing}


def flat_settings(settings: Entry) -> Entry:
    """Settings with those inside others by a dotted name."""
    flat: Entry = {}
    for name, value in settings.items():
        flat |= {f"{name}.{inner}": one for inner, one in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def table(report: Entry) -> str:
    """The report for the screen, one block of lines a draft."""
    lines = []
    for overall in report["overall"]:
        own = [entry for entry in report["sets"] if entry["draft"] == overall["draft"]]
        if len(own) > 1:
            own.append({"dataset": "overall"} | overall)
        lines.append(f"{overall['draft']}, block {overall['block_size']}")
        head = ["data", "prompts", "τ", "speedup", "median (range)", "tok/s", "plain tok/s", "identical"]
        lines += columns([head, *([cell(entry) for cell in _CELLS] for entry in own)])
        lines.append("")
    if "comparison" in report:
        lines += compared_lines(report["comparison"])
    return "\n".join(lines).rstrip()


def columns(rows: list[list[str]]) -> list[str]:
    """Rows of cells as lines, the first column to the left and numbers to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    sides = ["<", *">" * (len(widths) - 1)]
    return ["  ".join(f"{cell:{s}{w}}" for cell, s, w in zip(row, sides, widths, strict=True)) for row in rows]


def number(value: float | None, digits: int = 2, sign: bool = False) -> str:
    return MISSING if value is None else f"{value:{'+' if sign else ''}.{digits}f}"


def range_cell(entry: Entry) -> str:
    if entry["speedup_median"] is None:
        return MISSING
    return f"{entry['speedup_median']:.2f} ({entry['speedup_lowest']:.2f} to {entry['speedup_highest']:.2f})"


def identical_cell(entry: Entry) -> str:
    if entry["identical"] is None:
        return MISSING
    ties, unexplained = entry["explained_by_ties"], entry["unexplained"]
    said = f"{entry['num_prompts'] - ties - unexplained} of {entry['num_prompts']}"
    said += f", {ties} {'tie' if ties == 1 else 'ties'}" if ties else ""
    return said + (f", {unexplained} unexplained" if unexplained else "")


_CELLS: tuple[Callable[[Entry], str], ...] = (
    lambda entry: entry["dataset"],
    lambda entry: str(entry["num_prompts"]),
    lambda entry: number(entry["acceptance_length"]),
    lambda entry: number(entry["speedup"]),
    range_cell,
    lambda entry: number(entry["tokens_per_second"], 1),
    lambda entry: number(entry["plain_tokens_per_second"], 1),
    identical_cell,
)


def compared_rows(entries: list[Entry]) -> list[list[str]]:
    head = ["data"]
    for title in ("τ", "speedup", "tok/s"):
        head += [title, "there", "difference"]
    rows = [head]
    for entry in entries:
        row = [entry["dataset"]]
        for name in COMPARED:
            digits = 1 if name == "tokens_per_second" else 2
            row += [number(entry[name]["here"], digits), number(entry[name]["there"], digits)]
            row.append(number(entry[name]["difference"], digits, sign=True))
        rows.append(row)
    return rows


def compared_lines(compared: Entry) -> list[str]:
    lines = []
    for pair in dict.fromkeys((entry["draft"], entry["other_draft"]) for entry in compared["sets"]):
        lines.append(f"{pair[0]} against {pair[1]} in {compared['other']}")
        own = [entry for entry in compared["sets"] if (entry["draft"], entry["other_draft"]) == pair]
        lines += [*columns(compared_rows(own)), ""]
    if compared["settings"]:
        lines.append("The runs differ: " + "; ".join(map(setting_difference, compared["settings"])))
    return lines


def setting_difference(setting: Entry) -> str:
    return f"{setting['name']} {setting['here']} here, {setting['there']} there"

"""A report as one HTML file: charts and tables that need nothing from anywhere else, in light and in dark."""

from collections.abc import Sequence
from html import escape
from typing import Any

from .report import (
    MISSING,
    PARTS,
    compared_rows,
    flat_settings,
    identical_cell,
    number,
    range_cell,
    setting_difference,
)

Entry = dict[str, Any]
WIDTH, LABELS, VALUES = 760, 180, 80  # px: a chart, the names at its left, the numbers at its right
BAR, GAP = 18, 12

STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --soft: #5b6875; --line: #d5dce3; --paper: #ffffff; --shade: #f4f6f8;
  --c0: #2f6fb0; --c1: #c8711d; --c2: #3a8f5c; --c3: #a2457f; --c4: #7a6a2b; --c5: #5a55ad; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ee; --soft: #9aa7b4; --line: #3a4550; --paper: #14191f;
  --shade: #1d242c; --c0: #6aa8e6; --c1: #f0a35a; --c2: #6cc492; --c3: #d883b6; --c4: #cdb865; --c5: #a09bea; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1000px; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; }
p { margin: .3rem 0; max-width: 46rem; } .soft { color: var(--soft); }
svg { display: block; width: 100%; max-width: 760px; height: auto; margin-top: .6rem; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; } svg text.soft { fill: var(--soft); }
.axis { stroke: var(--line); } .mark { stroke: var(--ink); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin-top: .6rem; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { background: var(--shade); font-weight: 600; }
.text { text-align: left; white-space: normal; overflow-wrap: anywhere; }
pre { background: var(--shade); padding: .7rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }
.key { display: inline-block; margin: .2rem 1.2rem 0 0; font-size: 13px; }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }
"""


def render_html(report: Entry) -> str:
    """The page of a report."""
    settings, overall = report["settings"], report["overall"]
    drafts = [entry["draft"] for entry in overall]
    colours = {draft: f"var(--c{place % 6})" for place, draft in enumerate(drafts)}
    key = _key(colours)
    title = f"DFlash with {escape(_name(settings['gguf_file'] or settings['target']))}"
    law = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']}"
    dtype = report["results"][0]["dtype"]
    about = f"{dtype}, {law}, up to {settings['max_new_tokens']} new tokens, batch {settings['batch_size']}"
    entries = report["sets"] + ([{"dataset": "overall"} | entry for entry in overall] if _several_sets(report) else [])
    entries = sorted(entries, key=lambda entry: _order(report, entry))
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="soft">{escape(about)}; {escape(settings["device"])}</p>',
        "<h2>Acceptance length τ</h2>",
        "<p>Tokens that one pass of the target gives, its own token included; all tokens over all rounds.</p>",
        key,
        bars([_bar(entry, colours, "acceptance_length") for entry in entries], reference=1),
        "<h2>Acceptance by place in the block</h2>",
        "<p>Of the candidates proposed at a place, the share that was accepted (solid), and the same among those "
        "whose predecessors all were (dashed); over all prompts.</p>",
        key,
        lines(overall, colours),
    ]
    if settings["plain"]:
        parts += [
            "<h2>Speedup over plain generate</h2>",
            "<p>Seconds per token without the draft over those with it, prefill included. The bar is of all tokens; "
            "the line spans the prompts' own values, from lowest to highest, with their median as a tick.</p>",
            key,
            bars([_bar(entry, colours, "speedup", ranged=True) for entry in entries], reference=1),
        ]
    shades = {part: f"var(--c{place})" for place, part in enumerate(PARTS)}
    parts += [
        "<h2>Where the time goes</h2>",
        "<p>Shares of the whole time of the answers with a draft. Verifying includes the target's passes; other is "
        "what generate does around the rounds.</p>",
        _key(shades),
        shares(entries, shades, named=len(drafts) > 1),
        "<h2>All numbers</h2>",
        _table(_acceptance(entries)),
        _table(_rates(overall)),
        _table(_speeds(entries)),
    ]
    if "comparison" in report:
        parts += _comparison(report["comparison"])
    rows = [["setting", "value"]]
    rows += [[name, _shown(value)] for name, value in flat_settings(settings).items() if name != "command"]
    parts += ["<h2>Settings</h2>", _table(rows, text=True)]
    parts += ["<h2>Command</h2>", f"<pre>{escape(settings['command'])}</pre>"]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    body = "\n".join(parts)
    head = f"<head>{head}<title>{title}</title><style>{STYLE}</style></head>"
    return f'<!DOCTYPE html>\n<html lang="en">{head}\n<body>\n{body}\n</body></html>\n'


def bars(entries: Sequence[Entry], reference: float) -> str:
    """Horizontal bars, those of one data set together.

    Args:
        entries: `label`, `colour`, `value`, and optionally `range` with the lowest, middle and highest of a whisker.
        reference: a value to draw a line at.
    """
    known = [end for entry in entries for end in (entry["value"], *(entry.get("range") or ())) if end is not None]
    scale = (WIDTH - LABELS - VALUES) / (max([*known, reference]) or 1)
    shapes, y, last = [], 4.0, None
    for entry in entries:
        y += GAP if last not in (None, entry["label"]) else 0
        if entry["label"] != last:
            shapes.append(_text(LABELS - 8, y + BAR - 5, entry["label"], "end"))
        last, value = entry["label"], entry["value"]
        end = LABELS + scale * (value or 0)
        if value is not None:
            shapes.append(
                _rect(LABELS, y + 1, end - LABELS, BAR - 2, entry["colour"], f"{entry['title']}: {value:.3f}")
            )
        if entry.get("range"):
            low, middle, high = (LABELS + scale * one for one in entry["range"])
            centre = y + BAR / 2
            shapes += [_line(low, centre, high, centre, "mark"), _line(middle, y + 3, middle, y + BAR - 3, "mark")]
            end = max(end, high)
        shapes.append(_text(end + 6, y + BAR - 5, number(value)))
        y += BAR
    x = LABELS + scale * reference
    shapes.append(f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{y + 4:.1f}" class="axis" stroke-dasharray="3 3"/>')
    return _svg(y + 8, shapes)


def lines(entries: Sequence[Entry], colours: dict[str, str]) -> str:
    """Acceptance rates over the places of a block, a pair of lines for each draft."""
    height, left, top, bottom = 240, 48, 10, 210
    places = max((len(entry["acceptance_rates"]) for entry in entries), default=0)
    step = (WIDTH - left - 30) / max(places - 1, 1)
    shapes = []
    for tenths in range(0, 11, 2):
        y = bottom - (bottom - top) * tenths / 10
        shapes += [_line(left, y, WIDTH - 30, y, "axis"), _text(left - 8, y + 4, f"{10 * tenths} %", "end", "soft")]
    shapes += [_text(left + step * place, bottom + 20, str(place + 1), "middle", "soft") for place in range(places)]
    for entry in entries:
        for name, dashes in (("acceptance_rates", ""), ("conditional_acceptance_rates", ' stroke-dasharray="5 4"')):
            points = [
                (left + step * place, bottom - (bottom - top) * rate)
                for place, rate in enumerate(entry[name])
                if rate is not None
            ]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            colour = colours[entry["draft"]]
            shapes.append(f'<polyline points="{path}" style="fill:none;stroke:{colour};stroke-width:2"{dashes}/>')
            shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill:{colour}"/>' for x, y in points]
    return _svg(height, shapes)


def shares(entries: Sequence[Entry], colours: dict[str, str], named: bool) -> str:
    """Stacked bars of the shares of time, one for each entry; `named` with the draft after the data set."""
    shapes, y = [], 4.0
    for entry in entries:
        label = f"{entry['dataset']}, {_name(entry['draft'])}" if named else entry["dataset"]
        shapes.append(_text(LABELS - 8, y + BAR - 5, label, "end"))
        x = float(LABELS)
        for part, colour in colours.items():
            share = max(entry["time_shares"][part], 0)
            wide = (WIDTH - LABELS - VALUES) * share
            shapes.append(_rect(x, y + 1, wide, BAR - 2, colour, f"{part}: {100 * share:.1f} %"))
            x += wide
        y += BAR + 6
    return _svg(y + 4, shapes)


def _several_sets(report: Entry) -> bool:
    return len({entry["dataset"] for entry in report["sets"]}) > 1


def _order(report: Entry, entry: Entry) -> int:
    """Sets in their order with their drafts side by side, all prompts last."""
    names = list(dict.fromkeys(one["dataset"] for one in report["sets"]))
    return names.index(entry["dataset"]) if entry["dataset"] in names else len(names)


def _bar(entry: Entry, colours: dict[str, str], name: str, ranged: bool = False) -> Entry:
    title = f"{entry['draft']} on {entry['dataset']}"
    bar = {"label": entry["dataset"], "colour": colours[entry["draft"]], "value": entry[name], "title": title}
    if ranged and entry["speedup_median"] is not None:
        bar["range"] = [entry[f"speedup_{end}"] for end in ("lowest", "median", "highest")]
    return bar


def _acceptance(entries: Sequence[Entry]) -> list[list[str]]:
    rows = [["data", "draft", "prompts", "new tokens", "rounds", "τ", "τ per prompt", "block efficiency", "identical"]]
    for entry in entries:
        row = [entry["dataset"], _name(entry["draft"])]
        row += [str(entry[name]) for name in ("num_prompts", "new_tokens", "rounds")]
        row += [number(entry[name]) for name in ("acceptance_length", "acceptance_length_per_prompt")]
        rows.append([*row, number(entry["block_efficiency"]), identical_cell(entry)])
    return rows


def _speeds(entries: Sequence[Entry]) -> list[list[str]]:
    rows = [["data", "draft", "tok/s", "plain tok/s", "speedup", "median (range)", *PARTS]]
    for entry in entries:
        row = [entry["dataset"], _name(entry["draft"])]
        row += [number(entry[name], 1) for name in ("tokens_per_second", "plain_tokens_per_second")]
        row += [number(entry["speedup"]), range_cell(entry)]
        rows.append(row + [_percent(entry["time_shares"][part]) for part in PARTS])
    return rows


def _rates(overall: Sequence[Entry]) -> list[list[str]]:
    places = max((len(entry["acceptance_rates"]) for entry in overall), default=0)
    rows = [["acceptance by place", *map(str, range(1, places + 1))]]
    for entry in overall:
        for name, title in (("acceptance_rates", "all"), ("conditional_acceptance_rates", "predecessors accepted")):
            values = [_percent(rate) for rate in entry[name]]
            rows.append([f"{_name(entry['draft'])}, {title}", *values, *[""] * (places - len(values))])
    return rows


def _comparison(compared: Entry) -> list[str]:
    parts = ["<h2>Comparison</h2>"]
    for pair in dict.fromkeys((entry["draft"], entry["other_draft"]) for entry in compared["sets"]):
        own = [entry for entry in compared["sets"] if (entry["draft"], entry["other_draft"]) == pair]
        parts.append(f"<p>{escape(pair[0])} against {escape(pair[1])} in {escape(compared['other'])}</p>")
        parts.append(_table(compared_rows(own)))
    if compared["settings"]:
        parts.append(
            f'<p class="soft">The runs differ: {escape("; ".join(map(setting_difference, compared["settings"])))}</p>'
        )
    return parts


def _table(rows: list[list[str]], text: bool = False) -> str:
    """A table with its head in the first row; with `text` its cells are not numbers."""
    css = ' class="text"' if text else ""
    head = "".join(f"<th{css}>{escape(cell)}</th>" for cell in rows[0])
    lines = ["".join(f"<td{css}>{escape(cell)}</td>" for cell in row) for row in rows[1:]]
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _key(colours: dict[str, str]) -> str:
    items = [f'<i style="background:{colour}"></i>{escape(name)}' for name, colour in colours.items()]
    return "<div>" + "".join(f'<span class="key">{item}</span>' for item in items) + "</div>"


def _svg(height: float, shapes: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">\n' + "\n".join(shapes) + "\n</svg>"


def _rect(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height}"'
    return f'<rect {place} style="fill:{colour}"><title>{escape(title)}</title></rect>'


def _line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", css: str = "") -> str:
    shown = text if len(text) <= 22 else f"{text[:21]}…"  # what the room for labels takes
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}">{escape(shown)}</text>'


def _name(name: str) -> str:
    """The last part of a Hub id or a path."""
    return name.rstrip("/").rpartition("/")[2]


def _percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.0f} %"


def _shown(value: Any) -> str:
    if value is None:
        return MISSING
    return {"True": "yes", "False": "no"}.get(str(value), str(value))


__all__ = ["render_html"]

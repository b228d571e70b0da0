"""Acceptance length against training tokens, from what `transformers-dflash train` notes of its evaluations.

    python benchmarks/learning.py my-draft --csv learning.csv --png learning.png

The newest checkpoint in `my-draft` is read. Its points go into the CSV file, in which other runs may stand, and all
that stand there are drawn. Tokens are those of the target's answers, counted once for every time they were seen.
"""

import argparse
import csv
import json
from pathlib import Path

from matplotlib import pyplot

from transformers_dflash.training.command import last_checkpoint

COLUMNS = ("run", "tokens", "acceptance_length")


def points(folder: Path, name: str, before: int) -> list[dict]:
    """The evaluations of a run as rows of the CSV file."""
    newest = last_checkpoint(folder)
    if newest is None:
        raise SystemExit(f"{folder} holds no whole checkpoint of a training run (train with --save_steps)")
    state = json.loads((Path(newest) / "trainer_state.json").read_text())
    tokens = json.loads((Path(newest) / "config.json").read_text())["model_card"]["training"]["response_tokens"]
    evaluations = [entry for entry in state["log_history"] if "eval_acceptance_length" in entry]
    if not evaluations:
        raise SystemExit(f"{newest} was never evaluated (train with --eval_strategy and --eval_steps)")
    return [
        {
            "run": name,
            "tokens": before + round(entry.get("epoch", 0) * tokens),
            "acceptance_length": round(entry["eval_acceptance_length"], 4),
        }
        for entry in evaluations
    ]


def draw(rows: list[dict], path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name in dict.fromkeys(row["run"] for row in rows):
        own = [row for row in rows if row["run"] == name]
        tokens = [int(row["tokens"]) / 1e6 for row in own]
        axes.plot(tokens, [float(row["acceptance_length"]) for row in own], marker="o", label=name)
    axes.set(xlabel="million training tokens", ylabel="acceptance length τ", ylim=(1, None), xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder of the run")
    parser.add_argument("--name", help="of the run; by default that of its folder")
    parser.add_argument("--before", type=int, default=0, help="tokens that its first weights had seen already")
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--png", type=Path, required=True)
    options = parser.parse_args()
    name = options.name or options.folder.name
    rows = list(csv.DictReader(options.csv.open())) if options.csv.is_file() else []
    rows = [row for row in rows if row["run"] != name] + points(options.folder, name, options.before)
    part = options.csv.with_name(options.csv.name + ".part")
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    part.rename(options.csv)
    draw(rows, options.png)


if __name__ == "__main__":
    main()

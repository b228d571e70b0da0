"""The figures of the other benchmarks as one picture.

    python benchmarks/plots.py --decode decode.json --batch batch.json --context context.json --output benchmarks.png

The files are what `decode.py`, `batch.py` and `context.py` write with `--json`.
"""

import argparse
import json
from pathlib import Path

from matplotlib import pyplot


def speeds(axes, results: dict) -> None:
    """Speed of every method over plain generate, set by set."""
    methods = list(next(iter(results.values()))["methods"])
    width = 0.8 / len(results)
    for place, (name, figures) in enumerate(results.items()):
        values = [figures["methods"][method]["over_plain"] for method in methods]
        axes.barh([row + (place - 1) * width for row in range(len(methods))], values, width, label=name)
    axes.set(yticks=range(len(methods)), yticklabels=methods, xlabel="tokens per second over plain generate")
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.invert_yaxis()
    _legend_below(axes)


def batches(axes, results: dict) -> None:
    """Tokens per second of all sequences together."""
    for name, by_size in results.items():
        axes.plot([int(size) for size in by_size], list(by_size.values()), marker="o", label=name)
    axes.set(xlabel="sequences in a batch", ylabel="tokens per second, all together", ylim=(0, None))
    _logarithmic(axes, [int(size) for size in next(iter(results.values()))])
    _legend_below(axes)


def contexts(axes, results: dict) -> None:
    """Seconds of a round and of the bare forwards in it."""
    lengths = [int(length) for length in results]
    for name, label in (("round", "a round"), ("floor", "bare forwards"), ("target alone", "the target's alone")):
        axes.plot(lengths, [1000 * own[name] for own in results.values()], marker="o", label=label)
    axes.set(xlabel="tokens of context", ylabel="milliseconds", ylim=(0, None))
    _logarithmic(axes, lengths)
    _legend_below(axes)


def _legend_below(axes) -> None:
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15))


def _logarithmic(axes, values: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(value) for value in values])


PANELS = {"decode": speeds, "batch": batches, "context": contexts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in PANELS:
        parser.add_argument(f"--{name}", type=Path, required=True, help=f"of {name}.py")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    figure, panels = pyplot.subplots(1, len(PANELS), figsize=(19, 5), width_ratios=[1.2, 1, 1], layout="constrained")
    for axes, (name, plot) in zip(panels, PANELS.items(), strict=True):
        plot(axes, json.loads(getattr(arguments, name).read_text()))
    figure.savefig(arguments.output, dpi=110)


if __name__ == "__main__":
    main()

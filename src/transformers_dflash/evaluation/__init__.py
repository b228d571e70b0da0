"""Evaluation of drafts: metrics for the library `evaluate`, and the command `transformers-dflash evaluate`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

METRICS = Path(__file__).parent / "metrics"
# What each metric is computed from. `evaluate.combine` hands the inputs of all metrics to each of them.
INPUTS = {
    "acceptance_length": ("acceptance_lengths", "block_size"),
    "acceptance_rate": ("drafted", "accepted"),
    "losslessness": ("predictions", "references", "gaps", "tolerance"),
    "speedup": ("plain_seconds", "plain_tokens", "seconds", "tokens"),
}


def load(name: str, **options: Any) -> Any:
    """A metric as an `evaluate.EvaluationModule`, from the files of this package: nothing is downloaded.

    Args:
        name: acceptance_length, acceptance_rate, losslessness or speedup.
        **options: of `evaluate.load`.

    Raises:
        ValueError: there is no such metric.
        ImportError: the library `evaluate` is not installed.
    """
    if name not in INPUTS:
        raise ValueError(f"there is no metric {name!r}: take one of {', '.join(INPUTS)}")
    try:
        import evaluate  # an extra
    except ImportError as error:
        raise ImportError(f"the metric {name} needs the library evaluate: pip install 'evaluate>=0.4.6'") from error
    return evaluate.load(str(METRICS / name), **options)


def refuse_unknown_inputs(metric: str, names: Iterable[str]) -> None:
    """Refuse what is the input of no metric; inputs of the others come along where metrics are combined.

    Raises:
        TypeError: it names them.
    """
    known = {name for inputs in INPUTS.values() for name in inputs}
    if unknown := sorted(set(names) - known):
        raise TypeError(f"{metric} has no input {', '.join(unknown)}: it takes {', '.join(INPUTS[metric])}")


__all__ = ["INPUTS", "METRICS", "load", "refuse_unknown_inputs"]

"""Speedup over plain generation."""

import datasets
import evaluate

from transformers_dflash.evaluation import refuse_unknown_inputs
from transformers_dflash.evaluation.measures import speedup

_DESCRIPTION = """
Seconds per new token of plain generation over seconds per new token with a draft, for the same prompts. Time is wall
time of the whole answer, prefill included, unless the caller measures otherwise; both must be measured alike.
"""
_INPUTS = """
Args:
    plain_seconds: seconds of each prompt's answer without a draft.
    plain_tokens: new tokens of that answer.
    seconds: seconds of the answer with the draft.
    tokens: new tokens of that answer.
Returns:
    speedup: of the sums over prompts, so that long answers weigh more.
    speedup_median, speedup_lowest, speedup_highest: over prompts of each one's own.
Examples:
    >>> metric = transformers_dflash.evaluation.load("speedup")
    >>> metric.compute(plain_seconds=[4.0], plain_tokens=[8], seconds=[2.0], tokens=[8])
    {'speedup': 2.0, 'speedup_median': 2.0, 'speedup_lowest': 2.0, 'speedup_highest': 2.0}
"""


class Speedup(evaluate.Metric):
    def _info(self):
        kinds = {"plain_seconds": "float64", "plain_tokens": "int64", "seconds": "float64", "tokens": "int64"}
        features = {name: datasets.Value(kind) for name, kind in kinds.items()}
        return evaluate.MetricInfo(
            description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=datasets.Features(features)
        )

    def _compute(self, plain_seconds, plain_tokens, seconds, tokens, **others):
        refuse_unknown_inputs("speedup", others)
        return speedup(plain_seconds, plain_tokens, seconds, tokens)

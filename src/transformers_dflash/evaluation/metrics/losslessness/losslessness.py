"""Losslessness: are greedy answers with a draft those of plain generation?"""

import datasets
import evaluate

from transformers_dflash.evaluation import refuse_unknown_inputs
from transformers_dflash.evaluation.measures import losslessness

_DESCRIPTION = """
Whether greedy answers with a draft equal those of plain generation, token by token. In half precision a block of rows
rounds otherwise than one row, so that answers may part where the target's two best tokens are as good as equal (a
tie); a parting anywhere else is a fault. Sampled answers need not agree, and this metric says nothing about them.
"""
_INPUTS = """
Args:
    predictions: token ids of each prompt's answer with the draft, without the prompt.
    references: those of the plain answer.
    gaps: for each prompt whose answers part, how far the worse of the two tokens at the parting lies below the
        target's best logit there; None for the others. Optional.
    tolerance: the largest gap that counts as a tie, in the unit of the gaps; 0 by default.
Returns:
    identical: share of prompts with equal answers.
    first_differences: for each prompt the place of the first token that differs, from 0, or of the end of the
        shorter answer; None where they are equal.
    explained_by_ties, unexplained: how many partings have a gap up to the tolerance, and how many a larger one;
        with gaps only.
Examples:
    >>> metric = transformers_dflash.evaluation.load("losslessness")
    >>> metric.compute(predictions=[[5, 6], [7, 8]], references=[[5, 6], [7, 9]])
    {'identical': 0.5, 'first_differences': [None, 1]}
"""


class Losslessness(evaluate.Metric):
    def _info(self):
        features = {name: datasets.Sequence(datasets.Value("int64")) for name in ("predictions", "references")}
        return evaluate.MetricInfo(
            description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=datasets.Features(features)
        )

    def _compute(self, predictions, references, gaps=None, tolerance=0.0, **others):
        refuse_unknown_inputs("losslessness", others)
        return losslessness(predictions, references, gaps, tolerance)

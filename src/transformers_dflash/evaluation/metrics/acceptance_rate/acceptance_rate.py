"""Acceptance rates by place in the block."""

import datasets
import evaluate

from transformers_dflash.evaluation import refuse_unknown_inputs
from transformers_dflash.evaluation.measures import acceptance_rates

_DESCRIPTION = """
How often the target accepts the candidate at each place of a block, the first candidate first. Of a round, accepted
candidates are always the first ones: one that is rejected takes all behind it along.
"""
_INPUTS = """
Args:
    drafted: for each prompt, a list with the candidates that each round proposed.
    accepted: the same with the candidates that were committed.
Returns:
    acceptance_rates: unconditional; of the candidates proposed at a place, the share that was committed.
    conditional_acceptance_rates: the same among those whose predecessors in the block were all committed; nan where
        there were none.
Examples:
    >>> metric = transformers_dflash.evaluation.load("acceptance_rate")
    >>> metric.compute(drafted=[[2, 2], [2, 2]], accepted=[[2, 1], [1, 0]])
    {'acceptance_rates': [0.75, 0.25], 'conditional_acceptance_rates': [0.75, 0.3333333333333333]}
"""


class AcceptanceRate(evaluate.Metric):
    def _info(self):
        features = {name: datasets.Sequence(datasets.Value("int64")) for name in ("drafted", "accepted")}
        return evaluate.MetricInfo(
            description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=datasets.Features(features)
        )

    def _compute(self, drafted, accepted, **others):
        refuse_unknown_inputs("acceptance_rate", others)
        return acceptance_rates(drafted, accepted)

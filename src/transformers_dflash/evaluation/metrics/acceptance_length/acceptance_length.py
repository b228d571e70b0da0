"""Acceptance length τ: committed tokens per round."""

import datasets
import evaluate

from transformers_dflash.evaluation import refuse_unknown_inputs
from transformers_dflash.evaluation.measures import acceptance_length

_DESCRIPTION = """
Acceptance length (τ) of speculative decoding: the tokens that one round, a forward pass of the draft and one of the
target, commits on average, the target's own bonus token included. The prefill is not a round.
"""
_INPUTS = """
Args:
    acceptance_lengths: for each prompt, a list with the committed tokens of each round.
    block_size: slots of the draft's block, the anchor's included; optional.
Returns:
    acceptance_length: all tokens over all rounds, so that prompts with many rounds weigh more.
    acceptance_length_per_prompt: mean over prompts of each one's own; prompts without a round are left out.
    block_efficiency: acceptance_length / block_size, at most 1 unless the anchor's slot gives a candidate too; with
        block_size only.
Examples:
    >>> metric = transformers_dflash.evaluation.load("acceptance_length")
    >>> metric.compute(acceptance_lengths=[[4, 2], [3]], block_size=8)
    {'acceptance_length': 3.0, 'acceptance_length_per_prompt': 3.0, 'block_efficiency': 0.375}
"""


class AcceptanceLength(evaluate.Metric):
    def _info(self):
        features = {"acceptance_lengths": datasets.Sequence(datasets.Value("int64"))}
        return evaluate.MetricInfo(
            description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=datasets.Features(features)
        )

    def _compute(self, acceptance_lengths, block_size=None, **others):
        refuse_unknown_inputs("acceptance_length", others)
        return acceptance_length(acceptance_lengths, block_size)

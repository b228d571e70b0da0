"""Logits processors under speculation: which act row by row, which read the prefix, which may keep a state.

A block has several positions whose prefixes differ. A processor that looks at the scores alone takes all positions at
once, as rows of one call. A processor that reads the prefix is asked position by position, with the prefix that plain
`generate` would show it. A processor that is not known here may keep a state, so it is asked once per committed token,
in order, with a legal prefix, and never for a draft.
"""

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as lp

# The scores alone decide. Exact classes: a subclass may do anything.
ROW_WISE = {
    lp.TemperatureLogitsWarper,
    lp.TopKLogitsWarper,
    lp.TopPLogitsWarper,
    lp.MinPLogitsWarper,
    lp.TypicalLogitsWarper,
    lp.EpsilonLogitsWarper,
    lp.EtaLogitsWarper,
    lp.InfNanRemoveLogitsProcessor,
    lp.LogitNormalization,
    lp.SuppressTokensLogitsProcessor,
}
# Pure functions of the prefix and the scores, safe to ask about a draft's own prefix.
PREFIX_PURE = {
    lp.MinLengthLogitsProcessor,
    lp.MinNewTokensLengthLogitsProcessor,
    lp.RepetitionPenaltyLogitsProcessor,
    lp.EncoderRepetitionPenaltyLogitsProcessor,
    lp.NoRepeatNGramLogitsProcessor,
    lp.EncoderNoRepeatNGramLogitsProcessor,
    lp.SequenceBiasLogitsProcessor,
    lp.NoBadWordsLogitsProcessor,
    lp.ForcedBOSTokenLogitsProcessor,
    lp.ForcedEOSTokenLogitsProcessor,
    lp.ExponentialDecayLengthPenalty,
    lp.SuppressTokensAtBeginLogitsProcessor,
}


def all_row_wise(processors: LogitsProcessorList) -> bool:
    """Whether every processor looks at the scores alone."""
    return all(type(processor) in ROW_WISE for processor in processors)


def for_draft(processors: LogitsProcessorList, temperature: float | None) -> LogitsProcessorList:
    """The processors that shape the draft's law: those of the target that are safe to ask about a draft.

    Args:
        processors: the target's.
        temperature: the draft's own, in place of the target's; None for the target's.
    """
    chosen = LogitsProcessorList(p for p in processors if type(p) in ROW_WISE or type(p) in PREFIX_PURE)
    if temperature is None:
        return chosen
    own = lp.TemperatureLogitsWarper(float(temperature))
    places = [i for i, p in enumerate(chosen) if type(p) is lp.TemperatureLogitsWarper]
    if places:
        chosen[places[0]] = own
    else:
        chosen.append(own)
    return chosen


def process_rows(processors: LogitsProcessorList, prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Apply row-wise processors to several positions at once.

    Args:
        prefix: `(1, n)`, any; these processors do not read it.
        scores: `(rows, V)` float32.

    Returns:
        `(rows, V)` float32.
    """
    return processors(prefix.expand(scores.shape[0], -1), scores) if len(processors) else scores


__all__ = ["all_row_wise", "for_draft", "process_rows"]

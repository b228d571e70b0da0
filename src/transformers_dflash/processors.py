"""Logits processors under speculation: which act row by row, which read the prefix, which may keep a state.

A block has several positions whose prefixes differ. A processor that looks at the scores alone takes all positions at
once, as rows of one call. A processor that reads the prefix is asked position by position, with the prefix that plain
`generate` would show it. A processor that is not known here may keep a state, so it is asked once per committed token,
in order, with a legal prefix, and never for a draft.
"""

import copy
from functools import partial

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


def for_row(processors: LogitsProcessorList, row: int, batch_size: int) -> LogitsProcessorList:
    """The processors of one row of a batch, to be asked about that row alone.

    What knows the prompts knows each once, whereas several rows may answer one of them (`num_return_sequences`).

    Raises:
        ValueError: one of them works on the batch as a whole, in a way that is not known here.
    """

    def own_prompt(num_prompts: int) -> slice:
        prompt = row * num_prompts // batch_size
        return slice(prompt, prompt + 1)

    chosen = LogitsProcessorList()
    for processor in processors:
        kind = type(processor)
        if kind is lp.EncoderRepetitionPenaltyLogitsProcessor:  # it knows every row's prompt
            own = copy.copy(processor)
            own.encoder_input_ids = processor.encoder_input_ids[own_prompt(len(processor.encoder_input_ids))]
        elif kind is lp.EncoderNoRepeatNGramLogitsProcessor:
            own = copy.copy(processor)
            own.batch_size, own.generated_ngrams = 1, processor.generated_ngrams[own_prompt(processor.batch_size)]
        elif kind is lp.RepetitionPenaltyLogitsProcessor:
            own = copy.copy(processor)
            if isinstance(processor.prompt_ignore_length, torch.Tensor):  # one for each row
                ignored = processor.prompt_ignore_length
                own.prompt_ignore_length = ignored[own_prompt(len(ignored))]
        elif kind in ROW_WISE or kind in PREFIX_PURE:
            own = processor
        elif kind is lp.PrefixConstrainedLogitsProcessor:
            own = copy.copy(processor)
            prompt = row // processor._num_beams  # sequences of one prompt, which is what the function is told
            own._prefix_allowed_tokens_fn = partial(_ask_for_prompt, processor._prefix_allowed_tokens_fn, prompt)
            own._num_beams = 1
        elif kind.__module__.startswith("transformers."):
            raise ValueError(
                f"{kind.__name__} keeps a state for the batch as a whole, and rows of a speculative batch do not move "
                "together: call generate once per sequence"
            )
        else:
            try:
                own = copy.deepcopy(processor)  # it may keep a state, of one row now
            except TypeError as error:
                raise ValueError(
                    f"the rows of a speculative batch need a {kind.__name__} each, which cannot be copied ({error}): "
                    "call generate once per sequence"
                ) from error
        chosen.append(own)
    return chosen


def _ask_for_prompt(allowed_tokens, prompt: int, _prompt_in_call: int, ids: torch.Tensor):
    return allowed_tokens(prompt, ids)


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


__all__ = ["all_row_wise", "for_draft", "for_row", "process_rows"]

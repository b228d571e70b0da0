"""What the numbers of an evaluation mean: plain functions of counts, times and tokens, one place for each definition.

A prompt's counts are lists with one entry per round, the prefill not being one. A number that has nothing to be made
of, such as a rate without a candidate, is nan.
"""

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any


def acceptance_length(rounds: Sequence[Sequence[int]], block_size: int | None = None) -> dict[str, float]:
    """τ of prompts from the committed tokens of their rounds, the bonus token included.

    Args:
        rounds: for each prompt, the tokens that each round committed.
        block_size: slots of the draft's block, the anchor's included; without it there is no block efficiency.

    Returns:
        `acceptance_length`: all tokens over all rounds. `acceptance_length_per_prompt`: the mean over prompts of
        each one's own, prompts without a round left out. `block_efficiency`: `acceptance_length / block_size`, 1
        where every candidate is accepted: a block of B slots has B - 1 candidates, and the bonus token follows them.
        With `sample_from_anchor` it has B, so that (B + 1) / B is the most.
    """
    told = [each for each in rounds if each]
    values = {
        "acceptance_length": _over(sum(map(sum, told)), sum(map(len, told))),
        "acceptance_length_per_prompt": fmean(sum(each) / len(each) for each in told) if told else math.nan,
    }
    if block_size is not None:
        values["block_efficiency"] = values["acceptance_length"] / block_size
    return values


def acceptance_rates(drafted: Sequence[Sequence[int]], accepted: Sequence[Sequence[int]]) -> dict[str, list[float]]:
    """How often the candidate at each place of the block was accepted, the first candidate first.

    Args:
        drafted: for each prompt, the candidates that each round proposed.
        accepted: the same of those that were committed: of a round they are the first ones.

    Returns:
        `acceptance_rates`: of the candidates proposed at a place, the share committed.
        `conditional_acceptance_rates`: the same among those whose predecessors in the block were all committed.

    Raises:
        ValueError: the counts do not belong together.
    """
    pairs: list[tuple[int, int]] = []  # one a round
    for prompt, (proposed, kept) in enumerate(zip(drafted, accepted, strict=True)):
        if len(proposed) != len(kept) or any(k > p for p, k in zip(proposed, kept, strict=False)):
            raise ValueError(
                f"prompt {prompt} has the counts {list(proposed)} of proposed and {list(kept)} of accepted "
                "candidates: give one of each for every round, with no more accepted than proposed"
            )
        pairs += zip(proposed, kept, strict=True)
    rates, conditional = [], []
    for place in range(max((proposed for proposed, _ in pairs), default=0)):
        there = [kept for proposed, kept in pairs if proposed > place]
        committed = sum(kept > place for kept in there)
        rates.append(_over(committed, len(there)))
        conditional.append(_over(committed, sum(kept >= place for kept in there)))
    return {"acceptance_rates": rates, "conditional_acceptance_rates": conditional}


def speedup(
    plain_seconds: Sequence[float], plain_tokens: Sequence[int], seconds: Sequence[float], tokens: Sequence[int]
) -> dict[str, float]:
    """Seconds per token of plain `generate` over those with a draft, for the same prompts in the same order.

    Args:
        plain_seconds, plain_tokens: wall time and new tokens of each prompt's plain answer.
        seconds, tokens: the same with the draft.

    Returns:
        `speedup`: of the sums over prompts, so that long answers weigh more. `speedup_median`, `speedup_lowest` and
        `speedup_highest`: over prompts of each one's own; those with an answer of no token are left out of all.
    """
    prompts = [
        each for each in zip(plain_seconds, plain_tokens, seconds, tokens, strict=True) if each[1] > 0 and each[3] > 0
    ]
    own = [(ps / pt) / (s / t) for ps, pt, s, t in prompts]
    ps, pt, s, t = map(sum, zip(*prompts, strict=True)) if prompts else (math.nan, 1, 1, 1)
    return {
        "speedup": (ps / pt) / (s / t),
        "speedup_median": median(own) if own else math.nan,
        "speedup_lowest": min(own, default=math.nan),
        "speedup_highest": max(own, default=math.nan),
    }


def losslessness(
    answers: Sequence[Sequence[int]],
    plain_answers: Sequence[Sequence[int]],
    gaps: Sequence[float | None] | None = None,
    tolerance: float = 0.0,
) -> dict[str, Any]:
    """Whether greedy answers with a draft are those of plain `generate`, and whether ties explain where they are not.

    Args:
        answers: new tokens of each prompt with the draft.
        plain_answers: the same without.
        gaps: for each prompt whose answers part, how far the worse of the two tokens there lies below the target's
            best logit, None for the others. The two tokens are the target's two best where only rounding parts them.
        tolerance: the largest gap that rounding explains, in the unit of `gaps`.

    Returns:
        `identical`: share of prompts whose answers are equal, nan without prompts. `first_differences`: for each
        prompt the place of the first token that differs, from 0, None where none does; where one answer ends earlier,
        the place of its end. With `gaps` also `explained_by_ties`, how many of the partings lie within the
        tolerance, and `unexplained`, how many do not.

    Raises:
        ValueError: there is not one gap a prompt, or a parting without one.
    """
    places = [first_difference(*pair) for pair in zip(answers, plain_answers, strict=True)]
    values: dict[str, Any] = {
        "identical": _over(sum(place is None for place in places), len(places)),
        "first_differences": places,
    }
    if gaps is not None:
        parted = [gap for place, gap in zip(places, gaps, strict=True) if place is not None]
        if any(gap is None for gap in parted):
            raise ValueError("a prompt whose answers part has no gap: give the gap of its two tokens there")
        values["explained_by_ties"] = sum(gap <= tolerance for gap in parted)
        values["unexplained"] = len(parted) - values["explained_by_ties"]
    return values


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where two answers differ, the end of the shorter one included; None if they are equal."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def _over(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


__all__ = ["acceptance_length", "acceptance_rates", "first_difference", "losslessness", "speedup"]

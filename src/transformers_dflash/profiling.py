"""Where the time of a generation goes, and how far a round is above the bare forwards of target and draft."""

import time
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from .costs import RoundCosts, floor_seconds
from .modeling_dflash import DFlashDraftModel
from .outputs import SpeculationStatistics
from .target import Target


@dataclass
class Profile:
    """One generation, timed.

    Args:
        seconds: of the whole call.
        new_tokens: that it gave.
        speculation: what its rounds did, and their times.
        verifying_floor, drafting_floor: seconds of the bare forwards of a round at the middle of the answer.
        costs: of forwards over more and more rows.
    """

    seconds: float
    new_tokens: int
    speculation: SpeculationStatistics
    verifying_floor: float
    drafting_floor: float
    costs: RoundCosts

    @classmethod
    def of(cls, target: PreTrainedModel, draft: DFlashDraftModel, **options: Any) -> "Profile":
        """Generate once to warm up and once to measure.

        Args:
            target, draft: on their devices.
            options: of `generate`, `input_ids` `(1, n)` among them.
        """
        options |= {"assistant_model": draft, "return_dict_in_generate": True}
        target.generate(**options)
        start = time.perf_counter()
        output = target.generate(**options)
        seconds = time.perf_counter() - start
        known = options["input_ids"].shape[1]
        new_tokens = output.sequences.shape[1] - known
        view, speculation = Target(target), output.speculation
        per_round = max(1, round(new_tokens / max(1, speculation.rounds)))
        context = output.sequences[:, : known + new_tokens // 2]
        floor = floor_seconds(view, draft, context, min(per_round, context.shape[1]))
        return cls(seconds, new_tokens, speculation, *floor, RoundCosts.of(view, draft))

    def __str__(self) -> str:
        spoken = self.speculation
        parts = {
            "drafting": spoken.drafting_seconds,
            "verifying": spoken.verifying_seconds,
            "rolling back": spoken.rolling_back_seconds,
        }
        rounds, rounds_took, round_seconds = max(1, spoken.forwards), sum(parts.values()), spoken.seconds_per_forward
        floors = {"drafting": self.drafting_floor, "verifying": self.verifying_floor}
        lines = [
            f"{self.new_tokens} tokens in {self.seconds:.2f} s: prefill {_ms(spoken.prefill_seconds)}, "
            f"{spoken.forwards} rounds {_ms(rounds_took)}, "
            f"around them {_ms(self.seconds - spoken.prefill_seconds - rounds_took)}",
            "",
            f"{'a round':<14}{'ms':>8}{'share':>8}{'bare ms':>10}",
        ]
        for name, seconds in parts.items():
            share = seconds / max(rounds_took, 1e-9)
            bare = f"{1000 * floors[name]:10.2f}" if name in floors else ""
            lines.append(f"{name:<14}{1000 * seconds / rounds:8.2f}{share:8.0%}{bare}")
        floor = sum(floors.values())
        lines += [
            f"{'all':<14}{1000 * round_seconds:8.2f}{1:8.0%}{1000 * floor:10.2f}",
            "",
            f"A round takes {round_seconds / floor:.2f} of the floor: the bare forwards of the target over a full "
            "block and of the draft.",
            f"τ is {spoken.acceptance_length:.2f}; in {spoken.rested} rounds the draft rested.",
            "The target's forward by its rows: "
            + ", ".join(f"{rows}: {_ms(seconds)}" for rows, seconds in self.costs.verifying),
        ]
        return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


__all__ = ["Profile"]

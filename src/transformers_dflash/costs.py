"""What a round costs on this machine, and how many candidates are worth their cost.

A candidate that the target verifies costs a row of its forward, whether it is accepted or not. How much a row costs
depends on the machine: next to nothing on a GPU that waits for memory, nearly as much as the first row on a CPU. So it
is measured, once for a target and a draft, and a block or tree ends where another candidate would lower the tokens per
second that the draft's own law promises (as in cost-aware trees, arXiv 2606.01813). The law is asked before anything
is chosen by the target, which keeps the output exact.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from .modeling_dflash import DFlashDraftModel
from .target import Target, block_embeds, draft_logits

MOST_ROWS = 64  # of a forward that is measured, and of a tree whose size is chosen
_DEAR = 3  # a forward so many times as long as that of one row; beyond it the last two give the slope
_measured: WeakKeyDictionary = WeakKeyDictionary()  # target -> draft -> (device, dtype) -> RoundCosts


@dataclass
class RoundCosts:
    """Seconds of the parts of a round.

    Args:
        drafting: one pass of the draft over a block, with its head.
        verifying: ascending `(rows, seconds)` of the target's forward over so many rows, two or more.
    """

    drafting: float
    verifying: list[tuple[int, float]]

    @classmethod
    @torch.no_grad()
    def of(cls, target: Target, draft: DFlashDraftModel) -> "RoundCosts":
        """What a target and a draft take here: measured by a few forwards the first time, remembered after that."""
        model = target.model
        known = _measured.setdefault(model, WeakKeyDictionary()).setdefault(draft, {})
        place = (model.device, model.dtype)
        if place not in known:
            known[place] = cls(_drafting_seconds(target, draft), _verifying_seconds(target))
        return known[place]

    def seconds(self, rows: int) -> float:
        """A round in which the target runs over `rows` rows: between the measured ones on a line."""
        following = next((i for i, (size, _) in enumerate(self.verifying) if i and size >= rows), -1)
        (low, fast), (high, slow) = self.verifying[following - 1], self.verifying[following]
        return self.drafting + max(0.0, fast + (slow - fast) * (rows - low) / (high - low))

    def best_count(self, gains: Sequence[float], sequences: int = 1) -> int:
        """How many candidates give the most tokens per second.

        Args:
            gains: what each further candidate, of all sequences together, adds to the expected number of tokens.
            sequences: that are verified in one forward.
        """
        expected = float(sequences)  # the target's own tokens
        rates = [expected / self.seconds(sequences)]
        for count, gain in enumerate(gains, start=1):
            expected += gain
            rates.append(expected / self.seconds(sequences * (count + 1)))
        return rates.index(max(rates))


def _verifying_seconds(target: Target) -> list[tuple[int, float]]:
    model = target.model
    longest = target.last_exact_position(0)
    most = MOST_ROWS if longest is None else min(MOST_ROWS, longest + 1)
    measured: list[tuple[int, float]] = []
    rows = 1
    while rows <= most and (len(measured) < 2 or measured[-1][1] < _DEAR * measured[0][1]):
        ids = torch.arange(rows, device=model.device)[None] % target.num_embeddings  # as many experts as in real text
        measured.append((rows, _seconds(partial(_logits, model, ids))))
        rows *= 2
    return measured


def _logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits


def _drafting_seconds(target: Target, draft: DFlashDraftModel) -> float:
    config = draft.config
    ids = torch.full((1, config.block_size), config.mask_token_id, device=target.model.device)
    features = torch.zeros(
        1,
        2,
        len(config.target_layer_ids) * config.target_hidden_size,
        device=draft.device,
        dtype=draft.dtype,
    )

    def run() -> torch.Tensor:
        embeds = block_embeds(draft, target, ids).to(draft.device, draft.dtype)
        hidden = draft(embeds, features, cache=draft.make_cache()).last_hidden_state[:, -config.num_candidates :]
        return draft_logits(draft, target, hidden)

    return _seconds(run)


def _seconds(run: Callable[[], torch.Tensor]) -> float:
    """The shorter of two runs, after one that warms up; reading a number back ends it on an accelerator too."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run()[0, -1, 0].item()
        times.append(time.perf_counter() - start)
    return min(times[1:])


__all__ = ["MOST_ROWS", "RoundCosts"]

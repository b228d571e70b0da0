"""What a round costs on this machine, and how many candidates are worth their cost.

A candidate that the target verifies costs a row of its forward, whether it is accepted or not. How much a row costs
depends on the machine: next to nothing on a GPU that waits for memory, nearly as much as the first row on a CPU. So it
is measured, once for a target and a draft, and a block or tree ends where another candidate would lower the tokens per
second that the draft's own law promises (as in cost-aware trees, arXiv 2606.01813). The law is asked before anything
is chosen by the target, which keeps the output exact.

A text that the draft does not know makes every pass of it a loss. So where drafting has lost more than it may, it
rests for some plain steps. That too is decided by what is committed already.
"""

import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from .cache import ContextCache
from .modeling_dflash import DFlashDraftModel
from .target import TapRecorder, Target, block_embeds, draft_logits

MOST_ROWS = 64  # of a forward that is measured, and of a tree whose size is chosen
_ROUNDS_TO_LOSE = 2  # in which nothing is accepted, before drafting rests
_SHORTEST_REST, _LONGEST_REST = 4, 32  # in plain steps
_DEAR = 3  # a forward so many times as long as that of one row; beyond it the last two give the slope
_measured: WeakKeyDictionary = WeakKeyDictionary()  # target -> draft -> (device, dtype) -> RoundCosts


@dataclass
class RoundCosts:
    """Seconds of the parts of a round.

    Args:
        drafting: one pass of the draft over a block, with its head.
        verifying: ascending `(rows, seconds)` of the target's forward over so many rows, two or more.
        block_rows: of the draft's pass; more of them cost what they would cost the target, in proportion.
    """

    drafting: float
    verifying: list[tuple[int, float]]
    block_rows: int = 1

    @classmethod
    @torch.no_grad()
    def of(cls, target: Target, draft: DFlashDraftModel) -> "RoundCosts":
        """What a target and a draft take here: measured by a few forwards the first time, remembered after that."""
        model = target.model
        known = _measured.setdefault(model, WeakKeyDictionary()).setdefault(draft, {})
        place = (model.device, model.dtype)
        if place not in known:
            device = draft.device if model.device.type == "meta" else model.device  # meta: where it is offloaded
            verifying = _verifying_seconds(target, device)
            known[place] = cls(_drafting_seconds(target, draft, device), verifying, draft.config.block_size)
        return known[place]

    def forward_seconds(self, rows: int) -> float:
        """The target's forward over `rows` rows: between the measured ones on a line."""
        following = next((i for i, (size, _) in enumerate(self.verifying) if i and size >= rows), -1)
        (low, fast), (high, slow) = self.verifying[following - 1], self.verifying[following]
        return max(0.0, fast + (slow - fast) * (rows - low) / (high - low))

    def drafting_seconds(self, sequences: int) -> float:
        """One pass of the draft over a block of each sequence."""
        one, all_blocks = self.forward_seconds(self.block_rows), self.forward_seconds(sequences * self.block_rows)
        return self.drafting * (all_blocks / one if one else 1.0)

    def seconds(self, rows: int, sequences: int = 1) -> float:
        """A round in which `sequences` blocks are drafted and the target runs over `rows` rows."""
        return self.drafting_seconds(sequences) + self.forward_seconds(rows)

    def saved(self, rows: int, sequences: int, tokens: int) -> float:
        """Seconds by which a round is shorter than the plain steps that it stands for.

        Args:
            rows: of the target's forward, of all sequences together.
            sequences: of the batch.
            tokens: that were committed, by all sequences together.
        """
        return self.forward_seconds(sequences) * tokens / sequences - self.seconds(rows, sequences)

    def best_count(self, gains: Sequence[float], sequences: int = 1, looks_ahead: bool = True) -> int:
        """How many candidates give the most tokens per second.

        Args:
            gains: what each further candidate, of all sequences together, adds to the expected number of tokens.
            sequences: that are verified in one forward.
            looks_ahead: whether a candidate may stay for the sake of later ones; else the first one that lowers the
                rate is the end, so that whether a candidate stays depends on no gain after its own.
        """
        expected = float(sequences)  # the target's own tokens
        drafting = self.drafting_seconds(sequences)  # the same for any number of candidates
        rates = [expected / (drafting + self.forward_seconds(sequences))]
        for count, gain in enumerate(gains, start=1):
            expected += gain
            rates.append(expected / (drafting + self.forward_seconds(sequences * (count + 1))))
            if not looks_ahead and rates[-1] < rates[-2]:
                break
        return rates.index(max(rates))


class DraftingRest:
    """When to let the draft rest, so that a text that it does not know takes hardly longer than in plain `generate`.

    Rounds that save time earn a credit, up to that of a few rounds in which nothing is accepted, and others spend it.
    Once it is spent, plain steps follow, and then a round is tried: if it loses too, the next rest is twice as long.

    Args:
        costs: of a round.
    """

    def __init__(self, costs: RoundCosts):
        self.costs = costs
        self.credit = float(_ROUNDS_TO_LOSE)  # in rounds without candidates
        self.next_rest = _SHORTEST_REST
        self.steps_left = 0

    @property
    def resting(self) -> bool:
        """Whether the next round is a plain step."""
        return self.steps_left > 0

    def add_round(self, rows: int, sequences: int, tokens: int) -> None:
        """Take account of a round; its arguments are those of `RoundCosts.saved`."""
        if self.resting:
            self.steps_left -= 1
            return
        saved = self.costs.saved(rows, sequences, tokens) / self.costs.seconds(sequences, sequences)
        self.credit = min(_ROUNDS_TO_LOSE, self.credit + saved)
        if self.credit < 0:
            self.credit, self.steps_left = 0.0, self.next_rest
            self.next_rest = min(_LONGEST_REST, 2 * self.next_rest)
        elif self.credit == _ROUNDS_TO_LOSE:
            self.next_rest = _SHORTEST_REST


@torch.no_grad()
def floor_seconds(
    target: Target, draft: DFlashDraftModel, ids: torch.Tensor, new_per_round: int, repeats: int = 5
) -> tuple[float, float]:
    """The least that a round of chains can take: the bare forwards, with nothing around them.

    Args:
        ids: `(1, n)`, the context.
        new_per_round: tokens whose features the draft takes up in a round.
        repeats: of which the median counts.

    Returns:
        Seconds of the target's forward over a full block and of the draft's pass with its head.
    """
    model, config = target.model, draft.config
    known = inspect.signature(model.forward).parameters
    cache_name = "cache" if "cache" in known else "past_key_values"  # renamed in Transformers 5.24
    cache = {cache_name: DynamicCache(config=model.config)}
    last_alone = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
    taps = TapRecorder(target.layers, config.target_layer_ids, config.target_hidden_size, draft.device, draft.dtype)
    with taps.recording():
        model(input_ids=ids, **cache, **last_alone)
    features = taps.take()[:, -new_per_round:]
    taps.close()
    block, embeds = _empty_block(target, draft, ids.device)
    context, length = draft.make_cache(), ids.shape[1] - new_per_round
    nothing = features.new_zeros(1, length, features.shape[2])
    draft(embeds, nothing, torch.arange(length + config.block_size, device=draft.device)[None], cache=context)
    verifying, drafting = [], []
    for _ in range(repeats):
        # The cache grows by a block each time: not all can be cropped, and it changes little.
        verifying.append(_time(lambda: model(input_ids=block, **cache).logits))
        slots = torch.arange(length, length + new_per_round + config.block_size, device=draft.device)[None]
        drafting.append(_time(partial(_drafted, target, draft, embeds, features, slots, context)))
        length += new_per_round
    return statistics.median(verifying), statistics.median(drafting)


def _drafted(
    target: Target,
    draft: DFlashDraftModel,
    embeds: torch.Tensor,
    features: torch.Tensor,
    positions: torch.Tensor | None,
    cache: ContextCache,
) -> torch.Tensor:
    """Logits `(1, k, V)` of a block."""
    hidden = draft(embeds, features, positions, cache=cache).last_hidden_state
    return draft_logits(draft, target, hidden[:, -draft.config.num_candidates :])


def _time(run: Callable[[], torch.Tensor]) -> float:
    """Seconds until a number of the result `(b, n, V)` is there: on an accelerator too."""
    start = time.perf_counter()
    run()[0, -1, 0].item()
    return time.perf_counter() - start


def _verifying_seconds(target: Target, device: torch.device) -> list[tuple[int, float]]:
    model = target.model
    longest = target.last_exact_position(0)
    most = MOST_ROWS if longest is None else min(MOST_ROWS, longest + 1)
    measured: list[tuple[int, float]] = []
    rows = 1
    while rows <= most and (len(measured) < 2 or measured[-1][1] < _DEAR * measured[0][1]):
        ids = torch.arange(rows, device=device)[None] % target.num_embeddings  # as many experts as in real text
        measured.append((rows, _shortest(partial(_logits, model, ids))))
        rows *= 2
    return measured


def _logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits


def _drafting_seconds(target: Target, draft: DFlashDraftModel, device: torch.device) -> float:
    _, embeds = _empty_block(target, draft, device)
    features = embeds.new_zeros(1, 2, len(draft.config.target_layer_ids) * draft.config.target_hidden_size)
    return _shortest(lambda: _drafted(target, draft, embeds, features, None, draft.make_cache()))


def _empty_block(target: Target, draft: DFlashDraftModel, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids `(1, B)` of a block of masks, and their embeddings `(1, B, H)` as the draft takes them."""
    config = draft.config
    block = torch.full((1, config.block_size), config.mask_token_id, device=device)
    return block, block_embeds(draft, target, block).to(draft.device, draft.dtype)


def _shortest(run: Callable[[], torch.Tensor]) -> float:
    """The shorter time of two, after one that warms up."""
    _time(run)
    return min(_time(run), _time(run))


__all__ = ["MOST_ROWS", "DraftingRest", "RoundCosts", "floor_seconds"]

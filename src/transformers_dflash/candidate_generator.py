"""One drafting step: (features of what was committed, anchor) -> candidates and the law they were drawn from."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from .cache import ContextCache, right_aligned
from .costs import MOST_ROWS, DraftingRest, RoundCosts
from .modeling_dflash import DFlashDraftModel
from .processors import all_row_wise, for_draft, process_rows
from .target import TapRecorder, Target, block_embeds, draft_logits
from .tree import MOST_NODES, DraftTree, Law, best_first_tree

AUTO = "auto"  # of a threshold or tree budget: as much as is worth its cost on this machine


@dataclass
class DraftContext:
    """What a draft knows of a sequence; kept beside a target cache that is passed to the next `generate` call.

    Args:
        cache: keys and values of the context tokens.
        features: `(1, n, taps * H)`, committed tokens that are not in the cache yet.
        target_length: how long the target's cache was when this was put by.
        next_position: the position of the first token after `features`.
    """

    cache: ContextCache
    features: torch.Tensor
    target_length: int
    next_position: int


def check_drafting_options(threshold: Any, tree_budget: Any) -> None:
    """Refuse options of a draft's generation_config that mean nothing.

    Raises:
        ValueError: naming the option.
    """
    if threshold not in (None, AUTO) and not (
        isinstance(threshold, int | float) and not isinstance(threshold, bool) and 0 <= threshold <= 1
    ):
        raise ValueError(
            f"assistant_confidence_threshold {threshold!r} of the draft's generation_config is no probability: set a "
            f"number from 0 to 1, {AUTO!r}, or None for whole blocks"
        )
    if tree_budget not in (None, AUTO) and (type(tree_budget) is not int or not 1 <= tree_budget <= MOST_NODES):
        raise ValueError(
            f"tree_budget {tree_budget!r} of the draft's generation_config is no number of nodes: set an integer from "
            f"1 to {MOST_NODES}, {AUTO!r}, or None for chains"
        )


class DFlashCandidateGenerator(CandidateGenerator):
    """Drafts a block in one pass of a DFlash draft (arXiv 2602.06036), on the contract of Transformers' generators.

    The features come from forward hooks on the tapped decoder layers of the target, inside `observing()`; nothing else
    of the target is kept. Use as a context manager: leaving it removes the hooks.

    Args:
        draft: the draft model.
        model: the target.
        generation_config: of this generation: `do_sample` and `max_length` are read.
        logits_processors: the target's processors for each row of the batch; the draft's law is shaped by those of
            them that are safe to ask about a draft (see `processors`).
        context: what the draft knows already, from an earlier call on the same target cache.

    Raises:
        ValueError: the draft cannot belong to this target.
    """

    requires_model_outputs = True  # the target must have run before the first draft

    def __init__(
        self,
        draft: DFlashDraftModel,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        logits_processors: list[LogitsProcessorList],
        context: DraftContext | None = None,
    ):
        self.draft = draft
        self.config = draft.config
        self.target = Target(model)
        self.target.check(draft)
        options = draft.generation_config
        self.do_sample = bool(generation_config.do_sample) and options.do_sample is not False
        temperature = options.temperature if self.do_sample else None
        self.logits_processors = [for_draft(processors, temperature) for processors in logits_processors]
        self.max_candidates = self.config.num_candidates
        if options.num_assistant_tokens is not None:
            self.max_candidates = min(self.max_candidates, options.num_assistant_tokens)
        self.confidence_threshold = options.assistant_confidence_threshold
        self.tree_budget = getattr(options, "tree_budget", None)  # an option that GenerationConfig does not know
        check_drafting_options(self.confidence_threshold, self.tree_budget)
        self.costs = self.rest = None
        if AUTO in (self.confidence_threshold, self.tree_budget):
            if model.tp_size is not None and model.tp_size > 1:
                raise ValueError(
                    'assistant_confidence_threshold or tree_budget is "auto", and each process of a tensor-parallel '
                    "target would go by a clock of its own: set numbers"
                )
            self.costs = RoundCosts.of(self.target, draft)
            self.rest = DraftingRest(self.costs)
        self.max_length = generation_config.max_length

        self.cache = draft.make_cache() if context is None else context.cache
        self.next_positions = [0 if context is None else context.next_position] * len(logits_processors)
        # What is committed and not in the cache yet; of row i the first `num_pending[i]` tokens are its own.
        self.features = None if context is None else context.features  # (b, n, taps * H)
        self.num_pending = [0 if context is None else context.features.shape[1]] * len(logits_processors)
        self.taps = TapRecorder(
            self.target.layers,
            self.config.target_layer_ids,
            self.config.target_hidden_size,
            draft.device,
            draft.dtype,
        )

    def __enter__(self) -> "DFlashCandidateGenerator":
        return self

    def __exit__(self, *_error) -> None:
        self.taps.close()

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Read the taps of the target forward made inside."""
        with self.taps.recording():
            yield

    def commit_prompt(self, kept: torch.Tensor | None, num_cached: int | None) -> int:
        """Take over the features of the prefill.

        Args:
            kept: bool `(b, n)` over all that the target's cache holds, False where there is padding; None keeps all.
            num_cached: n, the tokens in the target's cache. It decides positions, since a part of them may have been
                cached before and have no features here. None where the cache cannot tell: those of the prefill.

        Returns:
            n.
        """
        new = self.taps.take()  # (b, rows, taps * H)
        if num_cached == new.shape[1]:  # nothing was cached, or the target has read it anew: it may not be as it was
            self.cache, self.num_pending = self.draft.make_cache(), [0] * new.shape[0]
        num_cached = new.shape[1] if num_cached is None else num_cached
        counts = [new.shape[1]] * new.shape[0]
        self.next_positions = [num_cached] * new.shape[0]
        if kept is not None:
            self.next_positions = kept.sum(1).tolist()
            kept = kept[:, -new.shape[1] :].to(new.device)
            counts = kept.sum(1).tolist()
            first = (~kept).long().argsort(dim=1, stable=True)[:, : max(counts)]  # (b, n), the row's own columns first
            new = new.take_along_dim(first[:, :, None], dim=1)
        self._append(new, counts)
        return num_cached

    @property
    def why_no_tree(self) -> str | None:
        """Why this draft cannot give a tree of candidates; None if it can."""
        if not all(map(all_row_wise, self.logits_processors)):
            return "a logits processor looks at the tokens before"
        return None

    def commit(self, num_tokens: list[int], num_rows: int, path: torch.Tensor | None = None) -> None:
        """Take over the features of each row's first `num_tokens` in a block: of its anchor and what was accepted.

        Args:
            num_tokens: of each sequence.
            num_rows: the block's; the target may have run over all tokens before it too.
            path: `(b, max(num_tokens))`, of trees, which of the block's rows these are.
        """
        new = self.taps.take()[:, -num_rows:]
        if path is not None:
            new = new.take_along_dim(path.to(new.device)[:, :, None], dim=1)
        self._append(new[:, : max(num_tokens)], num_tokens)
        if self.rest is not None:
            self.rest.add_round(len(num_tokens) * num_rows, len(num_tokens), sum(num_tokens))
        self.next_positions = [a + b for a, b in zip(self.next_positions, num_tokens, strict=True)]

    def _append(self, new: torch.Tensor, counts: list[int]) -> None:
        """Add features `(b, n, taps * H)`, of which the first `counts[i]` are row i's own."""
        if not any(self.num_pending):
            self.features, self.num_pending = new, counts
            return
        both = torch.cat([self.features, new], dim=1)
        old = torch.tensor(self.num_pending, device=new.device)[:, None]
        self.num_pending = [a + b for a, b in zip(self.num_pending, counts, strict=True)]
        place = torch.arange(max(self.num_pending), device=new.device)
        columns = torch.where(place < old, place, self.features.shape[1] + place - old).clamp(max=both.shape[1] - 1)
        self.features = both.take_along_dim(columns[:, :, None], dim=1)

    def context(self, target_length: int) -> DraftContext:
        """What to keep beside a target cache of `target_length` tokens for the next call; of a batch of one."""
        return DraftContext(self.cache, self.features, target_length, self.next_positions[0])

    def select_rows(self, rows: list[int]) -> None:
        """Go on with some rows of the batch."""
        self.cache.select_rows(torch.tensor(rows))
        self.num_pending = [self.num_pending[row] for row in rows]
        self.features = self.features[rows, : max(self.num_pending)]  # what is longer belonged to a row that left
        self.next_positions = [self.next_positions[row] for row in rows]
        self.logits_processors = [self.logits_processors[row] for row in rows]

    def get_candidates(
        self, input_ids: torch.Tensor, *, max_candidates: int | None = None, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft the tokens that may follow `input_ids`, whose last token is the anchor.

        Args:
            input_ids: `(1, n)`.
            max_candidates: what is left of the budget, a static cache or a position table.

        Returns:
            `(1, n + k)`, the candidates appended, and the processed logits `(1, k, V)` in float32 whose softmax they
            were drawn from; None in place of these where candidates were chosen greedily.
        """
        candidates, scores = self.draft_rows([input_ids], max_candidates)
        return torch.cat([input_ids, candidates], dim=1), None if scores is None else scores[0][None]

    @torch.no_grad()
    def draft_rows(
        self, rows: list[torch.Tensor], max_candidates: int | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """Draft a block for every row of the batch.

        Args:
            rows: `(1, n_i)` each, the ids of a sequence, its anchor last.
            max_candidates: as in `get_candidates`.

        Returns:
            Candidates `(b, k)`, and per row the processed logits `(k, V)` in float32 that they were drawn from, or
            None in place of them all where candidates were chosen greedily.
        """
        k = self._num_candidates(rows, max_candidates)
        if k <= 0:
            return rows[0].new_empty((len(rows), 0)), None
        hidden = self._draft(torch.cat([ids[:, -1:] for ids in rows]), k)  # (b, k, H)
        # float32 as in plain generate: besides, argmax over half precision takes twice as long on a CPU.
        logits = self._logits(hidden).to(rows[0].device, torch.float32)  # (b, k, V)
        chosen, scores = [], []
        for row, ids in enumerate(rows):
            processors = self.logits_processors[row]
            if self._places_depend(processors):
                tokens, law = self._choose_one_by_one(processors, ids, logits[row], hidden[row])
            else:
                law = process_rows(processors, ids[:, -1:], logits[row])
                tokens = self._pick(law).T  # (1, k)
            chosen.append(tokens)
            scores.append(law)
        if self.confidence_threshold is not None or self.costs is not None:
            # The confidence of the law, not of the token drawn from it: a choice by the token would bend the output.
            confidence = torch.stack(scores).softmax(-1).amax(-1).cumprod(1)  # (b, k)
            k = self._worthwhile(confidence)
        candidates = torch.cat(chosen)[:, :k]
        return candidates, [law[:k] for law in scores] if self.do_sample else None

    @torch.no_grad()
    def draft_trees(self, rows: list[torch.Tensor], max_candidates: int | None = None) -> list[DraftTree]:
        """Draft the likeliest continuations of every row of the batch, as a tree each.

        Args:
            rows: as in `draft_rows`.
            max_candidates: as in `get_candidates`; of a whole tree.
        """
        k = self._num_candidates(rows, max_candidates)
        if k <= 0:
            return [DraftTree() for _ in rows]
        hidden = self._draft(torch.cat([ids[:, -1:] for ids in rows]), k)  # (b, k, H)
        logits = self._logits(hidden).to(rows[0].device, torch.float32)  # (b, k, V)
        budget = MOST_ROWS if self.tree_budget == AUTO else self.tree_budget
        budget = budget if max_candidates is None else min(budget, max_candidates)
        threshold = 0.0 if self.confidence_threshold in (None, AUTO) else self.confidence_threshold
        least = math.log(threshold) if threshold > 0 else -math.inf
        trees = []
        for row, ids in enumerate(rows):
            law = self._law(self.logits_processors[row], ids[:, -1:], logits[row], hidden[row], budget)
            trees.append(best_first_tree(law, int(ids[0, -1]), k, budget, least))
        if self.costs is None:
            return trees
        gains = [sum(nth) for nth in zip_longest(*(tree.probabilities for tree in trees), fillvalue=0.0)]
        count = self.costs.best_count(gains, len(trees))
        return [tree.first(count) for tree in trees]

    def _law(
        self,
        processors: LogitsProcessorList,
        anchor: torch.Tensor,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        budget: int,
    ) -> Law:
        """The law of each place of a row's block.

        Args:
            anchor: `(1, 1)`.
            logits: `(k, V)` float32.
            hidden: `(k, H)`.
            budget: how many tokens of a place may be asked for.
        """
        if self.config.selector_rank is None:
            law = process_rows(processors, anchor, logits).log_softmax(-1)
            best = law.topk(min(budget, law.shape[1]))  # (k, m)
            log_probs, tokens = best.values.tolist(), best.indices.tolist()
            return lambda place, _before: (log_probs[place], tokens[place])
        candidates, scores = self.draft.candidate_selector.score_pairs(logits, hidden, anchor[0])  # (k, K), (k, K, K)
        tokens = candidates.tolist()
        if not len(processors):
            scores = scores.cpu()  # at once, since small reads of an accelerator are slow

        @cache
        def law_after(place: int, before: int) -> tuple[list[float], list[int]]:
            own = scores[place, tokens[place - 1].index(before) if place else 0]  # (K,)
            if len(processors):  # they take rows of the whole vocabulary
                row = torch.full_like(logits[:1], -math.inf).scatter(1, candidates[place, None], own[None])
                own = process_rows(processors, anchor, row)[0, candidates[place]]
            best = own.log_softmax(-1).sort(descending=True)
            return best.values.tolist(), [tokens[place][rank] for rank in best.indices.tolist()]

        return law_after

    def _worthwhile(self, confidence: torch.Tensor) -> int:
        """Where to cut the rows' chains, by the product `(b, k)` of the confidences up to each place."""
        count = confidence.shape[1]
        if self.confidence_threshold not in (None, AUTO):
            count = int((confidence >= self.confidence_threshold).sum(1).max())
        if self.costs is not None:
            # Where a place's law depends on the tokens drawn before it, later confidences tell of a candidate itself,
            # and to keep or leave it by them would bend the output.
            looks_ahead = not (self.do_sample and any(map(self._places_depend, self.logits_processors)))
            gains = confidence.sum(0).tolist()
            count = min(count, self.costs.best_count(gains, len(confidence), looks_ahead))
        return count

    def _places_depend(self, processors: LogitsProcessorList) -> bool:
        """Whether the law of a row's place depends on the tokens chosen before it."""
        return self.config.selector_rank is not None or not all_row_wise(processors)

    def _num_candidates(self, rows: list[torch.Tensor], max_candidates: int | None) -> int:
        """The most candidates in a row that the draft, the budget of new tokens and the caller allow."""
        k = min(self.max_candidates, self.max_length - min(ids.shape[1] for ids in rows) - 1)
        return k if max_candidates is None else min(k, max_candidates)

    def _draft(self, anchors: torch.Tensor, k: int) -> torch.Tensor:
        """Hidden states `(b, k, H)` of the `k` tokens after `anchors (b, 1)`; pending features become context."""
        draft, config = self.draft, self.config
        num_slots = k if config.sample_from_anchor else k + 1
        block = torch.full((len(anchors), num_slots), config.mask_token_id, dtype=torch.long, device=anchors.device)
        block[:, :1] = anchors
        embeds = block_embeds(draft, self.target, block)  # (b, slots, H)
        following = torch.tensor(self.next_positions, device=draft.device)[:, None]  # (b, 1)
        pending = torch.tensor(self.num_pending, device=draft.device)[:, None]
        num_new = self.features.shape[1]
        positions = torch.cat(
            [
                following - pending + torch.arange(num_new, device=draft.device),
                following + torch.arange(num_slots, device=draft.device),
            ],
            dim=1,
        )  # (b, n + slots)
        hidden = draft(
            noise_embeds=embeds.to(draft.device, draft.dtype),
            context_hidden_states=self.features,
            position_ids=positions,
            attention_mask=self._align_context(num_slots),
            cache=self.cache,
        ).last_hidden_state[:, -k:]  # (b, k, H)
        self.features, self.num_pending = self.features[:, :0], [0] * len(anchors)
        return hidden

    def _align_context(self, num_slots: int) -> torch.Tensor | None:
        """Tell the cache how its rows are to lie; gives the mask of the keys `(b, context + slots)` if rows differ."""
        known = [a - b for a, b in zip(self.next_positions, self.num_pending, strict=True)]
        held, taken = len(self.cache), torch.tensor(self.num_pending, device=self.draft.device)
        self.cache.columns = None
        if len(set(self.next_positions)) == len(set(known)) == 1 and held <= known[0]:  # no row is padded
            return None
        self.cache.columns = right_aligned(held, torch.tensor(known, device=self.draft.device), taken)
        longest = max(self.next_positions)
        mask = torch.ones(len(known), longest + num_slots, dtype=torch.long, device=self.draft.device)
        for row, length in enumerate(self.next_positions):
            mask[row, : longest - length] = 0
        return mask

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`(b, k, H) -> (b, k, V)`."""
        return draft_logits(self.draft, self.target, hidden)

    def _choose_one_by_one(
        self,
        processors: LogitsProcessorList,
        ids: torch.Tensor,
        logits: torch.Tensor,
        hidden: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose a row's candidates from left to right, each place seeing the tokens before it.

        Args:
            ids: `(1, n)`.
            logits: `(k, V)`.
            hidden: `(k, H)`, for the draft's selector if it has one.

        Returns:
            The candidates `(1, k)`, and the processed logits `(k, V)`.
        """
        length, rows = ids.shape[1], []
        for place, row in enumerate(logits[:, None]):  # (1, V)
            if self.config.selector_rank is not None:
                row = self.draft.candidate_selector.score(row, hidden[place : place + 1], ids[:, -1])
            rows.append(processors(ids, row) if len(processors) else row)
            ids = torch.cat([ids, self._pick(rows[-1])], dim=1)
        return ids[:, length:], torch.cat(rows)

    def _pick(self, scores: torch.Tensor) -> torch.Tensor:
        """One token per row of `(rows, V)`, drawn or the best: `(rows, 1)`."""
        if not self.do_sample:
            return scores.argmax(-1, keepdim=True)
        # Where processors forbid all tokens that a draft can write, any will do: it has no law, and is refused.
        return torch.multinomial(scores.softmax(-1).nan_to_num(nan=1.0), 1)

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to adapt: a block costs one pass whatever its length."""


__all__ = ["DFlashCandidateGenerator", "DraftContext"]

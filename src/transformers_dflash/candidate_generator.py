"""One drafting step: (features of what was committed, anchor) -> candidates and the law they were drawn from."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from .cache import ContextCache
from .modeling_dflash import DFlashDraftModel
from .processors import all_row_wise, for_draft, process_rows
from .target import TapRecorder, Target, draft_logits


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


class DFlashCandidateGenerator(CandidateGenerator):
    """Drafts a block in one pass of a DFlash draft (arXiv 2602.06036), on the contract of Transformers' generators.

    The features come from forward hooks on the tapped decoder layers of the target, inside `observing()`; nothing else
    of the target is kept. Use as a context manager: leaving it removes the hooks.

    Args:
        draft: the draft model.
        model: the target.
        generation_config: of this generation: `do_sample` and `max_length` are read.
        logits_processor: the target's processors; the draft's law is shaped by those of them that are safe to ask
            about a draft (see `processors`).
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
        logits_processor: LogitsProcessorList,
        context: DraftContext | None = None,
    ):
        self.draft = draft
        self.config = draft.config
        self.target = Target(model)
        self.target.check(draft)
        options = draft.generation_config
        self.do_sample = bool(generation_config.do_sample) and options.do_sample is not False
        self.logits_processor = for_draft(logits_processor, options.temperature if self.do_sample else None)
        self.max_candidates = self.config.num_candidates
        if options.num_assistant_tokens is not None:
            self.max_candidates = min(self.max_candidates, options.num_assistant_tokens)
        self.confidence_threshold = options.assistant_confidence_threshold
        self.max_length = generation_config.max_length

        self.cache = draft.make_cache() if context is None else context.cache
        self.features = None if context is None else context.features  # (1, n, taps * H)
        self.next_position = 0 if context is None else context.next_position
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
            kept: bool `(n,)` over all that the target's cache holds, False where there is padding; None keeps all.
            num_cached: n, the tokens in the target's cache. It decides positions, since a part of them may have been
                cached before and have no features here. None where the cache cannot tell: those of the prefill.

        Returns:
            n.
        """
        new = self.taps.take()  # (1, rows, taps * H)
        num_cached = new.shape[1] if num_cached is None else num_cached
        if kept is not None:
            new = new[:, kept[-new.shape[1] :].to(new.device)]
        self._append(new)
        self.next_position = num_cached if kept is None else int(kept.sum())
        return num_cached

    def commit(self, num_tokens: int) -> None:
        """Take over the features of the first `num_tokens` rows of a block: the anchor's and accepted candidates'."""
        self._append(self.taps.take()[:, :num_tokens])
        self.next_position += num_tokens

    def _append(self, new: torch.Tensor) -> None:
        pending = self.features is not None and self.features.shape[1] > 0
        self.features = torch.cat([self.features, new], dim=1) if pending else new  # (1, n, taps * H)

    def context(self, target_length: int) -> DraftContext:
        """What to keep beside a target cache of `target_length` tokens for the next call."""
        return DraftContext(self.cache, self.features, target_length, self.next_position)

    @torch.no_grad()
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
        k = min(self.max_candidates, self.max_length - input_ids.shape[1] - 1)
        k = k if max_candidates is None else min(k, max_candidates)
        if k <= 0:
            return input_ids, None
        hidden = self._draft(input_ids[:, -1:], k)  # (1, k, H)
        # float32 as in plain generate: besides, argmax over half precision takes twice as long on a CPU.
        logits = self._logits(hidden)[0].to(input_ids.device, torch.float32)  # (k, V)
        if self.config.selector_rank is not None:
            ids, scores = self._choose_one_by_one(input_ids, logits, hidden[0])
        elif all_row_wise(self.logits_processor):
            ids, scores = self._choose_at_once(input_ids, logits)
        else:
            ids, scores = self._choose_one_by_one(input_ids, logits)
        if self.confidence_threshold is not None:
            # The confidence of the law, not of the token drawn from it: a choice by the token would bend the output.
            confidence = scores.softmax(-1).amax(-1)  # (k,)
            kept = int((confidence.cumprod(0) >= self.confidence_threshold).sum())
            ids, scores = ids[:, : input_ids.shape[1] + kept], scores[:kept]
        return ids, scores[None] if self.do_sample else None

    def _draft(self, anchor: torch.Tensor, k: int) -> torch.Tensor:
        """Hidden states `(1, k, H)` of the `k` tokens after the anchor; the pending features become context."""
        draft, config = self.draft, self.config
        num_slots = k if config.sample_from_anchor else k + 1
        block = torch.full((1, num_slots), config.mask_token_id, dtype=torch.long, device=anchor.device)
        block[:, :1] = anchor
        embeds = self.target.embed(block, config.input_embedding_scale)  # (1, slots, H)
        start = self.next_position - self.features.shape[1]
        positions = torch.arange(start, self.next_position + num_slots, device=draft.device)[None]
        hidden = draft(
            noise_embeds=embeds.to(draft.device, draft.dtype),
            context_hidden_states=self.features,
            position_ids=positions,
            cache=self.cache,
        ).last_hidden_state[:, -k:]  # (1, k, H)
        self.features = self.features[:, :0]
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`(1, k, H) -> (1, k, V)`."""
        return draft_logits(self.draft, self.target, hidden)

    def _choose_at_once(self, input_ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose all candidates from logits `(k, V)`, where no place depends on the token before it.

        Returns:
            The ids with the candidates `(1, n + k)`, and the processed logits `(k, V)`.
        """
        scores = process_rows(self.logits_processor, input_ids[:, -1:], logits)
        tokens = self._pick(scores)  # (k, 1)
        return torch.cat([input_ids, tokens.T], dim=1), scores

    def _choose_one_by_one(
        self, input_ids: torch.Tensor, logits: torch.Tensor, hidden: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose candidates from left to right, each place seeing the tokens before it; with a selector's `hidden`."""
        ids, rows = input_ids, []
        for place, row in enumerate(logits[:, None]):  # (1, V)
            if hidden is not None:
                row = self.draft.candidate_selector.score(row, hidden[place : place + 1], ids[:, -1])
            rows.append(self.logits_processor(ids, row) if len(self.logits_processor) else row)
            ids = torch.cat([ids, self._pick(rows[-1])], dim=1)
        return ids, torch.cat(rows)

    def _pick(self, scores: torch.Tensor) -> torch.Tensor:
        """One token per row of `(rows, V)`, drawn or the best: `(rows, 1)`."""
        return torch.multinomial(scores.softmax(-1), 1) if self.do_sample else scores.argmax(-1, keepdim=True)

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to adapt: a block costs one pass whatever its length."""


__all__ = ["DFlashCandidateGenerator", "DraftContext"]

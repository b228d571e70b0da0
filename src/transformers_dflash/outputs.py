"""What a generation returns beside its tokens: what the speculation did, and states per token."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache, CacheLayerMixin, StaticLayer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput


@dataclass
class SpeculationStatistics:
    """What the rounds of one generation did. The prefill is not a round.

    Args:
        drafted: candidates proposed, over all rounds; all nodes of trees.
        accepted: candidates that were committed.
        acceptance_lengths: committed tokens of each round of each sequence, bonus token included.
        acceptance_lengths_by_sequence: the same, sequence by sequence.
        forwards: target forwards after the prefill: a batch shares them, so that they are fewer than its rounds.
        rested: how many of these were plain steps, with no drafting pass before them, since drafting had lost time.
        drafted_by_round, accepted_by_round: over how many places the candidates of each round went, and how many of
            them were committed, in the order of `acceptance_lengths`.
        drafted_at, accepted_at: in how many rounds there were candidates at a place of the block, and in how many one
            was committed, first place first.
        prefill_seconds, drafting_seconds, verifying_seconds, rolling_back_seconds: wall time spent in each;
            verification is the target's forward and the decision, rolling back all that readies features, caches and
            masks for the next round. On an accelerator work is queued, so that a time ends where the next result was
            needed.
    """

    drafted: int = 0
    accepted: int = 0
    acceptance_lengths: list[int] = field(default_factory=list)
    acceptance_lengths_by_sequence: list[list[int]] = field(default_factory=list)
    forwards: int = 0
    rested: int = 0
    drafted_by_round: list[int] = field(default_factory=list)
    accepted_by_round: list[int] = field(default_factory=list)
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    drafting_seconds: float = 0.0
    verifying_seconds: float = 0.0
    rolling_back_seconds: float = 0.0

    @property
    def rounds(self) -> int:
        """Rounds of all sequences."""
        return len(self.acceptance_lengths)

    @property
    def seconds_per_forward(self) -> float:
        """Wall time of a round: one drafting pass and one target forward for all sequences; nan without one."""
        rounds_took = self.drafting_seconds + self.verifying_seconds + self.rolling_back_seconds
        return rounds_took / self.forwards if self.forwards else float("nan")

    @property
    def acceptance_length(self) -> float:
        """τ: committed tokens per round, bonus token included; nan without a round."""
        return sum(self.acceptance_lengths) / self.rounds if self.rounds else float("nan")

    @property
    def acceptance_rates(self) -> list[float]:
        """For each place in the block, in what share of the rounds with candidates there one was committed."""
        return [accepted / drafted for accepted, drafted in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def conditional_acceptance_rates(self) -> list[float]:
        """For each place, the share committed of the candidates there whose predecessors in the block all were."""
        counts = list(zip(self.drafted_by_round, self.accepted_by_round, strict=True))
        reached = [sum(a >= place < d for d, a in counts) for place in range(len(self.accepted_at))]
        return [a / r if r else float("nan") for a, r in zip(self.accepted_at, reached, strict=True)]

    def add_forward(self, drafting: float, verifying: float, rolling_back: float) -> None:
        """Count a target forward, with the seconds of the round that it was made in."""
        self.forwards += 1
        self.drafting_seconds += drafting
        self.verifying_seconds += verifying
        self.rolling_back_seconds += rolling_back

    def add_round(self, drafted: int, places: int, committed: int, accepted: int) -> None:
        """Count a round: its candidates, over how many places they go, and what came of them."""
        self.drafted += drafted
        self.accepted += accepted
        self.drafted_by_round.append(places)
        self.accepted_by_round.append(accepted)
        self.acceptance_lengths.append(committed)
        missing = places - len(self.drafted_at)
        self.drafted_at += [0] * missing
        self.accepted_at += [0] * missing
        for place in range(places):
            self.drafted_at[place] += 1
            self.accepted_at[place] += place < accepted


@dataclass
class DFlashGenerateOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput`, and what the speculation did.

    Args:
        speculation: counts, acceptance lengths and times of this generation.
    """

    speculation: SpeculationStatistics | None = None


class Record:
    """The per-token outputs that `return_dict_in_generate` asks for, one tuple element per token as in `_sample`."""

    def __init__(self, config: GenerationConfig):
        wanted = config.return_dict_in_generate
        self.scores: tuple | None = () if wanted and config.output_scores else None
        self.logits: tuple | None = () if wanted and config.output_logits else None
        self.attentions: tuple | None = () if wanted and config.output_attentions else None
        self.hidden_states: tuple | None = () if wanted and config.output_hidden_states else None

    def add_token(self, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Add one token's processed scores and raw logits, `(V,)` each: copies, as they are rows of a block."""
        if self.scores is not None:
            self.scores += (scores[None].to(torch.float32, copy=True),)
        if self.logits is not None:
            self.logits += (logits[None].to(torch.float32, copy=True),)

    def add_prefill(self, outputs: ModelOutput) -> None:
        """The prompt's states go to the first token whole."""
        if self.attentions is not None:
            self.attentions += (outputs.attentions,)
        if self.hidden_states is not None:
            self.hidden_states += (outputs.hidden_states,)

    def add_block(self, outputs: ModelOutput, num_rows: int, num_committed: int, cache: Cache) -> None:
        """Cut a block's states into those that single steps would have given.

        Args:
            outputs: of a target forward over `num_rows` tokens.
            num_committed: how many of these rows stand for a committed token.
            cache: the target's, as it was after that forward.
        """
        layers = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]  # those that have attention
        for row in range(num_committed):
            if self.hidden_states is not None:
                self.hidden_states += (tuple(state[:, row : row + 1] for state in outputs.hidden_states),)
            if self.attentions is not None and not outputs.attentions:  # of sdpa, which gives none
                self.attentions += (outputs.attentions,)
            elif self.attentions is not None:
                self.attentions += (
                    tuple(
                        _attention_of_row(weights, row, num_rows, layer)
                        for weights, layer in zip(outputs.attentions, layers, strict=True)
                    ),
                )


def padded_steps(rows: list[tuple | None]) -> tuple | None:
    """Per-token outputs `(1, V)` of several sequences as one `(b, V)` per step; zeros after a sequence's end."""
    if rows[0] is None:
        return None
    nothing = torch.zeros_like(rows[0][0])
    longest = max(len(steps) for steps in rows)
    return tuple(torch.cat([steps[i] if i < len(steps) else nothing for steps in rows]) for i in range(longest))


def _attention_of_row(weights: torch.Tensor, row: int, num_rows: int, layer: Any) -> torch.Tensor:
    """The attention `(b, heads, 1, keys)` that a single step would have returned for one row of a block."""
    if isinstance(layer, StaticLayer):  # a static cache returns its whole length at every step
        return weights[:, :, row : row + 1]
    end = weights.shape[-1] - num_rows + row + 1
    start = max(0, end - layer.sliding_window) if layer.is_sliding else 0
    return weights[:, :, row : row + 1, start:end]


__all__ = ["DFlashGenerateOutput", "Record", "SpeculationStatistics", "padded_steps"]

"""The decoding loop: prefill, then rounds of drafting, verifying and committing.

It stands where `GenerationMixin._sample` or `_assisted_decoding` would: Transformers has prepared the inputs, the
cache, the processors and the stopping criteria, and everything here gives what `_sample` would give (greedy: the
same tokens; sampling: the same law), with the draft's candidates verified a block at a time. The prefill is round
zero: a block without candidates.

Of a batch, every row accepts its own number of tokens and is decided on its own, as if it were alone; only the
forwards are shared. Between rounds all is as plain `generate` would have it for prompts of these lengths: rows end at
the right and shorter ones are padded on the left (see `rollback`). A row that is finished leaves the batch.
"""

import copy
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache, QuantizedLayer, StaticLayer
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput, logging

from .cache import right_aligned
from .candidate_generator import DFlashCandidateGenerator, DraftContext
from .compiled import compiled_forward
from .modeling_dflash import DFlashDraftModel
from .outputs import DFlashGenerateOutput, Record, SpeculationStatistics, padded_steps
from .processors import all_row_wise, for_row, process_rows
from .rollback import Rollback, takes_ragged_rows
from .target import Target, checked_cache
from .tree import DraftTree, tree_inputs, why_no_tree
from .verification import acceptance_probability, match_greedily, residual, sample_block

logger = logging.get_logger(__name__)
# The target's inputs that have one entry per token, on their last axis.
_PER_TOKEN = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
_CONTEXT = "_dflash_context"  # the name under which a target cache that is passed on carries the draft's context


class StopCheck:
    """Whether plain `generate` would stop after a token.

    End-of-sequence and length are decided from the token's id and place; every other criterion is asked as it stands,
    once per committed token, in order.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        self.eos_ids: set[int] = set()
        self.max_length: int | None = None
        self.others = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos_ids.update(criterion.eos_token_id.tolist())
            elif type(criterion) is MaxLengthCriteria:
                longest = criterion.max_length
                self.max_length = longest if self.max_length is None else min(self.max_length, longest)
            else:
                self.others.append(criterion)

    def __call__(self, input_ids: torch.Tensor, token: int, scores: tuple | None) -> bool:
        stop = token in self.eos_ids or (self.max_length is not None and input_ids.shape[1] >= self.max_length)
        if len(self.others):
            stop = bool(self.others(input_ids, scores).any()) or stop
        return stop


class Verifier:
    """Decides which candidates are committed, and commits them one by one as plain `generate` would.

    Args:
        logits_processor, stopping_criteria, generation_config, streamer: as `generate` prepared them.
        record: where per-token outputs go.
    """

    def __init__(
        self,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
        record: Record,
    ):
        self.processors = logits_processor
        self.processes_rows = all_row_wise(logits_processor)
        self.stop_check = StopCheck(stopping_criteria)
        self.do_sample = bool(generation_config.do_sample)
        self.streamer = streamer
        self.record = record
        self.finished = False

    def commit(
        self, input_ids: torch.Tensor, num_candidates: int, q: torch.Tensor | None, logits: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        """Commit what the target accepts of a block and the token that follows; sets `finished` where it must stop.

        Args:
            input_ids: `(1, n + k)`, ending in k = `num_candidates` candidates.
            q: `(k, V)` probabilities that the candidates were drawn from; None if they were chosen greedily.
            logits: `(k + 1, V)`, the target's at the anchor and at each candidate.

        Returns:
            The committed ids `(1, n + m)`, and how many of their m new tokens are candidates.
        """
        length = input_ids.shape[1] - num_candidates
        decide = self._decide_at_once if self.processes_rows else self._decide_one_by_one
        committed, accepted = input_ids, 0
        for place, (token, is_candidate, scores) in enumerate(decide(input_ids, length, q, logits)):
            if is_candidate:
                accepted += 1
            else:
                token_ids = input_ids.new_tensor([[token]])
                input_ids = torch.cat([input_ids[:, : length + place], token_ids], dim=1)
            committed = input_ids[:, : length + place + 1]
            self._note(committed, token, scores, logits[place])
            if self.finished:
                break
        return committed, accepted

    def commit_tree(
        self, input_ids: torch.Tensor, tree: DraftTree, logits: torch.Tensor
    ) -> tuple[torch.Tensor, list[int], int]:
        """Commit the target's own choices as far as they stay in a tree, and the first one that leaves it.

        Args:
            input_ids: `(1, n)`, the anchor last.
            tree: N nodes.
            logits: `(N + 1, V)`, the target's at the anchor and at each node.

        Returns:
            The committed ids `(1, n + m)`, the m rows of the block that stay in the cache (the anchor's and those of
            all new tokens but the last), and how many of the m are candidates.
        """
        children = tree.children()
        committed, rows, accepted = input_ids, [0], 0
        scores = choices = None
        if self.processes_rows:
            scores = process_rows(self.processors, input_ids[:, :1], logits.float())
            choices = self._choose(scores).tolist()  # the one sync
        while True:
            row = rows[-1]
            if choices is None:
                own = self.processors(committed, logits[None, row].float())[0]  # (V,)
                token = int(self._choose(own[None]))
            else:
                own, token = scores[row], choices[row]
            committed = torch.cat([committed, input_ids.new_tensor([[token]])], dim=1)
            self._note(committed, token, own, logits[row])
            child = children[row].get(token)
            accepted += child is not None
            if child is None or self.finished:
                return committed, rows, accepted
            rows.append(child)

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        """One token for each row of `(rows, V)`, drawn or the best: `(rows,)`."""
        return torch.multinomial(scores.softmax(-1), 1)[:, 0] if self.do_sample else scores.argmax(-1)

    def _note(self, committed: torch.Tensor, token: int, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Record and stream the last of the committed ids, and see whether it is the last one at all."""
        self.record.add_token(scores, logits)
        self.finished = self.stop_check(committed, token, self.record.scores)
        if self.streamer is not None:
            self.streamer.put(committed[0, -1:].cpu())

    def _decide_at_once(
        self, input_ids: torch.Tensor, length: int, q: torch.Tensor | None, logits: torch.Tensor
    ) -> Iterator[tuple[int, bool, torch.Tensor]]:
        """Yield each committed token, whether it is a candidate, and its processed scores `(V,)`."""
        candidates = input_ids[0, length:]  # (k,)
        scores = process_rows(self.processors, input_ids[:, :1], logits.float())
        if self.do_sample:
            accepted, following = sample_block(candidates, scores.softmax(-1), q)
        else:
            choices = scores.argmax(-1)  # (k + 1,)
            accepted = match_greedily(candidates, choices)
            following = choices.take(accepted)
        *tokens, count, last = torch.cat([candidates, accepted[None], following[None]]).tolist()  # the one sync
        for place in range(count):
            yield tokens[place], True, scores[place]
        yield last, False, scores[count]

    def _decide_one_by_one(
        self, input_ids: torch.Tensor, length: int, q: torch.Tensor | None, logits: torch.Tensor
    ) -> Iterator[tuple[int, bool, torch.Tensor]]:
        """As `_decide_at_once`, with each position's processors asked after the token before it was committed."""
        for place in range(logits.shape[0]):
            scores = self.processors(input_ids[:, : length + place], logits[None, place].float())[0]  # (V,)
            candidate = input_ids[0, length + place] if place < logits.shape[0] - 1 else None
            law = scores.softmax(-1) if self.do_sample else None
            if candidate is None:
                token = scores.argmax() if law is None else torch.multinomial(law, 1)[0]
                yield int(token), False, scores
                return
            q_row = None if q is None else q[place]
            if law is None:
                token, is_candidate = scores.argmax(), bool(scores.argmax() == candidate)
            else:
                chance = acceptance_probability(law[candidate], None if q_row is None else q_row[candidate])
                is_candidate = bool(torch.rand((), device=law.device) < chance)
                token = candidate if is_candidate else torch.multinomial(residual(law, q_row, candidate), 1)[0]
            yield int(token), is_candidate, scores
            if not is_candidate:
                return


def refuse_what_cannot_be_batched(
    model: PreTrainedModel,
    config: GenerationConfig,
    cache: Cache,
    criteria: StoppingCriteriaList,
    streamer: BaseStreamer | None,
) -> None:
    """Refuse what rows that move at their own pace cannot give.

    Raises:
        ValueError: one sentence with the culprit and the mend.
    """
    alone = "with a DFlash draft it serves one sequence at a time: call generate once per sequence"
    if cache.offloading:  # its layers may be on their way between devices while the columns move
        raise ValueError(f"the target's cache is offloaded; {alone}")
    if not takes_ragged_rows(cache):
        names = ", ".join(sorted({type(layer).__name__ for layer in cache.layers}))
        raise ValueError(f"the target's cache has layers of type {names}; {alone}")
    if _cached_tokens(cache):
        raise ValueError(f"the cache that was passed in holds {_cached_tokens(cache)} tokens of a batch; {alone}")
    if Target(model).rope_depends_on_length:
        raise ValueError(
            f"the rotary angles of {type(model).__name__} depend on the longest sequence of a batch; {alone}"
        )
    if config.output_attentions or config.output_hidden_states:
        raise ValueError(
            "output_attentions and output_hidden_states cannot be given for a batch with a DFlash draft, whose rows "
            "are not in step: leave them out, or call generate once per sequence"
        )
    if streamer is not None:
        raise ValueError("a streamer shows one sequence, and this is a batch: leave the streamer out")
    kinds = {type(criterion) for criterion in criteria}
    if EosTokenCriteria not in kinds and kinds - {MaxLengthCriteria}:
        raise ValueError(
            "without an eos token, plain generate goes on with every row of a batch until a stopping criterion holds "
            f"for all; {alone}"
        )


def refuse_what_cannot_be_served(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    cache: Cache | None,
    synced_gpus: bool,
    criteria: StoppingCriteriaList,
    streamer: BaseStreamer | None,
) -> Cache:
    """Refuse, before any work, generations that this loop cannot do right.

    Returns:
        The target's cache.

    Raises:
        ValueError: one sentence with the culprit and the mend.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder model, which no DFlash draft serves: drop assistant_model"
        )
    if synced_gpus:
        raise ValueError(
            "synced_gpus=True (FSDP, DeepSpeed ZeRO-3) needs equal steps on every rank, which a DFlash draft does not "
            "give: drop assistant_model"
        )
    cache = checked_cache(cache, model)
    if input_ids.shape[0] > 1:
        refuse_what_cannot_be_batched(model, config, cache, criteria, streamer)
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if config.output_attentions and len(cache.layers) not in (0, num_layers):
        raise ValueError(
            f"output_attentions needs one cache layer per decoder layer, and {type(model).__name__} shares them: "
            "leave the option out"
        )
    if config.assistant_ensemble_weight is not None:
        raise ValueError(
            "assistant_ensemble_weight bends the target's law, and a DFlash draft keeps it: leave the option out"
        )
    prepare = vars(model).get("prepare_inputs_for_generation")  # a prompt-learning PeftModel puts its own here
    owner = getattr(prepare, "__self__", None)
    if owner is not None and getattr(owner.active_peft_config, "is_prompt_learning", False):
        raise ValueError(
            f"{type(owner.active_peft_config).__name__} puts virtual tokens before the prompt, whose features a "
            "DFlash draft was not trained on: drop assistant_model"
        )
    return cache


def _longest_draft(generator: DFlashCandidateGenerator, cache: Cache, cached_length: int) -> int | None:
    """How many candidates fit the target's cache and positions when its cache holds `cached_length` tokens."""
    # Of a static cache the anchor and the candidates must fit; a sliding layer of it never fills up.
    static = [layer for layer in cache.layers if isinstance(layer, StaticLayer) and layer.is_croppable]
    bounds = [layer.max_cache_len - cached_length - 1 for layer in static]
    # A block that overflows the window of a quantised layer would have it quantised later than single steps do.
    windows = [layer for layer in cache.layers if isinstance(layer, QuantizedLayer)]
    bounds += [max(0, layer.residual_length - _unquantised(layer) - 2) for layer in windows]
    for position in {cached_length, *generator.next_positions}:  # those of a padded prompt are fewer than its columns
        if (last := generator.target.last_exact_position(position)) is not None:
            bounds.append(last - position)
    return min(bounds, default=None)


def dflash_decoding(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant_model: DFlashDraftModel,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    **model_kwargs,
) -> DFlashGenerateOutput | torch.Tensor:
    """Generate with a DFlash draft. Arguments are those that `generate` hands to a decoding method.

    Args:
        model: the target.
        input_ids: `(b, n)`; empty where the prompt came as `inputs_embeds`.
        assistant_model: the draft.
        model_kwargs: the target's further inputs, its cache among them.

    Returns:
        The ids `(b, n + new)`, or a `DFlashGenerateOutput` with `return_dict_in_generate`.

    Raises:
        ValueError: the request, the target's cache or the draft cannot be served.
    """
    cache_name = "cache" if "cache" in model_kwargs else "past_key_values"  # renamed in Transformers 5.24
    cache = refuse_what_cannot_be_served(
        model,
        input_ids,
        generation_config,
        model_kwargs.get(cache_name),
        synced_gpus,
        stopping_criteria,
        streamer,
    )
    batch_size = len(input_ids)
    if batch_size == 1:
        processors = [logits_processor]
    else:
        processors = [for_row(logits_processor, row, batch_size) for row in range(batch_size)]
    rows = [
        Row(
            input_ids[i : i + 1],
            Verifier(own, stopping_criteria, generation_config, streamer, Record(generation_config)),
        )
        for i, own in enumerate(processors)
    ]
    statistics = SpeculationStatistics(acceptance_lengths_by_sequence=[row.acceptance_lengths for row in rows])
    context = _take_context(cache, assistant_model) if batch_size == 1 else None
    with (
        DFlashCandidateGenerator(assistant_model, model, generation_config, processors, context) as generator,
        Rollback(cache, generator.target.mixers(), batch_size) as rollback,
    ):
        clock = time.perf_counter()
        kept = _kept_columns(model_kwargs.get("attention_mask"))
        with generator.observing():
            outputs = model._prefill(input_ids, _eager(generation_config), model_kwargs)
        cache = rollback.cache = _cache_after(outputs, cache_name, cache)
        rollback.begin()
        cached_length = generator.commit_prompt(kept, _cached_tokens(cache))
        logits = outputs.logits[:, -1:].to(input_ids.device, copy=True)  # (b, 1, V)
        for i, row in enumerate(rows):
            row.known = cached_length if kept is None else cached_length - int((kept[i].cumsum(0) == 0).sum())
            row.verifier.record.add_prefill(outputs)
            row.ids, _ = row.verifier.commit(row.ids, 0, None, logits[i])
        if batch_size > 1 and model_kwargs.get("attention_mask") is None:
            model_kwargs["attention_mask"] = torch.ones(
                batch_size, cached_length, dtype=torch.long, device=input_ids.device
            )
        model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
        del outputs
        statistics.prefill_seconds = time.perf_counter() - clock

        grows_trees = generator.tree_budget is not None and _takes_trees(
            model, generator, _rectangle([row.ids for row in rows]), cache_name, generation_config, model_kwargs
        )
        compiled = compiled_forward(
            model, generator.taps, generator.max_candidates + 1, generation_config, model_kwargs, rollback
        )
        active = rows
        while going := [i for i, row in enumerate(active) if not row.verifier.finished]:
            if len(going) < len(active):
                active = [active[i] for i in going]
                generator.select_rows(going)
                rollback.select_rows(torch.tensor(going))
                model_kwargs = _selected(model_kwargs, going)
            clock = time.perf_counter()
            longest = _longest_draft(generator, cache, cached_length)
            rests = generator.rest is not None and generator.rest.resting
            statistics.rested += rests
            most = 0 if rests else longest
            ids = [row.ids for row in active]
            trees = generator.draft_trees(ids, most) if grows_trees else None
            if trees is None:
                candidates, draft_logits = generator.draft_rows(ids, most)
            else:
                largest = max(map(len, trees))
                padded = [tree.padded(largest) for tree in trees]
                candidates, draft_logits = input_ids.new_tensor([tree.tokens for tree in padded]), None
            k = candidates.shape[1]
            drafted = time.perf_counter()

            rollback.before_block()
            fits = compiled is not None and trees is None and longest >= compiled.num_rows - 1
            num_rows = compiled.num_rows if fits else k + 1
            block_ids = _rectangle(ids, F.pad(candidates, (0, num_rows - k - 1)))
            grown = _grown(model, ModelOutput(), model_kwargs, num_rows - 1)
            inputs = _block_inputs(model, block_ids, num_rows - 1, grown)
            if batch_size > 1 and inputs.get("position_ids") is None:  # rows that lag would get those of the longest
                raise ValueError(
                    f"{type(model).__name__} takes positions from its cache's length, which rows of a batch do not "
                    "share with a DFlash draft: call generate once per sequence"
                )
            if trees is not None and k:  # without a node it is a single step, with inputs of its own
                inputs = tree_inputs(model, cache, padded, cached_length, inputs)
            if fits:
                outputs = compiled(inputs)
            else:
                with generator.observing(), rollback.recording():  # a processor may call the target after this
                    outputs = model(**inputs, return_dict=True)
            rollback.note_block(num_rows)
            logits = outputs.logits[:, -num_rows:][:, : k + 1].to(input_ids.device)  # (b, k + 1, V)
            anew = _cache_after(outputs, cache_name, cache) is not cache  # and all tokens, not the block alone
            if anew:
                cache = rollback.cache = outputs[cache_name]
                rollback.begin()
            committed, paths = [], []
            for i, row in enumerate(active):
                length = row.ids.shape[1]
                places, num_candidates = k, k
                if trees is None:
                    q = None if draft_logits is None else draft_logits[i].softmax(-1)
                    block = torch.cat([row.ids, candidates[i : i + 1]], dim=1)
                    row.ids, accepted = row.verifier.commit(block, k, q, logits[i])
                else:
                    tree = trees[i]
                    row.ids, taken, accepted = row.verifier.commit_tree(row.ids, tree, logits[i, : len(tree) + 1])
                    paths.append(torch.tensor(taken))
                    places, num_candidates = max(tree.depths, default=0), len(tree)
                committed.append(row.ids.shape[1] - length)
                row.acceptance_lengths.append(committed[-1])
                if anew:
                    row.verifier.record.add_prefill(outputs)
                else:
                    row.verifier.record.add_block(outputs, k + 1, committed[-1], cache)
                statistics.add_round(num_candidates, places, committed[-1], accepted)
            verified = time.perf_counter()
            if trees is None:
                generator.commit(committed, num_rows)
            else:
                path = pad_sequence(paths, batch_first=True)  # (b, m), of the block's rows
                generator.commit(committed, num_rows, path)
                rollback.straighten(num_rows, path)

            if len(set(committed)) == 1:
                if rollback.after_block(num_rows, committed[0]):
                    again = _grown(model, ModelOutput(), model_kwargs, committed[0] - 1)
                    again_ids = active[0].ids[:, :-1]
                    model(**_block_inputs(model, again_ids, committed[0] - 1, again), return_dict=True)
                cached_length += committed[0]
                model_kwargs = _grown(model, outputs, model_kwargs, committed[0])
            else:
                known, new = torch.tensor([row.known for row in active]), torch.tensor(committed)
                columns = right_aligned(cached_length, known, new)  # (b, n)
                rollback.after_ragged_block(columns, cached_length + num_rows)
                moved = _rearranged(grown, columns, known + new, cached_length + num_rows)
                model_kwargs = _grown(model, outputs, moved, 1)
                cached_length = columns.shape[1]
            for row, count in zip(active, committed, strict=True):
                row.known += count
            del outputs
            statistics.add_forward(drafted - clock, verified - drafted, time.perf_counter() - verified)
            logger.debug("round %d: %d candidates, %s tokens committed", statistics.forwards, k, committed)
        if batch_size == 1:
            setattr(cache, _CONTEXT, _KeptContext(assistant_model, generator.context(cached_length)))
    if streamer is not None:
        streamer.end()
    padding = generation_config._pad_token_tensor
    sequences = _rectangle([row.ids for row in rows], padding=0 if padding is None else int(padding), left=False)
    if not generation_config.return_dict_in_generate:
        return sequences
    records = [row.verifier.record for row in rows]
    return DFlashGenerateOutput(
        sequences=sequences,
        scores=padded_steps([record.scores for record in records]),
        logits=padded_steps([record.logits for record in records]),
        attentions=records[0].attentions,
        hidden_states=records[0].hidden_states,
        speculation=statistics,
        **({cache_name: cache} if batch_size == 1 else {}),
    )


def _eager(config: GenerationConfig) -> GenerationConfig:
    """The config for a prefill: chunks would go to plain `generate`'s compiled call, which may know no taps."""
    config = copy.copy(config)
    config.disable_compile = True
    return config


def _takes_trees(
    model: PreTrainedModel,
    generator: DFlashCandidateGenerator,
    ids: torch.Tensor,
    cache_name: str,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> bool:
    """Whether trees can be verified here; where they cannot, it says once why blocks are chains."""
    reason = generator.why_no_tree
    if reason is None and (config.output_attentions or config.output_hidden_states):
        reason = "attentions or hidden states are wanted for each token"
    if reason is None:
        inputs = _block_inputs(model, ids, 0, _grown(model, ModelOutput(), model_kwargs, 0))
        reason = why_no_tree(model, model_kwargs[cache_name], cache_name, inputs.get("position_ids"))
        reason = reason and f"{type(model).__name__} cannot verify one: {reason}"
    if reason is not None:
        logger.warning_once(f"tree_budget is set, but candidates come as chains: {reason}.")
    return reason is None


@dataclass
class Row:
    """One sequence of the batch.

    Args:
        ids: `(1, n)`, what is committed.
        verifier: decides what is.
        known: columns of the target's cache that are its own; those before them are padding.
        acceptance_lengths: committed tokens of each of its rounds.
    """

    ids: torch.Tensor
    verifier: Verifier
    known: int = 0
    acceptance_lengths: list[int] = field(default_factory=list)


def _rectangle(
    rows: list[torch.Tensor], following: torch.Tensor | None = None, padding: int = 0, left: bool = True
) -> torch.Tensor:
    """Rows of ids `(1, n_i)` as one tensor `(b, n)`, with `following (b, k)` behind them."""
    longest = max(row.shape[1] for row in rows)
    sides = [(longest - row.shape[1], 0) if left else (0, longest - row.shape[1]) for row in rows]
    together = torch.cat([F.pad(row, side, value=padding) for row, side in zip(rows, sides, strict=True)])
    return together if following is None else torch.cat([together, following], dim=1)


def _selected(model_kwargs: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """The target's inputs for some rows of the batch."""
    own = {name: model_kwargs[name] for name in _PER_TOKEN if model_kwargs.get(name) is not None}
    return model_kwargs | {name: value[..., rows, :] for name, value in own.items()}


def _rearranged(
    model_kwargs: dict[str, Any], columns: torch.Tensor, known: torch.Tensor, num_columns: int
) -> dict[str, Any]:
    """The target's inputs per token, moved as its cache was.

    Args:
        columns: `(b, n)`, as in `Rollback.after_ragged_block`.
        known: `(b,)`, how many of the n are a row's own.
        num_columns: how many there were.
    """
    moved = {}
    for name in _PER_TOKEN:
        if (value := model_kwargs.get(name)) is not None:  # (..., b, n)
            index = (columns - (num_columns - value.shape[-1])).clamp(min=0).to(value.device)
            moved[name] = value.gather(-1, index.expand(*value.shape[:-1], -1))
    place = torch.arange(columns.shape[1])
    padded = (place < columns.shape[1] - known[:, None]).to(moved["attention_mask"].device)  # (b, n)
    moved["attention_mask"] = moved["attention_mask"].masked_fill(padded, 0)
    return model_kwargs | moved


def _block_inputs(
    model: PreTrainedModel, block_ids: torch.Tensor, num_candidates: int, model_kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The target's inputs for the anchor and the candidates, by masks and positions that were grown for them."""
    inputs = model.prepare_inputs_for_generation(
        block_ids, next_sequence_length=num_candidates + 1, is_first_iteration=False, **model_kwargs
    )
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = num_candidates + 1
    return inputs


def _grown(model: PreTrainedModel, outputs: ModelOutput, model_kwargs: dict[str, Any], num_new: int) -> dict[str, Any]:
    """The target's masks, positions and token types for `num_new` more tokens, as that many single steps make them.

    One call for all of them repeats the last `num_new` token types, where single steps repeat the last one.
    """
    model_kwargs = dict(model_kwargs)  # the model writes into it
    if model_kwargs.get("token_type_ids") is None and num_new:
        return model._update_model_kwargs_for_generation(outputs, model_kwargs, num_new_tokens=num_new)
    for _ in range(num_new):
        model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
    return model_kwargs


def _cache_after(outputs: ModelOutput, cache_name: str, cache: Cache) -> Cache:
    """The target's cache after a forward: another one where it read all tokens anew, as Phi-3 does where its rope
    changes."""
    after = outputs.get(cache_name)
    return cache if after is None else after


def _unquantised(layer: QuantizedLayer) -> int:
    """Tokens in the window of a quantised layer, whose keys have no axes while it is empty."""
    return layer.keys.shape[-2] if layer.keys.dim() == 4 else 0


def _cached_tokens(cache: Cache) -> int | None:
    """How many tokens a cache holds; None for one of recurrent layers alone, which do not count them."""
    return None if cache.layers and all(cache.is_linear) else int(cache.get_seq_length())


def _kept_columns(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """bool `(b, n)`, False where a prompt has padding; None where none has."""
    if attention_mask is None or bool((attention_mask == 1).all()):
        return None
    return attention_mask != 0


class _KeptContext:
    """What a draft knows of a sequence, beside the target's cache: copied and freed with it, and not pickled."""

    def __init__(self, draft: DFlashDraftModel, context: DraftContext):
        self.draft = weakref.ref(draft)
        self.context = context

    def __deepcopy__(self, memo: dict) -> "_KeptContext":
        draft = self.draft()
        return self if draft is None else _KeptContext(draft, copy.deepcopy(self.context, memo))

    def __reduce__(self) -> tuple:
        return type(None), ()


def _take_context(cache: Cache, draft: DFlashDraftModel) -> DraftContext | None:
    """What this draft kept beside a target cache in an earlier call, if the cache still stands where it did.

    It is taken away from the cache, so that a call that breaks off leaves none that does not fit.
    """
    kept = vars(cache).pop(_CONTEXT, None)
    if kept is None or kept.draft() is not draft or kept.context.target_length != _cached_tokens(cache):
        return None
    if kept.context.features.is_inference() and not torch.is_inference_mode_enabled():  # it could not grow
        return None
    return kept.context


__all__ = ["dflash_decoding"]

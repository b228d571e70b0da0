"""`DFlashTrainer`: Transformers' `Trainer` for drafts, with a frozen target beside the model."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HTTPError
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from ..configuration_dflash import DFlashDraftConfig
from ..hub import push_to_hub, write_card
from ..integration import draft_of
from ..modeling_dflash import DFlashDraftModel
from ..rollback import takes_ragged_rows
from ..target import Target, block_embeds
from .blocks import ATTENTION, IGNORED, Blocks, block_labels, pad_anchors, possible_anchors, sample_anchors
from .data import Document
from .features import LAST_STATES, FeatureStore, TargetFeatures, fingerprint
from .objective import LOSSES, Objective, default_gamma, needs_teacher

logger = logging.get_logger(__name__)
_TOLERATED_STEPS = 10  # in a row, without finite gradients


@dataclass
class DFlashTrainingArguments(TrainingArguments):
    """`TrainingArguments`, and what is particular to drafts.

    Args:
        anchors_per_document: blocks of one document in one epoch, at random places; drawn anew in every epoch.
        loss_type: `"dpace"` (to the token that the target wrote, places weighted by what they add to the acceptance
            length), `"ce"` (the same with a fixed decay) or `"kl"` (to the target's law, with a fixed decay).
        decay_gamma: γ of the decay over a block's places, for `"ce"` and `"kl"`; by the block size where not given.
        dpace_alpha: smoothing of `"dpace"`.
        selector_loss_weight: what the selector of a DFlash 2 draft counts.
        eval_prompts: prompts of the evaluation set that are answered with the draft in each evaluation, for the
            acceptance length; 0 for none.
        eval_new_tokens: the most tokens of such an answer.
    """

    anchors_per_document: int = field(default=512, metadata={"help": "blocks of one document in one epoch"})
    loss_type: str = field(default="dpace", metadata={"help": "dpace, ce or kl"})
    decay_gamma: float | None = field(default=None, metadata={"help": "decay over a block's places"})
    dpace_alpha: float = field(default=0.5, metadata={"help": "smoothing of D-PACE"})
    selector_loss_weight: float = field(default=1.0, metadata={"help": "weight of the selector's loss (DFlash 2)"})
    eval_prompts: int = field(default=8, metadata={"help": "prompts answered in each evaluation"})
    eval_new_tokens: int = field(default=128, metadata={"help": "the most tokens of such an answer"})

    def __post_init__(self):
        super().__post_init__()
        if self.ddp_find_unused_parameters is None:
            # All are used; but DDP would look for them in the graph of the forward pass alone, where a head of the
            # draft's own or a selector does not stand.
            self.ddp_find_unused_parameters = False
        self.remove_unused_columns = False  # the batches are not the model's arguments
        self.label_names = ["labels"]
        if self.loss_type not in LOSSES:
            raise ValueError(f"loss_type is one of {', '.join(LOSSES)}; got {self.loss_type!r}")
        if self.dataloader_persistent_workers:
            raise ValueError(
                "dataloader_persistent_workers keeps the anchors of the first epoch for all: leave it out, workers "
                "that are started in every epoch draw them anew"
            )
        if self.anchors_per_document < 1:
            raise ValueError(f"anchors_per_document must be at least 1, got {self.anchors_per_document}")
        if self.decay_gamma is not None and self.decay_gamma <= 0:
            raise ValueError(f"decay_gamma must be more than 0, got {self.decay_gamma}")
        if not 0 <= self.dpace_alpha <= 1:
            raise ValueError(f"dpace_alpha lies between 0 and 1, got {self.dpace_alpha}")


class BlockDataset(Dataset):
    """Documents with the anchors of one epoch.

    The anchors depend on the seed, the epoch and the document alone, so that a run that was cut goes on as it would
    have.

    Args:
        documents: what the target wrote.
        anchors_per_document: at most so many.
        num_candidates: places of one block.
        seed: of the anchors.
        features: stored states of the same documents, in this order.
        layer_ids: which of the stored taps are wanted.

    Raises:
        ValueError: a document has no possible anchor.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        anchors_per_document: int,
        num_candidates: int,
        seed: int = 0,
        features: FeatureStore | None = None,
        layer_ids: Sequence[int] = (),
    ):
        self.documents = documents
        self.anchors_per_document = anchors_per_document
        self.num_candidates = num_candidates
        self.seed = seed
        self.features = features
        self.layer_ids = layer_ids
        self.epoch = 0
        if not documents:
            raise ValueError("there is no document to train on")
        for number, document in enumerate(documents):
            if not trainable(document):
                raise ValueError(
                    f"document {number} has no response of two tokens, so that no block can start in it: leave it out"
                )
        if features is not None and len(features) != len(documents):
            raise ValueError(f"{features.folder} holds {len(features)} documents, there are {len(documents)}")

    def start_epoch(self, epoch: int) -> None:
        """Draw anchors anew. It is not named `set_epoch`, which accelerate's data loaders call with an epoch of their
        own, and do not call where processes share the data or a run goes on amid an epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        document = self.documents[index]
        ids, mask = torch.tensor(document.ids), torch.tensor(document.response_mask)
        generator = torch.Generator().manual_seed(hash((self.seed, int(self.epoch), index)) % 2**63)
        anchors = sample_anchors(mask, self.anchors_per_document, generator)
        item = {"input_ids": ids, "anchors": anchors, "labels": block_labels(ids, mask, anchors, self.num_candidates)}
        if self.features is not None:
            item["features"] = self.features.select(self.features[index], self.layer_ids)
        return item


def collate(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Documents of unequal length as one batch, padded on the right: `input_ids (b, n)`, `attention_mask (b, n)`,
    `anchors (b, N)`, `labels (b, N, K)` and, if they are stored, `features (b, n, taps, H)`."""
    ids = [item["input_ids"] for item in items]
    batch = {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
        "anchors": pad_anchors([item["anchors"] for item in items]),
        "labels": pad_sequence([item["labels"] for item in items], batch_first=True, padding_value=IGNORED),
    }
    if "features" in items[0]:
        batch["features"] = pad_sequence([item["features"] for item in items], batch_first=True)
    return batch


class DFlashTrainer(Trainer):
    """Trains a draft on what its target wrote (arXiv 2602.06036).

    The target is frozen and is no part of the model: checkpoints hold the draft alone. Evaluation measures, beside the
    loss and how often each place is right, the acceptance length of real answers: `eval_acceptance_length`, fit for
    `metric_for_best_model`, since accuracy under teacher forcing is known not to foretell it.

    Args:
        model: the draft, or a `PeftModel` of one. Its weights are trained in float32.
        target: the target.
        args: `DFlashTrainingArguments`.
        train_documents, eval_documents: what the target wrote.
        train_features: stored states of `train_documents`; without them the target runs in every step.
        **kwargs: of `Trainer`, such as `callbacks` and `optimizers`.

    Raises:
        ValueError: the draft cannot belong to the target, its mask token stands in the documents, or a document
            holds nothing to learn.
    """

    def __init__(
        self,
        model: DFlashDraftModel,
        target: PreTrainedModel,
        args: DFlashTrainingArguments,
        train_documents: Sequence[Document] | None = None,
        eval_documents: Sequence[Document] | None = None,
        train_features: FeatureStore | None = None,
        **kwargs,
    ):
        draft = draft_of(model)
        config = draft.config
        self.target = Target(target)
        self.target.check(draft)
        target.requires_grad_(False).eval()
        gamma = default_gamma(config.block_size) if args.decay_gamma is None else args.decay_gamma
        self.objective = Objective(args.loss_type, gamma, args.dpace_alpha, args.selector_loss_weight)
        self.layer_ids = layers_to_read(config, args.loss_type)
        self.target_features = TargetFeatures(target, self.layer_ids)
        for documents in (train_documents, eval_documents):
            refuse_unfit_tokens(documents or (), config.mask_token_id, self.target.num_embeddings)

        if train_features is not None:
            mark = fingerprint(train_documents, target, train_features.layer_ids)
            if mark != train_features.fingerprint:
                raise ValueError(
                    f"{train_features.folder} holds features of other documents, of another order or of another "
                    "target: build them anew"
                )
        model.float()  # masters: an update is far smaller than what bfloat16 can tell apart
        draft.set_attn_implementation(ATTENTION)
        datasets: dict[str, Any] = {}
        if train_documents is not None:
            datasets["train_dataset"] = BlockDataset(
                train_documents,
                args.anchors_per_document,
                config.num_candidates,
                args.seed,
                train_features,
                self.layer_ids,
            )
        if eval_documents is not None:
            datasets["eval_dataset"] = BlockDataset(eval_documents, args.anchors_per_document, config.num_candidates)
        if args.n_gpu > 1:
            logger.warning(
                f"One of {args.n_gpu} GPUs is used: start the training by torchrun or accelerate launch to use all."
            )
            args._n_gpu = 1  # else Trainer would wrap the draft in DataParallel, which cannot split blocks
        super().__init__(model=model, args=args, data_collator=collate, **datasets, **kwargs)
        if len(set(getattr(target, "hf_device_map", {}).values())) < 2:  # else hooks move its inputs
            target.to(self.args.device)
        self.model_accepts_loss_kwargs = True  # losses are divided by the blocks of the whole step, not of a batch
        outside = config.own_embedding or config.draft_vocab_size or config.selector_rank
        if self.is_fsdp_enabled and (model is not draft or outside):
            raise ValueError(
                "FSDP takes drafts whose weights are all used in the forward pass. With adapters, an embedding or a "
                "head of its own or the selector of DFlash 2, train without --fsdp: every process then holds it all"
            )
        self.add_callback(_SkipNonFiniteSteps())
        if train_documents is not None:
            self.add_callback(_DrawAnchors(self.train_dataset))
        self._best_step: int | None = None  # once the best checkpoint's weights are loaded
        self._places: dict[str, torch.Tensor] | None = None
        self._evaluated: list[torch.Tensor] = []  # of each batch its loss and its blocks, `(2,)`
        self._logged_at = time.perf_counter()

    def train(self, *args, **kwargs):
        """As `Trainer.train`."""
        self._logged_at = time.perf_counter()
        return super().train(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The batches of one step, and how many blocks they hold over all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        blocks = sum((batch["anchors"] >= 0).sum() for batch in batches)
        if batches and self.args.world_size > 1:
            blocks = self.accelerator.gather(blocks.to(device)).sum()
        return batches, blocks

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Mean loss of a block, over all blocks of the step; see `objective` for what a block's loss is."""
        draft = draft_of(self.accelerator.unwrap_model(model))
        config = draft.config
        labels, anchors = inputs["labels"], inputs["anchors"]
        states = inputs.get("features")
        if states is None:
            states = self.target_features(inputs["input_ids"], inputs["attention_mask"])  # (b, n, taps, H)
        num_taps = len(config.target_layer_ids)
        blocks = Blocks.at(anchors, inputs["input_ids"], config)
        embeds = block_embeds(draft, self.target, blocks.ids)
        weights = next(model.parameters())
        hidden = model(
            noise_embeds=embeds.to(weights.device, torch.float32),
            context_hidden_states=states[:, :, :num_taps].flatten(2).to(weights.device, torch.float32),
            position_ids=blocks.position_ids,
            attention_mask=blocks.layout,
            num_blocks=anchors.shape[1],
        ).last_hidden_state  # (b, N·B, H)

        hidden = hidden.unflatten(1, (-1, config.block_size))[:, :, -config.num_candidates :]  # (b, N, K, H)
        previous = torch.cat([blocks.ids.unflatten(1, (-1, config.block_size))[:, :, :1], labels[:, :, :-1]], dim=2)
        real = anchors >= 0  # (b, N)
        total, counts, right = self.objective(
            draft,
            self.target,
            hidden[real],
            labels[real],
            previous[real].clamp(min=0),
            _teacher_states(states[:, :, num_taps], anchors, config.num_candidates)[real]
            if needs_teacher(self.args.loss_type)
            else None,
        )
        self._count_places(counts, right)
        if not model.training:
            self._evaluated.append(torch.stack([total.detach(), real.sum().to(total)]))
        loss = total / (real.sum() if num_items_in_batch is None else num_items_in_batch)
        if num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # their gradients are averaged
        return (loss, {}) if return_outputs else loss

    def _count_places(self, counts: torch.Tensor, right: torch.Tensor) -> None:
        new = {"counts": counts.detach(), "right": right.detach()}
        self._places = new if self._places is None else {name: self._places[name] + new[name] for name in new}

    def _take_accuracies(self) -> dict[str, float]:
        """Share of labels that were the first choice at each place, since the last call, over all processes."""
        if self._places is None:
            return {}
        counts, right = (self.accelerator.gather(self._places[name][None]).sum(0) for name in ("counts", "right"))
        self._places = None
        return {f"accuracy_{place + 1}": right[place].item() / n for place, n in enumerate(counts.tolist()) if n}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As `Trainer.log`; beside the loss, the accuracy of each place and how many a second were trained on."""
        if "loss" in logs and self._places is not None:
            places = self.accelerator.gather(self._places["counts"].sum()[None]).sum().item()
            logs["places_per_second"] = places / (time.perf_counter() - self._logged_at)
            self._logged_at = time.perf_counter()
            logs |= self._take_accuracies()
        super().log(logs, start_time)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            return self.compute_loss(model, inputs).detach(), None, None

    def evaluation_loop(self, dataloader, *args, metric_key_prefix="eval", **kwargs):
        """As `Trainer.evaluation_loop`, with the accuracy of each place and the acceptance length of real answers.

        Here, and not after the evaluation, so that callbacks such as early stopping see them.
        """
        training_places, self._places, start = self._places, None, time.perf_counter()
        self._evaluated = []
        self.model.eval()
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        more = self._take_accuracies()
        if self._evaluated:  # the mean over blocks, however they were batched
            total, blocks = self.accelerator.gather(torch.stack(self._evaluated).sum(0)[None]).sum(0).tolist()
            more["loss"] = total / blocks
        self._places = training_places
        if self.args.eval_prompts:
            more["acceptance_length"] = self.acceptance_length(dataloader.dataset.documents[: self.args.eval_prompts])
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in more.items()})
        self._logged_at += time.perf_counter() - start
        return output

    def record(self) -> None:
        """Note in the draft's config how it was trained, for its model card; older results are no longer its own."""
        args, state = self.args, self.state
        documents = self.train_dataset.documents if self.train_dataset is not None else []
        step = state.global_step if self._best_step is None else self._best_step
        history = [entry for entry in state.log_history if entry["step"] <= step]
        held_out = [entry["eval_acceptance_length"] for entry in history if "eval_acceptance_length" in entry]
        epochs = [entry["epoch"] for entry in history if "epoch" in entry]
        schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        table = {
            "documents": len(documents),
            "response_tokens": sum(document.num_response_tokens for document in documents),
            "epochs": round((state.epoch if self._best_step is None else epochs[-1]) or 0.0, 2),
            "steps": step,
            "documents_per_step": batch,
            "anchors_per_document": args.anchors_per_document,
            "loss": args.loss_type,
            "learning_rate": f"{args.learning_rate:g}, {schedule}",
            "precision": "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32",
            "seed": args.seed,
        }
        if held_out and held_out[-1] > 0:  # nan where no answer had a round
            table["acceptance_length_on_held_out_prompts"] = round(held_out[-1], 3)
        config = draft_of(self.accelerator.unwrap_model(self.model)).config
        config.model_card = {**(config.model_card or {}), "training": table, "results": None}

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._best_step = self.state.best_global_step

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Publish the draft alone, and not what else lies in the output folder, such as the target's answers."""
        if self.args.hub_strategy == "end":
            return
        try:
            self.push_to_hub(f"Training in progress, step {self.state.global_step}")
        except (OSError, HTTPError) as error:  # the Hub may be back at the next one
            logger.warning(f"The draft of step {self.state.global_step} is not published: {error}")

    def _save(self, output_dir=None, state_dict=None):
        self.record()
        super()._save(output_dir, state_dict)

    def create_model_card(self, **kwargs) -> None:
        """Write the draft's own card into the output folder; takes and leaves aside what `Trainer`'s takes."""
        if self.is_world_process_zero():
            self.record()
            config = draft_of(self.accelerator.unwrap_model(self.model)).config
            write_card(self.args.output_dir, config, self.args.hub_model_id)

    def push_to_hub(self, commit_message: str = "End of training", **kwargs) -> Any:
        """Publish the draft, or its adapters, as `args.hub_model_id` says.

        Args:
            commit_message, **kwargs: of `transformers_dflash.push_to_hub`.

        Returns:
            What the Hub says of the commit; None on other processes than the first.
        """
        model = self.whole_model()
        if not self.is_world_process_zero():
            return None
        self.record()
        args = self.args
        kwargs = {"token": args.hub_token, "revision": args.hub_revision, "private": args.hub_private_repo} | kwargs
        repo_id = args.hub_model_id or Path(args.output_dir).resolve().name
        return push_to_hub(model, repo_id, commit_message=commit_message, **kwargs)

    def whole_model(self) -> Any:
        """The draft, or its adapters, with whole weights. Call it on all processes; under FSDP, where each has but a
        part, it is a copy, and None on other processes than the first."""
        model = self.accelerator.unwrap_model(self.model)
        if not self.is_fsdp_enabled:
            return model
        weights = self.accelerator.get_state_dict(self.model)
        if not self.is_world_process_zero():
            return None
        whole = DFlashDraftModel(model.config)
        whole.load_state_dict(weights)
        whole.generation_config = model.generation_config
        return whole

    @torch.no_grad()
    def acceptance_length(self, documents: Sequence[Document]) -> float:
        """τ over greedy answers to the prompts of documents: committed tokens per round of `generate`.

        As many are answered together as `per_device_eval_batch_size` says, where the target's rows can be.
        """
        draft = draft_of(self.accelerator.unwrap_model(self.model))
        target = self.target.model
        alone = self.target.rope_depends_on_length or not takes_ragged_rows(DynamicCache(config=target.config))
        batch_size = 1 if alone else self.args.per_device_eval_batch_size
        options = GenerationConfig(
            max_new_tokens=self.args.eval_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            eos_token_id=target.generation_config.eos_token_id,
            pad_token_id=target.generation_config.pad_token_id,
        )
        lengths: list[int] = []
        starts = [document.response_mask.index(True) for document in documents]
        # A document without a prompt has nothing to answer.
        prompts = [torch.tensor(one.ids[:start]) for one, start in zip(documents, starts, strict=True) if start]
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            masks = [torch.ones_like(prompt) for prompt in batch]
            ids, mask = (pad_sequence(rows, batch_first=True, padding_side="left") for rows in (batch, masks))
            ids, mask = ids.to(target.device), mask.to(target.device)
            output = target.generate(ids, attention_mask=mask, generation_config=options, assistant_model=draft)
            lengths += output.speculation.acceptance_lengths
        return sum(lengths) / len(lengths) if lengths else float("nan")


def layers_to_read(config: DFlashDraftConfig, loss_type: str) -> list[int]:
    """What of the target a draft's training reads: its taps, and the last states where the loss takes the law."""
    return [*config.target_layer_ids, *([LAST_STATES] if needs_teacher(loss_type) else [])]


def trainable(document: Document) -> bool:
    """Whether some block can start in a document: it has a response of at least two tokens."""
    return len(possible_anchors(torch.tensor(document.response_mask))) > 0


def _teacher_states(last: torch.Tensor, anchors: torch.Tensor, num_candidates: int) -> torch.Tensor:
    """The target's last states `(b, N, K, H)` that predict each place, from those of documents `(b, n, H)`."""
    places = anchors.clamp(min=0)[:, :, None] + torch.arange(num_candidates, device=anchors.device)  # (b, N, K)
    places = places.clamp(max=last.shape[1] - 1).flatten(1)
    rows = torch.arange(len(last), device=anchors.device)[:, None]
    return last[rows, places].unflatten(1, (-1, num_candidates))


def refuse_unfit_tokens(documents: Sequence[Document], mask_token_id: int, num_embeddings: int) -> None:
    """Refuse documents that hold the mask token, which a draft could not tell from "not yet known", or tokens of
    another model.

    Raises:
        ValueError: naming the first such document.
    """
    for number, document in enumerate(documents):
        if max(document.ids) >= num_embeddings:
            raise ValueError(
                f"document {number} holds token {max(document.ids)}, and the target's embedding has {num_embeddings} "
                "rows: it was tokenized for another model"
            )
        if mask_token_id in document.ids:
            raise ValueError(
                f"document {number} holds the draft's mask_token_id {mask_token_id} as a real token: choose an id "
                "that no text uses (a reserved or unused row of the target's embedding)"
            )


class _DrawAnchors(TrainerCallback):
    """Lets every epoch have anchors of its own."""

    def __init__(self, dataset: BlockDataset):
        self.dataset = dataset

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.dataset.start_epoch(int(state.epoch or 0))


class _SkipNonFiniteSteps(TrainerCallback):
    """Leaves out an update whose gradients are not finite, and gives up after several in a row."""

    def __init__(self):
        self.skipped = 0

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norms = torch.stack([gradient.norm() for gradient in gradients]) if gradients else torch.zeros(1)
        if norms.isfinite().all():
            self.skipped = 0
            return
        self.skipped += 1
        if self.skipped == _TOLERATED_STEPS:
            raise FloatingPointError(
                f"the gradients of {_TOLERATED_STEPS} steps in a row, up to step {state.global_step}, are not finite: "
                "lower the learning rate, or look for documents with odd tokens"
            )
        optimizer.zero_grad(set_to_none=True)


__all__ = [
    "BlockDataset",
    "DFlashTrainer",
    "DFlashTrainingArguments",
    "collate",
    "layers_to_read",
    "refuse_unfit_tokens",
    "trainable",
]

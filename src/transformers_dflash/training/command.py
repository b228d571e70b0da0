"""The command `transformers-dflash train`: from prompts or answers to a draft, with `Trainer`'s own options."""

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import InferenceClient
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, PreTrainedModel, set_seed

from ..configuration_dflash import DFlashDraftConfig, default_target_layer_ids
from ..hub.card import commit_of, is_hub_id
from ..modeling_dflash import DFlashDraftModel
from ..rows import read_rows
from ..target import Target
from .data import Document, encode
from .features import FeatureStore, bytes_per_token
from .regenerate import answer_by_server, answer_in_process, end_tokens, regenerate
from .start import start_from_target
from .trainer import DFlashTrainer, DFlashTrainingArguments, layers_to_read, refuse_unfit_tokens, trainable

PROGRAM = "transformers-dflash train"
DTYPES = ("bfloat16", "float16", "float32")
_LONGEST_ANSWER = 3600  # seconds
_LONGEST_PREPARATION = 14 * 24 * 3600  # seconds in which other processes wait for answers and features


def _option(help: str, default: Any = None, **more: Any) -> Any:
    return field(default=default, metadata={"help": help, **more})


@dataclass
class TrainOptions:
    """What to train, and on what.

    Args:
        target: folder or Hub id.
        prompts: files or data sets whose rows the target answers first, into `OUTPUT_DIR/answers.jsonl`.
        data: files or data sets whose rows hold the target's answers already.
        eval_data: the same, for evaluation; without it the last `eval_documents` of the others are held out.
    """

    target: str = _option("folder or Hub id of the target")
    prompts: list[str] | None = _option(
        "JSONL or parquet files or data sets on the Hub: the target answers them first"
    )
    data: list[str] | None = _option("the same, with the target's answers in them")
    eval_data: str | None = _option("answers to evaluate on; by default some of the others are held out")
    eval_documents: int = _option("how many documents to evaluate on", 16)
    max_length: int = _option("tokens after which a document is cut", 4096)
    gguf_file: str | None = _option("GGUF file inside the target's folder")
    target_dtype: str = _option("dtype of the target", "bfloat16")
    features: str | None = _option("folder for the target's states, written once instead of made in every step")

    draft: str | None = _option("folder or Hub id of a draft to go on from; by default a new one is made")
    num_layers: int = _option("layers of a new draft", 5)
    block_size: int | None = _option("slots of a block; by default 16, or that of --draft")
    num_taps: int = _option("target layers that a new draft reads", 5)
    taps: list[int] | None = _option("which ones; by default spread evenly")
    context_injection: str = _option("fused or layer_aligned, for a new draft", "fused")
    tap_norm: bool = _option("norm every tap of a new draft before it is injected", False)
    mask_token_id: int | None = _option("embedding row that no text uses; by default one is looked for")
    save_dtype: str = _option("dtype of the finished draft", "bfloat16")
    license: str | None = _option("licence of the draft, for its model card")
    lora_rank: int | None = _option("train adapters of this rank beside the draft given by --draft (needs peft)")

    server: str | None = _option(
        "URL of an OpenAI-compatible server that answers the prompts instead; its key is taken from OPENAI_API_KEY"
    )
    server_model: str | None = _option("the target's name there; by default that given by --target")
    answer_batch: int = _option("prompts answered at one time", 16)
    answer_new_tokens: int = _option("the most tokens of an answer", 1024)
    answer_temperature: float = _option("0 is greedy", 0.0)
    thinking: bool | None = _option("whether the target thinks; by default as its chat template has it")

    @property
    def template_options(self) -> dict[str, Any]:
        """What the chat template is told."""
        return {} if self.thinking is None else {"enable_thinking": self.thinking}


def train_command(arguments: Sequence[str]) -> int:
    """Run the command; what its user can mend ends in a ValueError or OSError of one sentence."""
    options, training = parse_options(arguments)
    if not options.target or not (options.prompts or options.data):
        raise ValueError("give --target, and --prompts for the target to answer or --data with its answers")
    if options.lora_rank is not None and options.draft is None:
        raise ValueError("--lora_rank adapts a draft that is there: name it with --draft")
    for name in ("max_length", "answer_batch", "answer_new_tokens", "num_taps"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(options, name)}")
    for name, known in (("target_dtype", ("auto", *DTYPES)), ("save_dtype", DTYPES)):  # needed after hours of training
        if getattr(options, name) not in known:
            raise ValueError(f"--{name} is one of {', '.join(known)}; got {getattr(options, name)!r}")
    if options.lora_rank is not None and find_spec("peft") is None:
        raise ValueError("--lora_rank needs the library peft: pip install 'peft>=0.17'")
    refuse_options_of_a_new_draft(options)
    output = Path(training.output_dir)
    gguf = {} if options.gguf_file is None else {"gguf_file": options.gguf_file}
    tokenizer = AutoTokenizer.from_pretrained(options.target, **gguf)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=options.target_dtype, **gguf)
    target = target.to(training.device).eval()

    # What may be refused comes before hours of answering.
    positions = target.config.get_text_config(decoder=True).to_dict().get("max_position_embeddings")
    max_length = min(options.max_length, positions or options.max_length)
    reading = {"tokenizer": tokenizer, "max_length": max_length, **options.template_options}
    documents = [document for source in options.data or () for document in read_documents(source, **reading)]
    if options.eval_data is not None:
        held_out = read_documents(options.eval_data, **reading)[: options.eval_documents]
    if options.draft is None:
        DFlashDraftConfig.from_target(target.config, options.mask_token_id or 0, **new_draft_fields(options, target))
    else:
        changed = {} if options.block_size is None else {"block_size": options.block_size}
        draft = DFlashDraftModel.from_pretrained(options.draft, dtype=torch.float32, **changed)
    if options.prompts:
        with training.main_process_first(local=False, desc="answering the prompts"):
            answer_prompts(options, output / "answers.jsonl", target, tokenizer)
        documents += read_documents(str(output / "answers.jsonl"), **reading)
    if options.eval_data is None:
        count = min(options.eval_documents, len(documents) // 10)
        documents, held_out = documents[: len(documents) - count], documents[len(documents) - count :]
    if options.draft is None:
        set_seed(training.seed)  # a run that is begun again, and every process of one, starts from the same weights
        draft = new_draft(options, target, tokenizer, [*documents, *held_out])
    draft.config.target_name_or_path = options.target
    draft.config.target_revision = commit_of(options.target)
    datasets = [name for name in (options.prompts or []) + (options.data or []) if is_hub_id(name)]
    facts = {"license": options.license, "datasets": datasets or None, "thinking": options.thinking}
    card = dict.fromkeys(facts) | (draft.config.model_card or {})  # of the draft that is gone on from
    draft.config.model_card = card | {name: value for name, value in facts.items() if value is not None}
    model = draft if options.lora_rank is None else with_adapters(draft, options.lora_rank)

    # The trainer does this too, but after hours of writing features.
    refuse_unfit_tokens([*documents, *held_out], draft.config.mask_token_id, Target(target).num_embeddings)
    print(describe(draft, model, documents, held_out), flush=True)
    trainer = DFlashTrainer(
        model,
        target,
        training,
        documents,
        held_out or None,
        train_features=None
        if options.features is None
        else store_features(options, draft, training, documents, target),
    )
    checkpoint = training.resume_from_checkpoint or last_checkpoint(output)
    refuse_other_draft(checkpoint, draft)
    trainer.train(resume_from_checkpoint=checkpoint)
    finished = trainer.whole_model()
    if trainer.is_world_process_zero():
        trainer.record()
        finished.to(getattr(torch, options.save_dtype)).save_pretrained(output)
        print(f"the draft is in {output}")
    if training.push_to_hub:
        trainer.push_to_hub()
    return 0


def parse_options(arguments: Sequence[str]) -> tuple[TrainOptions, DFlashTrainingArguments]:
    """What was asked for on the command line."""
    parser = HfArgumentParser((TrainOptions, DFlashTrainingArguments), prog=PROGRAM, description=__doc__)
    parser.set_defaults(ddp_timeout=_LONGEST_PREPARATION)
    # The other commands' name for it, which would be ambiguous.
    given = [re.sub(r"^--output(?=$|=)", "--output_dir", argument) for argument in arguments]
    options, training = parser.parse_args_into_dataclasses(given)
    return options, training


def refuse_options_of_a_new_draft(options: TrainOptions) -> None:
    """Refuse what would shape a new draft where one that exists is gone on from."""
    names = ("num_layers", "num_taps", "taps", "context_injection", "tap_norm", "mask_token_id")
    for name in names if options.draft is not None else ():
        if getattr(options, name) != getattr(TrainOptions(target=""), name):
            raise ValueError(f"--{name} shapes a new draft, and --draft names one that exists: leave one of them out")


def refuse_other_draft(checkpoint: Any, draft: DFlashDraftModel) -> None:
    """Refuse to resume from a checkpoint of a draft of another shape or for another target."""
    path = Path(checkpoint) / "config.json" if isinstance(checkpoint, str) else None
    if path is None or not path.is_file():  # of adapters
        return
    here, there = draft.config.to_dict(), DFlashDraftConfig.from_pretrained(path.parent).to_dict()
    for name in sorted(DFlashDraftConfig.__annotations__.keys() - {"model_card", "target_revision"}):
        if here.get(name) != there.get(name):
            raise ValueError(
                f"{path.parent} is of another run, {name} {there.get(name)} there and {here.get(name)} here: use "
                "another --output_dir, or the options of that run"
            )


def answer_prompts(options: TrainOptions, path: Path, target: PreTrainedModel, tokenizer: Any) -> None:
    """Let the target answer all prompts; goes on where an earlier run stood."""
    rows = [row for source in options.prompts for row in read_rows(source)]
    if not rows:
        raise ValueError(f"--prompts {' '.join(options.prompts)} holds no row: there is nothing to answer")
    more = {"max_new_tokens": options.answer_new_tokens, "temperature": options.answer_temperature}
    more |= options.template_options

    def answer(missing):
        if options.server is None:
            return answer_in_process(missing, target, tokenizer, batch_size=options.answer_batch, **more)
        # With no key of its own the client would send the user's Hub token to whatever server this is.
        key = os.environ.get("OPENAI_API_KEY") or "none"
        client = InferenceClient(base_url=options.server, api_key=key, timeout=_LONGEST_ANSWER)
        name = options.server_model or options.target
        return answer_by_server(missing, client, name, concurrency=options.answer_batch, **more)

    with tqdm(total=len(rows), desc="answers", unit="row") as bar:
        origin = [options.target, options.server_model, options.answer_temperature, options.answer_new_tokens]
        regenerate(rows, path, answer, bar.update, origin, **options.template_options)
    cut = sum("finish_reason" in row for row in read_rows(path))
    if cut:
        print(
            f"{path}: {cut} of {len(rows)} answers did not end within {options.answer_new_tokens} tokens and are left "
            "out: for more of them, raise --answer_new_tokens and use another output folder"
        )


def read_documents(source: str, tokenizer: Any, max_length: int, **template_options) -> list[Document]:
    """The documents of a source, cut to `max_length` tokens; those that hold nothing to learn are left out, and told.

    Args:
        source: see `read_rows`.
        tokenizer: the target's.
        max_length: in tokens.
        **template_options: for its chat template.

    Raises:
        ValueError: a row is of none of the known forms, or nothing is left.
    """
    kept, short, cut, too_long, rows = [], 0, 0, 0, 0
    for rows, row in enumerate(read_rows(source), 1):  # noqa: B007
        if "response" in row and not row["response"]:
            short += 1
            continue
        try:
            whole = encode(row, tokenizer, **template_options)
        except ValueError as error:
            raise ValueError(f"{source}, row {rows}: {error}") from error
        document = whole.cut(max_length)
        if trainable(document):
            kept.append(document)
            cut += len(whole.ids) > max_length
        elif trainable(whole):
            too_long += 1
        else:
            short += 1
    if not kept:
        raise ValueError(
            f"{source} holds no response of two tokens or more within the first {max_length}: there is nothing to "
            "learn from"
        )
    for count, what in (
        (short, "have no response of two tokens, left out"),
        (too_long, f"have a prompt that fills the {max_length} tokens of a document, left out"),
        (cut, f"are longer than {max_length} tokens, cut there"),
    ):
        if count:
            print(f"{source}: {count} of {rows} rows {what}")
    return kept


def new_draft_fields(options: TrainOptions, target: PreTrainedModel) -> dict[str, Any]:
    """The config fields that the options choose."""
    fields: dict[str, Any] = {"num_hidden_layers": options.num_layers, "block_size": options.block_size or 16}
    fields |= {"context_injection": options.context_injection, "tap_norm": options.tap_norm}
    if options.taps is not None:
        fields["target_layer_ids"] = options.taps
    elif options.context_injection == "fused":
        layers = target.config.get_text_config(decoder=True).num_hidden_layers
        fields["target_layer_ids"] = default_target_layer_ids(layers, options.num_taps)
    return fields


def new_draft(
    options: TrainOptions, target: PreTrainedModel, tokenizer: Any, documents: Sequence[Document]
) -> DFlashDraftModel:
    """An untrained draft for the target, that starts with its last layers if it can."""
    mask = options.mask_token_id
    if mask is None:
        mask = unused_token(target, tokenizer, documents)
    config = DFlashDraftConfig.from_target(target.config, mask, **new_draft_fields(options, target))
    draft = DFlashDraftModel(config)
    if start_from_target(draft, target, torch.tensor([documents[0].ids])):
        print("the new draft starts with the weights of the target's last layers", flush=True)
    else:
        print("the new draft starts with random weights, since its layers are not like the target's", flush=True)
    return draft


def unused_token(target: PreTrainedModel, tokenizer: Any, documents: Sequence[Document]) -> int:
    """An embedding row that no text uses: one past the tokenizer's, or a special token that is in no document.

    Raises:
        ValueError: there is none.
    """
    rows = Target(target).num_embeddings
    if rows > len(tokenizer):
        return len(tokenizer)
    used = {token for document in documents for token in document.ids}
    used |= {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}  # None where there is none
    used |= end_tokens(target)
    free = [id for id in sorted(tokenizer.added_tokens_decoder) if id not in used and id < rows]
    if not free:
        raise ValueError("the target's embedding has no row that no text uses: name one with --mask_token_id")
    return free[-1]


def with_adapters(draft: DFlashDraftModel, rank: int) -> Any:
    """The draft with LoRA on its projections; `fc`, norms and the small parts of DFlash 2 are trained whole."""
    from peft import LoraConfig, get_peft_model  # an extra

    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    whole = ["fc", "hidden_norm", "norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"]
    whole += ["tap_norm", "attention_conv", "mlp_conv", "candidate_selector", "lm_head"]
    names = {name.rpartition(".")[2] for name, _ in draft.named_modules()}
    return get_peft_model(
        draft,
        LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules=projections,
            modules_to_save=[name for name in whole if name in names],
        ),
    )


def store_features(options, draft, training, documents, target) -> FeatureStore:
    layers = layers_to_read(draft.config, training.loss_type)
    tokens = sum(len(document.ids) for document in documents)
    size = tokens * bytes_per_token(target, layers) / 2**30
    print(f"the target's states of {tokens} tokens take {size:.2f} GiB in {options.features}", flush=True)
    bar = tqdm(total=len(documents), desc="states", unit="document")
    with training.main_process_first(local=False, desc="states"), bar:
        return FeatureStore.build(options.features, documents, target, layers, bar.update)


def last_checkpoint(output: Path) -> str | None:
    """The newest checkpoint that is whole: what Trainer writes last is there."""
    whole = []
    for path in output.glob("checkpoint-*/trainer_state.json"):
        with suppress(ValueError):  # a torn file, as a full disk leaves it
            json.loads(path.read_text(encoding="utf-8"))
            whole.append(path.parent)
    return str(max(whole, key=lambda path: int(path.name.rpartition("-")[2]))) if whole else None


def describe(draft: DFlashDraftModel, model: nn.Module, documents: Sequence[Document], held_out: Sequence) -> str:
    """What is about to be trained, for the screen."""
    config = draft.config
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    tokens = sum(document.num_response_tokens for document in documents)
    return (
        f"{parameters / 1e6:.1f} million trainable parameters in {config.num_hidden_layers} layers, block "
        f"{config.block_size}, taps {config.target_layer_ids}, mask token {config.mask_token_id}; {len(documents)} "
        f"documents with {tokens} response tokens, {len(held_out)} held out"
    )


__all__ = ["TrainOptions", "parse_options", "train_command"]

"""The run of `transformers-dflash evaluate`: every prompt is answered by plain `generate` and by each draft in turn.

A finished answer is a line of `answers.jsonl`, so that a run that was cut goes on where it stood. `settings.json` says
what the answers were made with; a run with other settings is refused there. Where `torchrun` or `accelerate launch`
has started several processes, they share the prompts, each with models of its own and an `answers.RANK.jsonl`, and the
first one writes the report.
"""

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Iterator
from datetime import timedelta
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..hub.card import commit_of
from ..modeling_dflash import DFlashDraftModel
from ..rows import append_rows, chat_ids, whole_lines
from .measures import first_difference
from .page import render_html
from .prompts import digest, read_prompts
from .report import TIMES, build_report, comparison, flat_settings, read_report, table

PLAIN = "plain"  # the method without a draft
WARM_UP_TOKENS = 8
COUNTS = ("drafted_by_round", "accepted_by_round", "acceptance_lengths")

Key = tuple[str, int, str]  # data set, place of the prompt in it, method


class Evaluation:
    """One run into a folder, from its command's options. Making it reads the prompts and the folder, and no model.

    Args:
        options: of the command.
        device: the models'.

    Raises:
        ValueError: a prompt or a file cannot be had, or the folder holds a run with other settings.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device):
        self.options = options
        self.rank, self.world_size = join_processes()
        self.drafts = draft_names(options.draft)
        self.chats = read_prompts(options.data, options.limit)
        self.other = None
        if options.compare is not None:
            self.other = read_report(Path(options.compare), list(self.chats), list(self.drafts))
        self.settings = describe_settings(options, self.drafts, self.chats, device)
        self.settings["processes"] = self.world_size
        self.folder = Path(options.output)
        self.answers = self.folder / ("answers.jsonl" if self.rank == 0 else f"answers.{self.rank}.jsonl")
        try:
            if self.rank > 0:
                self._wait()  # for the first one, which makes the folder
            self.rows = self._open()
            if self.rank == 0:
                self._wait()
        except OSError as error:
            raise ValueError(
                f"--output {self.folder} cannot be written ({error.strerror}): name another folder"
            ) from error

    def _open(self) -> dict[Key, dict[str, Any]]:
        """The answers that are there already.

        Raises:
            ValueError: they were made with other settings.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "settings.json"
        answered = any(file.stat().st_size for file in self.folder.glob("answers*.jsonl"))
        if not path.exists():
            if answered:
                raise ValueError(f"--output {self.folder} has answers.jsonl and no settings.json: name another folder")
            write(path, json.dumps(self.settings, indent=2) + "\n")
            return {}
        try:
            there = json.loads(path.read_text(encoding="utf-8"))
            here, there = flat_settings(self.settings), flat_settings(there)
            others = [name for name in here | there if here.get(name) != there.get(name)]
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} holds no settings of a run: name another folder") from error
        if others and not answered and self.rank == 0:  # of an attempt that failed before its first answer
            write(path, json.dumps(self.settings, indent=2) + "\n")
        elif others:
            said = "; ".join(f"{name} {there.get(name)} there, {here.get(name)} here" for name in others)
            raise ValueError(
                f"--output {self.folder} holds a run with other settings ({said}): name another folder, or repeat its "
                "settings to go on"
            )
        return self._read()

    def _read(self) -> dict[Key, dict[str, Any]]:
        """The answers in the folder, those of all processes.

        Raises:
            ValueError: a line is none.
        """
        rows = {}
        for path in sorted(self.folder.glob("answers*.jsonl")):
            for number, line in enumerate(whole_lines(path), 1):
                try:
                    row = json.loads(line)
                    rows[row["dataset"], row["index"], row["method"]] = row
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"{path}, line {number} is no answer of a run: name another folder") from error
        return rows

    def _wait(self) -> None:
        """Until all processes have come here."""
        if self.world_size > 1:
            dist.barrier()

    def run(self, target: PreTrainedModel, tokenizer: Any, drafts: list[DFlashDraftModel]) -> str | None:
        """Answer what is missing and write the report.

        Args:
            drafts: in the order of the options.

        Returns:
            The report's numbers as a table for the screen; None on other processes than the first.

        Raises:
            ValueError: a draft does not serve this target.
        """
        models = dict(zip(self.drafts, drafts, strict=True))
        prompts = {
            (name, place): prompt_ids(chat, tokenizer, self.options.no_thinking)
            for name, chats in self.chats.items()
            for place, chat in chats.items()
        }
        self._wait()  # until all have read what is there
        self._answer(target, tokenizer, models, prompts)
        self._wait()
        if self.rank > 0:
            return None
        self.rows = self._read()
        gaps = self._gaps(target, models, prompts)
        report = build_report(
            self.settings | {"command": self.options.command},
            str(target.dtype).removeprefix("torch."),
            {name: list(chats) for name, chats in self.chats.items()},
            {name: draft.config.block_size for name, draft in models.items()},
            self.rows,
            gaps,
            tolerance=2 * torch.finfo(target.dtype).eps,
        )
        if self.other is not None:
            report["comparison"] = comparison(report, self.other)
        write(self.folder / "report.json", json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        write(self.folder / "report.html", render_html(report))
        return table(report)

    def _answer(
        self,
        target: PreTrainedModel,
        tokenizer: Any,
        drafts: dict[str, DFlashDraftModel],
        prompts: dict[tuple[str, int], list[int]],
    ) -> None:
        methods: dict[str, DFlashDraftModel | None] = {} if self.options.no_plain else {PLAIN: None}
        methods |= drafts
        own = list(prompts)[self.rank :: self.world_size]
        missing = [key for key in turns(own, list(methods)) if key not in self.rows]
        if missing:
            for draft in methods.values():
                self._generate(target, draft, prompts[missing[0][:2]], WARM_UP_TOKENS, seed=0)
        total = len(own) * len(methods)
        bar = tqdm(
            total=total, initial=total - len(missing), desc="answers", unit="answer", disable=self.rank > 0
        )  # the first process's own
        with bar:
            for key in missing:
                name, place, method = key
                seed = self.options.seed + place  # the same wherever a run was cut
                answer = self._generate(
                    target, methods[method], prompts[name, place], self.options.max_new_tokens, seed
                )
                answer["text"] = tokenizer.decode(answer["token_ids"], skip_special_tokens=True)
                self.rows[key] = {"dataset": name, "index": place, "method": method} | answer
                append_rows(self.answers, [self.rows[key]])
                bar.update()

    def _generate(
        self, target: PreTrainedModel, draft: DFlashDraftModel | None, ids: list[int], max_new_tokens: int, seed: int
    ) -> dict[str, Any]:
        """One answer: its tokens, its wall time, and with a draft what its rounds did."""
        options: dict[str, Any] = {"do_sample": self.options.temperature > 0, "max_new_tokens": max_new_tokens}
        if options["do_sample"]:  # all of it: what is not given would come from the target's own defaults
            top_p = 1.0 if self.options.top_p is None else self.options.top_p
            options |= {"temperature": self.options.temperature, "top_p": top_p, "top_k": 0}
        input_ids = torch.tensor([ids], device=target.device)  # (1, n)
        torch.manual_seed(seed)
        start = time.perf_counter()
        out = target.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            assistant_model=draft,
            return_dict_in_generate=True,
            **options,
        )
        token_ids = out.sequences[0, len(ids) :].tolist()  # waits for the device
        answer = {"seconds": time.perf_counter() - start, "prompt_tokens": len(ids), "token_ids": token_ids}
        if draft is not None:
            answer |= {name: getattr(out.speculation, name) for name in (*COUNTS, *TIMES.values())}
        return answer

    def _gaps(
        self,
        target: PreTrainedModel,
        drafts: dict[str, DFlashDraftModel],
        prompts: dict[tuple[str, int], list[int]],
    ) -> dict[Key, float]:
        """How close a tie every parting of a greedy answer from the plain one is."""
        if self.options.no_plain or self.options.temperature > 0:
            return {}
        gaps = {}
        for (name, index), ids in prompts.items():
            plain = self.rows[name, index, PLAIN]["token_ids"]
            for method in drafts:
                answer = self.rows[name, index, method]["token_ids"]
                if (place := first_difference(answer, plain)) is not None:
                    gaps[name, index, method] = parting_gap(target, ids, answer, plain, place)
        return gaps


def join_processes() -> tuple[int, int]:
    """This process's number, and how many there are, as `torchrun` or `accelerate launch` has started them."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return 0, 1
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(days=30))  # the last answer may take a while
    return dist.get_rank(), dist.get_world_size()


def turns(prompts: list[tuple[str, int]], methods: list[str]) -> Iterator[Key]:
    """Every prompt by every method; the methods take turns in being the first."""
    for number, (name, place) in enumerate(prompts):
        first = number % len(methods)
        for method in methods[first:] + methods[:first]:
            yield name, place, method


@torch.no_grad()
def parting_gap(target: PreTrainedModel, ids: list[int], answer: list[int], plain: list[int], place: int) -> float:
    """How far the worse of the tokens where two answers part lies below the target's best score, over its magnitude.

    Scores are the logits as the target's own processors leave them, such as its `repetition_penalty`.

    Args:
        ids: the prompt.
        place: of the first difference; inf where one answer ends there.
    """
    if place >= min(len(answer), len(plain)):
        return math.inf
    context = torch.tensor([ids + plain[:place]], device=target.device)
    options = {"do_sample": False, "max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
    out = target.generate(context, attention_mask=torch.ones_like(context), **options)
    scores = out.scores[0][0].float()  # (V,)
    best = scores.max()
    return float((best - scores[[answer[place], plain[place]]].min()) / best.abs())


def prompt_ids(chat: list[dict[str, Any]], tokenizer: Any, no_thinking: bool) -> list[int]:
    """Token ids of a chat, opened for the answer; without a chat template those of a single message's text.

    Raises:
        ValueError: the tokenizer has no chat template and the chat is more than one message's text; or its template
            refuses the chat.
    """
    if not tokenizer.chat_template and len(chat) == 1 and isinstance(chat[0].get("content"), str):
        return tokenizer(chat[0]["content"])["input_ids"]
    return chat_ids(chat, tokenizer, **({"enable_thinking": False} if no_thinking else {}))


def draft_names(drafts: list[str | Path]) -> dict[str, str]:
    """The drafts by the names that reports give them: a Hub id, or a folder's last part.

    Raises:
        ValueError: two have the same.
    """
    names: dict[str, str] = {}
    for draft in map(str, drafts):
        name = os.path.basename(os.path.abspath(draft)) if Path(draft).is_dir() else draft
        if name in names or name == PLAIN:
            raise ValueError(f"--draft {draft} would be called {name}, which another method is: rename the folder")
        names[name] = draft
    return names


def describe_settings(
    options: argparse.Namespace, drafts: dict[str, str], chats: dict[str, dict[int, Any]], device: torch.device
) -> dict[str, Any]:
    """All that the answers and their times depend on, as JSON holds it."""
    names = ["dtype", "limit", "max_new_tokens", "temperature", "top_p", "seed", "gguf_file"]
    names += ["num_assistant_tokens", "tree_budget", "assistant_confidence_threshold"]
    return {
        "target": str(options.target),
        "drafts": drafts,
        "target_state": state_of(str(options.target)),
        "draft_states": {name: state_of(place) for name, place in drafts.items()},
        "data": {name: f"{len(own)} prompts, {digest(own)}" for name, own in chats.items()},
        **{name: getattr(options, name) for name in names},
        "plain": not options.no_plain,
        "thinking": "off" if options.no_thinking else "as the chat template has it",
        "batch_size": 1,
        "device": describe_device(device),
        "versions": {name: installed(name) for name in ("transformers-dflash", "transformers", "torch")},
        "python": platform.python_version(),
    }


def state_of(name: str) -> str | None:
    """A short text that changes when a folder's files are written anew, or a Hub repository gets another commit; None
    where there is neither, which loading will say."""
    if not Path(name).is_dir():
        return commit_of(name)
    # All that may bear on answers: weights, configs, tokenizers, chat templates.
    files = [path for path in sorted(Path(name).iterdir()) if path.is_file() and path.suffix != ".md"]
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return sha256(repr(stats).encode()).hexdigest()[:12]


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type  # without its number, which differs by process
    threads = torch.get_num_threads()
    return f"{threads} {'thread' if threads == 1 else 'threads'} of {cpu_name()}"


def cpu_name() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{named[0]} ({platform.machine()})" if named else f"a {platform.machine()} CPU"


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its source
        return "from source"


def write(path: Path, text: str) -> None:
    """A file that is there whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


__all__ = ["Evaluation"]

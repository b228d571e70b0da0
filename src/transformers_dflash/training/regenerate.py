"""Let the target write the responses that a draft is trained on.

A draft learns to guess its target, not a data set: answers of other origin teach it tokens that the target would not
write. Rows go to a JSONL file as they are finished, so that a run that was cut goes on where it stood.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import InferenceClient
from transformers import PreTrainedModel

from ..rows import append_rows, chat_ids, prompt_messages, whole_lines


def end_tokens(model: PreTrainedModel) -> set[int | None]:
    """The tokens that end a model's answer."""
    ends = model.generation_config.eos_token_id
    return set(ends if isinstance(ends, list) else [ends])


def mark(row: dict[str, Any], template_options: dict[str, Any] | None = None, origin: Any = None) -> str:
    """A short text that tells a row's prompt, what the chat template is told, and who answers, from others."""
    asked = [prompt_messages(row), template_options or None, origin]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:12]


class ResponseFile:
    """Answered rows as JSON lines, each with the `index` of its prompt and a `mark` that tells prompts apart.

    Args:
        path: of the file. What it holds already is kept, but for a last line that was cut off.

    Raises:
        ValueError: a line is none of this kind.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.done: dict[int, str] = {}  # index: the prompt's mark
        if not self.path.is_file():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return
        for number, line in enumerate(whole_lines(self.path), 1):
            try:
                row = json.loads(line)
                self.done[row["index"]] = row["mark"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{self.path}, line {number} is no answered row with `index` and `mark`: move the file "
                    "away, or name another one"
                ) from None

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows and see them on the disk."""
        append_rows(self.path, rows)
        self.done.update({row["index"]: row["mark"] for row in rows})


def regenerate(
    rows: Sequence[dict[str, Any]],
    path: str | os.PathLike,
    answer: Callable[[list[tuple[int, dict[str, Any]]]], Iterator[list[dict[str, Any]]]],
    progress: Callable[[int], None] | None = None,
    origin: Any = None,
    **template_options,
) -> None:
    """Answer all rows that `path` does not hold yet.

    Args:
        rows: see `prompt_messages`.
        path: a JSONL file.
        answer: takes what is missing, as pairs of index and row, and gives lists of answered rows:
            `answer_in_process` or `answer_by_server`, with their first arguments filled in.
        progress: called with the number of rows that were just finished.
        origin: what answers, and how, as JSON can hold it: answers of another origin are refused.
        **template_options: that `answer` gives the chat template, such as `enable_thinking`.

    Raises:
        ValueError: the file holds answers to other prompts, or of another origin.
    """
    file = ResponseFile(path)
    marks = [mark(row, template_options, origin) for row in rows]
    for index, found in file.done.items():
        if index >= len(rows) or found != marks[index]:
            raise ValueError(
                f"{path} holds an answer to another prompt than row {index + 1} of these, or by another target, or "
                "with other options: name another file or output folder, or move this one away"
            )
    if progress is not None and file.done:
        progress(len(file.done))
    missing = [(index, row) for index, row in enumerate(rows) if index not in file.done]
    for finished in answer(missing):
        file.add([row | {"mark": marks[row["index"]]} for row in finished])
        if progress is not None:
            progress(len(finished))


@torch.no_grad()
def answer_in_process(
    missing: list[tuple[int, dict[str, Any]]],
    model: PreTrainedModel,
    tokenizer: Any,
    batch_size: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    **template_options,
) -> Iterator[list[dict[str, Any]]]:
    """Answer in batches with the target at hand; rows hold `prompt` and `response` as token ids.

    A response that ended by itself ends with its end token; one that was cut at `max_new_tokens` does not.
    """
    encoded = [(index, chat_ids(prompt_messages(row), tokenizer, **template_options)) for index, row in missing]
    ends = end_tokens(model)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(ends))
    # A reproducible draw whatever was answered before: every batch is seeded by its first row.
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    for start in range(0, len(encoded), batch_size):
        batch = encoded[start : start + batch_size]
        longest = max(len(ids) for _, ids in batch)
        input_ids = torch.tensor([[padding] * (longest - len(ids)) + ids for _, ids in batch])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for _, ids in batch])
        torch.manual_seed(batch[0][0])
        output = model.generate(
            input_ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max_new_tokens,
            pad_token_id=padding,
            **sampling,
        )[:, longest:].tolist()
        finished = []
        for (index, ids), response in zip(batch, output, strict=True):
            end = next((place + 1 for place, token in enumerate(response) if token in ends), len(response))
            finished.append({"index": index, "prompt": ids, "response": response[:end]})
        yield finished


def answer_by_server(
    missing: list[tuple[int, dict[str, Any]]],
    client: InferenceClient,
    model: str,
    concurrency: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    **template_options,
) -> Iterator[list[dict[str, Any]]]:
    """Answer by an OpenAI-compatible server (vLLM, SGLang, llama.cpp), many at a time; rows hold `messages`.

    An answer that did not end by itself is not kept, since a chat template would end it: such a row holds the
    `finish_reason`, and an empty `response`. What the server tells apart as reasoning is kept as `reasoning_content`,
    where templates look for it.

    Raises:
        RuntimeError: a request failed; what was answered before it is kept.
    """

    def ask(index: int, row: dict[str, Any]) -> dict[str, Any]:
        messages = prompt_messages(row)
        reply = client.chat_completion(
            messages,
            model=model,
            max_tokens=max_new_tokens,
            temperature=temperature,
            extra_body={"chat_template_kwargs": template_options} if template_options else None,
        )
        choice = reply.choices[0]
        if choice.finish_reason != "stop" or choice.message.content is None:
            return {"index": index, "messages": messages, "response": "", "finish_reason": choice.finish_reason}
        answer = {"role": "assistant", "content": choice.message.content}
        # vLLM's name, and that of SGLang and older ones of vLLM
        if reasoning := choice.message.get("reasoning") or choice.message.get("reasoning_content"):
            answer["reasoning_content"] = reasoning
        return {"index": index, "messages": [*messages, answer], "learn": "last"}  # other turns may be anybody's

    waiting = iter(missing)
    with ThreadPoolExecutor(concurrency) as pool:
        running: set[Future] = set()
        while True:
            for index, row in waiting:
                running.add(pool.submit(ask, index, row))
                if len(running) == concurrency:
                    break
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            failed = next((one.exception() for one in done if one.exception() is not None), None)
            if answered := [one.result() for one in done if one.exception() is None]:
                yield answered
            if failed is not None:
                for one in running:
                    one.cancel()
                done, _ = wait(running)  # for what is being answered
                if late := [one.result() for one in done if not one.cancelled() and one.exception() is None]:
                    yield late
                raise RuntimeError(
                    f"the server did not answer ({type(failed).__name__}: {failed}): see to it and run again, the "
                    "answers so far are kept"
                ) from failed


__all__ = [
    "ResponseFile",
    "answer_by_server",
    "answer_in_process",
    "end_tokens",
    "mark",
    "regenerate",
]

"""Rows of prompts and answers: read from files and data sets, asked as chats, and written line by line."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError


def read_rows(source: str | Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL or parquet file, or of the train split of a data set on the Hub.

    Raises:
        ValueError: a line is no JSON object, which it names, or a file is damaged.
        FileNotFoundError: there is no such file, and `source` is no Hub id.
    """
    path = Path(source)
    if path.suffix in (".jsonl", ".json"):
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(_decoded(lines, path), 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(
                        f"{path}, line {number} is no JSON ({error}): one object a line is expected"
                    ) from None
                if not isinstance(row, dict):
                    raise ValueError(f"{path}, line {number} holds a {type(row).__name__} where an object belongs")
                yield row
        return
    from datasets import load_dataset  # seconds to import, and only needed here
    from datasets.exceptions import DatasetBuildError

    if path.suffix != ".parquet":
        yield from load_dataset(str(source), split="train")
        return
    try:
        yield from load_dataset("parquet", data_files=str(path), split="train")
    except (DatasetBuildError, ValueError) as error:  # pyarrow's own are of the second kind
        reason = str(error.__cause__ or error).strip().split("\n")[0].rstrip(".")
        raise ValueError(f"{path} cannot be read as parquet ({reason}): write it anew") from error


def _decoded(lines: Iterator[str], path: Path) -> Iterator[str]:
    try:
        yield from lines
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: convert it first") from error


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that grows line by line; a last one that was cut off while it was written is cut away."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
    return content[:end].split(b"\n")[:-1]


def append_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append rows to a JSONL file and see them on the disk."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def prompt_messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The chat that a row asks the target to answer: its `messages` up to the last one of the user, or its `prompt`.

    Raises:
        ValueError: the row holds neither.
    """
    if "messages" in row:
        messages = list(row["messages"])
        known = all(isinstance(message, dict) and "role" in message for message in messages)
        while known and messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if known and messages:
            return messages
    elif isinstance(row.get("prompt"), str) and row["prompt"]:
        return [{"role": "user", "content": row["prompt"]}]
    raise ValueError(
        f"a row needs `messages` with a user's turn, or a `prompt` that is not empty; it has {sorted(row)}"
    )


def chat_ids(messages: Sequence[dict[str, Any]], tokenizer: Any, prompt: bool = True, **template_options) -> list[int]:
    """Token ids of a chat; with the opening of the next answer if it is a `prompt`.

    Raises:
        ValueError: the tokenizer has no chat template, or its template refuses the chat.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "the target's tokenizer has no chat template: give rows with `prompt` and `response` as token ids, or set "
            "tokenizer.chat_template"
        )
    options = {"add_generation_prompt": prompt, "return_dict": True} | template_options
    try:
        return tokenizer.apply_chat_template(messages, **options)["input_ids"]
    except (TemplateError, TypeError) as error:  # as of roles that it does not know, their order, or lists for text
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise ValueError(f"the chat template refuses a chat with the roles {roles} ({error}): change it") from error


__all__ = ["append_rows", "chat_ids", "prompt_messages", "read_rows", "whole_lines"]

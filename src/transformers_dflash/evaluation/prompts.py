"""Prompts to evaluate on: known sets of the Hub, files, and a few of our own for where there is no network."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HTTPError

from ..rows import prompt_messages, read_rows

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".json", ".parquet")
SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"


def _alpaca(row: Row) -> str:
    return f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"]


# For each name what `datasets.load_dataset` takes, and what of a row is the prompt: a field or a function.
HUB_SETS: dict[str, tuple[dict[str, str], str | Callable[[Row], str]]] = {
    "gsm8k": ({"path": "openai/gsm8k", "name": "main", "split": "test"}, "question"),
    "math500": ({"path": "HuggingFaceH4/MATH-500", "split": "test"}, "problem"),
    "humaneval": ({"path": "openai/openai_humaneval", "split": "test"}, "prompt"),
    "mbpp": ({"path": "google-research-datasets/mbpp", "name": "sanitized", "split": "test"}, "prompt"),
    "mt-bench": ({"path": "HuggingFaceH4/mt_bench_prompts", "split": "train"}, "prompt"),
    "alpaca": ({"path": "tatsu-lab/alpaca", "split": "train"}, _alpaca),
    "spec-bench": ({"path": "json", "data_files": SPEC_BENCH, "split": "train"}, "turns"),
}

BUILTIN = (
    "A baker sells 36 rolls in the morning and twice as many in the afternoon. Each roll costs 40 cents. How much "
    "money does she take in on that day?",
    "A train leaves at 9:40 and arrives at 13:05 after two stops of 10 minutes each. How long was it moving?",
    "Write a Python function that returns the second largest number of a list, and say what it does with duplicates.",
    "Explain what this prints and why:\n\nwords = ['pear', 'fig', 'apple']\nprint(sorted(words, key=len)[0])",
    "I have a free Saturday in a small town by the sea and no car. Suggest a plan for the day.",
    "My neighbour plays loud music late at night. Write a short, friendly note that asks for quiet after ten.",
    "Translate into French: The library opens at nine, but on Sundays it stays closed until noon.",
    "Summarise in one sentence: Bees find flowers by colour and scent. Back in the hive they dance, and the dance "
    "tells the others how far to fly and in which direction. On cloudy days they read the direction from polarised "
    "light, which people cannot see. A hive that is moved has to learn its surroundings anew, which takes a few days.",
)


def read_prompts(sources: list[str], limit: int | None = None) -> dict[str, dict[int, list[Row]]]:
    """The chats to answer.

    Args:
        sources: `builtin`, names of `HUB_SETS`, or JSONL and parquet files whose rows hold `prompt`, `question`,
            `messages` or `turns`; of several turns the first is asked.
        limit: prompts taken of each set, spread evenly over it; None: all.

    Returns:
        For each set, by name or by its file's, the chats by their place in the set, from 0.

    Raises:
        ValueError: a source is unknown, cannot be had, is empty or holds a row without a prompt.
    """
    sets: dict[str, dict[int, list[Row]]] = {}
    for source in sources:
        name = Path(source).stem if Path(source).suffix in SUFFIXES else source
        if name in sets:
            raise ValueError(
                f"--data {source} is the second set with the name {name}: give each once, or rename a file"
            )
        rows = list(_rows(source))
        if not rows:
            raise ValueError(f"--data {source} holds no prompt: give one with rows")
        count = len(rows) if limit is None else min(limit, len(rows))
        chats = {}
        for place in (number * len(rows) // count for number in range(count)):
            try:
                chats[place] = _chat(rows[place])
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(
                    f"--data {source}, row {place + 1} holds no prompt, question, messages or turns with text in it: "
                    f"it has {sorted(rows[place])}"
                ) from error
        sets[name] = chats
    return sets


def digest(chats: dict[int, list[Row]]) -> str:
    """A short text that tells sets of chats apart."""
    return hashlib.sha256(json.dumps(list(chats.items())).encode()).hexdigest()[:12]


def _rows(source: str) -> list[Row]:
    if source == "builtin":
        return [{"prompt": text} for text in BUILTIN]
    if Path(source).suffix not in SUFFIXES and source not in HUB_SETS:
        known = ", ".join(["builtin", *HUB_SETS])
        raise ValueError(f"--data {source} is no set that is known: take one of {known}, or a JSONL or parquet file")
    try:
        if source not in HUB_SETS:
            return list(read_rows(source))
        from datasets import load_dataset  # an extra, and seconds to import

        where, prompt = HUB_SETS[source]
        rows = load_dataset(**where)
        return [{"prompt": prompt(row) if callable(prompt) else row[prompt]} for row in rows]
    except ImportError as error:
        raise ValueError(
            f"--data {source} needs the library datasets: pip install 'datasets>=3', or give a JSONL file"
        ) from error
    except (OSError, HTTPError) as error:
        reason = getattr(error, "strerror", None) or str(error).strip().split("\n")[0].rstrip(".")
        mend = "see to the network, or give a file" if source in HUB_SETS else "check the path"
        raise ValueError(f"--data {source} cannot be read ({reason}): {mend}") from error


def _chat(row: Row) -> list[Row]:
    if "messages" not in row:
        prompt = row.get("prompt") or row.get("question") or row["turns"]
        row = {"prompt": prompt if isinstance(prompt, str) else prompt[0]}
    return prompt_messages(row)


__all__ = ["BUILTIN", "HUB_SETS", "digest", "read_prompts"]

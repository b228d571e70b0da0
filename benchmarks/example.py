"""What the benchmarks share: the example's models, held-out prompts, and words for the machine."""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import transformers_dflash
from transformers_dflash.cli import find_example


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", type=Path, help="write the figures here too")


def load(dtype: str) -> tuple[Any, Any, Any]:
    """The tokenizer, which pads on the left, the target and the draft."""
    folder, file, draft_folder = find_example()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file, padding_side="left")
    target = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype)
    return tokenizer, target, AutoModel.from_pretrained(draft_folder, dtype=dtype)


def questions(name: str = "gsm8k", count: int | None = None) -> list[str]:
    """The first of a set's held-out prompts."""
    lines = (Path(__file__).parent / f"{name}_heldout.jsonl").open()
    return [json.loads(line)["question"] for line in lines][:count]


def versions() -> str:
    return (
        f"torch {torch.__version__}, transformers {transformers.__version__}, transformers-dflash "
        f"{transformers_dflash.__version__}"
    )


def machine() -> str:
    return f"{torch.get_num_threads()} threads of a {platform.machine()} CPU, {versions()}"


def write(figures: Any, path: Path | None) -> None:
    """Figures as JSON, if a file for them was named."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n")

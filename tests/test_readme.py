"""The README's snippets run: its models' names stand for SmolLM2 and its draft, saved to folders."""

import copy
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REAL_DRAFT, REPO
from transformers import AutoModelForCausalLM

README = (REPO / "README.md").read_text()
TARGET_ID, DRAFT_ID = "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"

pytestmark = pytest.mark.real


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def with_local_names(smollm2, tmp_path_factory):
    """Replaces the names of a snippet's models by local folders."""
    model, tokenizer = smollm2
    folder = tmp_path_factory.mktemp("target")
    config = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)  # of the GGUF file: the model itself holds plain weights
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return lambda text: text.replace(DRAFT_ID, str(REAL_DRAFT)).replace(TARGET_ID, str(folder))


def test_python_snippets_run_one_after_the_other(with_local_names, capsys):
    snippets = blocks("python")
    assert len(snippets) >= 8
    assert TARGET_ID in snippets[0]
    assert DRAFT_ID in snippets[0]
    names: dict = {}
    for number, snippet in enumerate(snippets):
        exec(compile(with_local_names(snippet), f"README.md, python block {number + 1}", "exec"), names)
    printed = capsys.readouterr().out
    assert "candidates accepted in" in printed
    assert names["config"].context_injection == "layer_aligned"


def commands() -> list[str]:
    return [line for block in blocks("bash") for line in block.splitlines() if "transformers-dflash generate" in line]


@pytest.mark.parametrize("command", commands(), ids=lambda command: f"{len(shlex.split(command))} words")
def test_commands_run(command, with_local_names):
    program = Path(sys.executable).with_name("transformers-dflash")
    line = with_local_names(command).replace("transformers-dflash generate", f"{program} generate", 1)
    done = subprocess.run(line, shell=True, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_commands_are_found():
    assert len(commands()) >= 2


def test_make_targets_exist():
    targets = re.findall(r"^make (\S+)", "\n".join(blocks("bash")), flags=re.MULTILINE)
    rules = re.findall(r"^([\w-]+):", (REPO / "Makefile").read_text(), flags=re.MULTILINE)
    assert targets
    assert set(targets) <= set(rules)

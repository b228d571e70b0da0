"""What the README shows runs: its models' names stand for SmolLM2 and its draft, saved to folders."""

import functools
import re
import shlex
import subprocess
import sys
from dataclasses import fields

import pytest
from conftest import REAL_DRAFT, REPO
from test_cli import ENVIRONMENT, PROGRAM, save_target
from transformers import AutoModel

from transformers_dflash.training.command import TrainOptions, parse_options

README = (REPO / "README.md").read_text()
TARGET_ID, DRAFT_ID = "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


COMMANDS = re.findall(r"^.*transformers-dflash generate.*$", "\n".join(blocks("bash")), flags=re.MULTILINE)


@pytest.fixture(scope="module")
def with_local_names(loaded_smollm2, tmp_path_factory):
    """Replaces the names of a snippet's models by local folders, and 512 new tokens by fewer."""
    folder = tmp_path_factory.mktemp("target")
    save_target(loaded_smollm2, folder)
    replaced = {DRAFT_ID: str(REAL_DRAFT), TARGET_ID: str(folder), "max_new_tokens=512": "max_new_tokens=48"}
    return lambda text: functools.reduce(lambda text, names: text.replace(*names), replaced.items(), text)


@pytest.mark.real
def test_python_snippets_run_one_after_the_other(with_local_names, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # some write folders
    snippets = blocks("python")
    assert len(snippets) >= 8
    assert TARGET_ID in snippets[0]
    assert DRAFT_ID in snippets[0]
    names: dict = {}
    for number, snippet in enumerate(snippets, 1):
        exec(compile(with_local_names(snippet), f"README.md, python block {number}", "exec"), names)
    assert "candidates accepted in" in capsys.readouterr().out
    assert names["speculation"].acceptance_length > 1
    assert names["config"].context_injection == "layer_aligned"


@pytest.mark.real
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{len(shlex.split(command))}-words")
def test_commands_run(command, with_local_names):
    line = with_local_names(command).replace("transformers-dflash generate", f"{PROGRAM} generate", 1)
    line += " --max-new-tokens 32"  # the last one counts
    pipes = {"capture_output": True, "stdin": subprocess.DEVNULL, "env": ENVIRONMENT}
    done = subprocess.run(line, shell=True, text=True, timeout=300, **pipes)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.real
def test_a_draft_is_measured(with_local_names, tmp_path):
    (command,) = re.findall(
        r"^transformers-dflash evaluate --target.*\n.*$", "\n".join(blocks("bash")), flags=re.MULTILINE
    )
    line = with_local_names(command).replace("transformers-dflash", PROGRAM, 1)
    line = re.sub(r"--data .* --limit 32", "--data builtin --limit 1 --max-new-tokens 8", line)  # without a network
    pipes = {"capture_output": True, "stdin": subprocess.DEVNULL, "env": ENVIRONMENT, "cwd": tmp_path}
    done = subprocess.run(line, shell=True, text=True, timeout=300, **pipes)
    assert done.returncode == 0, done.stderr
    assert "builtin        1" in done.stdout
    assert (tmp_path / "report" / "report.html").is_file()


@pytest.mark.real
def test_the_draft_is_converted(with_local_names, tmp_path):
    (command,) = re.findall(r"^transformers-dflash convert.*$", "\n".join(blocks("bash")), flags=re.MULTILINE)
    line = with_local_names(command).replace("transformers-dflash", PROGRAM, 1)
    pipes = {"capture_output": True, "stdin": subprocess.DEVNULL, "env": ENVIRONMENT, "cwd": tmp_path}
    done = subprocess.run(line, shell=True, text=True, timeout=300, **pipes)
    assert done.returncode == 0, done.stderr
    assert AutoModel.from_pretrained(tmp_path / "served").config.block_size == 8


@pytest.mark.real
def test_the_quickstart_chats():
    command = [sys.executable, str(REPO / "examples" / "quickstart.py")]
    chat = "What is 2 plus 3?\nAnd 1 more?\n\n"
    done = subprocess.run(command, input=chat, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" a round]") == 2


def test_options_of_training_exist():
    (command,) = re.findall(
        r"transformers-dflash train (.*?)\n\S", "\n".join([*blocks("bash"), "end"]), flags=re.DOTALL
    )
    options, training = parse_options([*shlex.split(command.replace("\\\n", " ")), "--use_cpu"])
    assert options.prompts == ["prompts.jsonl"]
    assert training.loss_type == "dpace"
    named = re.findall(r"`(--\w+)", README[README.index("## Training") : README.index("## How it differs")])
    assert len(named) >= 8
    known = {f"--{one.name}" for one in (*fields(TrainOptions), *fields(type(training)))}
    assert set(named) <= known


def test_every_command_is_found():
    assert len(COMMANDS) == README.count("transformers-dflash generate")


def test_make_targets_exist():
    targets = re.findall(r"^make (\S+)", "\n".join(blocks("bash")), flags=re.MULTILINE)
    rules = re.findall(r"^([\w-]+):", (REPO / "Makefile").read_text(), flags=re.MULTILINE)
    assert targets
    assert set(targets) <= set(rules)

"""What the README and the pages of docs/ show runs: the models' names stand for SmolLM2 and its draft in folders."""

import ast
import functools
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import fields
from io import StringIO

import pytest
import torch
from conftest import REAL_DRAFT, REPO
from test_cli import ENVIRONMENT, PROGRAM, save_target
from transformers import AutoModel

import transformers_dflash
from transformers_dflash import hub, training
from transformers_dflash.training.command import TrainOptions, parse_options

README = (REPO / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in sorted((REPO / "docs").glob("*.md"))}
TARGET_ID, DRAFT_ID = "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def run_blocks(snippets: list[str], page: str, names: dict) -> None:
    """Run snippets one after the other, in a namespace that they fill."""
    for number, snippet in enumerate(snippets, 1):
        exec(compile(snippet, f"{page}, python block {number}", "exec"), names)


COMMANDS = re.findall(r"^.*transformers-dflash generate.*$", "\n".join(blocks("bash")), flags=re.MULTILINE)


@pytest.fixture(scope="module")
def with_local_names(loaded_smollm2, tmp_path_factory):
    """Replaces the names of a snippet's models by local folders, and numbers of new tokens by fewer."""
    folder = tmp_path_factory.mktemp("target")
    save_target(loaded_smollm2, folder, torch.float32)  # on old processors bfloat16 takes several times as long
    replaced = {DRAFT_ID: str(REAL_DRAFT), TARGET_ID: str(folder)}
    replaced |= {"max_new_tokens=512": "max_new_tokens=48", "max_new_tokens=64": "max_new_tokens=24"}
    return lambda text: functools.reduce(lambda text, names: text.replace(*names), replaced.items(), text)


@pytest.mark.real
def test_python_snippets_run_one_after_the_other(with_local_names, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # some write folders
    snippets = blocks("python")
    assert len(snippets) >= 8
    assert TARGET_ID in snippets[0]
    assert DRAFT_ID in snippets[0]
    names: dict = {}
    run_blocks([with_local_names(snippet) for snippet in snippets], "README.md", names)
    assert "candidates accepted in" in capsys.readouterr().out
    assert names["speculation"].acceptance_length > 1
    assert names["config"].context_injection == "layer_aligned"


@pytest.fixture(scope="module")
def quickstart(with_local_names) -> dict:
    """What docs/index.md defines, on which the other pages build, and what it printed."""
    names: dict = {}
    snippets = [with_local_names(snippet) for snippet in blocks("python", PAGES["index.md"])]
    assert len(snippets) >= 2
    with redirect_stdout(StringIO()) as said:
        run_blocks([shortened(snippet) for snippet in snippets], "index.md", names)
    return names | {"said": said.getvalue()}


def given(options) -> dict:
    return {name: value for name, value in options.to_dict().items() if value is not None}


def shortened(snippet: str) -> str:
    """With few new tokens, so that all pages take seconds."""
    return re.sub(r"max_new_tokens=\d+", "max_new_tokens=12", snippet)


@pytest.mark.real
def test_the_quickstart_page_runs(quickstart):
    assert re.search(r"^[\d.]+ tokens in each of \d+ rounds$", quickstart["said"], flags=re.MULTILINE)
    assert quickstart["out"].speculation.acceptance_length >= 1


@pytest.mark.real
@pytest.mark.parametrize("page", [name for name in PAGES if name != "index.md" and blocks("python", PAGES[name])])
def test_snippets_of_a_page_run_after_the_quickstart(page, quickstart, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # some write folders
    names, options = dict(quickstart), quickstart["draft"].generation_config
    before = given(options)
    run_blocks([shortened(snippet) for snippet in blocks("python", PAGES[page])], page, names)
    assert given(options) == before  # what a page sets it takes back


def test_no_snippet_of_the_pages_is_left_out():
    marked = sum(len(re.findall(r"^ *[`~]{3,} *(?:python|py)\b", text, flags=re.MULTILINE)) for text in PAGES.values())
    assert marked == sum(len(blocks("python", text)) for text in PAGES.values()) >= 8


def test_every_public_name_is_in_the_reference():
    shown = re.findall(r"^::: transformers_dflash\.(?:\w+\.)?(\w+)$", PAGES["api.md"], flags=re.MULTILINE)
    assert set(shown) == {*transformers_dflash.__all__, *training.__all__, *hub.__all__, "load"}
    assert len(shown) == len(set(shown))


def messages_in_the_source() -> list[re.Pattern]:
    """Patterns of the texts in the package's source; what is filled in may be anything."""
    patterns = []
    for path in (REPO / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            known = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            said = [part for part in known if isinstance(part, str)]
            if len("".join(said)) >= 20:
                pattern = "".join(re.escape(part) if isinstance(part, str) else ".*" for part in known)
                patterns.append(re.compile(pattern))
    return patterns


def test_faults_quote_real_messages():
    quoted = [text.strip() for text in blocks("text", PAGES["faults.md"])]
    patterns = messages_in_the_source()
    assert len(quoted) >= 20
    for message in quoted:
        assert any(pattern.fullmatch(message) for pattern in patterns), message
    assert not any(pattern.fullmatch("the draft taps layer 35, and the target has 28") for pattern in patterns)


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
    command = [sys.executable, str(REPO / "examples" / "quickstart.py"), "--max-new-tokens", "12"]
    chat = "What is 2 plus 3?\nAnd 1 more?\n\n"
    done = subprocess.run(command, input=chat, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" a round]") == 2


@pytest.mark.parametrize("page", ["README.md", "training.md"])
def test_options_of_training_exist(page):
    text = PAGES.get(page, README)
    (command,) = re.findall(
        r"transformers-dflash train (.*?)\n\S", "\n".join([*blocks("bash", text), "end"]), flags=re.DOTALL
    )
    options, arguments = parse_options([*shlex.split(command.replace("\\\n", " ")), "--use_cpu"])
    assert options.prompts == ["prompts.jsonl"]
    assert arguments.loss_type == "dpace"
    if page == "README.md":
        text = text[text.index("## Training") : text.index("## How it differs")]
    named = re.findall(r"`(--\w+)", text)
    assert len(named) >= 8
    known = {f"--{one.name}" for one in (*fields(TrainOptions), *fields(type(arguments)))}
    assert set(named) <= known


def test_every_command_is_found():
    assert len(COMMANDS) == README.count("transformers-dflash generate")


def test_make_targets_exist():
    targets = re.findall(r"^make (\S+)", "\n".join(blocks("bash")), flags=re.MULTILINE)
    rules = re.findall(r"^([\w-]+):", (REPO / "Makefile").read_text(), flags=re.MULTILINE)
    assert targets
    assert set(targets) <= set(rules)

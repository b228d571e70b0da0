"""Metrics against numbers counted by hand, and `transformers-dflash evaluate` as its users run it."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from conftest import REPO, make_draft, save_tiny_target
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import transformers_dflash.cli as cli
from transformers_dflash import evaluation
from transformers_dflash.evaluation import measures
from transformers_dflash.evaluation.command import parting_gap, prompt_ids, state_of, turns
from transformers_dflash.evaluation.page import render_html
from transformers_dflash.evaluation.prompts import BUILTIN, HUB_SETS, read_prompts
from transformers_dflash.evaluation.report import build_report, table
from transformers_dflash.hub.command import read_results

PROGRAM = [sys.executable, "-c", "import sys; from transformers_dflash.cli import main; sys.exit(main())", "evaluate"]
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
RESULT = ["dataset", "num_prompts", "acceptance_length", "speedup", "tokens_per_second", "plain_tokens_per_second"]
RESULT += ["temperature", "max_new_tokens", "dtype", "device", "batch_size", "draft"]
NEW_TOKENS = 24

ROUNDS = [[4, 2], [3], []]  # committed tokens; the last prompt ended with its first token
DRAFTED = [[3, 3], [3, 1], []]
ACCEPTED = [[3, 1], [0, 1], []]
TIMES = {
    "plain_seconds": [4.0, 6.0, 1.0],
    "plain_tokens": [8, 6, 2],
    "seconds": [2.0, 6.0, 0.25],
    "tokens": [8, 12, 2],
}
ANSWERS = {"predictions": [[5, 6, 7], [5, 6], [1, 2]], "references": [[5, 6, 7], [5, 9], [1, 2, 3]]}
EXPECTED = {
    "acceptance_length": 3,  # 9 tokens in 3 rounds
    "acceptance_length_per_prompt": 3,
    "block_efficiency": 0.75,
    "acceptance_rates": [3 / 4, 1 / 3, 1 / 3],  # of 4, 3 and 3 proposed
    "conditional_acceptance_rates": [3 / 4, 1 / 2, 1],  # the round that proposed one candidate reached no second place
    "speedup": (11 / 16) / (8.25 / 22),
    "speedup_median": 2,
    "speedup_lowest": 2,
    "speedup_highest": 4,
    "identical": 1 / 3,
    "first_differences": [None, 1, 2],
}


def test_measures_are_those_counted_by_hand():
    values = measures.acceptance_length(ROUNDS, 4) | measures.acceptance_rates(DRAFTED, ACCEPTED)
    values |= measures.speedup(**TIMES) | measures.losslessness(*ANSWERS.values())
    assert list(values) == list(EXPECTED)
    for name, expected in EXPECTED.items():
        assert values[name] == pytest.approx(expected), name
    # Two rounds of one prompt weigh as two by tokens, and as one prompt among two otherwise.
    values = measures.acceptance_length([[5, 5, 5], [1]])
    assert values == {"acceptance_length": 4, "acceptance_length_per_prompt": 3}


def test_measures_of_nothing_are_nan():
    values = measures.acceptance_length([[]], 4) | measures.speedup([1.0], [0], [1.0], [1])
    values["identical"] = measures.losslessness([], [])["identical"]
    assert all(math.isnan(value) for value in values.values())
    assert measures.acceptance_rates([[]], [[]]) == {"acceptance_rates": [], "conditional_acceptance_rates": []}
    rates = measures.acceptance_rates([[2]], [[0]])
    assert rates["acceptance_rates"] == [0, 0]
    assert math.isnan(rates["conditional_acceptance_rates"][1])


def test_ties_explain_partings_within_the_tolerance():
    told = measures.losslessness(*ANSWERS.values(), gaps=[None, 0.1, 0.3], tolerance=0.1)
    assert (told["explained_by_ties"], told["unexplained"]) == (1, 1)
    with pytest.raises(ValueError, match="has no gap"):
        measures.losslessness(*ANSWERS.values(), gaps=[0.1, None, 0.3])


@pytest.mark.parametrize(("drafted", "accepted"), [([[2]], [[3]]), ([[2, 2]], [[1]])])
def test_counts_that_do_not_belong_together_are_refused(drafted, accepted):
    with pytest.raises(ValueError, match="prompt 0 has the counts"):
        measures.acceptance_rates(drafted, accepted)


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No network, and a cache of its own."""
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a metric asked the network"))
    return {"cache_dir": str(tmp_path)}


def test_metrics_load_offline_and_combine(offline):
    import evaluate

    together = evaluate.combine([evaluation.load(name, **offline) for name in evaluation.INPUTS])
    values = together.compute(
        acceptance_lengths=ROUNDS, block_size=4, drafted=DRAFTED, accepted=ACCEPTED, **TIMES, **ANSWERS
    )
    assert set(values) == set(EXPECTED)
    for name, expected in EXPECTED.items():
        assert values[name] == pytest.approx(expected), name

    for start in range(3):  # prompt by prompt
        inputs = {"acceptance_lengths": ROUNDS, "drafted": DRAFTED, "accepted": ACCEPTED, **TIMES, **ANSWERS}
        together.add_batch(**{name: values[start : start + 1] for name, values in inputs.items()})
    assert {k: v for k, v in values.items() if k != "block_efficiency"} == together.compute()


def test_metrics_say_what_they_do_not_know(offline):
    metric = evaluation.load("losslessness", **offline)
    assert metric.compute(**ANSWERS, gaps=[None, 0.1, 0.3], tolerance=0.2)["unexplained"] == 1
    with pytest.raises(TypeError, match="has no input gap: it takes predictions, references, gaps, tolerance"):
        metric.compute(**ANSWERS, gap=[None, 0.1, 0.3])
    with pytest.raises(ValueError, match="there is no metric 'perplexity': take one of acceptance_length"):
        evaluation.load("perplexity")


@pytest.mark.parametrize("name", evaluation.INPUTS)
def test_examples_of_the_metrics_are_right(name, offline):
    metric = evaluation.load(name, **offline)
    call, result = metric.inputs_description.split(">>> metric.compute")[1].strip().split("\n", 1)
    assert metric.compute(**eval(f"dict{call}")) == eval(result)
    assert set(metric.features) <= set(evaluation.INPUTS[name])
    for one in evaluation.INPUTS[name]:
        assert f"{one}:" in metric.inputs_description


def test_the_snippet_of_the_documentation_runs(capsys):
    (snippet,) = re.findall(
        r"^```python\n(.*?)^```$", (REPO / "docs" / "metrics.md").read_text(), re.DOTALL | re.MULTILINE
    )
    exec(snippet, {})
    assert "'block_efficiency': 0.375" in capsys.readouterr().out


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[str]:
    """The options that name a tiny target, whose tokens are letters, and two drafts."""
    folder = tmp_path_factory.mktemp("models")
    target = save_tiny_target(folder / "target")
    for name, seed in (("first", 2), ("second", 1)):  # the second one guesses better
        make_draft(target, seed).save_pretrained(folder / name)
    names = [f"--draft={folder / name}" for name in ("first", "second")]
    return [f"--target={folder / 'target'}", *names, "--dtype=float32", "--device=cpu"]


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> str:
    """A file with a prompt in each of the forms that are read."""
    path = tmp_path_factory.mktemp("data") / "sums & <b>.jsonl"
    rows = [
        {"question": "what is two and two", "answer": "four"},
        {"turns": ["name a colour", "and another"]},
        {"messages": [{"role": "user", "content": "sing"}, {"role": "assistant", "content": "no"}]},
        {"prompt": "what is a bee"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def run_options(models, questions) -> list[str]:
    options = ["--data", questions, "--data", "builtin", "--limit", "3", "--max-new-tokens", str(NEW_TOKENS)]
    return [*models, *options]


@pytest.fixture(scope="module")
def finished(run_options, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess, list[str]]:
    """The folder of a run that was killed amid its answers and begun again, how that ended, and the first answers."""
    folder = tmp_path_factory.mktemp("runs") / "report"
    command, answers = [*PROGRAM, *run_options, "--output", str(folder)], folder / "answers.jsonl"
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while not answers.is_file() or answers.read_bytes().count(b"\n") < 2:
            assert process.poll() is None, process.stderr.read().decode()
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    assert not (folder / "report.json").exists()
    whole = [line for line in answers.read_text().splitlines(keepends=True) if line.endswith("\n")]
    answers.write_text("".join(whole) + whole[0][:40])  # cut off while it was written
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    return folder, done, whole


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def test_a_killed_run_goes_on_and_repeats_no_answer(finished):
    folder, done, before = finished
    assert done.returncode == 0, done.stderr
    rows = rows_of(folder)
    assert 2 <= len(before) < len(rows)
    assert (folder / "answers.jsonl").read_text().startswith("".join(before))
    keys = [(row["dataset"], row["index"], row["method"]) for row in rows]
    prompts = [("sums & <b>", 0), ("sums & <b>", 1), ("sums & <b>", 2), ("builtin", 0), ("builtin", 2), ("builtin", 5)]
    assert keys == list(turns(prompts, ["plain", "first", "second"]))
    assert {key[2] for key in keys[::3]} == {"plain", "first", "second"}  # each is the first at times
    assert f"{len(before)}/18" in done.stderr  # progress starts there
    assert "Traceback" not in done.stderr
    assert {path.name for path in folder.iterdir()} == {"answers.jsonl", "settings.json", "report.json", "report.html"}


@pytest.mark.slow
def test_two_processes_share_the_prompts_and_go_on(finished, run_options, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "transformers_dflash", "evaluate", *run_options, "--output", str(tmp_path)]
    for _ in range(2):  # the second run finds one answer of each process missing
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("6 of 6") == 2
        files = [tmp_path / name for name in ("answers.jsonl", "answers.1.jsonl")]
        lines = [path.read_text().splitlines(keepends=True) for path in files]
        assert [len(own) for own in lines] == [9, 9]
        for path, own in zip(files, lines, strict=True):
            path.write_text("".join(own[:-1]))
    there = {(row["dataset"], row["index"], row["method"]): row["token_ids"] for row in rows_of(finished[0])}
    rows = [json.loads(line) for own in lines for line in own]
    assert {(row["dataset"], row["index"], row["method"]): row["token_ids"] for row in rows} == there
    assert json.loads((tmp_path / "report.json").read_text())["settings"]["processes"] == 2


def test_the_report_holds_what_the_answers_say(finished):
    folder, done, _ = finished
    report = json.loads((folder / "report.json").read_text())
    assert [list(row) for row in report["results"]] == [RESULT] * 4
    assert [(row["dataset"], row["draft"]) for row in report["results"]] == [
        ("sums & <b>", "first"),
        ("builtin", "first"),
        ("sums & <b>", "second"),
        ("builtin", "second"),
    ]
    rows = rows_of(folder)
    assert all(len(row["token_ids"]) == NEW_TOKENS for row in rows)
    own = [row for row in rows if row["method"] == "second" and row["dataset"] == "builtin"]
    plain = [row for row in rows if row["method"] == "plain" and row["dataset"] == "builtin"]
    result, entry = report["results"][3], report["sets"][3]
    rounds = [length for row in own for length in row["acceptance_lengths"]]
    assert sum(rounds) == 3 * (NEW_TOKENS - 1)
    assert 1 < result["acceptance_length"] == pytest.approx(sum(rounds) / len(rounds))
    seconds, plain_seconds = (sum(row["seconds"] for row in kind) for kind in (own, plain))
    assert result["tokens_per_second"] == pytest.approx(3 * NEW_TOKENS / seconds)
    assert result["plain_tokens_per_second"] == pytest.approx(3 * NEW_TOKENS / plain_seconds)
    assert result["speedup"] == pytest.approx(plain_seconds / seconds)
    assert result["num_prompts"] == 3
    assert (result["dtype"], result["batch_size"], result["max_new_tokens"]) == ("float32", 1, NEW_TOKENS)
    assert result["temperature"] == 0
    assert "thread" in result["device"]
    assert entry["speedup_lowest"] <= entry["speedup_median"] <= entry["speedup_highest"]
    assert entry["identical"] == 1
    assert (entry["explained_by_ties"], entry["unexplained"]) == (0, 0)
    assert entry["tolerance"] == 2 * torch.finfo(torch.float32).eps
    assert entry["block_efficiency"] == pytest.approx(entry["acceptance_length"] / 6)
    assert sum(entry["time_shares"].values()) == pytest.approx(1)
    assert min(entry["time_shares"].values()) > 0
    assert len(entry["acceptance_rates"]) == 5

    overall = report["overall"][1]
    assert (overall["draft"], overall["num_prompts"], overall["new_tokens"]) == ("second", 6, 6 * NEW_TOKENS)
    assert overall["rounds"] == report["sets"][2]["rounds"] + entry["rounds"]
    assert report["settings"]["drafts"].keys() == {"first", "second"}
    assert report["settings"]["data"]["builtin"].startswith("3 prompts, ")
    assert set(report["settings"]["versions"]) == {"transformers-dflash", "transformers", "torch"}
    assert f"{result['acceptance_length']:.2f}" in done.stdout
    assert done.stdout.count("3 of 3") == 4
    assert done.stdout.count("6 of 6") == 2


class Page(HTMLParser):
    """Checks that elements are closed in order, and collects texts and what could ask for other files."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_is_self_contained_and_shows_the_numbers(finished):
    folder, _, _ = finished
    text = (folder / "report.html").read_text()
    page, report = Page(text), json.loads((folder / "report.json").read_text())
    assert page.links == []
    assert not {"script", "link", "img", "iframe", "b"} & set(page.tags)
    assert not re.search(r"http|url\(|@import", text)
    assert page.tags.count("svg") == 4
    for entry in report["sets"] + report["overall"]:
        assert f"{entry['acceptance_length']:.2f}" in page.texts
        assert f"{entry['speedup']:.2f}" in page.texts
        assert f"{entry['tokens_per_second']:.1f}" in page.texts
        assert f"{100 * entry['time_shares']['drafting']:.0f} %" in page.texts
    assert "sums & <b>" in page.texts
    assert report["settings"]["command"] in page.texts
    assert report["settings"]["command"].startswith("transformers-dflash evaluate --target=")
    assert "prefers-color-scheme: dark" in text


def run_here(capsys, *arguments) -> str:
    """The command in this process; what it prints."""
    code = cli.main(["evaluate", *map(str, arguments)])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def refused(capsys, *arguments) -> str:
    """The sentence with which it refuses."""
    try:
        code = cli.main(["evaluate", *map(str, arguments)])
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def test_a_finished_run_answers_nothing_again_and_other_settings_are_refused(finished, run_options, capsys, tmp_path):
    there = shutil.copytree(finished[0], tmp_path / "copy")
    before = (there / "answers.jsonl").read_bytes()
    same = refused(capsys, *run_options[:-1], NEW_TOKENS + 1, "--output", there)
    assert f"max_new_tokens {NEW_TOKENS} there, {NEW_TOKENS + 1} here" in same
    assert same.count(" there, ") == 1
    assert "seed 0 there, 3 here" in refused(capsys, *run_options, "--seed", 3, "--output", there)
    assert "drafts.second" in refused(capsys, *run_options[:2], *run_options[3:], "--output", there)
    assert "limit 3 there, 2 here" in refused(capsys, *run_options, "--limit", 2, "--output", there)

    run_here(capsys, *run_options, "--output", there)
    assert (there / "answers.jsonl").read_bytes() == before
    reports = [json.loads((folder / "report.json").read_text()) for folder in (there, finished[0])]
    for report in reports:
        report["settings"].pop("command")
    assert reports[0] == reports[1]

    (there / "settings.json").unlink()
    assert "has answers.jsonl and no settings.json" in refused(capsys, *run_options, "--output", there)


def test_new_weights_in_a_draft_s_folder_are_other_settings(models, capsys, tmp_path):
    draft = shutil.copytree(models[1].partition("=")[2], tmp_path / "draft")
    options = [
        models[0],
        "--draft",
        draft,
        *models[3:],
        "--limit",
        1,
        "--max-new-tokens",
        2,
        "--output",
        tmp_path / "out",
    ]
    run_here(capsys, *options)
    weights = draft / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    assert "draft_states.draft" in refused(capsys, *options)


def test_sampled_answers_do_not_depend_on_where_a_run_was_cut(models, questions, capsys, tmp_path):
    options = [*models, "--data", questions, "--max-new-tokens", 6, "--temperature", 1, "--top-p", 0.6, "--seed", 5]
    shown = run_here(capsys, *options, "--output", tmp_path)
    whole = rows_of(tmp_path)
    lines = (tmp_path / "answers.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "answers.jsonl").write_text("".join(lines[:5]))
    run_here(capsys, *options, "--output", tmp_path)
    assert [row["token_ids"] for row in rows_of(tmp_path)] == [row["token_ids"] for row in whole]

    target = AutoModelForCausalLM.from_pretrained(models[0].partition("=")[2])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(models[0].partition("=")[2])
    torch.manual_seed(5 + 3)  # the last prompt's
    law = {"do_sample": True, "temperature": 1.0, "top_p": 0.6, "top_k": 0, "max_new_tokens": 6}
    expected = target.generate(**tokenizer("what is a bee?", return_tensors="pt", return_token_type_ids=False), **law)
    (plain,) = [row["token_ids"] for row in whole if row["method"] == "plain" and row["index"] == 3]
    assert plain == expected[0, -6:].tolist()
    greedy = target.generate(expected[:, :-6], do_sample=False, max_new_tokens=6)
    assert plain != greedy[0, -6:].tolist()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["sets"][0]["identical"] is None  # draws need not agree
    assert report["results"][0]["speedup"] > 0
    assert " of 4" not in shown


def test_without_plain_there_are_no_speedups_and_rounds_take_their_bound(models, questions, capsys, tmp_path):
    options = [*models[:2], *models[3:], "--data", questions, "--max-new-tokens", 8, "--no-plain"]
    run_here(capsys, *options, "--num-assistant-tokens", 2, "--output", tmp_path)
    rows = rows_of(tmp_path)
    assert {row["method"] for row in rows} == {"first"}
    assert max(count for row in rows for count in row["drafted_by_round"]) == 2
    (result,) = json.loads((tmp_path / "report.json").read_text())["results"]
    assert result["speedup"] is result["plain_tokens_per_second"] is None
    assert result["acceptance_length"] >= 1
    assert Page((tmp_path / "report.html").read_text()).tags.count("svg") == 3


def test_two_runs_are_compared(finished, models, questions, capsys, tmp_path):
    other = finished[0] / "report.json"
    options = [*models, "--data", questions, "--limit", 3, "--max-new-tokens", 6, "--compare", other]
    shown = run_here(capsys, *options, "--output", tmp_path)
    report, there = (json.loads(path.read_text()) for path in (tmp_path / "report.json", other))
    compared = report["comparison"]
    assert [(one["dataset"], one["draft"], one["other_draft"]) for one in compared["sets"]] == [
        ("sums & <b>", "first", "first"),
        ("sums & <b>", "second", "second"),
    ]
    for entry, here, then in zip(compared["sets"], report["results"], there["results"][::2], strict=True):
        for name in ("acceptance_length", "speedup", "tokens_per_second"):
            assert entry[name]["difference"] == pytest.approx(here[name] - then[name])
            assert f"{here[name] - then[name]:+.{1 if name == 'tokens_per_second' else 2}f}" in shown
    assert f"max_new_tokens 6 here, {NEW_TOKENS} there" in shown
    assert "first against first in" in shown
    text = " ".join(Page((tmp_path / "report.html").read_text()).texts)
    assert f"max_new_tokens 6 here, {NEW_TOKENS} there" in text
    assert f"{compared['sets'][1]['acceptance_length']['difference']:+.2f}" in text


def test_the_only_draft_of_another_run_is_compared_whatever_its_name(models, questions, capsys, tmp_path):
    options = [models[0], *models[3:], "--data", questions, "--limit", 1, "--max-new-tokens", 3]
    run_here(capsys, *options, models[1], "--output", tmp_path / "one")
    other = tmp_path / "one" / "report.json"
    run_here(capsys, *options, models[2], "--output", tmp_path / "two", "--compare", other)
    assert read_results(other) == json.loads(other.read_text())["results"]  # what a model card takes
    (entry,) = json.loads((tmp_path / "two" / "report.json").read_text())["comparison"]["sets"]
    assert (entry["draft"], entry["other_draft"]) == ("second", "first")


def test_a_run_without_a_draft_in_common_is_no_comparison(finished, models, questions, capsys, tmp_path):
    draft = shutil.copytree(models[2].partition("=")[2], tmp_path / "third")
    options = [models[0], *models[3:], "--draft", draft, "--data", questions, "--output", tmp_path / "out"]
    said = refused(capsys, *options, "--compare", finished[0] / "report.json")
    assert "has none of these drafts, but first, second" in said


def test_whatever_bears_on_answers_changes_a_folder_s_state(models, tmp_path):
    target = shutil.copytree(models[0].partition("=")[2], tmp_path / "target")
    before = state_of(str(target))
    (target / "README.md").write_text("a card")
    assert state_of(str(target)) == before
    (target / "chat_template.jinja").write_text("other")
    assert state_of(str(target)) != before


def test_a_first_attempt_that_failed_does_not_hold_its_folder(models, questions, capsys, tmp_path):
    options = [models[0], *models[3:], "--data", questions, "--limit", 1, "--max-new-tokens", 3, "--output", tmp_path]
    (tmp_path / "empty").mkdir()
    assert "cannot be loaded" in refused(capsys, *options, "--draft", tmp_path / "empty")
    run_here(capsys, *options, models[1])
    assert "holds a run with other settings" in refused(capsys, *options, models[2])  # now there are answers


def test_bad_input_is_one_sentence(models, questions, finished, capsys, monkeypatch, tmp_path):
    def said(*arguments, output=tmp_path / "out"):
        return refused(capsys, *models, "--output", output, *arguments)

    def file(text):
        path = tmp_path / "file.jsonl"
        path.write_text(text)
        return "--data", path

    assert "--data gsm9k is no set that is known: take one of builtin, gsm8k" in said("--data", "gsm9k")
    assert "missing.jsonl cannot be read (No such file or directory)" in said("--data", tmp_path / "missing.jsonl")
    assert "file.jsonl holds no prompt" in said(*file("\n"))
    assert "row 2 holds no prompt, question, messages or turns" in said(*file('{"prompt": "a"}\n{"answer": 1}\n'))
    assert "row 1 holds no prompt" in said(*file('{"turns": []}\n'))
    assert "row 1 holds no prompt" in said(*file('{"prompt": 5}\n'))
    assert "line 1 is no JSON" in said(*file("what\n"))
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    assert "latin.jsonl is not UTF-8 text" in said("--data", tmp_path / "latin.jsonl")
    (tmp_path / "file.parquet").write_text("no table")
    with pytest.raises(ValueError, match=r"file.parquet cannot be read as parquet \("):
        read_prompts([str(tmp_path / "file.parquet")])
    capsys.readouterr()  # datasets logs it too
    assert "second set with the name" in said("--data", questions, "--data", questions)
    assert "would be called first" in said(models[1])
    assert "--top-p needs sampling" in said("--top-p", 0.5)
    assert "cannot be written (Not a directory)" in said(output=Path(questions) / "out")
    assert "cannot be read (No such file or directory)" in said("--compare", tmp_path / "missing.json")
    assert "is no report" in said("--compare", questions)
    assert "has none of these data sets, but builtin, sums & <b>" in said(
        *file('{"prompt": "a"}\n'), "--compare", finished[0] / "report.json"
    )
    assert not (tmp_path / "out").exists()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "settings.json").write_text("[]")
    assert "holds no settings of a run" in said(output=tmp_path / "broken")
    assert "--target was given without --draft" in refused(capsys, models[0], "--output", tmp_path / "out")
    assert "required: --output" in refused(capsys, *models)

    def no_network(**_):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub (offline)")

    monkeypatch.setattr("datasets.load_dataset", no_network)
    assert "gsm8k cannot be read (Couldn't reach 'openai/gsm8k' on the Hub (offline)): see to the network" in said(
        "--data", "gsm8k"
    )
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "--data gsm8k needs the library datasets: pip install" in said("--data", "gsm8k")


def test_a_line_that_is_no_answer_is_named(finished, run_options, capsys, tmp_path):
    there = shutil.copytree(finished[0], tmp_path / "copy")
    with (there / "answers.jsonl").open("a") as file:
        file.write("[1]\n")
    assert "answers.jsonl, line 19 is no answer of a run" in refused(capsys, *run_options, "--output", there)


def test_sets_of_the_hub_are_read_by_their_fields(monkeypatch):
    asked = []
    fields = {"gsm8k": "question", "math500": "problem", "humaneval": "prompt", "mbpp": "prompt"}

    def load_dataset(path, name=None, split=None, data_files=None):
        asked.append((path, name, split))
        by_set = {where["path"]: known for known, (where, _) in HUB_SETS.items()}
        field = fields.get(by_set[path], "turns" if path == "json" else "prompt")
        many = by_set[path] in ("mt-bench", "spec-bench")
        rows = [{field: [f"question {n}", "and then"] if many else f"question {n}"} for n in range(10)]
        if by_set[path] == "alpaca":
            rows = [{"instruction": f"question {n}", "input": "a text" if n == 4 else ""} for n in range(10)]
        return rows

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    sets = read_prompts(list(HUB_SETS), limit=5)
    assert list(sets) == ["gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "alpaca", "spec-bench"]
    assert ("openai/gsm8k", "main", "test") in asked
    assert len(set(asked)) == 7
    for name, chats in sets.items():
        assert list(chats) == [0, 2, 4, 6, 8]  # spread over the set
        texts = [chat[0]["content"] for chat in chats.values()]
        expected = [f"question {n}" for n in chats]
        expected[2] += "\n\na text" if name == "alpaca" else ""
        assert texts == expected
    assert len(read_prompts(["builtin"], limit=100)["builtin"]) == len(BUILTIN) == 8


def test_prompts_without_a_chat_template_are_their_text(models):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(models[0].partition("=")[2])
    chat = [{"role": "user", "content": "abc"}]
    assert prompt_ids(chat, tokenizer, no_thinking=False) == tokenizer("abc?")["input_ids"]
    assert prompt_ids(chat, tokenizer, no_thinking=True) == tokenizer("abc?False")["input_ids"]
    tokenizer.chat_template = None
    assert prompt_ids(chat, tokenizer, no_thinking=False) == tokenizer("abc")["input_ids"]
    with pytest.raises(ValueError, match="no chat template"):
        prompt_ids(chat * 2, tokenizer, no_thinking=False)


def test_a_chat_that_a_template_cannot_join_is_refused(models):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(models[0].partition("=")[2])
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    tokenizer.chat_template = "{{ 'say: ' + messages[0].content }}"
    with pytest.raises(ValueError, match="the chat template refuses a chat with the roles user"):
        prompt_ids(parts, tokenizer, no_thinking=False)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        prompt_ids(parts, tokenizer, no_thinking=False)


def test_partings_are_measured_by_the_target(target):
    ids, plain = [5, 6, 7], [8, 9, 10]
    with torch.no_grad():
        logits = target(torch.tensor([[*ids, 8]])).logits[0, -1]
    best, second, *_, worst = logits.sort(descending=True).indices.tolist()
    for token, expected in ((second, logits[best] - logits[second]), (worst, logits[best] - logits[worst])):
        gap = parting_gap(target, ids, [8, token, 10], [8, best, 10], 1)
        assert gap == pytest.approx(float(expected / logits[best].abs()), rel=1e-4)
    assert parting_gap(target, ids, plain[:2], plain, 2) == math.inf


def test_partings_are_measured_as_the_targets_own_processors_leave_its_scores(target, monkeypatch):
    ids = [5, 6, 7]
    with torch.no_grad():
        logits = target(torch.tensor([[*ids, 8]])).logits[0, -1]
    best = int(logits.argmax())
    assert parting_gap(target, ids, [8, best], [8, best], 1) == 0
    monkeypatch.setattr(target.generation_config, "suppress_tokens", [best])
    second = int(logits.topk(2).indices[1])
    assert parting_gap(target, ids, [8, second], [8, second], 1) == 0
    assert parting_gap(target, ids, [8, best], [8, second], 1) == math.inf


def test_partings_reach_the_report():
    settings = {"temperature": 0.0, "max_new_tokens": 3, "plain": True, "device": "x", "batch_size": 1}
    settings |= {"gguf_file": None, "target": "t", "command": "c"}
    times = {
        "seconds": 1.0,
        "prefill_seconds": 0.1,
        "drafting_seconds": 0.2,
        "verifying_seconds": 0.3,
        "rolling_back_seconds": 0.1,
    }
    counts = {"acceptance_lengths": [2], "drafted_by_round": [3], "accepted_by_round": [1]}
    rows = {}
    for place, token in enumerate((3, 4, 5)):
        rows["a", place, "plain"] = {"token_ids": [1, 2, 3], "seconds": 2.0}
        rows["a", place, "d"] = {"token_ids": [1, 2, token]} | times | counts
    gaps = {("a", 1, "d"): 0.01, ("a", 2, "d"): 0.5}
    report = build_report(settings, "bfloat16", {"a": [0, 1, 2]}, {"d": 4}, rows, gaps, tolerance=0.0156)
    (entry,) = report["sets"]
    assert (entry["identical"], entry["explained_by_ties"], entry["unexplained"]) == (pytest.approx(1 / 3), 1, 1)
    assert entry["first_differences"] == [None, 2, 2]
    assert entry["gaps"] == [None, 0.01, 0.5]
    assert entry["speedup"] == 2
    assert entry["time_shares"]["other"] == pytest.approx(0.3)
    assert entry["conditional_acceptance_rates"] == [1, 0, None]  # null: nothing is nan in a report
    assert "1 of 3, 1 tie, 1 unexplained" in table(report)
    assert "1 of 3, 1 tie, 1 unexplained" in Page(render_html(report)).texts

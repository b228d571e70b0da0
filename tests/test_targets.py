"""A sample of the table of targets, `docs/targets.md`, found anew. `sweep_targets.py` makes the whole of it."""

import re

import pytest
from conftest import REPO
from sweep_targets import describe, outcome

from transformers_dflash import decoding

# Each has a way of its own: latent attention, experts, multipliers, scaled logits, sinks, learned positions ...
SAMPLE = ["DeepseekV3", "MiniCPM3", "Granite", "Cohere2", "GptOss", "Olmo3", "Gemma2", "OPT", "SmolLM3", "Glm4Moe"]


def documented() -> dict[str, tuple[str, str]]:
    """The outcome and its reason of every class, as the table says them."""
    text = (REPO / "docs" / "targets.md").read_text(encoding="utf-8")
    return {name: (word, why) for name, word, why in re.findall(r"^\| (\w+) \| ([\w ]+) \| (.*) \|$", text, re.M)}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_the_table_of_targets_says_what_is_found(name, monkeypatch):
    monkeypatch.setattr(decoding.logger, "warning_once", decoding.logger.warning_once)  # the sweep replaces it
    word, why = outcome(f"{name}ForCausalLM")
    assert (word, describe(word, why)) == documented()[f"{name}ForCausalLM"]


def test_the_table_hides_no_fault():
    rows = documented()
    assert len(rows) > 250
    assert {word for word, _ in rows.values()} == {"exact", "refused", "not made"}

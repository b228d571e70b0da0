"""Render the model cards of the drafts in this repository from the JSON files beside this one.

python model_cards/render.py
"""

import json
from pathlib import Path

from transformers_dflash import DFlashDraftConfig
from transformers_dflash.hub import render_card

HERE = Path(__file__).parent


def render(facts: dict) -> str:
    """A card from the draft's own config and what that does not say: target, licence, training, results."""
    config = DFlashDraftConfig.from_pretrained(HERE.parent / facts["draft"])
    config.target_name_or_path = facts["target"]
    config.model_card = facts["card"]
    return render_card(config, Path(facts["draft"]).name)


if __name__ == "__main__":
    for path in sorted(HERE.glob("*.json")):
        path.with_suffix(".md").write_text(render(json.loads(path.read_text(encoding="utf-8"))), encoding="utf-8")

"""Measure a draft, write its model card, and publish both: `python examples/evaluate_and_publish.py`.

Without --push-to it stops before the Hub: the folder holds the report, and the draft with its card as they would be
published. The token comes from `hf auth login` or HF_TOKEN.
"""

import json
from pathlib import Path

from models import find, options_for
from transformers import AutoModel

from transformers_dflash.cli import main
from transformers_dflash.hub.command import name_target

parser = options_for(__doc__, max_new_tokens=64)
parser.add_argument("--data", default="builtin", metavar="NAME", help="as in transformers-dflash evaluate")
parser.add_argument("--limit", default="4", metavar="N", help="prompts of it")
parser.add_argument("--target-id", metavar="ID", help="Hub id of the target, where draft and --target name a folder")
parser.add_argument("--license", default="apache-2.0", metavar="NAME")
parser.add_argument("--output", type=Path, default=Path("measured-draft"), metavar="DIR")
parser.add_argument("--push-to", metavar="ID", help="publish as this repository on the Hub")
options = parser.parse_args()
_, draft_name, gguf = find(options)

command = ["evaluate", "--data", options.data, "--limit", options.limit, "--output", str(options.output / "report")]
command += ["--max-new-tokens", str(options.max_new_tokens)]
if options.target is not None:
    command += ["--target", options.target, "--draft", options.draft]
if code := main(command):
    raise SystemExit(code)

draft = AutoModel.from_pretrained(draft_name, dtype="auto")
if gguf:
    options.target_id = "HuggingFaceTB/SmolLM2-135M-Instruct"
name_target(draft.config, options.target_id or draft.config.target_name_or_path or options.target)
results = json.loads((options.output / "report" / "report.json").read_text(encoding="utf-8"))["results"]
draft.config.model_card = {**(draft.config.model_card or {}), "license": options.license, "results": results}
draft.save_pretrained(options.output / "draft")  # and its card
print(f"the card is {options.output / 'draft' / 'README.md'}")
if options.push_to is not None:
    print(f"published: {draft.push_to_hub(options.push_to).commit_url}")

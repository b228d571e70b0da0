"""Peak memory of a long prompt, each method in a process of its own: plain generate, this package, Transformers' path.

The bound that this package keeps: the plain peak, plus the draft's weights and its context, plus the features of the
prompt (prompt tokens x taps x hidden size). Figures are peaks of resident memory in MiB, as Linux counts them.

    python benchmarks/memory.py [--prompt-tokens 4096]
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

METHODS = {"plain generate": None, "transformers-dflash": {}, "Transformers' own path": {"speculation_type": "dflash"}}


def resident_mib(field: str) -> float:
    """VmRSS (now) or VmHWM (the peak since it was last cleared) of this process."""
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def measure(method: str, prompt_tokens: int) -> dict[str, float]:
    """Run one method in this process and return its peak and the bound's parts."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    from transformers_dflash.cli import find_example

    folder, file, draft_folder = find_example()
    target = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.bfloat16)
    options = METHODS[method]
    draft = None if options is None else AutoModel.from_pretrained(draft_folder, dtype=torch.bfloat16)
    ids = torch.randint(1000, 40000, (1, prompt_tokens), generator=torch.Generator().manual_seed(0))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew after loading
    before = resident_mib("VmRSS")
    target.generate(ids, do_sample=False, max_new_tokens=8, assistant_model=draft, **(options or {}))
    figures = {"before": before, "peak": resident_mib("VmHWM")}
    if draft is not None:
        taps = len(draft.config.target_layer_ids)
        figures["features"] = prompt_tokens * taps * draft.config.target_hidden_size * 2 / 2**20
        heads = draft.config.num_key_value_heads * draft.config.head_dim
        figures["context"] = prompt_tokens * 2 * heads * draft.config.num_hidden_layers * 2 / 2**20
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--method", choices=METHODS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.method:
        print(json.dumps(measure(arguments.method, arguments.prompt_tokens)))
        return
    print("| method | peak MiB | grown during generate | features of the prompt | draft's context |")
    print("|---|---|---|---|---|")
    for method in METHODS:
        command = [sys.executable, __file__, "--method", method, "--prompt-tokens", str(arguments.prompt_tokens)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(
            f"| {method} | {found['peak']:.0f} | {found['peak'] - found['before']:.0f} "
            f"| {found.get('features', 0):.0f} | {found.get('context', 0):.0f} |"
        )


if __name__ == "__main__":
    main()

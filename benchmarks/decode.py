"""Decoding speed, side by side in one process: plain generate, this package, Transformers' own path, z-lab's loop.

Every method answers every prompt in turn, so that a machine whose speed drifts slows all of them alike; a speed is the
median over prompts of new tokens per second of the whole call. The floor is the time of the bare forwards of a round:
the target over a full block, and the draft with the target's head over its slots, at the same context lengths, nothing
else. Prompts: GSM8K test questions (Cobbe et al., arXiv 2110.14168, MIT licence), which the draft was not trained on.

    python benchmarks/decode.py [--prompts 12] [--new-tokens 96] [--json results.json]
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import transformers_dflash
from transformers_dflash.cli import find_example
from transformers_dflash.costs import floor_seconds
from transformers_dflash.target import Target

HERE = Path(__file__).parent
CHAIN = "transformers-dflash, chains"
NO_OPTIONS = {"tree_budget": None, "assistant_confidence_threshold": None}
OURS: dict[str, dict] = {
    CHAIN: {},
    "transformers-dflash, assistant_confidence_threshold=0.05": {"assistant_confidence_threshold": 0.05},
    "transformers-dflash, tree_budget=12": {"tree_budget": 12},
    "transformers-dflash, tree_budget=16": {"tree_budget": 16},
    "transformers-dflash, tree_budget=12, assistant_confidence_threshold=0.02": {
        "tree_budget": 12,
        "assistant_confidence_threshold": 0.02,
    },
}


def zlab_method(target, draft_folder: Path, new_tokens: int) -> Callable | None:
    """z-lab's own loop on the same folder, if the package `dflash` is installed."""
    try:
        from dflash.model import DFlashDraftModel
    except ImportError:
        return None
    draft = DFlashDraftModel.from_pretrained(draft_folder, dtype=target.dtype).eval()
    eos = target.generation_config.eos_token_id
    stops = [eos] if isinstance(eos, int) else list(eos)
    return lambda ids: draft.spec_generate(target, ids, new_tokens, stops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()

    folder, file, draft_folder = find_example()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    target = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.bfloat16)
    draft = AutoModel.from_pretrained(draft_folder, dtype=torch.bfloat16)
    questions = [json.loads(line)["question"] for line in (HERE / "gsm8k_heldout.jsonl").open()]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        for question in questions[: arguments.prompts]
    ]

    options = {"do_sample": False, "max_new_tokens": arguments.new_tokens}
    seen: dict[str, list] = {name: [] for name in OURS}

    def ours(name):
        def method(ids):
            for option, value in (NO_OPTIONS | OURS[name]).items():
                setattr(draft.generation_config, option, value)
            output = target.generate(ids, assistant_model=draft, return_dict_in_generate=True, **options)
            seen[name].append(output.speculation)
            return output.sequences

        return method

    methods: dict[str, Callable] = {
        "plain generate": lambda ids: target.generate(ids, **options),
        "plain generate, prompt_lookup_num_tokens=5": lambda ids: target.generate(
            ids, prompt_lookup_num_tokens=5, **options
        ),
        **{name: ours(name) for name in OURS},
        'Transformers, speculation_type="dflash"': lambda ids: target.generate(
            ids, assistant_model=draft, speculation_type="dflash", **options
        ),
    }
    if (zlab := zlab_method(target, draft_folder, arguments.new_tokens)) is not None:
        methods["z-lab dflash"] = zlab

    speeds: dict[str, list[float]] = {name: [] for name in methods}
    floors = []
    with torch.inference_mode():
        for method in methods.values():
            method(prompts[0])  # warm up
        for kept in seen.values():
            kept.clear()
        for n, ids in enumerate(prompts):
            names = list(methods)
            for name in names[n % len(names) :] + names[: n % len(names)]:
                start = time.perf_counter()
                output = methods[name](ids)
                speeds[name].append((output.shape[1] - ids.shape[1]) / (time.perf_counter() - start))
            middle = torch.cat([ids, ids[:, : arguments.new_tokens // 2]], dim=1)
            floors.append(sum(floor_seconds(Target(target), draft, middle, new_per_round=2)))

    plain = statistics.median(speeds["plain generate"])
    results = {
        name: {
            "tokens_per_second": statistics.median(values),
            "lowest": min(values),
            "highest": max(values),
            "speedup": statistics.median(
                value / other for value, other in zip(values, speeds["plain generate"], strict=True)
            ),
        }
        for name, values in speeds.items()
    }
    chains = [one.seconds_per_forward for one in seen[CHAIN]]
    per_round = statistics.median(chains)
    over_floor = statistics.median(seconds / floor for seconds, floor in zip(chains, floors, strict=True))
    for name, kept in seen.items():
        results[name]["acceptance_length"] = statistics.mean(one.acceptance_length for one in kept)
    print("| method | τ | tokens/s (lowest to highest) | speedup over plain, prompt by prompt |")
    print("|---|---|---|---|")
    for name, figures in results.items():
        tau = f"{figures['acceptance_length']:.2f}" if name in seen else ""
        print(
            f"| {name} | {tau} | {figures['tokens_per_second']:.1f} ({figures['lowest']:.1f} to "
            f"{figures['highest']:.1f}) | {figures['speedup']:.2f} |"
        )
    print(
        f"\nτ is a mean over prompts. A round of chains takes {1000 * per_round:.1f} ms, {over_floor:.2f} of the "
        f"floor of its own prompt (bare forwards of target and draft: {1000 * statistics.median(floors):.1f} ms)."
    )
    print(
        f"\nSmolLM2-135M-Instruct in bfloat16, block {draft.config.block_size}, greedy, batch 1, {len(prompts)} "
        f"held-out GSM8K questions, up to {arguments.new_tokens} new tokens; {torch.get_num_threads()} threads of a "
        f"{platform.machine()} CPU, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"transformers-dflash {transformers_dflash.__version__}.\n"
        f"Command: `python benchmarks/decode.py --prompts {len(prompts)} --new-tokens {arguments.new_tokens}`"
    )
    if arguments.json:
        figures = {"methods": results, "round_seconds": per_round, "over_floor": over_floor}
        arguments.json.write_text(json.dumps(figures | {"plain_tokens_per_second": plain}, indent=2) + "\n")


if __name__ == "__main__":
    main()

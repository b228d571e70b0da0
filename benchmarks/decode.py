"""Decoding speed, side by side in one process: plain generate, this package, Transformers' own path, z-lab's loop.

Every method answers every prompt in turn, so that a machine whose speed drifts slows all of them alike; a speed is the
median over prompts of new tokens per second of the whole call. The floor is the time of the bare forwards of a round:
the target over a full block, and the draft with the target's head over its slots, at the same context lengths, nothing
else. The draft was trained on none of the prompts, which are questions of GSM8K's test set (Cobbe et al., arXiv
2110.14168, MIT licence), problems of HumanEval (Chen et al., arXiv 2107.03374, MIT licence), and one prompt of each
category of Spec-Bench (Xia et al., arXiv 2401.07851, Apache 2.0 licence).

    python benchmarks/decode.py [--data gsm8k humaneval specbench] [--prompts 12] [--new-tokens 96] [--json FILE]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import example
import torch
from transformers import CompileConfig

from transformers_dflash.costs import floor_seconds
from transformers_dflash.target import Target

SETS = ("gsm8k", "humaneval", "specbench")
PLAIN = "plain generate"
CHAIN = "transformers-dflash, whole blocks"
COMPILED_CHAIN = "transformers-dflash, whole blocks, compiled"
NO_OPTIONS = {"tree_budget": None, "assistant_confidence_threshold": None}
OURS: dict[str, dict] = {
    CHAIN: {},
    'transformers-dflash, assistant_confidence_threshold="auto"': {"assistant_confidence_threshold": "auto"},
    "transformers-dflash, tree_budget=12": {"tree_budget": 12},
    'transformers-dflash, tree_budget="auto"': {"tree_budget": "auto"},
    COMPILED_CHAIN: {},
}


def zlab_method(target, draft_folder: str, new_tokens: int) -> Callable | None:
    """z-lab's own loop on the same folder, if the package `dflash` is installed."""
    try:
        from dflash.model import DFlashDraftModel
    except ImportError:
        return None
    draft = DFlashDraftModel.from_pretrained(draft_folder, dtype=target.dtype).eval()
    eos = target.generation_config.eos_token_id
    stops = [eos] if isinstance(eos, int) else list(eos)
    return lambda ids: draft.spec_generate(target, ids, new_tokens, stops)


def measure(methods: dict[str, Callable], seen: dict[str, list], prompts: list, floor: Callable) -> dict:
    """Speeds of all methods on the prompts, and how far a round of whole blocks is from the floor.

    Args:
        methods: from ids `(1, n)` to all ids.
        seen: where our methods leave what each generation says of itself.
        floor: from ids to the seconds of a round's bare forwards.
    """
    speeds: dict[str, list[float]] = {name: [] for name in methods}
    floors = []
    for kept in seen.values():
        kept.clear()
    names = list(methods)
    for n, ids in enumerate(prompts):
        for name in names[n % len(names) :] + names[: n % len(names)]:
            start = time.perf_counter()
            output = methods[name](ids)
            speeds[name].append((output.shape[1] - ids.shape[1]) / (time.perf_counter() - start))
        floors.append(floor(ids))

    def ratio(name: str, other: str) -> float:
        return statistics.median(one / two for one, two in zip(speeds[name], speeds[other], strict=True))

    rounds = [one.seconds_per_forward for one in seen[CHAIN]]
    figures = {
        name: {
            "tokens_per_second": statistics.median(values),
            "lowest": min(values),
            "highest": max(values),
            "over_plain": ratio(name, PLAIN),
            "over_whole_blocks": ratio(name, CHAIN),
        }
        for name, values in speeds.items()
    }
    for name, kept in seen.items():
        figures[name]["acceptance_length"] = statistics.mean(one.acceptance_length for one in kept)
    return {
        "methods": figures,
        "round_seconds": statistics.median(rounds),
        "floor_seconds": statistics.median(floors),
        "over_floor": statistics.median(one / two for one, two in zip(rounds, floors, strict=True)),
    }


def table(name: str, figures: dict) -> str:
    lines = [
        f"| {name} | τ | tokens/s (lowest to highest) | over plain | over whole blocks |",
        "|---|---|---|---|---|",
    ]
    for method, own in figures["methods"].items():
        tau = f"{own['acceptance_length']:.2f}" if "acceptance_length" in own else ""
        speed = f"{own['tokens_per_second']:.1f} ({own['lowest']:.1f} to {own['highest']:.1f})"
        lines.append(f"| {method} | {tau} | {speed} | {own['over_plain']:.2f} | {own['over_whole_blocks']:.2f} |")
    milliseconds = [1000 * figures[part] for part in ("round_seconds", "floor_seconds")]
    lines += [
        "",
        f"A round of whole blocks takes {milliseconds[0]:.1f} ms, {figures['over_floor']:.2f} of the floor of its own "
        f"prompt (bare forwards of target and draft: {milliseconds[1]:.1f} ms).",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--prompts", type=int, default=12, help="of each set")
    parser.add_argument("--new-tokens", type=int, default=96)
    example.add_options(parser)
    arguments = parser.parse_args()
    tokenizer, target, draft = example.load(arguments.dtype)

    def prompts(name: str) -> list[torch.Tensor]:
        chat = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        return [
            tokenizer.apply_chat_template([{"role": "user", "content": question}], **chat)["input_ids"]
            for question in example.questions(name, arguments.prompts)
        ]

    options = {"do_sample": False, "max_new_tokens": arguments.new_tokens}
    in_graphs = CompileConfig()
    in_graphs._compile_all_devices = True  # Transformers compiles by itself on accelerators alone
    compiled = {"cache_implementation": "static", "compile_config": in_graphs}
    seen: dict[str, list] = {name: [] for name in OURS}

    def ours(name):
        more = options | (compiled if name == COMPILED_CHAIN else {})

        def method(ids):
            for option, value in (NO_OPTIONS | OURS[name]).items():
                setattr(draft.generation_config, option, value)
            output = target.generate(ids, assistant_model=draft, return_dict_in_generate=True, **more)
            seen[name].append(output.speculation)
            return output.sequences

        return method

    methods: dict[str, Callable] = {
        PLAIN: lambda ids: target.generate(ids, **options),
        "plain generate, compiled": lambda ids: target.generate(ids, **options, **compiled),
        "plain generate, prompt_lookup_num_tokens=5": lambda ids: target.generate(
            ids, prompt_lookup_num_tokens=5, **options
        ),
        **{name: ours(name) for name in OURS},
        'Transformers, speculation_type="dflash"': lambda ids: target.generate(
            ids, assistant_model=draft, speculation_type="dflash", **options
        ),
    }
    if (zlab := zlab_method(target, draft.name_or_path, arguments.new_tokens)) is not None:
        methods["z-lab dflash"] = zlab

    def floor(ids: torch.Tensor) -> float:
        middle = torch.cat([ids, ids[:, : arguments.new_tokens // 2]], dim=1)
        return sum(floor_seconds(Target(target), draft, middle, new_per_round=2))

    results = {}
    with torch.inference_mode():
        for name in arguments.data:
            asked = prompts(name)
            longest = max(asked, key=lambda ids: ids.shape[1])
            for method in methods.values():
                method(longest)  # warm up; compiles for static caches that fit all
            results[name] = measure(methods, seen, asked, floor)
            print(table(name, results[name]), flush=True)
    print(
        "τ is a mean over prompts, every ratio a median of ratios prompt by prompt. SmolLM2-135M-Instruct in "
        f"{arguments.dtype}, block {draft.config.block_size}, greedy, batch 1, {arguments.prompts} held-out prompts "
        f"of each set, up to {arguments.new_tokens} new tokens; {example.machine()}.\n"
        f"Command: `python benchmarks/decode.py --data {' '.join(arguments.data)} --prompts {arguments.prompts} "
        f"--new-tokens {arguments.new_tokens} --dtype {arguments.dtype}`"
    )
    example.write(results, arguments.json)


if __name__ == "__main__":
    main()

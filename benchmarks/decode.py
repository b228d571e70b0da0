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
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, DynamicCache

import transformers_dflash
from transformers_dflash.cli import find_example
from transformers_dflash.target import TapRecorder, Target

HERE = Path(__file__).parent


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


def floor_seconds(target, draft, ids: torch.Tensor, tokens_per_round: int, repeats: int = 5) -> tuple[float, float]:
    """Median seconds of the target's forward over a full block and of the draft's over its block, after `ids`."""
    block_size = draft.config.block_size
    seen = Target(target)
    taps = TapRecorder(
        seen.layers, draft.config.target_layer_ids, draft.config.target_hidden_size, draft.device, draft.dtype
    )
    cache = DynamicCache(config=target.config)
    with taps.recording():
        target(ids, past_key_values=cache, logits_to_keep=1)
    features = taps.take()
    taps.close()
    block = torch.full((1, block_size), draft.config.mask_token_id)
    embeds = target.get_input_embeddings()(block)
    context = draft.make_cache()
    position = ids.shape[1]
    draft(embeds, features, torch.arange(position + block_size)[None], cache=context)
    verify, propose = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        target(block, past_key_values=cache, logits_to_keep=block_size)
        verify.append(time.perf_counter() - start)
        cache.crop(-block_size)
        new = features[:, :tokens_per_round]
        positions = torch.arange(position, position + tokens_per_round + block_size)[None]
        start = time.perf_counter()
        hidden = draft(embeds, new, positions, cache=context).last_hidden_state
        seen.head(hidden[:, 1:])
        propose.append(time.perf_counter() - start)
        position += tokens_per_round
    return statistics.median(verify), statistics.median(propose)


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
    rounds: list[tuple[int, float]] = []

    def ours(ids):
        output = target.generate(ids, assistant_model=draft, return_dict_in_generate=True, **options)
        seen = output.speculation
        rounds.append((seen.rounds, seen.drafting_seconds + seen.verifying_seconds))
        taus.append(seen.acceptance_length)
        return output.sequences

    def cut(ids):
        draft.generation_config.assistant_confidence_threshold = 0.05
        output = target.generate(ids, assistant_model=draft, **options)
        draft.generation_config.assistant_confidence_threshold = None
        return output

    methods: dict[str, Callable] = {
        "plain generate": lambda ids: target.generate(ids, **options),
        "transformers-dflash": ours,
        "transformers-dflash, assistant_confidence_threshold=0.05": cut,
        'Transformers, speculation_type="dflash"': lambda ids: target.generate(
            ids, assistant_model=draft, speculation_type="dflash", **options
        ),
    }
    if (zlab := zlab_method(target, draft_folder, arguments.new_tokens)) is not None:
        methods["z-lab dflash"] = zlab

    taus: list[float] = []
    speeds: dict[str, list[float]] = {name: [] for name in methods}
    floors = []
    with torch.inference_mode():
        for method in methods.values():
            method(prompts[0])  # warm up
        rounds.clear()
        taus.clear()
        for n, ids in enumerate(prompts):
            names = list(methods)
            for name in names[n % len(names) :] + names[: n % len(names)]:
                start = time.perf_counter()
                output = methods[name](ids)
                speeds[name].append((output.shape[1] - ids.shape[1]) / (time.perf_counter() - start))
            middle = torch.cat([ids, ids[:, : arguments.new_tokens // 2]], dim=1)
            floors.append(sum(floor_seconds(target, draft, middle, tokens_per_round=2)))

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
    per_round = statistics.median(seconds / count for count, seconds in rounds)
    over_floor = statistics.median(
        seconds / count / floor for (count, seconds), floor in zip(rounds, floors, strict=True)
    )
    tau = statistics.mean(taus)
    print("| method | tokens/s (lowest to highest) | speedup over plain, prompt by prompt |")
    print("|---|---|---|")
    for name, figures in results.items():
        print(
            f"| {name} | {figures['tokens_per_second']:.1f} ({figures['lowest']:.1f} to {figures['highest']:.1f}) "
            f"| {figures['speedup']:.2f} |"
        )
    print(
        f"\nτ {tau:.2f} (mean over prompts); a round of transformers-dflash takes {1000 * per_round:.1f} ms, "
        f"{over_floor:.2f} of the floor of its own prompt (bare forwards of target and draft: "
        f"{1000 * statistics.median(floors):.1f} ms)."
    )
    print(
        f"\nSmolLM2-135M-Instruct in bfloat16, block {draft.config.block_size}, greedy, batch 1, {len(prompts)} "
        f"held-out GSM8K questions, up to {arguments.new_tokens} new tokens; {torch.get_num_threads()} threads of a "
        f"{platform.machine()} CPU, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"transformers-dflash {transformers_dflash.__version__}.\n"
        f"Command: `python benchmarks/decode.py --prompts {len(prompts)} --new-tokens {arguments.new_tokens}`"
    )
    if arguments.json:
        figures = {"methods": results, "acceptance_length": tau, "round_seconds": per_round, "over_floor": over_floor}
        arguments.json.write_text(json.dumps(figures | {"plain_tokens_per_second": plain}, indent=2) + "\n")


if __name__ == "__main__":
    main()

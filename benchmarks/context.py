"""What a round costs at longer and longer contexts, beside the bare forwards of target and draft.

A context is held-out GSM8K questions one after the other, cut at the length wanted. It is answered in whole blocks
and by plain generate. The prefill does not count, but the draft's first round does, which takes up the whole context.

    python benchmarks/context.py [--lengths 128 1024 4096] [--new-tokens 48] [--json FILE]
"""

import argparse
import statistics
import time

import example
import torch
from transformers.generation.streamers import BaseStreamer

from transformers_dflash.costs import floor_seconds
from transformers_dflash.target import Target


class Stopwatch(BaseStreamer):
    """When the first token after the prompt came."""

    def __init__(self):
        self.first = 0.0

    def put(self, value):
        if value.numel() == 1 and not self.first:
            self.first = time.perf_counter()

    def end(self):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    example.add_options(parser)
    arguments = parser.parse_args()
    tokenizer, target, draft = example.load(arguments.dtype)
    text = tokenizer("\n\n".join(example.questions() * 8), return_tensors="pt")["input_ids"]
    options = {"do_sample": False, "max_new_tokens": arguments.new_tokens, "eos_token_id": None}

    def run(ids: torch.Tensor, **more) -> tuple[float, int]:
        """Seconds after the first token, and how many tokens came then."""
        watch = Stopwatch()
        output = target.generate(ids, attention_mask=torch.ones_like(ids), streamer=watch, **options, **more)
        return time.perf_counter() - watch.first, output.shape[1] - ids.shape[1] - 1

    figures: dict[int, dict[str, float]] = {}
    with torch.inference_mode():
        run(text[:, :64], assistant_model=draft)
        for length in arguments.lengths:
            ids = text[:, :length]
            taken: dict[str, list[float]] = {name: [] for name in ("round", "floor", "target alone", "plain token")}
            for _ in range(arguments.repeats):
                seconds, tokens = run(ids)
                taken["plain token"].append(seconds / tokens)
                output = target.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    assistant_model=draft,
                    return_dict_in_generate=True,
                    **options,
                )
                taken["round"].append(output.speculation.seconds_per_forward)
                verifying, drafting = floor_seconds(Target(target), draft, ids, new_per_round=2)
                taken["target alone"].append(verifying)
                taken["floor"].append(verifying + drafting)
            figures[length] = {name: statistics.median(values) for name, values in taken.items()}

    print("| context | a round, ms | floor, ms | of the floor | target over a block, ms | a plain token, ms |")
    print("|---|---|---|---|---|---|")
    for length, own in figures.items():
        cells = [own["round"], own["floor"], own["round"] / own["floor"] / 1000, own["target alone"]]
        print(f"| {length} | " + " | ".join(f"{1000 * cell:.2f}" for cell in [*cells, own["plain token"]]) + " |")
    print(
        f"\nMedians of {arguments.repeats}. SmolLM2-135M-Instruct in {arguments.dtype}, block "
        f"{draft.config.block_size}, greedy, {arguments.new_tokens} new tokens; {example.machine()}.\n"
        f"Command: `python benchmarks/context.py --lengths {' '.join(map(str, arguments.lengths))} --new-tokens "
        f"{arguments.new_tokens} --dtype {arguments.dtype}`"
    )
    example.write(figures, arguments.json)


if __name__ == "__main__":
    main()

"""What rolling a recurrent target back costs, beside the forward of its block: the recurrence alone, or a replay.

A random Qwen3.5 in bfloat16 runs over blocks; of each, `--kept` rows stay. Both ways are timed in turn on the same
state, so that a machine whose speed drifts slows both alike.

    python benchmarks/rollback.py [--hidden 1024] [--layers 12] [--block 8] [--kept 3] [--repeats 20]
"""

import argparse
import statistics
import time

import torch
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from transformers_dflash import rollback as rollback_module
from transformers_dflash.rollback import Rollback
from transformers_dflash.target import Target

WAYS = {"recurrence alone": rollback_module.RECURRENT_LAYERS, "replay of the target": ()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("hidden", 1024),
        ("layers", 12),
        ("block", 8),
        ("kept", 3),
        ("context", 256),
        ("repeats", 20),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=32000,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 7 // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
    )
    target = Qwen3_5ForCausalLM(config).to(torch.bfloat16).eval()
    ids = torch.randint(0, config.vocab_size, (1, options.context))
    block = torch.randint(0, config.vocab_size, (1, options.block))
    blocks, ways = [], {name: [] for name in WAYS}
    with torch.no_grad():
        for number in range(options.repeats + 2):
            for name, recurrent in WAYS.items():
                rollback_module.RECURRENT_LAYERS = recurrent
                cache = DynamicCache(config=config)
                with Rollback(cache, Target(target).mixers()) as rollback:
                    target(ids, past_key_values=cache, logits_to_keep=1)
                    rollback.begin()
                    rollback.before_block()
                    start = time.perf_counter()
                    with rollback.recording():
                        target(block, past_key_values=cache)
                    middle = time.perf_counter()
                    if rollback.after_block(options.block, options.kept):
                        target(block[:, : options.kept], past_key_values=cache)
                    end = time.perf_counter()
                if number >= 2:  # the first ones warm up
                    blocks.append(middle - start)
                    ways[name].append(end - middle)
    whole = statistics.median(blocks)
    print(f"forward of a block of {options.block}: {whole * 1e3:.1f} ms; {options.kept} rows stay")
    for name, seconds in ways.items():
        median = statistics.median(seconds)
        print(f"{name:22} {median * 1e3:6.1f} ms, {median / (whole + median):.0%} of the target's side of a round")


if __name__ == "__main__":
    main()

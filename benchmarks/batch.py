"""Tokens per second of batches, side by side in one process: plain generate and this package at several batch sizes.

Every method answers the same prompts, in batches of each size, in turn; a figure is all new tokens over all seconds.
Prompts are held-out GSM8K questions, as in `decode.py`.

    python benchmarks/batch.py [--sizes 1 4 16] [--prompts 16] [--new-tokens 64] [--json FILE]
"""

import argparse
import copy
import time

import example
import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    example.add_options(parser)
    arguments = parser.parse_args()
    tokenizer, target, draft = example.load(arguments.dtype)
    chats = [[{"role": "user", "content": question}] for question in example.questions(count=arguments.prompts)]

    def batches(size: int) -> list[dict[str, torch.Tensor]]:
        parts = [chats[start : start + size] for start in range(0, len(chats), size)]
        options = {"add_generation_prompt": True, "padding": True, "return_tensors": "pt", "return_dict": True}
        return [dict(tokenizer.apply_chat_template(part, **options)) for part in parts]

    cut, tree = copy.deepcopy(draft), copy.deepcopy(draft)
    cut.generation_config.assistant_confidence_threshold = "auto"
    tree.generation_config.tree_budget = "auto"
    methods = {
        "plain generate": None,
        "transformers-dflash, whole blocks": draft,
        'transformers-dflash, assistant_confidence_threshold="auto"': cut,
        'transformers-dflash, tree_budget="auto"': tree,
    }
    tokens = {(name, size): 0 for name in methods for size in arguments.sizes}
    seconds = dict.fromkeys(tokens, 0.0)
    for assistant in methods.values():
        target.generate(**batches(2)[0], assistant_model=assistant, do_sample=False, max_new_tokens=8)  # warm up
    for size in arguments.sizes:
        for batch in batches(size):
            for name, assistant in methods.items():
                start = time.perf_counter()
                output = target.generate(
                    **batch, assistant_model=assistant, do_sample=False, max_new_tokens=arguments.new_tokens
                )
                seconds[name, size] += time.perf_counter() - start
                new = output[:, batch["input_ids"].shape[1] :]
                ended = new.eq(tokenizer.eos_token_id).cumsum(1) - new.eq(tokenizer.eos_token_id).long()
                tokens[name, size] += int((ended == 0).sum())  # padding after the end does not count

    print("| method | " + " | ".join(f"batch {size}" for size in arguments.sizes) + " |")
    print("|---" * (len(arguments.sizes) + 1) + "|")
    speeds = {key: tokens[key] / seconds[key] for key in tokens}
    for name in methods:
        print(f"| {name} | " + " | ".join(f"{speeds[name, size]:.1f}" for size in arguments.sizes) + " |")
    print(
        f"\nNew tokens per second. SmolLM2-135M-Instruct in {arguments.dtype}, block {draft.config.block_size}, "
        f"greedy, {len(chats)} held-out GSM8K questions, up to {arguments.new_tokens} new tokens;\n"
        f"{example.machine()}.\n"
        f"Command: `python benchmarks/batch.py --sizes {' '.join(map(str, arguments.sizes))} --prompts {len(chats)} "
        f"--new-tokens {arguments.new_tokens} --dtype {arguments.dtype}`"
    )
    figures = {name: {size: speeds[name, size] for size in arguments.sizes} for name in methods}
    example.write(figures, arguments.json)


if __name__ == "__main__":
    main()

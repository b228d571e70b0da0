"""Acceptance length when sampling: token-by-token against block verification, and at what temperature to draft.

Answers are sampled through `generate`, all prompts as one batch. In every round with a whole block of candidates, the
expected number of committed tokens is computed for both ways of verifying them, from the same candidates and laws: so
the two are compared without the noise of their draws. τ is the mean over rounds, ± its standard error. Prompts: GSM8K
test questions (Cobbe et al., arXiv 2110.14168, MIT licence), which the draft was not trained on. In float32.

    python benchmarks/sampling.py [--prompts 12] [--new-tokens 64] [--seeds 3] [--json results.json]
"""

import argparse
from pathlib import Path

import example
import torch

from transformers_dflash import decoding
from transformers_dflash.verification import acceptance_probability, prefix_probabilities, sample_block

TEMPERATURES = (0.6, 1.0)
DRAFT_SHARES = (1.0, 0.7, 0.4, None)  # of the target's temperature; None drafts the likeliest tokens


def expected_tokens(candidates, p, q) -> tuple[float, float]:
    """Expected committed tokens of a round, token by token and as a block; arguments as in `sample_block`."""
    places = torch.arange(len(candidates))
    ratio = acceptance_probability(p[places, candidates], None if q is None else q[places, candidates])
    enough, _ = prefix_probabilities(candidates, p, q)
    fewer = (1 - enough).flip(0).cumprod(0)  # the chance that fewer than k, k - 1 ... candidates are accepted
    return 1 + float(ratio.cumprod(0).sum()), 1 + float((1 - fewer).sum())


def mean_and_error(values: torch.Tensor) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / len(values) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()

    tokenizer, target, draft = example.load("float32")
    inputs = tokenizer.apply_chat_template(
        [[{"role": "user", "content": question}] for question in example.questions(count=arguments.prompts)],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )

    rounds: list[tuple[float, float]] = []

    def counted(candidates, p, q):
        if len(candidates) == draft.config.num_candidates:  # the budget has not cut the block
            rounds.append(expected_tokens(candidates, p, q))
        return sample_block(candidates, p, q)

    decoding.sample_block = counted
    ways = [(temperature, share) for temperature in TEMPERATURES for share in DRAFT_SHARES]
    seen: dict[tuple, list] = {way: [] for way in ways}
    for seed in range(arguments.seeds):
        for temperature, share in ways:
            draft.generation_config.do_sample = None if share else False
            draft.generation_config.temperature = share and share * temperature
            rounds.clear()
            torch.manual_seed(seed)
            target.generate(
                **inputs,
                assistant_model=draft,
                do_sample=True,
                temperature=temperature,
                top_k=0,
                max_new_tokens=arguments.new_tokens,
            )
            seen[temperature, share] += rounds

    print("| temperature | guesses | τ, token by token | τ, as a block | difference | rounds |")
    print("|---|---|---|---|---|---|")
    results = []
    for (temperature, share), values in seen.items():
        by_token, by_block = torch.tensor(values, dtype=torch.double).T
        figures = [mean_and_error(values) for values in (by_token, by_block, by_block - by_token)]
        guesses = "the likeliest tokens" if share is None else f"drawn at {share * temperature:.2f}"
        cells = [f"{mean:.3f} ± {error:.3f}" for mean, error in figures]
        print(f"| {temperature} | {guesses} | {' | '.join(cells)} | {len(values)} |")
        results.append({"temperature": temperature, "draft_share": share, "figures": figures, "rounds": len(values)})
    print(
        f"\nSmolLM2-135M-Instruct in float32, block {draft.config.block_size}, {len(inputs['input_ids'])} held-out "
        f"GSM8K questions, {arguments.seeds} seeds, up to {arguments.new_tokens} new tokens; "
        f"{example.versions()}.\n"
        f"Command: `python benchmarks/sampling.py --prompts {arguments.prompts} --new-tokens {arguments.new_tokens} "
        f"--seeds {arguments.seeds}`"
    )
    example.write(results, arguments.json)


if __name__ == "__main__":
    main()

"""Fused injection against one target layer per draft layer: the question behind DFlash, on a target of your choice.

Every arm is trained on the same documents, anchors and steps, for several seeds, and then decodes the same held-out
prompts. As with `transformers-dflash train`, its layers start as the target's last ones, where these have its parts.
`fused` hands all taps, projected by `fc`, to every draft layer; `aligned` hands tap i to layer i as it is;
`aligned-matched` widens the aligned draft's MLP until it has as many parameters as the fused one. The other arms norm
every tap first, or change how many target layers are tapped and how many layers the draft has.

    python examples/ablation/run.py --target NAME --data answers.jsonl --mask-token-id ID --output ablation

`answers.jsonl` holds the target's own answers, as `transformers-dflash train` writes them. Arms that `results.csv` has
already are not trained again, so that a run that was cut goes on. The table on stdout and `results.png` show means
over the seeds with their standard deviations; the picture needs matplotlib.
"""

import argparse
import csv
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from transformers_dflash import DFlashDraftConfig, DFlashDraftModel
from transformers_dflash.configuration_dflash import default_target_layer_ids
from transformers_dflash.training import DFlashTrainer, DFlashTrainingArguments, FeatureStore, start_from_target
from transformers_dflash.training.command import read_documents

_MOST_HELD_OUT = 64  # documents
MATCHED = "aligned-matched"  # normed taps, with as many parameters as the fused draft of these taps and layers
# name: (injection, normed taps, taps, draft layers)
ARMS = {
    "fused": ("fused", False, 5, 5),
    "fused, normed taps": ("fused", True, 5, 5),
    "aligned": ("layer_aligned", False, 5, 5),
    "aligned, normed taps": ("layer_aligned", True, 5, 5),
    MATCHED: ("layer_aligned", True, 5, 5),
    "fused, 1 tap": ("fused", False, 1, 5),
    "fused, 3 taps": ("fused", False, 3, 5),
    "fused, 1 layer": ("fused", False, 5, 1),
    "fused, 3 layers": ("fused", False, 5, 3),
}


def size(config: DFlashDraftConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in DFlashDraftModel(config).parameters())


def make_config(target, arm: str, block_size: int, mask: int) -> DFlashDraftConfig:
    """The config of an arm's draft."""
    injection, normed, taps, layers = ARMS[arm]
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    fields = {"num_hidden_layers": layers, "block_size": block_size, "tap_norm": normed}
    fields["target_layer_ids"] = default_target_layer_ids(depth, taps)
    config = DFlashDraftConfig.from_target(target.config, mask, context_injection=injection, **fields)
    if arm == MATCHED:
        goal = size(DFlashDraftConfig.from_target(target.config, mask, **fields))
        per_unit = 3 * config.hidden_size * layers  # gate, up and down of every layer
        wider = config.intermediate_size + round((goal - size(config)) / per_unit)
        config = DFlashDraftConfig.from_target(
            target.config, mask, context_injection=injection, intermediate_size=wider, **fields
        )
    return config


@torch.no_grad()
def make_draft(config: DFlashDraftConfig, target, input_ids: torch.Tensor) -> DFlashDraftModel:
    """A draft that starts at the target's last layers, if these are like its own; see `start_from_target`.

    What its MLP has more than the target's starts with no effect.
    """
    draft = DFlashDraftModel(config)
    width = target.config.get_text_config(decoder=True).intermediate_size
    if config.intermediate_size == width:
        start_from_target(draft, target, input_ids)
        return draft
    narrow = DFlashDraftModel(config.__class__.from_dict(config.to_dict() | {"intermediate_size": width}))
    if start_from_target(narrow, target, input_ids):
        weights = draft.state_dict()
        for name, weight in narrow.state_dict().items():
            if name.endswith("mlp.down_proj.weight"):
                weights[name].zero_()  # (H, intermediate_size)
            weights[name][tuple(slice(size) for size in weight.shape)] = weight
    return draft


@torch.no_grad()
def latency(draft: DFlashDraftModel, context: int = 256, repeats: int = 10) -> float:
    """Median seconds of a bare forward of one block, with `context` tokens in the cache."""
    config = draft.config
    width = len(config.target_layer_ids) * config.target_hidden_size
    block = torch.randn(1, config.block_size, config.hidden_size, device=draft.device, dtype=draft.dtype)
    features = torch.randn(1, context, width, device=draft.device, dtype=draft.dtype)
    cache = draft.make_cache()
    draft(block, features, cache=cache)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        draft(block, features[:, :2], cache=cache).last_hidden_state.sum().item()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--gguf-file")
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", type=Path, default=Path("ablation"))
    parser.add_argument("--mask-token-id", type=int, required=True)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--documents", type=int, default=320)
    parser.add_argument("--batch", type=int, default=2, help="documents of one step")
    parser.add_argument("--anchors", type=int, default=32, help="blocks of one document")
    parser.add_argument("--new-tokens", type=int, default=128, help="the most tokens of a held-out answer")
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of target and arithmetic"
    )
    options = parser.parse_args()

    gguf = {} if options.gguf_file is None else {"gguf_file": options.gguf_file}
    tokenizer = AutoTokenizer.from_pretrained(options.target, **gguf)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=options.dtype, **gguf).eval()
    mask = options.mask_token_id
    documents = [one for one in read_documents(options.data, tokenizer, 2048) if mask not in one.ids]
    count = min(_MOST_HELD_OUT, len(documents) // 4)  # the last ones
    if count == 0:
        raise SystemExit(f"{options.data} holds {len(documents)} documents, too few to hold some of them out")
    documents, held_out = documents[:-count][: options.documents], documents[-count:]
    configs = {arm: make_config(target, arm, options.block_size, mask) for arm in ARMS}
    # Of all arms, so that the features serve whatever arms run now or later.
    union = sorted({layer for config in configs.values() for layer in config.target_layer_ids})
    store = FeatureStore.build(options.output / "features", documents, target, union)

    # On a CPU what else runs there would count, were it not for the processor's own time.
    clock = time.perf_counter if torch.accelerator.is_available() else time.process_time
    results = options.output / "results.csv"
    rows = list(csv.DictReader(results.open())) if results.is_file() else []
    names = ("steps", "batch", "anchors", "block_size", "learning_rate", "new_tokens", "dtype")
    settings = {"documents": len(documents)} | {name: getattr(options, name) for name in names}
    if other := [row for row in rows if any(row.get(name) != str(value) for name, value in settings.items())]:
        found = {name: other[0].get(name) for name in settings}
        raise SystemExit(f"{results} holds arms of other settings, {found} and not {settings}: name another --output")
    done = {(row["arm"], row["seed"]) for row in rows}
    for seed in range(options.seeds):
        for arm in options.arms:
            config = configs[arm]
            if (arm, str(seed)) in done:
                continue
            set_seed(seed)
            draft = make_draft(config, target, torch.tensor([documents[0].ids]))
            arguments = DFlashTrainingArguments(
                output_dir=str(options.output / "run"),
                max_steps=options.steps,
                per_device_train_batch_size=options.batch,
                anchors_per_document=options.anchors,
                learning_rate=options.learning_rate,
                lr_scheduler_type="cosine",
                warmup_steps=options.steps // 20,
                bf16=options.dtype == "bfloat16",
                use_cpu=not torch.accelerator.is_available(),
                seed=seed,
                save_strategy="no",
                report_to=[],
                logging_steps=50,
                eval_prompts=len(held_out),
                eval_new_tokens=options.new_tokens,
            )
            trainer = DFlashTrainer(draft, target, arguments, documents, held_out, train_features=store)
            start = clock()
            trainer.train()
            seconds = clock() - start
            metrics = trainer.evaluate()
            row = {"arm": arm, "seed": seed, **settings}
            row |= {"parameters": size(config), "training_seconds": round(seconds, 1)}
            row["feature_bytes_per_token"] = (
                target.dtype.itemsize * len(config.target_layer_ids) * config.target_hidden_size
            )
            row["draft_milliseconds"] = round(1000 * latency(draft.to(target.dtype)), 2)
            row["acceptance_length"] = round(metrics["eval_acceptance_length"], 4)
            for place in range(1, config.num_candidates + 1):
                row[f"accuracy_{place}"] = round(metrics[f"eval_accuracy_{place}"], 4)
            rows.append(row)
            part = results.with_suffix(".part")
            with part.open("w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=list(row))
                writer.writeheader()
                writer.writerows(rows)
            part.rename(results)
    print(table(rows))
    plot(rows, options.output / "results.png")


def spread(rows: list[dict], name: str) -> tuple[float, float]:
    """Mean and standard deviation of a column; a single row has no deviation."""
    values = [float(row[name]) for row in rows]
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else float("nan")


def by_arm(rows: list[dict]) -> dict[str, list[dict]]:
    return {arm: [row for row in rows if row["arm"] == arm] for arm in dict.fromkeys(row["arm"] for row in rows)}


def plot(rows: list[dict], path: Path) -> None:
    """Acceptance length of every arm, and how often each place is right."""
    from matplotlib import pyplot

    arms = by_arm(rows)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 0.5 * len(arms) + 2.5), layout="constrained")
    for place, (arm, own) in enumerate(arms.items()):
        mean, deviation = spread(own, "acceptance_length")
        left.errorbar(mean, -place, xerr=deviation, fmt="o", capsize=4)
        names = [name for name in own[0] if name.startswith("accuracy_")]
        means, deviations = zip(*(spread(own, name) for name in names), strict=True)
        right.errorbar(range(1, len(names) + 1), means, yerr=deviations, marker="o", capsize=3, label=arm)
    left.set(yticks=[-place for place in range(len(arms))], yticklabels=list(arms), xlabel="acceptance length τ")
    right.set(xlabel="place in the block", ylabel="share of right first choices", ylim=(0, None))
    right.legend()
    figure.savefig(path, dpi=120)


def table(rows: list[dict]) -> str:
    """Mean and spread over seeds of every arm, as Markdown."""
    lines = ["| arm | seeds | parameters | τ | accuracy, place 1 | bytes a token | draft ms | training s |"]
    lines.append("|" + "---|" * 8)
    for arm, own in by_arm(rows).items():
        first = own[0]
        cells = [arm, len(own), f"{int(first['parameters']) / 1e6:.1f} M"]
        for name in ("acceptance_length", "accuracy_1"):
            mean, deviation = spread(own, name)
            cells.append(f"{mean:.3f} ± {deviation:.3f}" if len(own) > 1 else f"{mean:.3f}")
        fastest = min(float(row["draft_milliseconds"]) for row in own)  # other work on the machine only slows it
        cells += [first["feature_bytes_per_token"], fastest]
        cells.append(f"{spread(own, 'training_seconds')[0]:.0f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

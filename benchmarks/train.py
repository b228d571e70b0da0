"""A training step beside that of `speculators`: places per second and peak memory, on the same shapes.

The draft has the example's shape: 4 layers of SmolLM2's width, 5 taps, blocks of 8, the whole vocabulary. A step is
forward, backward and AdamW over blocks of 2 documents whose target states are there already; the loss is speculators'
default, the divergence from the target's law with the decay of the paper, and as it is without Triton. States are
random: no number here depends on them. Each package runs in a process of its own, in turn; memory is the peak above
what lay there before the first step.

    python benchmarks/train.py [--anchors 64] [--length 384] [--steps 5] [--rounds 3] [--bf16]

It needs `speculators` (see `make test-peers`).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

WIDTH, VOCAB, LAYERS, BLOCK, MASK = 576, 49152, 4, 8, 17
TAPS = [1, 8, 14, 21, 27]
SHAPE = {
    "hidden_size": WIDTH,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
}
DOCUMENTS = 2


def our_step(options):
    """Returns a function that gives the loss of a step, and what is trained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from transformers_dflash import DFlashDraftConfig, DFlashDraftModel
    from transformers_dflash.training import DFlashTrainer, DFlashTrainingArguments, Document
    from transformers_dflash.training.trainer import collate

    # Of the target only the embedding and the head are used, since its states are given: one layer stands for all.
    target = LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": max(TAPS) + 1, "intermediate_size": 8}))
    draft = DFlashDraftModel(
        DFlashDraftConfig.from_target(
            target.config,
            MASK,
            num_hidden_layers=LAYERS,
            block_size=BLOCK,
            target_layer_ids=TAPS,
            intermediate_size=1536,
        )
    )
    documents = [Document(list(range(100, 100 + options.length)), [True] * options.length)] * DOCUMENTS
    arguments = DFlashTrainingArguments(
        output_dir="unused",
        anchors_per_document=options.anchors,
        loss_type="kl",
        use_cpu=True,
        report_to=[],
        bf16=options.bf16,
    )
    trainer = DFlashTrainer(draft, target, arguments, documents)
    batch = collate([trainer.train_dataset[i] for i in range(DOCUMENTS)])
    batch["features"] = torch.randn(DOCUMENTS, options.length, len(TAPS) + 1, WIDTH)
    return lambda: trainer.compute_loss(draft, batch), list(draft.parameters())


def their_step(options):
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    config = DFlashSpeculatorConfig(
        transformer_layer_config=Qwen3Config(**SHAPE, attn_implementation="eager"),
        draft_vocab_size=VOCAB,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=TAPS,
        mask_token_id=MASK,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    draft = DFlashDraftModel(config)
    for parameter in draft.parameters():  # what would be the target's is left uninitialised without one
        torch.nn.init.normal_(parameter, std=0.02)
    total = DOCUMENTS * options.length
    batch = {
        "hidden_states": torch.randn(1, total, len(TAPS) * WIDTH),
        "input_ids": torch.arange(100, 100 + total)[None],
        "loss_mask": torch.ones(1, total, dtype=torch.long),
        "verifier_last_hidden_states": torch.randn(1, total, WIDTH),
        "document_ids": torch.arange(DOCUMENTS).repeat_interleave(options.length)[None],
        "position_ids": torch.arange(options.length).repeat(DOCUMENTS)[None],
        "max_anchors": DOCUMENTS * options.anchors,
        "loss_config": resolve_loss_config("kl_div", "eager"),
    }
    return lambda: draft(**batch)[1], [p for p in draft.parameters() if p.requires_grad]


def memory(field: str) -> int:
    """Bytes of this process, by a field of Linux's status file."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


def worker(options) -> None:
    torch.manual_seed(0)
    step, trained = {"ours": our_step, "speculators": their_step}[options.worker](options)
    optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=False)
    before, seconds = memory("VmRSS"), []
    for _ in range(options.steps + 1):
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
            loss = step()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
    result = {
        "seconds": statistics.median(seconds[1:]),
        "peak": memory("VmHWM") - before,
        "trained": sum(parameter.numel() for parameter in trained),
        "loss": float(loss),
    }
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("anchors", 64), ("length", 384), ("steps", 5), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--bf16", action="store_true", help="autocast")
    parser.add_argument("--worker", choices=["ours", "speculators"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    results: dict[str, list[dict]] = {"ours": [], "speculators": []}
    for _ in range(options.rounds):
        for name, kept in results.items():
            done = subprocess.run([*[sys.executable, *sys.argv], "--worker", name], capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            kept.append(json.loads(done.stdout.splitlines()[-1]))
    places = DOCUMENTS * options.anchors * (BLOCK - 1)
    print(f"{places} places a step, {options.length} tokens a document, {torch.get_num_threads()} threads")
    for name, kept in results.items():
        speeds = sorted(places / one["seconds"] for one in kept)
        peak = statistics.median(one["peak"] for one in kept) / 2**20
        print(
            f"{name:12} {statistics.median(speeds):7.0f} places/s ({speeds[0]:.0f} to {speeds[-1]:.0f}), "
            f"peak {peak:6.0f} MiB, {kept[0]['trained'] / 1e6:.2f} million trained parameters"
        )


if __name__ == "__main__":
    main()

"""Try a draft on every class of the installed Transformers that writes text, tiny and random, one process each.

These are the causal language models and the models of text and images; the latter are prompted with text here, and
with images in `test_multimodal.py`.

For each class a small random model is made, plain greedy output is taken as the truth, and drafted output is compared
with it for candidates of which 0, 2 and 5 are right a round, well past the sliding window; then the draft's own logits
are compared with a recompute that keeps no state. The outcome is one line a class:

    exact     the same tokens, and the same draft logits; with trees of candidates too, or why there are none
    refused   before any work, with the reason
    wrong     anything else: a fault to be mended
    not made  no small model could be made here (the class needs parts that its config alone does not give)

    python tests/sweep_targets.py [--only NAME ...] [--write docs/targets.md]

It takes several minutes, and is no part of the test suite; `test_targets.py` holds the table against a sample.
"""

import argparse
import dataclasses
import multiprocessing
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path
from queue import Empty

import pytest
import torch
import transformers
from conftest import VOCAB, WINDOW, make_draft, prompt
from oracle import oracle
from test_decoding import stateless_draft_logits
from test_tree import plant
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from transformers_dflash import decoding

NEW_TOKENS = 3 * WINDOW
MEMORY = 4 << 30  # a class whose small model would take more is not made
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "n_inner": 48,
    "num_hidden_layers": 4,
    "num_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "init_std": 0.2,
    "sliding_window": WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 16,
    "moe_num_experts": 4,
    "moe_topk": 2,
    "moe_k": 2,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 12,
    "v_head_dim": 8,
    "rotary_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "mamba_d_ssm": 64,
    "mamba_dt_rank": 4,
    "chunk_size": 16,
    "state_size": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 0,
    "laurel_rank": 4,
    "altup_num_inputs": 2,
    "word_embed_proj_dim": 32,
    "use_mamba_kernels": False,
    "attention_window_size": WINDOW,
    "lru_width": 32,
}
TOWER = SMALL | {  # of what is not the text model
    "num_hidden_layers": 2,
    "depth": 2,
    "num_heads": 4,
    "embed_dim": 32,
    "out_hidden_size": 32,
    "projection_dim": 32,
    "patch_size": 4,
    "image_size": 16,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
}
MROPE_FAMILIES = ("Qwen2VLText", "Qwen2_5_VLText", "Glm4vText", "Glm46VText", "GlmOcrText", "PaddleOCRText")
HYBRID = ["linear_attention", "full_attention"] * 2
MAMBA_HYBRID = ["mamba", "attention"] * 2
DECODER = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_layers": 4, "decoder_ffn_dim": 48}
# What the sizes above do not fit, by the beginning of a config class's name.
OWN = {
    "BailingHybrid": {"layer_types": HYBRID},
    "Bamba": {"attn_layer_indices": [1, 3]},
    "Dots1": {"n_shared_experts": 1},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW, "num_heads": 4},
    "GraniteMoeHybrid": {"layer_types": MAMBA_HYBRID},
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4},
    "KimiLinear": {"layer_types": HYBRID, "linear_head_dim": 8, "linear_num_heads": 4},
    "Lfm2Moe": {"layer_types": ["conv", "full_attention"] * 2},
    "Mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 2},
    "PLBart": DECODER,
    "BlenderbotConfig": DECODER | {"num_hidden_layers": 4},
    "Whisper": {
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "decoder_layers": 4,
        "decoder_ffn_dim": 48,
    },
    "Zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8, "mamba_ngroups": 2},
    "Zaya": {"num_experts_per_tok": 1},
}
DRAFT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
}


def small_config(config_class, sizes=SMALL):
    """A config of a class with all its known sizes made small, and those of its parts."""
    names = {field.name for field in dataclasses.fields(config_class)}
    values = {name: value for name, value in sizes.items() if name in names}
    if "layer_types" in names:  # the class's own pattern, for four layers
        values["layer_types"] = None
    if "kv_lora_rank" in names:  # multi-head latent attention has keys and values for every head
        values |= dict.fromkeys(names & {"num_key_value_heads"}, SMALL["num_attention_heads"])
    for beginning, own in OWN.items():
        if config_class.__name__.startswith(beginning):
            values |= own
    parts = config_class.sub_configs
    default = config_class() if AutoConfig in parts.values() else None
    for name, part_class in parts.items():
        if part_class is AutoConfig:
            if getattr(default, name, None) is None:
                continue
            part_class = type(getattr(default, name))
        values[name] = small_config(part_class, SMALL if "text" in name else TOWER)
    if config_class.__name__.startswith(MROPE_FAMILIES) and "num_key_value_heads" in names:
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    return config_class(**values)


def small_model(name: str):
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    config = small_config(model_class.config_class)
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.isfinite().all():
                parameter.normal_()
    return model


def outcome(name: str) -> tuple[str, str]:
    """What a draft does on one class: a word of the list above, and why."""
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    ids = prompt(9)
    try:
        target = small_model(name)
        answer = target.generate(ids, **options)
        if answer.shape[1] != 9 + NEW_TOKENS:
            return "not made", f"plain generate gives {answer.shape[1] - 9} tokens"
        draft = make_draft(target, **DRAFT | {"vocab_size": VOCAB})
    except Exception as error:
        return "not made", f"{type(error).__name__}: {error}"
    padded = torch.cat([answer, answer], dim=1)
    for num_right in (0, 2, 5):
        try:
            with torch.no_grad(), oracle(padded, num_right, VOCAB) as rounds:
                drafted = target.generate(ids, assistant_model=draft, **options)
        except ValueError as error:
            return "refused", str(error)
        except Exception as error:
            return "wrong", f"{type(error).__name__}: {error}"
        if not torch.equal(drafted, answer):
            return "wrong", f"other tokens with {num_right} right candidates a round"
    try:
        with torch.no_grad():
            for each in rounds:
                expected = stateless_draft_logits(target, draft, each["input_ids"], len(each["logits"]))
                gap = (each["logits"] - expected).abs().max()
                if gap > 1e-3:
                    return "wrong", f"draft logits off by {gap:.1e}"
    except Exception as error:
        return "wrong", f"recompute: {type(error).__name__}: {error}"
    return with_trees(target, draft, ids, answer, options)


def with_trees(target, draft, ids, answer, options) -> tuple[str, str]:
    """The outcome with trees of candidates, two right ones among wrong ones in a round, or why there are none."""
    reasons: list[str] = []
    decoding.logger.warning_once = reasons.append
    draft.generation_config.tree_budget = 12
    try:
        with pytest.MonkeyPatch.context() as patch:
            plant(patch, answer, 2)
            drafted = target.generate(ids, assistant_model=draft, return_dict_in_generate=True, **options)
    except Exception as error:
        return "wrong", f"with trees: {type(error).__name__}: {error}"
    if not torch.equal(drafted.sequences, answer):
        return "wrong", "other tokens with trees"
    if reasons:
        return "exact", reasons[0].partition("cannot verify one: ")[2] or reasons[0]
    length = drafted.speculation.acceptance_length
    if length < 2.5:
        return "wrong", f"trees of two right candidates give {length:.2f} tokens a round"
    return "exact", "trees"


def report(name: str, queue) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    queue.put(outcome(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--write", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    fork = multiprocessing.get_context("fork")  # so that Transformers is imported once
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    names = arguments.only or sorted(causal | image_text_classes())
    rows = []
    for name in names:
        queue, start = fork.Queue(), time.perf_counter()
        process = fork.Process(target=report, args=(name, queue))
        process.start()
        word, why = "not made", "crashed, or took longer than 60 s"
        while process.is_alive() and time.perf_counter() - start < 60:
            with suppress(Empty):
                word, why = queue.get(timeout=1)
                break
        process.kill()
        process.join()
        why = " ".join(why.split())[:160]
        rows.append((name, word, why))
        sys.stdout.write(f"{word:9} {name:44} {time.perf_counter() - start:5.1f} s  {why}\n")
        sys.stdout.flush()
    counts = {word: sum(row[1] == word for row in rows) for word in ("exact", "refused", "wrong", "not made")}
    sys.stdout.write(f"{counts}\n")
    if arguments.write:
        lines = [
            "# Targets",
            "",
            f"Every causal language model class of Transformers {transformers.__version__}, as",
            "`python tests/sweep_targets.py --write docs/targets.md` finds it: a tiny random model of each, greedy",
            "output with candidates of which some are right, compared with plain `generate`, and the draft's logits",
            "with a recompute; then the same with trees of candidates (`tree_budget`). Exact without trees means that",
            "blocks stay chains, for the reason given.",
            "",
            *table(row for row in rows if row[0] in causal),
            "",
            "## Text and images",
            "",
            "The further classes that take images, prompted with text; `tests/test_multimodal.py` puts images in.",
            "",
            *table(row for row in rows if row[0] not in causal),
        ]
        arguments.write.write_text("\n".join(lines) + "\n")
    sys.exit(counts["wrong"] > 0)


def image_text_classes() -> set[str]:
    """Names of the classes that take text and images and give text."""
    names = set()
    for value in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values():
        names.update([value] if isinstance(value, str) else value)
    return names


def describe(word: str, why: str) -> str:
    return why if word != "exact" or why == "trees" else f"no trees: {why}"


def table(rows) -> list[str]:
    """Lines of a table of outcomes."""
    lines = ["| class | outcome | |", "|---|---|---|"]
    return lines + [f"| {name} | {word} | {describe(word, why).replace('|', '/')} |" for name, word, why in rows]


if __name__ == "__main__":
    main()

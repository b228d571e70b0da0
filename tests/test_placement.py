"""Targets whose weights cannot be read: quantised, wrapped, offloaded. Modules are called, where they are."""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from conftest import VOCAB, make_draft, make_target, prompt
from oracle import oracle
from test_decoding import stateless_draft_logits
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig


class PackedLinear(nn.Module):
    """Stands in for a GPTQ or AWQ layer: packed integers with a scale, and nothing that looks like a weight."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, states):
        return states @ (self.qweight.float() * self.scale).T


class WrappedEmbedding(nn.Module):
    """Stands in for a quantised or adapted embedding, which is no `nn.Embedding`."""

    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        self.inner = embedding

    def forward(self, ids):
        return self.inner(ids)


def pack(model: nn.Module) -> None:
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            model.set_submodule(name, PackedLinear(module))


def packed(target, _folder):
    pack(target)
    return target


def wrapped(target, _folder):
    target.set_input_embeddings(WrappedEmbedding(target.get_input_embeddings()))
    return target


def offloaded_to_cpu(target, _folder):
    return cpu_offload(target)


def offloaded_to_disk(target, folder):
    return disk_offload(target, folder)


def partly_on_disk(target, folder):
    where = {"model.embed_tokens": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    where |= {f"model.layers.{layer}": "disk" if layer % 2 else "cpu" for layer in range(4)}
    return dispatch_model(target, where, main_device="cpu", offload_dir=str(folder), force_hooks=True)


PLACEMENTS = [packed, wrapped, offloaded_to_cpu, offloaded_to_disk, partly_on_disk]


@pytest.mark.parametrize("place", PLACEMENTS, ids=lambda place: place.__name__)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_output_and_draft_logits_are_right(tmp_path, family, place):
    target = make_target(family)
    draft = make_draft(target)
    target = place(target, tmp_path)
    ids = prompt(20)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
    plain = target.generate(ids, **options)
    with oracle(plain, 2, VOCAB) as rounds:
        drafted = target.generate(ids, assistant_model=draft, **options)
    assert drafted.tolist() == plain.tolist()
    for one in rounds[::3]:
        expected = stateless_draft_logits(target, draft, one["input_ids"], one["logits"].shape[0])
        torch.testing.assert_close(one["logits"], expected, atol=1e-4, rtol=1e-3)
    both = torch.cat([ids, prompt(20, 1)])
    options["attention_mask"] = torch.ones_like(both)
    plain = target.generate(both, **options)
    assert target.generate(both, assistant_model=draft, **options).tolist() == plain.tolist()


@pytest.mark.parametrize("option", ["tree_budget", "assistant_confidence_threshold"])
def test_costs_of_an_offloaded_target_are_measured_where_it_runs(tmp_path, option):
    target, ids = make_target("llama"), prompt(20)
    draft = make_draft(target)
    setattr(draft.generation_config, option, "auto")
    target = offloaded_to_disk(target, tmp_path)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
    plain = target.generate(ids, **options)
    assert target.generate(ids, assistant_model=draft, **options).tolist() == plain.tolist()


def test_an_offloaded_target_takes_trees(tmp_path):
    target, ids = make_target("llama"), prompt(20)
    draft = make_draft(target)
    draft.generation_config.tree_budget = 8
    target = offloaded_to_disk(target, tmp_path)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
    plain = target.generate(ids, **options)
    out = target.generate(ids, assistant_model=draft, return_dict_in_generate=True, **options)
    assert out.sequences.tolist() == plain.tolist()
    assert out.speculation.drafted > 7 * (out.speculation.rounds - 2)


def by_torchao():
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    return TorchAoConfig(Int8DynamicActivationInt8WeightConfig(), modules_to_not_convert=[])  # the head too


QUANTISED = {
    "torchao": by_torchao,
    "bitsandbytes 8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "bitsandbytes 4": lambda: BitsAndBytesConfig(load_in_4bit=True),
}


@pytest.mark.peers
@pytest.mark.parametrize("library", QUANTISED)
def test_quantised_targets_and_drafts_give_the_targets_output(tmp_path, library):
    pytest.importorskip(library.split()[0])
    make_target("llama").save_pretrained(tmp_path / "target")
    whole = make_draft(make_target("llama"))
    whole.save_pretrained(tmp_path / "draft")
    options = {"quantization_config": QUANTISED[library](), "dtype": torch.float32}
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target", **options)
    draft = AutoModel.from_pretrained(tmp_path / "draft", **options)
    assert type(draft.layers[0].mlp.up_proj.weight) is not nn.Parameter
    ids = prompt(20)
    plain = target.generate(ids, max_new_tokens=24, do_sample=False)
    for num_right, drafting in ((0, whole), (2, whole), (2, draft)):
        with oracle(torch.cat([plain, plain], dim=1), num_right, VOCAB) as rounds:
            drafted = target.generate(ids, assistant_model=drafting, max_new_tokens=24, do_sample=False)
        assert drafted.tolist() == plain.tolist()
        assert len(rounds) == -(-22 // (num_right + 1))  # with one token to go nothing is drafted
    for one in rounds[::3]:
        expected = stateless_draft_logits(target, draft, one["input_ids"], one["logits"].shape[0])
        torch.testing.assert_close(one["logits"], expected, atol=0.05, rtol=0.05)  # rows share some scales


def test_one_scale_for_all_rows_is_refused():
    target = make_target("llama")
    draft = make_draft(target)
    quantised = torch.ao.quantization.quantize_dynamic(target, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj was quantised by torch's quantize_dynamic"):
        quantised.generate(prompt(5), assistant_model=draft, max_new_tokens=4)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_a_draft_of_another_dtype_and_a_packed_draft_serve(dtypes):
    target, ids = make_target("llama").to(dtypes[0]), prompt(20)
    draft = make_draft(target).to(dtypes[1])
    quantised = copy.deepcopy(draft)
    pack(quantised.float())
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
    plain = target.generate(ids, **options)
    for one in (draft, quantised):
        out = target.generate(ids, assistant_model=one, return_dict_in_generate=True, **options)
        if dtypes[0] == torch.float32:
            assert out.sequences.tolist() == plain.tolist()
        assert out.speculation.rounds > 0


def test_mask_token_outside_a_wrapped_embedding_is_named():
    target = make_target("llama")
    draft = make_draft(target)
    draft.config.mask_token_id = VOCAB + 3
    ids = prompt(5)
    with pytest.raises(ValueError, match=rf"mask_token_id {VOCAB + 3} is not a row .* which has {VOCAB} rows"):
        wrapped(target, None).generate(ids, assistant_model=draft, max_new_tokens=4)


TENSOR_PARALLEL = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
from transformers_dflash import DFlashDraftModel
folder = sys.argv[1]
ids, plain = (torch.tensor(rows) for rows in json.load(open(f"{folder}/plain.json")))
target = AutoModelForCausalLM.from_pretrained(f"{folder}/target", tp_plan="auto")
weight = target.model.layers[0].self_attn.q_proj.weight
assert type(weight).__name__ == "DTensor" and weight.to_local().shape[0] * 2 == weight.shape[0]
draft = DFlashDraftModel.from_pretrained(f"{folder}/draft")
for budget in (None, 20):
    draft.generation_config.tree_budget = budget
    out = target.generate(
        ids, assistant_model=draft, do_sample=False, max_new_tokens=20, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, plain), (out.sequences, plain)
assert out.speculation.acceptance_length > 1
"""


@pytest.mark.slow
def test_a_target_split_over_two_ranks_gives_plain_output(target, draft, tmp_path):
    """`tp_plan="auto"` on two processes; the draft is whole on each."""
    target.save_pretrained(tmp_path / "target")
    draft.save_pretrained(tmp_path / "draft")
    plain = target.generate(prompt(9), do_sample=False, max_new_tokens=20)
    (tmp_path / "plain.json").write_text(json.dumps([prompt(9).tolist(), plain.tolist()]))
    (tmp_path / "run.py").write_text(TENSOR_PARALLEL)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "run.py", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr

"""New drafts that start at their target's last layers."""

import pytest
import torch
from conftest import COMMON, FAMILIES, MASK, make_target, prompt
from transformers import GemmaConfig, GemmaForCausalLM

from transformers_dflash import DFlashDraftConfig, DFlashDraftModel
from transformers_dflash.training import start_from_target


def new_draft(target, layers: int, **fields) -> DFlashDraftModel:
    torch.manual_seed(1)
    return DFlashDraftModel(
        DFlashDraftConfig.from_target(target.config, MASK, num_hidden_layers=layers, block_size=4, **fields)
    ).eval()


def lively(target):
    """With norms that are no ones, and a different one in every layer."""
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 2.0)
    return target


@torch.no_grad()
def distance(target, draft) -> float:
    """How far a draft's hidden state is from the target's, if its one layer goes on from where the last one begins."""
    ids = prompt(9)
    begins, ends = target(ids, output_hidden_states=True).hidden_states[-2:]
    got = draft(begins[:, -1:], begins[:, :-1]).last_hidden_state
    return float((got - ends[:, -1:]).norm() / ends[:, -1:].norm())


def test_a_layer_goes_on_as_the_targets_last_one_would():
    """Exactly where the target norms queries and keys as the draft does."""
    target = lively(make_target("qwen3"))
    draft = new_draft(target, 1, target_layer_ids=[target.config.num_hidden_layers - 2])
    assert distance(target, draft) > 0.5
    assert start_from_target(draft, target, prompt(20))
    assert distance(target, draft) < 1e-5


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma"])
def test_queries_and_keys_without_norms_keep_their_size(name):
    """Gemma's norms are stored less one, and an activation of its own."""
    torch.manual_seed(0)
    target = GemmaForCausalLM(GemmaConfig(**COMMON)).eval() if name == "gemma" else make_target(name)
    target = lively(target)
    fields = {"hidden_act": "gelu_pytorch_tanh"} if name == "gemma" else {}
    draft = new_draft(target, 1, target_layer_ids=[target.config.num_hidden_layers - 2], **fields)
    random = distance(target, draft)
    assert start_from_target(draft, target, prompt(20))
    assert distance(target, draft) < min(0.2, random / 4)


def test_the_layers_are_the_last_ones_in_order_and_the_deepest_tap_is_injected():
    target = make_target("llama")
    draft = new_draft(target, 2, target_layer_ids=[0, 2])
    assert start_from_target(draft, target, prompt(20))
    for own, source in zip(draft.layers, target.model.layers[-2:], strict=True):
        assert torch.equal(own.mlp.up_proj.weight, source.mlp.up_proj.weight)
    features = torch.randn(1, 3, 2 * target.config.hidden_size)
    torch.testing.assert_close(draft.fc(features), features[..., target.config.hidden_size :])


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"llama", "mistral", "qwen3"}))
def test_a_target_with_other_layers_leaves_the_draft_as_it_is(name):
    target = make_target(name)
    draft, untouched = (new_draft(target, 1, target_layer_ids=[2]) for _ in range(2))
    assert not start_from_target(draft, target, prompt(20))
    for own, before in zip(draft.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(own, before)


def test_more_layers_than_the_target_has_leave_the_draft_as_it_is():
    target = make_target("llama")
    assert not start_from_target(new_draft(target, 5, target_layer_ids=[0]), target, prompt(20))
    other = new_draft(target, 2, target_layer_ids=[0], hidden_act="gelu")  # the same shapes, another activation
    assert not start_from_target(other, target, prompt(20))

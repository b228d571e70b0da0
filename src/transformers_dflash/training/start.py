"""Where a new draft starts: at the target's last layers, since a draft writes what these write.

A draft's layers are Qwen3's, and so are many targets', but for a norm here and there. Taken over from the target, with
features that begin as the deepest tap alone, they make a draft that looks at its context from the first step on.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..modeling_dflash import DFlashDraftModel
from ..target import Target

_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_HEAD_NORMS = ("q_norm", "k_norm")  # which not every target has


@torch.no_grad()
def start_from_target(draft: DFlashDraftModel, model: PreTrainedModel, input_ids: torch.Tensor) -> bool:
    """Give a new draft the weights of the target's last layers, if these have its parts and sizes.

    The target's norm before attention goes into the projections behind it, which then serve the injected features as
    well as the block. Where a target does not norm queries and keys, the draft's norms start with the size that these
    have in it. A fused draft's features start as the deepest tap.

    Args:
        draft: with its initial weights.
        model: the target.
        input_ids: `(1, n)`, a text, to measure queries and keys by.

    Returns:
        Whether the target has enough such layers; else the draft is unchanged.
    """
    target, config = Target(model), draft.config
    sources: list[Any] = [layer for layer in target.layers if _fits(layer, draft.layers[0])][-len(draft.layers) :]
    if len(sources) < len(draft.layers):
        return False
    sizes = _head_sizes(model, sources, input_ids, config.head_dim)
    layer: Any  # not the Tensor | Module that nn.Module is typed to hold
    for layer, source, heads in zip(draft.layers, sources, sizes, strict=True):
        layer.load_state_dict(source.state_dict(), strict=False)
        before = _gain(source.input_layernorm, config.hidden_size)
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            projection.weight.mul_(before.to(projection.weight))  # (out, H)
        layer.input_layernorm.weight.fill_(1.0)
        layer.post_attention_layernorm.weight.copy_(_gain(source.post_attention_layernorm, config.hidden_size))
        for name, size in zip(_HEAD_NORMS, heads, strict=True):
            norm = dict(source.self_attn.named_children()).get(name)
            draft_norm = getattr(layer.self_attn, name)
            draft_norm.weight.copy_(size if norm is None else _gain(norm, config.head_dim))
    last = dict(model.get_decoder().named_children()).get("norm")
    if last is not None:
        draft.norm.weight.copy_(_gain(last, config.hidden_size))
    if config.context_injection == "fused":
        draft.fc.weight.zero_()
        draft.fc.weight[:, -config.target_hidden_size :].fill_diagonal_(1.0)  # (H, taps * H)
    return True


def _fits(source: nn.Module, layer: nn.Module) -> bool:
    """Whether a target's layer has the weights of a draft's, in its shapes, and its activation."""

    def shapes(module: nn.Module) -> dict[str, torch.Size | None]:
        return {
            name: parameter.shape if parameter.is_floating_point() and not parameter.is_meta else None
            for name, parameter in module.named_parameters()
            if not name.startswith(tuple(f"self_attn.{norm}." for norm in _HEAD_NORMS))
        }

    wanted = {name: shape for name, shape in shapes(layer).items() if name.partition(".")[0] in _PARTS}
    if shapes(source) != wanted:
        return False
    points = torch.linspace(-3.0, 3.0, 7)
    parts: list[Any] = [source, layer]
    theirs, ours = (part.mlp.act_fn(points) for part in parts)
    return torch.allclose(theirs, ours, atol=1e-3)


def _gain(norm: nn.Module, width: int) -> torch.Tensor:
    """What an RMS norm multiplies by, `(width,)`, however the family stores it: some keep the weight less one."""
    like = next(norm.parameters())
    return norm(torch.ones(1, 1, width, dtype=like.dtype, device=like.device))[0, 0]


def _head_sizes(
    model: PreTrainedModel, layers: list[Any], input_ids: torch.Tensor, head_dim: int
) -> list[list[torch.Tensor]]:
    """Of each layer, the root mean square of its queries' and of its keys' entries in a text."""
    sizes: list[list[torch.Tensor]] = [[] for _ in layers]

    def note(own: list[torch.Tensor], _module: nn.Module, _args: tuple, output: torch.Tensor) -> None:
        own.append(output.float().unflatten(-1, (-1, head_dim)).square().mean(-1).sqrt().mean())

    hooks = [
        projection.register_forward_hook(partial(note, own))
        for own, layer in zip(sizes, layers, strict=True)
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj)
    ]
    try:
        model(input_ids=input_ids.to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return sizes


__all__ = ["start_from_target"]

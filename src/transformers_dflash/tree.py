"""Verifying a tree of candidates in place of one chain, with the draft as it is (DDTree, arXiv 2604.12989).

One drafting pass gives a law for every place of a block: of the place alone, or, with the selector of a DFlash 2
draft, of the place and the token before it. So every prefix of tokens has a probability, the product of its tokens',
and a heap finds the likeliest prefixes. They form a tree: a prefix is never likelier than the one that it extends. The
target verifies anchor and nodes in one forward, each node seeing its ancestors alone, and the output follows the
target's own choices down the tree. Which nodes there are was decided before the target chose anything, so the target's
law is kept at any temperature.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

MOST_NODES = 1024  # the target's mask, and the work on it, grow by the square of their number
_MASKED_BY_ARGUMENT = ("eager", "sdpa")  # attention implementations that take any mask
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# They make windows of their own, which count rows of a block where a tree's depth should count.
_OWN_WINDOWS = {"gpt_neo"}
_takes_trees: WeakKeyDictionary[PreTrainedModel, dict[str, bool]] = WeakKeyDictionary()

# Of a place of the block and the token before it: descending log-probabilities, and the tokens that they belong to.
Law = Callable[[int, int], tuple[Sequence[float], Sequence[int]]]


@dataclass
class DraftTree:
    """Candidates as a tree below the anchor; a node comes after its parent.

    Rows of the block are numbered from the anchor, which is row 0: node i is row i + 1.

    Args:
        tokens: ids of the N nodes.
        parents: row of each node's parent.
        depths: 1 for those that follow the anchor.
        probabilities: by the draft, of each node's prefix.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def padded(self, count: int) -> "DraftTree":
        """The tree with children of the anchor added that nothing will choose, so that it has `count` nodes."""
        missing = count - len(self)
        return DraftTree(
            self.tokens + [0] * missing,
            self.parents + [0] * missing,
            self.depths + [1] * missing,
            self.probabilities + [0.0] * missing,
        )

    def first(self, count: int) -> "DraftTree":
        """The tree of its first `count` nodes."""
        return DraftTree(self.tokens[:count], self.parents[:count], self.depths[:count], self.probabilities[:count])

    def children(self) -> list[dict[int, int]]:
        """For every row, the rows of its children by their token."""
        rows: list[dict[int, int]] = [{} for _ in range(len(self) + 1)]
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            rows[parent][token] = node + 1
        return rows

    def ancestors(self) -> torch.Tensor:
        """bool `(N + 1, N + 1)`: whether row i sees row j: itself, its ancestors and the anchor."""
        seen = [[True] + [False] * len(self)]
        for node, parent in enumerate(self.parents):
            seen.append(seen[parent].copy())
            seen[-1][node + 1] = True
        return torch.tensor(seen)


def best_first_tree(law: Law, anchor: int, num_places: int, budget: int, least: float = -math.inf) -> DraftTree:
    """The `budget` likeliest prefixes.

    Args:
        law: asked only for what may follow a prefix that is taken.
        anchor: the token before the first place.
        num_places: of the block.
        budget: at most so many nodes.
        least: log-probability under which a prefix is left out.
    """
    tree = DraftTree()
    # Of a prefix that is taken, the next are its first extension and its next sibling: all others come after these.
    heap: list[tuple[float, int, int]] = []  # (-log-probability, parent's row, rank)
    rows: list[tuple[float, Sequence[float], Sequence[int]]] = []  # a prefix's log-probability, and what may follow it

    def extend(token: int, depth: int, reached: float) -> None:
        log_probs, token_ids = law(depth, token) if depth < num_places else ((), ())
        if log_probs and log_probs[0] > -math.inf:  # nan, and so left out, where processors forbid all tokens
            heapq.heappush(heap, (-(reached + log_probs[0]), len(rows), 0))
        rows.append((reached, log_probs, token_ids))

    extend(anchor, 0, 0.0)
    while heap and len(tree) < budget:
        cost, parent, rank = heapq.heappop(heap)
        if -cost < least:
            break
        reached, log_probs, token_ids = rows[parent]
        tree.tokens.append(token_ids[rank])
        tree.parents.append(parent)
        tree.depths.append(tree.depths[parent - 1] + 1 if parent else 1)
        tree.probabilities.append(math.exp(-cost))
        if rank + 1 < len(log_probs) and log_probs[rank + 1] > -math.inf:
            heapq.heappush(heap, (-(reached + log_probs[rank + 1]), parent, rank + 1))
        if len(tree) < budget:  # a law may be dear to ask for
            extend(tree.tokens[-1], tree.depths[-1], -cost)
    return tree


def tree_inputs(
    model: PreTrainedModel, cache: Cache, trees: list[DraftTree], num_cached: int, inputs: dict[str, Any]
) -> dict[str, Any]:
    """The target's inputs for anchors and nodes, from those that chains of as many candidates would have.

    Args:
        cache: the target's, before the block.
        trees: of N nodes each, one for every row of the batch.
        num_cached: tokens that it holds.
        inputs: `position_ids` `(b, N + 1)`, and an `attention_mask` `(b, num_cached + N + 1)` or none.
    """
    positions = inputs["position_ids"]
    depths = torch.tensor([[0, *tree.depths] for tree in trees])  # (b, N + 1)
    ancestors = torch.stack([tree.ancestors() for tree in trees])  # (b, N + 1, N + 1)
    mask = inputs.get("attention_mask")
    kept = None if mask is None else mask[:, :num_cached].cpu() != 0  # (b, n), False where a row has padding
    masks = {
        "full_attention" if window is None else "sliding_attention": _as_argument(
            model, _seen(ancestors, depths, num_cached, kept, window).to(positions.device)
        )
        for window in set(_windows(cache))
    }
    return inputs | {
        "attention_mask": masks if len(masks) > 1 else next(iter(masks.values())),
        "position_ids": positions[:, :1] + depths.to(positions.device),
    }


def _seen(
    ancestors: torch.Tensor, depths: torch.Tensor, num_cached: int, kept: torch.Tensor | None, window: int | None
) -> torch.Tensor:
    """Which keys the rows of the blocks see: bool `(b, N + 1, columns + N + 1)`, of the columns that a layer holds."""
    held = num_cached if window is None else min(num_cached, window - 1)
    context = torch.ones(*depths.shape, held, dtype=torch.bool)
    if kept is not None:
        context &= kept[:, None, num_cached - held :]
    if window is not None:
        context &= depths[:, :, None] + held - torch.arange(held) < window
        ancestors = ancestors & (depths[:, :, None] - depths[:, None] < window)
    return torch.cat([context, ancestors], dim=2)


def _as_argument(model: PreTrainedModel, seen: torch.Tensor) -> torch.Tensor:
    seen = seen[:, None]  # (b, 1, N + 1, columns + N + 1)
    if model.config._attn_implementation == "sdpa":
        return seen
    least = torch.finfo(model.dtype).min
    return torch.zeros(seen.shape, dtype=model.dtype, device=seen.device).masked_fill_(~seen, least)


def why_no_tree(
    model: PreTrainedModel, cache: Cache, cache_name: str, position_ids: torch.Tensor | None
) -> str | None:
    """Why this target cannot verify a tree; None if it can.

    Args:
        cache: the target's, after the prefill.
        cache_name: what the target's forward calls it.
        position_ids: of the anchor, as the target's forward would get them.
    """
    if cache.offloading:
        return "its cache is offloaded, and a layer may be on its way back while a tree's path is moved in it"
    kinds = {type(layer) for layer in cache.layers}
    if not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
        others = ", ".join(sorted(kind.__name__ for kind in kinds - {DynamicLayer, DynamicSlidingWindowLayer}))
        return f"its cache has layers of type {others}"
    if _windows(cache) != _windows(DynamicCache(config=model.config)):
        return "its cache was not made for its config, with which sliding layers keep what their windows show"
    text = model.config.get_text_config(decoder=True)
    if text.model_type in _OWN_WINDOWS:
        return "it makes its windows by itself"
    if not set(getattr(text, "layer_types", None) or ()) <= _LAYER_TYPES:
        return f"it has layers of types {', '.join(sorted(set(text.layer_types) - _LAYER_TYPES))}"
    implementation = text._attn_implementation
    if implementation not in _MASKED_BY_ARGUMENT:
        return f"its attention implementation {implementation} takes no such mask (eager and sdpa do)"
    if position_ids is None:
        return "it counts positions by itself"
    if position_ids.dim() != 2:
        return "its positions have several axes"
    known = _takes_trees.setdefault(model, {})
    if implementation not in known:
        known[implementation] = _verifies_a_small_tree(model, cache_name, position_ids.device)
    return None if known[implementation] else "it does not give a tree's nodes the logits that it gives their chains"


def _windows(cache: Cache) -> list[int | None]:
    """The sliding window of each layer, None where it is full."""
    return [layer.sliding_window if layer.is_sliding else None for layer in cache.layers]


@torch.no_grad()
def _verifies_a_small_tree(model: PreTrainedModel, cache_name: str, device: torch.device) -> bool:
    """Whether two siblings, and a child of the first, get the logits that they would get in chains of their own.

    Some classes make masks of their own whatever they are given, or take positions from their cache. The measure is
    how far off the nodes would be if they saw each other, so that it holds in any precision.
    """
    size = model.config.get_text_config(decoder=True).vocab_size
    prompt, anchor, one, other, child = [3 % size, 5 % size, 7 % size], 11 % size, 13 % size, 17 % size, 19 % size

    def last(*ids: int) -> torch.Tensor:
        tokens = torch.tensor([[*prompt, anchor, *ids]], device=device)
        return model(input_ids=tokens, use_cache=False).logits[0, -1].float()

    tree = DraftTree(tokens=[one, other, child], parents=[0, 0, 1], depths=[1, 1, 2])
    cache = DynamicCache(config=model.config)
    try:
        model(input_ids=torch.tensor([prompt], device=device), **{cache_name: cache})
        block = torch.tensor([[anchor, *tree.tokens]], device=device)
        start = len(prompt)
        positions = torch.arange(start, start + len(tree) + 1, device=device)[None]
        inputs = tree_inputs(model, cache, [tree], start, {"position_ids": positions})
        got = model(input_ids=block, **inputs, **{cache_name: cache}).logits[0, 2:].float()
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False
    expected = torch.stack([last(other), last(one, child)])
    wrong = torch.stack([last(one, other), last(one, other, child)])
    off, tolerated = (got - expected).norm(dim=-1), (wrong - expected).norm(dim=-1) / 4
    return bool((off < tolerated).all())


__all__ = ["MOST_NODES", "DraftTree", "Law", "best_first_tree", "tree_inputs", "why_no_tree"]

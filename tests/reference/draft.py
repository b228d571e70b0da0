"""A DFlash draft as the paper (arXiv 2602.06036) describes it: slow, obvious, without a cache, in float64.

It takes the weights and the config of a `DFlashDraftModel` and nothing of its code: masks are decided element by
element, attention is computed slot by slot and head by head, rotary angles position by position. It does not know
batches of unequal kind, caches, dtypes or devices.
"""

import math

import torch


def sees(slot: int, key: int, *, causal: bool, window: int | None) -> bool:
    """Whether the slot at sequence index `slot` may look at the key at sequence index `key`."""
    if causal and key > slot:
        return False
    return window is None or abs(slot - key) < window


def dense_mask(num_context: int, block_length: int, *, causal: bool, window: int | None) -> list[list[bool]]:
    """Per slot of the block, which of the `num_context + block_length` keys it sees."""
    keys = range(num_context + block_length)
    return [[sees(num_context + j, key, causal=causal, window=window) for key in keys] for j in range(block_length)]


def rotary_frequencies(config, length: int) -> tuple[list[float], float]:
    """Angular frequency of each pair of a head's dimensions, and the factor on cosines and sines.

    Args:
        config: the draft's.
        length: of the sequence so far, for the kinds that depend on it.
    """
    rope, d = config.rope_parameters, config.head_dim
    base, kind = rope["rope_theta"], rope["rope_type"]
    pairs = range(d // 2)
    plain = [base ** (-2 * i / d) for i in pairs]
    trained = rope.get("original_max_position_embeddings", config.max_position_embeddings)
    if kind == "default":
        return plain, 1.0
    if kind == "linear":  # positions are divided
        return [f / rope["factor"] for f in plain], 1.0
    if kind == "dynamic":  # the base grows past the trained length
        excess = max(1.0, rope["factor"] * length / config.max_position_embeddings - (rope["factor"] - 1))
        base *= excess ** (d / (d - 2))
        return [base ** (-2 * i / d) for i in pairs], 1.0
    if kind == "longrope":  # a factor per pair of dimensions, one list up to the trained length and one beyond
        factors = rope["long_factor"] if length > trained else rope["short_factor"]
        scale = math.sqrt(1 + math.log(rope["factor"]) / math.log(trained))
        return [f / factor for f, factor in zip(plain, factors, strict=True)], scale
    if kind == "llama3":  # long wavelengths are divided, short ones kept, those between blended
        frequencies = []
        for f in plain:
            turns = trained * f / (2 * math.pi)
            kept = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            kept = min(1.0, max(0.0, kept))
            frequencies.append(kept * f + (1 - kept) * f / rope["factor"])
        return frequencies, 1.0
    if kind == "yarn":  # arXiv 2309.00071: a ramp between the dimensions that turn 32 times and once
        low, high = (
            d * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (rope.get("beta_fast", 32), rope.get("beta_slow", 1))
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), d - 1)
        frequencies = []
        for i, f in enumerate(plain):
            divided = min(1.0, max(0.0, (i - low) / (high - low)))
            frequencies.append(divided * f / rope["factor"] + (1 - divided) * f)
        return frequencies, 0.1 * math.log(rope["factor"]) + 1
    raise NotImplementedError(kind)


def rotate(head: torch.Tensor, position: int, frequencies: list[float], scale: float) -> torch.Tensor:
    """Turn each pair `(i, i + d/2)` of one head `(d,)` by position times frequency."""
    cos = head.new_tensor([scale * math.cos(position * f) for f in frequencies])
    sin = head.new_tensor([scale * math.sin(position * f) for f in frequencies])
    first, second = head[: len(frequencies)], head[len(frequencies) :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin])


class ReferenceDraft:
    """Hidden states of one block from all of its context at once.

    Args:
        state_dict: of a `DFlashDraftModel`.
        config: its `DFlashDraftConfig`.
    """

    def __init__(self, state_dict: dict[str, torch.Tensor], config):
        self.weights = {name: tensor.double() for name, tensor in state_dict.items()}
        self.config = config

    def __call__(
        self,
        noise_embeds: torch.Tensor,
        features: torch.Tensor,
        positions: list[int] | None = None,
        padding: list[bool] | None = None,
    ) -> torch.Tensor:
        """One block of one sequence.

        Args:
            noise_embeds: `(B, H)`.
            features: `(n, taps * H_target)`.
            positions: of the n context tokens and the B slots; 0, 1, ... where not given.
            padding: True at keys that are padding.

        Returns:
            `(B, H)`, normed, float64.
        """
        length = len(features) + len(noise_embeds)
        positions = list(range(length)) if positions is None else positions
        padding = [False] * length if padding is None else padding
        hidden = noise_embeds.double()
        for layer in range(self.config.num_hidden_layers):
            context = self.context_of_layer(layer, features.double())
            normed = self.norm(hidden, f"layers.{layer}.input_layernorm")
            hidden = hidden + self.attention(layer, normed, context, positions, padding)
            hidden = hidden + self.mlp(layer, self.norm(hidden, f"layers.{layer}.post_attention_layernorm"))
        return self.norm(hidden, "norm")

    def context_of_layer(self, layer: int, features: torch.Tensor) -> torch.Tensor:
        """What is injected into a layer: the fused vector, or the layer's own tap, `(n, H)`."""
        if self.config.tap_norm:
            taps = features.split(self.config.target_hidden_size, dim=1)
            weights = self.weights["tap_norm.weight"]
            features = torch.cat([self.rms_norm(tap, own) for tap, own in zip(taps, weights, strict=True)], dim=1)
        if self.config.context_injection == "layer_aligned":
            width = self.config.hidden_size
            return features[:, layer * width : (layer + 1) * width]
        return self.norm(self.linear(features, "fc"), "hidden_norm")

    def attention(self, layer, hidden, context, positions, padding) -> torch.Tensor:
        config, prefix = self.config, f"layers.{layer}.self_attn"
        kind = config.layer_types[layer]
        mask = dense_mask(
            len(context),
            len(hidden),
            causal=kind in config.causal_layer_types,
            window=config.sliding_window if kind == "sliding_attention" else None,
        )
        frequencies, scale = rotary_frequencies(config, max(positions) + 1)
        d, groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads

        def heads_of(x, name, at_positions):
            """Normed and turned heads: `[token][head] -> (d,)`."""
            projected = self.linear(x, f"{prefix}.{name}_proj")
            return [
                [
                    rotate(self.norm(head, f"{prefix}.{name}_norm"), position, frequencies, scale)
                    for head in row.split(d)
                ]
                for row, position in zip(projected, at_positions, strict=True)
            ]

        sources = torch.cat([context, hidden])  # (n + B, H)
        queries = heads_of(hidden, "q", positions[len(context) :])
        keys = heads_of(sources, "k", positions)
        values = self.linear(sources, f"{prefix}.v_proj")
        rows = []
        for j in range(len(hidden)):
            seen = [i for i in range(len(sources)) if mask[j][i] and not padding[i]]
            outputs = []
            for h in range(config.num_attention_heads):
                shared = h // groups  # the key-value head of this query head
                scores = torch.stack([queries[j][h] @ keys[i][shared] for i in seen])
                weights = torch.exp(scores / math.sqrt(d))
                outputs.append((weights / weights.sum()) @ values[seen, shared * d : (shared + 1) * d])
            rows.append(torch.cat(outputs))
        return self.linear(torch.stack(rows), f"{prefix}.o_proj")

    def mlp(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        gate = self.linear(hidden, f"layers.{layer}.mlp.gate_proj")
        up = self.linear(hidden, f"layers.{layer}.mlp.up_proj")
        return self.linear(gate / (1 + torch.exp(-gate)) * up, f"layers.{layer}.mlp.down_proj")

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        result = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return result if bias is None else result + bias

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.rms_norm(x, self.weights[f"{name}.weight"])

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config.rms_norm_eps) * weight

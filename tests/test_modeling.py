"""The draft's forward pass: equal to a slow reference, with and without caches, in every attention implementation."""

import copy

import pytest
import torch
from conftest import VOCAB
from reference.draft import ReferenceDraft, dense_mask
from transformers.cache_utils import DFlashCache

from transformers_dflash import DFlashDraftConfig, DFlashDraftModel
from transformers_dflash.modeling_dflash import BlockMasks, block_attention_mask

H, B, WINDOW, START = 32, 5, 8, 100
FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [2.0, 4.0, 6.0, 9.0],
    "original_max_position_embeddings": 128,
}
LAYERS = {
    "one full layer": {"num_hidden_layers": 1, "layer_types": [FULL]},
    "full layers": {"layer_types": [FULL, FULL]},
    "full causal layers": {"layer_types": [FULL, FULL], "causal_layer_types": [FULL]},
    "sliding layers": {"layer_types": [SLIDING, SLIDING]},
    "sliding causal layers": {"layer_types": [SLIDING, SLIDING], "causal_layer_types": [SLIDING]},
    "mixed": {},
    "mixed, sliding causal": {"causal_layer_types": [SLIDING]},
    "mixed, both causal": {"causal_layer_types": [FULL, SLIDING]},
    "window below block": {"sliding_window": 3},
    "window of one": {"sliding_window": 1, "causal_layer_types": [SLIDING]},
}
SHAPES = {
    "one key-value head": {"num_key_value_heads": 1},
    "no grouped heads": {"num_key_value_heads": 4},
    "attention bias": {"attention_bias": True},
    "wide heads": {"head_dim": 12},
    "one tap": {"target_layer_ids": [2]},
    "more taps than layers": {"target_layer_ids": [0, 1, 2, 3, 4]},
    "narrower target": {"target_hidden_size": 20},
    "layer-aligned": {"context_injection": "layer_aligned"},
    "normed taps": {"tap_norm": True},
    "normed taps of a narrower target": {"tap_norm": True, "target_hidden_size": 20},
    "normed taps, layer-aligned": {"tap_norm": True, "context_injection": "layer_aligned"},
    "layer-aligned, causal": {"context_injection": "layer_aligned", "causal_layer_types": [SLIDING]},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    "yarn rope": {"rope_parameters": YARN},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "longrope": {"rope_parameters": LONGROPE},
    "dynamic rope within trained length": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    },
}


def build(attn_implementation: str = "eager", **fields) -> DFlashDraftModel:
    """A tiny draft of two layers, full and sliding, in which every weight matters."""
    torch.manual_seed(0)
    config = DFlashDraftConfig(
        **{
            "block_size": B,
            "mask_token_id": VOCAB - 1,
            "target_layer_ids": [1, 3],
            "hidden_size": H,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "layer_types": [FULL, SLIDING],
            "sliding_window": WINDOW,
            "max_position_embeddings": 512,
            "vocab_size": VOCAB,
            "attn_implementation": attn_implementation,
        }
        | fields
    )
    model = DFlashDraftModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model


def as_implementation(model: DFlashDraftModel, attn_implementation: str) -> DFlashDraftModel:
    """The same draft with another attention function."""
    other = copy.deepcopy(model)
    other.set_attn_implementation(attn_implementation)
    return other


def random_inputs(model: DFlashDraftModel, num_context: int, batch: int = 1, seed: int = 1):
    """Block embeddings `(b, B, H)` and features `(b, n, taps * H_target)`."""
    generator = torch.Generator().manual_seed(seed)
    width = model.config.target_hidden_size * len(model.config.target_layer_ids)
    return (
        torch.randn(batch, B, H, generator=generator),
        torch.randn(batch, num_context, width, generator=generator),
    )


def assert_near(ours: torch.Tensor, expected: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(ours.double(), expected.double(), atol=atol, rtol=0)


# the forward pass against the reference


@torch.no_grad()
@pytest.mark.parametrize("num_context", [0, 1, WINDOW - 3, WINDOW, 20], ids=lambda n: f"context{n}")
@pytest.mark.parametrize("start", [0, START], ids=lambda s: f"start{s}")
@pytest.mark.parametrize("fields", LAYERS.values(), ids=LAYERS)
def test_forward_equals_the_reference_whatever_layers_see(fields, start, num_context):
    model = build(**fields)
    noise, features = random_inputs(model, num_context)
    positions = list(range(start, start + num_context + B))
    ours = model(noise, features, position_ids=torch.tensor([positions])).last_hidden_state
    assert_near(ours[0], ReferenceDraft(model.state_dict(), model.config)(noise[0], features[0], positions))


@torch.no_grad()
@pytest.mark.parametrize("num_context", [0, 20], ids=lambda n: f"context{n}")
@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_forward_equals_the_reference_in_every_shape(fields, num_context):
    model = build(**fields)
    noise, features = random_inputs(model, num_context)
    positions = list(range(START, START + num_context + B))
    ours = model(noise, features, position_ids=torch.tensor([positions])).last_hidden_state
    assert_near(ours[0], ReferenceDraft(model.state_dict(), model.config)(noise[0], features[0], positions))


@torch.no_grad()
@pytest.mark.parametrize("name", ["layer-aligned", "normed taps", "normed taps, layer-aligned"])
def test_a_long_prompt_is_projected_in_parts(monkeypatch, name):
    model = build(**SHAPES[name])
    noise, features = random_inputs(model, 20, batch=2)
    whole = model(noise, features).last_hidden_state
    monkeypatch.setattr("transformers_dflash.modeling_dflash._CONTEXT_PART", 8)
    assert_near(model(noise, features).last_hidden_state, whole)


@torch.no_grad()
@pytest.mark.parametrize("rope", [LONGROPE, SHAPES["dynamic rope within trained length"]["rope_parameters"]])
def test_rope_that_depends_on_length_follows_the_positions_past_it(rope):
    model = build(rope_parameters=rope)
    noise, features = random_inputs(model, 4)
    positions = list(range(700, 704 + B))
    ours = model(noise, features, position_ids=torch.tensor([positions])).last_hidden_state
    assert_near(ours[0], ReferenceDraft(model.state_dict(), model.config)(noise[0], features[0], positions), 5e-5)


@torch.no_grad()
def test_positions_default_to_zero_on_and_go_on_after_a_cache():
    model = build()
    noise, features = random_inputs(model, 20)
    explicit = model(noise, features, position_ids=torch.arange(20 + B)[None]).last_hidden_state
    assert_near(model(noise, features).last_hidden_state, explicit)
    cache = model.make_cache()
    model(noise, features[:, :12], cache=cache)
    assert_near(model(noise, features[:, 12:], cache=cache).last_hidden_state, explicit)


@torch.no_grad()
def test_only_distances_count_not_where_positions_start():
    model = build()
    noise, features = random_inputs(model, 6)
    here, there = (
        model(noise, features, position_ids=torch.arange(s, s + 6 + B)[None]).last_hidden_state for s in (0, 300)
    )
    assert_near(here, there, 1e-4)


@torch.no_grad()
@pytest.mark.parametrize("axes", [3, 4])
def test_position_triples_give_their_text_axis(axes):
    model = build()
    noise, features = random_inputs(model, 6)
    text = torch.arange(50, 56 + B)[None]
    triples = torch.stack([text, *(torch.full_like(text, axis) for axis in range(1, axes))])  # (axes, 1, n + B)
    expected = model(noise, features, position_ids=text).last_hidden_state
    assert torch.equal(model(noise, features, position_ids=triples).last_hidden_state, expected)


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, {"causal_layer_types": [SLIDING]}], ids=["bidirectional", "sliding causal"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_padded_keys_are_not_seen(implementation, fields):
    model = build(implementation, **fields)
    noise, features = random_inputs(model, 14, batch=2)
    mask = torch.ones(2, 14 + B, dtype=torch.long)
    mask[1, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    ours = model(noise, features, position_ids=positions, attention_mask=mask).last_hidden_state
    reference = ReferenceDraft(model.state_dict(), model.config)
    for row in range(2):
        padding = (mask[row] == 0).tolist()
        assert_near(ours[row], reference(noise[row], features[row], positions[row].tolist(), padding))
    alone = model(noise[1:], features[1:, 5:]).last_hidden_state
    assert_near(ours[1:], alone)


@torch.no_grad()
def test_padding_reaches_back_over_a_cache():
    model = build()
    noise, features = random_inputs(model, 14, batch=2)
    mask = torch.ones(2, 14 + B, dtype=torch.long)
    mask[1, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    whole = model(noise, features, position_ids=positions, attention_mask=mask).last_hidden_state
    cache = model.make_cache()
    model(noise, features[:, :11], position_ids=positions[:, : 11 + B], attention_mask=mask[:, : 11 + B], cache=cache)
    rest = model(noise, features[:, 11:], position_ids=positions[:, 11:], attention_mask=mask, cache=cache)
    assert_near(rest.last_hidden_state, whole)


@torch.no_grad()
@pytest.mark.parametrize("as_dict", [False, True], ids=["one for all", "by layer type"])
def test_masks_made_by_the_caller_are_taken_as_they_are(as_dict):
    model = build("sdpa")
    noise, features = random_inputs(model, 6)
    mask = torch.ones(1, 1, B, 6 + B, dtype=torch.bool)
    mask[..., :3] = False
    given = {FULL: mask, SLIDING: mask} if as_dict else mask
    ours = model(noise, features, attention_mask=given).last_hidden_state
    padding = [True] * 3 + [False] * (3 + B)
    full = build("sdpa", layer_types=[FULL, FULL])
    assert_near(ours[0], ReferenceDraft(full.state_dict(), full.config)(noise[0], features[0], padding=padding))


# masks


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 50])
def test_mask_equals_brute_force_element_by_element(window, causal):
    for num_context in (0, 1, 6, 7, 8, 9, 40):
        for block_length in (1, 2, 5):
            mask = block_attention_mask(
                block_length, num_context + block_length, causal=causal, sliding_window=window, device="cpu"
            )
            expected = torch.tensor(dense_mask(num_context, block_length, causal=causal, window=window))
            if mask is None:
                assert expected.all()
            else:
                assert torch.equal(mask, expected)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", [FULL, SLIDING])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_a_later_mask_slot_changes_an_earlier_row_only_where_the_block_is_bidirectional(implementation, kind, causal):
    model = build(implementation, layer_types=[kind, kind], causal_layer_types=[kind] if causal else [])
    noise, features = random_inputs(model, 6)
    before = model(noise, features).last_hidden_state
    for slot in range(1, B):
        changed = noise.clone()
        changed[:, slot] += 1.0
        difference = (model(changed, features).last_hidden_state - before).abs().amax(-1)[0]
        assert (difference[slot:] > 1e-4).all()  # later rows always see it
        assert (difference[:slot] == 0).all() if causal else (difference[:slot] > 1e-4).all()


def test_masks_are_built_once_per_layer_kind_and_device():
    model = build("sdpa", layer_types=[SLIDING, SLIDING])
    masks = BlockMasks(None, B, "sdpa")
    first, second = (layer.self_attn for layer in model.layers)
    query = torch.zeros(1, 4, B, 8)
    mask = masks.of_layer(first, query, 20)
    assert masks.of_layer(second, query, 20) is mask
    assert masks.of_layer(second, query.to("meta"), 20).device.type == "meta"  # a draft spread over devices


# attention implementations


@torch.no_grad()
@pytest.mark.parametrize("fields", LAYERS.values(), ids=LAYERS)
def test_eager_equals_sdpa(fields):
    eager = build(**fields)
    sdpa = as_implementation(eager, "sdpa")
    for num_context in (0, 6, 20):
        inputs = random_inputs(eager, num_context, batch=2)
        assert_near(sdpa(*inputs).last_hidden_state, eager(*inputs).last_hidden_state)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize(
    "fields", [LAYERS["full layers"], LAYERS["mixed, sliding causal"]], ids=["full layers", "mixed, sliding causal"]
)
def test_eager_equals_flex_attention(fields, padded):
    eager = build(head_dim=16, **fields)
    flex = as_implementation(eager, "flex_attention")
    for num_context in (6, 20):
        inputs = random_inputs(eager, num_context, batch=2)
        mask = torch.ones(2, num_context + B, dtype=torch.long)
        mask[1, :4] = 0
        options = {"attention_mask": mask} if padded else {}
        assert_near(flex(*inputs, **options).last_hidden_state, eager(*inputs, **options).last_hidden_state)


# caches


def rounds_of(total: int, seed: int = 0) -> list[tuple[int, int]]:
    """Spans of context that grow as accepted tokens do: a prompt of 6, then 1 to B at a time."""
    generator = torch.Generator().manual_seed(seed)
    spans, end = [(0, 6)], 6
    while end < total:
        start, end = end, min(total, end + int(torch.randint(1, B + 1, (), generator=generator)))
        spans.append((start, end))
    return spans


@torch.no_grad()
@pytest.mark.parametrize("fields", [*LAYERS.values(), SHAPES["layer-aligned"]], ids=[*LAYERS, "layer-aligned"])
def test_cached_rounds_equal_a_stateless_recompute(fields):
    model = build("sdpa", **fields)
    _, features = random_inputs(model, 40, batch=2)
    cache = model.make_cache()
    for start, end in rounds_of(40):
        noise = torch.randn(2, B, H)
        positions = torch.arange(start, end + B)[None]
        ours = model(noise, features[:, start:end], position_ids=positions, cache=cache).last_hidden_state
        assert len(cache) == cache.get_seq_length() == end
        assert_near(ours, model(noise, features[:, :end]).last_hidden_state)


@torch.no_grad()
def test_cache_grows_its_buffers_and_drops_what_sliding_layers_no_longer_see():
    model = build("sdpa")
    _, features = random_inputs(model, 600)
    cache = model.make_cache()
    full, sliding = cache.layers
    capacities = set()
    for start, end in rounds_of(600):
        noise = torch.randn(1, B, H)
        positions = torch.arange(start, end + B)[None]
        ours = model(noise, features[:, start:end], position_ids=positions, cache=cache).last_hidden_state
        if end % 7 == 0 or end > 580:
            assert_near(ours, model(noise, features[:, :end]).last_hidden_state)
        capacities.add(full.keys.shape[2])
    assert len(capacities) > 1
    assert max(capacities) >= 600
    assert sliding.keys.shape[2] == 256
    assert sliding.length == full.length == 600
    assert full.offset == 0 < sliding.offset


@torch.no_grad()
def test_a_prompt_longer_than_the_first_buffer_fits():
    model = build("sdpa")
    noise, features = random_inputs(model, 400)
    cache = model.make_cache()
    model(noise, features[:, :399], cache=cache)
    ours = model(noise, features[:, 399:], cache=cache).last_hidden_state
    assert_near(ours, model(noise, features).last_hidden_state)


@torch.no_grad()
def test_blocks_of_changing_length_share_a_cache():
    model = build("sdpa")
    _, features = random_inputs(model, 30)
    cache = model.make_cache()
    for (start, end), length in zip(rounds_of(30), [5, 2, 4, 1, 5, 3] * 3, strict=False):
        noise = torch.randn(1, length, H)
        ours = model(noise, features[:, start:end], cache=cache).last_hidden_state
        assert_near(ours, model(noise, features[:, :end]).last_hidden_state)


@torch.no_grad()
@pytest.mark.parametrize("argument", ["cache", "past_key_values"])
@pytest.mark.parametrize(
    "fields",
    [LAYERS["full layers"], LAYERS["sliding layers"], LAYERS["mixed, sliding causal"]],
    ids=["full layers", "sliding layers", "mixed, sliding causal"],
)
def test_transformers_own_cache_drives_the_forward(fields, argument):
    model = build("sdpa", **fields)
    _, features = random_inputs(model, 40)
    ours, theirs = model.make_cache(), DFlashCache(config=model.config)
    theirs.activate_past_recording()
    for start, end in rounds_of(40):
        noise = torch.randn(1, B, H)
        theirs.set_previous_accepted_tokens(end - start)
        inputs = {"position_ids": torch.arange(start, end + B)[None]}
        native = model(noise, features[:, start:end], **inputs, **{argument: theirs}).last_hidden_state
        theirs.crop(-B)
        assert theirs.get_seq_length() == end
        assert_near(native, model(noise, features[:, start:end], **inputs, cache=ours).last_hidden_state)


# precision and training


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_bfloat16_runs_and_is_near_float32(implementation):
    model = build(implementation, causal_layer_types=[SLIDING])
    noise, features = random_inputs(model, 20)
    expected = model(noise, features).last_hidden_state
    half = model.to(torch.bfloat16)(noise.bfloat16(), features.bfloat16()).last_hidden_state
    assert half.dtype == torch.bfloat16
    assert half.isfinite().all()
    assert (half.float() - expected).abs().mean() < 0.05 * expected.abs().mean()


@pytest.mark.parametrize(
    "fields",
    [{}, {"causal_layer_types": [SLIDING]}, {"attention_bias": True}, {"context_injection": "layer_aligned"}],
    ids=["fused", "sliding causal", "attention bias", "layer-aligned"],
)
def test_gradients_reach_every_parameter_and_equal_the_references(fields):
    model = build("sdpa", **fields).train()
    noise, features = random_inputs(model, 20)
    direction = torch.randn(B, H)
    parameters = dict(model.named_parameters())
    outputs = {
        "ours": model(noise, features).last_hidden_state[0],
        "reference": ReferenceDraft(parameters, model.config)(noise[0], features[0]),
    }
    gradients = {
        who: torch.autograd.grad((output * direction).sum(), parameters.values()) for who, output in outputs.items()
    }
    for name, ours, expected in zip(parameters, gradients["ours"], gradients["reference"], strict=True):
        assert ours.abs().sum() > 0, name
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-3, msg=name)


def test_gradient_checkpointing_gives_the_same_gradients():
    plain = build("sdpa").train()
    saving = copy.deepcopy(plain)
    saving.gradient_checkpointing_enable()
    assert saving.is_gradient_checkpointing
    inputs = random_inputs(plain, 20)
    for model in (plain, saving):
        model(*inputs).last_hidden_state.square().sum().backward()
    for (name, expected), ours in zip(plain.named_parameters(), saving.parameters(), strict=True):
        assert torch.allclose(ours.grad, expected.grad, atol=1e-5), name


# parts


def test_layer_aligned_injection_has_no_projection():
    fused, aligned = build(), build(context_injection="layer_aligned")
    gone = fused.state_dict().keys() - aligned.state_dict().keys()
    assert gone == {"fc.weight", "hidden_norm.weight"}
    assert not aligned.state_dict().keys() - fused.state_dict().keys()


def test_draft_has_the_published_tensors_and_no_other():
    model = build(num_hidden_layers=5, layer_types=[FULL] * 5)
    names = set(model.state_dict())
    assert len(names) == 58
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.4.self_attn.q_norm.weight"} <= names


def test_attention_bias_reaches_the_output_projection():
    names = build(attention_bias=True).state_dict().keys() - build().state_dict().keys()
    assert names == {f"layers.{i}.self_attn.{name}_proj.bias" for i in (0, 1) for name in "qkvo"}


def test_a_draft_is_no_generator():
    model = build()
    assert not model.can_generate()
    assert not callable(getattr(model, "generate", None))
    assert model.get_input_embeddings is not None
    assert model.main_input_name == "noise_embeds"


@torch.no_grad()
def test_reduced_logits_land_on_the_target_ids_that_d2t_names():
    model = build(draft_vocab_size=4)
    model.d2t.copy_(torch.tensor([0, 2, 2, 20]))  # draft ids 0, 1, 2, 3 are target ids 0, 3, 4, 23
    hidden = torch.randn(2, 3, H)
    logits = model.expand_reduced_logits(hidden, VOCAB)
    reduced = hidden @ model.lm_head.weight.T
    assert logits.shape == (2, 3, VOCAB)
    for target_id in range(VOCAB):
        expected = {0: 0, 3: 1, 4: 2, 23: 3}.get(target_id)
        if expected is None:
            assert (logits[..., target_id] == float("-inf")).all()
        else:
            assert_near(logits[..., target_id], reduced[..., expected])

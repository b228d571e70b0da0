"""Our forward pass and loading against other people's classes, on the same folders and inputs."""

import pytest
import torch
from conftest import REAL_DRAFT, make_target
from layouts import DFLASH2, SLIDING, ZLAB, changed, write_draft
from safetensors.torch import load_file, save_file
from test_export import DRAFTS, ONLY_SPECULATORS, ONLY_ZLAB
from transformers import AutoModel, Qwen3Config

from transformers_dflash.conversion.export import convert

pytestmark = pytest.mark.peers

MASK = 31


def assert_near(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


# z-lab's package, dflash


@pytest.fixture
def zlab():
    return pytest.importorskip("dflash.model", reason="z-lab's package is absent: pip install --no-deps dflash==0.1.0")


def compare_rounds(zlab, folder, accepted: tuple[int, ...]) -> None:
    """Draft round by round with both classes, each with its own cache."""
    ours = AutoModel.from_pretrained(folder, dtype=torch.float32)
    theirs = zlab.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    assert theirs.target_layer_ids == ours.config.target_layer_ids
    assert (theirs.block_size, theirs.mask_token_id) == (ours.config.block_size, ours.config.mask_token_id)
    config, block = ours.config, ours.config.block_size
    width = len(config.target_layer_ids) * config.hidden_size
    mine, other = ours.make_cache(), zlab._make_cache(theirs.config)
    torch.manual_seed(0)
    start = 0
    for length in accepted:
        noise, features = torch.randn(1, block, config.hidden_size), torch.randn(1, length, width)
        positions = torch.arange(start, start + length + block)[None]
        expected = theirs(
            position_ids=positions,
            noise_embedding=noise,
            target_hidden=features,
            past_key_values=other,
            use_cache=True,
        )
        start += length
        zlab._crop_to(other, start)
        assert_near(ours(noise, features, position_ids=positions, cache=mine).last_hidden_state, expected)


ZLAB_VARIANTS = {
    "full": ZLAB,
    "full causal": changed(ZLAB, is_causal=True),
    "mixed, sliding causal": changed(ZLAB, **SLIDING),
    "mixed, none causal": changed(ZLAB, **SLIDING, is_causal=False),
    "mixed, all causal": changed(ZLAB, **SLIDING, is_causal=True),
    "max_window_layers": changed(
        ZLAB, ("layer_types",), sliding_window=8, use_sliding_window=True, max_window_layers=1
    ),
    "more taps than layers": changed(ZLAB, dflash_config={"target_layer_ids": [0, 1, 2, 3]}),
    "nested block size": changed(ZLAB, ("block_size",), dflash_config={"block_size": 5}),
    "attention bias": changed(ZLAB, attention_bias=True),
    "yarn": changed(
        ZLAB,
        ("rope_theta",),
        rope_scaling={
            "type": "yarn",
            "rope_theta": 50000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "leaked target fields": changed(
        ZLAB,
        ("rope_scaling", "rope_theta"),
        partial_rotary_factor=0.25,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
    ),
    "no head_dim": changed(ZLAB, ("head_dim",)),
}


@torch.no_grad()
@pytest.mark.parametrize("prompt", [3, 30], ids=lambda n: f"prompt{n}")
@pytest.mark.parametrize("config", ZLAB_VARIANTS.values(), ids=ZLAB_VARIANTS)
def test_zlabs_class_gives_the_same_hidden_states(zlab, tmp_path, config, prompt):
    compare_rounds(zlab, write_draft(tmp_path, config), (prompt, 1, 5, 3, 2, 5, 4))


@torch.no_grad()
@pytest.mark.real
def test_zlabs_class_gives_the_same_hidden_states_for_the_real_draft(zlab):
    compare_rounds(zlab, REAL_DRAFT, (100, 1, 7, 3, 8, 200, 2))


@torch.no_grad()
@pytest.mark.parametrize("num_slots", [6, 3], ids=["whole-block", "cut-block"])
def test_zlabs_dflash2_class_gives_the_same_hidden_states_and_candidates(zlab, tmp_path, num_slots):
    config = changed(ZLAB, **SLIDING, is_causal=False, architectures=["DFlash2DraftModel"], dflash_config=DFLASH2)
    folder = write_draft(tmp_path, config)
    ours = AutoModel.from_pretrained(folder, dtype=torch.float32)
    theirs = zlab.DFlash2DraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(0)
    head = torch.nn.Linear(32, 32, bias=False)
    noise, features, anchor = torch.randn(1, num_slots, 32), torch.randn(1, 20, 64), torch.tensor([4])
    positions = torch.arange(20 + num_slots)[None]
    expected = theirs(position_ids=positions, noise_embedding=noise, target_hidden=features)
    hidden = ours(noise, features, position_ids=positions).last_hidden_state
    assert_near(hidden, expected)

    candidates, _, _ = theirs.propose(expected[:, 1:], anchor, head, temperature=0.0)
    chosen = []
    for place in range(num_slots - 1):
        previous = chosen[-1] if chosen else anchor
        scores = ours.candidate_selector.score(head(hidden[:, 1 + place]), hidden[:, 1 + place], previous)
        chosen.append(scores.argmax(-1))
    assert torch.equal(torch.stack(chosen, dim=1), candidates)


# speculators


@pytest.fixture
def speculators():
    return pytest.importorskip("speculators", reason="speculators is absent: pip install --no-deps speculators==0.9.0")


def saved_by_speculators(folder, draft_vocab_size: int = 32, layer: dict | None = None, **fields):
    """A random draft of speculators' class, after it saved itself to a folder."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer_config = Qwen3Config(
        **{
            "vocab_size": 32,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "attn_implementation": "eager",
        }
        | (layer or {})
    )
    config = DFlashSpeculatorConfig(
        **{
            "transformer_layer_config": layer_config,
            "draft_vocab_size": draft_vocab_size,
            "block_size": 6,
            "aux_hidden_state_layer_ids": [2, 4],
            "mask_token_id": MASK,
            "speculators_config": SpeculatorsConfig(
                algorithm="dflash",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=5)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path="org/target", architectures=["Qwen3ForCausalLM"]),
            ),
        }
        | fields
    )
    torch.manual_seed(0)
    model = DFlashDraftModel(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    if draft_vocab_size != 32:
        kept = torch.zeros(32, dtype=torch.bool)
        kept[torch.randperm(32)[:draft_vocab_size]] = True
        model.load_vocab_mappings(kept, kept.nonzero()[:, 0] - torch.arange(draft_vocab_size))
    model.save_pretrained(folder)
    return model


def one_anchor(model, anchor: int):
    """speculators' training forward with a single anchor, which is a decoding step, and that step's inputs."""
    length = anchor + 2 * model.block_size
    ids = torch.randint(0, MASK, (1, length))
    features = torch.randn(1, length, 32 * len(model.target_layer_ids))
    loss_mask = torch.zeros(1, length, dtype=torch.long)
    loss_mask[0, anchor] = 1
    hidden, logits, *_ = model._backbone_forward(
        features, ids, loss_mask, torch.randn(1, length, 32), torch.zeros_like(ids), max_anchors=1
    )
    block = torch.full((1, model.block_size), MASK)
    block[0, 0] = ids[0, anchor]
    return model.embed_tokens(block), features[:, :anchor], hidden, logits


SPECULATORS_VARIANTS = {
    "full": {},
    "sample from anchor": {"sample_from_anchor": True},
    "attention bias": {"layer": {"attention_bias": True}},
    "mixed, sliding causal": {"layer": SLIDING | {"sliding_window": 64}},
    "mixed, none causal": {"layer": SLIDING | {"sliding_window": 64}, "sliding_window_non_causal": True},
    "rope": {"layer": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}},
    "reduced vocabulary": {"draft_vocab_size": 10},
}


@torch.no_grad()
@pytest.mark.parametrize("anchor", [1, 20], ids=lambda n: f"anchor{n}")
@pytest.mark.parametrize("fields", SPECULATORS_VARIANTS.values(), ids=SPECULATORS_VARIANTS)
def test_speculators_class_gives_the_same_hidden_states(speculators, tmp_path, fields, anchor):
    theirs = saved_by_speculators(tmp_path, **fields)
    ours = AutoModel.from_pretrained(tmp_path)
    assert ours.config.target_layer_ids == [1, 3]
    assert ours.config.target_name_or_path == "org/target"
    assert ours.config.sample_from_anchor == fields.get("sample_from_anchor", False)
    noise, features, expected, logits = one_anchor(theirs, anchor)
    hidden = ours(noise, features).last_hidden_state
    assert_near(hidden, expected)
    if "draft_vocab_size" in fields:
        full = ours.expand_reduced_logits(hidden, 32)
        kept = theirs.t2d
        assert_near(full[..., kept], logits)
        assert (full[..., ~kept] == float("-inf")).all()


@torch.no_grad()
def test_speculators_window_is_counted_from_the_anchor_in_training_and_from_each_slot_here(speculators, tmp_path):
    """What speculators trains and what it is served with (vLLM, and here) part once a context exceeds the window."""
    layer = {"layer_types": ["sliding_attention"], "num_hidden_layers": 1, "use_sliding_window": True}
    theirs = saved_by_speculators(tmp_path, layer=layer | {"sliding_window": 8}, sliding_window_non_causal=True)
    ours = AutoModel.from_pretrained(tmp_path)
    noise, features, expected, _ = one_anchor(theirs, 20)
    # their slots all see the 8 tokens before the anchor
    as_trained = torch.ones(1, 1, 6, 26, dtype=torch.bool)
    as_trained[..., :12] = False
    assert_near(ours(noise, features, attention_mask=as_trained).last_hidden_state, expected)
    assert not torch.allclose(ours(noise, features).last_hidden_state, expected, atol=1e-3)


def test_speculators_saves_no_more_than_we_read(speculators, tmp_path):
    theirs = saved_by_speculators(tmp_path, draft_vocab_size=10)
    saved = load_file(tmp_path / "model.safetensors")
    ours, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert saved.keys() - ours.state_dict().keys() == {"t2d"}
    assert torch.equal(ours.d2t, theirs.d2t)


# drafts that were converted


@torch.no_grad()
@pytest.mark.parametrize("name", [*DRAFTS, *ONLY_ZLAB])
def test_zlabs_class_reads_a_converted_draft_as_the_original(zlab, tmp_path, name):
    source = write_draft(tmp_path / "source", (DRAFTS | ONLY_ZLAB)[name])
    convert(source, tmp_path / "ours", "dflash")
    convert(tmp_path / "ours", tmp_path / "out", "zlab")
    ours = AutoModel.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    kind = zlab.DFlash2DraftModel if name == "DFlash 2" else zlab.DFlashDraftModel
    theirs, info = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.manual_seed(0)
    block, width = ours.config.block_size, 32 * len(ours.config.target_layer_ids)
    noise, features = torch.randn(1, block, 32), torch.randn(1, 20, width)
    positions = torch.arange(20 + block)[None]
    expected = ours(noise, features, position_ids=positions).last_hidden_state
    assert_near(theirs.eval()(position_ids=positions, noise_embedding=noise, target_hidden=features), expected)
    assert (theirs.target_layer_ids, theirs.block_size, theirs.mask_token_id) == (
        ours.config.target_layer_ids,
        block,
        MASK,
    )


@torch.no_grad()
@pytest.mark.parametrize("name", [*DRAFTS, *ONLY_SPECULATORS])
def test_speculators_reads_a_converted_draft_as_the_original(speculators, tmp_path, name):
    from speculators import SpeculatorModel

    fields = (DRAFTS | ONLY_SPECULATORS)[name]
    source = write_draft(tmp_path / "source", fields)
    if name == "reduced vocabulary":
        weights = load_file(source / "model.safetensors") | {"d2t": torch.tensor([0, 2, 2, 20])}
        save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    target = make_target("qwen3")
    target.save_pretrained(tmp_path / "target")
    convert(source, tmp_path / "out", "speculators", str(tmp_path / "target"))
    ours = AutoModel.from_pretrained(source)
    theirs = SpeculatorModel.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    theirs.load_verifier_weights()
    assert_near(theirs.embed_tokens.weight, target.get_input_embeddings().weight)
    assert [tap - 1 for tap in theirs.target_layer_ids] == ours.config.target_layer_ids

    noise, features, expected, logits = one_anchor(theirs, 5)
    hidden = ours(noise, features).last_hidden_state
    assert_near(hidden, expected)
    if ours.config.draft_vocab_size is None:
        assert_near(target.lm_head(hidden), logits)
    else:
        assert_near(ours.expand_reduced_logits(hidden, 32)[..., theirs.t2d], logits)
    if ours.config.selector_rank is not None:
        for part in ("predecessor_codebook", "successor_codebook"):
            assert torch.equal(getattr(theirs.candidate_selector, part), getattr(ours.candidate_selector, part))

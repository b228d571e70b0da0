"""DFlash 2: convolutions and selector against slow versions, and whole generations with such a draft."""

import pytest
import torch
from conftest import VOCAB, make_draft, prompt
from layouts import DFLASH2, SLIDING, ZLAB, changed, write_draft
from oracle import count_forwards, expected_forwards, oracle
from test_decoding import NEW_TOKENS, plain, stateless_draft_logits
from test_sampling import enumerated_law, p_value, sampled_counts, temperature
from test_sampling import pair as small_pair
from torch import nn
from transformers import AutoModel

from transformers_dflash import DFlashDraftConfig, DFlashDraftModel
from transformers_dflash.modeling_dflash2 import CandidateSelector, GroupedDynamicCausalConv

pair = small_pair  # a fixture


def randomized(draft: DFlashDraftModel, seed: int = 0) -> DFlashDraftModel:
    """Give a draft convolutions and a selector that matter: as created, they change nothing."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if "conv" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            if "selector" in name:
                parameter.normal_()
    return draft


@pytest.fixture
def draft2(target):
    return randomized(make_draft(target, **DFLASH2))


def slow_convolution(x, base, deltas, group_size):
    """out_i = Σ_t (base[t] + δ_i[t, group]) · x_{i-t} by loops: x (B, H), base (k, H), deltas (B, k, groups)."""
    out = torch.zeros_like(x)
    for i in range(x.shape[0]):
        for channel in range(x.shape[1]):
            for t in range(base.shape[0]):
                if i - t >= 0:
                    kernel = base[t, channel] + deltas[i, t, channel // group_size]
                    out[i, channel] += kernel * x[i - t, channel]
    return out


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("kernel_size", [1, 2, 3, 4])
def test_convolutions_equal_the_sum_written_out(kernel_size, length):
    torch.manual_seed(0)
    hidden_size, group_size = 12, 4
    conv = GroupedDynamicCausalConv(hidden_size, kernel_size, group_size)
    nn.init.normal_(conv.base_kernel)
    sublayer = nn.Linear(hidden_size, hidden_size)
    x = torch.randn(2, length, hidden_size)
    for row, out in zip(x, conv.around(sublayer, x), strict=True):
        deltas = conv.kernel_projection(row).view(length, 2, kernel_size, hidden_size // group_size)
        before = slow_convolution(row, conv.base_kernel[0], deltas[:, 0], group_size)
        expected = slow_convolution(sublayer(before), conv.base_kernel[1], deltas[:, 1], group_size)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_untrained_convolutions_change_nothing(target):
    plain_draft, with_parts = make_draft(target), make_draft(target, **DFLASH2)
    with_parts.load_state_dict(plain_draft.state_dict(), strict=False)
    noise, features = torch.randn(1, 6, 32), torch.randn(1, 9, 64)
    torch.testing.assert_close(
        with_parts(noise, features).last_hidden_state, plain_draft(noise, features).last_hidden_state
    )


def test_selector_scores_equal_the_sum_written_out():
    torch.manual_seed(0)
    selector = CandidateSelector(vocab_size=9, hidden_size=6, rank=3, top_k=4)
    for codebook in (selector.predecessor_codebook, selector.successor_codebook):
        nn.init.normal_(codebook)
    logits, hidden, previous = torch.randn(1, 9), torch.randn(1, 6), torch.tensor([7])
    scores = selector.score(logits, hidden, previous)[0]
    best = logits[0].topk(4).indices.tolist()
    projected = selector.hidden_projection(hidden)[0]
    for token in range(9):
        if token not in best:
            assert scores[token] == float("-inf")
            continue
        follows = sum(
            selector.predecessor_codebook[7, r] * projected[r] * selector.successor_codebook[token, r]
            for r in range(3)
        )
        torch.testing.assert_close(scores[token], logits[0, token] + follows)


@pytest.mark.parametrize("num_right", [0, 2, 5])
def test_oracle_and_parity(targets, family, num_right):
    target = targets[family]
    draft, ids = randomized(make_draft(target, **DFLASH2)), prompt(7)
    answer = plain(target, ids)
    with oracle(answer, num_right, VOCAB) as rounds, count_forwards(target) as forwards:
        assert torch.equal(plain(target, ids, assistant_model=draft), answer)
    assert len(forwards) == expected_forwards(NEW_TOKENS, num_right)
    with torch.no_grad():
        for drafted in rounds:
            expected = stateless_draft_logits(target, draft, drafted["input_ids"], len(drafted["logits"]))
            torch.testing.assert_close(drafted["logits"], expected, atol=1e-4, rtol=1e-4)


def test_greedy_output_is_plain_output_and_the_selector_is_asked(target, draft2, monkeypatch):
    asked = []
    score = CandidateSelector.score
    monkeypatch.setattr(CandidateSelector, "score", lambda self, *args: asked.append(1) or score(self, *args))
    ids = prompt(7)
    assert torch.equal(plain(target, ids, assistant_model=draft2), plain(target, ids))
    assert len(asked) > NEW_TOKENS


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.6}], ids=["bare", "repetition-penalty"])
def test_candidates_follow_the_path_that_the_selector_prefers(target, draft2, options):
    """Greedy candidates, recomputed from the recorded logits and hidden states."""
    from transformers_dflash import DFlashCandidateGenerator

    seen = []
    original = DFlashCandidateGenerator._choose_one_by_one

    def spy(self, processors, input_ids, logits, hidden):
        tokens, scores = original(self, processors, input_ids, logits, hidden)
        seen.append((input_ids, logits, hidden, torch.cat([input_ids, tokens], dim=1)))
        return tokens, scores

    DFlashCandidateGenerator._choose_one_by_one = spy
    try:
        plain(target, prompt(7), assistant_model=draft2, max_new_tokens=8, **options)
    finally:
        DFlashCandidateGenerator._choose_one_by_one = original
    assert seen
    for input_ids, logits, hidden, ids in seen:
        prefix = input_ids
        for row, state in zip(logits, hidden, strict=True):
            scores = draft2.candidate_selector.score(row[None], state[None], prefix[:, -1])
            if options:
                penalty = options["repetition_penalty"]
                for token in set(prefix[0].tolist()):
                    scores[0, token] *= penalty if scores[0, token] < 0 else 1 / penalty
            prefix = torch.cat([prefix, scores.argmax(-1, keepdim=True)], dim=1)
        assert torch.equal(prefix, ids)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_k": 0, "temperature": 0.6}], ids=["plain", "temperature"])
def test_sampled_sequences_follow_the_law_of_the_target(pair, options):
    target, first = pair
    sizes = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 3}
    draft = randomized(DFlashDraftModel(DFlashDraftConfig(**first.config.to_dict() | sizes)).eval())
    counts = sampled_counts(target, draft, **options)
    assert p_value(counts, enumerated_law(target, temperature(options.get("temperature", 1.0)))) > 1e-3


def test_zlabs_layout_loads_with_all_of_its_tensors(tmp_path):
    sizes = {"num_hidden_layers": 5, "layer_types": ["sliding_attention"] * 5, "sliding_window": 8}
    config = changed(
        ZLAB, **SLIDING | sizes, is_causal=False, architectures=["DFlash2DraftModel"], dflash_config=DFLASH2
    )
    draft = AutoModel.from_pretrained(write_draft(tmp_path, config))
    names = list(draft.state_dict())
    assert len(names) == 81
    assert "candidate_selector.predecessor_codebook" in names  # no .weight on disk
    assert "layers.4.mlp_conv.kernel_projection.weight" in names


def test_saving_and_loading_is_exact(draft2, tmp_path):
    draft2.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert again.config.to_dict() | {"_name_or_path": ""} == draft2.config.to_dict() | {"_name_or_path": ""}
    for name, tensor in draft2.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name

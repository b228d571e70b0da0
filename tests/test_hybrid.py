"""Targets with recurrent layers: rejected candidates leave no trace, and families that are not exact are refused."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from accelerate import cpu_offload
from conftest import CACHE, COMMON, VOCAB, make_draft, prompt
from oracle import oracle
from test_decoding import stateless_draft_logits
from torch.overrides import TorchFunctionMode
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    DynamicCache,
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    Zamba2Config,
    Zamba2ForCausalLM,
)

from transformers_dflash.recurrence import Recurrence
from transformers_dflash.target import EXACT_RECURRENT_FAMILIES, decoder_layers

NEW_TOKENS = 30
PLAIN = {name: value for name, value in COMMON.items() if name != "head_dim"}
BARE = {name: COMMON[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "initializer_range")}
BARE |= {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
MIXED = ["linear_attention", "full_attention"] * 2
DELTA = {
    "layer_types": MIXED,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
SSM = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
LATENT = {
    **PLAIN,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
EXACT = {
    "qwen3_next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**COMMON, **DELTA, **EXPERTS)),
    "qwen3_5_text": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**COMMON, **DELTA)),
    "qwen3_5_moe_text": lambda: Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**COMMON, **DELTA, **EXPERTS)),
    "olmo_hybrid": lambda: OlmoHybridForCausalLM(OlmoHybridConfig(**PLAIN, **DELTA)),
    "mamba2": lambda: Mamba2ForCausalLM(
        Mamba2Config(**BARE, state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=16)
    ),
    "bamba": lambda: BambaForCausalLM(BambaConfig(**PLAIN, **SSM, attn_layer_indices=[1, 3])),
    "falcon_h1": lambda: FalconH1ForCausalLM(FalconH1Config(**COMMON, **SSM, mamba_d_ssm=64)),
    "granitemoehybrid": lambda: GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            **PLAIN,
            **SSM,
            layer_types=["mamba", "attention"] * 2,
            num_local_experts=0,
            shared_intermediate_size=32,
            logits_scaling=2.0,
        )
    ),
    "nemotron_h": lambda: NemotronHForCausalLM(
        NemotronHConfig(
            **{name: value for name, value in COMMON.items() if name != "num_hidden_layers"},
            layers_block_type=["mamba", "attention", "mamba", "moe"],
            n_groups=2,
            mamba_num_heads=8,
            mamba_head_dim=8,
            ssm_state_size=8,
            chunk_size=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            moe_shared_expert_intermediate_size=16,
        )
    ),
    "zamba2": lambda: Zamba2ForCausalLM(
        Zamba2Config(
            **PLAIN,
            layers_block_type=["mamba", "hybrid"] * 2,
            mamba_d_state=8,
            mamba_ngroups=2,
            n_mamba_heads=8,
            chunk_size=16,
            adapter_rank=4,
            num_mem_blocks=1,
        )
    ),
    "lfm2": lambda: Lfm2ForCausalLM(Lfm2Config(**PLAIN, layer_types=["conv", "full_attention"] * 2)),
    "lfm2_moe": lambda: Lfm2MoeForCausalLM(
        Lfm2MoeConfig(
            **PLAIN,
            layer_types=["conv", "full_attention"] * 2,
            num_dense_layers=1,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
        )
    ),
    "kimi_linear": lambda: KimiLinearForCausalLM(
        KimiLinearConfig(**LATENT, layer_types=MIXED, linear_head_dim=8, linear_num_heads=4)
    ),
    "bailing_hybrid": lambda: transformers.BailingHybridForCausalLM(  # since Transformers 5.24
        transformers.BailingHybridConfig(
            **LATENT, layer_types=MIXED, head_dim=8, n_group=1, topk_group=1, first_k_dense_replace=1
        )
    ),
}
INEXACT = {
    "mamba": lambda: MambaForCausalLM(MambaConfig(**BARE, state_size=4)),
    "jamba": lambda: JambaForCausalLM(
        JambaConfig(
            **PLAIN,
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=4,
            mamba_d_state=4,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
        )
    ),
    "recurrent_gemma": lambda: RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(
            **COMMON, block_types=["recurrent", "attention"] * 2, attention_window_size=12, lru_width=32
        )
    ),
}
# Before Transformers 5.24 models of recurrent layers alone keep their state under a name of their own: refused.
NEWEST = CACHE == "cache"
SERVED = [name for name in EXACT if NEWEST or name not in ("mamba2", "bailing_hybrid")]  # the latter is not there yet
# A draft is a small Qwen3 whatever its target is.
SHAPE = {
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": None,
}


@pytest.fixture(scope="module")
def made() -> dict:
    return {}


def target_of(made, family):
    if family not in made:
        torch.manual_seed(0)
        made[family] = EXACT[family]().eval()
    return made[family]


def greedy(target, ids, draft=None, **options):
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None} | options
    return target.generate(ids, assistant_model=draft, **options)


def test_every_family_that_is_let_in_is_tested():
    assert set(EXACT) == set(EXACT_RECURRENT_FAMILIES)


@pytest.mark.parametrize("num_right", range(6))
@pytest.mark.parametrize("name", SERVED)
def test_oracle_candidates_give_plain_output(made, name, num_right):
    target = target_of(made, name)
    draft, ids = make_draft(target, **SHAPE), prompt(9)
    answer = greedy(target, ids)
    with oracle(torch.cat([answer, answer], dim=1), num_right, VOCAB):
        assert torch.equal(greedy(target, ids, draft), answer)


@pytest.mark.parametrize("name", SERVED)
def test_draft_logits_of_every_round_equal_a_stateless_recompute(made, name):
    target = target_of(made, name)
    draft, ids = make_draft(target, **SHAPE), prompt(9)
    answer = greedy(target, ids)
    with torch.no_grad(), oracle(torch.cat([answer, answer], dim=1), 2, VOCAB) as rounds:
        greedy(target, ids, draft)
        for drafted in rounds:
            expected = stateless_draft_logits(target, draft, drafted["input_ids"], len(drafted["logits"]))
            torch.testing.assert_close(drafted["logits"], expected, atol=1e-4, rtol=1e-4)


def assert_rounded(actual, expected):
    """Equal but for rounding: a rejected token that stays in a state is a hundred times further off."""
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "lfm2"])
def test_states_after_generate_are_those_of_plain_generate(made, name):
    """The whole cache that is handed back, not only the tokens."""
    target = target_of(made, name)
    draft, ids = make_draft(target, **SHAPE), prompt(9)
    caches = []
    answer = greedy(target, ids)
    for assistant in (None, draft):
        cache = DynamicCache(config=target.config)
        with oracle(torch.cat([answer, answer], dim=1), 2, VOCAB):
            greedy(target, ids, assistant, **{CACHE: cache})
        caches.append(cache)
    for plain, drafted in zip(caches[0].layers, caches[1].layers, strict=True):
        for attribute in ("keys", "values"):
            if getattr(plain, attribute, None) is not None:
                assert_rounded(getattr(drafted, attribute), getattr(plain, attribute))
        for states in ("conv_states", "recurrent_states"):
            for i, state in getattr(plain, states, {}).items():
                if state is not None:
                    assert_rounded(getattr(drafted, states)[i], state)


@pytest.mark.parametrize("name", ["qwen3_next", "zamba2"])
def test_padding_with_an_attention_mask(made, name):
    target = target_of(made, name)
    draft = make_draft(target, **SHAPE)
    ids = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompt(9)], dim=1)
    mask = (torch.arange(13) >= 4).long()[None]
    answer = greedy(target, ids, attention_mask=mask)
    with oracle(torch.cat([answer, answer], dim=1), 2, VOCAB):
        assert torch.equal(greedy(target, ids, draft, attention_mask=mask), answer)


@pytest.mark.parametrize("name", ["qwen3_5_text", "bamba"])
def test_a_processor_that_calls_the_target_does_not_get_into_its_states(made, name):
    target = target_of(made, name)
    draft, ids = make_draft(target, **SHAPE), prompt(9)
    assert torch.equal(greedy(target, ids, draft, guidance_scale=1.5), greedy(target, ids, guidance_scale=1.5))


@pytest.mark.parametrize("name", [name for name in SERVED if "lfm2" not in name])
def test_rolling_back_runs_the_recurrence_alone(made, name, monkeypatch):
    """No second forward of the target, and no projection of a recurrent layer a second time."""
    target = target_of(made, name)
    draft, ids = make_draft(target, **SHAPE), prompt(9)
    answer = greedy(target, ids)
    forwards, projected, again = [], [], []
    hooks = [target.register_forward_pre_hook(lambda *_args: forwards.append(1))]
    run_again = Recurrence.run_again

    def watched(self, num_rows):
        inside = [module for module in self.mixer.modules() if isinstance(module, torch.nn.Linear)]
        known = {weight for weight, output in self.projections.items() if output is not None}
        assert known == {id(module.weight) for module in inside}
        with Linears() as linears:
            run_again(self, num_rows)
        projected.append(linears.calls)
        again.append(num_rows)

    monkeypatch.setattr(Recurrence, "run_again", watched)
    with oracle(torch.cat([answer, answer], dim=1), 2, VOCAB):
        out = greedy(target, ids, draft, return_dict_in_generate=True)
    for hook in hooks:
        hook.remove()
    assert torch.equal(out.sequences, answer)
    assert set(again) == {3}
    assert set(projected) == {0}
    assert len(forwards) == 1 + out.speculation.rounds  # with the prefill


class Linears(TorchFunctionMode):
    """Counts the linear layers that are computed; entered before another mode, it sees what that one lets through."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += func is torch.nn.functional.linear
        return func(*args, **(kwargs or {}))


def test_weights_that_are_offloaded_between_two_layers_are_not_mistaken_for_others():
    torch.manual_seed(0)
    target = EXACT["qwen3_5_text"]().eval()
    draft, ids = make_draft(target, **SHAPE), prompt(9)
    answer = greedy(target, ids)
    assert torch.equal(greedy(cpu_offload(target), ids, draft), answer)


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "bamba"])
def test_what_is_not_known_to_be_recurrent_is_run_again_whole(made, name, monkeypatch):
    target = target_of(made, name)
    draft, ids = make_draft(target, **SHAPE), prompt(9)
    answer = greedy(target, ids)
    monkeypatch.setattr("transformers_dflash.rollback.RECURRENT_LAYERS", ())
    forwards = []
    hook = target.register_forward_pre_hook(lambda *_args: forwards.append(1))
    with oracle(torch.cat([answer, answer], dim=1), 2, VOCAB):
        out = greedy(target, ids, draft, return_dict_in_generate=True)
    hook.remove()
    assert torch.equal(out.sequences, answer)
    assert len(forwards) > 1.5 * out.speculation.rounds


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2"])
def test_attentions_come_from_the_layers_that_have_them(made, name):
    target, ids = copy.deepcopy(target_of(made, name)), prompt(9)
    target.set_attn_implementation("eager")
    options = {"return_dict_in_generate": True, "output_attentions": True}
    answer = greedy(target, ids, **options)
    with oracle(answer.sequences, 2, VOCAB):
        out = greedy(target, ids, make_draft(target, **SHAPE), **options)
    assert torch.equal(out.sequences, answer.sequences)
    torch.testing.assert_close(out.attentions, answer.attentions, atol=2e-5, rtol=1e-4)


def test_no_hook_stays_on_the_target(made):
    target = target_of(made, "qwen3_5_text")
    draft, ids = make_draft(target, **SHAPE), prompt(9)

    def hooks():
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules())

    def fail(*_arguments):
        assert hooks() > before
        raise RuntimeError("asked in the middle")

    before = hooks()
    greedy(target, ids, draft)
    assert hooks() == before
    with pytest.raises(RuntimeError, match="asked in the middle"):
        greedy(target, ids, draft, stopping_criteria=[fail])
    assert hooks() == before


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "nemotron_h"])
def test_a_cache_that_was_passed_to_a_call_that_broke_off_is_as_before_the_block(made, name):
    target = target_of(made, name)
    draft, ids, seen = make_draft(target, **SHAPE), prompt(9), []
    cache, answer = DynamicCache(config=target.config), greedy(target, prompt(9))

    def fails(committed, _scores):
        seen.append(committed)
        if committed.shape[1] == 14:
            raise KeyboardInterrupt
        return torch.zeros(1, dtype=torch.bool)

    with oracle(torch.cat([answer, answer], dim=1), 2, VOCAB), pytest.raises(KeyboardInterrupt):
        greedy(target, ids, draft, **{CACHE: cache}, stopping_criteria=[fails])
    rest = NEW_TOKENS - (seen[-1].shape[1] - ids.shape[1])
    assert torch.equal(greedy(target, seen[-1], draft, **{CACHE: cache}, max_new_tokens=rest), answer)


def test_two_threads_share_a_recurrent_target(made):
    target = target_of(made, "qwen3_5_text")
    prompts = [prompt(9, seed) for seed in range(6)]
    answers = [greedy(target, ids) for ids in prompts]
    with ThreadPoolExecutor(3) as pool:
        drafted = list(pool.map(lambda ids: greedy(target, ids, make_draft(target, **SHAPE)), prompts))
    assert all(torch.equal(one, other) for one, other in zip(answers, drafted, strict=True))


def test_hooks_that_go_in_the_middle_of_a_forward_do_no_harm():
    """As those of another thread may, whose generation ends then."""
    layer, kept = torch.nn.Linear(2, 2), []
    layer.register_forward_pre_hook(lambda *_: kept[0].close())
    kept.append(Recurrence(layer))
    rows = torch.ones(1, 3, 2)
    assert torch.equal(layer(rows), layer(rows))


@pytest.mark.parametrize("name", INEXACT)
def test_families_that_are_not_exact_are_refused(name):
    torch.manual_seed(0)
    target = INEXACT[name]().eval()
    draft = make_draft(target, **SHAPE)
    with pytest.raises(ValueError, match=rf"recurrent layers .*\({name}\)|needs the target's cache"):
        greedy(target, prompt(9), draft)


def test_taps_of_a_model_that_names_its_parts_otherwise(made):
    assert len(decoder_layers(target_of(made, "mamba2"))) == 4

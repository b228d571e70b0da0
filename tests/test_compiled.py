"""Static caches whose blocks are compiled: the same output as of plain eager generate, by one graph for all rounds."""

import pytest
import torch
from conftest import CACHE, COMMON, VOCAB, make_draft, make_target, prompt
from oracle import oracle
from test_costs import costing, drafting
from torch._dynamo.utils import counters
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, StaticCache
from transformers.cache_utils import StaticLayer

pytestmark = pytest.mark.skipif(not StaticLayer.is_croppable, reason="this Transformers cannot crop static layers")
NEW_TOKENS = 40


@pytest.fixture(autouse=True)
def forget_graphs():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def on_cpu(**options) -> CompileConfig:
    config = CompileConfig(**options)
    config._compile_all_devices = True
    return config


TRACED = on_cpu(backend="eager", mode=None)  # a graph whose operations run one by one: traced in a few seconds


def greedy(target, ids, draft=None, **options):
    return target.generate(ids, do_sample=False, assistant_model=draft, **{"max_new_tokens": NEW_TOKENS} | options)


def static_cache(target, length: int = 64) -> dict:
    """The option for a static cache with room for whole blocks in the last rounds."""
    return {CACHE: StaticCache(config=target.config, max_cache_len=length), "cache_implementation": None}


def check(target, draft, length=7, num_right=2, config=TRACED, **options):
    """A drafted generation with compiled blocks equals the plain one, which runs eagerly."""
    answer = greedy(target, prompt(length))
    padded = torch.cat([answer, answer.new_full((1, 2 * draft.config.block_size), 3)], dim=1)
    with oracle(padded, num_right, VOCAB):
        drafted = greedy(
            target, prompt(length), draft, compile_config=config, **{"cache_implementation": "static"} | options
        )
    assert torch.equal(drafted, answer)


@pytest.mark.slow
def test_one_graph_for_all_rounds_and_calls():
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(**COMMON | {"num_hidden_layers": 2})).eval()
    draft = make_draft(target, target_layer_ids=[0, 1])
    check(target, draft, config=on_cpu(), **static_cache(target))
    assert num_graphs() == 1
    with torch.compiler.set_stance("fail_on_recompile"):
        for length, num_right in ((7, 0), (9, 5), (12, 2)):
            check(target, draft, length, num_right, config=on_cpu(), **static_cache(target))
    assert num_graphs() == 1


@pytest.mark.slow
def test_plain_steps_while_the_draft_rests_go_through_the_graph_too(target, monkeypatch):
    costing(monkeypatch, per_row=0.0, drafting=1.0)
    draft = drafting(make_draft(target), assistant_confidence_threshold="auto")
    answer = greedy(target, prompt(7))
    with oracle(answer, 0, VOCAB):
        out = greedy(
            target, prompt(7), draft, compile_config=TRACED, return_dict_in_generate=True, **static_cache(target)
        )
    assert torch.equal(out.sequences, answer)
    assert out.speculation.rested >= 4 + 8
    assert num_graphs() == 1


@pytest.mark.slow
def test_drafts_that_tap_other_layers_do_not_share_a_graph(targets):
    target = targets["qwen3_moe"]
    first, second = make_draft(target), make_draft(target, target_layer_ids=[0, 2])
    lengths = [
        greedy(target, prompt(7), draft, return_dict_in_generate=True, **options).speculation
        for options in ({}, {"cache_implementation": "static", "compile_config": TRACED})
        for draft in (first, second, first)
    ]
    assert [one.acceptance_lengths for one in lengths[:3]] == [one.acceptance_lengths for one in lengths[3:]]
    assert num_graphs() == 2


@pytest.mark.slow
def test_short_blocks_run_in_the_graph_of_whole_ones(target, draft):
    draft.generation_config.assistant_confidence_threshold = 0.02
    out = greedy(
        target,
        prompt(7),
        draft,
        compile_config=TRACED,
        return_dict_in_generate=True,
        **static_cache(target),
    )
    assert torch.equal(out.sequences, greedy(target, prompt(7)))
    assert len(set(out.speculation.drafted_by_round)) > 2
    assert num_graphs() == 1


@pytest.mark.slow
def test_plain_and_drafted_generations_keep_graphs_of_their_own(target, draft):
    static = {"cache_implementation": "static", "compile_config": TRACED}
    answer = greedy(target, prompt(7))
    for assistant in (None, draft, None, draft):
        assert torch.equal(greedy(target, prompt(7), assistant, **static), answer)
        # Chunks of a prefill are compiled in plain generate.
        assert torch.equal(greedy(target, prompt(7), assistant, prefill_chunk_size=3, **static), answer)


@pytest.mark.slow
def test_logits_are_not_overwritten(target, draft):
    options = {"return_dict_in_generate": True, "output_logits": True}
    answer = greedy(target, prompt(7), **options)
    drafted = greedy(target, prompt(7), draft, cache_implementation="static", compile_config=TRACED, **options)
    torch.testing.assert_close(torch.stack(drafted.logits), torch.stack(answer.logits))
    assert num_graphs() == 1


@pytest.mark.slow
def test_a_static_cache_that_is_passed_on(target, draft):
    cache = StaticCache(config=target.config, max_cache_len=160)
    ids = prompt(7)
    for turn in range(2):
        answer = greedy(target, ids)
        drafted = greedy(target, ids, draft, compile_config=TRACED, **{CACHE: cache})
        assert torch.equal(drafted, answer)
        ids = torch.cat([answer, prompt(5, seed=turn + 1)], dim=1)
    assert num_graphs() == 1


@pytest.mark.slow
def test_windows_that_never_fill(draft):
    """Their length is a Python number: one more graph, for any number, as in plain generate."""
    torch.manual_seed(0)
    target = MistralForCausalLM(MistralConfig(**COMMON, sliding_window=256)).eval()
    check(target, make_draft(target), **static_cache(target))
    assert 0 < num_graphs() <= 2
    with torch.compiler.set_stance("fail_on_recompile"):
        check(target, make_draft(target), 9, **static_cache(target))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"disable_compile": True}),
        ("llama", {"config": CompileConfig()}),  # on a CPU
        ("llama", {"cache_implementation": "dynamic"}),
        ("gemma3", {}),
        ("mistral", {}),
    ],
)
def test_what_runs_eagerly(targets, family, options):
    """What plain generate runs eagerly, and windows that fill up: they cannot be cropped."""
    target = targets[family]
    check(target, make_draft(target), **options)
    assert num_graphs() == 0


def test_a_target_that_is_no_single_graph(draft):
    target = make_target("llama")
    handle = target.model.layers[2].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    check(target, draft)
    handle.remove()
    assert num_graphs() == 0

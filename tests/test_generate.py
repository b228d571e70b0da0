"""Every feature of generate gives with a draft what it gives without one."""

import copy
import pickle
import threading

import pytest
import torch
from conftest import CACHE, VOCAB, WINDOW, make_draft, make_target, make_worded_target, prompt
from oracle import oracle
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    StaticCache,
    StoppingCriteria,
    TextStreamer,
    pipeline,
)
from transformers.cache_utils import QuantizedLayer
from transformers.generation.streamers import BaseStreamer

NEW_TOKENS = 40


def greedy(target, ids, draft=None, **options):
    return target.generate(
        ids, **({"do_sample": False, "max_new_tokens": NEW_TOKENS, "assistant_model": draft} | options)
    )


def both(target, draft, ids, num_right=2, **options):
    """Plain output, and drafted output with `num_right` right candidates a round."""
    answer = greedy(target, ids, **options)
    tokens = answer if isinstance(answer, torch.Tensor) else answer.sequences
    padded = torch.cat([tokens, tokens.new_full((1, 2 * draft.config.block_size), 3)], dim=1)
    with oracle(padded, num_right, VOCAB):
        return answer, greedy(target, ids, draft, **options)


PROCESSOR_OPTIONS = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[3], [4, 5]]},
    "sequence_bias": {"sequence_bias": [[[7], 5.0], [[8, 9], 4.0]]},
    "suppress_tokens": {"suppress_tokens": [2, 3, 4, 5]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [2, 3]},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": list(range(2, 20))},
    "min_length": {"min_length": 15, "eos_token_id": list(range(2, 20))},
    "forced_eos": {"forced_eos_token_id": 6},
    "exponential_decay": {"exponential_decay_length_penalty": (5, 1.3), "eos_token_id": 9},
    "encoder_repetition": {"encoder_repetition_penalty": 1.5},
    "prefix_allowed": {"prefix_allowed_tokens_fn": lambda _b, ids: [int(ids[-1]) % 7 + 3, int(ids[-1]) % 5 + 12]},
    "renormalize": {"renormalize_logits": True, "repetition_penalty": 1.3},
    "remove_invalid_values": {"remove_invalid_values": True},
}


@pytest.mark.parametrize("option", PROCESSOR_OPTIONS)
def test_logits_processors(target, draft, option):
    answer, drafted = both(target, draft, prompt(7), **PROCESSOR_OPTIONS[option])
    assert torch.equal(drafted, answer)
    assert torch.equal(greedy(target, prompt(7), draft, **PROCESSOR_OPTIONS[option]), answer)


def test_guidance_scale_which_keeps_a_cache_of_its_own(target, draft):
    options = {"guidance_scale": 1.8, "negative_prompt_ids": prompt(5, seed=3)}
    answer, drafted = both(target, draft, prompt(7), **options)
    assert torch.equal(drafted, answer)


class Remembers(LogitsProcessor):
    """Keeps a state, and fails on a prefix that plain generate would not show."""

    def __init__(self):
        self.prefixes = []

    def __call__(self, input_ids, scores):
        if self.prefixes:
            assert input_ids[0, :-1].tolist() == self.prefixes[-1]
        self.prefixes.append(input_ids[0].tolist())
        return scores.roll(len(self.prefixes) % 3, dims=-1)


def test_a_stateful_processor_sees_each_prefix_once_and_in_order(target, draft):
    plain, drafted = Remembers(), Remembers()
    answer = greedy(target, prompt(7), logits_processor=[plain])
    with oracle(answer, 2, VOCAB):
        assert torch.equal(greedy(target, prompt(7), draft, logits_processor=[drafted]), answer)
    assert drafted.prefixes == plain.prefixes


class StopsAt(StoppingCriteria):
    def __init__(self, length):
        self.length, self.seen = length, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids.shape[1], None if scores is None else len(scores)))
        return torch.full((1,), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("length", [8, 9, 10, 11, 12])
def test_stopping_criteria_are_asked_after_every_token(target, draft, length):
    plain, drafted = StopsAt(length), StopsAt(length)
    options = {"return_dict_in_generate": True, "output_scores": True}
    answer = greedy(target, prompt(7), stopping_criteria=[plain], **options).sequences
    with oracle(greedy(target, prompt(7)), 3, VOCAB):
        out = greedy(target, prompt(7), draft, stopping_criteria=[drafted], **options).sequences
    assert torch.equal(out, answer)
    assert drafted.seen == plain.seen


@pytest.mark.parametrize("place", range(1, 9))
def test_end_of_sequence_inside_a_block(target, draft, place):
    ids = prompt(7)
    longer = greedy(target, ids)
    eos = int(longer[0, 7 + place])
    options = {"eos_token_id": [eos, 0], "return_dict_in_generate": True, "output_scores": True}
    answer = greedy(target, ids, **options)
    with oracle(longer, 4, VOCAB):
        out = greedy(target, ids, draft, **options)
    assert torch.equal(out.sequences, answer.sequences)
    assert len(out.scores) == len(answer.scores)


@pytest.mark.parametrize("budget", range(1, 10))
def test_budgets(target, draft, budget):
    for options in ({"max_new_tokens": budget}, {"max_new_tokens": None, "max_length": 7 + budget}):
        answer, out = both(target, draft, prompt(7), num_right=4, **options)
        assert torch.equal(out, answer)


def test_max_time_stops(target, draft):
    out = greedy(target, prompt(7), draft, max_time=0.0)
    assert out.shape[1] == greedy(target, prompt(7), max_time=0.0).shape[1]


class Collects(BaseStreamer):
    def __init__(self):
        self.pieces, self.ended = [], 0

    def put(self, value):
        self.pieces.append(value.tolist())

    def end(self):
        self.ended += 1


def test_a_streamer_gets_what_plain_generate_gives_it(target, draft):
    plain, drafted = Collects(), Collects()
    answer = greedy(target, prompt(7), streamer=plain)
    with oracle(answer, 2, VOCAB):
        greedy(target, prompt(7), draft, streamer=drafted)
    assert (drafted.pieces, drafted.ended) == (plain.pieces, 1)


def test_inputs_embeds_alone_and_with_ids(target, draft):
    ids = prompt(7)
    embeds = target.get_input_embeddings()(ids)
    for inputs in ({"inputs_embeds": embeds}, {"inputs_embeds": embeds, "input_ids": ids}):
        answer = target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
        out = target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS, assistant_model=draft)
        assert torch.equal(out, answer)


def test_inputs_embeds_draft_from_the_whole_prompt(target, draft):
    ids = prompt(7)
    answer = greedy(target, ids)
    with oracle(answer, 1, VOCAB) as from_ids:
        greedy(target, ids, draft)
    with oracle(answer[:, 7:], 1, VOCAB) as from_embeds:
        embeds = target.get_input_embeddings()(ids)
        target.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=NEW_TOKENS, assistant_model=draft)
    for one, other in zip(from_ids, from_embeds, strict=True):
        torch.testing.assert_close(one["logits"], other["logits"])


@pytest.mark.parametrize("num_right", [0, 3, 5])
def test_returned_scores_logits_states_and_attentions(targets, family, num_right):
    target = targets[family]
    draft, ids = make_draft(target), prompt(7)
    options = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "output_attentions": True,
        "repetition_penalty": 1.2,
        "max_new_tokens": 3 * WINDOW,
    }
    answer, out = both(target, draft, ids, num_right, **options)
    assert torch.equal(out.sequences, answer.sequences)
    for name in ("scores", "logits", "hidden_states", "attentions"):
        torch.testing.assert_close(getattr(out, name), getattr(answer, name), atol=2e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_attentions_of_an_implementation_that_gives_none():
    target = make_target("llama")  # one of its own, since the others' attention is eager
    target.set_attn_implementation("sdpa")
    answer, out = both(target, make_draft(target), prompt(7), 2, return_dict_in_generate=True, output_attentions=True)
    assert torch.equal(out.sequences, answer.sequences)
    assert out.attentions == answer.attentions


def test_scores_do_not_keep_their_block_alive(target, draft):
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    _, out = both(target, draft, prompt(7), 3, **options)
    for steps in (out.scores, out.logits):
        assert {one.untyped_storage().nbytes() for one in steps} == {4 * VOCAB}


class FourBits(QuantizedLayer):
    """The library's window of exact keys before quantised ones; rounding stands in for a backend's arithmetic."""

    def _quantize(self, tensor, axis):
        scale = tensor.abs().amax(dim=-1, keepdim=True) / 7 + 1e-9
        return (tensor / scale).round(), scale

    def _dequantize(self, quantised):
        return quantised[0] * quantised[1]


@pytest.mark.parametrize("num_right", [0, 2, 5])
def test_a_quantised_cache_is_quantised_when_single_steps_would_do_it(targets, num_right):
    target, ids = targets["llama"], prompt(7)

    def cache():
        return Cache(layers=[FourBits(residual_length=8) for _ in target.model.layers])

    options = {
        "return_dict_in_generate": True,
        "output_logits": True,
        "do_sample": False,
        "max_new_tokens": NEW_TOKENS,
    }
    answer = target.generate(ids, **{CACHE: cache()}, **options)
    with oracle(answer.sequences, num_right, VOCAB):
        out = target.generate(ids, **{CACHE: cache()}, assistant_model=make_draft(target), **options)
    assert torch.equal(out.sequences, answer.sequences)
    torch.testing.assert_close(out.logits, answer.logits, atol=2e-5, rtol=1e-4)


def test_statistics_add_up(target, draft):
    _, out = both(target, draft, prompt(7), num_right=2, return_dict_in_generate=True)
    seen = out.speculation
    assert sum(seen.acceptance_lengths) == NEW_TOKENS - 1  # the prefill gives the first
    assert seen.rounds == len(seen.acceptance_lengths) == 13
    assert seen.acceptance_length == pytest.approx(39 / 13)
    assert seen.accepted == 26
    assert seen.drafted == sum(seen.drafted_at) == 12 * 5 + 2
    assert seen.drafted_by_round == [5] * 12 + [2]
    assert seen.accepted_by_round == [2] * 13
    assert seen.acceptance_rates == [1, 1, 0, 0, 0]
    assert seen.conditional_acceptance_rates[:3] == [1, 1, 0]
    assert min(seen.prefill_seconds, seen.drafting_seconds, seen.verifying_seconds, seen.rolling_back_seconds) > 0


def test_rounds_are_told_where_debugging_is_wanted_and_only_there(target, draft, caplog):
    both(target, draft, prompt(7), num_right=2)
    assert not caplog.messages
    with caplog.at_level("DEBUG", logger="transformers_dflash"):
        both(target, draft, prompt(7), num_right=2)
    assert caplog.messages[0] == "round 1: 5 candidates, [3] tokens committed"
    assert len(caplog.messages) == 13


def test_padding_with_an_attention_mask_changes_neither_tokens_nor_drafts(targets, family):
    target = targets[family]
    draft, ids = make_draft(target), prompt(7)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(11) >= 4).long()[None]
    answer = greedy(target, padded, attention_mask=mask)
    with oracle(answer, 2, VOCAB) as rounds:
        assert torch.equal(greedy(target, padded, draft, attention_mask=mask), answer)
    with oracle(answer[:, 4:], 2, VOCAB) as unpadded:
        greedy(target, ids, draft)
    for one, other in zip(rounds, unpadded, strict=True):
        torch.testing.assert_close(one["logits"], other["logits"], atol=1e-4, rtol=1e-4)


def test_chunked_prefill(target, draft):
    answer, out = both(target, draft, prompt(20), prefill_chunk_size=6)
    assert torch.equal(out, answer)


def conversation(target, draft):
    """Three turns on one cache that the caller keeps: the ids after each, and the cache's length."""
    cache, ids, turns = DynamicCache(config=target.config), prompt(9), []
    for turn in range(3):
        ids = greedy(target, ids, draft, **{CACHE: cache}, max_new_tokens=11)
        turns.append((ids.tolist(), cache.get_seq_length()))
        ids = torch.cat([ids, prompt(5, seed=turn + 1)], dim=1)
    return turns


def test_turns_on_a_passed_in_cache(targets, family):
    target = targets[family]
    assert conversation(target, make_draft(target)) == conversation(target, None)


def test_later_turns_draft_from_the_whole_conversation(target, draft):
    """The draft's logits on a cache that is passed on equal those of a call that sees everything anew."""
    cache, ids = DynamicCache(config=target.config), prompt(9)
    ids = greedy(target, ids, draft, **{CACHE: cache}, max_new_tokens=11)
    ids = torch.cat([ids, prompt(5, seed=1)], dim=1)
    answer = greedy(target, ids)
    for copied in (copy.deepcopy(cache), cache):
        with oracle(answer, 2, VOCAB) as continued:
            assert torch.equal(greedy(target, ids, draft, **{CACHE: copied}), answer)
        with oracle(answer, 2, VOCAB) as anew:
            greedy(target, ids, draft)
        for one, other in zip(continued, anew, strict=True):
            torch.testing.assert_close(one["logits"], other["logits"], atol=1e-4, rtol=1e-4)


def test_a_conversation_begun_in_inference_mode_goes_on_outside_it(target, draft):
    cache = DynamicCache(config=target.config)
    with torch.inference_mode():
        ids = greedy(target, prompt(9), draft, **{CACHE: cache}, max_new_tokens=11)
    ids = torch.cat([ids, prompt(5, seed=1)], dim=1)
    assert torch.equal(greedy(target, ids, draft, **{CACHE: cache}), greedy(target, ids))


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("new_tokens", [2, 8, 9, 10])  # rounds of three tokens are broken off at each of them
def test_a_cache_that_was_passed_to_a_call_that_broke_off_holds_no_rejected_token(targets, family, new_tokens, static):
    target = targets[family]
    draft, ids, seen = make_draft(target), prompt(WINDOW + 3), []
    cache, other = (StaticCache(target.config, 96) if static else DynamicCache(config=target.config) for _ in range(2))
    answer = greedy(target, ids)

    def fails(committed, _scores):
        seen.append(committed)
        if committed.shape[1] == ids.shape[1] + new_tokens:
            raise KeyboardInterrupt
        return torch.zeros(1, dtype=torch.bool)

    with oracle(torch.cat([answer, answer], dim=1), 2, VOCAB), pytest.raises(KeyboardInterrupt):
        greedy(target, ids, draft, **{CACHE: cache}, stopping_criteria=[fails])
    assert ids.shape[1] <= cache.get_seq_length() < seen[-1].shape[1]
    with torch.no_grad():
        target(seen[-1][:, : cache.get_seq_length()], **{CACHE: other})
    answer = greedy(target, seen[-1], **{CACHE: other})
    assert torch.equal(greedy(target, seen[-1], draft, **{CACHE: cache}), answer)


def test_a_cache_can_be_pickled_and_is_then_without_the_drafts_context(target, draft):
    cache = DynamicCache(config=target.config)
    ids = greedy(target, prompt(9), draft, **{CACHE: cache}, max_new_tokens=11)
    ids = torch.cat([ids, prompt(5, seed=1)], dim=1)
    again = pickle.loads(pickle.dumps(cache))
    assert torch.equal(greedy(target, ids, draft, **{CACHE: again}), greedy(target, ids))


@pytest.mark.parametrize("between", ["filled by the target alone", "cropped", "used by another draft"])
def test_a_cache_that_moved_without_the_draft_still_gives_plain_output(target, draft, between):
    cache, ids = DynamicCache(config=target.config), prompt(9)
    if between == "filled by the target alone":
        ids = greedy(target, ids, **{CACHE: cache}, max_new_tokens=5)
    elif between == "cropped":
        greedy(target, ids, draft, **{CACHE: cache}, max_new_tokens=11)
        cache.crop(-12)  # into the prompt
    else:
        ids = greedy(target, ids, make_draft(target, seed=9), **{CACHE: cache}, max_new_tokens=5)
    ids = torch.cat([ids, prompt(4, seed=2)], dim=1)
    answer = greedy(target, ids)
    assert torch.equal(greedy(target, ids, draft, **{CACHE: cache}), answer)


def test_a_cache_returned_by_generate_can_be_passed_on(target, draft):
    first = greedy(target, prompt(9), draft, return_dict_in_generate=True, max_new_tokens=11)
    ids = torch.cat([first.sequences, prompt(5, seed=1)], dim=1)
    out = greedy(target, ids, draft, **{CACHE: first[CACHE]})
    assert torch.equal(out, greedy(target, ids))


@pytest.mark.parametrize("num_right", [0, 3])
def test_static_cache(targets, family, num_right):
    """Dense layers are cropped where Transformers can; static sliding ones are copied and replayed."""
    target = targets[family]
    answer = greedy(target, prompt(7), cache_implementation="static")
    with oracle(torch.cat([answer, answer], dim=1), num_right, VOCAB):
        drafted = greedy(target, prompt(7), make_draft(target), cache_implementation="static")
    assert torch.equal(drafted, answer)


def test_repeated_calls_give_the_same(target, draft):
    first = greedy(target, prompt(7), draft)
    assert all(torch.equal(greedy(target, prompt(7), draft), first) for _ in range(3))


def test_threads_on_one_target_do_not_mix(target, draft):
    prompts = [prompt(5 + n, seed=n) for n in range(4)]
    expected = [greedy(target, ids, draft, return_dict_in_generate=True) for ids in prompts]
    found = [None] * len(prompts)

    def run(n):
        for _ in range(3):
            found[n] = greedy(target, prompts[n], draft, return_dict_in_generate=True)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.sequences, other.sequences)
        assert one.speculation.acceptance_lengths == other.speculation.acceptance_lengths


def test_generation_config_and_inputs_by_position(target, draft):
    config = GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    answer = target.generate(prompt(7), config)
    assert torch.equal(target.generate(prompt(7), config, assistant_model=draft), answer)


def test_a_misspelt_option_is_named(target, draft):
    with pytest.raises(ValueError, match="num_asistant_tokens"):
        greedy(target, prompt(7), draft, num_asistant_tokens=3)


def test_half_precision_draft_beside_a_full_precision_target(target):
    draft = make_draft(target).to(torch.bfloat16)
    assert torch.equal(greedy(target, prompt(7), draft), greedy(target, prompt(7)))


def test_target_in_half_precision_beside_a_full_precision_draft():
    target = make_target("llama").to(torch.bfloat16)
    draft = make_draft(target)
    assert greedy(target, prompt(7), draft).shape[1] == 7 + NEW_TOKENS


@pytest.fixture(scope="module")
def worded(smollm2_tokenizer):
    """A tiny target that writes words, its tokenizer, and a draft."""
    target = make_worded_target(smollm2_tokenizer)
    return target, smollm2_tokenizer, make_draft(target)


def test_stop_strings_end_both_at_the_same_token(worded):
    target, tokenizer, draft = worded
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    start = inputs["input_ids"].shape[1]
    words = [tokenizer.decode(token) for token in greedy(target, inputs["input_ids"])[0, start:]]
    options = {"stop_strings": [words[12], words[20]], "tokenizer": tokenizer}
    stopped = greedy(target, inputs["input_ids"], **options)
    assert stopped.shape[1] <= start + 13
    assert torch.equal(greedy(target, inputs["input_ids"], draft, **options), stopped)


def test_pipelines_take_a_draft(worded):
    target, tokenizer, draft = worded
    alone = pipeline("text-generation", model=target, tokenizer=tokenizer)
    # The draft's config has no special tokens, so Transformers asks for the tokenizer.
    more = {"assistant_model": draft, "assistant_tokenizer": tokenizer}
    together = pipeline("text-generation", model=target, tokenizer=tokenizer, **more)
    options = {"do_sample": False, "max_new_tokens": 20}
    assert together("Once upon a time", **options) == alone("Once upon a time", **options)


def test_a_text_streamer_prints_the_plain_text(worded, capsys):
    target, tokenizer, draft = worded
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    for assistant in (None, draft):
        streamer = TextStreamer(tokenizer, skip_prompt=True)
        greedy(target, inputs["input_ids"], assistant, max_new_tokens=20, streamer=streamer)
    printed = capsys.readouterr().out
    half = len(printed) // 2
    assert printed[:half] == printed[half:]
    assert printed

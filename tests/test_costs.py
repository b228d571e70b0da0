"""Blocks and trees that end where another candidate would not be worth its row of the target's forward."""

import pytest
import torch
from conftest import FAMILIES, VOCAB, make_draft, make_target, prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle
from test_batch import batch, new_tokens
from test_decoding import stateless_draft_logits
from test_sampling import enumerated_law, p_value, repetition, sampled_counts, temperature
from test_sampling import pair as pair  # a fixture

from transformers_dflash import costs
from transformers_dflash.costs import DraftingRest, RoundCosts, floor_seconds
from transformers_dflash.target import Target

AUTO = {"chain": {"assistant_confidence_threshold": "auto"}, "tree": {"tree_budget": "auto"}}
ON = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "return_dict_in_generate": True}


def costing(monkeypatch, per_row: float, drafting: float = 0.0):
    """A machine on which a forward over one row takes a second, and each further row `per_row` seconds."""
    made_up = RoundCosts(drafting, [(1, 1.0), (2, 1.0 + per_row)])
    monkeypatch.setattr(RoundCosts, "of", lambda _target, _draft: made_up)


def drafting(draft, **options):
    for name, value in options.items():
        setattr(draft.generation_config, name, value)
    return draft


# How many


def test_between_measured_sizes_a_forward_lies_on_a_line_and_beyond_them_on_the_last_one():
    measured = RoundCosts(0.5, [(1, 1.0), (2, 2.0), (8, 5.0)])
    assert [measured.seconds(rows) for rows in (1, 2, 4, 8, 10)] == pytest.approx([1.5, 2.5, 3.5, 5.5, 6.5])


def test_drafting_several_blocks_costs_more_as_it_would_the_target():
    measured = RoundCosts(0.5, [(1, 1.0), (4, 2.0), (8, 3.0)], block_rows=4)
    assert measured.seconds(8, sequences=2) == pytest.approx(0.5 * 3.0 / 2.0 + 3.0)
    assert measured.saved(rows=8, sequences=2, tokens=6) == pytest.approx(3 * (1 + 1 / 3) - 3.75)


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 1), max_size=8),
    st.lists(st.floats(0, 2), min_size=1, max_size=4),
    st.floats(0, 2),
    st.integers(1, 5),
)
def test_the_count_is_the_one_with_the_most_tokens_per_second(gains, steps, draft_seconds, sequences):
    verifying = [(2**i, 1.0 + sum(steps[:i])) for i in range(len(steps) + 1)]
    machine = RoundCosts(draft_seconds, verifying)
    best = machine.best_count(gains, sequences)
    speed = [
        (sequences + sum(gains[:n])) / machine.seconds(sequences * (n + 1), sequences) for n in range(len(gains) + 1)
    ]
    assert speed[best] == pytest.approx(max(speed))


def test_free_rows_leave_the_whole_block_and_dear_ones_leave_nothing(monkeypatch):
    target = make_target("llama")
    draft = make_draft(target)
    expected = target.generate(prompt(6), assistant_model=draft, **ON).speculation
    drafting(draft, **AUTO["chain"])
    costing(monkeypatch, per_row=0.0)
    whole = target.generate(prompt(6), assistant_model=draft, **ON).speculation
    assert whole.drafted_by_round == expected.drafted_by_round
    assert max(whole.drafted_by_round) == draft.config.num_candidates
    costing(monkeypatch, per_row=100.0)
    nothing = target.generate(prompt(6), assistant_model=draft, **ON).speculation
    assert set(nothing.drafted_by_round) == {0}


def test_free_rows_grow_a_large_tree_and_dear_ones_a_small_one(monkeypatch):
    target = make_target("llama")
    draft = drafting(make_draft(target), **AUTO["tree"])
    sizes = []
    for per_row in (0.0, 0.1, 100.0):
        costing(monkeypatch, per_row)
        speculation = target.generate(prompt(6), assistant_model=draft, **ON).speculation
        sizes.append(speculation.drafted / speculation.rounds)
    assert costs.MOST_ROWS * 0.8 < sizes[0] <= costs.MOST_ROWS
    assert sizes[0] > sizes[1] > sizes[2] == 0


def test_more_sequences_share_the_cost_of_a_round_and_its_candidates():
    machine = RoundCosts(0.0, [(1, 1.0), (2, 1.0), (4, 1.0), (8, 9.0)])  # four rows are free
    assert machine.best_count([0.1, 0.1, 0.1, 0.1]) == 3
    assert machine.best_count([0.2, 0.2, 0.2, 0.2], sequences=2) == 1


def test_without_looking_ahead_the_first_loss_is_the_end():
    machine = RoundCosts(0.0, [(1, 1.0), (2, 3.0), (4, 3.0), (8, 3.0)])  # the second row is dear, all others free
    assert machine.best_count([0.9] * 7) == 7
    assert machine.best_count([0.9] * 7, looks_ahead=False) == 0
    free = RoundCosts(0.0, [(1, 1.0), (2, 1.0)])
    assert free.best_count([0.9] * 7, looks_ahead=False) == 7


# Whether to draft at all


def rests(rest: DraftingRest, tokens: int) -> int:
    """Rounds of 4 rows that give so many tokens, until the draft rests; then how many steps it rests."""
    for _ in range(100):
        rest.add_round(4, 1, tokens)
        if rest.resting:
            break
    steps = 0
    while rest.resting:
        rest.add_round(1, 1, 1)
        steps += 1
    return steps


def test_time_saved_is_that_of_the_plain_steps_that_a_round_stands_for():
    machine = RoundCosts(0.5, [(1, 1.0), (2, 1.1), (8, 1.7)])
    assert machine.saved(rows=4, sequences=1, tokens=3) == pytest.approx(3 * 1.0 - (0.5 + 1.3))
    assert machine.saved(rows=8, sequences=2, tokens=5) == pytest.approx(5 / 2 * 1.1 - (0.5 * 1.1 + 1.7))


def test_rests_grow_while_drafting_loses_and_start_anew_when_it_has_paid():
    machine = RoundCosts(0.5, [(1, 1.0), (2, 1.1)])  # 4 rows with a draft take 1.8 s
    rest = DraftingRest(machine)
    assert [rests(rest, 1) for _ in range(6)] == [4, 8, 16, 32, 32, 32]
    for _ in range(3):
        rest.add_round(4, 1, 4)
    assert not rest.resting
    assert rests(rest, 1) == 4
    assert rests(DraftingRest(machine), 2) == 0  # it saves 0.2 s every time


def test_drafting_that_never_pays_costs_little_more_than_plain_steps():
    machine = RoundCosts(1.0, [(1, 1.0), (2, 1.5)])  # as slow as the target
    rest, seconds, tokens = DraftingRest(machine), 0.0, 0
    while tokens < 1000:
        seconds += 1.0 if rest.resting else machine.seconds(4)
        rest.add_round(1 if rest.resting else 4, 1, 1)
        tokens += 1
    assert seconds < 1.1 * tokens


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_draft_that_has_rested_knows_what_came_meanwhile(name, rows, monkeypatch):
    """It guesses wrong at first, rests, and goes on when its guesses come right."""
    target = make_target(name)
    draft = drafting(make_draft(target), **AUTO["chain"])
    costing(monkeypatch, per_row=0.0, drafting=0.5)
    inputs = batch((9, 4, 7)[:rows])
    options = {"do_sample": False, "max_new_tokens": 60, "eos_token_id": None}
    answers = target.generate(**inputs, **options)
    right = [0] * rows

    def comes_right(ids, _scores):
        if ids.shape[1] > answers.shape[1] - 30:
            right[:] = [draft.config.num_candidates] * rows
        return torch.zeros(len(ids), dtype=torch.bool)

    stop = {} if rows > 1 else {"stopping_criteria": [comes_right]}
    with oracle(answers, right, VOCAB) as rounds, torch.no_grad():
        out = target.generate(**inputs, assistant_model=draft, return_dict_in_generate=True, **options, **stop)
        for one in rounds:
            for row, ids in enumerate(one["rows"]):
                which = next(i for i, whole in enumerate(answers) if whole[: ids.shape[1]].tolist() == ids[0].tolist())
                own = ids[:, int((inputs["attention_mask"][which] == 0).sum()) :]
                expected = stateless_draft_logits(target, draft, own, len(one["logits"]))
                torch.testing.assert_close(one["all_logits"][row], expected, atol=1e-4, rtol=1e-3)
    assert new_tokens(out.sequences, inputs) == new_tokens(answers, inputs)
    drafted = out.speculation.drafted_by_round
    assert drafted.count(0) >= (4 + 8 + 16) * rows
    assert 4 + 8 + 16 <= out.speculation.rested < out.speculation.forwards
    if rows == 1:
        assert 0 not in drafted[-4:-1]
        assert max(out.speculation.acceptance_lengths) == draft.config.num_candidates + 1


# Exact all the same


@pytest.mark.parametrize("kind", AUTO)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_output_is_plain_output(name, kind):
    """With costs as they are measured here."""
    target = make_target(name)
    draft = drafting(make_draft(target), **AUTO[kind])
    answer = target.generate(prompt(6), **ON).sequences
    assert torch.equal(target.generate(prompt(6), assistant_model=draft, **ON).sequences, answer)
    batch = prompt(6).repeat(2, 1)
    batch[1] += 1
    answers = target.generate(batch, **ON).sequences
    assert torch.equal(target.generate(batch, assistant_model=draft, **ON).sequences, answers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "warp"),
    [
        ("chain", {}, temperature(1.0)),
        ("chain", {"repetition_penalty": 1.8}, repetition(1.8)),
        ("tree", {}, temperature(1.0)),
    ],
)
def test_sampled_sequences_follow_the_law_of_the_target(pair, monkeypatch, kind, options, warp):
    target, draft = pair
    costing(monkeypatch, per_row=0.3, drafting=0.1)
    monkeypatch.setattr(costs, "_ROUNDS_TO_LOSE", 0)  # so that in some of these short texts the draft rests
    monkeypatch.setattr(costs, "_SHORTEST_REST", 1)
    for name, value in AUTO[kind].items():
        monkeypatch.setattr(draft.generation_config, name, value, raising=False)
    counts = sampled_counts(target, draft, top_k=0, **options)
    assert p_value(counts, enumerated_law(target, warp)) > 1e-3


# Measured


def test_the_machine_is_measured_once_for_a_target_and_a_draft():
    target = make_target("llama")
    draft, other = drafting(make_draft(target), **AUTO["tree"]), make_draft(target)
    calls = []
    handle = target.register_forward_hook(lambda *_: calls.append(1))
    first = RoundCosts.of(Target(target), draft)
    measuring = len(calls)
    assert measuring >= 6
    assert RoundCosts.of(Target(target), draft) is first
    assert len(calls) == measuring
    assert RoundCosts.of(Target(target), other) is not first
    handle.remove()


def test_a_measurement_is_of_real_forwards_and_ends_at_the_last_position():
    target = make_target("llama")
    target.config.rope_parameters["rope_type"] = "dynamic"  # as a config says it; only the bound is read here
    target.config.max_position_embeddings = 8
    measured = RoundCosts.of(Target(target), make_draft(target))
    assert measured.drafting > 0
    rows, seconds = zip(*measured.verifying, strict=True)
    assert list(rows) == [2**i for i in range(len(rows))]
    assert 2 <= rows[-1] <= 8
    assert all(one > 0 for one in seconds)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_floor_of_a_round_is_two_bare_forwards(name):
    target = make_target(name)
    draft = make_draft(target)
    seen = []
    handles = [
        target.register_forward_hook(lambda *_: seen.append("target")),
        draft.register_forward_hook(lambda *_: seen.append("draft")),
    ]
    verifying, drafting = floor_seconds(Target(target), draft, prompt(12), new_per_round=2, repeats=3)
    assert seen == ["target", "draft", *["target", "draft"] * 3]
    assert min(verifying, drafting) > 0
    for handle in handles:
        handle.remove()


# Refused


@pytest.mark.parametrize("value", ["always", -0.1, 1.5, True])
def test_a_threshold_that_is_no_probability_is_refused(value):
    target = make_target("llama")
    draft = make_draft(target)
    draft.generation_config.assistant_confidence_threshold = value
    with pytest.raises(ValueError, match="assistant_confidence_threshold .* is no probability"):
        target.generate(prompt(6), assistant_model=draft, **ON)


def test_processes_of_one_target_cannot_go_by_their_own_clocks(monkeypatch):
    target = make_target("llama")
    monkeypatch.setattr(type(target), "tp_size", property(lambda _self: 2))
    with pytest.raises(ValueError, match="clock of its own: set numbers"):
        target.generate(prompt(6), assistant_model=drafting(make_draft(target), **AUTO["tree"]), **ON)

"""Metrics against numbers counted by hand, and `transformers-dflash evaluate` as its users run it."""

import math

import pytest

from transformers_dflash import evaluation
from transformers_dflash.evaluation import measures

ROUNDS = [[4, 2], [3], []]  # committed tokens; the last prompt ended with its first token
DRAFTED = [[3, 3], [3, 1], []]
ACCEPTED = [[3, 1], [0, 1], []]
TIMES = {
    "plain_seconds": [4.0, 6.0, 1.0],
    "plain_tokens": [8, 6, 2],
    "seconds": [2.0, 6.0, 0.25],
    "tokens": [8, 12, 2],
}
ANSWERS = {"predictions": [[5, 6, 7], [5, 6], [1, 2]], "references": [[5, 6, 7], [5, 9], [1, 2, 3]]}
EXPECTED = {
    "acceptance_length": 3,  # 9 tokens in 3 rounds
    "acceptance_length_per_prompt": 3,
    "block_efficiency": 0.75,
    "acceptance_rates": [3 / 4, 1 / 3, 1 / 3],  # of 4, 3 and 3 proposed
    "conditional_acceptance_rates": [3 / 4, 1 / 2, 1],  # the round that proposed one candidate reached no second place
    "speedup": (11 / 16) / (8.25 / 22),
    "speedup_median": 2,
    "speedup_lowest": 2,
    "speedup_highest": 4,
    "identical": 1 / 3,
    "first_differences": [None, 1, 2],
}


def test_measures_are_those_counted_by_hand():
    values = measures.acceptance_length(ROUNDS, 4) | measures.acceptance_rates(DRAFTED, ACCEPTED)
    values |= measures.speedup(**TIMES) | measures.losslessness(*ANSWERS.values())
    assert list(values) == list(EXPECTED)
    for name, expected in EXPECTED.items():
        assert values[name] == pytest.approx(expected), name
    # Two rounds of one prompt weigh as two by tokens, and as one prompt among two otherwise.
    values = measures.acceptance_length([[5, 5, 5], [1]])
    assert values == {"acceptance_length": 4, "acceptance_length_per_prompt": 3}


def test_measures_of_nothing_are_nan():
    values = measures.acceptance_length([[]], 4) | measures.speedup([1.0], [0], [1.0], [1])
    values["identical"] = measures.losslessness([], [])["identical"]
    assert all(math.isnan(value) for value in values.values())
    assert measures.acceptance_rates([[]], [[]]) == {"acceptance_rates": [], "conditional_acceptance_rates": []}
    rates = measures.acceptance_rates([[2]], [[0]])
    assert rates["acceptance_rates"] == [0, 0]
    assert math.isnan(rates["conditional_acceptance_rates"][1])


def test_ties_explain_partings_within_the_tolerance():
    told = measures.losslessness(*ANSWERS.values(), gaps=[None, 0.1, 0.3], tolerance=0.1)
    assert (told["explained_by_ties"], told["unexplained"]) == (1, 1)
    with pytest.raises(ValueError, match="has no gap"):
        measures.losslessness(*ANSWERS.values(), gaps=[0.1, None, 0.3])


@pytest.mark.parametrize(("drafted", "accepted"), [([[2]], [[3]]), ([[2, 2]], [[1]])])
def test_counts_that_do_not_belong_together_are_refused(drafted, accepted):
    with pytest.raises(ValueError, match="prompt 0 has the counts"):
        measures.acceptance_rates(drafted, accepted)


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No network, and a cache of its own."""
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a metric asked the network"))
    return {"cache_dir": str(tmp_path)}


def test_metrics_load_offline_and_combine(offline):
    import evaluate

    together = evaluate.combine([evaluation.load(name, **offline) for name in evaluation.INPUTS])
    values = together.compute(
        acceptance_lengths=ROUNDS, block_size=4, drafted=DRAFTED, accepted=ACCEPTED, **TIMES, **ANSWERS
    )
    assert set(values) == set(EXPECTED)
    for name, expected in EXPECTED.items():
        assert values[name] == pytest.approx(expected), name

    for start in range(3):  # prompt by prompt
        inputs = {"acceptance_lengths": ROUNDS, "drafted": DRAFTED, "accepted": ACCEPTED, **TIMES, **ANSWERS}
        together.add_batch(**{name: values[start : start + 1] for name, values in inputs.items()})
    assert {k: v for k, v in values.items() if k != "block_efficiency"} == together.compute()


def test_metrics_say_what_they_do_not_know(offline):
    metric = evaluation.load("losslessness", **offline)
    assert metric.compute(**ANSWERS, gaps=[None, 0.1, 0.3], tolerance=0.2)["unexplained"] == 1
    with pytest.raises(TypeError, match="has no input gap: it takes predictions, references, gaps, tolerance"):
        metric.compute(**ANSWERS, gap=[None, 0.1, 0.3])
    with pytest.raises(ValueError, match="there is no metric 'perplexity': take one of acceptance_length"):
        evaluation.load("perplexity")


@pytest.mark.parametrize("name", evaluation.INPUTS)
def test_examples_of_the_metrics_are_right(name, offline):
    metric = evaluation.load(name, **offline)
    call, result = metric.inputs_description.split(">>> metric.compute")[1].strip().split("\n", 1)
    assert metric.compute(**eval(f"dict{call}")) == eval(result)
    assert set(metric.features) <= set(evaluation.INPUTS[name])
    for one in evaluation.INPUTS[name]:
        assert f"{one}:" in metric.inputs_description

"""Verification of sampled chains as the papers state it: slow, obvious, in Python's own floats.

Both ways say with what probability each number of candidates is accepted and each token follows them. Laws are lists;
`p` has one for every candidate's place and one for the place after the last, `q` one for every candidate's place.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable
from functools import partial

Law = list[float]
Outcomes = dict[tuple[int, int], float]  # (accepted candidates, the token that follows) -> probability


def over_its_sum(law: Law) -> Law:
    return [value / sum(law) for value in law]


def token_by_token(candidates: list[int], p: list[Law], q: list[Law]) -> Outcomes:
    """Speculative sampling (arXiv 2211.17192, algorithm 1)."""
    outcomes: Outcomes = defaultdict(float)
    arrived = 1.0
    for place, x in enumerate(candidates):
        accept = min(1.0, p[place][x] / q[place][x])
        if accept < 1:
            for token, chance in enumerate(
                over_its_sum([max(0.0, a - b) for a, b in zip(p[place], q[place], strict=True)])
            ):
                outcomes[place, token] += arrived * (1 - accept) * chance
        arrived *= accept
    for token, chance in enumerate(p[-1]):
        outcomes[len(candidates), token] += arrived * chance
    return outcomes


def as_a_block(
    candidates: list[int], p: list[Law], q: list[Law], *, weigh_the_residual: bool = True, hold_down: bool = True
) -> Outcomes:
    """Block verification (arXiv 2403.10444, algorithm 2), and two ways to get it wrong.

    Args:
        weigh_the_residual: False forgets w in the law of the token that follows.
        hold_down: False forgets to keep w at 1 or below.
    """
    k = len(candidates)
    weights = [1.0]
    for place, x in enumerate(candidates):
        weight = weights[-1] * p[place][x] / q[place][x]
        weights.append(min(1.0, weight) if hold_down else weight)
    outcomes: Outcomes = defaultdict(float)
    none_longer = 1.0
    for length in range(k, -1, -1):
        weight = weights[length]
        if length == k:
            enough, following = min(1.0, weight), p[k]
        else:
            spare = [max(0.0, weight * a - b) for a, b in zip(p[length], q[length], strict=True)]
            if sum(spare) == 0:  # p = q, so that the next candidate is always accepted, or w p is below q everywhere
                continue
            enough = sum(spare) / (sum(spare) + 1 - min(1.0, weight))
            scale = weight if weigh_the_residual else 1.0
            following = over_its_sum([max(0.0, scale * a - b) for a, b in zip(p[length], q[length], strict=True)])
        for token, chance in enumerate(following):
            outcomes[length, token] += none_longer * enough * chance
        none_longer *= 1 - enough
    return outcomes


def law_of_output(
    verify: Callable[..., Outcomes],
    p: Callable[[tuple[int, ...]], Law],
    q: Callable[[tuple[int, ...]], Law],
    vocab_size: int,
    k: int,
    goes_on: Callable[[tuple[int, ...]], bool] = lambda _prefix: True,
) -> tuple[dict[tuple[int, ...], float], float]:
    """One round and then the target alone, by enumeration of all that can be drafted and drawn.

    Args:
        p, q: the laws of the token after a prefix.
        goes_on: whether another candidate is drafted after a prefix, up to k.

    Returns:
        The probability of every sequence of k + 1 tokens, and the expected number of accepted candidates.
    """
    law: dict[tuple[int, ...], float] = defaultdict(float)
    expected = 0.0
    for chain, drafted in chains(q, vocab_size, k, goes_on).items():
        prefixes = [chain[:length] for length in range(len(chain) + 1)]
        outcomes = verify(list(chain), [p(prefix) for prefix in prefixes], [q(prefix) for prefix in prefixes[:-1]])
        for (accepted, token), chance in outcomes.items():
            expected += drafted * chance * accepted
            start = (*chain[:accepted], token)
            for rest in itertools.product(range(vocab_size), repeat=k + 1 - len(start)):
                law[start + rest] += drafted * chance * chance_of(p, start, rest)
    return law, expected


def chains(q, vocab_size: int, k: int, goes_on) -> dict[tuple[int, ...], float]:
    """Every chain that can be drafted, and its probability."""
    done: dict[tuple[int, ...], float] = {}
    open_ones = {(): 1.0}
    for _ in range(k):
        longer = {}
        for prefix, chance in open_ones.items():
            if prefix and not goes_on(prefix):
                done[prefix] = chance
            else:
                longer |= {(*prefix, x): chance * q_x for x, q_x in enumerate(q(prefix)) if q_x > 0}
        open_ones = longer
    return done | open_ones


def chance_of(p, start: tuple[int, ...], rest: tuple[int, ...]) -> float:
    """That the target goes on with `rest` after `start`."""
    chance = 1.0
    for place, token in enumerate(rest):
        chance *= p(start + rest[:place])[token]
    return chance


forgets_the_weight = partial(as_a_block, weigh_the_residual=False)
lets_weights_grow = partial(as_a_block, hold_down=False)

"""The multiset of capabilities: its least element, what it refuses, and what it costs."""

from __future__ import annotations

import random

import pytest

from app.core.capabilities import Capabilities
from app.core.errors import BrokenInvariant
from app.core.frontier import EMPTY, Frontier


class CountingFrontier(Frontier):
    """Counts how often it is compared, which is what finding the least costs."""

    comparisons = 0

    def __lt__(self, other: int) -> bool:
        CountingFrontier.comparisons += 1
        return int.__lt__(self, other)


def test_the_least_of_nothing_is_the_empty_frontier() -> None:
    assert Capabilities().least_after({}) == EMPTY


def test_asking_changes_nothing() -> None:
    capabilities = Capabilities()
    capabilities.apply({Frontier(3): 1, Frontier(5): 2})
    assert capabilities.least_after({Frontier(3): -1}) == 5
    assert capabilities.least_after({Frontier(3): -1, Frontier(5): -2}) == EMPTY
    assert capabilities.least_after({Frontier(3): -1, Frontier(4): +1}) == 4
    assert capabilities.least_after({}) == 3
    assert capabilities.counts() == {3: 1, 5: 2}


def test_a_count_cannot_become_negative() -> None:
    capabilities = Capabilities()
    capabilities.apply({Frontier(3): 1})
    with pytest.raises(BrokenInvariant, match=r"count at \[3\] would become -1"):
        capabilities.least_after({Frontier(3): -2})


def test_it_is_a_multiset_whatever_comes_and_goes() -> None:
    rng = random.Random(1)
    capabilities = Capabilities()
    held: list[int] = []
    for _ in range(20_000):
        if held and rng.random() < 0.5:
            deltas = {Frontier(held.pop(rng.randrange(len(held)))): -1}
        else:
            held.append(rng.randrange(1000))
            deltas = {Frontier(held[-1]): 1}
        expected = min(held, default=EMPTY)
        assert capabilities.least_after(deltas) == expected
        capabilities.apply(deltas)
        assert capabilities.least_after({}) == expected


@pytest.mark.parametrize("holds", [1_000, 100_000])
def test_moving_one_of_many_holds_looks_at_few_of_them(holds: int) -> None:
    capabilities = Capabilities()
    capabilities.apply({CountingFrontier(time): 1 for time in range(holds)})
    CountingFrontier.comparisons = 0
    for time in range(100):
        deltas = {CountingFrontier(time): -1, CountingFrontier(time + holds): 1}
        assert capabilities.least_after(deltas) == time + 1
        capabilities.apply(deltas)
    assert CountingFrontier.comparisons / 100 < 100

"""When merging is worth it, and that it stays so for as long as a shard lives."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest

from app.core.frontier import Frontier
from app.shards.merge_plan import FRACTION, MOST_SMALL, SMALL_BYTES, File, Plan, merge_target, plan
from app.shards.merging import FILE_BYTES

KB, MB, GB = 1024, 1024**2, 1024**3
DAY = 86_400_000


def paths(found: Plan | None) -> list[str] | None:
    return None if found is None else sorted(file.path for file in found.files)


def test_what_has_not_come_under_the_target_is_not_touched() -> None:
    old, new = File("old", 10, 1, 3), File("new", 10, 6, 9)
    assert plan([old, new], 0) is None
    assert paths(plan([old, new], 5)) == ["old"]
    assert paths(plan([old, new], 9)) == ["new", "old"]


def test_history_is_merged_to_the_last_time_that_no_file_lies_across() -> None:
    old, wide, beside = File("old", 10, 1, 3), File("wide", 10, 6, 20), File("beside", 10, 9, 12)
    for target, to, expected in (
        (5, 5, ["old"]),
        (6, 5, ["old"]),
        (19, 5, ["old"]),
        (20, 20, ["beside", "old", "wide"]),
    ):
        found = plan([old, wide, beside], target)
        assert found is not None
        assert (found.to, paths(found)) == (to, expected)
    # What lies across the time that one file leads to leads further back.
    assert plan([File("a", 10, 1, 6), File("b", 10, 5, 9), File("c", 10, 8, 12)], 10) is None


def test_a_merged_base_alone_is_left_alone() -> None:
    assert plan([File("a", 10, 5, 5), File("b", 10, 5, 5)], 9) is None
    assert plan([File("a", 10, 5, 5), File("b", 10, 6, 6)], 5) is None


def test_a_quarter_of_the_base_is_worth_it() -> None:
    base = [File("base1", 500, 5, 5), File("base2", 500, 5, 5)]
    assert plan([*base, File("new", 249, 6, 7)], 9) is None
    assert paths(plan([*base, File("new", 250, 6, 7)], 9)) == ["base1", "base2", "new"]


def test_a_file_without_statistics_is_read_and_gets_some() -> None:
    found = plan([File("unknown", 10, None, None), File("base", 10, 5, 5)], 9)
    assert paths(found) == ["base", "unknown"]
    assert found is not None
    assert [file.path for file in found.unknown] == ["unknown"]
    assert plan([File("unknown", 10, None, None), File("wide", 10, 5, 20)], 9) is None, "to no time at all"


def test_nothing_at_or_above_the_upper_is_merged() -> None:
    assert type(merge_target(Frontier(3), 5)) is int, "py4j takes no Frontier"
    assert merge_target(7, 5) == 4
    assert merge_target(3, 5) == 3
    assert merge_target(2**63 - 1, 2**63 - 1) is None
    assert merge_target(9, 2**63 - 1) == 9
    assert merge_target(9, 0) is None
    assert merge_target(0, 9) is None


def small(count: int, size: int = 2 * KB, *, first: int = 10) -> list[File]:
    return [File(f"small{number}", size, first + number, first + number) for number in range(count)]


def test_too_many_small_files_are_merged_without_the_base() -> None:
    base, large = File("base", GB, 5, 5), File("large", 40 * MB, 6, 8)
    assert plan([base, large, *small(MOST_SMALL)], 9_999) is None
    found = plan([base, large, *small(MOST_SMALL + 1), File("later", KB, 9_999, 10_001)], 10_000)
    assert found is not None
    assert found.to == 9_998
    assert paths(found) == sorted(file.path for file in small(MOST_SMALL + 1))


def test_those_of_another_size_are_left_alone() -> None:
    base = File("base", 100 * GB, 5, 5)
    summed = [File(f"summed{number}", MB, number, number) for number in range(6, 8 + MOST_SMALL)]
    assert paths(plan([base, *summed, *small(3)], 9_999)) == sorted(file.path for file in summed)
    few = small(MOST_SMALL + 1, first=1_000)
    assert paths(plan([base, *summed, *few], 9_999)) == sorted(file.path for file in few), "first the smallest"


def test_what_a_merge_of_small_files_has_left_is_not_rewritten_for_a_few_more() -> None:
    base, left = File("base", GB, 5, 5), File("left", 500 * KB, 6, 6)
    assert plan([base, left, *small(MOST_SMALL, size=999)], 9_999) is None
    found = plan([base, left, *small(MOST_SMALL, size=KB + 1)], 9_999)
    assert found is not None
    assert "left" in (paths(found) or [])


Spread = Callable[[random.Random, int, int], Iterable[int]]
"""Times of the rows of an append, from its lower time on, so many."""

SPREADS: dict[str, Spread] = {
    "even": lambda _, lower, width: [lower + width * part // 20 for part in range(20)],
    "all at the end": lambda _, lower, width: [lower, *(20 * [lower + width - 1])],
    "all at the start": lambda _, lower, width: [*(20 * [lower]), lower + width - 1],
    "towards the end": lambda _, lower, width: [lower + width - 1 - int(width / 2**part) for part in range(1, 21)],
    "anyhow": lambda chance, lower, width: [lower + int(width * chance.random() ** power) for power in (0.1, 1, 9)],
}


@dataclass
class Life:
    """A shard and what is done to it, row by row. What cancels is a part of what is summed."""

    cancels: float = 0.0
    rows: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    files: list[File] = field(default_factory=list)
    appended = rewritten = rewritten_small = merges = most_files = 0
    upper = 1

    def append(self, size: int, times: Iterable[int], upper: int, *, statistics: bool = True) -> None:
        times = list(times)
        assert all(self.upper <= time < upper for time in times)
        self.appended, self.upper = self.appended + size, upper
        self._add([(time, size / len(times)) for time in times], statistics=statistics)

    def merge(self, target: int) -> None:
        """Again and again, while it is worth it."""
        reachable, before = merge_target(max(0, target), self.upper), self.merges
        while reachable is not None and (found := plan(self.files, reachable)) is not None:
            self.merges += 1
            assert self.merges < before + 10, "what was merged is merged again"
            base = min((file.min_time for file in self.files if file.min_time is not None), default=None)
            touched = [row for file in found.files for row in self.rows.pop(file.path)]
            if found.unknown or any(file.min_time == base for file in found.files):
                self.rewritten += found.bytes
            else:
                self.rewritten_small += found.bytes
            self.files = [file for file in self.files if file.path in self.rows]
            kept = [row for row in touched if row[0] > found.to]
            assert found.unknown or not kept, "only a file without statistics may have such rows"
            if kept:
                self._add(kept)
            left = sum(size for time, size in touched if time <= found.to) * (1 - self.cancels)
            number = max(1, math.ceil(found.bytes / FILE_BYTES))
            for _ in range(number):
                self._add([(found.to, left / number)])
        self.most_files = max(self.most_files, len(self.files))

    def _add(self, rows: list[tuple[int, float]], *, statistics: bool = True) -> None:
        path = f"f{self.appended}-{self.merges}-{len(self.files)}"
        times = [time for time, _ in rows]
        size = max(700, int(sum(size for _, size in rows)))  # there is no smaller Parquet file
        first, last = (min(times), max(times)) if statistics else (None, None)
        assert path not in self.rows
        self.rows[path] = rows
        self.files.append(File(path, size, first, last))


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("since", ["right behind", "far behind", "stays"])
def test_each_byte_is_rewritten_a_bounded_number_of_times(spread: str, since: str) -> None:
    """A long life: appends of any size and width, a since that moves in any steps, and nothing that ever cancels."""
    chance = random.Random(f"{spread} {since}")
    life, target = Life(), 0
    for _ in range(3_000):
        width = chance.choice([1, 1, 10, 500, 100_000])
        size = 1_000 + int(chance.paretovariate(1.2) * 10_000)
        life.append(size, SPREADS[spread](chance, life.upper, width), life.upper + width)
        if since == "right behind":
            target = life.upper - 1 - chance.choice([0, 0, 5, 400])
        elif since == "far behind":
            target = max(target, life.upper - chance.randint(1, 500_000))
        elif chance.random() < 0.03:
            target = life.upper - chance.randint(1, 200_000)
        life.merge(target)
    assert life.merges > 10
    assert life.rewritten <= (1 + 1 / FRACTION) * life.appended
    assert life.rewritten_small <= 4 * life.appended


@pytest.mark.parametrize("spread", SPREADS)
def test_a_day_in_one_append_is_rewritten_as_rarely_while_the_since_creeps_through_it(spread: str) -> None:
    life, chance = Life(), random.Random(spread)
    for day in range(4):
        life.append(GB, SPREADS[spread](chance, life.upper, DAY), life.upper + DAY)
        begin, left = day * DAY + 1, DAY
        while left > 1:  # as it hurts most: a fifth of what is left, each time
            left = left * 4 // 5
            life.merge(begin + DAY - left)
        life.merge(begin + DAY)
    assert life.merges >= 4
    assert life.rewritten + life.rewritten_small <= 5 * life.appended


def test_a_byte_without_statistics_may_count_twice() -> None:
    chance, life = random.Random(1), Life()
    for _ in range(2_000):
        width = chance.choice([1, 100, 10_000])
        times = SPREADS["towards the end"](chance, life.upper, width)
        life.append(chance.randint(1_000, 100_000), times, life.upper + width, statistics=chance.random() < 0.5)
        life.merge(life.upper - chance.randint(1, 20_000))
    assert life.merges > 10
    assert life.rewritten + life.rewritten_small <= 10 * life.appended


@pytest.mark.parametrize(("base", "size", "appends"), [(GB, 3 * KB, 90_000), (100 * GB, 3 * KB, 150_000)])
@pytest.mark.parametrize("cancels", [0.0, 0.5, 0.99])
def test_small_appends_to_a_large_shard_leave_some_hundred_files(
    base: int, size: int, appends: int, cancels: float
) -> None:
    """Without the merges of small files alone it would be 83,000 files for 1 GB, and 8,300,000 for 100 GB."""
    life = Life(cancels=cancels)
    life.append(base, [1], 2)
    life.merge(1)
    before = life.rewritten
    for number in range(appends):
        life.append(size, [life.upper], life.upper + 1)
        if number % 200 == 199:
            life.merge(life.upper - 1)
    assert life.most_files < 3 * MOST_SMALL
    assert life.rewritten - before <= 5 * (life.appended - base)
    assert 0 < life.rewritten_small <= 4 * (life.appended - base)


def test_the_sizes_leave_room_between_them() -> None:
    """A merge of many files of one size makes files above it, if not much cancels: so they are not rewritten again."""
    smaller, larger = SMALL_BYTES
    assert smaller < 2 * KB * MOST_SMALL
    assert MOST_SMALL * smaller > larger
    assert 2 * larger <= FILE_BYTES / 2

"""When merging is worth it."""

from __future__ import annotations

import random

from app.core.frontier import Frontier
from app.shards.merge_plan import File, Plan, merge_target, plan


def paths(found: Plan | None) -> list[str] | None:
    return None if found is None else sorted(file.path for file in found.files)


def test_what_has_not_come_under_the_target_is_not_touched() -> None:
    old, new = File("old", 10, 1, 3), File("new", 10, 6, 9)
    assert plan([old, new], 0) is None
    assert paths(plan([old, new], 5)) == ["old"]
    assert paths(plan([old, new], 6)) == ["new", "old"]


def test_a_merged_base_alone_is_left_alone() -> None:
    assert plan([File("a", 10, 5, 5), File("b", 10, 5, 5)], 9) is None
    assert plan([File("a", 10, 5, 5), File("b", 10, 6, 6)], 5) is None


def test_a_quarter_of_the_base_is_worth_it() -> None:
    base = [File("base1", 500, 5, 5), File("base2", 500, 5, 5)]
    assert plan([*base, File("new", 249, 6, 7)], 9) is None
    assert paths(plan([*base, File("new", 250, 6, 7)], 9)) == ["base1", "base2", "new"]


def test_rows_that_have_to_be_kept_count_as_cost() -> None:
    # A fifth of the file is at or before the target: four fifths would be written again for nothing.
    assert plan([File("wide", 1_000, 0, 99)], 18) is None
    found = plan([File("wide", 1_000, 0, 99)], 19)
    assert found is not None
    assert (found.new_bytes, found.kept_bytes, found.straddling) == (200, 800, found.files)


def test_a_file_without_statistics_is_read_and_gets_some() -> None:
    found = plan([File("unknown", 10, None, None), File("base", 10, 5, 5)], 9)
    assert paths(found) == ["base", "unknown"]
    assert found is not None
    assert [file.path for file in found.straddling] == ["unknown"]


def test_nothing_at_or_above_the_upper_is_merged() -> None:
    assert type(merge_target(Frontier(3), 5)) is int, "py4j takes no Frontier"
    assert merge_target(7, 5) == 4
    assert merge_target(3, 5) == 3
    assert merge_target(2**63 - 1, 2**63 - 1) is None
    assert merge_target(9, 2**63 - 1) == 9
    assert merge_target(9, 0) is None
    assert merge_target(0, 9) is None


def test_each_byte_is_rewritten_a_bounded_number_of_times() -> None:
    """A long life: files of any size and width, a since that moves in any steps, and nothing that ever cancels."""
    chance = random.Random(1)
    files: list[File] = []
    upper = appended = rewritten = merges = 0
    for number in range(5_000):
        size, width = int(chance.paretovariate(1.2) * 100), chance.choice([1, 1, 10, 500])
        files.append(File(f"f{number}", size, upper, upper + width - 1))
        appended, upper = appended + size, upper + width
        if chance.random() < 0.3:
            target = max(0, upper - 1 - chance.choice([0, 5, 100, 1_000]))
            found = plan(files, target)
            if found is None:
                continue
            merges += 1
            rewritten += sum(file.size for file in found.files)
            files = [file for file in files if file not in found.files]
            files.append(File(f"m{number}", int(found.base_bytes + found.new_bytes), target, target))
            if found.kept_bytes:
                end = max(file.max_time or 0 for file in found.straddling)
                files.append(File(f"k{number}", int(found.kept_bytes), target + 1, end))
    assert merges > 10
    assert rewritten <= 5 * appended

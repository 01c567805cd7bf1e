"""When a merge is worth it, and what it reads.

**To which time.** A file is merged as a whole, or not yet: to write again those of its rows that come after the target
would cost as often as the target falls into it. So history is merged to the last time, at or before the target, that no
file lies across. The files of different appends do not overlap: it is one append that has to wait.

**How often.** A merge rewrites everything at or before that time, so it must be rare enough. The *base* is what earlier
merges have made: the files that hold one single time, and that the least in the table. (It follows from the files, so a
crash can leave no mark that is wrong.) All others are *new*. It is merged when `new >= 0.25 * base`; then it rewrites
`base + new <= 5 * new` bytes. A byte is new only once: afterwards it is in the base, or gone. So these merges rewrite
at most **five bytes for each that was appended**, however long the shard lives, however large it is, and whatever times
its rows have.

**Small files.** A large base waits long, and many small appends would leave as many files. When there are too many of
about one size, they are merged among themselves, if what earlier such merges have left among them is at most half of
it. So this rewrites at most two bytes, for each that is new among the files of one size; and there are two sizes. (What
is left of a merge may count once more among the smaller ones: not more than a hundredth of it.) So it is **at most four
more**, and mostly one. What this makes has a later time than the base, and counts as new beside it.

A file without statistics may have any times. It is read, and the rows that come later are kept in files of their own,
which have statistics: so such a byte may be new twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from app.core.frontier import EMPTY

FRACTION: Final = 0.25
MOST_SMALL: Final = 500
"""So many files of about one size need not be merged for their number alone."""
SMALL_BYTES: Final = (512 * 1024, 32 * 1024 * 1024)
"""Below the first: what a small append writes. Below the second: some hundreds of these, summed."""


@dataclass(frozen=True, slots=True)
class File:
    """A data file and the times in it; None where Delta has no statistics."""

    path: str
    size: int
    min_time: int | None
    max_time: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Which files a merge reads and replaces, and the time that their rows get. Only `unknown` may have later ones."""

    to: int
    files: tuple[File, ...]
    unknown: tuple[File, ...]

    @property
    def bytes(self) -> int:
        return _bytes(self.files)


@dataclass(frozen=True, slots=True)
class _Known:
    """A file with statistics."""

    file: File
    first: int
    last: int


def plan(files: Iterable[File], target: int, *, fraction: float = FRACTION) -> Plan | None:
    """What to merge now, given that all times up to the target may be; None if nothing is worth it yet."""
    known, unknown = _sorted_out(files)
    to = _last_time_across_which_no_file_lies(known, target)
    least = min((each.first for each in known), default=to)
    if to < least:
        return None
    below = [each for each in known if each.last <= to]
    base, new = _split(below, least)
    if _is_worth_it(base, [*new, *unknown], fraction):
        return Plan(to, (*base, *new, *unknown), unknown)
    small = _too_many_small(new)
    return Plan(to, small, ()) if small else None


def _sorted_out(files: Iterable[File]) -> tuple[list[_Known], tuple[File, ...]]:
    known, unknown = [], []
    for file in files:
        if file.min_time is None or file.max_time is None:
            unknown.append(file)
        else:
            known.append(_Known(file, file.min_time, file.max_time))
    return known, tuple(unknown)


def _last_time_across_which_no_file_lies(known: Iterable[_Known], target: int) -> int:
    """At or before the target. Those that begin last come first: what one of them changes counts for the others."""
    for each in sorted(known, key=lambda each: each.first, reverse=True):
        if each.first <= target < each.last:
            target = each.first - 1
    return target


def _split(known: Iterable[_Known], least: int) -> tuple[list[File], list[File]]:
    """Those that hold one single time, and that the least; and the others."""
    merged: list[File] = []
    new: list[File] = []
    for each in known:
        (merged if each.first == each.last == least else new).append(each.file)
    return merged, new


def _is_worth_it(merged: Sequence[File], new: Sequence[File], fraction: float) -> bool:
    return bool(new) and _bytes(new) >= fraction * _bytes(merged)


def _too_many_small(new: Sequence[File]) -> tuple[File, ...]:
    above = 0
    for limit in SMALL_BYTES:
        small, _ = _sorted_out(file for file in new if above <= file.size < limit)
        if len(small) > MOST_SMALL and _is_worth_it(*_split(small, min(each.first for each in small)), fraction=1):
            return tuple(each.file for each in small)
        above = limit
    return ()


def _bytes(files: Iterable[File]) -> int:
    return sum(file.size for file in files)


def merge_target(since: int, upper: int) -> int | None:
    """What may be merged away: before the since, and nothing that a writer may still add to. None: nothing."""
    target = int(min(since, upper - 1))  # a plain number: py4j cannot take a Frontier
    return target if 0 < target < EMPTY - 1 else None

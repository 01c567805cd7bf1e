"""When a merge is worth it, and what it reads.

A merge rewrites everything at or before its target, so it must be rare enough. The *base* is what
earlier merges have made: the files that hold one single time, and that the least in the table. (It follows from the
files, so a crash can leave no mark that is wrong.) *New* is what comes under the target for the first time; *kept* are
the rows after the target that have to be rewritten because they share a file with rows before it. It is merged when
`new >= 0.25 * (base + kept)`. Then a merge writes at most `base + kept + new <= 5 * new` bytes. A row is new only once:
afterwards it is in the base, or gone. So all merges together write at most five bytes for each that was appended,
however long the shard lives and however large it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from app.core.frontier import EMPTY

FRACTION: Final = 0.25


@dataclass(frozen=True, slots=True)
class File:
    """A data file and the times in it; None where Delta has no statistics."""

    path: str
    size: int
    min_time: int | None
    max_time: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Which files a merge reads and replaces. Bytes are estimates: times are taken to be spread evenly in a file."""

    target: int
    files: tuple[File, ...]
    straddling: tuple[File, ...]
    base_bytes: float
    new_bytes: float
    kept_bytes: float


def plan(files: Iterable[File], target: int, *, fraction: float = FRACTION) -> Plan | None:
    """What to merge so that the table has nothing before the target; None if that is not worth it yet."""
    known = list(files)
    least = min((file.min_time for file in known if file.min_time is not None), default=None)
    touched = [file for file in known if file.min_time is None or file.min_time <= target]
    base = [file for file in touched if file.min_time is not None and file.min_time == file.max_time == least]
    others = [file for file in touched if not (file.min_time is not None and file.min_time == file.max_time == least)]
    if not others:
        return None
    base_bytes = float(sum(file.size for file in base))
    new_bytes = sum(_share(file, target) for file in others)
    kept_bytes = sum(file.size for file in others) - new_bytes
    if new_bytes < fraction * (base_bytes + kept_bytes):
        return None
    straddling = tuple(file for file in others if file.max_time is None or file.max_time > target)
    return Plan(target, tuple(touched), straddling, base_bytes, new_bytes, kept_bytes)


def _share(file: File, target: int) -> float:
    """How much of a file is at or before the target. Without statistics: all of it, so that it gets some."""
    if file.min_time is None or file.max_time is None or file.max_time <= target:
        return float(file.size)
    return file.size * (target - file.min_time + 1) / (file.max_time - file.min_time + 1)


def merge_target(since: int, upper: int) -> int | None:
    """What may be merged away: before the since, and nothing that a writer may still add to. None: nothing."""
    target = int(min(since, upper - 1))  # a plain number: py4j cannot take a Frontier
    return target if 0 < target < EMPTY - 1 else None

"""Where a shard's frontiers are, and between which an append lies."""

from __future__ import annotations

from dataclasses import dataclass

from app.core.frontier import EMPTY, MAX_TIME_GIVEN, Frontier
from app.shards.errors import InvalidBounds
from app.shards.notes import Note


@dataclass(frozen=True, slots=True)
class Frontiers:
    """What the newest version of a shard's log says."""

    version: int
    upper: Frontier
    since: Frontier
    epoch: int


@dataclass(frozen=True, slots=True)
class Appended:
    """What is durable: the version that has it, and the upper from then on."""

    version: int
    upper: Frontier


@dataclass(frozen=True, slots=True)
class Bounds:
    """An append is for times from the expected upper up to, not including, the new one."""

    expected: Frontier
    upper: Frontier

    @staticmethod
    def of(expected: int, upper: int) -> Bounds:
        if not 0 <= expected < upper <= EMPTY:
            raise InvalidBounds(
                f"The expected upper {Frontier(expected)} must not be negative, and the new one {Frontier(upper)} must "
                "be above it."
            )
        # Nobody could give a later time to read it at.
        if MAX_TIME_GIVEN + 1 < upper < EMPTY:
            raise InvalidBounds(
                f"The new upper {Frontier(upper)} is after the year 9999: the last one is [{MAX_TIME_GIVEN + 1}]; and "
                f"`[]`, which closes the shard, is {int(EMPTY)}."
            )
        return Bounds(Frontier(expected), Frontier(upper))

    def note(self, token: str) -> Note:
        return Note(token, "append", expected=int(self.expected), upper=int(self.upper))

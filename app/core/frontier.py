"""Times and frontiers.

A frontier is one time `[t]` or empty `[]`, and `[]` is the greatest. It is an integer whose greatest 63-bit value
stands for `[]`, so that the order of frontiers is the order of integers and costs what comparing integers costs.
Outside of this process (messages, journal, tables) `[]` is null.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

MAX_TIME_GIVEN: Final = 253_402_300_799_999
"""The last millisecond of the year 9999: the greatest time that is accepted from outside."""


Time = Annotated[int, msgspec.Meta(ge=0, le=MAX_TIME_GIVEN)]
"""A time that comes from outside."""


class Frontier(int):
    """`[t]` or `[]`. Totally ordered; `join` is the greater, `meet` the lesser."""

    __slots__ = ()

    def join(self, other: Frontier) -> Frontier:
        return self if self >= other else other

    def meet(self, other: Frontier) -> Frontier:
        return self if self <= other else other

    def __repr__(self) -> str:
        return "[]" if self == EMPTY else f"[{int(self)}]"

    __str__ = __repr__


EMPTY: Final = Frontier(2**63 - 1)
ZERO: Final = Frontier(0)


def frontier_of(value: int | None) -> Frontier:
    """The frontier that a message or a table means: a number, or null for `[]`."""
    return EMPTY if value is None else Frontier(value)


def value_of(frontier: Frontier) -> int | None:
    """The inverse of `frontier_of`."""
    return None if frontier == EMPTY else int(frontier)

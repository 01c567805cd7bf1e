"""What all random lines are made of: few ids, biased choices, and command ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any, TypeVar

from tests.property.oracle import Oracle
from tests.property.oracle_state import UNDROP_PREFIX, Row

T = TypeVar("T")

IDS = ["a", "b", "c", "d", "e", "f.1", "g"]
SPARE_IDS = ["h", "i"]
"""Only for the new ids of alters, which would find nearly all others used."""
PLENTY_OF_HOLDS = 14


def encode(line: Row) -> bytes:
    """The bytes of a line. `{"raw": text}` stands for a line that is not one JSON object."""
    if line.keys() == {"raw"}:
        return str(line["raw"]).encode(errors="surrogateescape")
    return json.dumps(line, separators=(",", ":")).encode()


def chance(rng: Random, percent: int) -> bool:
    return rng.randrange(100) < percent


def one(rng: Random, good: Sequence[T], others: Sequence[T], percent: int = 93) -> T:
    """Mostly one of the good ones, if there are any."""
    return rng.choice(good if good and chance(rng, percent) else others)


def several(rng: Random, good: Sequence[T], others: Sequence[T]) -> list[T]:
    """One to three, now and then none, now and then one of them twice."""
    count = rng.choice([0] + [1] * 16 + [2] * 6 + [3] * 4)
    return [one(rng, good, others) for _ in range(count)]


def live_ids(oracle: Oracle) -> list[str]:
    return [name for name in oracle.collections if oracle.live(name)]


def free_ids(oracle: Oracle) -> list[str]:
    return [name for name in IDS if name not in oracle.collections and name not in oracle.tombstones]


def absent_holds(oracle: Oracle) -> list[str]:
    """Ids that no client command can use: of holds that are gone, of the controller's own, of nobody's."""
    windows = [hold for hold in oracle.holds if hold.startswith(UNDROP_PREFIX)]
    return [*list(oracle.departed)[-4:], *windows, "nobody/a"]


def command(rng: Random, oracle: Oracle, kind: str, **body: Any) -> Row:
    """A command under a new id; rarely a long one, or one that is forgotten by now; rarely it comes late."""
    number = f"c{len(oracle.recorded) + 1}"
    forgotten = [name for name in oracle.recorded if not oracle.duplicate(name)] if chance(rng, 4) else []
    if forgotten:
        number = rng.choice(forgotten)
    elif chance(rng, 4):
        number = number.rjust(128, rng.choice("L\u00e9"))
    line = {"type": kind, "id": number} | body
    if chance(rng, 15):
        oldest = oracle.oldest()
        fresh = [oracle.now, oracle.now, oracle.now + 500, oldest]
        line["issued_at"] = one(rng, fresh, [oldest - 1], 85) if oldest > 0 else oracle.now
    return line

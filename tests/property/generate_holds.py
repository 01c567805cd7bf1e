"""Random hold commands: acquire, downgrade, release, clone, merge, renew."""

from __future__ import annotations

from collections import Counter
from random import Random

from tests.property.generate_common import (
    IDS,
    PLENTY_OF_HOLDS,
    absent_holds,
    chance,
    command,
    live_ids,
    one,
    several,
)
from tests.property.oracle import Oracle
from tests.property.oracle_shape import GREATEST_TIME
from tests.property.oracle_state import Row

LEASES: list[int | str] = [1, 1_000, "5s", 10_000, "10s", "20s", "1m", "2h"]


def acquire(rng: Random, oracle: Oracle) -> Row:
    if len(oracle.holds) >= PLENTY_OF_HOLDS:
        return release(rng, oracle)
    names = several(rng, live_ids(oracle), IDS)
    line = command(rng, oracle, "acquire_read_holds", collections=names, holder=rng.choice(["h1", "h2"]))
    if chance(rng, 3):
        _aim_at_a_used_id(rng, oracle, line)
    if chance(rng, 45):
        possible = max((oracle.since.get(name, 0) for name in names), default=0)
        line["at"] = max(0, possible + rng.choice([-1, 0, 0, 1, 2, 4, 9])) if chance(rng, 98) else GREATEST_TIME
    if chance(rng, 55):
        line["lease"] = rng.choice(LEASES) if chance(rng, 95) else rng.choice([0, "0m", "2d", "400d"])
    if chance(rng, 60 if "lease" in line else 2):
        line["pin_files"] = True
    pinned = [row["collection"] for row in oracle.holds.values() if row["pin_files"]]
    if pinned and chance(rng, 20):
        # One more on the same collection, perhaps at a later version, for a merge to choose from.
        line |= {"collections": [rng.choice(pinned)], "lease": "2h", "pin_files": True}
    if chance(rng, 20):
        line["purpose"] = rng.choice(["report", None])
    if chance(rng, 1):
        line |= rng.choice([{"holder": ""}, {"holder": "x" * 129}, {"purpose": "x" * 1_025}, {"holder": None}])
    return line


def _aim_at_a_used_id(rng: Random, oracle: Oracle, line: Row) -> None:
    """Make a command want the id of a hold that is there: possible once the command that made it is forgotten."""
    rows = [oracle.holds[hold] for hold in oracle.client_holds() if hold.count("/") == 1]
    old = [row for row in rows if not oracle.duplicate(row["hold"].split("/")[0])]
    if old:
        row = rng.choice(old)
        line["id"] = row["hold"].split("/")[0]
        line["collections"] = [row["collection"]]


def downgrade(rng: Random, oracle: Oracle) -> Row:
    holds = several(rng, oracle.client_holds(), absent_holds(oracle))
    holds = list(dict.fromkeys(holds)) if chance(rng, 80) else holds
    steps = []
    for hold in holds:
        since = oracle.holds[hold]["since"] if hold in oracle.holds else 3
        ahead = [since + n for n in (0, 1, 2, 3, 5, 8, 13)]
        steps.append({"hold": hold, "to": rng.choice([None, max(since - 1, 0), *ahead])})
    return command(rng, oracle, "downgrade_read_holds", holds=steps)


def release(rng: Random, oracle: Oracle) -> Row:
    holds = several(rng, oracle.client_holds(), absent_holds(oracle))
    if len(oracle.holds) >= PLENTY_OF_HOLDS:
        holds = oracle.client_holds()[::2]
    return command(rng, oracle, "release_read_holds", holds=holds)


def clone(rng: Random, oracle: Oracle) -> Row:
    """Under a long command id the longest hold is cloned, so that hold ids reach their limit."""
    if len(oracle.holds) >= PLENTY_OF_HOLDS:
        return release(rng, oracle)
    line = command(rng, oracle, "clone_read_holds", holds=several(rng, oracle.client_holds(), absent_holds(oracle)))
    longest = max(oracle.client_holds(), key=len, default="")
    if longest and chance(rng, 60 if len(longest) > 128 else 10):
        line["id"] = f"c{len(oracle.recorded) + 1}".rjust(128, "L")
        line["holds"] = [longest]
    return line


def merge(rng: Random, oracle: Oracle) -> Row:
    pinned = [hold for hold in oracle.client_holds() if oracle.holds[hold]["pin_files"]]
    versions = {(oracle.holds[hold]["collection"], oracle.holds[hold]["pinned_version"]) for hold in pinned}
    several_versions = Counter(collection for collection, _ in versions)
    telling = [hold for hold in pinned if several_versions[oracle.holds[hold]["collection"]] > 1]
    first = one(rng, telling if telling and chance(rng, 70) else oracle.client_holds(), absent_holds(oracle))
    others = several(rng, oracle.client_holds(), absent_holds(oracle))
    if first in oracle.client_holds() and chance(rng, 85):
        same = oracle.holds[first]["collection"]
        others = [hold for hold in oracle.client_holds() if oracle.holds[hold]["collection"] == same]
        rng.shuffle(others)
        others = [*others[:3], *(hold for hold in pinned if hold in others[3:])]
    if set(pinned) & {first, *others} and chance(rng, 85):  # what pins files is not merged with what has no lease
        others = [hold for hold in others if hold not in oracle.holds or oracle.holds[hold]["lease_ms"] is not None]
        first = first if first in pinned or not others else others[0]
    return command(rng, oracle, "merge_read_holds", holds=[first, *others] if chance(rng, 97) else [])


def renew(rng: Random, oracle: Oracle) -> Row:
    leased = [hold for hold in oracle.client_holds() if oracle.holds[hold]["lease_ms"] is not None]
    given = chance(rng, 40)
    good = oracle.client_holds() if given else leased
    line = command(rng, oracle, "renew_read_holds", holds=several(rng, good, [*absent_holds(oracle), *good]))
    if given:
        line["lease"] = rng.choice(LEASES)
    elif line["holds"] and chance(rng, 5):
        line["lease"] = 0
    return line

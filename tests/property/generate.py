"""Random input lines over few ids and small times, so that everything meets everything.

The choices look at the oracle's state, so that most lines succeed and the rest fail for every reason there is. All
randomness comes from the `Random` that is passed in: a seeded one, or one that hypothesis controls.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from tests.property.generate_collections import alter, create, drop, reconcile, set_policies, undrop
from tests.property.generate_common import IDS, chance, command, free_ids, live_ids, one
from tests.property.generate_holds import acquire, clone, downgrade, merge, release, renew
from tests.property.oracle import Oracle
from tests.property.oracle_shape import DAY, GREATEST_TIME, SECOND, is_command_id
from tests.property.oracle_state import Row

NOT_ONE_OBJECT = [
    "",
    "  ",
    "[1]",
    "nonsense",
    '"text"',
    "null",
    "7",
    "{} {}",
    '{"type":"restart"} x',
    '{"type":"reconcile"',
    '{"id":"x","type":NaN}',
    "\udcff",
    '{"id":"\udcff","type":"reconcile","collections":[]}',
    "[" * 5_000,
]

Generator = Callable[[Random, Oracle], Row]


def parameters(rng: Random, oracle: Oracle) -> Row:
    changes: list[Row] = [
        {"finalize_shards": rng.choice([True, True, False])},
        {"since_downgrade_interval": rng.choice([0, "5s", 30_000, "1m"])},
        {"undrop_window": rng.choice([0, "5s", 20_000])},
        {"undrop_window": rng.choice([0, "5s", 20_000])},
        {"hold_max_lease": rng.choice([None, None, "10s", 60_000])},
        {"max_command_age": "5s", "tombstone_retention": 5_001},
        {"max_command_age": 10_000, "tombstone_retention": "20s"},
        {"max_command_age": "1m", "tombstone_retention": "2m"},
        {"max_command_age": "1h", "tombstone_retention": "7d", "command_retention": "7d"},
        {"vacuum_grace": rng.choice([0, "2h"]), "orphan_grace": "1d", "journal_retention": "1h"},
        {"finalization_concurrency": rng.choice([1, 1_000])},
        {},
    ]
    wrong: list[Row] = [
        {"max_command_age": "8d"},
        {"tombstone_retention": oracle.parameters["max_command_age"]},
        {"command_retention": oracle.parameters["max_command_age"] - 1},
        {"finalization_concurrency": rng.choice([0, 1_001, True, "1s"])},
        {"undrop_window": rng.choice(["366d", None, -1, True, 1.5])},
        {"since_downgrade_interval": DAY + 1},
        {"max_command_age": 999},
        {"hold_max_lease": 0},
        {"orphan_grace": "23h"},
        {"journal_retention": "59m"},
        {"finalize_shards": rng.choice([1, None, "true"])},
        {"undrop_window": 0, "colour": "red"},
    ]
    return command(rng, oracle, "update_parameters", parameters=one(rng, changes, wrong, 90))


def upper(rng: Random, oracle: Oracle) -> Row:
    pinned = [row["collection"] for row in oracle.holds.values() if row["pin_files"]]
    name = rng.choice(pinned) if pinned and chance(rng, 30) else one(rng, list(oracle.collections), IDS, 97)
    row = oracle.collections.get(name)
    seen = oracle.shards[row["shard"]]["upper"] if row else 0
    ahead = max(0, (20 if seen is None else seen) + rng.choice([-3, 0, 1, 1, 2, 3, 5, 8]))
    if chance(rng, 7):
        return {"type": "upper", "collection": name, "upper": rng.choice([None] * 7 + [GREATEST_TIME])}
    return {"type": "upper", "collection": name, "upper": ahead}


def clock(rng: Random, oracle: Oracle) -> Row:
    """Mostly to the very moment at which something passes, or one millisecond before it."""
    known = oracle.parameters
    moments = [row["lease_expires_at"] for row in oracle.holds.values() if row["lease_expires_at"] is not None]
    moments += oracle.retry_at.values()
    moments += [last + known["since_downgrade_interval"] for last in oracle.last_downgrade.values()]
    ends = [oracle.shards[shard]["finalized_at"] for shard in oracle.tombstones.values()]
    purges = [end + known["tombstone_retention"] for end in ends if end is not None]
    if purges and len(free_ids(oracle)) < 2 and chance(rng, 50):
        return {"type": "clock", "now": max(purges)}
    moments += purges
    ahead = sorted(moment for moment in moments if moment > oracle.now)[:6]
    if ahead and chance(rng, 60):
        return {"type": "clock", "now": rng.choice(ahead) - chance(rng, 25)}
    if chance(rng, 3):
        return {"type": "clock", "now": max(0, oracle.now - SECOND)}
    steps = [0, 1, 500, SECOND, 3 * SECOND, 5 * SECOND, 10 * SECOND, 30 * SECOND, known["max_command_age"] + 1]
    return {"type": "clock", "now": oracle.now + rng.choice(steps)}


def restart(_rng: Random, _oracle: Oracle) -> Row:
    return {"type": "restart"}


def downgrades(_rng: Random, _oracle: Oracle) -> Row:
    return {"type": "downgrades"}


def finalize(rng: Random, oracle: Oracle) -> Row:
    if chance(rng, 55):
        return {"type": "finalize", "fail": []}
    failing = [name for name, shard in oracle.tombstones.items() if oracle.shards[shard]["state"] == "finalizing"]
    pool = failing or list(oracle.tombstones) or IDS
    also = [rng.choice([*IDS, "zz"])] if chance(rng, 30) else []
    return {"type": "finalize", "fail": [rng.choice(pool), *also]}


def duplicate(rng: Random, oracle: Oracle) -> Row:
    """An earlier command again, with the same bytes or with others that mean the same."""
    known = [name for name in oracle.recorded if oracle.duplicate(name) and is_command_id(name)]
    if not known:
        return reconcile(rng, oracle)
    line: Row = json.loads(oracle.recorded[rng.choice(known)]["raw"])
    return line if chance(rng, 65) else dict(reversed(line.items()))


def broken(rng: Random, oracle: Oracle) -> Row:
    """A line that is wrong in its form."""
    if chance(rng, 20):
        return {"raw": rng.choice(NOT_ONE_OBJECT)}
    if chance(rng, 20):
        return rng.choice(
            [
                {"type": "clock", "now": rng.choice([-1, "1s", None, 1.5, True, GREATEST_TIME + 1])},
                {"type": "upper", "collection": "a", "upper": rng.choice([-1, "1", 1.5, False, GREATEST_TIME + 1])},
                {"type": "finalize", "fail": 7},
                {"type": "restart", "extra": 1},
            ]
        )
    if chance(rng, 1):
        many = command(rng, oracle, "reconcile", collections=["a"] * 10_001)
        return rng.choice([many, many | {"collections": [], "padding": "x" * (1 << 20)}])
    line = rng.choice(COMMAND_GENERATORS)(rng, oracle)
    return _broken_envelope(rng, oracle, line) if chance(rng, 40) else _broken_body(rng, line)


def _broken_envelope(rng: Random, oracle: Oracle, line: Row) -> Row:
    number = str(len(oracle.recorded))
    return rng.choice(
        [
            line | {"type": "compact_everything"},
            line | {"type": 7},
            line | {"id": f"not/allowed{number}"},
            line | {"id": number.rjust(129, "x")},
            line | {"id": 7},
            line | {"extra": None},
            {name: value for name, value in line.items() if name != "id"},
            {name: value for name, value in line.items() if name != "type"},
        ]
    )


def _broken_body(rng: Random, line: Row) -> Row:
    optional = {"at", "lease", "purpose", "pin_files", "register_ts", "issued_at"}
    name = rng.choice(sorted(line.keys() - {"type", "id"} - optional))
    if line["type"] == "create_collections" and line["collections"] and chance(rng, 60):
        wrong: list[Row] = [
            {"id": "no spaces"},
            {"id": ""},
            {"since": -1},
            {"data_source": {"kind": "nothing"}},
            {"colour": 1},
        ]
        rng.choice(line["collections"]).update(rng.choice(wrong))
        return line
    if chance(rng, 50):
        return {key: value for key, value in line.items() if key != name}
    return line | {name: rng.choice([7.5, {"a": []}, False])}


COMMAND_WEIGHTS: dict[Generator, int] = {
    create: 14,
    alter: 4,
    set_policies: 8,
    acquire: 12,
    downgrade: 6,
    release: 4,
    clone: 3,
    merge: 3,
    renew: 4,
    drop: 4,
    undrop: 3,
    reconcile: 1,
    parameters: 4,
}
COMMAND_GENERATORS = list(COMMAND_WEIGHTS)

WEIGHTS: dict[Generator, int] = COMMAND_WEIGHTS | {
    upper: 12,
    clock: 8,
    restart: 2,
    downgrades: 7,
    finalize: 6,
    duplicate: 3,
    broken: 3,
}
ON_HOLDS = (downgrade, release, clone, merge, renew)
ON_LIVE = (acquire, set_policies, alter, drop, upper)
_GENERATORS, _SHARES = list(WEIGHTS), list(WEIGHTS.values())


def random_line(rng: Random, oracle: Oracle) -> Row:
    """The next line of a random run. When most ids are used up, mostly one that helps to get them back."""
    if oracle.now == 0 and chance(rng, 10):
        return parameters(rng, oracle)
    if len(free_ids(oracle)) < 2 and len(live_ids(oracle)) < 3 and chance(rng, 60):
        return rng.choice([clock, clock, downgrades, finalize, release])(rng, oracle)
    generator = rng.choices(_GENERATORS, _SHARES)[0]
    if generator is create and len(free_ids(oracle)) < 3 and chance(rng, 60):
        generator = rng.choice([alter, upper, set_policies])
    if generator in ON_HOLDS and not oracle.client_holds() and chance(rng, 80):
        generator = acquire
    if generator in ON_HOLDS and chance(rng, 40) and any(len(hold) > 128 for hold in oracle.client_holds()):
        generator = clone
    if generator in ON_LIVE and not live_ids(oracle) and chance(rng, 80):
        generator = create
    return generator(rng, oracle)

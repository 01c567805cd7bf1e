"""The oracle's memory: plain dicts of rows, and the definitions from which all else is recomputed after every line.

A frontier is an int, or None for the empty frontier `[]`, which is the greatest of all. No sum, count or increment is
kept: `settle` works out every upper, implied capability and since anew from the definitions of the rule book.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from tests.property.oracle_shape import DAY, GREATEST_TIME, HOUR, SECOND, milliseconds

Frontier = int | None
Row = dict[str, Any]

EMPTY = 1 << 63
UNDROP_PREFIX = "/undrop/"

FIRST_PARAMETERS: Row = {
    "finalize_shards": True,
    "finalization_concurrency": 10,
    "since_downgrade_interval": 30 * SECOND,
    "undrop_window": 0,
    "tombstone_retention": 7 * DAY,
    "max_command_age": HOUR,
    "command_retention": 7 * DAY,
    "hold_max_lease": None,
    "vacuum_grace": HOUR,
    "orphan_grace": 7 * DAY,
    "journal_retention": DAY,
}


class Refused(Exception):
    """The line gets an error reply and changes nothing.

    Where two faults stand side by side in one command and the rule book does not say which is told, `codes` has both.
    `facts` are the fields of the error beside its code, each with the values that would be right.
    """

    def __init__(self, *codes: str, **facts: list[Any]) -> None:
        super().__init__(codes)
        self.codes = frozenset(codes)
        self.facts = facts


def order(frontier: Frontier) -> int:
    """The place of a frontier in the total order."""
    return EMPTY if frontier is None else frontier


def least(frontiers: Iterable[Frontier]) -> Frontier:
    return min(frontiers, key=order, default=None)


def greatest(*frontiers: Frontier) -> Frontier:
    return max(frontiers, key=order)


def policy_frontier(policy: Row, upper: Frontier) -> int:
    """The since that a policy wants at an upper (section 3)."""
    match policy["kind"]:
        case "no_policy":
            return int(policy["initial_since"])
        case "valid_from":
            return int(policy["frontier"])
        case "multiple":
            return min(policy_frontier(part, upper) for part in policy["policies"])
    if upper is None:
        return 0
    if policy["kind"] == "step_back":
        return max(upper - 1, 0)
    lag, granularity = policy["lag"], policy["granularity"]
    if lag == 0:
        return upper
    wanted = max(upper - lag, 0)
    return int(wanted - wanted % min(lag, granularity))


def plain_policy(policy: Row) -> Row:
    """A policy as told, with its durations in milliseconds and its defaults filled in."""
    if policy["kind"] == "lag_writes_by":
        granularity = policy.get("granularity")
        return policy | {
            "lag": milliseconds(policy["lag"]),
            "granularity": 1 if granularity is None else milliseconds(granularity),
        }
    if policy["kind"] == "multiple":
        return policy | {"policies": [plain_policy(part) for part in policy["policies"]]}
    return policy


def plain_description(given: Row) -> Row:
    """A description without what is null, and with its defaults: what two descriptions are compared by."""
    description = {name: value for name, value in given.items() if value is not None}
    source = {name: value for name, value in description["data_source"].items() if value is not None}
    if source["kind"] == "other":
        source.setdefault("inputs", [])
    description["data_source"] = source
    description.setdefault("timeline", "epoch_ms")
    if "shard" in description:
        shard = description["shard"]
        description["shard"] = {"location": shard["location"], "format": shard.get("format") or "updates"}
    return description


class State:
    """All rows, and what is remembered beside them."""

    def __init__(self) -> None:
        self.now = 0
        self.epoch = 1
        self.parameters = dict(FIRST_PARAMETERS)
        self.collections: dict[str, Row] = {}
        self.holds: dict[str, Row] = {}
        self.shards: dict[str, Row] = {}
        self.tombstones: dict[str, str] = {}
        """Collections that are gone, each with the shard it was stored on."""
        self.departed: dict[str, Row] = {}
        """Holds that are gone, each with the reason and the time."""
        self.once_oldest = 0
        """The greatest time, at any moment so far, before which commands were stale and results forgotten."""
        self.last_downgrade: dict[str, int] = {}
        self.retry_at: dict[str, int] = {}
        self.since: dict[str, int] = {}
        """The read frontier of every collection that has a row."""
        self.events: Counter[str] = Counter()
        """Rare things that happened, so that a run can show that it met them."""
        self.purged: set[str] = set()
        self.numbers_may_skip = False
        """Whether a given location may be one that a new shard wants, so that numbers in shard ids may be left out."""

    def oldest(self) -> int:
        """Older commands are stale, older results forgotten; raising the greatest age brings nothing back."""
        return max(self.now - self.parameters["max_command_age"], self.once_oldest)

    def expiry(self, lease: int | None) -> int | None:
        """When a lease that begins now ends: with the year 9999 at the latest."""
        return None if lease is None else min(self.now + lease, GREATEST_TIME)

    def live(self, collection: str) -> bool:
        return collection in self.collections and not self.collections[collection]["dropped"]

    def holds_on(self, collection: str) -> list[str]:
        return [hold for hold, row in self.holds.items() if row["collection"] == collection]

    def client_holds(self) -> list[str]:
        """The holds that client commands can see."""
        return [hold for hold in self.holds if not hold.startswith(UNDROP_PREFIX)]

    def stored_on(self, shard: str) -> list[Row]:
        return [row for row in self.collections.values() if row["shard"] == shard]

    def upper_of(self, collection: str) -> Frontier:
        """The upper of the shard; of a table with `txns`, the greater of that and the log's (section 9)."""
        row = self.collections[collection]
        own: Frontier = self.shards[row["shard"]]["upper"]
        log = row["source"].get("txns")
        return own if log is None else greatest(own, self.upper_of(log))

    def settle(self) -> None:
        """Recompute every upper, implied capability and since; remove what nobody can read any more."""
        for name, row in self.collections.items():
            upper = self.upper_of(name)
            if upper != row["write_frontier"] and row["source"].get("txns") and upper != self._own_upper(row):
                self.events["member moved by its log"] += 1
            row["write_frontier"] = upper
            if not row["dropped"]:
                wanted = policy_frontier(row["read_policy"], upper)
                row["implied_capability"] = max(row["implied_capability"], wanted)
        sinces = self._sinces()
        gone = [name for name, since in sinces.items() if since is None]
        self._note_diamonds(set(gone))
        for name in gone:
            self.tombstones[name] = self.collections.pop(name)["shard"]
        self.since = {name: since for name, since in sinces.items() if since is not None}

    def _own_upper(self, row: Row) -> Frontier:
        upper: Frontier = self.shards[row["shard"]]["upper"]
        return upper

    def _sinces(self) -> dict[str, Frontier]:
        """The least of the implied capability, the holds, and the since of each dependent (section 4)."""
        parts: dict[str, list[Frontier]] = {name: [] for name in self.collections}
        dependents: dict[str, list[str]] = {name: [] for name in self.collections}
        for name, row in self.collections.items():
            if not row["dropped"]:
                parts[name].append(row["implied_capability"])
            for dependency in row["dependencies"]:
                dependents[dependency].append(name)
        for hold in self.holds.values():
            parts[hold["collection"]].append(hold["since"])
        found: dict[str, Frontier] = {}

        def since(name: str) -> Frontier:
            if name not in found:
                found[name] = least([*parts[name], *map(since, dependents[name])])
            return found[name]

        return {name: since(name) for name in self.collections}

    def _note_diamonds(self, gone: set[str]) -> None:
        for bottom in gone:
            middles = gone & self.collections[bottom]["dependencies"]
            tops = Counter(top for middle in middles for top in gone & self.collections[middle]["dependencies"])
            if any(paths > 1 for paths in tops.values()):
                self.events["a diamond went to []"] += 1

    def depart(self, hold: str, reason: str) -> None:
        """Take a hold away; what became of it is remembered, but not of the controller's own."""
        del self.holds[hold]
        if not hold.startswith(UNDROP_PREFIX):
            self.departed[hold] = {"reason": reason, "at": self.now}

    def dump(self) -> dict[str, dict[str, Row]]:
        """The rows of the three tables, by key, without what the oracle does not predict (sequence numbers and texts).

        Rows of holds and shards are the oracle's own, not copies: to be compared at once, not kept.
        """
        hidden = {"source", "altered"}
        collections = {
            name: {key: value for key, value in row.items() if key not in hidden}
            | {"dependencies": sorted(row["dependencies"]), "read_frontier": self.since[name]}
            for name, row in self.collections.items()
        }
        return {"collections": collections, "holds": self.holds, "shards": self.shards}

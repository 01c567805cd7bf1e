"""An independent model of the rule book, as far as `holdfast simulate` shows it: a line in, the reply and the rows out.

It shares no code with the program and is written to be obviously right rather than fast: plain dicts, and every since
recomputed from its definition after every line (`oracle_state.State.settle`). What it does not predict: texts of
messages, and sequence numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.property.oracle_commands import COMMANDS
from tests.property.oracle_create import WAREHOUSE
from tests.property.oracle_shape import COMMAND_SHAPES, CONTROL_SHAPES, is_int
from tests.property.oracle_state import UNDROP_PREFIX, Frontier, Refused, Row, State, order

GREATEST_LINE = 1 << 20
GREATEST_LIST = 10_000
FIRST_BACKOFF_MS = 5_000
GREATEST_BACKOFF_MS = 600_000


@dataclass(frozen=True)
class Expected:
    """What the reply to one line must say."""

    type: str | None
    id: str | None
    status: str
    body: Row = field(default_factory=dict)
    """The fields of an ok reply beside type, id, seq and epoch."""
    codes: frozenset[str] = frozenset()
    facts: dict[str, list[Any]] = field(default_factory=dict)
    duplicate: bool = False
    """The reply is, byte for byte, the one that was given to this id before."""
    command: bool = True
    """A Kafka command, not a control line."""


def lists_in(line: Row) -> list[list[Any]]:
    return [value for value in line.values() if isinstance(value, list)]


class Oracle(State):
    """Feed it every line; `dump()` then gives the rows as they must be."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: dict[str, Row] = {}
        """Command ids with the bytes they came with, and when; an entry is replaced only once it is forgotten."""

    def step(self, line: Row | None, raw: bytes) -> Expected:
        """Apply one line: the decoded object (None if the bytes are not one JSON object) and its bytes."""
        control = line is not None and isinstance(line.get("type"), str) and line["type"] in CONTROL_SHAPES
        expected = self._control(line) if line is not None and control else self._record(line, raw)
        self.settle()
        self._grow_old()
        return expected

    # ---- commands

    def duplicate(self, command: str) -> bool:
        """Whether this id would be a duplicate now. A repetition does not prolong the memory of the first."""
        memory = self.recorded.get(command)
        return memory is not None and memory["at"] >= self.oldest()

    def _record(self, line: Row | None, raw: bytes) -> Expected:
        """The checks of a record, in order: malformed, duplicate; then, in `_command`, all others."""
        if line is None:
            return Expected(type=None, id=None, status="error", codes=frozenset({"MALFORMED"}))
        command, kind = line.get("id"), line.get("type")
        told_id = command if isinstance(command, str) else None
        told_type = kind if isinstance(kind, str) else None
        if told_id is not None:
            if self.duplicate(told_id):
                return self._repeat(told_id, told_type, raw)
            if told_id in self.recorded:
                self.events["a forgotten command id was used again"] += 1
            self.recorded[told_id] = {"raw": raw, "at": self.now}
        try:
            body = {"result": self._command(line, raw)}
        except Refused as refused:
            return Expected(told_type, told_id, "error", codes=refused.codes, facts=refused.facts)
        return Expected(told_type, told_id, "ok", body=body)

    def _repeat(self, command: str, kind: str | None, raw: bytes) -> Expected:
        memory = self.recorded[command]
        if memory["raw"] == raw:
            self.events["a duplicate"] += 1
            return Expected(kind, command, "ok", duplicate=True)
        self.events["a command id with other bytes"] += 1
        return Expected(kind, command, "error", codes=frozenset({"INVALID_ARGUMENT"}))

    def _command(self, line: Row, raw: bytes) -> Row:
        if len(raw) > GREATEST_LINE:
            raise Refused("TOO_LARGE")
        issued_at = line.get("issued_at")
        if isinstance(issued_at, int) and is_int(issued_at) and issued_at < self.oldest():
            raise Refused("STALE_COMMAND")
        kind = line.get("type")
        if not isinstance(kind, str):
            raise Refused("UNKNOWN_COMMAND", "INVALID_ARGUMENT")
        if kind not in COMMANDS:
            raise Refused("UNKNOWN_COMMAND")
        if not COMMAND_SHAPES[kind](line):
            raise Refused("INVALID_ARGUMENT")
        if any(len(items) > GREATEST_LIST for items in lists_in(line)):
            raise Refused("TOO_LARGE")
        return COMMANDS[kind](self, line)

    # ---- control lines

    def _control(self, line: Row) -> Expected:
        kind = line["type"]
        try:
            body = self._apply_control(kind, line)
        except Refused as refused:
            return Expected(kind, None, "error", codes=refused.codes, facts=refused.facts, command=False)
        return Expected(kind, None, "ok", body=body, command=False)

    def _apply_control(self, kind: str, line: Row) -> Row:
        if not CONTROL_SHAPES[kind](line):
            raise Refused("INVALID_ARGUMENT")
        apply: dict[str, Callable[[Row], Row]] = {
            "upper": self._upper,
            "clock": self._clock,
            "restart": self._restart,
            "downgrades": self._downgrades,
            "finalize": self._finalize,
        }
        return apply[kind](line)

    def _upper(self, line: Row) -> Row:
        row = self.collections.get(line["collection"])
        if row is None:
            raise Refused("COLLECTION_MISSING")
        shard = self.shards[row["shard"]]
        if order(line["upper"]) > order(shard["upper"]):
            seen = shard["log_version"]
            shard.update(upper=line["upper"], log_version=0 if seen is None else seen + 1)
            if line["upper"] is None:
                self.events["an upper was closed"] += 1
        return {}

    def _clock(self, line: Row) -> Row:
        """First what has passed expires, then tombstones are purged."""
        self.now = max(self.now, line["now"])
        for hold, row in list(self.holds.items()):
            if row["lease_expires_at"] is not None and row["lease_expires_at"] <= self.now:
                undrop = hold.startswith(UNDROP_PREFIX)
                self.events["an undrop window passed" if undrop else "a lease expired"] += 1
                self.depart(hold, "lease expired")
        self.settle()
        for name, shard in list(self.tombstones.items()):
            finalized_at = self.shards[shard]["finalized_at"]
            if finalized_at is not None and finalized_at + self.parameters["tombstone_retention"] <= self.now:
                del self.tombstones[name]
                self.purged.add(name)
                self.events["a tombstone was purged"] += 1
        return {}

    def _restart(self, _line: Row) -> Row:
        self.epoch += 1
        for row in self.holds.values():
            if row["lease_ms"] is not None:
                row["lease_expires_at"] = self.expiry(row["lease_ms"])
                self.events["a restart renewed a lease"] += 1
        self.last_downgrade.clear()
        self.retry_at.clear()
        return {}

    def _downgrades(self, _line: Row) -> Row:
        done = []
        for name, shard in sorted(self.shards.items()):
            row = self.collections.get(shard["owner"])
            stored = row is not None and row["shard"] == name
            wanted: Frontier = self.since[shard["owner"]] if stored else None
            if order(wanted) <= order(shard["since"]):
                continue
            last = self.last_downgrade.get(name)
            waits = last is not None and last + self.parameters["since_downgrade_interval"] > self.now
            if waits and wanted is not None:
                self.events["a downgrade waited for its interval"] += 1
                continue
            if waits:
                self.events["a downgrade to [] did not wait"] += 1
            shard.update(since=wanted, epoch=self.epoch)
            self.last_downgrade[name] = self.now
            done.append({"shard": name, "since": wanted})
        return {"downgrades": done}

    def _finalize(self, line: Row) -> Row:
        fail = {self._shard_of(name) for name in line.get("fail") or []}
        finalized, failed = [], []
        for name, shard in sorted(self.shards.items()):
            if not self._may_finalize(name, shard):
                continue
            if name in fail:
                shard.update(state="finalizing", attempts=shard["attempts"] + 1)
                backoff = min(FIRST_BACKOFF_MS << (shard["attempts"] - 1), GREATEST_BACKOFF_MS)
                self.retry_at[name] = self.now + backoff
                failed.append(name)
                continue
            if shard["attempts"]:
                self.events["a finalization failed, then succeeded"] += 1
            shard.update(state="finalized", finalized_at=self.now, since=None, upper=None)
            finalized.append(name)
        return {"finalized": finalized, "failed": failed}

    def _shard_of(self, collection: str) -> str | None:
        row = self.collections.get(collection)
        return self.tombstones.get(collection) if row is None else row["shard"]

    def _may_finalize(self, name: str, shard: Row) -> bool:
        unreferenced = shard["state"] == "dropped" and shard["since"] is None and not self.stored_on(name)
        if not self.parameters["finalize_shards"] or not (unreferenced or shard["state"] == "finalizing"):
            return False
        if self.retry_at.get(name, 0) > self.now:
            self.events["a failed finalization waited"] += 1
            return False
        return True

    def adopt_shards(self, names: dict[str, str]) -> None:
        """Take over the program's names of the shards of new collections, where the rule book leaves them open."""
        taken = {name: self.shards.pop(self.collections[name]["shard"]) for name in names}
        moved = {}
        for name, shard in taken.items():
            moved[shard["shard"]] = names[name]
            if shard["location"] == f"{WAREHOUSE}/{shard['shard']}":
                shard["location"] = f"{WAREHOUSE}/{names[name]}"
            self.shards[names[name]] = shard | {"shard": names[name]}
        for row in self.collections.values():
            row["shard"] = moved.get(row["shard"], row["shard"])

    def _grow_old(self) -> None:
        """What is too old now stays too old, also when the greatest age is raised."""
        self.once_oldest = self.oldest()

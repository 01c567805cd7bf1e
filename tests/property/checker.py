"""Feeds each line to the program and to the oracle, and compares every reply and, after every line, all rows."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any, NoReturn, Protocol

from tests.property.generate_common import encode
from tests.property.invariants import Dump, History, check_invariants
from tests.property.oracle import Expected, Oracle
from tests.property.oracle_state import Row, plain_description, plain_policy

DUMP = b'{"type":"dump"}'
KEYS = {"collections": "id", "holds": "hold", "shards": "shard"}
UNPREDICTED = ("created_seq", "updated_seq", "last_error", "table_id", "purged_at", "merged_at", "merged_to")
UNPREDICTED += ("merged_bytes_before", "merged_bytes_after")
FACTS = ("earliest", "actual", "reason")


class SimulatorLike(Protocol):
    """What is tested: one input line in, one reply line out."""

    def line(self, raw: bytes) -> bytes: ...


class Disagreement(AssertionError):
    """Program and oracle differ, or an invariant is broken, at the last of these lines."""

    def __init__(self, message: str, *, problem: str, lines: list[Row]) -> None:
        super().__init__(message)
        self.problem = problem
        self.lines = lines


class Checker:
    """One run: the program, the oracle beside it, and the script of all lines so far.

    Without a program it only runs the oracle, to look at what the random lines are like.
    """

    def __init__(self, simulator: SimulatorLike | None, *, name: str = "") -> None:
        self.oracle = Oracle()
        self.outcomes: Counter[tuple[str, str]] = Counter()
        """How many lines of each type got which status or error code."""
        self._simulator = simulator
        self._name = name
        self._lines: list[Row] = []
        self._script: list[bytes] = []
        self._replies: dict[str, bytes] = {}
        self._last_seq = 0
        self._exact_seq = True
        self._dump: Dump = {table: {} for table in KEYS}
        self._plain: Dump = {table: {} for table in KEYS}
        self._dump_bytes = b""
        self._history = History()

    def step(self, line: Row) -> None:
        """One line through both; `Disagreement`, with the whole script, where they differ."""
        raw = encode(line)
        self._lines.append(line)
        self._script.append(raw)
        expected = self.oracle.step(None if line.keys() == {"raw"} else line, raw)
        status = "duplicate" if expected.duplicate else "ok" if expected.status == "ok" else min(expected.codes)
        self.outcomes[str(line.get("type", "malformed")), status] += 1
        if self._simulator is not None:
            self._check_reply(expected, self._ask(raw))
            self._check_rows(expected)

    def _ask(self, raw: bytes) -> bytes:
        assert self._simulator is not None
        try:
            return self._simulator.line(raw)
        except Exception as crash:  # noqa: BLE001 - whatever it raises, the script that led there must be shown
            self._fail("the program crashed", expected="a reply", got=repr(crash), cause=crash)

    def _fail(self, problem: str, *, expected: Any, got: Any, cause: BaseException | None = None) -> NoReturn:
        script = "\n".join(line.decode(errors="backslashreplace") for line in self._script)
        raise Disagreement(
            f"{self._name} line {len(self._script)}: {problem}\n"
            f"expected: {expected}\ngot:      {got}\nscript:\n{script}",
            problem=problem,
            lines=self._lines,
        ) from cause

    # ---- replies

    def _check_reply(self, expected: Expected, raw: bytes) -> None:
        if expected.duplicate:
            self._last_seq += 1
            if raw != self._replies[expected.id or ""]:
                self._fail("a duplicate gets the recorded reply", expected=self._replies[expected.id or ""], got=raw)
            return
        reply: Row = json.loads(raw)
        problem = self._reply_problem(expected, dict(reply))
        if problem is not None:
            self._fail(problem, expected=expected, got=raw)
        if expected.command:
            self._check_sequence(expected, reply)
            if expected.id is not None and self.oracle.recorded[expected.id]["raw"] == self._script[-1]:
                self._replies[expected.id] = raw
        else:
            self._exact_seq = False
            self._last_seq += expected.type == "restart" and expected.status == "ok"

    def _reply_problem(self, expected: Expected, reply: Row) -> str | None:
        """What is wrong with a reply, if anything. It is taken apart; what is left at the end should not be there."""
        for name, value in (("type", expected.type), ("id", expected.id)):
            if reply.pop(name, value) != value:
                return f"the reply has another {name}"
        if reply.pop("status") != expected.status:
            return "another status"
        if expected.command:
            reply.pop("seq")
            if reply.pop("epoch") != self.oracle.epoch:
                return "another epoch"
        if expected.status == "error":
            error = reply.pop("error")
            if error["code"] not in expected.codes or not error["message"]:
                return "another error code, or no message"
            if error["code"] == min(expected.codes) and expected.facts.keys() != error.keys() & set(FACTS):
                return "other facts in the error"
            if any(error[name] not in values for name, values in expected.facts.items() if name in error):
                return "another fact in the error"
        for name, value in expected.body.items():
            if reply.pop(name, None) != value:
                return f"another {name}"
        return f"fields that should not be there: {sorted(reply)}" if reply else None

    def _check_sequence(self, expected: Expected, reply: Row) -> None:
        """Each command takes one number, and between two commands only control lines take some."""
        next_seq = self._last_seq + 1
        right = reply["seq"] == next_seq if self._exact_seq else reply["seq"] >= next_seq
        if not right:
            self._fail("seq", expected=next_seq, got=reply["seq"])
        self._last_seq, self._exact_seq = reply["seq"], True
        if "id" not in reply and expected.id is not None and expected.status == "ok":
            self._fail("an ok reply has its id", expected=expected, got=reply)

    # ---- rows

    def _check_rows(self, expected: Expected) -> None:
        raw = self._ask(DUMP)
        before = self._dump
        if raw != self._dump_bytes:
            self._read_dump(raw)
        if expected.type == "create_collections" and expected.status == "ok" and not expected.duplicate:
            self._adopt_new_shards(before)
        wanted = self.oracle.dump()
        if self._plain != wanted:
            self._fail("other rows", expected=_without(wanted, self._plain), got=_without(self._plain, wanted))
        if self._dump is before:
            return
        if expected.command and not expected.duplicate:
            self._check_updated(before)
        may_change = expected.status == "ok" and not expected.duplicate and expected.type != "reconcile"
        try:
            check_invariants(before, self._dump, line_type=expected.type, may_change=may_change, history=self._history)
        except AssertionError as broken:
            self._fail("a broken invariant", expected="the invariants", got=broken)

    def _check_updated(self, before: Dump) -> None:
        """What a command changed, it changed in the entry that its reply names."""
        for table, rows in self._dump.items():
            for name, row in rows.items():
                if before[table].get(name) is not row and row["updated_seq"] != self._last_seq:
                    self._fail("updated_seq is the reply's seq", expected=self._last_seq, got=row)

    def _read_dump(self, raw: bytes) -> None:
        """Keep a dump, as it is and as the oracle would write it. An unchanged row stays the same object."""
        answer = json.loads(raw)
        dump: Dump = {}
        plain: Dump = {}
        for table, key in KEYS.items():
            names = [row[key] for row in answer[table]]
            if names != sorted(set(names)):
                self._fail(f"the rows of {table} are sorted", expected=sorted(set(names)), got=names)
            dump[table], plain[table] = {}, {}
            for name, row in zip(names, answer[table], strict=True):
                same = self._dump[table].get(name) == row
                dump[table][name] = self._dump[table][name] if same else row
                plain[table][name] = self._plain[table][name] if same else _plain_row(row)
        self._dump, self._plain, self._dump_bytes = dump, plain, raw

    def _adopt_new_shards(self, before: Dump) -> None:
        """Shard ids are numbered in the order of registration; where that is left open, take the program's."""
        rows = self._plain["collections"]
        new = [name for name in self.oracle.collections if name not in before["collections"] and name in rows]
        owners = [name for name in new if self.oracle.collections[name]["primary"] is None]
        names = {name: str(rows[name]["shard"]) for name in owners}
        if any(self.oracle.collections[name]["shard"] != shard for name, shard in names.items()):
            numbers = {name: self._number(name, shard, before) for name, shard in names.items()}
            for name in owners:
                earlier = self.oracle.collections[name]["dependencies"] & set(owners)
                if any(numbers[dependency] > numbers[name] for dependency in earlier):
                    self._fail("registration is topological", expected=earlier, got=names)
            self.oracle.adopt_shards(names)

    def _number(self, collection: str, shard: str, before: Dump) -> int:
        stem = re.sub(r"[^A-Za-z0-9_-]", "_", collection)
        match = re.fullmatch(re.escape(stem) + "-([0-9]+)", shard)
        least = len(before["shards"]) + 1
        most = len(self.oracle.shards) if not self.oracle.numbers_may_skip else 10**9
        if match is None or shard in before["shards"] or not least <= int(match[1]) <= most:
            self._fail("the id of a new shard", expected=f"{stem}-{least}..{most}", got=shard)
        return int(match[1])


def _plain_row(row: Row) -> Row:
    plain = {name: value for name, value in row.items() if name not in UNPREDICTED}
    if "description" in plain:
        plain["description"] = plain_description(plain["description"])
        plain["read_policy"] = plain_policy(plain["read_policy"])
    return plain


def _without(dump: Dump, other: Dump) -> Dump:
    """The rows of one dump that the other does not have like that."""
    return {
        table: {name: row for name, row in rows.items() if other[table].get(name) != row}
        for table, rows in dump.items()
    }

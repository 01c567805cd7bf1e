"""The story of the demo: each step is told in a sentence, done, and shown as a table of the frontiers."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any, Final, TypeVar

from app.client import Holdfast
from app.client_errors import CollectionMissing, HoldMissing, SinceViolation
from app.client_holds import ReadHold
from app.commandline.explain import explain, short
from app.commandline.output import print_table
from app.controller import Controller
from app.core.advancing import Observation
from app.core.frontier import frontier_of
from app.status import State, read_state
from app.why import Graph

DAY: Final = datetime(2026, 1, 1, tzinfo=timezone.utc)
LEASE_S: Final = 2
LEASE_LIMIT_S: Final = 30.0
_T = TypeVar("_T")


class Unexpected(Exception):
    """A step did not do what the story says that it does."""


def at(clock: str) -> int:
    """A time of the story's day, such as 12:30, in milliseconds."""
    hours, minutes = clock.split(":")
    return int(DAY.timestamp() * 1000) + (int(hours) * 60 + int(minutes)) * 60_000


def clock(value: int | None) -> str:
    """The same the other way round; a frontier may also be `[]`, and 0 if nothing was written yet."""
    if value is None:
        return "[]"
    return "-" if value == 0 else datetime.fromtimestamp(value / 1000, timezone.utc).strftime("%H:%M")


class Story:
    """Told to a running controller, over Kafka."""

    def __init__(self, client: Holdfast, controller: Controller) -> None:
        self._client = client
        self._controller = controller
        self._log_version = 0
        self._step = 0
        self._took_s: list[float] = []

    def tell(self) -> None:
        self._introduce()
        self._create()
        self._set_policies()
        report = self._hold()
        self._refuse_a_late_reader()
        self._move_on(report)
        self._let_a_lease_pass()
        self._drop(report)
        self._end()

    # The steps.

    def _introduce(self) -> None:
        _say(
            "",
            "Holdfast decides what of a Delta lake may be forgotten. Two times matter for each collection:",
            "  upper   every update before it is written and final",
            "  since   reads at or after it are exact; what is before it may be merged away or deleted",
            "Commands go over Kafka, and the tables below are read from Delta. The uppers are moved by hand",
            "here; the next version reads them from the data.",
        )

    def _create(self) -> None:
        self._title("Three collections: a table, a view on it, and an export of the view")
        self._ask(
            self._client.create_collections,
            [
                {"id": "orders", "data_source": {"kind": "table"}, "schema": "k STRING, v BIGINT"},
                {"id": "totals", "data_source": {"kind": "other", "inputs": ["orders"]}},
                {"id": "export", "data_source": {"kind": "sink", "from": "totals"}},
            ],
            register_ts=at("12:00"),
        )
        self._write({"orders": "12:30", "totals": "12:30", "export": "12:30"})
        _say("Nobody has said how much history is wanted, so nothing is given up.")
        self._show()

    def _set_policies(self) -> None:
        self._title("A policy says how far the since may follow the upper")
        self._ask(
            self._client.set_read_policies,
            {"orders": _lag("10m"), "totals": _lag("10m"), "export": _lag("1m")},
        )
        self._write({"orders": "12:45", "totals": "12:45"})
        _say(
            "Orders and totals keep ten minutes, the export one. But it stands still at 12:30 and will need",
            "12:29 of totals when it goes on, and so of orders: a slow reader is not overrun.",
        )
        self._show()
        self._write({"export": "12:45"})
        _say("When the export has caught up, ten minutes are ten minutes.")
        self._show()

    def _hold(self) -> ReadHold:
        self._title("A read hold keeps history for as long as someone reads it")
        (hold,) = self._ask(
            self._client.acquire_read_holds, ["totals"], holder="report", purpose="month end", id="report-1"
        )
        self._write({"orders": "13:30", "totals": "13:30", "export": "13:30"})
        _say(
            "A report holds totals where it can be read now. 45 minutes later it still can, and orders",
            "stays with it, because totals is computed from it. The export is free to move.",
        )
        self._show()
        _say("", "  $ holdfast why orders")
        state = dataclasses.replace(self._state(), shards={})  # nothing was written, so there is nothing on disk
        _say(*(f"  {line}".rstrip() for line in explain("orders", state).splitlines()))
        return hold

    def _refuse_a_late_reader(self) -> None:
        self._title("Who comes too late is told so, instead of reading something wrong")
        try:
            self._ask(self._client.acquire_read_holds, ["orders"], holder="late", at=at("12:10"))
        except SinceViolation as refusal:
            earliest = (refusal.earliest or {}).get("orders")
            _say(f"A hold on orders at 12:10: refused, {refusal.code}. The earliest time left is {clock(earliest)}.")
        else:
            raise Unexpected("A hold before the since was granted.")

    def _move_on(self, report: ReadHold) -> None:
        self._title("A hold moves forward with its reader, and history behind it goes")
        self._ask(self._client.downgrade_read_holds, {report.id: at("13:00")})
        _say("The report has read everything before 13:00 and says so.")
        self._show()

    def _let_a_lease_pass(self) -> None:
        self._title("A lease ends by itself: a reader that died holds nothing back for ever")
        (hold,) = self._ask(self._client.acquire_read_holds, ["export"], holder="notebook", lease=f"{LEASE_S}s")
        self._write({"export": "14:00"})
        _say(f"A notebook holds the export with a lease of {LEASE_S} seconds, renews it never, and is gone.")
        self._show("export")
        deadline = time.monotonic() + LEASE_LIMIT_S
        while hold.id in (state := self._state()).holds:
            if time.monotonic() > deadline:
                raise Unexpected(f"The lease of {LEASE_S} s had not passed after {LEASE_LIMIT_S:.0f} s.")
            time.sleep(0.1)
        _say("After the lease:")
        self._show("export", state=state)
        try:
            self._ask(self._client.renew_read_holds, [hold.id])
        except HoldMissing as refusal:
            _say(f"Should it wake and renew: refused, {refusal.code}, {refusal.reason}. So it must begin anew.")
        else:
            raise Unexpected("A hold was renewed after its lease had passed.")

    def _drop(self, report: ReadHold) -> None:
        self._title("A drop destroys nothing that someone still reads")
        shard = self._state().collections["totals"]["shard"]
        self._ask(self._client.drop_collections, ["export", "totals"])
        _say("The export goes at once. Totals is dropped too, but the report can still read it, and so orders stays.")
        self._show()
        try:
            self._ask(self._client.acquire_read_holds, ["totals"], holder="newcomer")
        except CollectionMissing as refusal:
            _say(f"A newcomer cannot hold it any more: refused, {refusal.code}.")
        else:
            raise Unexpected("A dropped collection could be held.")
        self._ask(self._client.release_read_holds, [report.id])
        _say("The report lets go. Totals is gone, and orders keeps the ten minutes of its own policy.")
        self._show()
        state = self._state().shards[shard]["state"]
        _say(
            f"The shard of totals is now {state!r}: nobody may need its files, and the journal says so. The next",
            "version, which works on real data, deletes them only then.",
        )

    def _end(self) -> None:
        count, seq, median_ms = len(self._took_s), self._controller.seq, statistics.median(self._took_s) * 1000
        _say(
            "",
            f"That was all: {count} commands, {seq} entries in the journal. A command took {median_ms:.0f} ms (median)",
            "from sending to its reply, which comes when it is durable. Now for real: ./spark-submit.sh, then",
            "in another terminal .venv/bin/holdfast --help; README.md has a tour.",
        )

    # How they are done and shown.

    def _ask(self, command: Callable[..., _T], *arguments: Any, **named: Any) -> _T:
        began = time.monotonic()
        try:
            return command(*arguments, **named)
        finally:
            self._took_s.append(time.monotonic() - began)

    def _write(self, uppers: Mapping[str, str]) -> None:
        """As if the collections had been written up to these times."""
        collections = self._state().collections
        self._log_version += 1
        self._controller.observe(
            Observation(collections[id]["shard"], frontier_of(at(upper)), self._log_version)
            for id, upper in uppers.items()
        )

    def _state(self) -> State:
        """The tables, with everything that was done so far in them."""
        root = self._client.root or ""
        return read_state(root, {}, at_least=self._controller.seq, timeout_s=30.0)

    def _show(self, *ids: str, state: State | None = None) -> None:
        state = self._state() if state is None else state
        graph = Graph(state)
        rows = []
        for id in ids or [id for id in ("orders", "totals", "export") if id in state.collections]:
            row, reason = state.collections[id], graph.first_reason(id)
            why = "-" if reason is None else short(reason, state.collections[reason.collection], id)
            name = f"{id} (dropped)" if row["dropped"] else id
            rows.append((f"  {name:<16}", clock(row["read_frontier"]), clock(row["write_frontier"]), why))
        print_table(("  COLLECTION", "SINCE", "UPPER", "SINCE IS KEPT BY"), rows)

    def _title(self, text: str) -> None:
        self._step += 1
        _say("", f"{self._step}. {text}")


def _lag(lag: str) -> dict[str, Any]:
    return {"kind": "lag_writes_by", "lag": lag, "granularity": "1m"}


def _say(*lines: str) -> None:
    print("\n".join(lines), flush=True)

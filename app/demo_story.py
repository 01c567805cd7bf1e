"""The story of the demo: each step is told in a sentence, done, and shown as a table of frontiers and files."""

from __future__ import annotations

import time
from typing import Any, Final

from app.client import Holdfast
from app.client_errors import CollectionMissing, HoldMissing, ReadBeforeSince
from app.client_holds import ReadHold
from app.commandline.explain import explain, short
from app.commandline.output import print_table
from app.demo_lake import LIMIT_S, ORDERS, Lake, Report, Unexpected, at, clock
from app.status import State
from app.why import Graph

LEASE_S: Final = 2
SCHEMAS: Final = {"orders": "k STRING, v BIGINT", "totals": "total BIGINT"}


class Story:
    """Told to a running controller, over Kafka, with data in Delta tables."""

    def __init__(self, client: Holdfast, lake: Lake) -> None:
        self._client = client
        self._lake = lake
        self._step = 0

    def tell(self) -> None:
        self._introduce()
        self._create()
        self._set_policies()
        report = self._hold()
        self._merge_under(report)
        self._refuse_a_late_reader()
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
            "Commands go over Kafka, data is written and read with Spark, and all below is read from Delta.",
        )

    def _create(self) -> None:
        self._title("A table with a stream of updates, and a view on it")
        self._client.create_collections(
            [
                {"id": "orders", "data_source": {"kind": "table"}, "schema": SCHEMAS["orders"]},
                {
                    "id": "totals",
                    "data_source": {"kind": "other", "inputs": ["orders"]},
                    "schema": SCHEMAS["totals"],
                },
            ],
            register_ts=at("12:00"),
        )
        self._lake.write_orders("12:00", "12:10", "12:20", "12:30")
        self._lake.write_totals("12:30")
        self._wait_for_uppers(orders="12:30", totals="12:30")
        _say(
            f"{ORDERS:,} orders, whose prices change every ten minutes: {self._lake.updates:,} updates so far.",
            "Nobody has said how much history is wanted, so nothing is given up.",
        )
        self._show()

    def _set_policies(self) -> None:
        self._title("A policy says how far the since may follow the upper")
        self._client.set_read_policies({"orders": _lag("10m"), "totals": _lag("1m")})
        self._lake.write_orders("12:30", "12:40", "12:50")
        self._wait_for_uppers(orders="12:50")
        _say(
            "Orders keep ten minutes, totals one. But the view stands still at 12:30, and will need orders from",
            "12:29 on when it goes on: a slow reader is not overrun.",
        )
        self._show()
        self._lake.write_totals("12:50")
        self._wait_for_since("orders", "12:40")
        _say("It has caught up. Ten minutes are ten minutes, and older history may be merged away.")
        self._show()

    def _hold(self) -> ReadHold:
        self._title("A read hold keeps history for as long as someone reads it")
        (hold,) = self._client.acquire_read_holds(
            ["orders"], holder="report", purpose="month end", id="report-1", lease="10m"
        )
        self._lake.write_orders("12:50", "13:00", "13:10", "13:20", "13:30")
        self._lake.write_totals("13:30")
        self._wait_for_uppers(orders="13:30", totals="13:30")
        _say(f"A report holds orders at {clock(hold.since)}. 40 minutes later they are still there.")
        state = self._show()
        _say("", "  $ holdfast why orders")
        _say(*(f"  {line}".rstrip() for line in explain("orders", state).splitlines()))
        return hold

    def _merge_under(self, report: ReadHold) -> None:
        self._title("What a reader sees does not change, before, during and after merging")
        before = self._lake.report(at("13:10"), hold=report.id)
        state = self._lake.state()
        files = self._lake.on_disk(state, "orders")
        _say(f"The report sees {before.orders:,} orders at 13:10, for {before.total:,} in all, and goes on to there.")
        self._client.downgrade_read_holds({report.id: at("13:10")})
        reads, merged, deadline = 1, files, time.monotonic() + LIMIT_S
        while merged.bytes >= files.bytes:  # from now on it may be merged at any moment
            self._check_same(before, self._lake.report(at("13:10"), hold=report.id))
            reads += 1
            merged = self._lake.on_disk(state := self._lake.state(), "orders")
            if time.monotonic() > deadline:
                raise Unexpected(f"The history behind 13:10 was not merged within {LIMIT_S:.0f} s.")
        self._check_same(before, self._lake.report(at("13:10"), hold=report.id))
        _say(
            f"It reads them {reads + 1} times, before, while and after the history behind 13:10 is merged: the same "
            "rows",
            f"each time. {files.files} files with {files.bytes:,} bytes became {merged.files} with {merged.bytes:,}.",
        )
        self._show(state=state)

    def _refuse_a_late_reader(self) -> None:
        self._title("Who comes too late is told so, instead of reading something wrong")
        try:
            self._lake.sum_of_orders(at("12:10"))
        except ReadBeforeSince as refusal:
            _say(f"A read of orders at 12:10: refused, {refusal.code}.", f"  {refusal}")
        else:
            raise Unexpected("A time before the since could be read.")

    def _let_a_lease_pass(self) -> None:
        self._title("A lease ends by itself: a reader that died holds nothing back for ever")
        (hold,) = self._client.acquire_read_holds(["totals"], holder="notebook", lease=f"{LEASE_S}s")
        _say(f"A notebook holds totals with a lease of {LEASE_S} seconds, renews it never, and is gone.")
        self._lake.wait(lambda state: hold.id not in state.holds, "the lease has passed")
        try:
            self._client.renew_read_holds([hold.id])
        except HoldMissing as refusal:
            _say(f"Should it wake and renew: refused, {refusal.code}, {refusal.reason}. So it must begin anew.")
        else:
            raise Unexpected("A hold was renewed after its lease had passed.")

    def _drop(self, report: ReadHold) -> None:
        self._title("A drop destroys nothing that someone still reads")
        self._client.drop_collections(["orders", "totals"])
        state = self._lake.wait(lambda state: not self._files(state, "totals"), "the files of totals are deleted")
        _say("Both are dropped. Nobody reads totals: its files are gone. The report still reads orders:")
        self._show(state=state)
        total = self._lake.sum_of_orders(at("13:10"), hold=report.id)
        try:
            self._client.acquire_read_holds(["orders"], holder="newcomer")
        except CollectionMissing as refusal:
            _say(f"Its sum at 13:10 is {total:,}, as before. A newcomer cannot hold it any more: {refusal.code}.")
        else:
            raise Unexpected("A dropped collection could be held.")
        files = self._lake.on_disk(self._lake.state(), "orders")
        self._client.release_read_holds([report.id])
        shard = self._lake.shard(self._lake.state(), "orders")
        state = self._lake.wait(lambda state: state.shards[shard]["state"] == "finalized", "orders is finalized")
        if self._files(state, "orders"):
            raise Unexpected("A finalized shard has data files.")
        _say(
            f"The report lets go, and {files.bytes:,} bytes of orders are deleted: no file is left, and its shard is",
            f"{state.shards[shard]['state']!r}. Its log stays, sealed, for a week: who writes late finds it closed.",
        )

    def _end(self) -> None:
        state = self._lake.state()
        _say(
            "",
            f"That was all: {self._lake.updates:,} updates, {state.seq} entries in the journal. Now for real:",
            "./spark-submit.sh, then in another terminal .venv/bin/holdfast --help; README.md has a tour.",
        )

    # How they are done and shown.

    def _check_same(self, expected: Report, actual: Report) -> None:
        if actual != expected:
            raise Unexpected(f"A reader under a hold saw {actual} instead of {expected}.")

    def _files(self, state: State, id: str) -> int:
        return self._lake.on_disk(state, id).files

    def _wait_for_uppers(self, **uppers: str) -> None:
        wanted = {id: at(upper) for id, upper in uppers.items()}
        self._lake.wait(
            lambda state: all(state.collections[id]["write_frontier"] == upper for id, upper in wanted.items()),
            f"the uppers are seen to be {uppers}",
        )

    def _wait_for_since(self, id: str, since: str) -> None:
        self._lake.wait(lambda state: state.collections[id]["read_frontier"] == at(since), f"since of {id} is {since}")

    def _show(self, *, state: State | None = None) -> State:
        state = self._lake.state() if state is None else state
        graph = Graph(state)
        rows = []
        for id in [id for id in ("orders", "totals") if id in state.collections]:
            row, reason = state.collections[id], graph.first_reason(id)
            why = "-" if reason is None else short(reason, state.collections[reason.collection], id)
            name = f"{id} (dropped)" if row["dropped"] else id
            files = self._lake.on_disk(state, id)
            frontiers = (clock(row["read_frontier"]), clock(row["write_frontier"]))
            rows.append((f"  {name:<16}", *frontiers, f"{files.files}", f"{files.bytes:,}", why))
        print_table(("  COLLECTION", "SINCE", "UPPER", "FILES", "BYTES", "SINCE IS KEPT BY"), rows)
        return state

    def _title(self, text: str) -> None:
        self._step += 1
        _say("", f"{self._step}. {text}")


def _lag(lag: str) -> dict[str, Any]:
    return {"kind": "lag_writes_by", "lag": lag, "granularity": "1m"}


def _say(*lines: str) -> None:
    print("\n".join(lines), flush=True)

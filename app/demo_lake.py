"""What the demo does with data: writes a stream of updates, maintains a view of it, reads, and weighs the files."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from app.client import Holdfast
from app.reader import Reader
from app.status import State, read_state
from app.writer import Writer

DAY: Final = datetime(2026, 1, 1, tzinfo=timezone.utc)
ORDERS: Final = 2_000
LIMIT_S: Final = 120.0
_LOOK_S: Final = 0.1


class Report(NamedTuple):
    """How many orders there are, what they cost, and a checksum of all of them."""

    orders: int
    total: int
    checksum: int


class Unexpected(Exception):
    """A step did not do what the story says that it does."""


class OnDisk(NamedTuple):
    files: int
    bytes: int


def at(clock: str) -> int:
    """A time of the story's day, such as 12:30, in milliseconds."""
    hours, minutes = clock.split(":")
    return int(DAY.timestamp() * 1000) + (int(hours) * 60 + int(minutes)) * 60_000


def clock(value: int | None) -> str:
    """The same the other way round; a frontier may also be `[]`, and 0 if nothing was written yet."""
    if value is None:
        return "[]"
    return "-" if value == 0 else datetime.fromtimestamp(value / 1000, timezone.utc).strftime("%H:%M")


class Lake:
    """The collections of the demo, `orders` and `totals`, as a job and a report see them."""

    def __init__(self, spark: SparkSession, client: Holdfast, root: str) -> None:
        self._spark = spark
        self._client = client
        self._root = root
        self._reader = Reader(spark, root=root, client=client, holder="demo", timeout=LIMIT_S)
        self._writers: dict[str, Writer] = {}
        self._prices = 0  # what every order costs now; 0 before the first is written
        self._total: int | None = None
        self.updates = 0

    def write_orders(self, start: str, *times: str) -> None:
        """Every order gets a new price at each of these times, in an append of its own."""
        before = start
        for upper in times:
            rows = self._priced(at(before), +1, self._prices + 1)
            if self._prices:
                rows = rows.unionByName(self._priced(at(before), -1, self._prices))
                self.updates += ORDERS
            self.updates += ORDERS
            self._append("orders", rows, at(upper))
            self._prices += 1
            before = upper

    def _priced(self, time: int, diff: int, price: int) -> DataFrame:
        orders = self._spark.range(ORDERS, numPartitions=1)
        return orders.select(
            sql.lit(time).alias("_time"),
            sql.lit(diff).cast("long").alias("_diff"),
            sql.concat(sql.lit("order-"), sql.col("id")).alias("k"),
            (sql.col("id") + sql.lit(price)).alias("v"),
        )

    def write_totals(self, upper: str) -> None:
        """The view: it reads orders at the last time before `upper`, and writes what has changed in its sum."""
        total = self.sum_of_orders(at(upper) - 1)
        own = self._writer("totals").upper
        rows = [(int(own) or at("12:00"), 1, total)]
        if self._total is not None:
            rows.append((rows[0][0], -1, self._total))
        self._append("totals", self._spark.createDataFrame(rows, "_time LONG, _diff LONG, total LONG"), at(upper))
        self._total = total

    def sum_of_orders(self, as_of: int, *, hold: str | None = None) -> int:
        """A report: what all orders cost at a time."""
        return self.report(as_of, hold=hold).total

    def report(self, as_of: int, *, hold: str | None = None) -> Report:
        """The same, with what tells whether two reads have seen the same rows."""
        each = (
            sql.col("_count"),
            sql.col("v") * sql.col("_count"),
            sql.xxhash64("k", "v", "_count").cast("decimal(38)"),
        )
        with self._reader.snapshot("orders", as_of, hold=hold) as orders:
            row = orders.agg(*map(sql.sum, each)).first()
        return Report(*(int(value or 0) for value in row or (0, 0, 0)))

    def _append(self, id: str, rows: DataFrame, upper: int) -> None:
        writer = self._writer(id)
        writer.compare_and_append(rows.coalesce(1), writer.upper, upper)

    def _writer(self, id: str) -> Writer:
        if id not in self._writers:
            # The reply that it was created comes before the tables say so.
            seq = self._client.seq
            self._writers[id] = Writer(self._spark, id, root=self._root, at_least=seq, timeout_s=LIMIT_S)
        return self._writers[id]

    def state(self) -> State:
        """The tables, with everything in them that was answered."""
        return read_state(self._root, {}, at_least=self._client.seq, timeout_s=LIMIT_S)

    def wait(self, condition: Callable[[State], bool], what: str) -> State:
        """The state as soon as it is so."""
        deadline = time.monotonic() + LIMIT_S
        while not condition(state := self.state()):
            if time.monotonic() > deadline:
                raise Unexpected(f"{what}: not after {LIMIT_S:.0f} s.")
            time.sleep(_LOOK_S)
        return state

    def on_disk(self, state: State, id: str) -> OnDisk:
        """The data files of a collection's shard, also those that wait for being deleted."""
        location = Path(state.shards[self.shard(state, id)]["location"])
        sizes = [file.stat().st_size for file in location.glob("*.parquet")] if location.is_dir() else []
        return OnDisk(len(sizes), sum(sizes))

    @staticmethod
    def shard(state: State, id: str) -> str:
        """Also of a collection that is gone: shards are never forgotten."""
        return next(shard for shard, row in state.shards.items() if row["owner"] == id)

"""What merging costs: bytes rewritten per byte written over a long run, and time against the size of the shard.

Run: .venv/bin/python -m bench.merge [--appends N] [--rows N]

The first part writes a changelog of inserts and deletes, each append over ten times, and moves the since behind it, so
that it mostly lies inside of an append. After each append it merges if that is worth it. Every byte that a merge writes
counts. This is done with rows that are spread evenly over the times of their append, and with almost all at the last of
them; then with appends that are a day long, while the since creeps through each of them. The ratio must stay below 5;
app/shards/merge_plan.py says why.

The second part adds many appends of a few rows to a large shard: they are merged among themselves, which may add 4 to
the ratio at most.

The third part adds changes of one size to shards of 1, 10 and 100 times that size until a merge is worth it. A merge
of a larger shard takes longer and comes less often: what counts is the cost per change, which must not grow with the
shard. Times are those of the JVM's processors, so that a shared machine disturbs them less.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import uuid
from pathlib import Path

from deltalake import DeltaTable
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

from app.shards.merge_plan import MOST_SMALL
from app.shards.merging import merge_if_worthwhile
from app.shards.updates import Updates, create
from app.spark import session
from app.state.store import open_store

DAY = 86_400_000


def inserted(spark: SparkSession, first: int, count: int, time: str) -> DataFrame:
    """Rows whose keys do not compress, as those of a hash do not."""
    return spark.range(first, first + count).selectExpr(f"{time} _time", "1L _diff", "sha1(string(id)) k", "id v")


def shard(spark: SparkSession, directory: str) -> Updates:
    return create(spark, str(Path(directory) / uuid.uuid4().hex), str(uuid.uuid4()), "k STRING, v BIGINT")


def append(at: Updates, rows: DataFrame, upper: int, new_upper: int) -> int:
    """How many bytes it has written."""
    appended = at.compare_and_append(rows.coalesce(1), upper, new_upper)
    commit = open_store(at.table.location, {}).read(f"_delta_log/{appended.version:020}.json") or b""
    return sum(line["add"]["size"] for line in map(json.loads, commit.splitlines()) if "add" in line)


def cpu_s() -> float:
    """Seconds of processor time that the JVM has used."""
    jvm = SparkContext._gateway.proc.pid
    used = Path(f"/proc/{jvm}/stat").read_text().rpartition(")")[2].split()
    return (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK")


class Merges:
    """Merges when it is worth it, and counts what that costs."""

    def __init__(self) -> None:
        self.written = self.rewritten = self.number = 0

    def merge(self, at: Updates, since: int) -> None:
        merged = merge_if_worthwhile(at, since, 1)
        if merged is not None:
            self.number, self.rewritten = self.number + 1, self.rewritten + merged.bytes_after

    def say(self, what: str) -> None:
        print(
            f"{what}: {self.written / 1e6:.1f} MB written; {self.number} merges, {self.rewritten / 1e6:.1f} MB "
            f"rewritten   rewritten/written: {self.rewritten / self.written:.2f}",
            flush=True,
        )


SPREADS = {"spread evenly": "id % 10", "almost all at the last time": "IF(id % 1000 = 0, 0, 9)"}


def long_run(spark: SparkSession, directory: str, appends: int, count: int, spread: str) -> None:
    at, merges = shard(spark, directory), Merges()
    for number in range(appends):
        upper = number * 10
        rows = inserted(spark, number * count, count, f"{upper} + {SPREADS[spread]}")
        if number % 3 == 2:  # half of what came two appends ago goes
            gone = inserted(spark, (number - 2) * count, count // 2, f"{upper + 9}L")
            rows = rows.unionByName(gone.selectExpr("_time", "-1L _diff", "k", "v"))
        merges.written += append(at, rows, upper, upper + 10)
        merges.merge(at, upper + 4)
    merges.say(f"{appends} appends, {spread}")


def through_days(spark: SparkSession, directory: str, days: int, count: int) -> None:
    """One append per day, in ms, almost all at its end. The since goes on by a fifth of what is left, each time."""
    at, merges = shard(spark, directory), Merges()
    for day in range(days):
        upper = day * DAY
        rows = inserted(spark, day * count, count, f"{upper} + IF(id % 1000 = 0, 0, {DAY - 1})")
        merges.written += append(at, rows, upper, upper + DAY)
        left = DAY
        while left > 1:
            left = left * 4 // 5
            merges.merge(at, upper + DAY - 1 - left)
    merges.say(f"{days} days, the since creeping through each")


def small_appends(spark: SparkSession, directory: str, appends: int, count: int) -> None:
    at, merges = shard(spark, directory), Merges()
    append(at, inserted(spark, 0, count, "0L"), 0, 1)
    most_files = 0
    for number in range(1, appends + 1):
        merges.written += append(at, inserted(spark, -number, 1, f"{number}L"), number, number + 1)
        merges.merge(at, number)
        most_files = max(most_files, len(DeltaTable(at.table.location).file_uris()))
    merges.say(f"{appends} appends of one row to a large shard, at most {most_files} files")


def against_size(spark: SparkSession, directory: str, count: int) -> None:
    first = 0.0
    for factor in (1, 10, 100):
        at = shard(spark, directory)
        base = append(at, inserted(spark, 0, count * factor, "0L"), 0, 1)
        changed, changes, merged = 0, 0, None
        while merged is None:
            changes += 1
            changed += append(at, inserted(spark, -changes * count, count, f"{changes}L"), changes, changes + 1)
            began_s = cpu_s()
            merged = merge_if_worthwhile(at, changes, 1)
        took_s = cpu_s() - began_s
        per_mb_s = took_s / changed * 1e6
        first = first or per_mb_s
        print(
            f"shard {factor:>3} x the change ({base / 1e6:5.1f} MB): merged after {changes:>2} changes "
            f"in {took_s:.1f} s   per MB of change: {per_mb_s:5.2f} s, {per_mb_s / first:4.2f} x the first   "
            f"rewritten/changed: {merged.bytes_after / changed:4.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--appends", type=int, default=60)
    parser.add_argument("--rows", type=int, default=20_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        spark = session("bench merge", master="local[2]", logs=Path(directory) / "logs")
        long_run(spark, directory, 6, 1_000, "spread evenly")  # so that the JVM has not just begun when times count
        for spread in SPREADS:
            long_run(spark, directory, arguments.appends, arguments.rows, spread)
        through_days(spark, directory, 4, arguments.rows)
        small_appends(spark, directory, MOST_SMALL + 100, 10 * arguments.rows)
        against_size(spark, directory, arguments.rows)
        spark.stop()


if __name__ == "__main__":
    main()

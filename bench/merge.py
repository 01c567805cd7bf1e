"""What merging costs: bytes rewritten per byte written over a long run, and time against the size of the shard.

Run: .venv/bin/python -m bench.merge [--appends N] [--rows N]

The first part writes a changelog of inserts and deletes, each append over ten times, and moves the since behind it, so
that it mostly lies inside of a file. After each append it merges if that is worth it. Every byte that a merge writes
counts. The ratio must stay below 5; app/shards/merge_plan.py says why.

The second part adds changes of one size to shards of 1, 10 and 100 times that size until a merge is worth it. A merge
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

from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

from app.shards.merging import merge_if_worthwhile
from app.shards.updates import Updates, create
from app.spark import session
from app.state.store import open_store


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


def long_run(spark: SparkSession, directory: str, appends: int, count: int) -> None:
    at = shard(spark, directory)
    written = rewritten = merges = 0
    for number in range(appends):
        upper = number * 10
        rows = inserted(spark, number * count, count, f"{upper} + id % 10")
        if number % 3 == 2:  # half of what came two appends ago goes
            gone = inserted(spark, (number - 2) * count, count // 2, f"{upper + 9}L")
            rows = rows.unionByName(gone.selectExpr("_time", "-1L _diff", "k", "v"))
        written += append(at, rows, upper, upper + 10)
        merged = merge_if_worthwhile(at, upper + 4, 1)
        if merged is not None:
            merges, rewritten = merges + 1, rewritten + merged.bytes_after
    print(
        f"{appends} appends, {written / 1e6:.1f} MB written; {merges} merges, {rewritten / 1e6:.1f} MB rewritten   "
        f"rewritten/written: {rewritten / written:.2f}",
        flush=True,
    )


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
        long_run(spark, directory, 6, 1_000)  # so that what follows is not the time of a JVM that has just begun
        long_run(spark, directory, arguments.appends, arguments.rows)
        against_size(spark, directory, arguments.rows)
        spark.stop()


if __name__ == "__main__":
    main()

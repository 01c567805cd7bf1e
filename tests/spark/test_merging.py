"""Merging: nothing that can be read changes, nobody who writes is disturbed, and it costs what the change costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

from app.core.frontier import EMPTY
from app.shards import merging
from app.shards.errors import Conflict, UpperMismatch
from app.shards.merging import merge_if_worthwhile
from app.shards.updates import Updates
from app.state.errors import Fenced
from tests.spark.helpers import content, new_shard, rows, summed


def files(shard: Updates) -> list[tuple[int | None, int | None]]:
    """The times in each file."""
    found = merging._files(shard, shard.table.begin().snapshot)
    return sorted((file.min_time, file.max_time) for file in found)


def test_history_before_the_since_becomes_one_time(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    shard.compare_and_append(rows(spark, (1, 1, "a", 1), (2, 1, "b", 2), (3, -1, "a", 1), (3, 1, None, None)), 0, 4)
    shard.compare_and_append(rows(spark, (4, 2, "b", 2), (5, 1, None, None), (9, 1, "late", 9)), 4, 10)
    assert merge_if_worthwhile(shard, 0, 1) is None
    merged = merge_if_worthwhile(shard, 5, 1)
    assert merged is not None
    assert (merged.target, merged.files_before, merged.files_after) == (5, 2, 2)
    assert merged.read_version == merged.version - 1
    assert merged.bytes_before > merged.bytes_after > 0
    assert (shard.upper, shard.frontiers().since) == (10, 5)
    assert files(shard) == [(5, 5), (9, 9)]
    assert content(spark, shard, as_of=5) == {("b", 2): 3, (None, None): 2}
    assert content(spark, shard) == {("b", 2): 3, (None, None): 2, ("late", 9): 1}
    assert merge_if_worthwhile(shard, 5, 1) is None
    # Never at or above the upper, however far the since is.
    merged = merge_if_worthwhile(shard, EMPTY, 1)
    assert merged is not None
    assert merged.target == 9
    assert files(shard) == [(9, 9)]
    shard.seal(1)
    assert merge_if_worthwhile(shard, EMPTY, 1) is None


def test_rows_that_cancel_leave_nothing(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    shard.compare_and_append(rows(spark, (1, 1, "a", 1), (2, -1, "a", 1)), 0, 4)
    merged = merge_if_worthwhile(shard, 3, 1)
    assert merged is not None
    assert merged.files_after == 0
    assert content(spark, shard) == {}


def test_every_type_is_summed_but_variants(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(
        spark,
        tmp_path,
        "`odd``.name` STRING, m MAP<STRING, INT>, s STRUCT<x: ARRAY<MAP<INT, INT>>, y: DOUBLE>, d DATE, "
        "b BINARY, n DECIMAL(38, 2), c CHAR(3)",
    )
    row = (
        "SELECT %d AS _time, %d AS _diff, 'x' AS `odd``.name`, %s AS m, named_struct('x', array(map(1, 2)), 'y', %s) "
        "AS s, DATE '2024-01-01' AS d, CAST('b' AS BINARY) AS b, CAST(1.5 AS DECIMAL(38, 2)) AS n, 'c' AS c"
    )
    nan = "double('NaN')"
    updates = [
        (1, 1, "map('p', 1, 'q', 2)", nan),
        (2, 1, "map('q', 2, 'p', 1)", nan),
        (3, 1, "CAST(NULL AS MAP<STRING, INT>)", nan),
        (3, -1, "CAST(NULL AS MAP<STRING, INT>)", nan),
        (3, 1, "map('p', 1)", "double(0)"),
        (3, 1, "map('p', 1)", "double(-0)"),
    ]
    for upper, update in enumerate(updates):
        shard.compare_and_append(spark.sql(row % (upper, *update[1:])), upper, upper + 1)
    assert merge_if_worthwhile(shard, 10, 1) is not None
    found = spark.read.format("delta").load(shard.table.location).collect()
    assert sorted((row["_time"], row["_diff"], tuple(sorted(row["m"]))) for row in found) == [
        (5, 2, ("p",)),
        (5, 2, ("p", "q")),
    ]
    only_map = new_shard(spark, tmp_path, "m MAP<STRING, INT>")
    for upper in range(2):
        only_map.compare_and_append(
            spark.sql(f"SELECT {upper}L AS _time, 1L AS _diff, map('p', 1) AS m"), upper, upper + 1
        )
    assert merge_if_worthwhile(only_map, 10, 1) is not None
    assert spark.read.format("delta").load(only_map.table.location).select("_time", "_diff").collect() == [(1, 2)]

    variant = new_shard(spark, tmp_path, "j VARIANT")
    for upper, diff in enumerate((1, -1, 0)):
        data = spark.sql(f"SELECT {upper}L AS _time, {diff}L AS _diff, parse_json('[1]') AS j")
        variant.compare_and_append(data, upper, upper + 1)
    assert merge_if_worthwhile(variant, 10, 1) is not None
    found = spark.read.format("delta").load(variant.table.location).selectExpr("_time", "_diff", "to_json(j)").collect()
    assert sorted(map(tuple, found)) == [(2, -1, "[1]"), (2, 1, "[1]")]


def test_widened_and_added_columns_are_merged(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path, "k STRING, v INT")
    shard.compare_and_append(spark.sql("SELECT 1L AS _time, 1L AS _diff, 'a' AS k, 1 AS v"), 0, 2)
    shard.evolve("k STRING, v BIGINT, w INT")
    data = spark.sql("SELECT 2L AS _time, 1L AS _diff, 'a' AS k, 1L AS v")
    shard.compare_and_append(data, 2, 3)
    assert merge_if_worthwhile(shard, 9, 1) is not None
    assert content(spark, shard) == {("a", 1, None): 2}
    assert files(shard) == [(2, 2)]


def test_appends_a_since_and_a_stream_live_through_a_merge(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    shard.compare_and_append(rows(spark, (1, 1, "a", 1), (2, 1, "b", 2)), 0, 4)
    seen: list[tuple[int, str]] = []
    query = (
        spark.readStream.format("delta")
        .load(shard.table.location)
        .writeStream.foreachBatch(lambda batch, _: seen.extend((row["_time"], row["k"]) for row in batch.collect()))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        query.processAllAvailable()

        def meanwhile() -> None:
            for upper in (4, 5):
                shard.compare_and_append(rows(spark, (upper, 1, "during", upper)), upper, upper + 1)
            shard.set_since(4, 7)

        merged = merge_if_worthwhile(shard, 3, 7, pause=meanwhile)
        assert merged is not None
        assert merged.version - merged.read_version == 4
        shard.compare_and_append(rows(spark, (6, 1, "after", 6)), 6, 7)
        query.processAllAvailable()
    finally:
        query.stop()
    assert sorted(seen) == [(1, "a"), (2, "b"), (4, "during"), (5, "during"), (6, "after")]
    assert content(spark, shard) == {("a", 1): 1, ("b", 2): 1, ("during", 4): 1, ("during", 5): 1, ("after", 6): 1}


def test_a_newer_epoch_and_another_merge_refuse_ours(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    shard.compare_and_append(rows(spark, (1, 1, "a", 1), (2, 1, "a", 1)), 0, 9)
    with pytest.raises(Conflict):
        merge_if_worthwhile(shard, 3, 1, pause=lambda: shard.set_since(4, 2))
    with pytest.raises(Fenced):
        merge_if_worthwhile(shard, 5, 1)
    with pytest.raises(Conflict):
        merge_if_worthwhile(shard, 5, 2, pause=lambda: merge_if_worthwhile(shard, 5, 2))
    assert content(spark, shard) == {("a", 1): 2}


def test_output_files_are_bounded(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    for upper in (0, 1):
        data = spark.range(20_000).selectExpr(f"{upper}L _time", "1L _diff", "uuid() k", "id v")
        shard.compare_and_append(data, upper, upper + 1)
    merged = merge_if_worthwhile(shard, 5, 1, file_bytes=300_000)
    assert merged is not None
    assert merged.files_after > 3
    assert max(file.size for file in merging._files(shard, shard.table.begin().snapshot)) < 400_000


Update = tuple[int, int, str, int]


@contextmanager
def readable(spark: SparkSession, shard: Updates, log: list[Update], upper: int) -> Iterator[None]:
    """What was readable at each time before is readable after."""
    yield
    since = shard.frontiers().since
    found = [tuple(row) for row in spark.read.format("delta").load(shard.table.location).collect()]
    for as_of in range(since, upper):
        assert summed(found, as_of) == summed(log, as_of), as_of


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_reads_at_every_time_are_the_same_before_and_after(
    spark: SparkSession, tmp_path: Path, data: st.DataObject
) -> None:
    shard, log, upper = new_shard(spark, tmp_path), [], 0
    row = st.tuples(
        st.integers(0, 9), st.integers(-2, 2), st.sampled_from(["a", "b", "", None]), st.sampled_from([None, 0, 1])
    )
    for _ in range(data.draw(st.integers(2, 4), label="appends")):
        new = [(upper + offset, *rest) for offset, *rest in data.draw(st.lists(row, max_size=60), label="rows")]
        shard.compare_and_append(rows(spark, *new), upper, upper + 10)
        log, upper = log + new, upper + 10
        with readable(spark, shard, log, upper):
            merge_if_worthwhile(shard, data.draw(st.integers(0, upper + 3), label="since"), 1)


def test_ten_busy_writers_are_not_disturbed_and_the_table_is_merged(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    written: list[Update] = []
    failures: list[Exception] = []
    stopping = threading.Event()

    def writer(name: str) -> None:
        try:
            while not stopping.is_set():
                upper = int(shard.upper)
                new = [(upper, 1, name, upper), (upper, -1 if upper % 2 else 1, "x", 1)]
                try:
                    shard.compare_and_append(rows(spark, *new), upper, upper + 1)
                    written.extend(new)
                except UpperMismatch:
                    pass
        except Exception as error:  # noqa: BLE001  # shown below
            failures.append(error)

    threads = [threading.Thread(target=writer, args=(f"w{number}",)) for number in range(10)]
    for thread in threads:
        thread.start()
    overtaken = 0  # merges during which someone wrote
    deadline = time.monotonic() + 300
    try:
        while not overtaken and not failures and time.monotonic() < deadline:
            if (merged := merge_if_worthwhile(shard, int(shard.upper), 1)) is not None:
                overtaken += merged.version > merged.read_version + 1
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert overtaken
    assert content(spark, shard) == summed(written, 2**62)


def test_a_million_rows(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    # 400,000 rows come at times 0-99, half of them go at 100-149, and all others are replaced at 150-199.
    there = spark.range(400_000).selectExpr("id % 100 _time", "1L _diff", "concat('k', id) k", "id v")
    gone = there.where("v % 2 = 0").withColumns({"_time": sql.col("v") % 50 + 100, "_diff": sql.lit(-1)})
    odd = there.where("v % 2 = 1")
    replaced = odd.withColumns({"_time": sql.col("v") % 50 + 150, "_diff": sql.lit(-1)}).unionByName(
        odd.withColumns({"_time": sql.col("v") % 50 + 150, "v": -sql.col("v")})
    )
    shard.compare_and_append(there.unionByName(gone).unionByName(replaced), 0, 200)
    table = spark.read.format("delta").load(shard.table.location)
    assert table.count() == 1_000_000
    for since, expected in ((149, 200_000), (199, 200_000)):
        assert merge_if_worthwhile(shard, since, 1) is not None
        at = spark.read.format("delta").load(shard.table.location).where(f"_time <= {since}")
        assert (at.count(), at.agg(sql.sum("_diff")).first()[0]) == (expected, expected)
    final = spark.read.format("delta").load(shard.table.location)
    assert final.where("v >= 0 OR _diff <> 1 OR _time <> 199").count() == 0

"""Merging: nothing that can be read changes, nobody who writes is disturbed, and it costs what the change costs."""

from __future__ import annotations

import random
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

from app.core.frontier import EMPTY
from app.shards import merge_plan, merging
from app.shards.cleaning import LEAST_ORPHAN_GRACE_MS, Cleaner
from app.shards.directory import LocalDirectory
from app.shards.errors import Conflict, UnsafeShard, UpperMismatch, WrongTable
from app.shards.merging import merge_if_worthwhile
from app.shards.settings import COLLECT, LENIENT
from app.shards.updates import Updates
from app.state.errors import Fenced
from tests.spark.helpers import SCHEMA, content, new_shard, rows, summed


def files(shard: Updates) -> list[tuple[int | None, int | None]]:
    """The times in each file."""
    found = merging._files(shard, shard.table.begin().snapshot)
    return sorted((file.min_time, file.max_time) for file in found)


def cleaner_of(shard: Updates, warehouse: Path) -> Cleaner:
    table = shard.table
    return Cleaner(location=table.location, options={}, roots=[str(warehouse)], table_id=table.table_id, epoch=1)


def test_history_before_the_since_becomes_one_time(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    shard.compare_and_append(rows(spark, (1, 1, "a", 1), (2, 1, "b", 2), (3, -1, "a", 1), (3, 1, None, None)), 0, 4)
    shard.compare_and_append(rows(spark, (4, 2, "b", 2), (5, 1, None, None), (9, 1, "late", 9)), 4, 10)
    assert merge_if_worthwhile(shard, 0, 1) is None
    merged = merge_if_worthwhile(shard, 5, 1)
    assert merged is not None
    assert (merged.to, merged.files_before, merged.files_after) == (3, 1, 1)
    assert merged.read_version == merged.version - 1
    assert merged.bytes_before > 0
    assert merged.bytes_after > 0
    assert (shard.upper, shard.frontiers().since) == (10, 5)
    assert files(shard) == [(3, 3), (4, 9)], "the other file goes on after the since, and waits"
    assert content(spark, shard, as_of=5) == {("b", 2): 3, (None, None): 2}
    assert content(spark, shard) == {("b", 2): 3, (None, None): 2, ("late", 9): 1}
    assert merge_if_worthwhile(shard, 5, 1) is None
    # Never at or above the upper, however far the since is.
    merged = merge_if_worthwhile(shard, EMPTY, 1)
    assert merged is not None
    assert merged.bytes_before > merged.bytes_after > 0
    assert merged.to == 9
    assert files(shard) == [(9, 9)]
    assert content(spark, shard) == {("b", 2): 3, (None, None): 2, ("late", 9): 1}
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
    merged = merge_if_worthwhile(shard, 9, 1)
    assert merged is not None
    assert content(spark, shard) == {("a", 1, None): 2}
    assert files(shard) == [(2, 2)]
    cleaner = cleaner_of(shard, tmp_path)
    assert cleaner.delete_dead_files(upto_version=merged.version, older_than_ms=0).files == 2
    assert content(spark, shard) == {("a", 1, None): 2}
    shard.seal(1)
    shard.set_since(EMPTY, 1)
    assert cleaner_of(shard, tmp_path).delete_everything_named().files == 1


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


def test_a_plain_stream_that_was_stopped_for_too_long_fails_and_skips_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The pages say so: the clean-up knows nothing of such a stream."""
    shard = new_shard(spark, tmp_path)
    seen: list[int] = []

    def go_on() -> None:
        query = (
            spark.readStream.format("delta")
            .load(shard.table.location)
            .writeStream.foreachBatch(lambda batch, _: seen.extend(row["_time"] for row in batch.collect()))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .start()
        )
        try:
            query.processAllAvailable()
        finally:
            query.stop()

    shard.compare_and_append(rows(spark, (1, 1, "a", 1)), 0, 2)
    go_on()
    shard.compare_and_append(rows(spark, (2, 1, "a", 1)), 2, 3)
    merged = merge_if_worthwhile(shard, 2, 1)
    assert merged is not None
    cleaner = cleaner_of(shard, tmp_path)
    assert cleaner.delete_dead_files(upto_version=merged.version, older_than_ms=0).files == 2
    with pytest.raises(StreamingQueryException, match="FILE_NOT_EXIST"):
        go_on()
    assert seen == [1]


def test_an_append_in_flight_lives_through_a_merge_and_a_clean_up(spark: SparkSession, tmp_path: Path) -> None:
    """Its files are there, and nothing in the log names them yet, when everything that is dead or orphaned goes."""
    shard = new_shard(spark, tmp_path)
    shard.compare_and_append(rows(spark, (1, 1, "a", 1)), 0, 2)
    shard.compare_and_append(rows(spark, (2, -1, "a", 1), (2, 1, "b", 2)), 2, 3)
    location = shard.table.location
    cleaner = cleaner_of(shard, tmp_path)
    deleted = []

    def merge_and_clean_up() -> None:
        assert len(list(Path(location).glob("*.parquet"))) == 3
        merged = merge_if_worthwhile(shard, 2, 1)
        assert merged is not None
        deleted.append(cleaner.delete_dead_files(upto_version=merged.version, older_than_ms=0).files)
        deleted.append(cleaner.delete_orphans(upto_version=merged.version, orphan_grace_ms=LEAST_ORPHAN_GRACE_MS).files)

    shard.compare_and_append(rows(spark, (3, 1, "c", 3)), 3, 4, pause=merge_and_clean_up)
    assert deleted == [2, 0]
    assert content(spark, shard) == {("b", 2): 1, ("c", 3): 1}
    # Had the clean-up gone by the log alone, the append would have lost its file; this one is really an orphan.
    (Path(location) / "left.parquet").write_bytes(b"left by a writer that died")
    later = LocalDirectory.now_ms
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalDirectory, "now_ms", lambda directory: later(directory) + 2 * LEAST_ORPHAN_GRACE_MS)
        assert cleaner.orphans(upto_version=99, orphan_grace_ms=LEAST_ORPHAN_GRACE_MS) == ["left.parquet"]


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


def data_files(shard: Updates) -> set[str]:
    """Those that are there, whether the log names them or not."""
    return {path.name for path in Path(shard.table.location).rglob("*.parquet") if "_delta_log" not in path.parts}


@contextmanager
def setting(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    spark.conf.set(name, value)
    try:
        yield
    finally:
        spark.conf.unset(name)


@contextmanager
def active(session: SparkSession, usual: SparkSession) -> Iterator[None]:
    """In this thread."""
    sessions = session._jvm.org.apache.spark.sql.SparkSession
    sessions.setActiveSession(session._jsparkSession)
    try:
        yield
    finally:
        sessions.setActiveSession(usual._jsparkSession)


@pytest.mark.parametrize(("name", "value"), [(LENIENT[0], "true"), (LENIENT[0], "TRUE"), (LENIENT[1], " True ")])
def test_what_spark_would_leave_out_is_not_lost_by_a_merge(
    spark: SparkSession, tmp_path: Path, name: str, value: str
) -> None:
    shard = new_shard(spark, tmp_path)
    for upper in range(2):
        shard.compare_and_append(rows(spark, (upper, 1, "a", upper)), upper, upper + 1)
    away = next(path for path in Path(shard.table.location).glob("*.parquet"))
    away.rename(away.with_suffix(".away"))  # for a moment, such as while a disk is not mounted
    version = shard.frontiers().version
    with setting(spark, name, value), pytest.raises(UnsafeShard, match=name):
        merge_if_worthwhile(shard, 9, 1)
    assert shard.frontiers().version == version
    away.with_suffix(".away").rename(away)
    assert content(spark, shard) == {("a", 0): 1, ("a", 1): 1}
    assert merge_if_worthwhile(shard, 9, 1) is not None
    assert content(spark, shard) == {("a", 0): 1, ("a", 1): 1}


def test_the_settings_of_the_active_session_count_as_well(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    shard.compare_and_append(rows(spark, (1, 1, "a", 1), (2, 1, "b", 2)), 0, 3)
    other = spark.newSession()
    with active(other, spark):
        with setting(other, LENIENT[0], "true"), pytest.raises(UnsafeShard, match=LENIENT[0]):
            merge_if_worthwhile(shard, 9, 1)
        with setting(other, COLLECT, "false"), pytest.raises(UnsafeShard, match=COLLECT):
            merge_if_worthwhile(shard, 9, 1)
    assert merge_if_worthwhile(shard, 9, 1) is not None


def taken_up(spark: SparkSession, location: Path, *, partitioned_by: str = "", **properties: str) -> Updates:
    """A table that someone else has made, as a shard."""
    texts = ", ".join(f"'delta.{name}' = '{value}'" for name, value in properties.items())
    spark.sql(
        f"CREATE TABLE delta.`{location}` ({SCHEMA}) USING delta"
        + (f" PARTITIONED BY ({partitioned_by})" if partitioned_by else "")
        + (f" TBLPROPERTIES ({texts})" if texts else "")
    )
    shard = Updates(spark, str(location), str(DeltaTable(location).metadata().id))
    for upper in range(2):
        shard.compare_and_append(rows(spark, (upper, 1, "a", 1)), upper, upper + 1)
    return shard


def test_where_delta_writes_no_statistics_of_the_times_nothing_is_written(spark: SparkSession, tmp_path: Path) -> None:
    """Else each try would leave a copy of the shard behind."""
    for shard, reason in (
        (taken_up(spark, tmp_path / "partitioned", partitioned_by="_time"), "partitioned"),
        (taken_up(spark, tmp_path / "none", dataSkippingNumIndexedCols="0"), "NumIndexedCols"),
        (taken_up(spark, tmp_path / "others", dataSkippingStatsColumns="_diff"), "StatsColumns"),
        (taken_up(spark, tmp_path / "mapped", **{"columnMapping.mode": "name"}), "column mapping"),
    ):
        before = data_files(shard)
        for _ in range(2):
            with pytest.raises(UnsafeShard, match=reason):
                merge_if_worthwhile(shard, 9, 1)
        assert data_files(shard) == before, reason
    shard = new_shard(spark, tmp_path)
    shard.compare_and_append(rows(spark, (1, 1, "a", 1)), 0, 3)
    shard.compare_and_append(rows(spark, (3, 1, "a", 1)), 3, 4)
    before = data_files(shard)
    with setting(spark, COLLECT, "false"), pytest.raises(UnsafeShard, match=COLLECT):
        merge_if_worthwhile(shard, 9, 1)
    assert data_files(shard) == before


def test_a_table_whose_diffs_are_no_longer_bigint_is_left_alone(spark: SparkSession, tmp_path: Path) -> None:
    """What a merge would write, nobody could read."""
    location = tmp_path / "altered"
    spark.sql(f"CREATE TABLE delta.`{location}` (_time BIGINT, _diff INT, k STRING, v BIGINT) USING delta")
    spark.sql(f"INSERT INTO delta.`{location}` VALUES (1, 1, 'a', 1), (2, 1, 'a', 1)")
    shard = Updates(spark, str(location), str(DeltaTable(location).metadata().id))
    shard.advance_upper(0, 5)
    before = data_files(shard)
    with pytest.raises(WrongTable, match="_diff BIGINT"):
        merge_if_worthwhile(shard, 4, 1)
    assert data_files(shard) == before
    assert content(spark, shard) == {("a", 1): 2}


def test_what_was_taken_up_is_merged_where_there_are_statistics(spark: SparkSession, tmp_path: Path) -> None:
    for shard in (
        taken_up(spark, tmp_path / "partitioned", partitioned_by="k"),
        taken_up(spark, tmp_path / "few", dataSkippingNumIndexedCols="1"),
        taken_up(spark, tmp_path / "named", dataSkippingStatsColumns="v,_time"),
    ):
        assert merge_if_worthwhile(shard, 9, 1) is not None
        assert content(spark, shard) == {("a", 1): 2}
        assert files(shard) == [(1, 1)]


def test_a_file_without_statistics_is_divided_at_the_time(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    shard.compare_and_append(rows(spark, (1, 1, "a", 1)), 0, 2)
    with setting(spark, COLLECT, "false"):
        shard.compare_and_append(rows(spark, (2, 1, "a", 1), (3, 1, "b", 2), (6, 1, "c", 3)), 2, 9)
    merged = merge_if_worthwhile(shard, 4, 1)
    assert merged is not None
    assert merged.to == 4
    assert files(shard) == [(4, 4), (6, 6)]
    assert content(spark, shard, as_of=5) == {("a", 1): 2, ("b", 2): 1}
    assert content(spark, shard) == {("a", 1): 2, ("b", 2): 1, ("c", 3): 1}


def test_many_small_files_become_one_without_the_large_one(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_plan, "MOST_SMALL", 3)
    shard = new_shard(spark, tmp_path)
    large = spark.range(20_000).selectExpr("id % 2 _time", "1L _diff", "uuid() k", "id v").coalesce(1)
    shard.compare_and_append(large, 0, 2)
    assert merge_if_worthwhile(shard, 1, 1) is not None
    (base,) = {Path(uri).name for uri in DeltaTable(shard.table.location).file_uris()}
    digest = spark.read.format("delta").load(shard.table.location).agg(sql.sum("_diff"), sql.sum("v")).first()
    for upper in range(2, 10):
        shard.compare_and_append(rows(spark, (upper, 1, "small", 1), (upper, 1, "at", upper)), upper, upper + 1)
        merged = merge_if_worthwhile(shard, upper, 1)
        assert (merged is not None) == (upper in (5, 8))
        if merged is not None:
            assert (merged.files_before, merged.files_after, merged.to) == (4, 1, upper)
    assert files(shard) == [(1, 1), (8, 8), (9, 9)]
    assert base in {Path(uri).name for uri in DeltaTable(shard.table.location).file_uris()}
    there = spark.read.format("delta").load(shard.table.location)
    assert summed(map(tuple, there.where("_time > 1").collect()), 9) == {
        ("small", 1): 8,
        **{("at", upper): 1 for upper in range(2, 10)},
    }
    assert there.where("_time = 1").agg(sql.sum("_diff"), sql.sum("v")).first() == digest


Update = tuple[Any, ...]
"""`(time, diff, k, v)`."""


def history(seed: int, appends: int) -> Iterator[list[Update]]:
    """Random appends, each over ten times: rows that come, that are changed, and that go."""
    chance = random.Random(seed)
    live: list[tuple[str | None, int | None]] = []
    for number in range(appends):
        updates: list[Update] = []
        for at in sorted(chance.choices(range(10 * number, 10 * number + 10), k=100)):
            what = chance.choice(["insert", "change", "delete"] if live else ["insert"])
            if what != "insert":
                updates.append((at, -1, *live.pop(chance.randrange(len(live)))))
            if what != "delete":
                live.append((chance.choice(["a", "b", "c", "", None]), chance.choice([None, 0, 1, 2, -(2**63)])))
                updates.append((at, 1, *live[-1]))
        yield updates


def test_the_histories_are_as_they_should_be() -> None:
    updates = [update for append in history(1, 4) for update in append]
    assert len(updates) > 400
    assert [update[0] for update in updates] == sorted(update[0] for update in updates)
    assert all(count > 0 for as_of in range(40) for count in summed(updates, as_of).values())


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), lags=st.lists(st.integers(0, 14), min_size=4, max_size=4))
def test_reads_at_every_time_are_the_same_before_and_after(
    spark: SparkSession, tmp_path: Path, seed: int, lags: list[int]
) -> None:
    shard, log, upper, merges = new_shard(spark, tmp_path), list[Update](), 0, 0

    def check() -> None:
        found = [tuple(row) for row in spark.read.format("delta").load(shard.table.location).collect()]
        for as_of in range(shard.frontiers().since, upper):
            assert summed(found, as_of) == summed(log, as_of), as_of

    for updates, lag in zip(history(seed, len(lags)), lags, strict=True):
        shard.compare_and_append(rows(spark, *updates).repartition(2), upper, upper + 10)
        log, upper = log + updates, upper + 10
        check()
        if merge_if_worthwhile(shard, max(0, upper - 1 - lag), 1) is not None:
            merges += 1
            check()
    assert merges >= 1
    assert len(log) > 400


def test_plain_readers_of_delta_see_an_ordinary_table(spark: SparkSession, tmp_path: Path) -> None:
    """All columns, with Spark and without, whatever was done to it."""
    shard = new_shard(spark, tmp_path)
    location = shard.table.location

    def plain() -> Counter[Update]:
        """The rows that both see."""
        with_spark = Counter(map(tuple, spark.read.format("delta").load(location).collect()))
        table = DeltaTable(location).to_pyarrow_table()
        assert table.column_names == spark.read.format("delta").load(location).columns
        assert Counter(tuple(row.values()) for row in table.to_pylist()) == with_spark
        return with_spark

    first = [(1, 1, "a", 1), (2, -1, "a", 1), (2, 1, "b", None)]
    shard.compare_and_append(rows(spark, *first), 0, 4)
    assert plain() == Counter(first)
    shard.compare_and_append(rows(spark, (4, 1, "b", None)), 4, 5)
    assert merge_if_worthwhile(shard, 9, 1) is not None
    assert plain() == Counter([(4, 2, "b", None)])
    shard.evolve("k STRING, v BIGINT, w INT")
    assert plain() == Counter([(4, 2, "b", None, None)])
    shard.compare_and_append(spark.sql("SELECT 5L AS _time, 1L AS _diff, 'c' AS k, 3L AS v, 4 AS w"), 5, 6)
    shard.seal(1)
    assert plain() == Counter([(4, 2, "b", None, None), (5, 1, "c", 3, 4)])
    assert merge_if_worthwhile(shard, EMPTY - 2, 1) is not None
    assert plain() == Counter([(int(EMPTY) - 2, 2, "b", None, None), (int(EMPTY) - 2, 1, "c", 3, 4)])


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


Digest = tuple[int, int]
"""How many rows, and a sum over what is in them."""


def expected_digests(ids: int, times: Sequence[int]) -> dict[int, Digest]:
    """Of `test_a_million_rows`, from its description alone."""
    counts, sums = dict.fromkeys(times, 0), dict.fromkeys(times, 0)
    for id in range(ids):
        hashed = zlib.crc32(f"k{id}".encode())
        for at in times:
            if at >= id % 100 and (id % 2 == 1 or at < 100 + id % 50):
                counts[at] += 1
                sums[at] += hashed * 31 + (-id if id % 2 == 1 and at >= 150 + id % 50 else id)
    return {at: (counts[at], sums[at]) for at in times}


def test_a_million_rows(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    # 400,000 rows come at times 0-99, half of them go at 100-149, and all others are replaced at 150-199.
    there = spark.range(400_000).selectExpr("id % 100 _time", "1L _diff", "concat('k', id) k", "id v")
    gone = there.where("v % 2 = 0").withColumns({"_time": sql.col("v") % 50 + 100, "_diff": sql.lit(-1)})
    odd = there.where("v % 2 = 1")
    replaced = odd.withColumns({"_time": sql.col("v") % 50 + 150, "_diff": sql.lit(-1)}).unionByName(
        odd.withColumns({"_time": sql.col("v") % 50 + 150, "v": -sql.col("v")})
    )
    for rows_of, upper, new_upper in ((there, 0, 100), (gone, 100, 150), (replaced, 150, 200)):
        shard.compare_and_append(rows_of, upper, new_upper)
    expected = expected_digests(400_000, range(9, 200, 10))

    def digests(since: int) -> dict[int, Digest]:
        table = spark.read.format("delta").load(shard.table.location)
        sums = sql.sum("_diff"), sql.expr("sum(_diff * (crc32(CAST(k AS BINARY)) * 31 + v))")
        by_time = sorted(map(tuple, table.groupBy("_time").agg(*sums).collect()))
        return {
            at: (sum(row[1] for row in by_time if row[0] <= at), sum(row[2] for row in by_time if row[0] <= at))
            for at in expected
            if at >= since
        }

    assert spark.read.format("delta").load(shard.table.location).count() == 1_000_000
    assert digests(0) == expected
    for since, to, left in ((119, 99, 1_000_000), (149, 149, 600_000), (199, 199, 200_000)):
        merged = merge_if_worthwhile(shard, since, 1)
        assert merged is not None
        assert merged.to == to
        assert digests(since) == {at: digest for at, digest in expected.items() if at >= since}
        assert spark.read.format("delta").load(shard.table.location).count() == left

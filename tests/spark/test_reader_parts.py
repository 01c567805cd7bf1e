"""Reads in parts, numbers from the log, columns of altered tables, and frontiers."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

from app.client_errors import CollectionMissing, InvalidUsage
from app.core.shard_work import clean_up_limit
from app.reader import Reader
from app.reading import arrow, frames
from app.shards.cleaning import Cleaner
from app.shards.updates import Updates, create
from tests.spark.reader_world import World, counted, summed

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

UPDATES = [(1, 1, "a", 1), (1, 1, "b", 2), (3, 1, "b", 2), (3, -1, "a", 1), (4, 1, "c", 3)]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    there = World(tmp_path)
    there.create("orders")
    there.append("orders", UPDATES[:2], 2)
    there.append("orders", UPDATES[2:], 6)
    yield there
    there.close()


@pytest.fixture
def reader(world: World, spark: SparkSession) -> Reader:
    return Reader(spark, root=world.root, client=world.client)


def rows_of(batches: Iterator[pa.RecordBatch]) -> list[tuple[object, ...]]:
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def test_a_cursor_gives_the_snapshot_in_parts(
    world: World, reader: Reader, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow, "PART_BYTES", 1_000)  # so that these few rows are several partitions
    partitions = spark.conf.get("spark.sql.shuffle.partitions")
    with reader.snapshot_cursor("orders", 3) as cursor:
        assert cursor.schema.names == ["k", "v", "_count"]
        (hold,) = world.holds().values()
        assert (hold.since, hold.pin_files) == (3, True)
        batches = list(cursor)
    assert all(batch.schema == cursor.schema for batch in batches)
    assert counted(rows_of(iter(batches))) == summed(UPDATES, 3)
    assert world.holds() == {}
    assert spark.conf.get("spark.sql.shuffle.partitions") == partitions, "the user's session is left alone"


def test_a_stream_gives_every_update_up_to_a_time_as_it_is(world: World, reader: Reader) -> None:
    with reader.snapshot_and_stream("orders", 3) as stream:
        assert stream.schema.names == ["_time", "_diff", "k", "v"]
        assert Counter(rows_of(stream)) == Counter(update for update in UPDATES if update[0] <= 3)
    assert world.holds() == {}


def test_a_read_in_parts_lets_go_when_it_is_closed_exhausted_or_forgotten(world: World, reader: Reader) -> None:
    closed = reader.snapshot_and_stream("orders", 3)
    next(closed)
    closed.close()
    assert world.holds() == {}
    exhausted = reader.snapshot_and_stream("orders", 3)
    assert len(list(exhausted)) > 0
    assert world.holds() == {}
    assert world.client.later == 0
    forgotten = reader.snapshot_and_stream("orders", 3)
    assert len(world.holds()) == 1
    del forgotten
    assert world.holds() == {}
    assert world.client.later == 1, "the garbage collector must not wait for an answer"


@pytest.mark.parametrize("read", ["snapshot_cursor", "snapshot_and_stream"])
def test_a_read_in_parts_outlives_a_merge_and_a_clean_up_without_grace(
    world: World, reader: Reader, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    monkeypatch.setattr(arrow, "PART_BYTES", 100)
    monkeypatch.setattr(arrow, "MOST_PARTS", 8)
    world.append("orders", [(6, 1, f"k{number}", number) for number in range(100)], 7)
    shard = world.shard("orders")
    directory = Path(shard.location)
    before = {file.name for file in directory.glob("*.parquet")}
    cleaner = Cleaner(
        location=shard.location, options={}, roots=[str(directory.parent)], table_id=shard.table_id, epoch=1
    )

    def clean_up() -> None:
        limit = world.controller.read(lambda state: clean_up_limit(state, shard.id))
        assert limit is not None
        cleaner.delete_dead_files(upto_version=limit, older_than_ms=0)

    with getattr(reader, read)("orders", 6) as batches:
        found = [next(batches)]
        world.policy("orders", kind="lag_writes_by", lag=0)
        world.append("orders", [], 10)
        world.merge("orders", 6)
        clean_up()
        assert before <= {file.name for file in directory.glob("*.parquet")}, "they are pinned"
        found += batches
    assert len(found) > 1
    rows = rows_of(iter(found))
    sums = counted(rows) if read == "snapshot_cursor" else summed(rows, 6)
    assert sums == summed([*UPDATES, *((6, 1, f"k{number}", number) for number in range(100))], 6)
    clean_up()
    assert not before & {file.name for file in directory.glob("*.parquet")}, "without the hold they go"


def test_a_part_of_the_data_does_not_look_like_all_of_it(world: World, reader: Reader) -> None:
    with reader.snapshot_and_stream("orders", 3) as stream:
        for file in Path(world.shard("orders").location).glob("*.parquet"):
            file.unlink()
        with pytest.raises(Exception, match="parquet") as failed:
            list(stream)
        with pytest.raises(type(failed.value)) as again:
            next(stream)
        assert again.value is failed.value
    assert world.holds() == {}


def test_a_file_with_one_large_row_group_comes_in_many_small_parts(
    world: World, reader: Reader, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.create("merged")
    rows = [(1, 1, hashlib.md5(str(number).encode()).hexdigest(), number) for number in range(4_000)]
    world.append("merged", rows, 2)
    (size,) = (part.bytes for part in reader.snapshot_parts_stats("merged", 1))
    monkeypatch.setattr(arrow, "PART_BYTES", -(-size // 8))
    spark.sparkContext.setJobGroup("parts", "large file")
    with reader.snapshot_and_stream("merged", 1) as stream:
        first = next(stream)
        jobs = len(spark.sparkContext.statusTracker().getJobIdsForGroup("parts"))
        rest = list(stream)
    later = len(spark.sparkContext.statusTracker().getJobIdsForGroup("parts")) - jobs
    sizes = [batch.num_rows for batch in (first, *rest)]
    assert len(sizes) == 8
    assert max(sizes) < 2 * len(rows) / 8, "no part is much larger than another"
    assert later == 7, "each part is computed, and comes to the driver, when it is asked for"
    assert Counter(rows_of(iter((first, *rest)))) == Counter(rows)


def test_equal_rows_that_take_no_space_in_a_file_come_in_parts_too(
    world: World, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.append("orders", [(6, 1, "x", 1)] * 1_000, 7)
    monkeypatch.setattr(arrow, "PART_ROWS", 300)
    with reader.subscribe("orders", 5, snapshot=False, timeout="30s") as changes:
        sizes = [batch.num_rows for batch in next(changes).batches()]
        assert len(sizes) == 4
        assert max(sizes) <= 300
        world.append("orders", [(7, 1, "y", 1)], 8)
        assert len(list(next(changes).batches())) == 1, "a small step is not spread because other files are large"


def test_all_settings_of_the_session_go_into_that_for_small_parts(spark: SparkSession) -> None:
    settings = {"fs.s3a.connection.maximum": "7", "spark.sql.session.timeZone": "Asia/Tokyo"}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        session = arrow.session_for(spark, arrow.Parts(3, spread=False))
        assert {name: session.conf.get(name) for name in settings} == settings
        assert session.conf.get("spark.sql.shuffle.partitions") == "3"
    finally:
        spark.conf.unset("fs.s3a.connection.maximum")
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_numbers_come_from_the_log_alone(world: World, reader: Reader) -> None:
    for file in Path(world.shard("orders").location).glob("*.parquet"):
        file.unlink()
    stats = reader.snapshot_stats("orders", 5)
    assert (stats.files, stats.updates, stats.version, stats.since, stats.upper) == (2, 5, 2, 0, 6)
    parts = reader.snapshot_parts_stats("orders", 5)
    assert [(part.updates, part.least_time, part.greatest_time) for part in parts] in (
        [(2, 1, 1), (3, 3, 4)],
        [(3, 3, 4), (2, 1, 1)],
    )
    assert stats.bytes == sum(part.bytes for part in parts) > 0
    # A file that goes on after the time is known in bounds only, one that begins after it is not read.
    within = reader.snapshot_stats("orders", 3)
    assert (within.files, within.updates, within.least_updates, within.most_updates) == (2, None, 3, 5)
    assert reader.snapshot_stats("orders", 2).files == 1
    assert world.holds() == {}


def test_an_altered_table_reads_as_each_of_its_collections_was_created(
    world: World, reader: Reader, spark: SparkSession
) -> None:
    world.client.alter_table_desc("orders", "orders_v2", schema="k STRING, v BIGINT, w INT", expected_version=0)
    with reader.snapshot("orders_v2", 4) as rows:  # the table itself is not altered yet
        assert rows.dtypes == [("k", "string"), ("v", "bigint"), ("w", "int"), ("_count", "bigint")]
        assert counted(rows.collect()) == {(*data, None): n for data, n in summed(UPDATES, 4).items()}
    spark.sql(f"ALTER TABLE delta.`{world.shard('orders').location}` ADD COLUMN w INT")
    world.append("orders_v2", [(6, 1, "b", 2, 7), (6, 1, "b", 2, 8)], 7)
    with reader.snapshot("orders", 6) as rows:
        assert rows.columns == ["k", "v", "_count"]
        assert counted(rows.collect()) == {("b", 2): 4, ("c", 3): 1}
    with reader.snapshot("orders_v2", 6) as rows:
        assert counted(rows.collect())["b", 2, 8] == 1


def test_a_value_that_does_not_fit_the_old_type_is_an_error_and_not_another_value(
    world: World, reader: Reader, spark: SparkSession
) -> None:
    world.create("narrow", "k STRING, n INT")
    world.append("narrow", [(1, 1, "a", 1)], 2)
    world.client.alter_table_desc("narrow", "wide", schema="k STRING, n BIGINT", expected_version=0)
    location = world.shard("narrow").location
    spark.sql(f"ALTER TABLE delta.`{location}` SET TBLPROPERTIES ('delta.enableTypeWidening' = 'true')")
    spark.sql(f"ALTER TABLE delta.`{location}` ALTER COLUMN n TYPE BIGINT")
    (spark.createDataFrame([(1, 1, "b", 2**40)], "_time LONG, _diff LONG, k STRING, n LONG")
     .write.format("delta").mode("append").save(location))  # fmt: skip
    with reader.snapshot("wide", 1) as rows:
        assert counted(rows.collect()) == {("a", 1): 1, ("b", 2**40): 1}
    with reader.snapshot_cursor("wide", 1) as cursor:
        assert counted(rows_of(cursor)) == {("a", 1): 1, ("b", 2**40): 1}
    with reader.snapshot_and_stream("wide", 1) as stream:
        assert Counter(rows_of(stream)) == Counter([(1, 1, "a", 1), (1, 1, "b", 2**40)])
    assert (reader.snapshot_stats("wide", 1).files, len(reader.snapshot_parts_stats("wide", 1))) == (2, 2)
    with reader.snapshot("narrow", 1) as rows:
        assert rows.dtypes[1] == ("n", "int")
        assert counted(rows.where("k = 'a'").collect()) == {("a", 1): 1}
        with pytest.raises(Exception, match="does not fit into int"):
            rows.collect()


@pytest.mark.parametrize("ansi", ["true", "false"])
@pytest.mark.parametrize(
    ("value", "misfit", "type"),
    [
        ("map('k', {})", "5000000000L", "MAP<STRING, BIGINT>"),
        ("map({}, 'v')", "5000000000L", "MAP<BIGINT, STRING>"),
        ("map('k', {})", "1.5D", "MAP<STRING, DOUBLE>"),
        ("array(map(1, map('k', {})))", "5000000000L", "ARRAY<MAP<BIGINT, MAP<STRING, BIGINT>>>"),
        ("named_struct('a.b', map('k', {}))", "5000000000L", "STRUCT<`a.b`: MAP<STRING, BIGINT>>"),
    ],
)
def test_a_value_inside_a_map_that_does_not_fit_the_old_type_is_an_error_too(
    spark: SparkSession, value: str, misfit: str, type: str, ansi: str
) -> None:
    old = type.replace("BIGINT", "INT").replace("DOUBLE", "INT")

    def read(written: str) -> list[Row]:
        rows = spark.sql(f"SELECT 1L AS _time, 1L AS _diff, CAST({written} AS {type}) AS m")
        return rows.select(*frames._own_columns(rows.schema, f"m {old}")).collect()

    spark.conf.set("spark.sql.ansi.enabled", ansi)
    try:
        assert read(value.format(7)) == spark.sql(f"SELECT CAST({value.format(7)} AS {old}) AS m").collect()
        assert read("NULL") == [(None,)]
        with pytest.raises(PySparkException, match="does not fit into"):
            read(value.format(misfit))
    finally:
        spark.conf.unset("spark.sql.ansi.enabled")


def test_unusual_names_and_no_columns_at_all(world: World, spark: SparkSession) -> None:
    reader = Reader(spark, root=world.root, client=world.client, count_column="n")
    world.create("odd", "`a.b` STRING, `c``d` BIGINT, `_count` BIGINT")
    world.append("odd", [(1, 1, "x", 1, 5), (1, 1, "x", 1, 5)], 2)
    with reader.snapshot("odd", 1) as rows:
        assert rows.columns == ["a.b", "c`d", "_count", "n"]
        assert counted(rows.collect()) == {("x", 1, 5): 2}
    default = Reader(spark, root=world.root, client=world.client)
    with pytest.raises(InvalidUsage, match="count_column"), default.snapshot("odd", 1):
        pass
    world.create("bare", None)
    with reader.snapshot_latest("bare") as rows:
        assert rows.collect() == []
    world.append("bare", [(1, 3), (1, -1)], 3)
    with reader.snapshot("bare", 2) as rows:
        assert counted(rows.collect()) == {(): 2}
    with reader.snapshot("bare", 0) as rows:
        assert rows.collect() == []
    world.append("bare", [(3, -2)], 4)
    with reader.snapshot_latest("bare") as rows:
        assert rows.collect() == []


def test_rows_that_cannot_be_told_apart_are_not_summed(world: World, reader: Reader, spark: SparkSession) -> None:
    world.client.create_collections([{"id": "loose", "data_source": {"kind": "other"}, "schema": "j VARIANT"}])
    shard = world.shard("loose")
    create(spark, shard.location, shard.table_id, "j VARIANT")
    rows = spark.sql("SELECT 1L AS _time, 1L AS _diff, parse_json('{\"a\": 1}') AS j")
    Updates(spark, shard.location, shard.table_id).compare_and_append(rows, 0, 2)
    with pytest.raises(InvalidUsage, match="snapshot_and_stream"), reader.snapshot("loose", 1):
        pass
    with reader.snapshot_and_stream("loose", 1) as stream:
        assert [row["_diff"] for batch in stream for row in batch.to_pylist()] == [1]


def test_frontiers_are_those_of_one_moment(world: World, reader: Reader) -> None:
    world.client.create_collections([{"id": "view", "data_source": {"kind": "other", "inputs": ["orders"]}}])
    world.policy("orders", kind="step_back")
    one = reader.frontiers("orders")
    assert (one.since, one.upper, one.implied, one.dropped) == (0, 6, 5, False)  # the view holds it back
    assert one.readable(5)
    assert not one.readable(6)
    world.client.acquire_read_holds(["view"], holder="me")
    world.client.drop_collections(["view"])
    found = reader.all_frontiers()
    assert {id: each.dropped for id, each in found.items()} == {"orders": False, "view": True}
    assert reader.frontiers_of(["view", "orders"]) == found
    world.seal("orders")
    assert reader.determine_time_dependence("orders") == "wall_clock"
    assert reader.determine_time_dependence("view") is None
    world.controller.wait_for_tables()
    assert reader.frontiers("orders").upper is None
    with pytest.raises(CollectionMissing, match="no collection 'ghost'"):
        reader.frontiers_of(["orders", "ghost"])

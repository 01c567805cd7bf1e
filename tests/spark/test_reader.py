"""Reads at a time: what they give, what they hold meanwhile, and what they refuse."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException

from app.client_errors import (
    CollectionMissing,
    HoldLost,
    HoldMissing,
    InvalidArgument,
    InvalidUsage,
    ReadBeforeSince,
)
from app.reader import Reader, ReadTimeout, ShardUnreadable
from app.reading import planning
from app.shards.updates import Updates, create
from app.writer import Writer
from tests.spark.helpers import configured
from tests.spark.reader_world import World, counted, summed, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

UPDATES = [(1, 1, "a", 1), (1, 2, "b", 2), (3, -1, "a", 1), (3, 1, "a", 5), (5, -2, "b", 2), (6, -1, "c", 3)]
UPPER = 8


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    there = World(tmp_path)
    there.create("orders")
    there.append("orders", UPDATES[:2], 2)
    there.append("orders", UPDATES[2:], UPPER)
    yield there
    there.close()


@pytest.fixture
def reader(world: World, spark: SparkSession) -> Reader:
    return Reader(spark, root=world.root, client=world.client, holder="test")


def test_a_snapshot_has_each_row_with_its_count(world: World, reader: Reader) -> None:
    for as_of in (0, 1, 5, UPPER - 1):
        with reader.snapshot("orders", as_of) as rows:
            assert rows.columns == ["k", "v", "_count"]
            assert counted(rows.collect()) == summed(UPDATES, as_of)
    assert world.holds() == {}


def test_a_read_holds_its_time_and_its_files_for_as_long_as_it_runs(world: World, reader: Reader) -> None:
    with reader.snapshot("orders", 5) as rows:
        (hold,) = world.holds().values()
        assert (hold.collection, hold.since, hold.holder, hold.pin_files) == ("orders", 5, "test", True)
        assert hold.lease_ms == 60_000
        assert "snapshot at 5 of orders" in (hold.purpose or "")
        # Whatever is merged meanwhile, and however often the frame is evaluated.
        world.policy("orders", kind="valid_from", frontier=7)
        world.merge("orders", 5)
        assert counted(rows.collect()) == summed(UPDATES, 5)
        assert rows.count() == len(summed(UPDATES, 5))
    assert world.holds() == {}
    with pytest.raises(ZeroDivisionError), reader.snapshot("orders", 7):
        raise ZeroDivisionError
    assert world.holds() == {}


def test_a_reader_that_comes_too_late_is_told_the_earliest_time(world: World, reader: Reader) -> None:
    world.policy("orders", kind="valid_from", frontier=6)
    with pytest.raises(ReadBeforeSince, match="from 6 on, not at 5") as refused, reader.snapshot("orders", 5):
        pass
    assert refused.value.earliest == {"orders": 6}
    world.merge("orders", 6)
    with reader.snapshot("orders", 6) as rows:
        assert counted(rows.collect()) == summed(UPDATES, 6)


def test_what_a_version_can_no_longer_tell_is_not_read_even_under_a_hold(world: World, reader: Reader) -> None:
    world.merge("orders", 6)  # which nothing allows: someone works on the shard behind the controller's back
    with pytest.raises(ReadBeforeSince, match="from 6 on"), reader.snapshot("orders", 5):
        pass
    assert world.holds() == {}


def test_a_read_of_the_future_waits_until_its_time_is_complete(
    world: World, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    found = []  # it must be seen with Python's defaults: no level is set here

    def read() -> None:
        with reader.snapshot("orders", 9, timeout="1m") as rows:
            found.append(counted(rows.collect()))

    waiting = threading.Thread(target=read)
    waiting.start()
    wait_until(lambda: "waiting collection=orders as_of=9 upper=8 behind=2" in caplog.text, "it says that it waits")
    with reader.snapshot("orders", 5) as rows:  # it blocks nobody
        assert counted(rows.collect()) == summed(UPDATES, 5)
    more = [(8, 1, "d", 4), (9, 1, "d", 4), (10, 1, "e", 5)]
    world.append("orders", more, 11, observe=False)
    waiting.join()
    assert found == [summed(UPDATES + more, 9)]


def test_waiting_ends_with_both_times(world: World, reader: Reader) -> None:
    with pytest.raises(ReadTimeout, match=r"at 20, but it is written only up to 8") as late:
        reader.snapshot_stats("orders", 20, timeout="100ms")
    assert (late.value.as_of, late.value.upper) == (20, UPPER)
    assert world.holds() == {}


def test_a_collection_without_a_table_yet_is_empty_and_waits(world: World, reader: Reader) -> None:
    world.client.create_collections([{"id": "new", "data_source": {"kind": "other"}, "schema": "k STRING"}])
    with reader.snapshot_latest("new") as rows:
        assert (rows.columns, rows.collect()) == (["k"], [])
    with pytest.raises(ReadTimeout, match="up to 0"), reader.snapshot("new", 0, timeout=0):
        pass


def test_a_dropped_collection_is_read_through_a_hold(world: World, reader: Reader) -> None:
    holds = [
        world.client.acquire_read_holds(["orders"], holder="me", at=3),
        world.client.acquire_read_holds(["orders"], holder="me", at=3, lease="1h", pin_files=True),
    ]
    world.client.drop_collections(["orders"])
    with pytest.raises(CollectionMissing, match="give it with `hold`"), reader.snapshot("orders", 5):
        pass
    for (hold,) in holds:
        before = set(world.holds())
        with reader.snapshot("orders", 5, hold=hold.id) as rows:
            assert counted(rows.collect()) == summed(UPDATES, 5)
            (clone,) = (held for id, held in world.holds().items() if id not in before)
            assert clone.lease_ms == 60_000, "whatever the lease of the other is: it must not outlive us"
        with pytest.raises(ReadBeforeSince, match="from 3 on"), reader.snapshot("orders", 2, hold=hold.id):
            pass
        assert set(world.holds()) == before, "the hold that was given is untouched, the clone is gone"
        world.client.release_read_holds([hold.id])
    with pytest.raises(HoldMissing), reader.snapshot("orders", 5, hold=holds[0][0].id):
        pass


def test_under_a_hold_without_pinned_files_a_live_collection_gets_one_that_has_them(
    world: World, reader: Reader
) -> None:
    (mine,) = world.client.acquire_read_holds(["orders"], holder="me", at=3)
    with reader.snapshot("orders", 4, hold=mine.id) as rows:
        assert counted(rows.collect()) == summed(UPDATES, 4)
        assert sorted(held.pin_files for held in world.holds().values()) == [False, False, True]
    assert set(world.holds()) == {mine.id}
    world.create("users")
    with pytest.raises(InvalidArgument, match="on 'orders', not on 'users'"), reader.snapshot("users", 4, hold=mine.id):
        pass
    assert set(world.holds()) == {mine.id}


def test_a_read_that_takes_longer_than_its_lease_is_exact(world: World, spark: SparkSession) -> None:
    reader = Reader(spark, root=world.root, client=world.client, lease="1500ms")
    (idle,) = world.client.acquire_read_holds(["orders"], holder="idle", at=3, lease="1500ms", pin_files=True)
    ended = threading.Event()

    def let_leases_pass() -> None:
        while not ended.wait(0.02):
            world.expire()

    def slowly(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        time.sleep(4)
        yield from batches

    leases = threading.Thread(target=let_leases_pass)
    with reader.snapshot("orders", 5) as rows:
        (ours,) = world.holds().keys() - {idle.id}
        leases.start()
        try:
            world.policy("orders", kind="valid_from", frontier=7)
            world.merge("orders", 5)
            found = rows.coalesce(1).mapInArrow(slowly, rows.schema).collect()
            assert counted(found) == summed(UPDATES, 5)
            assert set(world.holds()) == {ours}, "nobody has renewed the other one"
        finally:
            ended.set()
            leases.join()
    assert world.holds() == {}


def test_a_lost_hold_is_noticed(world: World, spark: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    reader = Reader(spark, root=world.root, client=world.client, lease="300ms")

    def read_and_lose(error: Exception | None) -> None:
        with reader.snapshot("orders", 5):
            caplog.clear()
            world.client.release_read_holds(list(world.holds()))
            wait_until(lambda: "holds lost" in caplog.text, "a renewal was refused")
            if error is not None:
                raise error

    with pytest.raises(HoldLost, match="released"):
        read_and_lose(None)
    missing = FileNotFoundError("part-00000.parquet")
    with pytest.raises(HoldLost, match="released") as lost:  # that is why the file is not there
        read_and_lose(missing)
    assert lost.value.__context__ is missing


def test_the_latest_snapshot_is_that_of_the_last_complete_time(world: World, reader: Reader) -> None:
    world.create("users")
    world.append("users", [(1, 1, "a", 1), (2, -1, "a", 1), (2, 1, "b", 2), (3, 1, "c", 3)], 3)
    with reader.snapshot_latest("users") as rows:
        assert rows.columns == ["k", "v"]
        assert [tuple(row) for row in rows.collect()] == [("b", 2)]
        (hold,) = world.holds().values()
        assert (hold.since, hold.pin_files) == (2, True)
    world.policy("users", kind="lag_writes_by", lag=0)
    with (
        pytest.raises(ReadBeforeSince, match="since is 3, and it is written only up to"),
        reader.snapshot_latest("users"),
    ):
        pass
    world.append("users", [], 4)
    world.seal("users")
    with pytest.raises(InvalidUsage, match="is closed"), reader.snapshot_latest("users"):
        pass
    with reader.snapshot("users", 1_000) as rows:
        assert counted(rows.collect()) == {("b", 2): 1, ("c", 3): 1}
    assert world.holds() == {}


def test_the_latest_snapshot_refuses_rows_that_are_not_there_once_whatever_is_asked_of_it(
    world: World, reader: Reader
) -> None:
    world.create("users")
    world.append("users", [(1, 2, "a", 1), (1, 1, "b", 2)], 3)
    for ask in ("count", "collect", "isEmpty"):
        with pytest.raises(InvalidUsage, match="there 2 times"), reader.snapshot_latest("users") as rows:
            getattr(rows, ask)()
    with pytest.raises(InvalidUsage), reader.snapshot_latest("users") as rows:
        rows.select("v").distinct().count()
    assert world.holds() == {}


def test_rows_that_are_not_there_once_are_found_also_by_who_asks_for_others(world: World, reader: Reader) -> None:
    world.create("users")
    world.append("users", [(1, 2, "a", 1), (1, 1, "b", 2)], 3)
    with pytest.raises(InvalidUsage, match="there 2 times"), reader.snapshot_latest("users") as rows:
        rows.where("k = 'b'").collect()
    with pytest.raises(InvalidUsage, match="there 2 times"), reader.snapshot_latest("users") as rows:
        rows.join(rows.sparkSession.sql("SELECT 'b' AS k"), "k").collect()
    with pytest.raises(InvalidUsage, match="there 2 times"), reader.snapshot_latest("users") as rows:
        rows.join(rows.sparkSession.sql("SELECT 'b' AS k"), "k", "left_semi").collect()


def test_a_mistake_in_a_query_is_said_to_be_that(world: World, reader: Reader) -> None:
    world.append("orders", [(8, 1, "c", 3), (8, -1, "b", 2), (8, 1, "b", 2)], 9)  # each is there once, or not at all
    with pytest.raises(AnalysisException, match="`nope` cannot be resolved"), reader.snapshot_latest("orders") as rows:
        rows.where("nope = 1")  # the message shows the whole plan
    assert world.holds() == {}


def test_a_table_is_complete_up_to_the_upper_of_its_transaction_log(world: World, reader: Reader) -> None:
    world.create("log")
    world.create("member", txns="log")
    world.append("member", [(1, 1, "a", 1)], 2)
    with pytest.raises(ReadTimeout, match="up to 2"), reader.snapshot("member", 5, timeout=0):
        pass
    world.append("log", [], 6)
    with reader.snapshot("member", 5) as rows:
        assert counted(rows.collect()) == {("a", 1): 1}


def test_what_is_written_between_two_looks_is_not_missing_below_the_upper(
    world: World, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.create("log")
    world.create("member", txns="log")
    world.append("log", [], 2)
    looks = []
    look = planning.ShardLog.look

    def then_write(log: planning.ShardLog) -> planning.Plan:
        seen = look(log)
        looks.append(seen)
        if len(looks) == 1:
            world.append("member", [(3, 1, "a", 1)], 4)
            world.append("log", [], 6)
        return seen

    monkeypatch.setattr(planning.ShardLog, "look", then_write)
    with reader.snapshot("member", 5) as rows:
        assert counted(rows.collect()) == {("a", 1): 1}
    assert len(looks) == 4


def test_another_table_in_the_place_of_a_shard_is_not_read(world: World, reader: Reader) -> None:
    world.client.create_collections([{"id": "users", "data_source": {"kind": "other"}}])
    world.make_table("users", table_id="0000")
    with pytest.raises(ShardUnreadable, match="another Delta table"), reader.snapshot("users", 0):
        pass
    assert world.holds() == {}


def test_settings_with_which_spark_leaves_out_data_are_refused(
    world: World, reader: Reader, spark: SparkSession
) -> None:
    with (
        configured(spark, {"spark.sql.files.ignoreMissingFiles": "True"}),  # as Spark takes it
        pytest.raises(InvalidUsage, match="ignoreMissingFiles"),
        reader.snapshot("orders", 5),
    ):
        pass
    assert world.holds() == {}


@pytest.mark.parametrize("made_by", ["the controller", "the writer"])
def test_what_a_timestamp_is_does_not_depend_on_the_session(
    world: World, reader: Reader, spark: SparkSession, made_by: str
) -> None:
    ddl = "t TIMESTAMP, s STRUCT<at: TIMESTAMP>"
    world.client.create_collections([{"id": "times", "data_source": {"kind": "other"}, "schema": ddl}])
    shard, when = world.shard("times"), datetime(2026, 1, 2, 3, 4, 5)
    rows = spark.createDataFrame([(0, 1, when, (when,))], f"_time BIGINT, _diff BIGINT, {ddl}")
    if made_by == "the controller":
        create(spark, shard.location, shard.table_id, ddl)
    with configured(spark, {"spark.sql.timestampType": "TIMESTAMP_NTZ"}):
        Writer(spark, "times", root=world.root, at_least=world.client.seq).compare_and_append(rows, 0, 1)
        world.observe("times")
        with reader.snapshot("times", 0) as found:
            assert found.dtypes == [("t", "timestamp"), ("s", "struct<at:timestamp>"), ("_count", "bigint")]
            assert found.collect() == [(when, (when,), 1)]
    assert Updates(spark, shard.location, shard.table_id).table.schema() == rows.schema


@pytest.mark.parametrize("duration", ["soon", 30.0, -1, timedelta(seconds=-1), True])
def test_a_duration_that_is_none_is_refused_before_anything_is_held(
    world: World, reader: Reader, monkeypatch: pytest.MonkeyPatch, duration: Any
) -> None:
    monkeypatch.setattr(world.client, "send", lambda _: pytest.fail("something was sent"))
    for read in (reader.snapshot_stats, reader.snapshot_cursor, reader.subscribe):
        with pytest.raises(InvalidArgument, match="Expected a duration"):
            read("orders", 5, timeout=duration)
    with pytest.raises(InvalidArgument, match="Expected a duration"):
        reader.subscribe("orders", 5, lease=duration)
    with pytest.raises(InvalidArgument, match="Expected a duration"):
        Reader(reader._spark, root=world.root, client=world.client, lease=duration)


@pytest.mark.parametrize("as_of", [-1, 2**63, True, None, "5"])
def test_a_time_that_is_none_is_refused(reader: Reader, as_of: object) -> None:
    with pytest.raises((InvalidArgument, TypeError)), reader.snapshot("orders", as_of):  # type: ignore[arg-type]
        pass

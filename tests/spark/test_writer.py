"""A writer finds its shard in the state, and says what to do when it cannot write."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

from app.client_errors import CollectionMissing, InvalidUsage
from app.core.frontier import EMPTY, MAX_TIME_GIVEN
from app.shards.bounds import Appended
from app.shards.errors import InvalidBounds, SchemaMismatch, Sealed, ShardMissing, UpperMismatch
from app.shards.updates import Updates
from app.status import StateMissing, TablesBehind
from app.writer import Writer
from tests.spark.helpers import rows
from tests.spark.state import ORDERS, World, create

DOCS = Path(__file__).parents[2] / "docs" / "writing.md"


def found(spark: SparkSession, world: World, shard: str) -> list[tuple[Any, ...]]:
    table = spark.read.format("delta").load(str(world.warehouse / shard))
    return sorted(map(tuple, table.collect()), key=str)


def test_the_first_writer_makes_the_table_and_any_may_write(spark: SparkSession, tmp_path: Path) -> None:
    world = World(tmp_path).run(create(ORDERS))
    one, two = (Writer(spark, "orders", root=world.root) for _ in range(2))
    assert one.compare_and_append(rows(spark, (1, 1, "a", 1)), 0, 5).upper == 5
    with pytest.raises(UpperMismatch) as mismatch:
        two.compare_and_append(rows(spark, (1, 1, "b", 1)), 0, 5)
    assert two.upper == mismatch.value.actual == 5
    assert two.advance_upper(5, 7).upper == 7
    at = two.append(spark.sql("SELECT 'b' AS k, 2L AS v"), now_ms=lambda: 10).upper - 1
    assert found(spark, world, "orders-1") == [(1, 1, "a", 1), (at, 1, "b", 2)]
    with pytest.raises(SchemaMismatch, match="lack the columns"):
        two.append(spark.sql("SELECT 'b' AS k"))
    one.seal()
    assert two.upper == EMPTY
    with pytest.raises(Sealed, match="closed for ever"):
        two.append(spark.sql("SELECT 'b' AS k, 2L AS v"))


def test_what_cannot_be_written_to_is_explained(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(StateMissing, match="Is the root right"):
        Writer(spark, "orders", root=str(tmp_path / "nowhere"))
    world = World(tmp_path).run(
        create(
            ORDERS,
            {"id": "plain", "data_source": {"kind": "webhook"}, "shard": {"format": "delta"}},
            {"id": "bare", "data_source": {"kind": "webhook"}},
        )
    )
    with pytest.raises(CollectionMissing, match=r"never created, or it was dropped.* as `at_least`"):
        Writer(spark, "o'rders", root=world.root)
    with pytest.raises(InvalidUsage, match="ordinary Delta table"):
        Writer(spark, "plain", root=world.root)
    with pytest.raises(InvalidUsage, match="has no schema"):
        Writer(spark, "bare", root=world.root)
    with pytest.raises(TablesBehind, match="did not reach 99"):
        Writer(spark, "orders", root=world.root, at_least=99, timeout_s=0.1)
    writer = Writer(spark, "orders", root=world.root, at_least=1)
    writer.advance_upper(0, 5)
    world.run(seen=1)
    shutil.rmtree(world.warehouse / "orders-1")
    with pytest.raises(ShardMissing, match="was there and is gone"):
        Writer(spark, "orders", root=world.root)
    with pytest.raises(ShardMissing):
        writer.advance_upper(5, 6)
    assert not (world.warehouse / "orders-1").exists()
    world.run({"type": "drop_collections", "id": "d", "collections": ["orders"]})
    with pytest.raises(CollectionMissing):
        Writer(spark, "orders", root=world.root)


def test_a_shard_that_comes_later_than_its_collection_is_awaited(spark: SparkSession, tmp_path: Path) -> None:
    world = World(tmp_path).run(create(ORDERS))
    DeltaTable(f"{world.root}/state/shards").delete()
    with pytest.raises(TablesBehind, match="'orders-1' is not in the tables yet"):
        Writer(spark, "orders", root=world.root, timeout_s=0.1)


def test_after_an_alteration_both_schemas_are_written_to_one_shard(spark: SparkSession, tmp_path: Path) -> None:
    world = World(tmp_path).run(create(ORDERS))
    old = Writer(spark, "orders", root=world.root)
    old.compare_and_append(rows(spark, (1, 1, "a", 1)), 0, 5)
    world.run(
        {
            "type": "alter_table_desc",
            "id": "a",
            "existing": "orders",
            "new": "orders_v2",
            "schema": "k STRING, v BIGINT, w INT",
            "expected_version": 0,
        }
    )
    new = Writer(spark, "orders_v2", root=world.root)
    new.compare_and_append(rows(spark, (5, 1, "b", 2)).withColumn("w", sql.lit(3)), 5, 6)
    with pytest.raises(SchemaMismatch, match=r"lack the columns \['w'\]"):
        new.compare_and_append(rows(spark, (6, 1, "b", 2)), 6, 7)
    for writer in (old, Writer(spark, "orders", root=world.root)):
        upper = int(writer.upper)
        writer.compare_and_append(rows(spark, (upper, 1, "c", 3)), upper, upper + 1)
    assert found(spark, world, "orders-1") == [
        (1, 1, "a", 1, None),
        (5, 1, "b", 2, 3),
        (6, 1, "c", 3, None),
        (7, 1, "c", 3, None),
    ]


def test_whoever_shares_a_table_makes_it_as_its_owner_wants_it_and_changes_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    older = {"id": "keys", "data_source": {"kind": "other"}, "schema": "k STRING", "primary": "orders"}
    world = World(tmp_path).run(create({**ORDERS, "schema": "k STRING NOT NULL, v BIGINT"}, {**older, "schema": None}))
    Writer(spark, "keys", root=world.root)
    table = spark.read.format("delta").load(str(world.warehouse / "orders-1"))
    assert table.dtypes == [("_time", "bigint"), ("_diff", "bigint"), ("k", "string"), ("v", "bigint")]
    # An earlier controller has accepted any schema here.
    described = json.dumps({**older, "schema": "k STRING NOT NULL, v BIGINT, extra INT"})
    DeltaTable(f"{world.root}/state/collections").update({"description": f"'{described}'"}, predicate="id = 'keys'")
    keys, version = Writer(spark, "keys", root=world.root), DeltaTable(str(world.warehouse / "orders-1")).version()
    with pytest.raises(SchemaMismatch, match=r"columns \['extra'\], which the shard does not have"):
        keys.append(spark.sql("SELECT 'a' AS k, 1L AS v, 1 AS extra"))
    assert DeltaTable(str(world.warehouse / "orders-1")).version() == version == 0


LOG = {"id": "log", "data_source": {"kind": "table"}, "schema": "n BIGINT"}
MEMBER = {**ORDERS, "data_source": {"kind": "table", "txns": "log"}}


def test_an_old_collection_takes_only_what_its_own_schema_has(spark: SparkSession, tmp_path: Path) -> None:
    world = World(tmp_path).run(create(LOG, {**MEMBER, "schema": "k STRING, v INT, c CHAR(3)"}))
    altered = {"existing": "orders", "new": "orders_v2", "schema": "k STRING, v BIGINT, c CHAR(3), w INT"}
    world.run({"type": "alter_table_desc", "id": "a", "expected_version": 0, **altered})
    Writer(spark, "log", root=world.root).advance_upper(0, 5)
    new, old = (Writer(spark, id, root=world.root) for id in ("orders_v2", "orders"))
    before = DeltaTable(str(world.warehouse / "orders-2")).version()
    own = "'a' AS k, 1 AS v, 'xyz' AS c"
    for columns, problem in (
        (f"{own}, 7 AS w", r"columns \['w'\], which the collection does not have"),
        ("'a' AS k, 5000000000L AS v, 'xyz' AS c", "'v' of the rows is bigint, but the collection's is int"),
        ("'a' AS k, 1 AS v", r"lack the columns \['c'\]"),
    ):
        with pytest.raises(SchemaMismatch, match=problem):
            old.append(spark.sql(f"SELECT {columns}"), now_ms=lambda: 5)
        with pytest.raises(SchemaMismatch, match=problem):
            old.compare_and_append(spark.sql(f"SELECT 5L AS _time, 1L AS _diff, {columns}"), 5, 6)
    assert DeltaTable(str(world.warehouse / "orders-2")).version() == before, "nor was the log caught up with"
    old.compare_and_append(spark.sql(f"SELECT 5L AS _time, 1L AS _diff, {own}"), 5, 6)
    new.append(spark.sql("SELECT 'a' AS k, 5000000000L AS v, 'xyz' AS c, 7 AS w"), now_ms=lambda: 6)
    assert found(spark, world, "orders-2") == [(5, 1, "a", 1, "xyz", None), (6, 1, "a", 5_000_000_000, "xyz", 7)]


def test_a_table_with_a_log_is_written_above_the_logs_upper(spark: SparkSession, tmp_path: Path) -> None:
    world = World(tmp_path).run(create(LOG, MEMBER))
    writer, logs = (Writer(spark, name, root=world.root) for name in ("orders", "log"))
    assert writer.compare_and_append(rows(spark, (2, 1, "a", 1)), 0, 3).upper == 3
    logs.advance_upper(0, 10)
    assert writer.upper == 10
    with pytest.raises(UpperMismatch) as mismatch:
        writer.compare_and_append(rows(spark, (4, 1, "late", 1)), 3, 5)
    assert mismatch.value.actual == 10
    appended = writer.compare_and_append(rows(spark, (10, 1, "b", 2)), 10, 12, token="t")
    assert writer.compare_and_append(rows(spark, (10, 1, "b", 2)), 10, 12, token="t") == appended
    assert writer.upper == 12
    logs.advance_upper(10, 20)
    assert writer.compare_and_append(rows(spark, (10, 1, "b", 2)), 10, 12, token="t") == appended
    assert writer.append(spark.sql("SELECT 'c' AS k, 3L AS v"), now_ms=lambda: 15).upper == 21
    logs.advance_upper(20, 30)
    assert writer.advance_upper(30, 31).upper == 31


def test_several_writers_may_catch_up_with_the_log_at_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path).run(create(LOG, MEMBER))
    writer, logs = (Writer(spark, name, root=world.root) for name in ("orders", "log"))
    writer.advance_upper(0, 5)
    advance = Updates.advance_upper
    for log, other in ((10, 10), (20, 15)):  # another one has come all the way just before, or a part of it

        def after_another(
            shard: Updates, expected: int, new: int, *, token: str | None = None, other: int = other
        ) -> Appended:
            monkeypatch.undo()
            advance(shard, expected, other)
            return advance(shard, expected, new, token=token)

        logs.advance_upper(int(logs.upper), log)
        monkeypatch.setattr(Updates, "advance_upper", after_another)
        assert writer.compare_and_append(rows(spark, (log, 1, "a", 1)), log, log + 1).upper == log + 1


def test_the_time_of_day_means_nothing_on_another_timeline(spark: SparkSession, tmp_path: Path) -> None:
    world = World(tmp_path).run(create({**ORDERS, "timeline": "steps"}))
    writer = Writer(spark, "orders", root=world.root)
    row = spark.sql("SELECT 'a' AS k, 1L AS v")
    with pytest.raises(InvalidUsage, match="timeline 'steps'"):
        writer.append(row)
    assert writer.append(row, now_ms=lambda: 3).upper == 4


def test_times_end_with_the_year_9999(spark: SparkSession, tmp_path: Path) -> None:
    world = World(tmp_path).run(create(ORDERS))
    writer = Writer(spark, "orders", root=world.root)
    with pytest.raises(InvalidBounds, match="after the year 9999"):
        writer.advance_upper(0, MAX_TIME_GIVEN + 2)
    with pytest.raises(InvalidBounds, match="after the year 9999"):
        writer.append(spark.sql("SELECT 'a' AS k, 1L AS v"), now_ms=lambda: MAX_TIME_GIVEN + 1)
    last = MAX_TIME_GIVEN + 1
    assert writer.compare_and_append(rows(spark, (MAX_TIME_GIVEN, 1, "a", 1)), 0, last).upper == last
    assert writer.advance_upper(last, int(EMPTY)).upper == EMPTY


def test_a_token_does_not_let_anything_below_the_logs_upper(spark: SparkSession, tmp_path: Path) -> None:
    world = World(tmp_path).run(create(LOG, MEMBER))
    writer, logs = (Writer(spark, name, root=world.root) for name in ("orders", "log"))
    writer.advance_upper(0, 5)
    logs.advance_upper(0, 20)
    for attempt in (
        lambda: writer.compare_and_append(rows(spark, (6, 1, "late", 1)), 5, 8, token="fresh"),
        lambda: writer.advance_upper(5, 8, token="fresh"),
        lambda: writer.advance_upper(3, 8),
    ):
        with pytest.raises(UpperMismatch) as mismatch:
            attempt()
        assert mismatch.value.actual == 20
    assert found(spark, world, "orders-2") == []


def test_a_mismatch_says_the_upper_of_the_collection_also_to_a_second_attempt(
    spark: SparkSession, tmp_path: Path
) -> None:
    world = World(tmp_path).run(create(LOG, MEMBER))
    writer, logs = (Writer(spark, name, root=world.root) for name in ("orders", "log"))
    writer.advance_upper(0, 5)
    logs.advance_upper(0, 20)
    for attempt in (
        lambda: writer.compare_and_append(rows(spark, (3, 1, "late", 1)), 3, 8, token="t"),
        lambda: writer.advance_upper(3, 8, token="t"),
    ):
        with pytest.raises(UpperMismatch) as mismatch:
            attempt()
        assert mismatch.value.actual == writer.upper == 20
    logs.seal()
    with pytest.raises(Sealed, match="its transaction log was sealed"):
        writer.advance_upper(3, 8, token="t")


def test_a_log_needs_no_schema(spark: SparkSession, tmp_path: Path) -> None:
    world = World(tmp_path).run(create({"id": "log", "data_source": {"kind": "table"}}, MEMBER))
    writer = Writer(spark, "orders", root=world.root)
    assert writer.upper == 0
    Writer(spark, "log", root=world.root).advance_upper(0, 10)
    assert writer.upper == 10
    assert writer.append(spark.sql("SELECT 'a' AS k, 1L AS v"), now_ms=lambda: 3).upper == 11


def test_the_log_of_a_log_counts_as_well(spark: SparkSession, tmp_path: Path) -> None:
    through = {**LOG, "data_source": {"kind": "table", "txns": "top"}}
    world = World(tmp_path).run(create({**LOG, "id": "top"}, through, MEMBER))
    writer, log, top = (Writer(spark, name, root=world.root) for name in ("orders", "log", "top"))
    log.advance_upper(0, 4)
    top.advance_upper(0, 10)
    assert writer.upper == log.upper == 10
    with pytest.raises(UpperMismatch) as mismatch:
        writer.compare_and_append(rows(spark, (5, 1, "late", 1)), 4, 6)
    assert mismatch.value.actual == 10
    assert writer.append(spark.sql("SELECT 'a' AS k, 1L AS v"), now_ms=lambda: 7).upper == 11


def test_a_dropped_log_lives_on_beneath_its_members(spark: SparkSession, tmp_path: Path) -> None:
    world = World(tmp_path).run(create(LOG, MEMBER))
    Writer(spark, "log", root=world.root).advance_upper(0, 10)
    world.run({"type": "drop_collections", "id": "d", "collections": ["log"]})
    with pytest.raises(CollectionMissing, match="'log' was dropped"):
        Writer(spark, "log", root=world.root)
    writer = Writer(spark, "orders", root=world.root)
    assert writer.compare_and_append(rows(spark, (10, 1, "a", 1)), 10, 12).upper == 12
    DeltaTable(f"{world.root}/state/shards").update({"state": "'finalizing'"}, predicate="shard = 'log-1'")
    with pytest.raises(CollectionMissing, match="The shard of 'log' is being given up"):
        Writer(spark, "orders", root=world.root)


def test_a_sealed_log_closes_its_members(spark: SparkSession, tmp_path: Path) -> None:
    world = World(tmp_path).run(create(LOG, MEMBER))
    writer, logs = (Writer(spark, name, root=world.root) for name in ("orders", "log"))
    appended = writer.advance_upper(0, 5, token="before")
    logs.seal()
    assert writer.upper == EMPTY
    for attempt in (
        lambda: writer.append(spark.sql("SELECT 'a' AS k, 1L AS v")),
        lambda: writer.compare_and_append(rows(spark, (5, 1, "a", 1)), 5, 6, token="t"),
        lambda: writer.advance_upper(5, 6),
    ):
        with pytest.raises(Sealed, match="its transaction log was sealed"):
            attempt()
    assert writer.advance_upper(0, 5, token="before") == appended


def test_the_examples_of_the_page_run(spark: SparkSession, tmp_path: Path) -> None:
    world = World(tmp_path).run(create(ORDERS))
    names: dict[str, Any] = {"spark": spark, "root": world.root}
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(DOCS), "exec"), names)

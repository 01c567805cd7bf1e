"""A writer finds its shard in the state, and says what to do when it cannot write."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

from app.client_errors import CollectionMissing, InvalidUsage
from app.core.frontier import EMPTY
from app.shards.errors import SchemaMismatch, Sealed, ShardMissing, UpperMismatch
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
    with pytest.raises(CollectionMissing, match="never created, or was dropped"):
        Writer(spark, "o'rders", root=world.root)
    with pytest.raises(InvalidUsage, match="ordinary Delta table"):
        Writer(spark, "plain", root=world.root)
    with pytest.raises(InvalidUsage, match="has no schema"):
        Writer(spark, "bare", root=world.root)
    with pytest.raises(TablesBehind, match="has not reached seq 99"):
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


def test_a_table_with_a_log_is_written_above_the_logs_upper(spark: SparkSession, tmp_path: Path) -> None:
    log = {"id": "log", "data_source": {"kind": "table"}, "schema": "n BIGINT"}
    member = {**ORDERS, "data_source": {"kind": "table", "txns": "log"}}
    world = World(tmp_path).run(create(log, member))
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


def test_the_examples_of_the_page_run(spark: SparkSession, tmp_path: Path) -> None:
    world = World(tmp_path).run(create(ORDERS))
    names: dict[str, Any] = {"spark": spark, "root": world.root}
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(DOCS), "exec"), names)

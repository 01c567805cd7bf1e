"""Appends that compare, a since with a fence, a seal, and columns that are added: on the real Delta."""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from py4j.protocol import Py4JError
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

from app.core.frontier import EMPTY, MAX_TIME_GIVEN
from app.shards import transaction, updates
from app.shards.columns import shard_schema
from app.shards.errors import (
    CommitUnknown,
    InvalidBounds,
    InvalidRows,
    LockTimeout,
    LogUnreadable,
    SchemaMismatch,
    Sealed,
    ShardMissing,
    UnsafeShard,
    UpperMismatch,
    WrongTable,
)
from app.shards.recorded import known_transactions
from app.shards.settings import FORGETS
from app.shards.updates import Updates, create
from app.state.errors import Fenced
from tests.spark.helpers import DDL, configured, content, new_shard, rows


def test_an_append_compares_and_moves_the_upper(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    assert (shard.upper, shard.frontiers().since) == (0, 0)
    first = shard.compare_and_append(rows(spark, (1, 1, "a", 1), (4, 1, "b", 2)), 0, 5)
    assert (first.version, first.upper, shard.upper) == (1, 5, 5)
    with pytest.raises(UpperMismatch) as mismatch:
        shard.compare_and_append(rows(spark, (5, 1, "c", 1)), 4, 6)
    assert mismatch.value.actual == 5
    assert shard.compare_and_append(rows(spark), 5, 7).upper == 7  # an empty append
    assert shard.advance_upper(7, 9).upper == 9
    with pytest.raises(UpperMismatch):
        shard.advance_upper(7, 9)
    assert content(spark, shard) == {("a", 1): 1, ("b", 2): 1}
    assert content(spark, shard, as_of=3) == {("a", 1): 1}
    # An ordinary Delta table for everyone else.
    table = DeltaTable(shard.table.location)
    assert sorted(table.to_pyarrow_table().to_pydict()["k"]) == ["a", "b"]
    assert str(table.metadata().id) == shard.table.table_id
    assert table.transaction_version("holdfast.upper") == 9


def test_who_wrote_in_between_wins_and_the_other_is_told(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)

    def other() -> None:
        shard.compare_and_append(rows(spark, (0, 1, "B", 1)), 0, 3)

    with pytest.raises(UpperMismatch) as mismatch:
        shard.compare_and_append(rows(spark, (0, 1, "A", 1)), 0, 5, pause=other)
    assert mismatch.value.actual == 3
    assert content(spark, shard) == {("B", 1): 1}


def test_a_since_and_a_new_column_in_between_do_not_fail_a_writer(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    pending = [lambda: shard.set_since(0, 4), lambda: shard.set_since(3, 4), lambda: shard.evolve(f"{DDL}, w INT")]

    def disturb() -> None:
        while pending:
            pending.pop()()

    appended = shard.compare_and_append(rows(spark, (0, 1, "A", 1)), 0, 5, pause=disturb)
    assert appended.upper == 5
    assert (shard.frontiers().since, shard.frontiers().epoch) == (3, 4)
    assert content(spark, shard) == {("A", 1, None): 1}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ((4, 1, "a", 1), r"the time 4 is not in \[5, 8\)"),
        ((8, 1, "a", 1), r"the time 8 is not in \[5, 8\)"),
        ((-1, 1, "a", 1), r"the time -1 is not in"),
        ((None, 1, "a", 1), r"the time null is not in"),
        ((6, None, "a", 1), r"without a diff at the time 6"),
    ],
)
def test_a_row_out_of_bounds_fails_the_append(
    spark: SparkSession, tmp_path: Path, row: tuple[Any, ...], words: str
) -> None:
    shard = new_shard(spark, tmp_path)
    shard.advance_upper(0, 5)
    with pytest.raises(InvalidRows, match=words):
        shard.compare_and_append(rows(spark, (5, 1, "fine", 1), row), 5, 8)
    assert (shard.upper, content(spark, shard)) == (5, {})


def test_the_last_append_takes_no_time_after_the_year_9999(spark: SparkSession, tmp_path: Path) -> None:
    """So every time that there is can be read, and held, too; the number that stands for `[]` is none."""
    shard = new_shard(spark, tmp_path)
    for time_ in (int(EMPTY), int(EMPTY) - 1, MAX_TIME_GIVEN + 1, None):
        with pytest.raises(InvalidRows, match=f"the time {time_ or 'null'} is not in"):
            shard.compare_and_append(rows(spark, (time_, 1, "a", 1)), 0, EMPTY)
    assert shard.upper == 0
    assert shard.compare_and_append(rows(spark, (MAX_TIME_GIVEN, 1, "a", 1)), 0, EMPTY).upper == EMPTY


def test_bounds_that_cannot_be_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    for expected, new in ((5, 5), (5, 4), (-1, 4), (0, 2**63)):
        with pytest.raises(InvalidBounds):
            shard.compare_and_append(rows(spark), expected, new)


def test_columns_must_be_those_of_the_shard(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path, "k STRING NOT NULL, v BIGINT, `odd.näme` INT")
    good = spark.sql("SELECT 1 AS v, 0L AS _time, 'a' AS K, 1 AS _diff")  # any order and case, narrower types
    shard.compare_and_append(good, 0, 1)
    for wrong, words in (
        (good.withColumn("more", sql.lit(1)), "columns .'more'., which the shard does not have"),
        (good.drop("K"), "lack the columns .'k'."),
        (good.drop("v").withColumn("odd.näme", sql.lit(1)), "lack the columns .'v'."),
        (good.withColumn("v", sql.lit("text")), "cast it"),
        (good.withColumn("v", sql.lit(1.5)), "cast it"),
        (good.select("*", sql.lit(1).alias("V")), "two columns of the same name"),
    ):
        with pytest.raises(SchemaMismatch, match=words):
            shard.compare_and_append(wrong.withColumn("_time", sql.lit(1)), 1, 2)
    with pytest.raises(InvalidRows, match="NOT NULL constraint violated for column: k"):
        shard.compare_and_append(good.withColumns({"k": sql.lit(None).cast("string"), "_time": sql.lit(1)}), 1, 2)
    assert content(spark, shard) == {("a", 1, None): 1}


def test_append_gives_the_current_time_or_the_upper(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    data = spark.sql("SELECT 'a' AS k, 1L AS v")
    before = int(time.time() * 1_000)
    assert before <= shard.append(data).upper - 1 <= int(time.time() * 1_000)
    upper = shard.upper
    assert shard.append(data.withColumn("_diff", sql.lit(-1)), now_ms=lambda: 7).upper == upper + 1
    assert content(spark, shard, as_of=upper - 1) == {("a", 1): 1}
    assert content(spark, shard) == {}
    with pytest.raises(SchemaMismatch, match="leave it out"):
        shard.append(rows(spark))


def test_after_a_seal_nothing_is_written(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    shard.set_since(1, 7)
    with pytest.raises(Fenced):
        shard.seal(6)
    assert shard.seal(7) is not None
    assert shard.seal(7) is None
    assert shard.upper == EMPTY
    for attempt in (
        lambda: shard.compare_and_append(rows(spark, (0, 1, "a", 1)), 0, 5),
        lambda: shard.advance_upper(0, 5),
        lambda: shard.append(spark.sql("SELECT 'a' AS k, 1L AS v")),
    ):
        with pytest.raises(Sealed):
            attempt()
    assert shard.set_since(EMPTY, 7) is not None


def test_a_newer_epoch_fences_and_a_lesser_since_changes_nothing(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    assert shard.set_since(5, 3) == 1
    assert shard.set_since(5, 3) is None
    assert shard.set_since(2, 4) is None
    assert shard.set_since(6, 4) == 2
    with pytest.raises(Fenced):
        shard.set_since(9, 3)
    assert (shard.frontiers().since, shard.frontiers().epoch) == (6, 4)


def test_columns_are_added_and_widened_once(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path, "k VARCHAR(3), v INT, a ARRAY<SMALLINT>")
    old = spark.sql("SELECT 0L AS _time, 1L AS _diff, 'a' AS k, 1 AS v, array(1S) AS a")
    shard.compare_and_append(old, 0, 1)
    assert shard.evolve("k VARCHAR(3), v INT, a ARRAY<SMALLINT>") is None
    assert shard.evolve("k VARCHAR(3), v INT, a ARRAY<SMALLINT>, w STRING") is not None
    protocol = DeltaTable(shard.table.location).protocol()
    assert protocol.min_reader_version == 1  # widening is on only when something is widened
    wide = "k VARCHAR(3), v BIGINT, a ARRAY<INT>, w STRING"
    assert shard.evolve(wide) is not None
    assert shard.evolve(wide) is None
    assert shard.evolve("k VARCHAR(3), v INT, a ARRAY<SMALLINT>, w STRING") is None  # late: it goes further already
    with pytest.raises(SchemaMismatch, match="may only add"):
        shard.evolve("k VARCHAR(3), v STRING, a ARRAY<INT>, w STRING")
    shard.compare_and_append(old.withColumn("_time", sql.lit(1)), 1, 2)  # the old columns still do
    new = spark.sql("SELECT 2L AS _time, 1L AS _diff, 'b' AS k, 5000000000L AS v, array(70000) AS a, 'w' AS w")
    shard.compare_and_append(new, 2, 3)
    found = spark.read.format("delta").load(shard.table.location).orderBy("_time").collect()
    assert [tuple(row) for row in found] == [
        (0, 1, "a", 1, [1], None),
        (1, 1, "a", 1, [1], None),
        (2, 1, "b", 5_000_000_000, [70_000], "w"),
    ]
    with pytest.raises(InvalidRows, match="exceeds char/varchar"):
        shard.compare_and_append(new.withColumns({"k": sql.lit("long"), "_time": sql.lit(3)}), 3, 4)


def test_a_schema_is_read_alike_under_every_setting(spark: SparkSession) -> None:
    ddl = 't TIMESTAMP, order STRUCT<select: INT> COMMENT "whose it\'s", c CHAR(3)'
    expected = shard_schema(ddl)
    assert expected["order"].metadata == {"comment": "whose it's"}
    for settings in (
        {"spark.sql.timestampType": "TIMESTAMP_NTZ"},
        {"spark.sql.ansi.enabled": "true", "spark.sql.ansi.enforceReservedKeywords": "true"},
        {"spark.sql.ansi.enabled": "true", "spark.sql.ansi.doubleQuotedIdentifiers": "true"},
        {"spark.sql.legacy.charVarcharAsString": "true"},
        {"spark.sql.caseSensitive": "true"},
    ):
        with configured(spark, settings):
            assert shard_schema(ddl).json() == expected.json(), settings


def test_creating_twice_is_one_table_and_another_one_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    location, table_id = str(tmp_path / "new" / "shard"), str(uuid.uuid4())
    made = [create(spark, location, table_id, DDL) for _ in range(2)]
    assert made[1].frontiers().version == 0
    with pytest.raises(WrongTable, match=table_id):
        create(spark, location, str(uuid.uuid4()), DDL)
    with pytest.raises(WrongTable):
        Updates(spark, location, str(uuid.uuid4())).advance_upper(0, 1)
    plain = tmp_path / "plain"
    spark.sql("SELECT 1 AS a").write.format("delta").save(str(plain))
    with pytest.raises(WrongTable, match="does not begin with"):
        create(spark, str(plain), str(DeltaTable(plain).metadata().id), DDL)


def test_creators_that_race_make_one_table(spark: SparkSession, tmp_path: Path) -> None:
    location, table_id = str(tmp_path / "shard"), str(uuid.uuid4())
    errors: list[Exception] = []

    def creator() -> None:
        try:
            create(spark, location, table_id, DDL)
        except Exception as error:  # noqa: BLE001  # shown below
            errors.append(error)

    threads = [threading.Thread(target=creator) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert Updates(spark, location, table_id).frontiers().version == 0


def test_a_table_that_is_gone_or_replaced_meanwhile_is_not_written_to(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    shard.advance_upper(0, 5)
    location = Path(shard.table.location)

    def replace() -> None:
        shutil.rmtree(location)
        create(spark, str(location), str(uuid.uuid4()), DDL)

    with pytest.raises(WrongTable):
        shard.compare_and_append(rows(spark, (5, 1, "a", 1)), 5, 6, pause=replace)
    assert len(list((location / "_delta_log").glob("*.json"))) == 1

    gone = new_shard(spark, tmp_path)
    with pytest.raises(ShardMissing):
        gone.compare_and_append(rows(spark, (0, 1, "a", 1)), 0, 6, pause=lambda: shutil.rmtree(gone.table.location))
    assert not Path(gone.table.location).exists()
    with pytest.raises(ShardMissing):
        gone.advance_upper(0, 5)


def test_without_deltas_checksums_it_compares_all_the_same(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    shard.advance_upper(0, 5)
    shard.set_since(3, 2)
    for checksum in (Path(shard.table.location) / "_delta_log").glob("*.crc"):
        checksum.unlink()
    shard.table.gateway.delta.DeltaLog.clearCache()
    again = Updates(spark, shard.table.location, shard.table.table_id)
    assert known_transactions(again.table.begin().snapshot) is None
    assert (again.frontiers().upper, again.frontiers().since, again.frontiers().epoch) == (5, 3, 2)
    with pytest.raises(UpperMismatch):
        again.compare_and_append(rows(spark, (5, 1, "a", 1)), 5, 6, pause=lambda: shard.advance_upper(5, 7))


def test_a_log_that_is_damaged_is_said_to_be(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    for upper in range(3):
        shard.advance_upper(upper, upper + 1)
    (Path(shard.table.location) / "_delta_log" / f"{1:020}.json").unlink()
    with pytest.raises(LogUnreadable, match="cannot be read"):
        shard.advance_upper(3, 4)


def test_tables_and_stores_that_could_lose_a_commit_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    spark.sql(f"ALTER TABLE delta.`{shard.table.location}` SET TBLPROPERTIES ('{FORGETS}' = 'interval 1 day')")
    with pytest.raises(UnsafeShard, match=FORGETS):
        shard.advance_upper(0, 5)
    with pytest.raises(UnsafeShard, match=r"spark.delta.logStore.s3a.impl"):
        Updates(spark, "s3a://bucket/shard", "id")
    spark.conf.set("spark.delta.logStore.s3a.impl", "io.delta.storage.S3DynamoDBLogStore")
    try:
        Updates(spark, "s3a://bucket/shard", "id")
    finally:
        spark.conf.unset("spark.delta.logStore.s3a.impl")


class Faults:
    """Loses the answers of commits, or the commits themselves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *plan: str) -> None:
        self.plan = list(plan)
        self.real = transaction.put
        monkeypatch.setattr(transaction, "put", self.put)

    def put(self, *arguments: Any) -> int:
        fault = self.plan.pop(0) if self.plan else ""
        version = self.real(*arguments) if fault != "lose the commit" else 0
        if fault:
            raise Py4JError("the connection broke")
        return version


@pytest.mark.parametrize("fault", ["lose the answer", "lose the commit"])
def test_a_lost_answer_is_found_out(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    shard = new_shard(spark, tmp_path)
    Faults(monkeypatch, fault)
    shard.compare_and_append(rows(spark, (0, 1, "a", 1)), 0, 5)
    Faults(monkeypatch, fault)
    assert shard.set_since(3, 1) is not None
    Faults(monkeypatch, fault)
    assert shard.advance_upper(5, 7).upper == 7
    Faults(monkeypatch, fault)
    assert shard.seal(1) is not None
    assert content(spark, shard) == {("a", 1): 1}
    assert (shard.upper, shard.frontiers().since) == (EMPTY, 3)


def test_a_caller_who_tries_again_with_his_token_is_told_of_his_success(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = new_shard(spark, tmp_path)
    data = rows(spark, (0, 1, "a", 1))
    Faults(monkeypatch, *["lose the commit"] * 3)
    with pytest.raises(CommitUnknown, match="same token"):
        shard.compare_and_append(data, 0, 5, token="mine")
    first = shard.compare_and_append(data, 0, 5, token="mine")
    shard.advance_upper(5, 9)
    shard.seal(1)
    again = Updates(spark, shard.table.location, shard.table.table_id)
    assert again.compare_and_append(data, 0, 5, token="mine") == first
    assert again.advance_upper(0, 5, token="mine") == first
    with pytest.raises(Sealed):
        again.compare_and_append(data, 0, 5, token="other")
    assert content(spark, shard) == {("a", 1): 1}


def test_threads_that_race_have_one_winner_each_time(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    for upper in range(3):
        winners: list[str] = []
        together = threading.Barrier(2)

        def writer(name: str, upper: int, winners: list[str], together: threading.Barrier) -> None:
            try:
                shard.compare_and_append(
                    rows(spark, (upper, 1, name, upper)), upper, upper + 1, pause=lambda: together.wait(60)
                )
                winners.append(name)
            except UpperMismatch:
                pass

        threads = [threading.Thread(target=writer, args=(name, upper, winners, together)) for name in "AB"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 1
        assert content(spark, shard, as_of=upper).get((winners[0], upper)) == 1
    assert sum(content(spark, shard).values()) == 3


def test_a_lock_that_is_held_too_long_is_an_error(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    impatient = Updates(spark, shard.table.location, shard.table.table_id, lock_timeout_s=0.05)
    with shard.table.lock(), pytest.raises(LockTimeout, match=r"not free within 0.05 s"):
        impatient.advance_upper(0, 1)
    assert impatient.advance_upper(0, 1).upper == 1


def test_who_waits_too_long_for_the_appends_of_other_threads_is_told_so(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = new_shard(spark, tmp_path)
    monkeypatch.setattr(updates, "APPEND_WAIT_S", 0.05)
    refused: list[LockTimeout] = []

    def another() -> int:
        """Called while the first append has its turn."""
        if not refused:
            thread = threading.Thread(target=lambda: refused.append(impatient()))
            thread.start()
            thread.join()
        return 1

    def impatient() -> LockTimeout:
        with pytest.raises(LockTimeout, match=r"Other threads of this process .* Nothing of it was appended") as told:
            shard.append(spark.sql("SELECT 'b' AS k, 2L AS v"))
        return told.value

    shard.append(spark.sql("SELECT 'a' AS k, 1L AS v"), now_ms=another)
    assert "another process" not in str(refused[0])
    assert content(spark, shard) == {("a", 1): 1}

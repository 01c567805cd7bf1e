"""Query 2 against real Delta tables: what is in the logs is observed, once the state says where to look."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from deltalake import DeltaTable

from app.config import Config, StreamsConfig
from app.core.advancing import Observation
from app.core.duration import Duration
from app.core.frontier import EMPTY, Frontier
from app.streams import frontiers
from app.streams.frontiers import FrontierStream
from tests.e2e.harness import wait_until
from tests.e2e.ticks import ticks
from tests.shards.helpers import SEALED, BareLog, FakeState, append, txn

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

PATIENCE_S = 60.0
READERS = pytest.mark.parametrize("distribute_above", [50_000, 1], ids=["driver", "executors"])


class World:
    """A state, and a controller that writes what it is told into it."""

    def __init__(self, root: Path, *, distribute_above: int = 50_000) -> None:
        self.root = root
        self.state = FakeState(root)
        self.config = Config(
            root=str(root),
            streams=StreamsConfig(
                checkpoints=str(root / "checkpoints"),
                watch_interval=Duration(100),
                distribute_watching_above=distribute_above,
            ),
        )
        self.observed: list[Observation] = []
        self.errors: list[tuple[str, str | None]] = []
        self.confirming = True
        self._news = threading.Condition()

    def observe(self, observations: Sequence[Observation]) -> None:
        with self._news:
            self.observed += observations
            if self.confirming:
                for seen in observations:
                    self.state.confirm(seen.shard, seen.upper, seen.log_version)
            self._news.notify_all()

    def report(self, errors: Mapping[str, str | None]) -> None:
        with self._news:
            self.errors += errors.items()
            for shard, error in errors.items():
                self.state.change(shard, last_error=None if error is None else f"watch: {error}")
            self._news.notify_all()

    def wait(self, what: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(what, PATIENCE_S), (self.observed, self.errors)

    def wait_for(self, shard: str, upper: Frontier) -> Observation:
        self.wait(lambda: any(seen.shard == shard and seen.upper == upper for seen in self.observed))
        return next(seen for seen in self.observed if seen.shard == shard and seen.upper == upper)

    @contextmanager
    def watching(self, spark: SparkSession, **pacing: int) -> Iterator[StreamingQuery]:
        stream = FrontierStream(config=self.config, observe=self.observe, report=self.report, pacing=pacing)
        query = stream.start(spark)
        try:
            yield query
        finally:
            query.stop()
            stream.remove_checkpoint()
        assert stream.failure is None
        assert not any((self.root / "checkpoints").iterdir())


@READERS
def test_uppers_are_observed(spark: SparkSession, tmp_path: Path, distribute_above: int) -> None:
    world = World(tmp_path, distribute_above=distribute_above)
    append(tmp_path / "a", upper=5)
    append(tmp_path / "b", upper=7)
    world.state.add("a", tmp_path / "a")
    world.state.add("b", tmp_path / "b", upper=Frontier(7), log_version=0)
    with world.watching(spark):
        assert world.wait_for("a", Frontier(5)).log_version == 0
        append(tmp_path / "b", upper=9)
        assert world.wait_for("b", Frontier(9)).log_version == 1
        # A shard that is new, and whose table is made later still.
        world.state.add("c", tmp_path / "c")
        append(tmp_path / "c", upper=1)
        world.wait_for("c", Frontier(1))
        # A jump to [] is seen, and then nobody looks there any more.
        append(tmp_path / "a", upper=SEALED)
        world.wait_for("a", EMPTY)
        append(tmp_path / "a", upper=SEALED)
        append(tmp_path / "b", upper=20)
        assert world.wait_for("b", Frontier(20)).log_version == 2
    assert max(seen.log_version for seen in world.observed if seen.shard == "a") == 1
    assert world.errors == []


@READERS
def test_a_gap_is_bridged_and_errors_are_reported_once(
    spark: SparkSession, tmp_path: Path, distribute_above: int
) -> None:
    world = World(tmp_path, distribute_above=distribute_above)
    for upper in range(1, 6):
        append(tmp_path / "gap", upper=upper)
    DeltaTable(tmp_path / "gap").create_checkpoint()
    for version in range(4):
        (tmp_path / f"gap/_delta_log/{version:020d}.json").unlink()
    append(tmp_path / "damaged", upper=1)
    (tmp_path / f"damaged/_delta_log/{1:020d}.json").write_text('{"txn":{"appId":"holdfast.up')
    append(tmp_path / "other", upper=1)
    world.state.add("gap", tmp_path / "gap", upper=Frontier(1), log_version=0)
    world.state.add("damaged", tmp_path / "damaged", upper=Frontier(1), log_version=0)
    world.state.add("gone", tmp_path / "gone", upper=Frontier(1), log_version=7)
    world.state.add("other", tmp_path / "other", upper=Frontier(1), log_version=0)
    strange = BareLog(tmp_path / "strange")
    strange.commit({"commitInfo": {"timestamp": 2**63}}, txn("holdfast.upper", 6))
    world.state.add("strange", strange.location, log_version=0)
    with world.watching(spark, longest_pause_ms=200):
        assert world.wait_for("gap", Frontier(5)).log_version == 4
        assert world.wait_for("strange", Frontier(6)).log_version == 1
        world.wait(lambda: {shard for shard, _ in world.errors} == {"damaged", "gone"})
        for upper in (2, 3, 4):  # several ticks, in which the errors are there still
            append(tmp_path / "other", upper=upper)
            world.wait_for("other", Frontier(upper))
        assert len(world.errors) == 2
        append(tmp_path / "whole", upper=1)
        append(tmp_path / "whole", upper=8)
        (tmp_path / f"whole/_delta_log/{1:020d}.json").replace(tmp_path / f"damaged/_delta_log/{1:020d}.json")
        world.wait_for("damaged", Frontier(8))
        world.wait(lambda: ("damaged", None) in world.errors)
        # One that is as it was before, with nothing new in it.
        for _ in range(8):
            append(tmp_path / "back", upper=1)
        (tmp_path / "back").rename(tmp_path / "gone")
        world.wait(lambda: ("gone", None) in world.errors)
    assert len(world.errors) == 4
    assert [seen.log_version for seen in world.observed if seen.shard == "gap"] == [4]


def test_a_shard_that_was_quiet_for_long_is_still_noticed(spark: SparkSession, tmp_path: Path) -> None:
    world = World(tmp_path)
    append(tmp_path / "a", upper=1)
    append(tmp_path / "b", upper=1)
    world.state.add("a", tmp_path / "a", upper=Frontier(1), log_version=0)
    world.state.add("b", tmp_path / "b", upper=Frontier(1), log_version=0)
    with world.watching(spark, budget_ms=0, quiet_after_ms=0, longest_pause_ms=1_000):
        for upper in (2, 3, 4):
            append(tmp_path / "b", upper=upper)
            world.wait_for("b", Frontier(upper))
        append(tmp_path / "a", upper=SEALED)
        world.wait_for("a", EMPTY)


def test_what_spark_commits_is_observed_with_what_others_commit_between(spark: SparkSession, tmp_path: Path) -> None:
    world = World(tmp_path)
    rows = spark.createDataFrame([(1, 1)], "_time BIGINT, _diff BIGINT").write.format("delta").mode("append")
    rows.option("txnAppId", "holdfast.upper").option("txnVersion", "5").save(str(tmp_path / "a"))
    world.state.add("a", tmp_path / "a")
    with world.watching(spark):
        world.wait_for("a", Frontier(5))
        rows.option("txnAppId", "someone.else").option("txnVersion", "99").save(str(tmp_path / "a"))
        world.wait(lambda: world.observed[-1].log_version == 1)
        assert world.observed[-1].upper == Frontier(5)


def test_batches_run_only_when_something_is_new(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontiers, "ALIVE_EVERY_MS", 3_600_000)
    world = World(tmp_path)
    append(tmp_path / "a", upper=1)
    world.state.add("a", tmp_path / "a")
    with ticks(spark) as counted, world.watching(spark) as query:
        world.wait_for("a", Frontier(1))
        append(tmp_path / "a", upper=2)
        world.wait_for("a", Frontier(2))
        began = len(counted.began)
        wait_until(lambda: len(counted.began) >= began + 5, "it has looked several times more")
        moved = [progress["sources"][0] for progress in query.recentProgress]
        batches = [source for source in moved if source["startOffset"] != source["endOffset"]]
        assert len(batches) <= 3, "one for each, and a sign of life at its start"
    assert [seen.upper for seen in world.observed] == [1, 2]


def test_a_query_that_finds_nothing_gives_signs_of_life(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontiers, "ALIVE_EVERY_MS", 100)
    world = World(tmp_path)
    alive = threading.Event()

    @contextmanager
    def timed() -> Iterator[None]:
        yield
        if stream.batches >= 3:
            alive.set()

    stream = FrontierStream(config=world.config, observe=world.observe, report=world.report, timed=timed)
    query = stream.start(spark)
    try:
        assert alive.wait(PATIENCE_S)
    finally:
        query.stop()
        stream.remove_checkpoint()
    assert world.observed == []


def test_a_failure_of_who_is_told_ends_the_query_and_is_kept(spark: SparkSession, tmp_path: Path) -> None:
    world = World(tmp_path)
    append(tmp_path / "a", upper=1)
    world.state.add("a", tmp_path / "a")

    class Broken(Exception):
        pass

    def observe(_: Sequence[Observation]) -> None:
        raise Broken

    stream = FrontierStream(config=world.config, observe=observe, report=world.report)
    query = stream.start(spark)
    with pytest.raises(Exception, match="Broken"):
        query.awaitTermination(PATIENCE_S)
    assert isinstance(stream.failure, Broken)
    stream.remove_checkpoint()
    # Started anew, it finds it again: the state does not have it.
    with world.watching(spark):
        world.wait_for("a", Frontier(1))


def test_options_for_storage_are_not_shown(spark: SparkSession, tmp_path: Path) -> None:
    world = World(tmp_path)
    secret = "hunter2"
    world.config = msgspec.structs.replace(world.config, storage_options={"azure_storage_account_key": secret})
    source = FrontierStream(config=world.config, observe=world.observe, report=world.report)._source(spark)
    plan = source._jdf.queryExecution().toString()
    assert "storage_options=" in plan, "it does show the options"
    assert secret not in plan

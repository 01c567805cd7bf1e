"""Query 2 against real Delta tables: what is in the logs is observed, once the state says where to look."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from app.config import Config, StreamsConfig
from app.core.advancing import Observation
from app.core.duration import Duration
from app.core.frontier import EMPTY, Frontier
from app.streams.frontiers import FrontierStream
from tests.shards.helpers import SEALED, FakeState, append

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

PATIENCE_S = 60.0


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
        self.errors: list[tuple[str, str]] = []
        self.confirming = True
        self._news = threading.Condition()

    def observe(self, observations: Sequence[Observation]) -> None:
        with self._news:
            self.observed += observations
            if self.confirming:
                for seen in observations:
                    self.state.confirm(seen.shard, seen.upper, seen.log_version)
            self._news.notify_all()

    def report(self, shard: str, error: str) -> None:
        with self._news:
            self.errors.append((shard, error))
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


@pytest.mark.parametrize("distribute_above", [50_000, 1], ids=["driver", "executors"])
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

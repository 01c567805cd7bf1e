"""How many ticks of query 2 something took: counted in triggers, so that a slow machine does not matter."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from app.config import Config
from app.core.images import COLLECTION, Collection, decode_image
from app.state.journal import Journal
from tests.e2e.harness import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_IDLE = "spark.sql.streaming.noDataProgressEventInterval"


class Ticks(StreamingQueryListener):
    """When each trigger of query 2 began, in ms since 1970, also of those that found nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: set[str] = set()
        self.began: list[int] = []

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's interface
        if event.name.startswith("frontiers"):
            self._runs.add(str(event.runId))

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        self._note(event.progress.runId, event.progress.timestamp)

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        self._note(event.runId, event.timestamp)

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        pass

    def _note(self, run: Any, timestamp: str) -> None:
        if str(run) in self._runs:
            with self._lock:
                self.began.append(int(datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp() * 1000))

    def between(self, earlier_ms: int, later_ms: int) -> int:
        """How many began after one moment and before another."""
        wait_until(lambda: self.began and self.began[-1] > later_ms, "Spark has told of all ticks until then")
        with self._lock:
            return sum(earlier_ms < began <= later_ms for began in self.began)


@contextmanager
def ticks(spark: SparkSession) -> Iterator[Ticks]:
    """Counts the ticks of the queries that are started in this block."""
    before = spark.conf.get(_IDLE)
    listener = Ticks()
    spark.conf.set(_IDLE, "0")
    spark.streams.addListener(listener)
    try:
        yield listener
    finally:
        spark.streams.removeListener(listener)
        spark.conf.set(_IDLE, before)


def journalled_at(config: Config, collection: str, since: int) -> int:
    """When the first entry was written in which a collection has this since, or a later one."""
    journal = Journal.open(f"{config.state}/journal", storage_options={}, instance="a test", read_only=True)
    for entry in journal.read(0):
        for row in entry.rows:
            if (row.entity, row.key) == (COLLECTION, collection) and row.value is not None:
                image = decode_image(COLLECTION, row.value)
                assert isinstance(image, Collection)
                if image.since >= since:
                    return entry.at
    raise AssertionError(f"no entry has the since {since} of {collection}")


def committed_at(location: str, version: int) -> int:
    return Path(location, "_delta_log", f"{version:020}.json").stat().st_mtime_ns // 1_000_000

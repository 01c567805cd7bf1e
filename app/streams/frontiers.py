"""Query 2: what is new in the Delta logs of the shards, batch by batch, for whoever wants to know.

Where to look comes from the state, so the checkpoint is never needed again: every start has one of its own.
"""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from app.config import Config, texts
from app.core.advancing import Observation
from app.core.frontier import frontier_of
from app.streams.commit_source import FORMAT, CommitSource

log = logging.getLogger(__name__)

ALIVE_EVERY_MS: Final = 5_000
"""A batch at least so often, also if it is empty: so a query that hangs can be told from one that finds nothing."""
_MOST_SAID: Final = 5


class FrontierStream:
    """Starts the query and is its `foreachBatch`.

    `observe` gets all that a batch has found, in one call; what it does must be harmless to repeat. `report` gets what
    is wrong with the logs of shards, all of a batch in one call: when it begins, and None when they can be read again.
    An exception in either ends the query.
    """

    def __init__(
        self,
        *,
        config: Config,
        observe: Callable[[Sequence[Observation]], None],
        report: Callable[[Mapping[str, str | None]], None],
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
        pacing: Mapping[str, int] | None = None,
    ) -> None:
        self._config = config
        self._pacing = pacing or {}  # other numbers than the defaults of `Pacing`
        self._observe = observe
        self._report = report
        self._timed = timed
        self._unreadable: set[str] = set()
        self._checkpoint: str | None = None
        self.failure: BaseException | None = None
        self.batches = 0

    def start(self, spark: SparkSession) -> StreamingQuery:
        self.failure = None
        self._checkpoint = f"{self._config.streams.checkpoints.rstrip('/')}/frontiers-{uuid.uuid4().hex[:12]}"
        return (
            self._source(spark)
            .writeStream.queryName(self._checkpoint.rpartition("/")[2])  # see query 1
            .option("checkpointLocation", self._checkpoint)
            .foreachBatch(self._batch)
            .trigger(processingTime=f"{int(self._config.streams.watch_interval)} milliseconds")
            .start()
        )

    def _source(self, spark: SparkSession) -> DataFrame:
        spark.dataSource.register(CommitSource)
        return spark.readStream.format(FORMAT).options(**self._source_options(spark)).load()

    def _source_options(self, spark: SparkSession) -> dict[str, str]:
        return {
            "state": self._config.state,
            "storage_options": json.dumps(texts(self._config.storage_options)),
            "distribute_above": str(self._config.streams.distribute_watching_above),
            "partitions": str(spark.sparkContext.defaultParallelism),
            "alive_every_ms": str(ALIVE_EVERY_MS),
            **{f"watch.{name}": str(number) for name, number in self._pacing.items()},
        }

    def remove_checkpoint(self) -> None:
        """Nobody will need it again. On an object store it stays, for a rule of the bucket to remove."""
        if self._checkpoint is not None and self._checkpoint.startswith("/"):
            shutil.rmtree(self._checkpoint, ignore_errors=True)

    def _batch(self, frame: DataFrame, _: int) -> None:
        try:
            with self._timed():
                self._process(frame)
        except BaseException as error:  # Spark would keep only its text, and who supervises us must know what it was
            self.failure = error
            raise

    def _process(self, frame: DataFrame) -> None:
        observations = []
        report: dict[str, str | None] = {}
        for shard, upper, log_version, error in frame.collect():
            if error is None:
                if log_version >= 0:  # else it can be read again, and there is still nothing
                    observations.append(Observation(shard, frontier_of(upper), log_version))
                if shard in self._unreadable:
                    report[shard] = None
            elif shard not in self._unreadable:  # its text may be another one each time: once is enough
                report[shard] = error
        if observations:
            self._observe(observations)
            log.info("uppers observed shards=%s", len(observations))
        if report:
            self._say(report)
        self.batches += 1

    def _say(self, report: Mapping[str, str | None]) -> None:
        """Many shards may be concerned at once, if their store is away: one entry, and not a line for each."""
        failing = {shard: error for shard, error in report.items() if error is not None}
        for shard, error in islice(failing.items(), _MOST_SAID):
            log.warning("a shard's log cannot be read shard=%s error=%s", shard, error)
        if len(failing) > _MOST_SAID:
            log.warning("the logs of %d shards cannot be read; the table `shards` says which", len(failing))
        self._report(report)
        self._unreadable |= failing.keys()
        self._unreadable -= report.keys() - failing.keys()

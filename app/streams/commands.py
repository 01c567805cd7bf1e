"""Query 1: the command topic, batch by batch, through the controller.

The journal knows how far the topic was applied, so the source is always told where to start and its checkpoint is never
needed again: every start has one of its own. That way neither a lost checkpoint nor a topic that was deleted and made
anew, which Spark would read on from the old offset without a word, can lose a command.
"""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from collections.abc import Mapping, Sequence
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from app.clock import wall_ms
from app.config import Config
from app.controller import Controller
from app.failpoints import reach
from app.kafka import REQUEST_LIMIT_S, java_options
from app.records import Record, Topic
from app.replies import Replies
from app.streams.collecting import Collecting
from app.topics import Topics

log = logging.getLogger(__name__)

EARLIEST: Final = -2


class QueryLeft(Exception):
    """A query that did not end in time has a batch in hand, and must not apply it any more."""


class CommandStream:
    """Starts the query and is its `foreachBatch`."""

    def __init__(
        self,
        *,
        config: Config,
        controller: Controller,
        topics: Topics,
        replies: Replies,
        bootstrap_servers: str,
        limit_s: float = REQUEST_LIMIT_S,
    ) -> None:
        self._config = config
        self._controller = controller
        self._topics = topics
        self._replies = replies
        self._bootstrap_servers = bootstrap_servers
        self._limit_s = limit_s  # how long Spark waits for an answer of Kafka; it cannot be stopped while it does
        self._checkpoint: str | None = None
        self._is_left = False
        self.failure: BaseException | None = None
        self.batches = 0

    def start(self, spark: SparkSession, *, once: bool) -> StreamingQuery:
        self._topic = self._topics.commands()
        self._checkpoint = self._new_checkpoint(self._topic)
        options, most_records = self._source_options(), self._config.streams.max_commands_per_batch
        what = {
            "subscribe": self._topic.name,
            "startingOffsets": json.dumps({self._topic.name: self._starting_offsets(self._topic)}),
            "maxOffsetsPerTrigger": str(most_records),
        }
        self._collecting = Collecting(self._topic.name, options, most_records=most_records)
        source = spark.readStream.format("kafka").options(**options, **what).load()
        records = source.selectExpr(*self._collecting.columns())
        writer = (
            # A name of its own: one that did not end in time may still have the last one's (see `Queries.end`).
            records.writeStream.queryName(self._checkpoint.rpartition("/")[2])
            .option("checkpointLocation", self._checkpoint)
            .foreachBatch(self._batch)
        )
        return (writer.trigger(availableNow=True) if once else writer.trigger(processingTime="0 seconds")).start()

    def processed(self, query: StreamingQuery) -> dict[int, int]:
        """Per partition, how far the batches that are done with have read."""
        progress = query.lastProgress
        if progress is None:
            return {}
        (source,) = json.loads(progress.json)["sources"]  # pyspark would give its offsets as Python's text of a dict
        ends = (source["endOffset"] or {}).get(self._topic.name, {})
        return {int(partition): int(offset) for partition, offset in ends.items()}

    def _source_options(self) -> dict[str, str]:
        options = {
            "kafka.bootstrap.servers": self._bootstrap_servers,
            "kafka.isolation.level": "read_committed",
            # A poll returns at once when there is something; this is how long it waits at the end of a batch.
            "kafka.fetch.max.wait.ms": "10",
            "failOnDataLoss": "true",
        }
        given = java_options(self._config.kafka.options, limit_s=self._limit_s)
        return options | {f"kafka.{name}": value for name, value in given.items()}

    def _starting_offsets(self, topic: Topic) -> dict[str, int]:
        """Where the journal says; but where Kafka does not have what comes there, with what it has.

        Without this, the query would fail for ever, and nothing would bring these records back; or, once the topic has
        grown beyond that offset again, it would take new commands for ones that were applied. Inside a running query it
        is an error (`failOnDataLoss`), so that it comes here.
        """
        applied, start = self._controller.offsets(topic), dict[int, int]()
        expired, lost = dict[int, int](), dict[int, int]()
        for partition, (first, end) in self._topics.bounds().items():
            offset = applied.get(partition)
            start[partition] = EARLIEST if offset is None else min(max(offset, first), end)
            expired[partition] = 0 if offset is None else max(0, first - offset)
            lost[partition] = 0 if offset is None else max(0, offset - end)
        self._say_missing(topic, start, expired, lost)  # first: rather twice than not at all
        if moved := {partition: at for partition, at in start.items() if at != applied.get(partition, EARLIEST)}:
            self._controller.go_on_at(topic, moved)
        return {str(partition): offset for partition, offset in start.items()}

    def _say_missing(
        self, topic: Topic, start: Mapping[int, int], expired: Mapping[int, int], lost: Mapping[int, int]
    ) -> None:
        metrics = self._controller.metrics
        for partition, at in start.items():
            metrics.expired_commands.labels(str(partition)).inc(expired[partition])
            metrics.lost_records.labels(str(partition)).inc(lost[partition])
            if number := expired[partition]:
                log.error(
                    "Kafka deleted up to %d records before they were applied; it goes on after them. Keep records of "
                    "the command topic for longer than the controller may be away. topic=%s partition=%d offsets=%d-%d",
                    *(number, topic.name, partition, at - number, at - 1),
                )
            if number := lost[partition]:
                log.error(
                    "Kafka has lost the newest %d records that were applied: a broker lost power, or an election was "
                    "unclean. What they did stays. Commands after them are lost too: who has no reply must send again. "
                    "It goes on at the end of the topic. topic=%s partition=%d offsets=%d-%d",
                    *(number, topic.name, partition, at, at + number - 1),
                )

    def _new_checkpoint(self, topic: Topic) -> str:
        run = f"commands-{self._controller.epoch}-{topic.id[:12]}-{uuid.uuid4().hex[:8]}"
        return f"{self._config.streams.checkpoints.rstrip('/')}/{run}"

    def remove_checkpoint(self) -> None:
        """Nobody will need it again. On an object store it stays, for a rule of the bucket to remove."""
        if self._checkpoint is not None and self._checkpoint.startswith("/"):
            shutil.rmtree(self._checkpoint, ignore_errors=True)

    def _batch(self, frame: DataFrame, _: int) -> None:
        try:
            with self._controller.metrics.batch("commands"):
                self._process(frame)
        except BaseException as error:  # Spark would keep only its text, and who supervises us must know what it was
            self.failure = error
            raise

    def _process(self, frame: DataFrame) -> None:
        for records in self._collecting.parts(frame):
            self._apply(records)
        self.batches += 1

    def leave(self) -> None:
        """Whatever this query has in hand and did not finish is not applied: another one reads it again."""
        self._is_left = True

    def _apply(self, records: Sequence[Record]) -> None:
        if self._is_left:
            raise QueryLeft("This query was to end, and another one may have begun.")
        # If the topic is the one it was, all of these records are of it, for ids never come back. Otherwise Spark went
        # on at the next offset of another one: its records would be applied in the middle, and once more under its own
        # id. This is one request per batch, about 2 ms of 200.
        self._topics.commands()
        replies = self._controller.apply(self._topic, records)
        reach("before_replies")
        self._replies.send(replies)
        self._controller.metrics.replied((record.timestamp for record in records), wall_ms())
        reach("after_replies")

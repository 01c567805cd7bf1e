"""One life of the two queries: started together and ended together. Whatever ends one of them ends both."""

from __future__ import annotations

from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from app.config import Config
from app.controller import Controller
from app.replies import Replies
from app.streams.commands import CommandStream
from app.streams.frontiers import FrontierStream
from app.topics import Topics

_COMMANDS: Final = "commands"
_FRONTIERS: Final = "frontiers"


class Queries:
    def __init__(
        self,
        *,
        config: Config,
        controller: Controller,
        spark: SparkSession,
        topics: Topics,
        replies: Replies,
        bootstrap_servers: str,
        limit_s: float,
    ) -> None:
        self._controller = controller
        self._spark = spark
        self._commands = CommandStream(
            config=config,
            controller=controller,
            topics=topics,
            replies=replies,
            bootstrap_servers=bootstrap_servers,
            limit_s=limit_s,
        )
        self._frontiers = FrontierStream(
            config=config,
            observe=controller.observe,
            report=self._report,
            timed=lambda: controller.metrics.batch(_FRONTIERS),
        )
        self._running: dict[str, StreamingQuery] = {}

    def start(self, *, once: bool) -> None:
        """With `once` only query 1, which then ends by itself: to take what is on the topic and stop."""
        self._running[_COMMANDS] = self._commands.start(self._spark, once=once)
        if not once:
            self._controller.wait_for_tables()  # query 2 finds the shards there
            self._running[_FRONTIERS] = self._frontiers.start(self._spark)

    @property
    def are_active(self) -> bool:
        return all(query.isActive for query in self._running.values())

    @property
    def batches(self) -> int:
        return self._commands.batches + self._frontiers.batches

    def report_progress(self) -> None:
        for name, query in self._running.items():
            self._controller.metrics.progress(name, query.lastProgress)

    def end(self) -> None:
        """The batches in hand are finished, and no others begun."""
        for query in self._running.values():
            query.stop()
        self._commands.remove_checkpoint()
        self._frontiers.remove_checkpoint()

    def check(self) -> None:
        """Raises what ended a query, unless it ended as it should."""
        for stream in (self._commands, self._frontiers):
            if stream.failure is not None:
                raise stream.failure
        for query in self._running.values():
            if (error := query.exception()) is not None:
                raise error

    def _report(self, shard: str, error: str) -> None:
        self._controller.step("frontiers", lambda machine, now: machine.work_failed(now, shard, error))

"""One life of the two queries: started together and ended together. Whatever ends one of them ends both."""

from __future__ import annotations

import logging
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from app.config import Config
from app.controller import Controller
from app.replies import Replies
from app.shards.gateway import JVM_ERRORS, first_line
from app.streams.commands import CommandStream
from app.streams.frontiers import FrontierStream
from app.topics import Topics

log = logging.getLogger(__name__)

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
            report=controller.report,
            timed=lambda: controller.metrics.batch(_FRONTIERS),
        )
        self._running: dict[str, StreamingQuery] = {}

    def start(self, *, once: bool) -> None:
        """With `once` only query 1, which then ends by itself: to take what is on the topic and stop."""
        self._running[_COMMANDS] = self._commands.start(self._spark, once=once)
        if not once:
            self._controller.begin_watching()
            self._controller.wait_for_tables()  # query 2 finds the shards there
            self._running[_FRONTIERS] = self._frontiers.start(self._spark)

    @property
    def are_active(self) -> bool:
        return all(query.isActive for query in self._running.values())

    @property
    def batches(self) -> int:
        return self._commands.batches + self._frontiers.batches

    def processed(self) -> dict[int, int]:
        """How far query 1 has read each partition of the command topic."""
        return self._commands.processed(self._running[_COMMANDS])

    def report_progress(self) -> None:
        for name, query in self._running.items():
            self._controller.metrics.progress(name, query.lastProgress)

    def end(self, *, patience_s: float) -> None:
        """The batches in hand are finished, and no others begun.

        Not waited for without a limit: Kafka's client was seen to wait for ever for a broker that is gone, when it was
        to be closed. A query that is left behind does no harm: it begins no batch, and of one that it has in hand it
        applies nothing more.
        """
        for name, query in self._running.items():
            try:
                self._spark.conf.set("spark.sql.streaming.stopTimeout", str(int(patience_s * 1000)))
                query.stop()
            except (*JVM_ERRORS, OSError) as error:  # OSError: there is no JVM any more
                log.warning("a query did not end, limit_s=%.0f query=%s: %s", patience_s, name, first_line(error))
        self._commands.leave()
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

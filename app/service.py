"""The application: starts everything, supervises it, stops it, and says with its exit code how it ended.

0 stopped as asked · 2 usage or configuration · 3 another controller took over · 4 a broken invariant · 5 storage or
Kafka were gone for longer than `give_up_after`, or the JVM has ended.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from pyspark import InheritableThread
from pyspark.sql import SparkSession

from app.broker import EmbeddedBroker
from app.config import Config
from app.controller import Controller
from app.core.errors import BrokenInvariant, Corrupt
from app.heartbeat import Heartbeat
from app.kafka import REQUEST_LIMIT_S
from app.memory import MemoryInDoubt, Stopping
from app.operations import ShardOperations
from app.queries import Queries
from app.replies import Replies
from app.shards.gateway import text_of
from app.spark import jvm_has_ended
from app.state.errors import Fenced, NewerFormat, UnsafeStore
from app.topics import Topics
from app.work import Work

log = logging.getLogger(__name__)

EXIT_OK: Final = 0
EXIT_USAGE: Final = 2
EXIT_FENCED: Final = 3
EXIT_BROKEN: Final = 4
EXIT_GAVE_UP: Final = 5

_POLL_S: Final = 0.2
_SHORTEST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 10.0
_STOPPING_S: Final = 60.0
"""For the batch in hand, when we are asked to stop."""
_SHORTEST_STOP_S: Final = 5.0
_NO_JVM: Final = (
    "the JVM in which Spark ran has ended, and this process cannot have another; nothing is lost, start the controller "
    "again. Why it ended may be in spark.out; if it was for want of memory, raise `spark.driver.memory`"
)


class QueryEnded(Exception):
    """A query is no longer running, and nobody knows why. It is started anew."""


class Service:
    """A booted controller with its queries and its work, from start to stop."""

    def __init__(self, config: Config, spark: SparkSession, bootstrap_servers: str) -> None:
        self._config = config
        self._spark = spark
        self._bootstrap_servers = bootstrap_servers
        self._stop = threading.Event()
        self._wake = threading.Event()  # a piece of work has ended. Not set by `stop`, which a signal handler may call
        self.controller = Controller(config)
        operations = ShardOperations(spark, config, self.controller.metrics)
        self.work = Work(self.controller, operations, spawn=self._spawn, wake=self._wake.set)
        self._last_progress = time.monotonic()
        self._tables_wanted = 0
        self._booted = False
        self._memory_in_doubt = False
        self._said_ready = False

    def stop(self) -> None:
        """May be called from anywhere, also from a signal handler."""
        self._stop.set()

    def run(self, *, once: bool = False, on_ready: Callable[[], None] | None = None) -> int:
        """Until it is told to stop, or cannot go on; the exit code."""
        pause_s = _SHORTEST_PAUSE_S
        while not self._stop.is_set():
            progress = self._last_progress
            try:
                self._boot()
                with self._connections() as (topics, replies):
                    self._run_queries(topics, replies, once=once, on_ready=on_ready)
                break
            except Stopping:
                break
            except Exception as first:  # noqa: BLE001 - whatever it is: it is told apart below, and nothing is lost
                error = _cause(first)
                self._memory_in_doubt = True
                if self._stop.is_set():  # stopping interrupts what the query waits for, and that is no failure
                    break
                if (code := self._exit_code(error)) is not None:
                    self.work.stop()
                    return code
                pause_s = _SHORTEST_PAUSE_S if self._last_progress > progress else min(2 * pause_s, _LONGEST_PAUSE_S)
                wait_s = min(pause_s, self._left_s())
                log.warning("trying again in %.1f s, nothing is lost: %s", wait_s, _sentence(error))
                self._stop.wait(wait_s)
        if self._booted:
            self._close()
        return EXIT_OK

    def _exit_code(self, error: Exception) -> int | None:
        """How an error ends us; None if it may pass: then we try again until `give_up_after`."""
        if isinstance(error, Fenced):
            log.error("halted, another controller took over: %s", error)
            return EXIT_FENCED
        if isinstance(error, UnsafeStore | NewerFormat):
            log.error("%s", error)
            return EXIT_USAGE
        if isinstance(error, BrokenInvariant | Corrupt):
            log.critical("halted, the state breaks a rule; nothing more is touched: %s", error)
            return EXIT_BROKEN
        without_jvm = jvm_has_ended()
        if without_jvm or self._left_s() <= 0:
            if self._booted and (successor := self._successor()) is not None:
                return self._exit_code(successor)  # we may have slept through all of it
            if without_jvm:
                log.error("gave up, %s: %s", _NO_JVM, _sentence(error))
                return EXIT_GAVE_UP
            gone_s = time.monotonic() - self._last_progress
            log.error("gave up, nothing worked for %.0f s: %s", gone_s, _sentence(error))
            return EXIT_GAVE_UP
        return None

    def _successor(self) -> Fenced | None:
        """Who has replaced us, as far as the journal can be read."""
        try:
            self.controller.look()
        except Fenced as fenced:
            return fenced
        except Exception as error:  # noqa: BLE001 - then nobody knows, and we give up for what we know
            log.warning("the journal cannot be looked at: %s", _sentence(error))
        return None

    def _left_s(self) -> float:
        """Until we give up, unless something works."""
        return max(0.0, self._config.give_up_after / 1000 - (time.monotonic() - self._last_progress))

    def _boot(self) -> None:
        if not self._booted:
            self.controller.boot()
            self._booted = True
            self._last_progress = time.monotonic()  # it may have taken long, and was no failure

    @contextmanager
    def _connections(self) -> Iterator[tuple[Topics, Replies]]:
        with ExitStack() as stack:
            topics = self._topics()
            stack.callback(topics.close)
            topics.ensure()
            connect_s, limit_s = self._limits_s()
            replies = Replies(self._config.kafka, self._bootstrap_servers, connect_s=connect_s, limit_s=limit_s)
            stack.callback(replies.close)
            yield topics, replies

    def _run_queries(
        self, topics: Topics, replies: Replies, *, once: bool, on_ready: Callable[[], None] | None
    ) -> None:
        """One life of the queries; returns when they ended as they should, raises what ended them otherwise."""
        if self._memory_in_doubt:
            self.controller.recover()
            self._memory_in_doubt = False
        # Whatever ended the last life: the replies to the last entry may not have been sent.
        replies.send(self.controller.last_replies)
        queries = Queries(
            config=self._config,
            controller=self.controller,
            spark=self._spark,
            topics=topics,
            replies=replies,
            bootstrap_servers=self._bootstrap_servers,
            limit_s=self._limits_s()[1],
        )
        try:
            queries.start(once=once)
            if on_ready is not None and not self._said_ready:
                self._said_ready = True
                on_ready()
            with self._own_topics() as heartbeat_topics:
                self._supervise(queries, Heartbeat(self.controller, heartbeat_topics, queries.processed))
            queries.check()  # before the other one is stopped, which it would report as if it were the cause
            if not once and not self._stop.is_set():
                raise QueryEnded("A query ended, though nobody has asked it to, and it says of no failure.")
            self._take_no_more()
        finally:
            if self._stop.is_set():  # not after a failure: the next life goes on, also with `once`
                self._take_no_more()
            patience_s = _STOPPING_S if self._stop.is_set() else max(_SHORTEST_STOP_S, self._limits_s()[1])
            queries.end(patience_s=patience_s)

    def _take_no_more(self) -> None:
        """For good: there is no way back from here."""
        self.work.stop()
        self.controller.stop_taking_batches()

    @contextmanager
    def _own_topics(self) -> Iterator[Topics]:
        """The query's thread has its own connection; that of the heartbeat must not get into its way."""
        topics = self._topics()
        try:
            yield topics
        finally:
            topics.close()

    def _topics(self) -> Topics:
        connect_s, limit_s = self._limits_s()
        return Topics(self._config.kafka, self._bootstrap_servers, connect_s=connect_s, limit_s=limit_s)

    def _limits_s(self) -> tuple[float, float]:
        """How long to try to connect to Kafka, and how long to wait for an answer, so that we give up in time.

        A connection may live for long, so its limit does not depend on how much time is left now.
        """
        limit_s = max(1.0, min(REQUEST_LIMIT_S, self._config.give_up_after / 1000 / 4))
        return max(1.0, min(limit_s, self._left_s())), limit_s

    def _supervise(self, queries: Queries, heartbeat: Heartbeat) -> None:
        next_heartbeat = 0.0
        heartbeats = batches = 0
        while queries.are_active and not self._stop.is_set():
            self.controller.check()
            self.work.check()
            self.work.tick()
            if time.monotonic() >= next_heartbeat:
                heartbeat.beat()
                queries.report_progress()
                heartbeats += 1
                if heartbeats > 1:  # a query that fails at once, again and again, is no progress
                    self._progressed()
                next_heartbeat = time.monotonic() + self._config.streams.heartbeat / 1000
            if queries.batches > batches:
                batches = queries.batches
                self._progressed()
            self._wake.wait(_POLL_S)
            self._wake.clear()

    def _spawn(self, work: Callable[[], None], name: str) -> None:
        """A thread that does not keep the process alive: whatever it does is harmless to leave half done."""
        InheritableThread(target=work, name=name, daemon=True, session=self._spark).start()

    def _progressed(self) -> None:
        """Something works. But a controller whose tables stay behind for ever would not be one."""
        if self.controller.tables_reached >= self._tables_wanted:
            self._last_progress = time.monotonic()
            self._tables_wanted = self.controller.seq

    def _close(self) -> None:
        self.controller.close()
        if (failure := self.controller.failure) is not None:
            log.warning("the tables are behind the journal; the next boot brings them up: %s", _sentence(failure))


def _cause(error: Exception) -> Exception:
    """What left memory in doubt, instead of that it is."""
    cause = error.__cause__
    return cause if isinstance(error, MemoryInDoubt) and isinstance(cause, Exception) else error


def _sentence(error: BaseException) -> str:
    """One line of an error that may be a whole page of Java."""
    lines = text_of(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:500]


def handle_signals(service: Service) -> None:
    def stop(number: int, _: FrameType | None) -> None:
        log.info("stopping, the batch in hand is finished signal=%s", signal.Signals(number).name)
        service.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


@contextmanager
def broker(config: Config) -> Iterator[str]:
    """The address of Kafka: the configured one, or that of a broker of our own, which lives as long as we do."""
    if not config.embedded:
        yield config.kafka.bootstrap_servers
        return
    note = Path(config.root) / "broker.json"
    note.parent.mkdir(parents=True, exist_ok=True)
    with EmbeddedBroker(Path(config.root) / "kafka") as embedded:
        note.write_text(json.dumps({"bootstrap_servers": embedded.bootstrap_servers, "pid": os.getpid()}))
        try:
            yield embedded.bootstrap_servers
        finally:
            note.unlink(missing_ok=True)

"""The client's side of Kafka: a producer for commands, and one thread that reads replies and hands each to who waits.

Replies are read from the end of the topic as it was before the first command was sent, on all partitions and in no
consumer group: nothing is left behind on the broker, and no reply can have come before we listened.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import KafkaError, KafkaTimeoutError, MessageSizeTooLargeError, TopicAuthorizationFailedError

from app.client_errors import HoldfastError, NotAnswering
from app.kafka import KafkaOptionError, client_options, opened, unreachable

log = logging.getLogger(__name__)

Reply = dict[str, Any]

CONNECT_S: Final = 5.0
_POLL_MS: Final = 200
_LOOK_FOR_PARTITIONS_S: Final = 30.0
_MAX_REQUEST_BYTES: Final = 4 * 1024 * 1024  # the controller answers what is too large; a producer's default would not
_UNSENDABLE: Final = (MessageSizeTooLargeError, TopicAuthorizationFailedError)


class _Here(threading.local):
    """What is so in this thread."""

    may_wait = True


_here: Final = _Here()


def may_wait() -> bool:
    """Whether an answer may be awaited here."""
    return _here.may_wait


@contextmanager
def not_waiting() -> Iterator[None]:
    """For what the garbage collector ends: it runs in any thread, in the middle of anything, under any lock."""
    before, _here.may_wait = _here.may_wait, False
    try:
        yield
    finally:
        _here.may_wait = before


class Topics(NamedTuple):
    commands: str
    replies: str


class Position(NamedTuple):
    """Where Kafka put a command."""

    partition: int
    offset: int


class Pending:
    """A command under way. `position` is set when Kafka has it, `reply` when the controller answered."""

    def __init__(self) -> None:
        self.position: Position | None = None
        self.problem: BaseException | None = None  # why Kafka did not take it, the last time
        self.reply: Future[Reply] = Future()
        self.taken = threading.Event()  # by Kafka, or refused by it


class Wire:
    """Open from its making to `close`. Its methods may be called from any thread."""

    def __init__(
        self, servers: str, topics: Topics, options: Mapping[str, Any], *, name: str, timeout_s: float
    ) -> None:
        self._servers = servers
        self._topics = topics
        self._name = name
        self._waiting: dict[bytes, deque[Pending]] = {}
        self._later: SimpleQueue[bytes] = SimpleQueue()
        # Reentrant, as in `Holdfast`: the garbage collector may end a read, which then sends something, at any moment.
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        connect_s = max(1.0, min(CONNECT_S, timeout_s))
        self._common = {
            "bootstrap_servers": servers,
            "bootstrap_timeout_ms": int(connect_s * 1000),
            "metadata_max_age_ms": 30_000,
            "metrics_enabled": False,
            "allow_auto_create_topics": False,
            "client_id": name,
            **client_options(options),
        }
        self._timeout_s = timeout_s
        self._look_at = time.monotonic() + _LOOK_FOR_PARTITIONS_S
        try:
            problem = unreachable(servers)
        except KafkaOptionError as error:
            raise HoldfastError(str(error)) from None
        if problem is not None:
            raise NotAnswering(problem)
        try:
            self._consumer = self._listen()
            try:
                self._producer = self._open_producer()
            except BaseException:
                self._consumer.close()
                raise
        except KafkaError as error:
            raise NotAnswering(_unusable(servers, error)) from error
        self._thread = threading.Thread(target=self._run, name="holdfast-replies", daemon=True)
        self._thread.start()

    def submit(self, command_id: str | None, raw: bytes) -> Pending:
        """Sends bytes, and expects a reply to `command_id`. Of several under one id, each gets the next reply."""
        pending = Pending()
        if command_id is not None:
            with self._lock:
                self._waiting.setdefault(command_id.encode(), deque()).append(pending)
        self.post(raw, pending)
        return pending

    def post(self, raw: bytes, pending: Pending) -> None:
        """Sends the bytes, perhaps again: the same ones, so that the controller recognises them."""
        pending.taken.clear()
        try:
            # One key for all that this client sends: they stay in order also if the topic has several partitions.
            future = self._producer.send(self._topics.commands, value=raw, key=self._name.encode())
        except KafkaError as error:
            _failed(pending, error)
            return
        future.add_callback(lambda written: _written(pending, Position(written.partition, written.offset)))
        future.add_errback(lambda error: _failed(pending, error))

    def post_later(self, raw: bytes) -> None:
        """Has the bytes sent, within moments. It takes no lock and waits for nothing, wherever it is called."""
        self._later.put(raw)

    def forget(self, command_id: str, pending: Pending) -> None:
        """Nobody waits for it any more."""
        key = command_id.encode()
        with self._lock:
            queue = self._waiting.get(key)
            if queue is not None and pending in queue:
                queue.remove(pending)
                if not queue:
                    del self._waiting[key]

    def close(self) -> None:
        """Sends what is still to be sent, waiting a little, and ends the thread."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._send_later()
        self._producer.close(timeout=2)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2)

    def _open_producer(self) -> Any:
        request_ms = 10_000
        return opened(
            KafkaProducer,
            **{
                "max_request_size": _MAX_REQUEST_BYTES,
                "request_timeout_ms": request_ms,
                "delivery_timeout_ms": request_ms + max(5_000, int(self._timeout_s * 1000)),
                "max_block_ms": int(max(1.0, min(CONNECT_S, self._timeout_s)) * 1000),
                **self._common,
            },
        )

    def _listen(self) -> Any:
        consumer = opened(
            KafkaConsumer,
            **{
                # Out of range means that the topic was made anew: whatever is there came after we began to listen.
                "auto_offset_reset": "earliest",
                "enable_auto_commit": False,
                "group_id": None,
                **self._common,
            },
        )
        try:
            self._check_topics(consumer)
            partitions = self._partitions(consumer)
            consumer.assign(partitions)
            for partition, end in consumer.end_offsets(partitions).items():
                consumer.seek(partition, end)
        except BaseException:
            consumer.close()
            raise
        return consumer

    def _check_topics(self, consumer: Any) -> None:
        for topic in self._topics:
            if not consumer.partitions_for_topic(topic):
                raise NotAnswering(
                    f"There is no topic {topic!r} on {self._servers}: no controller has run with this broker yet, "
                    "or it was told other names of topics."
                )

    def _partitions(self, consumer: Any) -> list[Any]:
        numbers = consumer.partitions_for_topic(self._topics.replies)
        return [TopicPartition(self._topics.replies, number) for number in sorted(numbers)]

    def _run(self) -> None:
        with not_waiting():  # for an answer that only this thread would read
            while not self._stopped.is_set():
                self._read_some()
                self._send_later()
            self._consumer.close()

    def _send_later(self) -> None:
        with suppress(Empty):
            while True:
                self.post(self._later.get_nowait(), Pending())

    def _read_some(self) -> None:
        try:
            for records in self._consumer.poll(timeout_ms=_POLL_MS).values():
                for record in records:
                    self._hand_over(record.key, record.value)
            if time.monotonic() > self._look_at:
                self._take_new_partitions()
        except Exception as error:
            # Kafka's client reconnects by itself; what is missed meanwhile is sent again. Whatever else it is: if this
            # thread ended, no answer would be heard any more, and nobody would hear of that.
            log.warning(
                "reading replies failed, trying again error=%s", type(error).__name__,
                exc_info=not isinstance(error, KafkaError),
            )  # fmt: skip
            self._stopped.wait(0.5)

    def _take_new_partitions(self) -> None:
        self._look_at = time.monotonic() + _LOOK_FOR_PARTITIONS_S
        wanted = self._partitions(self._consumer)
        new = set(wanted) - self._consumer.assignment()
        if new:
            self._consumer.assign(wanted)
            self._consumer.seek_to_beginning(*new)

    def _hand_over(self, key: bytes | None, value: bytes | None) -> None:
        if key is None or value is None:
            return
        with self._lock:
            queue = self._waiting.get(key)
            if queue is None:
                return
            pending = queue.popleft()
            if not queue:
                del self._waiting[key]
        # It may be settled already, by a failure to send: that must not end the thread.
        with suppress(InvalidStateError):
            try:
                reply = json.loads(value)
            except ValueError:
                pending.reply.set_exception(HoldfastError("The reply is not JSON; something else writes to the topic."))
                return
            pending.reply.set_result(reply)


def _written(pending: Pending, position: Position) -> None:
    pending.position = position
    pending.taken.set()


def _failed(pending: Pending, error: BaseException) -> None:
    pending.problem = error
    pending.taken.set()
    if isinstance(error, _UNSENDABLE):
        with suppress(InvalidStateError):  # an answer came first, to an earlier attempt
            pending.reply.set_exception(HoldfastError(f"Kafka does not take the command: {error}"))


def _unusable(servers: str, error: KafkaError) -> str:
    if isinstance(error, KafkaTimeoutError):
        return (
            f"Something listens at {servers}, but does not answer as Kafka with these settings. "
            "Are `security.protocol` and the credentials right?"
        )
    return f"Kafka at {servers} cannot be used: {error}"

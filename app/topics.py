"""The two topics as the controller sees them: made if missing, known by their ids, asked how far they go."""

from __future__ import annotations

import logging
from typing import Any

from kafka import KafkaAdminClient, TopicPartition
from kafka.admin import OffsetSpec
from kafka.errors import KafkaConnectionError, KafkaError, TopicAlreadyExistsError
from kafka.protocol.consumer import IsolationLevel

from app.config import KafkaConfig
from app.kafka import REQUEST_LIMIT_S, client_options, unreachable
from app.records import Topic

log = logging.getLogger(__name__)


class TopicReplaced(Exception):
    """The command topic was deleted and made anew while we read it: start again on the new one."""


class _Admin(KafkaAdminClient):  # type: ignore[misc]  # kafka-python has no types
    """kafka-python's, but one that cannot connect leaves neither a thread nor files behind: we try again and again."""

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except BaseException:
            if hasattr(self, "_net"):
                self._closed = False  # it closes only what was opened as a whole
                self.close()
            raise


class Topics:
    """A connection for questions about the topics. Not for several threads at once.

    `connect_s` is how long to try to connect, `limit_s` how long to wait for an answer.
    """

    def __init__(
        self,
        kafka: KafkaConfig,
        bootstrap_servers: str,
        *,
        connect_s: float = REQUEST_LIMIT_S,
        limit_s: float = REQUEST_LIMIT_S,
    ) -> None:
        self._kafka = kafka
        self._commands: Topic | None = None
        if (problem := unreachable(bootstrap_servers)) is not None:
            raise KafkaConnectionError(problem)
        self._admin = _Admin(
            bootstrap_servers=bootstrap_servers,
            bootstrap_timeout_ms=int(connect_s * 1000),
            **client_options(kafka.options, limit_s=limit_s),
        )

    def close(self) -> None:
        self._admin.close()

    def ensure(self) -> None:
        """Creates what is missing. Records are kept as long as the cluster's default says."""
        wanted = {self._kafka.commands_topic: self._kafka.partitions, self._kafka.replies_topic: 1}
        there = set(self._admin.list_topics())
        for name, partitions in wanted.items():
            if name in there:
                continue
            try:
                self._admin.create_topics({name: {"num_partitions": partitions}}, wait_for_metadata=True)
                log.info("topic created name=%s partitions=%d", name, partitions)
            except TopicAlreadyExistsError:
                pass  # someone else was faster

    def commands(self) -> Topic:
        """The command topic. One that was deleted and made anew has another id: then TopicReplaced, for good.

        So whoever reads it notices, and whoever only looks at it now and then does too: Spark sees nothing new on a
        topic that has as many records as the old one had.
        """
        (described,) = self._admin.describe_topics([self._kafka.commands_topic])
        if described["error_code"]:
            raise KafkaError(f"Kafka cannot describe the topic {self._kafka.commands_topic!r}: {described}")
        found = Topic(self._kafka.commands_topic, _plain(described["topic_id"]))
        self._commands = self._commands or found
        if found != self._commands:
            raise TopicReplaced(f"The topic {found.name!r} was deleted and made anew.")
        return found

    def partitions(self) -> list[int]:
        (described,) = self._admin.describe_topics([self._kafka.commands_topic])
        return sorted(partition["partition_index"] for partition in described["partitions"])

    def bounds(self) -> dict[int, tuple[int, int]]:
        """Per partition of the command topic, the offsets of the first record that Kafka has, and after the last one.

        The last one that is committed: nothing after it is read before it is.
        """
        firsts, ends = self._offsets(OffsetSpec.EARLIEST), self._offsets(OffsetSpec.LATEST)
        self.commands()  # still the same one: so these are its bounds
        return {partition: (first, ends[partition]) for partition, first in firsts.items()}

    def ends(self) -> dict[int, int]:
        """Per partition of the command topic, the offset after its last committed record.

        Partitions with no record are left out: one whose records have all expired does not begin at 0.
        """
        return {partition: end for partition, (first, end) in self.bounds().items() if end > first}

    def _offsets(self, which: int) -> dict[int, int]:
        name = self._kafka.commands_topic
        wanted = {TopicPartition(name, partition): which for partition in self.partitions()}
        found = self._admin.list_partition_offsets(wanted, isolation_level=IsolationLevel.READ_COMMITTED)
        return {where.partition: answer.offset for where, answer in found.items()}


def _plain(topic_id: Any) -> str:
    return str(topic_id).replace("-", "")

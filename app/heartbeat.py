"""Time passes: leases end, tombstones are purged, sinces follow. The journal is looked at too: were we replaced?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from app.controller import Controller
from app.records import Topic
from app.topics import Topics


class _Mark(NamedTuple):
    at: int
    topic: Topic
    ends: dict[int, int]


class Heartbeat:
    """Leases end only when everything that was on the topic at their end is applied.

    A mark is a moment and how far the topic went then. When that much is applied the mark is reached, however much has
    come since, and the next is set: so leases end under constant load too.

    It is not part of query 2, though that has a heartbeat too: time has to pass when nothing is written, and a query
    that fails, or waits for a slow store, must not keep leases alive.
    """

    def __init__(self, controller: Controller, topics: Topics, processed: Callable[[], Mapping[int, int]]) -> None:
        """`processed`: how far query 1 has read each partition; what it found there is applied.

        The offset after the last record that was applied is not enough: a transaction of Kafka's ends with a marker
        that is no record, and after it nothing may come for long.
        """
        self._controller = controller
        self._topics = topics
        self._processed = processed
        self._mark: _Mark | None = None

    def beat(self) -> None:
        topic = self._topics.commands()
        if self._mark is None or self._mark.topic != topic:
            self._mark = _Mark(self._controller.now(), topic, self._topics.ends())
        applied, processed = self._controller.offsets(topic), self._processed()
        reached = all(
            applied.get(partition, 0) >= end or processed.get(partition, 0) >= end
            for partition, end in self._mark.ends.items()
        )
        self._controller.heartbeat(applied_until=self._mark.at if reached else None)
        if reached:
            self._mark = None

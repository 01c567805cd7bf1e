"""What is due when: a queue by time from which nothing needs to be taken out."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush


class Agenda:
    """Keys by time. An item counts only while `is_current(at, key)`; the others are dropped as they come up.

    So the state alone says what is due, and a step that is refused need not put anything back.
    """

    def __init__(self, is_current: Callable[[int, str], bool]) -> None:
        self._is_current = is_current
        self._heap: list[tuple[int, str]] = []
        self._limit = 64

    def add(self, at: int, key: str) -> None:
        heappush(self._heap, (at, key))
        if len(self._heap) > self._limit:
            self._heap = [item for item in self._heap if self._is_current(*item)]
            heapify(self._heap)
            self._limit = 2 * len(self._heap) + 64

    def due(self, until: int) -> list[str]:
        """The keys whose time is at or before `until`, the earliest first. They stay: see the class."""
        heap = self._heap
        items: dict[tuple[int, str], None] = {}
        while heap and heap[0][0] <= until:
            item = heappop(heap)
            if self._is_current(*item):
                items[item] = None
        for item in items:
            heappush(heap, item)
        return [key for _, key in items]

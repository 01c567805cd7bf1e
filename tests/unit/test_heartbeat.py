"""When time passes for leases: only as far as everything is applied that was on the topic then."""

from __future__ import annotations

from typing import cast

from app.controller import Controller
from app.heartbeat import Heartbeat
from app.records import Topic
from app.topics import Topics


class World:
    """A controller and a topic, as far as a heartbeat asks them."""

    def __init__(self) -> None:
        self.topic = Topic("commands", "first")
        self.end: dict[int, int] = {}
        self.applied: dict[int, int] = {}
        self.processed: dict[int, int] = {}
        self.time = 0
        self.passed: list[int | None] = []
        self._heartbeat = Heartbeat(cast(Controller, self), cast(Topics, self), lambda: self.processed)

    def beat(self) -> int | None:
        """Up to when everything is applied; None: nobody knows."""
        self.time += 10
        self._heartbeat.beat()
        return self.passed[-1]

    def commands(self) -> Topic:
        return self.topic

    def ends(self) -> dict[int, int]:
        return dict(self.end)

    def now(self) -> int:
        return self.time

    def offsets(self, _: Topic) -> dict[int, int]:
        return self.applied

    def heartbeat(self, *, applied_until: int | None) -> None:
        self.passed.append(applied_until)


def test_nothing_passes_before_the_backlog_of_that_moment_is_applied() -> None:
    world = World()
    assert world.beat() == 10, "an empty topic"
    world.end, world.applied = {0: 5, 1: 3}, {0: 5, 1: 2}
    assert world.beat() is None
    world.end = {0: 9, 1: 9}  # there is always something new, and it does not matter
    assert world.beat() is None
    world.applied = {0: 5, 1: 3}
    assert world.beat() == 20, "the moment at which the topic was looked at, not now"
    assert world.beat() is None, "the next moment has a backlog of its own"


def test_what_is_no_record_need_not_be_applied() -> None:
    """The marker with which a transaction ends comes after the last record, and may be all that comes."""
    world = World()
    world.end, world.applied = {0: 6}, {0: 5}
    assert world.beat() is None
    world.processed = {0: 6}
    assert world.beat() == 10


def test_a_topic_that_was_made_anew_begins_anew() -> None:
    world = World()
    world.end = {0: 5}
    assert world.beat() is None
    world.topic, world.end = Topic("commands", "second"), {}
    assert world.beat() == 20

"""A snapshot, and then every later change as it becomes final.

After a snapshot at `t`, and after every step that ends with `t`, the hold is at `t` or before. A merge under it moves
updates to a time of at most `t`, and the next step begins after `t`: so no update is seen twice, and none is missed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from pyspark.sql import DataFrame

from app.client_errors import CollectionMissing, NotAnswering
from app.clock import steady_ms
from app.core.frontier import EMPTY, MAX_TIME_GIVEN, value_of
from app.reading.arrow import Batches, batches
from app.reading.frames import at_time
from app.reading.planning import Plan
from app.reading.reading import Reading
from app.reading.running import Run

log = logging.getLogger(__name__)

DOWNGRADE_EVERY_MS: Final = 1_000
LOOK_FOR_DROP_MS: Final = 5_000


@dataclass(frozen=True, slots=True)
class Step:
    """Exactly the updates with `lower <= _time < upper`, all final. `upper` None: there will never be another.

    Of the snapshot, all updates before `upper`, summed, at the last time before it. Valid until the next step.
    """

    lower: int
    upper: int | None
    is_snapshot: bool
    frame: DataFrame = field(repr=False)
    _in_parts: Callable[[], DataFrame] = field(repr=False)

    @property
    def completed(self) -> int:
        """What `Subscription.completed` is when this step is done with. After the last one: the last time there is."""
        # Not `[]` itself: one must be able to go on from here.
        return MAX_TIME_GIVEN if self.upper is None else self.upper - 1

    def batches(self) -> Batches:
        """The same as `frame`, in Arrow batches, one small partition at a time."""
        return Batches(batches(self._in_parts()))


class Stopped(Exception):
    """The consumer wants no more."""


@dataclass(slots=True)
class Progress:
    """How far the consumer has come. `completed`: the last time whose changes it has done with."""

    completed: int | None = None
    stopped: bool = False


class Subscription(Run[Step]):
    """Asking for the next step says that the one before is done with: what it needed is let go then."""

    def __init__(self, run: Generator[Any, None, None], progress: Progress) -> None:
        super().__init__(run)
        self._progress = progress

    @property
    def completed(self) -> int | None:
        """Begin here to go on later: `subscribe(…, as_of=completed, snapshot=False)`. None: nothing is done yet."""
        return self._progress.completed

    def stop(self) -> None:
        """Ends the iteration, from any thread: there is no step after the one that is being waited for or worked on."""
        self._progress.stopped = True

    def close(self) -> None:
        """Lets the hold go. Not while another thread is waiting for a step: see `stop`."""
        super().close()


def run(
    opened: AbstractContextManager[Reading],
    progress: Progress,
    *,
    as_of: int | None,
    snapshot: bool,
    timeout_s: float | None,
    dropped: Callable[[], bool],
) -> Generator[Step | None, None, None]:
    """The steps, after a None with which it begins. Not a method: what it belongs to could not be forgotten then."""
    with opened as reading, reading.explained():
        yield None
        first = reading.guard.since if as_of is None else as_of
        idle = _Idle(reading, progress, dropped)
        try:
            idle()
            if snapshot:
                plan = reading.planner.at(first, timeout_s=timeout_s, idle=idle)
                yield _snapshot(reading, plan, first)
            progress.completed = first
            while True:
                idle()
                lower = progress.completed + 1
                plan = reading.planner.at(lower, timeout_s=timeout_s, idle=idle)
                reading.planner.check_since(lower - 1, plan)
                reading.guard.check()
                step = _changes(reading, plan, lower)
                yield step
                progress.completed = max(progress.completed, step.completed)
                if plan.upper == EMPTY:
                    return
        except Stopped:
            return


def _snapshot(reading: Reading, plan: Plan, as_of: int) -> Step:
    def frame(counted: DataFrame) -> DataFrame:
        return at_time(counted, as_of, reading.count_column)

    rows = frame(reading.snapshot(plan, as_of))
    return Step(0, as_of + 1, True, rows, lambda: frame(reading.snapshot_in_parts(plan, as_of)))


def _changes(reading: Reading, plan: Plan, lower: int) -> Step:
    last = None if plan.upper == EMPTY else int(plan.upper) - 1

    rows = reading.updates(plan, at_least=lower, at_most=last)
    in_parts = partial(reading.updates_in_parts, plan, at_least=lower, at_most=last)
    return Step(lower, value_of(plan.upper), False, rows, in_parts)


class _Idle:
    """What is done after a step and between two looks at the log: the hold follows the consumer, a drop is noticed."""

    def __init__(self, reading: Reading, progress: Progress, dropped: Callable[[], bool]) -> None:
        self._reading = reading
        self._progress = progress
        self._dropped = dropped
        self._downgraded_at = 0
        self._looked_at = steady_ms()
        self._is_dropped = False

    def __call__(self) -> None:
        if self._progress.stopped:
            raise Stopped
        if self._is_dropped:  # noticed before the last look at the log, of which everything was given
            raise CollectionMissing(
                f"{self._reading.collection!r} was dropped. All of its changes up to {self._progress.completed} were "
                "given. To follow a dropped collection, subscribe under a hold of your own, with `hold`."
            )
        self._follow()
        if steady_ms() - self._looked_at >= LOOK_FOR_DROP_MS:
            self._looked_at = steady_ms()
            self._is_dropped = self._dropped()

    def _follow(self) -> None:
        """Moves the hold on, not more often than it is of use to anybody."""
        completed = self._progress.completed
        if completed is None or steady_ms() - self._downgraded_at < DOWNGRADE_EVERY_MS:
            return
        guard = self._reading.guard
        try:
            if guard.since < completed:
                self._downgraded_at = steady_ms()
                guard.downgrade(completed)
        except NotAnswering as error:
            # A hold that stays behind is as good; whether it is still there is the renewals' matter, and `check`'s.
            log.warning("the hold could not be moved on, trying again collection=%s error=%s", guard.collection, error)

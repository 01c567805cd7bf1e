"""A snapshot, and then every later change as it becomes final.

After a snapshot at `t`, and after every step that ends with `t`, the hold is at `t` or before. A merge under it moves
updates to a time of at most `t`, and the next step begins after `t`: so no update is seen twice, and none is missed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from app.client_errors import CollectionMissing, NotAnswering
from app.clock import steady_ms
from app.core.frontier import EMPTY, value_of
from app.reading.arrow import batches
from app.reading.frames import at_time
from app.reading.planning import Plan
from app.reading.reading import Reading

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
    _small: Callable[[], DataFrame] = field(repr=False)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The same as `frame`, in Arrow batches, one partition at a time."""
        return batches(self._small())


class Stopped(Exception):
    """The consumer wants no more."""


@dataclass(slots=True)
class Progress:
    """How far the consumer has come. `completed`: the last time whose changes it has done with."""

    completed: int | None = None
    stopped: bool = False


class Subscription(Iterator[Step]):
    """Asking for the next step says that the one before is done with: what it needed is let go then."""

    def __init__(self, run: Generator[Step | None, None, None], progress: Progress) -> None:
        self._run = run
        self._progress = progress
        next(run)  # acquires the hold: only what was started can be ended

    @property
    def completed(self) -> int | None:
        """Begin here to go on later: `subscribe(…, as_of=completed, snapshot=False)`. None: nothing is done yet."""
        return self._progress.completed

    def stop(self) -> None:
        """Ends the waiting for the next step, from any thread: then the iteration ends."""
        self._progress.stopped = True

    def close(self) -> None:
        """Lets the hold go. Not while another thread is waiting for a step: see `stop`."""
        self._run.close()

    def __next__(self) -> Step:
        step = next(self._run)
        if step is None:
            raise AssertionError("only the start of a subscription is no step")
        return step

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
            if snapshot:
                plan = reading.planner.at(first, timeout_s=timeout_s, idle=idle)
                yield _snapshot(reading, plan, first)
            progress.completed = first
            while True:
                lower = progress.completed + 1
                plan = reading.planner.at(lower, timeout_s=timeout_s, idle=idle)
                reading.planner.check_since(lower - 1, plan)
                reading.guard.check()
                yield _changes(reading, plan, lower)
                if plan.upper == EMPTY:
                    return
                progress.completed = int(plan.upper) - 1
                idle.after_step()
        except Stopped:
            return


def _snapshot(reading: Reading, plan: Plan, as_of: int) -> Step:
    def frame(session: SparkSession | None = None) -> DataFrame:
        return at_time(reading.snapshot(plan, as_of, session), as_of, reading.count_column)

    return Step(0, as_of + 1, True, frame(), lambda: frame(reading.small_parts()))


def _changes(reading: Reading, plan: Plan, lower: int) -> Step:
    last = None if plan.upper == EMPTY else int(plan.upper) - 1

    def frame(session: SparkSession | None = None) -> DataFrame:
        return reading.updates(plan, at_least=lower, at_most=last, session=session)

    return Step(lower, value_of(plan.upper), False, frame(), lambda: frame(reading.small_parts()))


class _Idle:
    """What is done between two looks at the log: the hold follows the consumer, and a drop is noticed."""

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
        if self._is_dropped:  # noticed before the last look at the log, which found nothing new
            raise CollectionMissing(
                f"{self._reading.collection!r} was dropped. All of its changes up to {self._progress.completed} were "
                "given. To follow a dropped collection, subscribe under a hold of your own, with `hold`."
            )
        self.after_step()
        if steady_ms() - self._looked_at >= LOOK_FOR_DROP_MS:
            self._looked_at = steady_ms()
            self._is_dropped = self._dropped()

    def after_step(self) -> None:
        """Moves the hold on, not more often than it is of use to anybody."""
        completed = self._progress.completed
        if completed is None or steady_ms() - self._downgraded_at < DOWNGRADE_EVERY_MS:
            return
        guard = self._reading.guard
        try:
            if guard.since < completed:
                self._downgraded_at = steady_ms()
                guard.downgrade(completed)
            guard.pin_again()
        except NotAnswering as error:
            # A hold that stays behind is as good; whether it is still there is the renewals' matter, and `check`'s.
            log.warning("the hold could not be moved on, trying again collection=%s error=%s", guard.collection, error)

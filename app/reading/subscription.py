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
from types import TracebackType
from typing import Any, Final

from deltalake.exceptions import DeltaError
from pyspark.sql import DataFrame

from app.client_errors import CollectionMissing, HoldfastError, NotAnswering
from app.clock import steady_ms
from app.core.frontier import EMPTY, MAX_TIME_GIVEN, value_of
from app.reading.arrow import Batches
from app.reading.errors import ReadTimeout
from app.reading.frames import at_time
from app.reading.planning import Plan
from app.reading.reading import Reading
from app.reading.running import Run

log = logging.getLogger(__name__)

DOWNGRADE_EVERY_MS: Final = 1_000
DOWNGRADE_AT_LEAST_EVERY_MS: Final = 60_000
"""Also while nobody answers, which makes the pauses longer and longer."""
DOWNGRADE_TIMEOUT_S: Final = 2.0
"""Who waits for the next step must not wait for the sake of others, who want to merge what is before it."""
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
    _in_batches: Callable[[], Generator[Any, None, None]] = field(repr=False)

    @property
    def completed(self) -> int:
        """What `Subscription.completed` is when this step is done with. After the last one: the last time there is."""
        # Not `[]` itself: one must be able to go on from here.
        return MAX_TIME_GIVEN if self.upper is None else self.upper - 1

    def batches(self) -> Batches:
        """The same as `frame`, in Arrow batches, one small partition at a time."""
        return Batches(self._in_batches())


class Stopped(Exception):
    """The consumer wants no more."""


@dataclass(slots=True)
class Progress:
    """How far the consumer has come. `completed`: the last time whose changes it has done with.

    `check` raises `HoldLost` if what is read may be gone.
    """

    completed: int | None = None
    stopped: bool = False
    check: Callable[[], None] = lambda: None


class Subscription(Run[Step]):
    """Asking for the next step says that the one before is done with: what it needed is let go then.

    After a `ReadTimeout` it goes on: whoever asks again waits anew. Every other error ends it, and lets the hold go.
    """

    def __init__(self, run: Generator[Any, None, None], progress: Progress) -> None:
        super().__init__(run)
        self._progress = progress

    def __next__(self) -> Step:
        step: Step | ReadTimeout = super().__next__()
        if isinstance(step, Step):
            return step
        try:
            raise step
        finally:
            del step  # it knows this frame now, and with it the subscription

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception) and not isinstance(error, HoldfastError):
                self._progress.check()  # if the hold is lost, files may be missing: that is why
        finally:
            self.close()

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
) -> Generator[Step | ReadTimeout | None, None, None]:
    """The steps, after a None with which it begins. Not a method: what it belongs to could not be forgotten then.

    Between them, a `ReadTimeout` whenever waiting took too long: raised here, it would be the end.
    """
    with opened as reading, reading.explained():
        yield None
        progress.check = reading.guard.check
        first = reading.guard.since if as_of is None else as_of
        if not snapshot:
            progress.completed = first
        idle = _Idle(reading, progress, dropped)
        plan_at = partial(_plan_at, reading, idle, timeout_s)
        try:
            idle()
            plan = yield from plan_at(first, logging.WARNING)
            if snapshot:
                yield _snapshot(reading, plan, first)
            progress.completed = first
            while True:
                idle()
                lower = progress.completed + 1
                plan = yield from plan_at(lower, logging.INFO)
                reading.planner.check_since(lower - 1, plan)
                reading.guard.check()
                step = _changes(reading, plan, lower)
                yield step
                progress.completed = max(progress.completed, step.completed)
                if plan.upper == EMPTY:
                    return
        except Stopped:
            return


def _plan_at(
    reading: Reading, idle: Callable[[], None], timeout_s: float | None, as_of: int, level: int
) -> Generator[ReadTimeout, None, Plan]:
    """Waits until a time is complete, and longer if that is wanted after it took too long."""
    while True:
        try:
            return reading.planner.at(as_of, timeout_s=timeout_s, idle=idle, level=level)
        except ReadTimeout as error:
            late = [error]
        yield late.pop()  # not kept here: it will know the caller, who could not be forgotten then
        idle()


def _snapshot(reading: Reading, plan: Plan, as_of: int) -> Step:
    def frame(counted: DataFrame) -> DataFrame:
        return at_time(counted, as_of, reading.count_column)

    rows = frame(reading.snapshot(plan, as_of))
    return Step(0, as_of + 1, True, rows, lambda: reading.in_batches(frame(reading.snapshot_in_parts(plan, as_of))))


def _changes(reading: Reading, plan: Plan, lower: int) -> Step:
    last = None if plan.upper == EMPTY else int(plan.upper) - 1

    def in_batches() -> Generator[Any, None, None]:
        return reading.in_batches(reading.updates_in_parts(plan, at_least=lower, at_most=last))

    rows = reading.updates(plan, at_least=lower, at_most=last)
    return Step(lower, value_of(plan.upper), False, rows, in_batches)


class _Idle:
    """What is done after a step and between two looks at the log: the hold follows the consumer, a drop is noticed."""

    def __init__(self, reading: Reading, progress: Progress, dropped: Callable[[], bool]) -> None:
        self._reading = reading
        self._progress = progress
        self._dropped = dropped
        self._downgraded_at = 0
        self._downgrade_after_ms = DOWNGRADE_EVERY_MS
        self._looked_at = steady_ms()
        self._is_dropped = False

    def __call__(self) -> None:
        if self._progress.stopped:
            raise Stopped
        if self._is_dropped:  # noticed before the last look at the log, of which everything was given
            completed = self._progress.completed
            given = "None of its changes" if completed is None else f"All of its changes up to {completed}"
            raise CollectionMissing(
                f"{self._reading.collection!r} was dropped. {given} were given. To follow a dropped collection, "
                "subscribe under a hold of your own, with `hold`."
            )
        self._follow()
        if steady_ms() - self._looked_at >= LOOK_FOR_DROP_MS:
            self._looked_at = steady_ms()
            try:
                self._is_dropped = self._dropped()
            except (HoldfastError, DeltaError, OSError) as error:  # a store may fail for a moment
                log.warning(
                    "cannot see whether it was dropped, trying again collection=%s error=%s",
                    self._reading.collection, error,
                )  # fmt: skip

    def _follow(self) -> None:
        """Moves the hold on, not more often than it is of use to anybody."""
        completed = self._progress.completed
        if completed is None or steady_ms() - self._downgraded_at < self._downgrade_after_ms:
            return
        guard = self._reading.guard
        if guard.since >= completed:
            return
        try:
            guard.downgrade(completed, timeout=DOWNGRADE_TIMEOUT_S)
            self._downgrade_after_ms = DOWNGRADE_EVERY_MS
        except NotAnswering as error:
            # A hold that stays behind is as good; whether it is still there is the renewals' matter, and `check`'s.
            log.warning("the hold could not be moved on, trying again collection=%s error=%s", guard.collection, error)
            self._downgrade_after_ms = min(2 * self._downgrade_after_ms, DOWNGRADE_AT_LEAST_EVERY_MS)
        self._downgraded_at = steady_ms()

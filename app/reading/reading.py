"""A read under way: one collection, one guard, and the DataFrames of the versions that are planned."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession

from app.client_errors import HoldfastError
from app.reading.arrow import batches, parts_for, session_for
from app.reading.errors import ShardUnreadable, wrong_count
from app.reading.frames import VersionTooOld, consolidated, each_once, updates
from app.reading.planning import Plan, Planner
from app.reading.stats import parts_of

MOST_PLANS: Final = 10


class Reading:
    """Makes frames in the user's session, or in one with small partitions if they are to become Arrow batches."""

    def __init__(self, spark: SparkSession, planner: Planner, count_column: str) -> None:
        self.spark = spark
        self.planner = planner
        self.guard = planner.guard
        self.collection = planner.source.collection
        self.count_column = count_column

    def snapshot(self, plan: Plan, as_of: int, session: SparkSession | None = None) -> DataFrame:
        """Each row with its count."""
        return consolidated(self.updates(plan, at_most=as_of, session=session), self.count_column)

    def latest(self, plan: Plan, as_of: int) -> DataFrame:
        return each_once(self.updates(plan, at_most=as_of))

    def updates(
        self,
        plan: Plan,
        *,
        at_least: int | None = None,
        at_most: int | None = None,
        session: SparkSession | None = None,
    ) -> DataFrame:
        """The updates from one time up to another, both included. What is asked for must be complete in the plan."""
        readable = at_most if at_least is None else at_least - 1  # a merge up to here changes nothing of it
        return self._built(
            lambda plan: updates(
                session or self.spark, plan, self.planner.source.schema, at_least=at_least, at_most=at_most
            ),
            plan,
            readable,
        )

    # The same for Arrow batches: in small partitions, of the version that was planned last.

    def snapshot_in_parts(self, plan: Plan, as_of: int) -> DataFrame:
        parts = parts_for(parts_of(self.planner.files(), as_of))
        return self.snapshot(plan, as_of, session_for(self.spark, parts))  # summing shuffles the rows anyway

    def updates_in_parts(self, plan: Plan, *, at_least: int | None = None, at_most: int | None = None) -> DataFrame:
        parts = parts_for(parts_of(self.planner.files(), at_most, at_least=at_least))
        rows = self.updates(plan, at_least=at_least, at_most=at_most, session=session_for(self.spark, parts))
        return rows.repartition(parts.number) if parts.spread else rows

    def _built(self, build: Callable[[Plan], DataFrame], plan: Plan, readable: int | None) -> DataFrame:
        for _ in range(MOST_PLANS):
            try:
                return build(plan)
            except VersionTooOld:
                # Whatever is complete in a version is the same in every later one, while it is held.
                plan = self.planner.newest()
                if readable is not None:
                    self.planner.check_since(readable, plan)
        raise ShardUnreadable(f"The newest version of {plan.location} is always too old for Delta's time travel.")

    def in_batches(self, frame: DataFrame) -> Generator[Any, None, None]:
        """The schema, and then the batches."""
        with self.explained():
            for each in batches(frame):
                self.guard.check()
                yield each

    @contextmanager
    def explained(self) -> Iterator[None]:
        """What went wrong inside, said as what it is; and if nothing did, whether the hold was there to the end."""
        try:
            yield
        except HoldfastError:
            raise
        except Exception as error:
            self.guard.check()  # if the hold is lost, files may be missing: that is why
            if (refused := wrong_count(self.collection, error)) is not None:
                raise refused from error
            raise
        self.guard.check()

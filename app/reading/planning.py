"""Which version of a shard's table is read: one that has every update up to the wanted time, and can still tell it.

Under a hold that was acquired before the first look here (see `guard`): each look takes the newest version, which is
not below the one that the hold has recorded. Upper and physical since are those *of that version*.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from app.client_errors import InvalidUsage
from app.core.frontier import EMPTY, ZERO, Frontier
from app.reading.catalog import Place, Source
from app.reading.errors import ReadTimeout, ShardUnreadable, before_since
from app.reading.guard import Guard
from app.shards.commit_log import SINCE, UPPER

log = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 0.5
SAY_FIRST_S: Final = 1.0
SAY_EVERY_S: Final = 5.0
LOOK_AGAIN_AFTER_S: Final = (0.2, 1.0)
"""When a log that was read before is tried again if it cannot be read: a store may fail for a moment."""


class Plan(NamedTuple):
    """A version of a table, with its frontiers. `version` None: there is no table yet, and so no updates."""

    location: str
    version: int | None
    upper: Frontier
    since: Frontier


class ShardLog:
    """The log of one table, followed."""

    def __init__(self, place: Place, options: Mapping[str, str]) -> None:
        self._place = place
        self._options = dict(options)
        self._table: DeltaTable | None = None

    def look(self) -> Plan:
        """The newest version."""
        for pause_s in (*LOOK_AGAIN_AFTER_S, None):
            try:
                table = self._newest()
                break
            except (DeltaError, OSError) as error:
                reason = (str(error).splitlines() or ["no reason given"])[0]
                if pause_s is None or self._table is None:  # who never could read it wants to hear of it
                    raise ShardUnreadable(f"The table at {self._place.location} cannot be read: {reason}") from error
                log.warning("could not be read, trying again table=%s error=%s", self._place.location, reason)
                time.sleep(pause_s)
        if table is None:
            return Plan(self._place.location, None, ZERO, ZERO)
        return Plan(self._place.location, table.version(), _recorded(table, UPPER), _recorded(table, SINCE))

    def files(self) -> Any:
        """The files of the version that was looked at last, as an Arrow table; None if there is no table."""
        return None if self._table is None else self._table.get_add_actions(flatten=True)

    def _newest(self) -> DeltaTable | None:
        if self._table is not None:
            self._table.update_incremental()
            return self._table
        try:
            table = DeltaTable(self._place.location, storage_options=self._options)
        except TableNotFoundError:
            if not self._place.seen:
                return None  # created, and its table will be
            raise ShardUnreadable(
                f"The table at {self._place.location} is gone. It was there before: someone deleted it."
            ) from None
        if self._place.table_id and str(table.metadata().id) != self._place.table_id:
            raise ShardUnreadable(
                f"At {self._place.location} there is another Delta table (its id is {table.metadata().id}) than that "
                f"of the shard {self._place.shard} ({self._place.table_id})."
            )
        self._table = table
        return table


class Planner:
    """Plans reads of one collection under one guard."""

    def __init__(self, source: Source, guard: Guard, options: Mapping[str, str]) -> None:
        if source.place.format != "updates":
            raise InvalidUsage(
                f"{source.collection!r} is a plain Delta table (format {source.place.format!r}): read it with Spark, "
                f"from {source.place.location}, by timestamp."
            )
        self.source = source
        self.guard = guard
        self._own = ShardLog(source.place, options)
        self._logs = [ShardLog(place, options) for place in source.logs]

    def newest(self) -> Plan:
        """The newest version, with the upper of the collection."""
        # The logs first: what they say is complete is in the table by then. The other way round an update that is
        # written between the two looks would be missing below the upper.
        through = max((each.look().upper for each in self._logs), default=ZERO)
        plan = self._own.look()
        return plan._replace(upper=plan.upper.join(through))

    def files(self) -> Any:
        return self._own.files()

    def at(
        self, as_of: int, *, timeout_s: float | None, idle: Callable[[], None] = lambda: None, level: int = logging.INFO
    ) -> Plan:
        """A version that is complete at a time; waits for it. `idle` is called between two looks.

        It says that it waits, on a `level`: who waits for one read wants to see it in a notebook as well.
        """
        begun = time.monotonic()
        say_at = begun + SAY_FIRST_S
        pause_s = FIRST_PAUSE_S
        self.guard.pin_again()
        while (plan := self.newest()).upper <= as_of:
            self.guard.check()
            now = time.monotonic()
            if timeout_s is not None and now - begun >= timeout_s:
                raise self._too_late(as_of, plan.upper, now - begun)
            if now >= say_at:
                say_at = now + SAY_EVERY_S
                self._say(level, as_of, plan.upper, now - begun)
            idle()
            self.guard.pin_again()
            left_s = pause_s if timeout_s is None else begun + timeout_s - time.monotonic()
            time.sleep(max(0.0, min(pause_s, left_s)))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self.check_since(as_of, plan)
        return plan

    def check_since(self, as_of: int, plan: Plan) -> None:
        if plan.since > as_of:
            self.guard.check()  # if the hold was lost, that is why
            raise before_since(self.source.collection, as_of, int(plan.since))

    def _say(self, level: int, as_of: int, upper: Frontier, waited_s: float) -> None:
        log.log(
            level, "waiting collection=%s as_of=%d upper=%d behind=%d waited_s=%.0f",
            self.source.collection, as_of, upper, as_of - upper + 1, waited_s,
        )  # fmt: skip

    def _too_late(self, as_of: int, upper: Frontier, waited_s: float) -> ReadTimeout:
        return ReadTimeout(
            f"{self.source.collection!r} is to be read at {as_of}, but it is written only up to {int(upper)} (its "
            f"upper), after {waited_s:.1f} s of waiting. Does its writer run? Read at an earlier time, or wait longer, "
            "with `timeout`.",
            {"as_of": as_of, "upper": int(upper)},
        )


def _recorded(table: DeltaTable, name: str) -> Frontier:
    version = table.transaction_version(name)
    if version is not None and not 0 <= version <= EMPTY:
        raise ShardUnreadable(f"{name} in the log of {table.table_uri} is {version}, which is no frontier.")
    return Frontier(version or 0)

"""How much there is to read, from the log alone: nothing of the data is opened."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import pyarrow as pa

from app.core.frontier import value_of
from app.reading.planning import Plan
from app.shards.columns import TIME

_COLUMNS: Final = ("path", "size_bytes", "num_records", f"min.{TIME}", f"max.{TIME}")


class PartStats(NamedTuple):
    """A file. What its writer did not put into the log is None."""

    path: str
    bytes: int
    updates: int | None
    least_time: int | None
    greatest_time: int | None


class SnapshotStats(NamedTuple):
    """What a read at `as_of` has to go through: updates, before they are summed.

    The log knows how many updates a file has and its first and last time. So of a file that goes on after `as_of` only
    bounds are known. `most_updates` None: some writer did not count.
    """

    as_of: int
    version: int | None
    since: int
    upper: int | None
    files: int
    bytes: int
    least_updates: int
    most_updates: int | None

    @property
    def updates(self) -> int | None:
        """How many there are, if the log knows it exactly."""
        return self.most_updates if self.least_updates == self.most_updates else None


def parts_of(files: Any, at_most: int | None, *, at_least: int | None = None) -> list[PartStats]:
    """The files that a read of the updates from one time up to another, both included, has to open."""
    if files is None:
        return []
    table = pa.table(files)
    rows = table.select([name for name in _COLUMNS if name in table.column_names]).to_pylist()
    parts = [
        PartStats(
            row["path"],
            row["size_bytes"],
            row.get("num_records"),
            row.get(f"min.{TIME}"),
            row.get(f"max.{TIME}"),
        )
        for row in rows
    ]
    return sorted(part for part in parts if _has_any(part, at_most, at_least))


def _has_any(part: PartStats, at_most: int | None, at_least: int | None) -> bool:
    """Whether a file may have updates at these times, as far as the log knows."""
    too_late = at_most is not None and part.least_time is not None and part.least_time > at_most
    too_early = at_least is not None and part.greatest_time is not None and part.greatest_time < at_least
    return not too_late and not too_early


def summary(plan: Plan, parts: Iterable[PartStats], as_of: int) -> SnapshotStats:
    parts = list(parts)
    counts = [part.updates for part in parts]
    return SnapshotStats(
        as_of=as_of,
        version=plan.version,
        since=int(plan.since),
        upper=value_of(plan.upper),
        files=len(parts),
        bytes=sum(part.bytes for part in parts),
        least_updates=sum(_least(part, as_of) for part in parts),
        most_updates=None if None in counts else sum(count or 0 for count in counts),
    )


def _least(part: PartStats, as_of: int) -> int:
    """How many of a file's updates are certainly at or before a time."""
    if part.updates and part.greatest_time is not None and part.greatest_time <= as_of:
        return part.updates
    return 1 if part.updates and part.least_time is not None else 0

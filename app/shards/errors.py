"""What can go wrong with a shard's table. Four kinds that never mix.

The caller's mistake: `InvalidRows`, `SchemaMismatch`, `InvalidBounds`. An ordinary mismatch, with the actual value:
`UpperMismatch`, `Sealed`, `Conflict`. The wrong place: `ShardMissing`, `WrongTable`, `UnsafeShard`. A failure outside:
`LockTimeout`, `LogUnreadable`, and `CommitUnknown`, of which nobody knows whether it happened. Being replaced is
`app.state.errors.Fenced`.
"""

from __future__ import annotations

from app.core.frontier import Frontier


class ShardError(Exception):
    """Whatever could not be done to a shard. Unless it is `CommitUnknown`, nothing was committed."""


class ShardMissing(ShardError):
    """There is no Delta table at the shard's location: never created, or purged."""


class WrongTable(ShardError):
    """Another Delta table is where the shard's should be. It is not touched."""


class LogUnreadable(ShardError):
    """The table's log cannot be read: the store does not answer, or the log is damaged, or just being purged."""


class UnsafeShard(ShardError):
    """On this store, or with these table properties, a commit of ours could be lost or forgotten."""


class InvalidBounds(ShardError):
    """The frontiers of a call cannot be: the new upper must be above the expected one, and none is negative."""


class InvalidRows(ShardError):
    """A row lies outside of the bounds of its append, or breaks a rule of its column."""


class SchemaMismatch(ShardError):
    """The columns of the rows are not those of the shard."""


class UpperMismatch(ShardError):
    """The upper is not the expected one: someone else has written. `actual` is where it is."""

    def __init__(self, actual: Frontier, message: str) -> None:
        super().__init__(message)
        self.actual = actual

    def __reduce__(self) -> tuple[type[UpperMismatch], tuple[Frontier, str]]:
        return type(self), (self.actual, str(self))


class Sealed(ShardError):
    """The upper is `[]`: nothing can be written any more, ever."""


class Conflict(ShardError):
    """Someone else's commit changed what ours relied on. Nothing of ours was committed: look again and decide anew."""


class TableChanged(Conflict):
    """The conflicting commit changed the schema, the properties or the protocol of the table."""


class LockTimeout(ShardError):
    """The lock of a local shard was not to be had in time, or that which lets threads append one after the other."""


class CommitUnknown(ShardError):
    """The commit failed in a way that does not tell whether it landed, and it is not in the log, so far."""

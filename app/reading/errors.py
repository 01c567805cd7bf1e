"""What can go wrong with a read beyond the error codes of commands, and what an error inside Spark means."""

from __future__ import annotations

import re
from typing import Final

from app.client_errors import HoldfastError, InvalidUsage, ReadBeforeSince
from app.core.frontier import Frontier

MANY: Final = "[HOLDFAST_COUNT]"
"""Begins the message with which a plan fails that found a row more than once, or less than not at all."""
_COUNTED: Final = re.compile(rf"{re.escape(MANY)} (-?[0-9]+)")


class ReadTimeout(HoldfastError):
    """The collection is not written up to the wanted time yet, and waiting for it took too long."""

    code = "READ_TIMEOUT"

    @property
    def as_of(self) -> int | None:
        """The time that was to be read."""
        return self.details.get("as_of")

    @property
    def upper(self) -> int | None:
        """Every update before this one is there."""
        return self.details.get("upper")


class ShardUnreadable(HoldfastError):
    """The table in which the data should be is missing, damaged, or another one."""

    code = "SHARD_UNREADABLE"


def before_since(collection: str, as_of: int, since: int) -> HoldfastError:
    return ReadBeforeSince(
        f"{collection!r} can be read from {since} on, not at {as_of}: what was before may be merged away. Read at "
        f"{since} or later; who needs earlier times takes a hold while they are there, or sets a read policy.",
        {"earliest": {collection: since}, "as_of": as_of},
    )


def nothing_readable(collection: str, since: int, upper: Frontier) -> HoldfastError:
    return ReadBeforeSince(
        f"No time of {collection!r} can be read now: its since is {since}, and it is written only up to {upper}. "
        f"Wait until its upper has passed {since}; snapshot(…, as_of={since}) does.",
        {"earliest": {collection: since}},
    )


def wrong_count(collection: str, error: BaseException) -> HoldfastError | None:
    """The refusal, if a plan failed because a row is not there exactly once."""
    # Other errors may show the whole plan, with the beginning of the message in it, but no count.
    found = _COUNTED.search(str(error))
    if found is None:
        return None
    count = int(found[1])
    return InvalidUsage(
        f"A row of {collection!r} is there {count} times, and snapshot_latest is for collections whose rows are there "
        "once. Use snapshot, which gives each row with its count.",
        {"count": count},
    )

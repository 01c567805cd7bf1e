"""One piece of work on a shard: what whoever does it is told, what there is to do, and what is said afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from app.core.images import Shard
from app.core.parameters import Parameters
from app.core.shard_work import Merge


class Job(msgspec.Struct, frozen=True):
    """A shard as the journal has it, and what whoever works on it needs to know beside."""

    shard: Shard
    schema: str | None
    epoch: int
    clean_up_limit: int | None
    parameters: Parameters
    now: int


class Tended(NamedTuple):
    """What is left after a look at a shard.

    When to come again though nothing changes, if at all; the version up to which the shard's log was read; and, if dead
    files are kept because someone may need them, the version that all who do must have reached for one of them to go.
    """

    again_at: int | None = None
    log_version: int = -1
    pinned: int | None = None


class Operations(Protocol):
    """What can be done to a shard. Each may be repeated, and finds out by itself what is done already."""

    def create(self, job: Job) -> None: ...

    def evolve(self, job: Job) -> None: ...

    def tend(self, job: Job, merged: Callable[[Merge], None]) -> Tended:
        """Merges and cleans up, as far as it is due. `merged` is told of a merge as soon as it is made."""

    def finalize(self, job: Job) -> None: ...

    def purge(self, job: Job) -> None: ...

"""Where a new collection is stored: with its primary, in a table that is there already, or in a place of its own."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from itertools import count
from typing import Final

import msgspec

from app.core.descriptions import Description
from app.core.draft import Draft
from app.core.errors import invalid
from app.core.frontier import EMPTY, Frontier
from app.core.images import SHARD, Shard
from app.core.locations import TakenLocations, Warehouse

_TABLE_IDS: Final = uuid.UUID("6ad0b0d2-5c8c-4f6e-9d0f-4f1d5f0f7a11")


class Found(msgspec.Struct, frozen=True):
    """What the Delta log at a given location says, if there is a table already."""

    since: Frontier
    upper: Frontier
    log_version: int
    table_id: str
    epoch: int = 0
    """Of the last controller that moved its since; 0: none ever did."""


Look = Callable[[str, str], Found | None]
"""What is at a resolved location, for a shard of a format. It refuses what cannot be one."""


def nothing_there(_location: str, _format: str) -> None:
    return None


class Placing:
    """Finds the shards of the collections of one command."""

    def __init__(self, draft: Draft, warehouse: Warehouse, look: Look, namespace: str, epoch: int) -> None:
        self._draft = draft
        self._warehouse = warehouse
        self._look = look
        self._namespace = namespace
        self._epoch = epoch
        self._new_shards = 0
        self._new_locations = TakenLocations()

    def shard_of(self, description: Description) -> Shard:
        """Its shard, which is put into the draft if it is a new one. Its primary is there already."""
        wanted = description.shard
        location = None if wanted is None or wanted.location is None else self._warehouse.resolved(wanted.location)
        format = "updates" if wanted is None else wanted.format
        if description.primary is not None:
            shard = self._draft.shard(self._draft.live(description.primary).shard)
            if location not in (None, shard.location) or (wanted is not None and format != shard.format):
                raise invalid(
                    f"{description.id!r} shares the shard of its primary {description.primary!r}, "
                    f"which is {shard.location!r} with format {shard.format!r}; leave `shard` out."
                )
            return shard
        if location is not None:
            self._warehouse.check(location)
            if (other := self._overlapping(location)) is not None:
                raise invalid(
                    f"The location {location!r} of {description.id!r} is, contains or lies within that of {other}."
                )
        return self._new_shard(description.id, location, format)

    def _new_shard(self, owner: str, location: str | None, format: str) -> Shard:
        # Only what a command names can be there already: nobody else makes directories with our names.
        found = None if location is None else self._look(location, format)
        id, location = self._free_name(owner, location)
        shard = Shard(id=id, location=location, format=format, owner=owner, table_id=table_id_of(id))
        if found is not None:
            self._check_found(location, found)
            shard = msgspec.structs.replace(
                shard,
                since=found.since,
                upper=found.upper,
                log_version=found.log_version,
                table_id=found.table_id,
            )
        self._new_shards += 1
        self._new_locations.add(location, id)
        self._draft.put_shard(shard)
        return shard

    def _check_found(self, location: str, found: Found) -> None:
        if found.since == EMPTY:
            raise invalid(f"The table at {location!r} was given up: its since is []. It cannot be taken up again.")
        if found.epoch > self._epoch:
            raise invalid(
                f"The table at {location!r} is managed by another controller: the epoch in its log is {found.epoch}, "
                f"ours is {self._epoch}, and only the greatest may work on it. Drop it there first. If that "
                "installation is gone, restart this controller until its epoch is above; each start adds one."
            )

    def _free_name(self, owner: str, location: str | None) -> tuple[str, str]:
        """An id that no shard ever had and, unless the location is given, a directory that was never used."""
        # An id may be `..`, or hold characters that file systems dislike; a directory's name must be plain.
        base = re.sub(r"[^A-Za-z0-9_-]", "_", owner)
        for number in count(len(self._draft.state.shards) + self._new_shards + 1):
            id = f"{base}-{number}{self._namespace}"
            place = location or self._warehouse.new_location(id)
            if not self._is_shard(id) and (location is not None or self._overlapping(place) is None):
                return id, place
        raise AssertionError("unreachable: there are always more numbers")

    def _is_shard(self, id: str) -> bool:
        return id in self._draft.state.shards or (SHARD, id) in self._draft.changes

    def _overlapping(self, location: str) -> str | None:
        """Whose location a place overlaps, in words."""
        if (shard := self._draft.state.taken.overlapping(location)) is not None:
            return f"the shard {shard!r}"
        return None if self._new_locations.overlapping(location) is None else "another collection in this command"


def table_id_of(shard: str) -> str:
    """The id that the Delta table of a new shard gets: whoever creates it, it is the same table."""
    return str(uuid.uuid5(_TABLE_IDS, shard))

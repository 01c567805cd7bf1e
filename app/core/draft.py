"""One step in the making: computed whole before anything is installed, so that a refusal changes nothing."""

from __future__ import annotations

from typing import cast

import msgspec

from app.core.capabilities import Deltas, Rank, plan
from app.core.errors import BrokenInvariant, collection_missing
from app.core.frontier import EMPTY, Frontier
from app.core.images import (
    COLLECTION,
    DEPARTED,
    HOLD,
    SHARD,
    TOMBSTONE,
    Changes,
    Collection,
    Departed,
    Hold,
    Shard,
    Tombstone,
)
from app.core.parameters import Parameters
from app.core.state import State


class Draft:
    """The state with the changes of one step over it. The changes are what the journal will store."""

    __slots__ = ("batch", "changes", "now", "ranks", "state", "warnings")

    def __init__(self, state: State, now: int) -> None:
        self.state = state  # as it was before this step
        self.now = now
        self.changes: Changes = {}
        self.batch: dict[str, Deltas] = {}
        self.ranks: dict[str, Rank] = {}  # of collections that this step creates
        self.warnings: list[str] = []

    @property
    def parameters(self) -> Parameters:
        return self.state.parameters

    def collection(self, id: str) -> Collection | None:
        if self.changes and (key := (COLLECTION, id)) in self.changes:
            return cast("Collection | None", self.changes[key])
        return self.state.collections.get(id)

    def live(self, id: str) -> Collection:
        collection = self.collection(id)
        if collection is None or collection.dropped:
            raise collection_missing(id)
        return collection

    def hold(self, id: str) -> Hold | None:
        if self.changes and (key := (HOLD, id)) in self.changes:
            return cast("Hold | None", self.changes[key])
        return self.state.holds.get(id)

    def shard(self, id: str) -> Shard:
        return cast("Shard", self.changes.get((SHARD, id)) or self.state.shards[id])

    def put_collection(self, collection: Collection) -> None:
        if collection != self.collection(collection.id):
            self.changes[(COLLECTION, collection.id)] = collection

    def put_shard(self, shard: Shard) -> None:
        self.changes[(SHARD, shard.id)] = shard

    def count(self, collection: str, time: Frontier, difference: int) -> None:
        """One more or one less capability at a time. `[]` needs no count: it asks for nothing."""
        if time == EMPTY:
            return
        deltas = self.batch.get(collection)
        if deltas is None:
            self.batch[collection] = {time: difference}
        else:
            deltas[time] = deltas.get(time, 0) + difference

    def add_hold(self, hold: Hold) -> None:
        self.changes[(HOLD, hold.id)] = hold
        self.count(hold.collection, hold.since, +1)

    def remove_hold(self, hold: Hold) -> None:
        self.changes[(HOLD, hold.id)] = None
        self.count(hold.collection, hold.since, -1)

    def remember_departure(self, hold: Hold, departed: Departed) -> None:
        self.changes[(DEPARTED, hold.id)] = departed

    def move_implied(self, collection: Collection, wanted: Frontier) -> Collection:
        """The collection with its implied capability moved to `wanted`, unless that would be back."""
        if wanted <= collection.implied:
            return collection
        self.count(collection.id, collection.implied, -1)
        self.count(collection.id, wanted, +1)
        return msgspec.structs.replace(collection, implied=wanted)

    def finish(self) -> None:
        """Works out what the counts do to the frontiers. Everything that can go wrong goes wrong before or here."""
        if not self.batch or self._moves_nothing():
            return
        self._ignore_the_absent()
        moved = plan(
            self.batch,
            capabilities=self.state.capabilities,
            since=self._since_before,
            dependencies=self._dependencies,
            rank=self._rank,
        )
        for id, since in moved.items():
            self._move(id, since)

    def install(self) -> Changes:
        """Makes the finished draft true."""
        if self.ranks:
            self.state.ranks.update(self.ranks)
        self.state.install(self.changes, self.batch)
        return self.changes

    def _moves_nothing(self) -> bool:
        """Whether the batch concerns one collection and leaves its frontier: most hold commands are like that."""
        if len(self.batch) != 1:
            return False
        ((id, deltas),) = self.batch.items()
        collection = self.state.collections.get(id)
        return collection is not None and self.state.capabilities[id].least_after(deltas) == collection.since

    def _ignore_the_absent(self) -> None:
        """What someone gives back to a collection that is gone needs no counting; taking from it is our mistake."""
        absent = [id for id in self.batch if self.collection(id) is None]
        for id in absent:
            if any(difference > 0 for difference in self.batch.pop(id).values()):
                raise BrokenInvariant(f"A capability was asked of {id!r}, which does not exist.")

    def _since_before(self, id: str) -> Frontier | None:
        collection = self.state.collections.get(id)
        return None if collection is None else collection.since

    def _dependencies(self, id: str) -> tuple[str, ...]:
        collection = self.collection(id)
        return () if collection is None else collection.dependencies

    def _rank(self, id: str) -> Rank:
        rank = self.ranks.get(id)
        return self.state.ranks[id] if rank is None else rank

    def _move(self, id: str, since: Frontier) -> None:
        collection = self.collection(id)
        if collection is None:
            raise BrokenInvariant(f"The frontier of {id!r} moved, but it does not exist.")
        if since != EMPTY:
            if since > collection.implied:
                raise BrokenInvariant(f"{id!r} would have since {since} beyond its capability {collection.implied}.")
            self.put_collection(msgspec.structs.replace(collection, since=since))
            return
        if not collection.dropped:
            raise BrokenInvariant(f"{id!r} is live, but nothing would hold it.")
        self.changes[(COLLECTION, id)] = None
        self.changes[(TOMBSTONE, id)] = Tombstone(shard=collection.shard)

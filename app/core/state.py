"""The whole state: the images, and what follows from them, kept up to date so that no step has to search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from app.core.agenda import Agenda
from app.core.capabilities import Capabilities, Deltas, Rank
from app.core.descriptions import Table
from app.core.errors import Corrupt
from app.core.frontier import EMPTY, Frontier
from app.core.images import (
    COLLECTION,
    DEPARTED,
    HOLD,
    HORIZON,
    HORIZON_KEY,
    PARAMETER,
    SHARD,
    TOMBSTONE,
    Collection,
    Departed,
    Hold,
    Horizon,
    Image,
    Key,
    Parameter,
    Shard,
    Tombstone,
)
from app.core.locations import TakenLocations
from app.core.parameters import Parameters


class State:
    """Durable things by key, and derived ones. Only `install` changes it, and only with a finished step."""

    def __init__(self) -> None:
        self.collections: dict[str, Collection] = {}
        self.holds: dict[str, Hold] = {}
        self.shards: dict[str, Shard] = {}
        self.tombstones: dict[str, Tombstone] = {}
        self.departed: dict[str, Departed] = {}
        self.parameter_images: dict[str, Parameter] = {}
        self.horizon: Horizon | None = None
        # Derived, all of it:
        self.parameters = Parameters()
        self.capabilities: dict[str, Capabilities] = {}
        self.ranks: dict[str, Rank] = {}
        self.on_shard: dict[str, set[str]] = {}
        self.live_on_shard: dict[str, int] = {}
        self.members: dict[str, set[str]] = {}  # of a transaction log: the tables written through it
        self.pins: dict[str, dict[str, int]] = {}  # per collection, the versions that holds with `pin_files` recorded
        self.taken = TakenLocations()
        self.leases = Agenda(self._lease_is_current)
        self.departures = Agenda(self._departure_is_current)
        self.purges = Agenda(self._purge_is_current)  # finalized shards that still have tombstones
        self.finalization_log: set[str] = set()
        self.pending_downgrades: set[str] = set()
        self.unseen: set[str] = set()  # shards that nobody has seen on disk yet: they are to be created
        self.unpurged: set[str] = set()  # finalized shards without a tombstone, of which something may be on disk
        self.tombstones_of: dict[str, set[str]] = {}
        # Each takes a key and an image of its entity, and returns the shard that this concerns, if any.
        self._installers: dict[str, Callable[[str, Any], str | None]] = {
            COLLECTION: self._install_collection,
            HOLD: self._install_hold,
            SHARD: self._install_shard,
            TOMBSTONE: self._install_tombstone,
            DEPARTED: self._install_departed,
            PARAMETER: self._install_parameter,
            HORIZON: self._install_horizon,
        }

    def images(self) -> dict[Key, Image]:
        """Everything that is durable."""
        parts: list[tuple[str, Mapping[str, Image]]] = [
            (COLLECTION, self.collections),
            (HOLD, self.holds),
            (SHARD, self.shards),
            (TOMBSTONE, self.tombstones),
            (DEPARTED, self.departed),
            (PARAMETER, self.parameter_images),
            (HORIZON, {} if self.horizon is None else {HORIZON_KEY[1]: self.horizon}),
        ]
        return {(entity, key): image for entity, things in parts for key, image in things.items()}

    def install(self, changes: Mapping[Key, Image | None], batch: Mapping[str, Deltas]) -> None:
        """Makes a finished step true. Nothing here can refuse."""
        touched_shards: dict[str, None] = {}
        for (entity, key), image in changes.items():
            shard = self._installers[entity](key, image)
            if shard is not None:
                touched_shards[shard] = None
        for collection, deltas in batch.items():
            capabilities = self.capabilities.get(collection)
            if capabilities is not None:
                capabilities.apply(deltas)
            elif collection in self.collections:
                capabilities = self.capabilities[collection] = Capabilities()
                capabilities.apply(deltas)
        for shard in touched_shards:
            self._refresh_shard(self.shards[shard])

    def wanted_since(self, shard: Shard) -> Frontier:
        """What the owner's read frontier allows the shard's since to be."""
        owner = self.collections.get(shard.owner)
        if owner is not None:
            return owner.since
        return shard.since if self.on_shard.get(shard.id) else EMPTY  # when in doubt, leak

    def oldest_remembered(self, now: int) -> int:
        """From when on results and reasons are remembered; older commands are refused."""
        oldest = now - self.parameters.max_command_age
        return oldest if self.horizon is None else max(oldest, self.horizon.at)

    def _install_hold(self, key: str, hold: Hold | None) -> None:
        old = self.holds.get(key)
        if hold is None:
            self.holds.pop(key, None)
        else:
            self.holds[key] = hold
            expiry = hold.lease_expires_at
            if expiry is not None and (old is None or old.lease_expires_at != expiry):
                self.leases.add(expiry, key)
        if old is not None and old.pinned_version is not None:
            self.pins.get(old.collection, {}).pop(key, None)
        if hold is not None and hold.pinned_version is not None:
            self.pins.setdefault(hold.collection, {})[key] = hold.pinned_version

    def _lease_is_current(self, expiry: int, id: str) -> bool:
        hold = self.holds.get(id)
        return hold is not None and hold.lease_expires_at == expiry

    def _install_departed(self, key: str, departed: Departed | None) -> None:
        if departed is None:
            self.departed.pop(key, None)
        else:
            self.departed[key] = departed
            self.departures.add(departed.at, key)

    def _departure_is_current(self, at: int, id: str) -> bool:
        departed = self.departed.get(id)
        return departed is not None and departed.at == at

    def _install_parameter(self, key: str, parameter: Parameter | None) -> None:
        if parameter is not None:
            self.parameter_images[key] = parameter
            self.parameters = msgspec.structs.replace(self.parameters, **{key: parameter.value})

    def _install_horizon(self, _: str, horizon: Horizon | None) -> None:
        self.horizon = horizon

    def _install_collection(self, key: str, new: Collection | None) -> str | None:
        old = self.collections.get(key)
        either = old or new
        if either is None:
            return None
        if old is None or new is None:
            self._enter_or_leave(either, entering=new is not None)
        was_live, is_live = old is not None and not old.dropped, new is not None and not new.dropped
        if was_live != is_live:
            self.live_on_shard[either.shard] = self.live_on_shard.get(either.shard, 0) + (1 if is_live else -1)
        if new is None:
            for derived in (self.collections, self.capabilities, self.ranks, self.pins):
                derived.pop(key, None)
        else:
            self.collections[key] = new
        return either.shard

    def _enter_or_leave(self, collection: Collection, *, entering: bool) -> None:
        """A collection's data source and shard are for ever, so these change only with its first and last image."""
        groups = [self.on_shard.setdefault(collection.shard, set())]
        source = collection.description.data_source
        if isinstance(source, Table) and source.txns is not None:
            groups.append(self.members.setdefault(source.txns, set()))
        for group in groups:
            if entering:
                group.add(collection.id)
            else:
                group.discard(collection.id)

    def _install_shard(self, key: str, shard: Shard | None) -> str | None:
        if shard is None:
            raise Corrupt(f"Shard {key!r} was forgotten; its location could be used again.")
        if key not in self.shards:
            self.taken.add(shard.location, key)
        self.shards[key] = shard
        return key

    def _install_tombstone(self, key: str, tombstone: Tombstone | None) -> str | None:
        old = self.tombstones.pop(key, None)
        if old is not None:
            self.tombstones_of[old.shard].discard(key)
        if tombstone is not None:
            self.tombstones[key] = tombstone
            self.tombstones_of.setdefault(tombstone.shard, set()).add(key)
        either = tombstone or old
        return None if either is None else either.shard

    def _refresh_shard(self, shard: Shard) -> None:
        """Work that is to be done on a shard follows from its state, so nothing is forgotten at a restart."""
        for group, belongs in (
            (self.finalization_log, shard.state in ("dropped", "finalizing")),
            (self.pending_downgrades, self.wanted_since(shard) > shard.since),
            (self.unseen, _is_unseen(shard)),
            (self.unpurged, _is_unpurged(shard) and not self.tombstones_of.get(shard.id)),
        ):
            if belongs:
                group.add(shard.id)
            else:
                group.discard(shard.id)
        if shard.finalized_at is not None and self._purge_is_current(shard.finalized_at, shard.id):
            self.purges.add(shard.finalized_at, shard.id)

    def _purge_is_current(self, finalized_at: int, id: str) -> bool:
        return self.shards[id].finalized_at == finalized_at and bool(self.tombstones_of.get(id))


def _is_unseen(shard: Shard) -> bool:
    return shard.format == "updates" and shard.log_version is None and shard.state in ("live", "dropped")


def _is_unpurged(shard: Shard) -> bool:
    return shard.state == "finalized" and shard.purged_at is None

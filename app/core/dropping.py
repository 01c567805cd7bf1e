"""Dropping collections, and bringing them back while their undrop window lasts."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from app.core.draft import Draft
from app.core.errors import Code, Refused, collection_missing
from app.core.frontier import EMPTY
from app.core.holding import expiry_of
from app.core.images import CONTROLLERS_HOLDER, Collection, Hold
from app.core.policy import NoPolicy


def undrop_hold_id(collection: str) -> str:
    """No client can make such an id: those begin with a command's id, which is not empty."""
    return f"/undrop/{collection}"


def drop(draft: Draft, ids: Iterable[str]) -> None:
    """Gives collections up. Holds and dependents keep what they need; unknown and dropped ids are ignored."""
    collections = [c for id in dict.fromkeys(ids) if (c := draft.collection(id)) is not None and not c.dropped]
    gone_from_shard: dict[str, int] = {}
    for collection in collections:
        if draft.parameters.undrop_window > 0:
            draft.add_hold(_undrop_hold(draft, collection))
        draft.put_collection(msgspec.structs.replace(draft.move_implied(collection, EMPTY), dropped=True))
        gone_from_shard[collection.shard] = gone_from_shard.get(collection.shard, 0) + 1
    for shard_id, number in gone_from_shard.items():
        if draft.state.live_on_shard[shard_id] == number:
            draft.put_shard(msgspec.structs.replace(draft.shard(shard_id), state="dropped", dropped_at=draft.now))


def _undrop_hold(draft: Draft, collection: Collection) -> Hold:
    return Hold(
        id=undrop_hold_id(collection.id),
        collection=collection.id,
        holder=CONTROLLERS_HOLDER,
        purpose="undrop window",
        since=collection.since,
        acquired_at=draft.now,
        lease_expires_at=expiry_of(draft, draft.parameters.undrop_window),
    )


def undrop(draft: Draft, ids: Iterable[str]) -> None:
    for id in dict.fromkeys(ids):
        collection = draft.collection(id)
        if collection is None:
            raise collection_missing(id)
        if collection.dropped:
            _bring_back(draft, collection)


def _bring_back(draft: Draft, collection: Collection) -> None:
    hold = draft.hold(undrop_hold_id(collection.id))
    if hold is None or (hold.lease_expires_at or 0) <= draft.now:
        raise Refused(
            Code.COLLECTION_MISSING, f"Collection {collection.id!r} was dropped, and has no undrop window any more."
        )
    draft.remove_hold(hold)
    draft.count(collection.id, collection.since, +1)
    draft.put_collection(
        msgspec.structs.replace(collection, dropped=False, implied=collection.since, policy=NoPolicy(collection.since))
    )
    shard = draft.shard(collection.shard)
    if shard.state != "live":
        draft.put_shard(msgspec.structs.replace(shard, state="live", dropped_at=None))

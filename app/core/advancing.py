"""What moves a collection's implied capability: its policy, and the upper seen in its shard's log."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from app.core.draft import Draft
from app.core.frontier import Frontier
from app.core.images import Collection
from app.core.policy import SettablePolicy


class Observation(msgspec.Struct, frozen=True):
    """A shard's log was seen at this version, with this upper."""

    shard: str
    upper: Frontier
    log_version: int


def set_policies(draft: Draft, policies: Iterable[tuple[str, SettablePolicy]]) -> None:
    for id, policy in dict(policies).items():  # of several for one id the last
        collection = msgspec.structs.replace(draft.live(id), policy=policy)
        draft.put_collection(_follow_policy(draft, collection))


def observe(draft: Draft, observations: Iterable[Observation]) -> None:
    """Uppers and log versions only move forward: a late or repeated observation changes nothing.

    Nor does one of a log without a version: a shard of which nothing was seen is still to be created.
    """
    for seen in observations:
        if seen.shard not in draft.state.shards or seen.log_version < 0:
            continue
        shard = draft.shard(seen.shard)
        if shard.state in ("finalizing", "finalized"):
            continue
        version = max(seen.log_version, -1 if shard.log_version is None else shard.log_version)
        upper = shard.upper.join(seen.upper)
        if version == shard.log_version and upper == shard.upper:
            continue
        draft.put_shard(msgspec.structs.replace(shard, upper=upper, log_version=version))
        for id in sorted(draft.state.on_shard.get(shard.id, ())):
            _advance(draft, id, upper)


def _advance(draft: Draft, id: str, upper: Frontier) -> None:
    """Moves a collection's upper, and those of all tables that are written through it."""
    behind = [id]
    while behind:
        collection = draft.collection(behind.pop())
        if collection is None or collection.upper >= upper:
            continue
        draft.put_collection(_follow_policy(draft, msgspec.structs.replace(collection, upper=upper)))
        behind.extend(sorted(draft.state.members.get(collection.id, ())))


def _follow_policy(draft: Draft, collection: Collection) -> Collection:
    if collection.dropped:
        return collection
    return draft.move_implied(collection, collection.policy.frontier(collection.upper))

"""Altering a table: a new collection takes over the shard with a newer schema, the existing one lives on beneath it."""

from __future__ import annotations

import msgspec

from app.core.descriptions import Description, Table
from app.core.draft import Draft
from app.core.errors import Code, Refused, invalid
from app.core.images import Collection
from app.core.policy import NoPolicy
from app.core.schema import check_evolution, parse_schema


def alter_table(draft: Draft, *, existing_id: str, new_id: str, schema: str, expected_version: int) -> None:
    existing = draft.live(existing_id)
    source = existing.description.data_source
    if not isinstance(source, Table):
        raise invalid(f"Only a table can be altered; {existing_id!r} is none.")
    if existing.primary is not None:
        raise invalid(f"{existing_id!r} shares the shard of {existing.primary!r}; alter that one.")
    if draft.collection(new_id) is not None or new_id in draft.state.tombstones:
        raise Refused(Code.COLLECTION_ID_REUSED, f"The id {new_id!r} is in use, or its tombstone is not purged yet.")
    # A table without a primary owns its shard, so its version is the shard's.
    if existing.schema_version != expected_version:
        raise Refused(
            Code.SCHEMA_MISMATCH,
            f"The schema of {existing_id!r} has version {existing.schema_version}, not {expected_version}.",
            actual=existing.schema_version,
        )
    check_evolution(parse_schema(existing.description.schema), parse_schema(schema))
    _take_over(draft, existing, source, new_id, schema)


def _take_over(draft: Draft, existing: Collection, source: Table, new_id: str, schema: str) -> None:
    timeline = existing.description.timeline
    new = Collection(
        id=new_id,
        description=Description(id=new_id, data_source=source, schema=schema, timeline=timeline),
        time_dependence=existing.time_dependence,
        primary=None,
        dependencies=existing.dependencies,  # its `txns`, if any: a table has no other without a primary
        shard=existing.shard,
        schema_version=existing.schema_version + 1,
        policy=NoPolicy(existing.since),
        upper=existing.upper,
        implied=existing.since,
        since=existing.since,
    )
    draft.put_collection(new)
    draft.put_collection(
        msgspec.structs.replace(existing, primary=new_id, dependencies=tuple(sorted({*existing.dependencies, new_id})))
    )
    draft.put_shard(msgspec.structs.replace(draft.shard(existing.shard), owner=new_id))
    level, position = draft.state.ranks[existing.id]
    draft.ranks[new_id] = (level, position - 1)
    draft.count(new_id, new.implied, +1)
    draft.count(new_id, existing.since, +1)  # `existing` depends on it from now on

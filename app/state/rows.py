"""From an image to the row that users see in a table. Times of day are milliseconds here."""

from __future__ import annotations

from typing import Any

import msgspec

from app.core.descriptions import source_kind
from app.core.frontier import value_of
from app.core.images import Collection, Hold, Shard, encode_custom

Row = dict[str, Any]


def collection_row(image: Collection, created_seq: int, updated_seq: int) -> Row:
    return {
        "id": image.id,
        "data_source": source_kind(image.description.data_source),
        "description": msgspec.to_builtins(image.description),
        "timeline": image.description.timeline,
        "time_dependence": image.time_dependence,
        "primary": image.primary,
        "dependencies": list(image.dependencies),
        "shard": image.shard,
        "schema_version": image.schema_version,
        "read_policy": msgspec.to_builtins(image.policy, enc_hook=encode_custom),
        "write_frontier": value_of(image.upper),
        "implied_capability": value_of(image.implied),
        "read_frontier": value_of(image.since),
        "dropped": image.dropped,
        "created_seq": created_seq,
        "updated_seq": updated_seq,
    }


def hold_row(image: Hold, updated_seq: int) -> Row:
    return {
        "hold": image.id,
        "collection": image.collection,
        "holder": image.holder,
        "purpose": image.purpose,
        "since": value_of(image.since),
        "acquired_at": image.acquired_at,
        "lease_ms": image.lease_ms,
        "lease_expires_at": image.lease_expires_at,
        "pin_files": image.pin_files,
        "pinned_version": image.pinned_version,
        "updated_seq": updated_seq,
    }


def shard_row(image: Shard, updated_seq: int) -> Row:
    return {
        "shard": image.id,
        "location": image.location,
        "format": image.format,
        "owner": image.owner,
        "since": value_of(image.since),
        "upper": value_of(image.upper),
        "log_version": image.log_version,
        "epoch": image.epoch,
        "state": image.state,
        "dropped_at": image.dropped_at,
        "finalized_at": image.finalized_at,
        "attempts": image.attempts,
        "last_error": image.last_error,
        "updated_seq": updated_seq,
    }

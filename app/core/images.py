"""The durable state, one immutable record per thing: what the journal stores and folding rebuilds the state from."""

# gc=False: none of these can be part of a cycle, and there may be hundreds of thousands for the collector to visit.

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from app.core.descriptions import Description
from app.core.duration import Duration, parse_duration
from app.core.errors import Corrupt
from app.core.frontier import EMPTY, ZERO, Frontier, frontier_of, value_of
from app.core.policy import Policy

CONTROLLERS_HOLDER: Final = "holdfast"


class Collection(msgspec.Struct, frozen=True, gc=False):
    """A collection that is live, or dropped but still held."""

    id: str
    description: Description
    time_dependence: str | None
    primary: str | None
    dependencies: tuple[str, ...]
    shard: str
    schema_version: int
    policy: Policy
    upper: Frontier
    implied: Frontier
    since: Frontier
    dropped: bool = False


class Hold(msgspec.Struct, frozen=True, gc=False):
    """A read hold: one count at `since` in its collection's capabilities."""

    id: str
    collection: str
    holder: str
    purpose: str | None
    since: Frontier
    acquired_at: int
    lease_ms: int | None = None
    lease_expires_at: int | None = None
    pin_files: bool = False
    pinned_version: int | None = None

    @property
    def is_controllers(self) -> bool:
        """Made by the controller itself (an undrop window): no client command can touch it, no restart prolongs it."""
        return self.id.startswith("/")


ShardState = Literal["live", "dropped", "finalizing", "finalized"]


class Shard(msgspec.Struct, frozen=True, gc=False):
    """A Delta table that holds, or held, the data of collections. Never forgotten: no location is used twice."""

    id: str
    location: str
    format: str
    owner: str
    table_id: str = ""  # Delta's id of the table: another table that appears at this location is not this shard
    since: Frontier = ZERO
    upper: Frontier = ZERO
    log_version: int | None = None  # None: never seen on disk
    epoch: int = 0
    state: ShardState = "live"
    dropped_at: int | None = None
    finalized_at: int | None = None
    purged_at: int | None = None  # when nothing of it was left on disk
    merged_at: int | None = None  # the last merge: when, to which time, and the bytes that it read and wrote
    merged_to: int | None = None
    merged_bytes_before: int | None = None
    merged_bytes_after: int | None = None
    attempts: int = 0
    last_error: str | None = None


class Tombstone(msgspec.Struct, frozen=True, gc=False):
    """Remains of a dropped collection: its id is not used again before this is purged."""

    shard: str


class Departed(msgspec.Struct, frozen=True, gc=False):
    """Why a hold is gone, for those who still ask for it."""

    reason: Literal["lease expired", "released"]
    at: int


class Horizon(msgspec.Struct, frozen=True, gc=False):
    """What was recorded before this time is forgotten, whatever `max_command_age` says.

    Set when that parameter is raised: the results that it would bring back within reach are gone, and so a command as
    old as they are cannot be told from one that was applied.
    """

    at: int


class Parameter(msgspec.Struct, frozen=True, gc=False):
    """The value of a run-time parameter that was set."""

    value: bool | int | None


# One image per entity and key; None says that the thing is gone.
Key = tuple[str, str]
Image = Collection | Hold | Shard | Tombstone | Departed | Parameter | Horizon
Changes = dict[Key, Image | None]

COLLECTION: Final = "collection"
HOLD: Final = "hold"
SHARD: Final = "shard"
TOMBSTONE: Final = "tombstone"
DEPARTED: Final = "departed"
PARAMETER: Final = "parameter"
HORIZON: Final = "horizon"
HORIZON_KEY: Final = (HORIZON, "commands")

TYPES: Final[dict[str, Any]] = {
    COLLECTION: Collection,
    HOLD: Hold,
    SHARD: Shard,
    TOMBSTONE: Tombstone,
    DEPARTED: Departed,
    PARAMETER: Parameter,
    HORIZON: Horizon,
}


def encode_custom(value: Any) -> Any:
    """Frontiers and durations as JSON has them: a number, null for `[]`."""
    if isinstance(value, Frontier):
        return value_of(value)
    if isinstance(value, Duration):
        return int(value)
    raise NotImplementedError(f"Objects of type {type(value).__name__} have no JSON form")


def decode_custom(wanted: type, value: Any) -> Any:
    """The inverse, strict: only what `encode_custom` or a client may have written."""
    if wanted is Frontier:
        if value is not None and (type(value) is not int or not 0 <= value < EMPTY):
            raise ValueError(f"Expected a frontier (a time, or null), got {value!r:.40}")
        return frontier_of(value)
    if wanted is Duration:
        return parse_duration(value)
    raise NotImplementedError(f"Objects of type {wanted.__name__} have no JSON form")


_encoder: Final = msgspec.json.Encoder(enc_hook=encode_custom)
_decoders: Final = {
    entity: msgspec.json.Decoder(image_type, dec_hook=decode_custom) for entity, image_type in TYPES.items()
}


def encode_image(image: Image) -> bytes:
    return _encoder.encode(image)


def decode_image(entity: str, value: bytes) -> Image:
    """The image that was stored; Corrupt if it cannot be read."""
    try:
        return _decoders[entity].decode(value)  # type: ignore[no-any-return]  # TYPES says it, mypy cannot see it
    except (KeyError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"The image of a {entity!r} cannot be read: {error}") from error

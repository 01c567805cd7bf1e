"""What a collection is, as its creator says it: data source, schema, primary, timeline, shard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, Literal

import msgspec

from app.core.frontier import Time

DEFAULT_TIMELINE: Final = "epoch_ms"
WALL_CLOCK: Final = "wall_clock"

# `$` would let a trailing newline pass; "no character follows" means the same to Python and to JSON Schema.
ID_PATTERN: Final = r"^[A-Za-z0-9_.:-]{1,128}(?![\s\S])"
CollectionId = Annotated[str, msgspec.Meta(pattern=ID_PATTERN)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class _Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    pass


class Table(_Source, frozen=True, tag="table"):
    """Written by jobs, by itself or, with `txns`, through a shared transaction log."""

    txns: CollectionId | None = None


class Ingestion(_Source, frozen=True, tag="ingestion"):
    """Brings in data of an outside system; `remap` translates that system's times into ours."""

    remap: CollectionId
    connection: Literal["kafka", "postgres", "mysql", "sql_server", "load_generator"]


class IngestionExport(_Source, frozen=True, tag="ingestion_export"):
    """One of the collections that an ingestion writes."""

    ingestion: CollectionId
    envelope: Literal["none", "upsert", "debezium", "cdcv2"]


class Progress(_Source, frozen=True, tag="progress"):
    """How far an ingestion has come."""


class Introspection(_Source, frozen=True, tag="introspection"):
    """What a system says about itself."""


class Webhook(_Source, frozen=True, tag="webhook"):
    """Data that is pushed to us."""


class Sink(_Source, frozen=True, tag="sink"):
    """Data on its way out."""

    from_: CollectionId = msgspec.field(name="from")


class Other(_Source, frozen=True, tag="other"):
    """A view, or whatever else a job maintains from its inputs."""

    inputs: tuple[CollectionId, ...] = ()


DataSource = Table | Ingestion | IngestionExport | Progress | Introspection | Webhook | Sink | Other


class ShardDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where a collection's data is to be, if its creator wants a say in it."""

    location: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] | None = None
    format: Literal["updates", "delta"] = "updates"


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A collection as first given: what a repeated creation is compared with."""

    id: CollectionId
    data_source: DataSource
    schema: str | None = None
    since: Time | None = None
    primary: CollectionId | None = None
    timeline: Name = DEFAULT_TIMELINE
    shard: ShardDescription | None = None


def source_kind(source: DataSource) -> str:
    return str(type(source).__struct_config__.tag)


def source_dependencies(collection_id: str, source: DataSource, ingestion: Ingestion | None) -> Iterator[str]:
    """What a data source reads. `ingestion` is that of an export."""
    match source:
        case Table(txns=str(txns)):
            yield txns
        case Ingestion(remap=remap) if remap != collection_id:
            yield remap
        case IngestionExport(envelope=envelope) if envelope != "cdcv2" and ingestion is not None:
            yield ingestion.remap
        case Sink(from_=source_id):
            yield source_id
        case Other(inputs=inputs):
            yield from inputs
        case _:
            pass


def time_dependence(source: DataSource, timeline: str) -> str | None:
    """Whether the collection's upper follows the wall clock, or only its inputs. An export is like its ingestion."""
    match source:
        case Ingestion(connection="load_generator") | Sink() | Other():
            return None
        case _:
            return WALL_CLOCK if timeline == DEFAULT_TIMELINE else None

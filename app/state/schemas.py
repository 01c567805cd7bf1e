"""The five tables: their columns, and Arrow tables of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
from deltalake import DeltaTable

from app.core.images import COLLECTION, HOLD, SHARD, decode_image
from app.state import rows
from app.state.changes import Change
from app.state.rows import Row

COMMAND: Final = "command"
_TEXT, _LONG, _INT, _FLAG = pa.string(), pa.int64(), pa.int32(), pa.bool_()
_TIME = pa.timestamp("us", tz="UTC")


class Schema(NamedTuple):
    """A table: the columns that identify a row, all columns, and which of them are JSON text."""

    keys: Sequence[str]
    columns: pa.Schema
    json: frozenset[str] = frozenset()


SCHEMAS: Final[Mapping[str, Schema]] = {
    "collections": Schema(
        ["id"],
        pa.schema(
            [
                ("id", _TEXT),
                ("data_source", _TEXT),
                ("description", _TEXT),
                ("timeline", _TEXT),
                ("time_dependence", _TEXT),
                ("primary", _TEXT),
                ("dependencies", pa.list_(_TEXT)),
                ("shard", _TEXT),
                ("schema_version", _INT),
                ("read_policy", _TEXT),
                ("write_frontier", _LONG),
                ("implied_capability", _LONG),
                ("read_frontier", _LONG),
                ("dropped", _FLAG),
                ("created_seq", _LONG),
                ("updated_seq", _LONG),
            ]
        ),
        frozenset(["description", "read_policy"]),
    ),
    "holds": Schema(
        ["hold"],
        pa.schema(
            [
                ("hold", _TEXT),
                ("collection", _TEXT),
                ("holder", _TEXT),
                ("purpose", _TEXT),
                ("since", _LONG),
                ("acquired_at", _TIME),
                ("lease_ms", _LONG),
                ("lease_expires_at", _TIME),
                ("pin_files", _FLAG),
                ("pinned_version", _LONG),
                ("updated_seq", _LONG),
            ]
        ),
    ),
    "shards": Schema(
        ["shard"],
        pa.schema(
            [
                ("shard", _TEXT),
                ("location", _TEXT),
                ("format", _TEXT),
                ("owner", _TEXT),
                ("table_id", _TEXT),
                ("since", _LONG),
                ("upper", _LONG),
                ("log_version", _LONG),
                ("epoch", _LONG),
                ("state", _TEXT),
                ("dropped_at", _TIME),
                ("finalized_at", _TIME),
                ("purged_at", _TIME),
                ("merged_at", _TIME),
                ("merged_to", _LONG),
                ("merged_bytes_before", _LONG),
                ("merged_bytes_after", _LONG),
                ("attempts", _LONG),
                ("last_error", _TEXT),
                ("updated_seq", _LONG),
            ]
        ),
    ),
    "meta": Schema(
        ["entity", "key"],
        pa.schema([("entity", _TEXT), ("key", _TEXT), ("value", _TEXT), ("updated_seq", _LONG)]),
    ),
    "commands": Schema(
        ["topic", "partition", "offset"],
        pa.schema(
            [
                ("topic", _TEXT),
                ("partition", _INT),
                ("offset", _LONG),
                ("id", _TEXT),
                ("type", _TEXT),
                ("status", _TEXT),
                ("error_code", _TEXT),
                ("error_message", _TEXT),
                ("error_details", _TEXT),
                ("result", _TEXT),
                ("raw", _TEXT),
                ("digest", _TEXT),
                ("first_seq", _LONG),
                ("first_epoch", _LONG),
                ("seq", _LONG),
                ("epoch", _LONG),
                ("applied_at", _TIME),
            ]
        ),
        frozenset(["error_details", "result"]),
    ),
}
_TABLE_OF: Final = {COLLECTION: "collections", HOLD: "holds", SHARD: "shards", COMMAND: "commands"}


def table_of(entity: str) -> str:
    """The table that has an entity's rows: `meta`, unless it has one of its own."""
    return _TABLE_OF.get(entity, "meta")


def row_of(entity: str, key: str, change: Change, created_seq: int) -> Row:
    """The row of a thing that is there."""
    if change.value is None:
        raise AssertionError("what is gone has no row")
    match entity:
        case "collection":
            return rows.collection_row(decode_image(entity, change.value), created_seq, change.seq)  # type: ignore[arg-type]  # the entity says which image
        case "hold":
            return rows.hold_row(decode_image(entity, change.value), change.seq)  # type: ignore[arg-type]
        case "shard":
            return rows.shard_row(decode_image(entity, change.value), change.seq)  # type: ignore[arg-type]
        case "command":
            return rows.command_row(rows.decode_command(change.value), change.seq, change.epoch)
        case _:
            return {"entity": entity, "key": key, "value": change.value.decode(), "updated_seq": change.seq}


def gone_row(table: str, entity: str, key: str) -> Row:
    """What is left of a row that goes: its key."""
    return {"entity": entity, "key": key} if table == "meta" else {SCHEMAS[table].keys[0]: key}


def to_arrow(table: str, found: Sequence[Row]) -> pa.Table:
    """An Arrow table of rows; columns that a row lacks are null."""
    schema = SCHEMAS[table]
    arrays = []
    for field in schema.columns:
        values: Iterable[Any] = [row.get(field.name) for row in found]
        if field.name in schema.json:
            values = [rows.as_json(value) for value in values]
        if field.type == _TIME:
            # Through integers: a lease may end after the last year that Python's datetime knows.
            numbers = pa.array([None if value is None else value * 1_000 for value in values], _LONG)
            arrays.append(numbers.cast(_TIME))
        else:
            arrays.append(pa.array(values, field.type))
    return pa.Table.from_arrays(arrays, schema=schema.columns)


def read_rows(table: str, handle: DeltaTable, where: str | None = None) -> Iterator[Row]:
    """The rows for which a condition in SQL holds, as `to_arrow` takes them, but for JSON, which stays text.

    Columns that the table lacks yet are null.
    """
    # Not `to_pyarrow_table`: Arrow's threads then read through Python objects, and letting go of these while Python
    # ends aborts the process now and then, with an exit code that says that something failed.
    found = pa.RecordBatchReader.from_stream(handle.scan(predicate=where)).read_all()
    schema, there = SCHEMAS[table].columns, set(found.column_names)
    columns: list[list[Any]] = []
    for field in schema:
        column = found.column(field.name) if field.name in there else pa.nulls(found.num_rows, field.type)
        if field.type == _TIME:
            numbers = column.cast(_TIME).cast(_LONG).to_pylist()
            columns.append([None if value is None else value // 1_000 for value in numbers])
        else:
            columns.append(column.to_pylist())
    for values in zip(*columns, strict=True):
        yield dict(zip(schema.names, values, strict=True))


def at_ms(moment_ms: int) -> str:
    """A time of day in SQL. Through an integer, as in `to_arrow`."""
    return f"arrow_cast({moment_ms * 1_000}, 'Timestamp(Microsecond, Some(\"UTC\"))')"

"""The entries of the journal, and the Parquet files that hold them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from app.core.errors import Corrupt


class JournalRow(NamedTuple):
    """The new image of one thing, as JSON; None says that it is gone."""

    entity: str
    key: str
    value: bytes | None


class Entry(NamedTuple):
    """What one batch changed. `seq` is the version of the journal that has it."""

    seq: int
    epoch: int
    at: int
    origin: str
    instance: str
    rows: list[JournalRow]


SCHEMA: Final = pa.schema(
    [
        ("seq", pa.int64()),
        ("epoch", pa.int64()),
        ("at", pa.int64()),
        ("origin", pa.string()),
        ("instance", pa.string()),
        ("attempt", pa.string()),
        ("entity", pa.string()),
        ("key", pa.string()),
        ("value", pa.string()),
    ]
)
# An entry that changes nothing still has its place and its time: one row that means nothing.
_NOTHING: Final = JournalRow("nothing", "", None)


def to_arrow(entry: Entry, attempt: str) -> pa.Table:
    rows: Sequence[JournalRow] = entry.rows or [_NOTHING]
    entities, keys, values = zip(*rows, strict=True)
    number = len(rows)
    columns = [
        pa.repeat(pa.scalar(value, kind), number)
        for value, kind in (
            (entry.seq, pa.int64()),
            (entry.epoch, pa.int64()),
            (entry.at, pa.int64()),
            (entry.origin, pa.string()),
            (entry.instance, pa.string()),
            (attempt, pa.string()),
        )
    ]
    columns += [pa.array(entities, pa.string()), pa.array(keys, pa.string()), pa.array(values, pa.string())]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def to_parquet(table: pa.Table) -> bytes:
    # The log has the statistics, and entries are small: what Parquet adds by default would cost more than the rows.
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd", use_dictionary=False, write_statistics=False, store_schema=False)
    return buffer.getvalue()


def from_parquet(data: bytes) -> pa.Table:
    try:
        return pq.ParquetFile(pa.BufferReader(data)).read()
    except (pa.ArrowException, OSError) as error:  # not the store's: all of it is in memory
        raise Corrupt(f"A file of the journal is damaged: {error}") from error


def entries_of(table: pa.Table, *, after: int) -> Iterator[Entry]:
    """The entries above `after` of a file, which has them in order."""
    columns = [table.column(name).to_pylist() for name in ("seq", "epoch", "at", "origin", "instance")]
    rows = zip(table.column("entity").to_pylist(), table.column("key").to_pylist(), _values(table), strict=True)
    for head, group in groupby(zip(zip(*columns, strict=True), rows, strict=True), key=itemgetter(0)):
        if head[0] > after:
            seq, epoch, at, origin, instance = head
            yield Entry(seq, epoch, at, origin, instance, _rows(each for _, each in group))


def _rows(found: Iterable[tuple[str, str, bytes | None]]) -> list[JournalRow]:
    rows = [JournalRow(*each) for each in found]
    return [] if rows == [_NOTHING] else rows


def _values(table: pa.Table) -> list[bytes | None]:
    values: list[bytes | None] = table.column("value").cast(pa.binary()).to_pylist()
    return values

"""DataFrames as Arrow record batches, one partition at a time: the driver never has more than one of them.

So a partition must be small. Spark does not split a row group of a Parquet file, and the files that merges make have
large ones: such a file would be one partition. If there is one, all rows are spread evenly, by way of a shuffle.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from app.reading.running import Run
from app.reading.stats import PartStats

PART_BYTES: Final = 8 * 1024 * 1024
"""About so much of compressed files is one partition; in memory it is several times as much."""
PART_ROWS: Final = 1_000_000
"""Nor has it more rows, where the log knows their number: equal values take next to nothing in a file."""
MOST_PARTS: Final = 10_000


class Batches(Run[pa.RecordBatch]):
    """Record batches, and their `schema`. Its hold is let go at the end, by `close` or `with`, or when forgotten."""

    def __init__(self, run: Generator[Any, None, None]) -> None:
        super().__init__(run)
        self.schema: pa.Schema = self._first


class Parts(NamedTuple):
    """How many partitions some files should be read in. `spread`: they do not become that by themselves."""

    number: int
    spread: bool


def parts_for(files: Iterable[PartStats]) -> Parts:
    files = list(files)
    size, rows = sum(file.bytes for file in files), sum(file.updates or 0 for file in files)
    number = max(1, -(-size // PART_BYTES), -(-rows // PART_ROWS))
    large = any(file.bytes > PART_BYTES or (file.updates or 0) > PART_ROWS for file in files)
    return Parts(min(MOST_PARTS, number), large)


def session_for(spark: SparkSession, parts: Parts) -> SparkSession:
    """A session with the same settings, but small partitions, however large the data is."""
    session = spark.newSession()
    for name, value in spark.conf.getAll.items():
        if session.conf.get(name, None) != value:
            # Not only what Spark calls modifiable: it does not know the keys of object stores, and takes them all the
            # same. What it refuses is the same in all sessions.
            with suppress(PySparkException):
                session.conf.set(name, value)
    session.conf.set("spark.sql.shuffle.partitions", str(parts.number))
    session.conf.set("spark.sql.files.maxPartitionBytes", str(PART_BYTES))
    session.conf.set("spark.sql.files.openCostInBytes", str(PART_BYTES // 4))
    session.conf.set("spark.sql.adaptive.enabled", "false")  # it would put small partitions together again
    # A task of the shuffle that is repeated must put each row where it was: the parts before it are given already.
    session.conf.set("spark.sql.execution.sortBeforeRepartition", "true")
    return session


def batches(frame: DataFrame) -> Generator[Any, None, None]:
    """The schema, and then the batches."""
    schema = schema_of(frame)
    yield schema
    for row in frame.mapInArrow(_packer(), "batch BINARY").toLocalIterator():
        for batch in pa.ipc.open_stream(row["batch"]):
            yield batch if batch.schema == schema else pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def schema_of(frame: DataFrame) -> pa.Schema:
    return to_arrow_schema(frame.schema)


def _packer() -> Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]]:
    def pack(incoming: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        """Each batch as one row of bytes."""
        import pyarrow  # noqa: PLC0415  # runs on executors, which need not have this module: it is sent as it is

        for batch in incoming:
            sink = pyarrow.BufferOutputStream()
            with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
                stream.write_batch(batch)
            yield pyarrow.RecordBatch.from_arrays([pyarrow.array([sink.getvalue().to_pybytes()])], ["batch"])

    return pack

"""DataFrames as Arrow record batches, one partition at a time: the driver never has more than one of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from types import TracebackType
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

PART_BYTES: Final = 8 * 1024 * 1024
"""About so much of compressed files is one partition; in memory it is several times as much."""
MOST_PARTS: Final = 10_000


class Batches(Iterator[pa.RecordBatch]):
    """Record batches, and their `schema`. Its hold is let go at the end, by `close` or `with`, or when forgotten."""

    def __init__(self, run: Generator[Any, None, None]) -> None:
        self._run = run
        self.schema: pa.Schema = next(run)  # this starts it: only what was started can be ended

    def __next__(self) -> pa.RecordBatch:
        return next(self._run)

    def __enter__(self) -> Batches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._run.close()


def session_for(spark: SparkSession, bytes_on_disk: int) -> SparkSession:
    """A session with the same settings, but small partitions, however large the data is."""
    session = spark.newSession()
    for name, value in spark.conf.getAll.items():
        if session.conf.isModifiable(name) and session.conf.get(name, None) != value:
            session.conf.set(name, value)
    parts = min(MOST_PARTS, max(1, -(-bytes_on_disk // PART_BYTES)))
    session.conf.set("spark.sql.shuffle.partitions", str(parts))
    session.conf.set("spark.sql.files.maxPartitionBytes", str(PART_BYTES))
    session.conf.set("spark.sql.files.openCostInBytes", str(PART_BYTES // 4))
    session.conf.set("spark.sql.adaptive.enabled", "false")  # it would put small partitions together again
    return session


def batches(frame: DataFrame) -> Iterator[pa.RecordBatch]:
    schema = schema_of(frame)
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

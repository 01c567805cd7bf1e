"""The records of a batch of query 1, in parts that fit into memory.

What is collected is in memory several times at once, in the JVM and here, and a batch may have 20,000 records of a
megabyte. So only small values come along with a batch, and of the others their size. These are read from Kafka once
more, part by part, each of as many records as fit. Most batches have small values only: they are one part, and nothing
is read twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pyspark.sql import DataFrame, Row, SparkSession

from app.records import Record

PART_BYTES: Final = 64 * 1024 * 1024
"""How much the values of a part have together. One value more is taken whole, whatever its size: its id is needed."""


class Collecting:
    """`options` are those of Spark's Kafka source, without what is to be read."""

    def __init__(self, topic: str, options: Mapping[str, str], *, most_records: int) -> None:
        self._topic = topic
        self._options = options
        self._small = PART_BYTES // most_records

    def columns(self) -> list[str]:
        """What a batch is to have: at most `most_records` of these are collected at once."""
        return [
            "partition",
            "offset",
            "unix_millis(timestamp) AS timestamp",
            f"CASE WHEN length(value) <= {self._small} THEN value END AS value",
            f"CASE WHEN length(value) > {self._small} THEN length(value) END AS size",
        ]

    def parts(self, frame: DataFrame) -> Iterator[list[Record]]:
        """All of the batch. If it is in several parts, they are in the order of partition and offset."""
        rows = frame.collect()
        if all(row[4] is None for row in rows):
            yield [Record(row[0], row[1], row[2], bytes(row[3] or b"")) for row in rows]
            return
        rows.sort(key=lambda row: (row[0], row[1]))
        for part in parted(rows, [row[4] or len(row[3] or b"") for row in rows], PART_BYTES):
            values = self._read(frame.sparkSession, [row for row in part if row[4] is not None])
            yield [
                Record(row[0], row[1], row[2], bytes(row[3] or b"") if row[4] is None else values[row[0], row[1]])
                for row in part
            ]

    def _read(self, spark: SparkSession, rows: Sequence[Row]) -> dict[tuple[int, int], bytes]:
        """The large values that are in these places."""
        if not rows:
            return {}
        first = {str(row[0]): row[1] for row in reversed(rows)}
        end = {str(row[0]): row[1] + 1 for row in rows}
        where: dict[str, Any] = {
            "assign": {self._topic: [int(partition) for partition in first]},
            "startingOffsets": {self._topic: first},
            "endingOffsets": {self._topic: end},
        }
        source = spark.read.format("kafka").options(**self._options)
        source = source.options(**{name: json.dumps(value) for name, value in where.items()})
        large = source.load().where(f"length(value) > {self._small}").select("partition", "offset", "value")
        return {(row[0], row[1]): bytes(row[2]) for row in large.collect()}


def parted(rows: Sequence[Row], sizes: Sequence[int], most: int) -> Iterator[Sequence[Row]]:
    """Runs of rows whose sizes sum up to at most `most`; one that is larger is a run by itself."""
    begin = total = 0
    for index, size in enumerate(sizes):
        if total and total + size > most:
            yield rows[begin:index]
            begin, total = index, 0
        total += size
    yield rows[begin:]

"""Shards to try things on, and what they hold."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from app.shards.updates import Updates, create

DDL = "k STRING, v BIGINT"
SCHEMA = f"_time BIGINT, _diff BIGINT, {DDL}"


def new_shard(spark: SparkSession, directory: Path, ddl: str = DDL) -> Updates:
    location = directory / f"shard-{uuid.uuid4().hex[:8]}"
    return create(spark, str(location), str(uuid.uuid4()), ddl)


@contextmanager
def configured(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Settings of the session that all tests share, for as long as the block runs."""
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name in settings:
            spark.conf.unset(name)


def rows(spark: SparkSession, *data: tuple[Any, ...], schema: str = SCHEMA) -> DataFrame:
    return spark.createDataFrame(list(data), schema).coalesce(1)


def content(spark: SparkSession, shard: Updates, as_of: int = 2**62) -> dict[tuple[Any, ...], int]:
    """What a plain reader of the Delta table sums up."""
    found = spark.read.format("delta").load(shard.table.location).collect()
    return summed(((row["_time"], row["_diff"], *row[2:]) for row in found), as_of)


def summed(updates: Iterable[tuple[Any, ...]], as_of: int) -> dict[tuple[Any, ...], int]:
    counts: Counter[tuple[Any, ...]] = Counter()
    for time, diff, *data in updates:
        if time <= as_of:
            counts[tuple(data)] += diff
    return {data: count for data, count in counts.items() if count}

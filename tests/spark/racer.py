"""A writer in a process and a JVM of its own. Run by test_processes; speaks one word per line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from app.java import QUICK_START
from app.shards.errors import UpperMismatch
from app.shards.updates import Updates
from app.spark import session
from tests.spark.helpers import rows


def race(spark: SparkSession, shard: Updates, name: str, rounds: int) -> list[int]:
    """Tries to write at each time; the times that were won."""
    won: list[int] = []
    while (upper := int(shard.upper)) < rounds:
        try:
            shard.compare_and_append(rows(spark, (upper, 1, name, upper)), upper, upper + 1)
            won.append(upper)
        except UpperMismatch:
            pass
    return won


def main(location: str, table_id: str, rounds: int, logs: str) -> None:
    options = {"spark.driver.extraJavaOptions": " ".join(QUICK_START)}
    spark = session("racer", master="local[1]", logs=Path(logs), extra=options)
    shard = Updates(spark, location, table_id)
    rows(spark, (0, 1, "warm", 1)).collect()
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(race(spark, shard, "other", rounds)), flush=True)
    sys.stdin.readline()  # the other one may still be trying
    with shard.table.lock():
        print("locked", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])

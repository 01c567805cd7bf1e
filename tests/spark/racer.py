"""A writer in a process and a JVM of its own. Run by test_processes; speaks one word per line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pyspark.sql import SparkSession

from app.java import QUICK_START
from app.shards.errors import UpperMismatch
from app.shards.updates import Updates
from app.spark import session
from tests.spark.helpers import rows


def race(
    spark: SparkSession, shard: Updates, name: str, rounds: int, *, meet: Callable[[int], None]
) -> dict[int, int | None]:
    """Writes at each time, once; what the upper was instead where that was refused, None where it was not.

    `meet` is called when all is ready to be committed, and returns when the other one is as far.
    """
    found: dict[int, int | None] = {}
    for upper in range(rounds):
        data = rows(spark, (upper, 1, name, upper))
        try:
            shard.compare_and_append(data, upper, upper + 1, pause=partial(meet, upper))
        except UpperMismatch as mismatch:
            found[upper] = int(mismatch.actual)
        else:
            found[upper] = None
    return found


def meet(upper: int) -> None:
    print(upper, flush=True)
    sys.stdin.readline()


def main(location: str, table_id: str, rounds: int, logs: str) -> None:
    options = {"spark.driver.extraJavaOptions": " ".join(QUICK_START)}
    spark = session("racer", master="local[1]", logs=Path(logs), extra=options)
    shard = Updates(spark, location, table_id)
    rows(spark, (0, 1, "warm", 1)).collect()
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(race(spark, shard, "other", rounds, meet=meet)), flush=True)
    sys.stdin.readline()  # the other one may still be trying
    with shard.table.lock():
        print("locked", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])

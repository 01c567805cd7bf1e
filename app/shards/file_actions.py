"""Data files of a version, and the actions that exchange them for others without a change of what the table holds."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame

from app.shards.columns import TIME
from app.shards.errors import UnsafeShard
from app.shards.transaction import ShardTable, Transaction


def add_files(table: ShardTable, transaction: Transaction, paths: Sequence[str]) -> dict[str, Any]:
    """The actions that added these files, by path."""
    found = transaction.snapshot.getSpecificFilesWithStats(table.gateway.seq(paths)).iterator()
    files: dict[str, Any] = {}
    while found.hasNext():
        file = found.next()
        files[str(file.path())] = file
    if missing := set(paths) - set(files):
        raise AssertionError(f"files of version {transaction.version} are not in it: {sorted(missing)[:3]}")
    return files


def read(table: ShardTable, transaction: Transaction, files: Sequence[Any]) -> DataFrame:
    """The rows of some files, with the columns that the table has at the version of the transaction."""
    gateway = table.gateway
    frame = table.log().createDataFrame(transaction.snapshot, gateway.seq(files), False, gateway.none())
    return DataFrame(frame, table.spark)


def rearranged(table: ShardTable, file: Any) -> Any:
    """The same file, added without a change of what the table holds. It must have statistics of the times."""
    action = json.loads(file.json())
    stats = json.loads(action["add"].get("stats") or "{}")
    if TIME not in stats.get("minValues", {}):
        raise UnsafeShard(
            f"Delta wrote a file without statistics to {table.location}, so merged files could not be told from "
            "others. Set spark.databricks.delta.stats.collect, and the table's delta.dataSkippingNumIndexedCols to at "
            "least 1."
        )
    action["add"]["dataChange"] = False
    return table.gateway.action(action)


def removed(file: Any) -> Any:
    """Takes a file out of the table without a change of what it holds."""
    return file.removeWithTimestamp(int(time.time() * 1_000), False)

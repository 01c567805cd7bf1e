"""Data files of a version, and the actions that exchange them for others without a change of what the table holds."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, Final

from pyspark.sql import DataFrame

from app.shards.columns import TIME
from app.shards.errors import UnsafeShard
from app.shards.settings import COLLECT, collects_statistics, without_time_statistics
from app.shards.transaction import ShardTable, Transaction

_NOT_MERGED: Final = (
    "The table at {} cannot be merged: files without statistics of their times could not be told from others, and {}."
)


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


def check_statistics(table: ShardTable, transaction: Transaction) -> None:
    """UnsafeShard, unless Delta will write statistics of the times. To be asked before anything is written."""
    reason = without_time_statistics(json.loads(transaction.snapshot.metadata().json())["metaData"])
    if not collects_statistics(table.spark):
        reason = f"{COLLECT} is false in this session"
    if reason is not None:
        raise UnsafeShard(_NOT_MERGED.format(table.location, reason))


def rearranged(table: ShardTable, file: Any) -> Any:
    """The same file, added without a change of what the table holds. It must have statistics of the times."""
    action = json.loads(file.json())
    stats = json.loads(action["add"].get("stats") or "{}")
    if TIME not in stats.get("minValues", {}):
        raise UnsafeShard(_NOT_MERGED.format(table.location, "Delta wrote none, for a reason that we do not know"))
    action["add"]["dataChange"] = False
    return table.gateway.action(action)


def removed(file: Any) -> Any:
    """Takes a file out of the table without a change of what it holds."""
    return file.removeWithTimestamp(int(time.time() * 1_000), False)

"""Merging: what nobody may read separately any more is summed up.

A merge reads some of the files that end at or before a time, sums the diffs per distinct row, moves the sums to that
time, and drops zeros. A read at that time or later sees the same before and after. The files are exchanged in one
commit that says `dataChange = false` and sets no app transaction. So Delta gives it snapshot isolation: appends during
the merge succeed, and so does the merge; and plain streams on the table do not see it.

Which files, up to which time, and why that is cheap, is in `app.shards.merge_plan`.

**What is a distinct row.** Equality is that of Spark's GROUP BY: nulls are equal, NaN is NaN, -0.0 is 0.0, maps with
the same entries are equal. VARIANT has no equality: rows of a shard with such a column are moved to that time and not
summed, and only rows whose own diff is zero are dropped.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyspark.sql import DataFrame
from pyspark.sql import functions as sql
from pyspark.sql.types import LongType, MapType, StructType, VariantType

from app.shards.columns import DIFF, TIME, holds, quoted
from app.shards.commit_log import EPOCH
from app.shards.fence import check_fence
from app.shards.file_actions import add_files, check_statistics, read, rearranged, removed
from app.shards.merge_plan import FRACTION, File, Plan, merge_target, plan
from app.shards.notes import Note, new_token
from app.shards.settings import check_strict
from app.shards.transaction import Transaction
from app.shards.updates import Pause, Updates, check_format

log = logging.getLogger(__name__)

FILE_BYTES: Final = 128 * 1024 * 1024
"""About how large a file may become."""


@dataclass(frozen=True, slots=True)
class Merged:
    """What a merge did: the time that its rows have now; files and their bytes that it replaced, and by what."""

    to: int
    version: int
    read_version: int
    files_before: int
    bytes_before: int
    files_after: int
    bytes_after: int


def merge_if_worthwhile(
    shard: Updates,
    since: int,
    epoch: int,
    *,
    fraction: float = FRACTION,
    file_bytes: int = FILE_BYTES,
    storage_options: Mapping[str, str] | None = None,
    pause: Pause | None = None,
) -> Merged | None:
    """Merges up to `since`, or up to the upper if that is less; None if there is nothing worth it.

    `since` is what the journal has made durable. `Fenced` if a newer controller has moved the shard's since. `Conflict`
    if someone else merged at the same time: nothing is lost, come again. `UnsafeShard` under settings with which a
    merge would lose something. `pause` is called before the commit.
    """
    check_strict(shard.table.spark)
    target = merge_target(since, shard.upper)
    if target is None or plan(_glance(shard, storage_options), target, fraction=fraction) is None:
        return None
    # Before any data is touched because of it: whoever reads the new version finds that it is readable from here on.
    shard.set_since(target, epoch)
    transaction = shard.table.begin()
    check_format(transaction.schema, shard.table.location)
    check_fence(shard.table.location, fence=transaction.recorded(EPOCH), epoch=epoch)
    found = plan(_files(shard, transaction.snapshot), target, fraction=fraction)
    if found is not None:
        check_statistics(shard.table, transaction)  # afterwards it would be too late: what was written would stay
    return None if found is None else _merge(shard, transaction, found, file_bytes=file_bytes, pause=pause)


def _merge(shard: Updates, transaction: Transaction, found: Plan, *, file_bytes: int, pause: Pause | None) -> Merged:
    old = add_files(shard.table, transaction, [file.path for file in found.files])
    location, before = shard.table.location, _bytes(old.values())
    log.info("merging location=%s to=%d files=%d bytes=%d", location, found.to, len(old), before)
    merged = _summed(read(shard.table, transaction, list(old.values())), transaction.schema, found, file_bytes)
    new = transaction.write_files(merged)
    if found.unknown:
        # Into files of their own: a base file holds one time only, and is recognised by that.
        rest = read(shard.table, transaction, [old[file.path] for file in found.unknown])
        rest = rest.where(sql.col(TIME) > found.to)
        size = sum(file.size for file in found.unknown)
        new += transaction.write_files(rest.coalesce(_number_of_files(size, file_bytes)))
    if pause is not None:
        pause()
    after = _bytes(new)
    actions = [*(rearranged(shard.table, file) for file in new), *map(removed, old.values())]
    note = Note(new_token(), "merge", since=found.to)
    version = transaction.commit(note, actions=actions, mode="Overwrite")
    log.info(
        "merged location=%s to=%d version=%d files=%d→%d bytes=%d→%d",
        *(location, found.to, version, len(old), len(new), before, after),
    )
    return Merged(found.to, version, transaction.version, len(old), before, len(new), after)


def _summed(source: DataFrame, schema: StructType, found: Plan, file_bytes: int) -> DataFrame:
    """The rows at or before the time that is merged to, at that time."""
    number = _number_of_files(found.bytes, file_bytes)
    old, data = source.where(sql.col(TIME) <= found.to), schema.fields[2:]
    keys = [sql.col(quoted(field.name)) for field in data]
    if any(holds(VariantType, field.dataType) for field in data):
        summed = old.where(sql.col(DIFF) != 0).coalesce(number)
    else:
        # Spread over as many tasks as there shall be files. Maps cannot be hashed; the other columns have to do.
        spread = [key for key, field in zip(keys, data, strict=True) if not holds(MapType, field.dataType)]
        ready = old.repartition(number, *spread) if spread else old
        summed = ready.groupBy(*keys).agg(sql.sum(DIFF).alias(DIFF)).where(sql.col(DIFF) != 0)
        summed = summed if spread else summed.repartition(number)
    names = [field.name for field in data]
    return summed.select(
        sql.lit(found.to).cast(LongType()).alias(TIME), DIFF, *(sql.col(quoted(name)) for name in names)
    )


def _number_of_files(size: int, file_bytes: int) -> int:
    return max(1, math.ceil(size / file_bytes))


def _bytes(files: Iterable[Any]) -> int:
    return sum(int(file.size()) for file in files)


def _glance(shard: Updates, storage_options: Mapping[str, str] | None) -> list[File]:
    """The files, by way of deltalake if it can read the table.

    Most of the time there is nothing to do, and Spark takes a hundred times longer to say so.
    """
    if shard.table.is_local or storage_options is not None:
        try:
            table = DeltaTable(shard.table.location, storage_options=dict(storage_options or {}))
            found = table.get_add_actions(flatten=True)
        except (DeltaError, OSError, ValueError):  # it does not know all that Spark does, such as widened types
            log.debug("deltalake cannot read %s", shard.table.location, exc_info=True)
        else:
            none = [None] * found.num_rows
            columns = (
                found.column(name).to_pylist() if name in found.schema.names else none
                for name in ("path", "size_bytes", f"min.{TIME}", f"max.{TIME}")
            )
            return [File(*row) for row in zip(*columns, strict=True)]
    return _files(shard, shard.table.begin().snapshot)


def _files(shard: Updates, snapshot: Any) -> list[File]:
    """The files of a version, in one job: a call into the JVM for each would take minutes for a large shard."""
    times = (f"CAST(get_json_object(stats, '$.{each}Values.{TIME}') AS BIGINT)" for each in ("min", "max"))
    found = DataFrame(snapshot.allFiles().toDF(), shard.table.spark).selectExpr("path", "size", *times)
    return [File(*row) for row in found.collect()]

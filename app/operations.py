"""What is done to shards, with Spark and on their files: each operation can be repeated, and come late.

Spark writes to a shard's log, compare-and-append or monotone (app/shards/updates.py, merging.py); files are deleted by
name, and only those which can never be live again (app/shards/cleaning.py).
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Final

from pyspark.sql import SparkSession

from app.config import Config, texts
from app.core.frontier import EMPTY
from app.core.images import Shard
from app.core.shard_work import Merge
from app.failpoints import reach
from app.job import Job, Tended
from app.metrics import Metrics
from app.shards.cleaning import Cleaner, Deleted
from app.shards.errors import Conflict, ShardMissing
from app.shards.merging import merge_if_worthwhile
from app.shards.places import empty_above
from app.shards.updates import Updates, create
from app.state.errors import Fenced

log = logging.getLogger(__name__)

POOL: Final = "holdfast.work"
"""Spark's pool for all of this: it gets its share of the executors, and no more."""
SOONEST_MS: Final = 1_000
ORPHANS_EVERY_MS: Final = 6 * 3_600_000
MOST_CLEANERS: Final = 10_000
"""How many remember what they have read of their shard's log. The others read it again."""


class UnsupportedFormat(Exception):
    """A shard of a format that is only recorded so far: nothing is done to it, and nothing deleted."""


class ShardOperations:
    """May be used by many threads at once, each with a shard of its own."""

    def __init__(self, spark: SparkSession, config: Config, metrics: Metrics) -> None:
        self._spark = spark
        self._options = texts(config.storage_options)
        self._warehouse = config.warehouse
        self._metrics = metrics
        self._lock = threading.Lock()
        self._cleaners: dict[str, Cleaner] = {}  # by shard, the one that was asked for last at the end
        self._orphans_at: dict[str, int] = {}
        self._overtaken: set[str] = set()  # shards whose last merge gave way to someone else's commit

    def create(self, job: Job) -> None:
        self._enter(job.shard)
        create(self._spark, job.shard.location, job.shard.table_id, job.schema)

    def evolve(self, job: Job) -> None:
        self._enter(job.shard)
        if job.schema is not None:
            self._updates(job.shard).evolve(job.schema)

    def tend(self, job: Job, merged: Callable[[Merge], None]) -> Tended:
        self._enter(job.shard)
        try:
            merge = self._merge(job)
        except Fenced:
            raise  # we were replaced: nothing more is touched
        except Exception as error:
            # A merge that always fails must not keep the files for ever that it has written each time.
            left = self._clean_up(job)
            if not isinstance(error, Conflict) or job.shard.id in self._overtaken:
                raise
            self._overtaken.add(job.shard.id)  # a second time in a row it has failed, and waits longer each time
            log.info("a merge is put off, someone else was quicker shard=%s conflict=%s", job.shard.id, error)
            soon = job.now + SOONEST_MS
            return left._replace(again_at=min(soon, left.again_at or soon))
        self._overtaken.discard(job.shard.id)
        if merge is not None:
            merged(merge)
        return self._clean_up(job)

    def _clean_up(self, job: Job) -> Tended:
        """Deletes what is dead and what is orphaned; says when there will be more to delete."""
        cleaner = self._cleaner(job)
        limit = -1 if job.clean_up_limit is None else job.clean_up_limit
        grace_ms = job.parameters.vacuum_grace
        self._count("dead", cleaner.delete_dead_files(upto_version=limit, older_than_ms=grace_ms))
        # Not in each shard's first look, which all come at once.
        again_at = self._orphans_at.setdefault(job.shard.id, job.now + random.randrange(ORPHANS_EVERY_MS))
        if again_at <= job.now:
            orphan_grace_ms = job.parameters.orphan_grace
            self._count("orphan", cleaner.delete_orphans(upto_version=limit, orphan_grace_ms=orphan_grace_ms))
            again_at = self._orphans_at[job.shard.id] = job.now + ORPHANS_EVERY_MS
        waiting = cleaner.waiting(upto_version=limit, older_than_ms=grace_ms)
        if waiting.due_in_ms is not None:
            again_at = min(again_at, job.now + max(waiting.due_in_ms, SOONEST_MS))
        return Tended(again_at, cleaner.version, waiting.pinned)

    def _merge(self, job: Job) -> Merge | None:
        merged = merge_if_worthwhile(
            self._updates(job.shard),
            job.shard.since,
            job.epoch,
            storage_options=self._options,
            pause=lambda: reach("merging"),
        )
        if merged is None:
            return None
        self._metrics.merges.inc()
        self._metrics.merged_bytes_before.inc(merged.bytes_before)
        self._metrics.merged_bytes_after.inc(merged.bytes_after)
        return Merge(merged.to, merged.bytes_before, merged.bytes_after)

    def finalize(self, job: Job) -> None:
        shard = job.shard
        self._enter(shard)
        log.info("finalizing shard=%s location=%s attempt=%d", shard.id, shard.location, shard.attempts + 1)
        if shard.log_version is None:
            # Nobody has seen it, but a writer may be about to make it: then it must find a log that is sealed.
            create(self._spark, shard.location, shard.table_id, job.schema)
        updates = self._updates(shard)
        try:
            updates.seal(job.epoch)
            updates.set_since(EMPTY, job.epoch)
        except ShardMissing:
            self._check_mounted(shard)
            log.warning("a shard to be finalized is gone already shard=%s location=%s", shard.id, shard.location)
        else:
            reach("finalizing")
            self._count("finalized", self._cleaner(job).delete_everything_named())
        self._forget(shard)

    def _check_mounted(self, shard: Shard) -> None:
        """ShardMissing, if the table may come back with its disk: it would be neither sealed nor deleted."""
        if (empty := empty_above(shard.location, roots=self._warehouse)) is not None:
            raise ShardMissing(
                f"The table at {shard.location} is gone, and there is nothing in {empty}: is its disk not mounted? It "
                "is tried again. If you have deleted the table, put a file there, whatever it is: then it counts as "
                "finalized."
            )

    def purge(self, job: Job) -> None:
        self._enter(job.shard)
        self._count("finalized", self._cleaner(job).purge())
        self._forget(job.shard)

    def _enter(self, shard: Shard) -> None:
        if shard.format != "updates":
            raise UnsupportedFormat(f"Shards of format {shard.format!r} are not worked on yet; nothing was touched.")
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", POOL)

    def _updates(self, shard: Shard) -> Updates:
        return Updates(self._spark, shard.location, shard.table_id)

    def _cleaner(self, job: Job) -> Cleaner:
        shard = job.shard
        with self._lock:
            cleaner = self._cleaners.pop(shard.id, None)
        if cleaner is None:
            cleaner = Cleaner(
                location=shard.location,
                options=self._options,
                roots=self._warehouse,
                table_id=shard.table_id,
                epoch=job.epoch,
            )
        with self._lock:
            self._cleaners[shard.id] = cleaner
            while len(self._cleaners) > MOST_CLEANERS:
                del self._cleaners[next(iter(self._cleaners))]  # the one that was asked for longest ago
        return cleaner

    def _forget(self, shard: Shard) -> None:
        with self._lock:
            self._cleaners.pop(shard.id, None)
        self._orphans_at.pop(shard.id, None)
        self._overtaken.discard(shard.id)

    def _count(self, why: str, deleted: Deleted) -> None:
        self._metrics.deleted_files.labels(why).inc(deleted.files)
        self._metrics.deleted_bytes.labels(why).inc(deleted.bytes)

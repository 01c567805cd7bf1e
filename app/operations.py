"""What is done to shards, with Spark and on their files: each operation can be repeated, and come late.

Spark writes to a shard's log, compare-and-append or monotone (app/shards/updates.py, merging.py); files are deleted by
name, and only those which can never be live again (app/shards/cleaning.py).
"""

from __future__ import annotations

import logging
from typing import Final

from pyspark.sql import SparkSession

from app.config import Config, texts
from app.core.frontier import EMPTY
from app.core.images import Shard
from app.failpoints import reach
from app.metrics import Metrics
from app.shards.cleaning import Cleaner, Deleted
from app.shards.errors import Conflict, ShardMissing
from app.shards.merging import merge_if_worthwhile
from app.shards.updates import Updates, create
from app.work import Job

log = logging.getLogger(__name__)

POOL: Final = "holdfast.work"
"""Spark's pool for all of this: it gets its share of the executors, and no more."""
SOONEST_MS: Final = 1_000
LATEST_MS: Final = 60_000
ORPHANS_EVERY_MS: Final = 6 * 3_600_000


class UnsupportedFormat(Exception):
    """A shard of a format that is only recorded so far: nothing is done to it, and nothing deleted."""


class ShardOperations:
    """May be used by many threads at once, each with a shard of its own."""

    def __init__(self, spark: SparkSession, config: Config, metrics: Metrics) -> None:
        self._spark = spark
        self._options = texts(config.storage_options)
        self._warehouse = config.warehouse
        self._metrics = metrics
        self._cleaners: dict[str, Cleaner] = {}
        self._orphans_at: dict[str, int] = {}

    def create(self, job: Job) -> None:
        self._enter(job.shard)
        create(self._spark, job.shard.location, job.shard.table_id, job.schema)

    def evolve(self, job: Job) -> None:
        self._enter(job.shard)
        if job.schema is not None:
            self._updates(job.shard).evolve(job.schema)

    def tend(self, job: Job) -> int | None:
        self._enter(job.shard)
        try:
            self._merge(job)
        except Conflict as conflict:
            log.info("a merge is put off, someone else was quicker shard=%s conflict=%s", job.shard.id, conflict)
            return job.now + SOONEST_MS
        cleaner = self._cleaner(job.shard)
        if job.clean_up_limit is not None:
            grace_ms = job.parameters.vacuum_grace
            self._count("dead", cleaner.delete_dead_files(upto_version=job.clean_up_limit, older_than_ms=grace_ms))
        orphans_at = self._orphans_at.setdefault(job.shard.id, job.now)
        if orphans_at <= job.now:
            self._count("orphan", cleaner.delete_orphans(orphan_grace_ms=job.parameters.orphan_grace))
            orphans_at = self._orphans_at[job.shard.id] = job.now + ORPHANS_EVERY_MS
        if not cleaner.has_dead_files:
            return orphans_at
        # They wait for their grace, for a hold that pins them, or for their commit to be seen and journalled.
        return job.now + min(max(job.parameters.vacuum_grace, SOONEST_MS), LATEST_MS)

    def _merge(self, job: Job) -> None:
        merged = merge_if_worthwhile(
            self._updates(job.shard),
            job.shard.since,
            job.epoch,
            storage_options=self._options,
            pause=lambda: reach("merging"),
        )
        if merged is not None:
            self._metrics.merges.inc()
            self._metrics.merged_bytes_before.inc(merged.bytes_before)
            self._metrics.merged_bytes_after.inc(merged.bytes_after)

    def finalize(self, job: Job) -> None:
        shard = job.shard
        self._enter(shard)
        if shard.log_version is None:
            # Nobody has seen it, but a writer may be about to make it: then it must find a log that is sealed.
            create(self._spark, shard.location, shard.table_id, job.schema)
        updates = self._updates(shard)
        try:
            updates.seal(job.epoch)
            updates.set_since(EMPTY, job.epoch)
        except ShardMissing:
            log.warning("a shard to be finalized is gone already shard=%s location=%s", shard.id, shard.location)
            return
        reach("finalizing")
        self._count("finalized", self._cleaner(shard).delete_everything_named())

    def purge(self, job: Job) -> None:
        self._enter(job.shard)
        self._count("finalized", self._cleaner(job.shard).purge())
        self._cleaners.pop(job.shard.id, None)
        self._orphans_at.pop(job.shard.id, None)

    def _enter(self, shard: Shard) -> None:
        if shard.format != "updates":
            raise UnsupportedFormat(f"Shards of format {shard.format!r} are not worked on yet; nothing was touched.")
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", POOL)

    def _updates(self, shard: Shard) -> Updates:
        return Updates(self._spark, shard.location, shard.table_id)

    def _cleaner(self, shard: Shard) -> Cleaner:
        if shard.id not in self._cleaners:
            self._cleaners[shard.id] = Cleaner(
                location=shard.location, options=self._options, roots=self._warehouse, table_id=shard.table_id
            )
        return self._cleaners[shard.id]

    def _count(self, why: str, deleted: Deleted) -> None:
        self._metrics.deleted_files.labels(why).inc(deleted.files)
        self._metrics.deleted_bytes.labels(why).inc(deleted.bytes)

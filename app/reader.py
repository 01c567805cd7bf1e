"""Reading collections: exact at a time, under holds that come and go by themselves.

    from app.reader import Reader

    with Reader(spark, root=".holdfast") as reader:
        with reader.snapshot("orders", as_of=17) as orders:      # a DataFrame, its rows with a `_count`
            orders.groupBy("customer").sum("_count").show()
        with reader.subscribe("orders", as_of=17) as changes:    # the snapshot, and then what comes after it
            for step in changes:
                step.frame.show()

Every read holds its time and pins its files for as long as it runs, and renews that in the background; so no merge, no
clean-up and no drop can change what it reads. A frame is to be evaluated inside its block. docs/reading.md says more.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession

from app.client import Holdfast, Lease, milliseconds
from app.client_errors import InvalidArgument, InvalidUsage
from app.commandline.settings import embedded_address
from app.core.frontier import EMPTY, MAX_TIME_GIVEN, ZERO
from app.reading import subscription
from app.reading.arrow import Batches
from app.reading.catalog import Catalog, Frontiers
from app.reading.errors import ReadTimeout, ShardUnreadable, nothing_readable
from app.reading.guard import Asked, Guard
from app.reading.planning import Plan, Planner
from app.reading.reading import Reading
from app.reading.stats import PartStats, SnapshotStats, parts_of, summary
from app.reading.subscription import Progress, Step, Subscription

__all__ = [
    "Batches", "Frontiers", "PartStats", "ReadTimeout", "Reader", "ShardUnreadable", "SnapshotStats", "Step",
    "Subscription",
]  # fmt: skip

DEFAULT_LEASE: Final = "1m"
DEFAULT_TIMEOUT: Final = "30s"


class Reader:
    """Reads the collections of one root. Its methods may be called from any thread.

    Without `bootstrap_servers`, the controller of the root runs its own broker. `client`: one that is there already.
    `timeout` is in seconds and says how long to wait for the controller. That of a read says how long to wait for its
    time, and is a duration as in commands: `30s`, a timedelta, or milliseconds.
    """

    def __init__(
        self,
        spark: SparkSession,
        *,
        root: str = ".holdfast",
        bootstrap_servers: str | None = None,
        kafka_options: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, str] | None = None,
        commands_topic: str = "holdfast.commands",
        replies_topic: str = "holdfast.replies",
        holder: str = "reader",
        lease: Lease = DEFAULT_LEASE,
        count_column: str = "_count",
        timeout: float = 30.0,
        client: Holdfast | None = None,
    ) -> None:
        self._spark = spark
        self._root = root if "://" in root else str(Path(root).expanduser().absolute())
        self._storage_options = dict(storage_options or {})
        self._catalog = Catalog(self._root, self._storage_options, timeout_s=timeout)
        self._holder = holder
        self._lease_ms = milliseconds(lease)
        self._count_column = count_column
        self._own_client = client is None
        self._client = client
        self._connection: dict[str, Any] = {
            "commands_topic": commands_topic,
            "replies_topic": replies_topic,
            "options": kafka_options,
            "timeout": timeout,
        }
        self._bootstrap_servers = bootstrap_servers
        self._lock = threading.Lock()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._own_client and self._client is not None:
            self._client.close()

    # At a time.

    @contextmanager
    def snapshot(
        self, collection: str, as_of: int, *, hold: str | None = None, timeout: Lease | None = DEFAULT_TIMEOUT
    ) -> Iterator[DataFrame]:
        """A context: each row of the collection at a time, with its count. Waits until that time is complete."""
        with self._at(collection, as_of, hold, timeout, "snapshot") as (reading, plan), reading.explained():
            yield reading.snapshot(plan, as_of)

    @contextmanager
    def snapshot_latest(self, collection: str, *, hold: str | None = None) -> Iterator[DataFrame]:
        """A context: the rows at the largest time that can be read now, each of which must be there once."""
        with self._reading(collection, None, hold, "snapshot_latest") as reading, reading.explained():
            plan = reading.planner.newest()
            if plan.upper == EMPTY:
                raise InvalidUsage(
                    f"{collection!r} is closed, and has no latest time. Read it at a time, with snapshot."
                )
            if plan.upper == ZERO:
                yield reading.latest(plan._replace(version=None), 0)
                return
            as_of = int(plan.upper) - 1
            if (since := max(reading.guard.since, int(plan.since))) > as_of:
                raise nothing_readable(collection, since, plan.upper)
            reading.guard.downgrade(as_of)  # it was acquired at the earliest time, which others may want to merge
            yield reading.latest(plan, as_of)

    def snapshot_cursor(
        self, collection: str, as_of: int, *, hold: str | None = None, timeout: Lease | None = DEFAULT_TIMEOUT
    ) -> Batches:
        """What `snapshot` gives, as Arrow batches, one partition at a time."""

        def run() -> Generator[Any, None, None]:
            with self._at(collection, as_of, hold, timeout, "snapshot_cursor") as (reading, plan):
                yield from reading.in_batches(reading.snapshot_in_parts(plan, as_of))

        return Batches(run())

    def snapshot_and_stream(
        self, collection: str, as_of: int, *, hold: str | None = None, timeout: Lease | None = DEFAULT_TIMEOUT
    ) -> Batches:
        """All updates up to a time as they are stored, not summed: `_time`, `_diff` and the collection's columns."""

        def run() -> Generator[Any, None, None]:
            with self._at(collection, as_of, hold, timeout, "snapshot_and_stream") as (reading, plan):
                yield from reading.in_batches(reading.updates_in_parts(plan, at_most=as_of))

        return Batches(run())

    def snapshot_stats(
        self, collection: str, as_of: int, *, hold: str | None = None, timeout: Lease | None = DEFAULT_TIMEOUT
    ) -> SnapshotStats:
        """How much a read at a time has to go through, from the log alone."""
        with self._at(collection, as_of, hold, timeout, "snapshot_stats") as (reading, plan):
            return summary(plan, parts_of(reading.planner.files(), as_of), as_of)

    def snapshot_parts_stats(
        self, collection: str, as_of: int, *, hold: str | None = None, timeout: Lease | None = DEFAULT_TIMEOUT
    ) -> list[PartStats]:
        """The same, file by file."""
        with self._at(collection, as_of, hold, timeout, "snapshot_parts_stats") as (reading, _):
            return parts_of(reading.planner.files(), as_of)

    # As time goes on.

    def subscribe(
        self,
        collection: str,
        as_of: int | None = None,
        *,
        snapshot: bool = True,
        hold: str | None = None,
        timeout: Lease | None = None,
        lease: Lease | None = None,
    ) -> Subscription:
        """The snapshot at a time (by default the earliest), then every later change, until the collection is closed.

        To go on where another subscription has ended: `as_of=completed, snapshot=False`. `timeout`: how long to wait
        for a step; by default for ever. After the `ReadTimeout` it can be asked for that step again.
        """
        if as_of is None and not snapshot:
            raise InvalidArgument(
                "A subscription without its snapshot needs `as_of`: the time up to which you have it."
            )
        progress = Progress()
        steps = subscription.run(
            self._reading(collection, as_of, hold, "subscribe", lease=lease),
            progress,
            as_of=as_of,
            snapshot=snapshot,
            timeout_s=_seconds(timeout),
            # Under a hold of the caller's it is their decision to follow what was dropped.
            dropped=lambda: hold is None and self._catalog.is_dropped(collection),
        )
        return Subscription(steps, progress)

    # Frontiers, from the tables. They are as new as the tables are: at least what this reader's client was told.

    def frontiers(self, collection: str) -> Frontiers:
        return self.frontiers_of([collection])[collection]

    def frontiers_of(self, collections: Iterable[str]) -> dict[str, Frontiers]:
        """Of several collections, at one moment."""
        return self._catalog.frontiers(collections, at_least=self._seq)

    def all_frontiers(self) -> dict[str, Frontiers]:
        """Of all active collections, at one moment: those that are live, and those that are dropped but held."""
        return self._catalog.frontiers(None, at_least=self._seq)

    def determine_time_dependence(self, collection: str) -> str | None:
        """`wall_clock`, if the collection's upper follows it; None if it only follows its inputs."""
        return self._catalog.time_dependence(collection, at_least=self._seq)

    # What they share.

    @property
    def _seq(self) -> int:
        return 0 if self._client is None else self._client.seq

    def _connected(self) -> Holdfast:
        with self._lock:
            if self._client is None:
                servers = self._bootstrap_servers or embedded_address(self._root)
                self._client = Holdfast(
                    servers, root=self._root, storage_options=self._storage_options, **self._connection
                )
            return self._client

    @contextmanager
    def _reading(
        self, collection: str, as_of: int | None, hold: str | None, what: str, *, lease: Lease | None = None
    ) -> Iterator[Reading]:
        """A read under its holds, from which nothing is planned yet."""
        if as_of is not None:
            _check_time(as_of)
        purpose = f"{what} of {collection} by process {os.getpid()} on {platform.node()}"[:1_000]
        asked = Asked(self._holder, purpose, self._lease_ms if lease is None else milliseconds(lease))
        client = self._connected()
        with Guard(client, self._catalog, collection, at=as_of, hold=hold, asked=asked) as guard:
            source = self._catalog.source(collection, at_least=client.seq)
            yield Reading(self._spark, Planner(source, guard, self._storage_options), self._count_column)

    @contextmanager
    def _at(
        self, collection: str, as_of: int, hold: str | None, timeout: Lease | None, what: str
    ) -> Iterator[tuple[Reading, Plan]]:
        """A read with the version that has everything up to its time."""
        timeout_s = _seconds(timeout)  # before anything is held
        with self._reading(collection, as_of, hold, f"{what} at {as_of}") as reading:
            yield reading, reading.planner.at(as_of, timeout_s=timeout_s, level=logging.WARNING)


def _seconds(timeout: Lease | None) -> float | None:
    return None if timeout is None else milliseconds(timeout) / 1000


def _check_time(as_of: object) -> None:
    if isinstance(as_of, bool) or not isinstance(as_of, int) or not 0 <= as_of <= MAX_TIME_GIVEN:
        raise InvalidArgument(
            f"`as_of` must be a time from 0 to {MAX_TIME_GIVEN}, not {as_of!r:.40}.", {"path": "as_of"}
        )

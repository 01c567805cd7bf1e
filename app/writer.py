"""Writing to a collection from a Spark job: finds its shard in the state, and appends to it.

    writer = Writer(spark, "orders")
    writer.append(spark.sql("SELECT 'a' AS k, 1L AS v"))

No controller and no Kafka is needed while writing: the upper of a shard is what its own log says, and the controller
reads it from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from pyspark.sql import DataFrame, SparkSession

from app.client_errors import CollectionMissing, HoldfastError, InvalidUsage
from app.core.descriptions import DEFAULT_TIMELINE
from app.core.frontier import EMPTY, ZERO, Frontier
from app.core.schema import parse_schema
from app.reading.catalog import Catalog, Stored
from app.shards.bounds import Appended, Bounds
from app.shards.columns import check_own
from app.shards.errors import Sealed, ShardMissing, UpperMismatch
from app.shards.updates import Updates, create

TIMEOUT_S: Final = 10.0


class Writer:
    """Appends to one collection. May be used by many threads, and any number of processes may have one.

    `root` is where the controller keeps its state, `storage_options` are what deltalake needs to read it there. The
    shard itself is reached with Spark's own settings. With `at_least`, the `seq` of a reply, the state is awaited that
    the reply speaks of.

    A table with `txns` is final up to the upper of that log, too, and of the log's own log if it has one. So rows are
    added at or above the greatest of these uppers, which is what `upper` says. But nothing compares with a log in the
    same instant: whoever advances it must do so only after the appends to its tables, at times before the new upper,
    have been answered.
    """

    def __init__(
        self,
        spark: SparkSession,
        collection: str,
        *,
        root: str = ".holdfast",
        storage_options: Mapping[str, str] | None = None,
        at_least: int = 0,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        catalog = Catalog(root, storage_options or {}, timeout_s=timeout_s)
        found, *logs = _writable(catalog, collection, at_least)
        self.collection = collection
        self._shard = _opened(spark, found, _columns_of(catalog, found, at_least))
        self._timeline = found.timeline
        self._schema = found.schema
        self._columns = None if found.schema is None else [column.name for column in parse_schema(found.schema)]
        self._logs = [_opened(spark, log, _columns_of(catalog, log, at_least), is_log=True) for log in logs]

    @property
    def upper(self) -> Frontier:
        """Where the next rows may be: everything before it is final."""
        return self._shard.upper.join(self._logs_upper())

    def compare_and_append(
        self, rows: DataFrame, expected_upper: int, new_upper: int, *, token: str | None = None
    ) -> Appended:
        """Adds rows, each with a `_time` from `expected_upper` up to, not including, `new_upper`, and a `_diff`.

        Only if the upper is the expected one; else `UpperMismatch`, whose `actual` says where it is. After an error
        that leaves it open whether the rows were added, call again with the same `token`: they are added once.
        """
        self._check_columns(rows)
        with self._caught_up(Bounds.of(expected_upper, new_upper), token):
            return self._shard.compare_and_append(rows, expected_upper, new_upper, token=token, columns=self._columns)

    def advance_upper(self, expected_upper: int, new_upper: int, *, token: str | None = None) -> Appended:
        """Says that nothing happened up to `new_upper`, so that readers need not wait."""
        with self._caught_up(Bounds.of(expected_upper, new_upper), token):
            return self._shard.advance_upper(expected_upper, new_upper, token=token)

    def append(self, rows: DataFrame, *, now_ms: Callable[[], int] | None = None) -> Appended:
        """Adds rows at the current time, or at the upper if that is later. They have no `_time`.

        Without a `_diff`, each row is added once; with -1, taken away. Others may write at the same time. `now_ms` says
        what the time is; on a timeline of its own only the caller knows.
        """
        if now_ms is None and self._timeline != DEFAULT_TIMELINE:
            raise InvalidUsage(
                f"{self.collection!r} is on the timeline {self._timeline!r}, on which the time of day means nothing. "
                "Say what the time is there, with `now_ms`, or use `compare_and_append`."
            )
        self._check_columns(rows)
        clock = now_ms or (lambda: int(time.time() * 1_000))
        return self._shard.append(rows, columns=self._columns, now_ms=lambda: max(clock(), self._earliest()))

    def seal(self) -> None:
        """Closes the collection for ever: its upper is `[]`. It stays readable."""
        self._shard.seal()

    def _check_columns(self, rows: DataFrame) -> None:
        """Before anything is written, also to catch up with a log."""
        if self._schema is not None:
            check_own(rows, self._schema)

    def _logs_upper(self) -> Frontier:
        return max((log.upper for log in self._logs), default=ZERO)

    def _earliest(self) -> int:
        """The first time that the logs leave open."""
        upper = self._logs_upper()
        if upper == EMPTY:
            raise self._sealed()
        return int(upper)

    @contextmanager
    def _caught_up(self, bounds: Bounds, token: str | None) -> Iterator[None]:
        """For what compares with the upper: that of the collection, which is the logs' if that is greater."""
        self._catch_up(bounds, token)
        try:
            yield
        except UpperMismatch as mismatch:  # it is that of the shard alone
            log = self._logs_upper()
            if log <= mismatch.actual:
                raise
            raise self._behind(log, bounds.expected) from None

    def _catch_up(self, bounds: Bounds, token: str | None) -> None:
        """Moves the shard's own upper up to that of the logs, if that is what the caller expects."""
        if not self._logs:
            return
        own, log = self._shard.upper, self._logs_upper()
        if own >= log or (own > bounds.expected and token is not None):
            return  # the shard compares for itself; or it may be a second attempt, which it recognises
        if log == EMPTY or bounds.expected != log:
            raise self._behind(log, bounds.expected)
        while own < log:
            try:
                self._shard.advance_upper(own, log)
                return
            except UpperMismatch as mismatch:
                own = mismatch.actual  # another writer has caught up first, or a part of the way

    def _behind(self, log: Frontier, expected: Frontier) -> Sealed | UpperMismatch:
        if log == EMPTY:
            return self._sealed()
        return UpperMismatch(
            log, f"The upper of {self.collection!r} is {log}, that of its transaction log, not {expected}."
        )

    def _sealed(self) -> Sealed:
        return Sealed(f"{self.collection!r} is closed for ever: its transaction log was sealed.")


def _writable(catalog: Catalog, id: str, at_least: int) -> list[Stored]:
    """A live collection, and the logs that it is written through. These may be dropped: they live on beneath it."""
    hint = "After creating it, give the `seq` of the reply as `at_least`."
    try:
        chain = catalog.chain(id, at_least=at_least)
    except CollectionMissing as missing:
        raise CollectionMissing(f"{missing.message} {hint}", missing.details) from None
    if chain[0].dropped:
        raise CollectionMissing(f"{id!r} was dropped, and cannot be written to any more.")
    for each in chain:
        if each.place.given_up:
            raise CollectionMissing(f"The shard of {each.collection!r} is being given up: the collection was dropped.")
    return chain


def _columns_of(catalog: Catalog, stored: Stored, at_least: int) -> str | None:
    """The schema of the table: its owner's, of which that of whoever shares it is an older one."""
    owner = stored.place.owner
    return stored.schema if owner == stored.collection else catalog.schema(owner, at_least=at_least)


def _opened(spark: SparkSession, stored: Stored, schema: str | None, *, is_log: bool = False) -> Updates:
    """The shard, with a table that has this schema. Of a log only the upper counts: it may have none."""
    id, place = stored.collection, stored.place
    if place.format != "updates":
        raise InvalidUsage(
            f"{id!r} is stored as an ordinary Delta table (format {place.format!r}) at {place.location}: write to it "
            "with Spark as to any other."
        )
    if not place.table_id:
        raise HoldfastError(f"The state does not say which Delta table {place.location} is; a newer controller would.")
    updates = Updates(spark, place.location, place.table_id)
    try:
        updates.frontiers()
    except ShardMissing:
        if place.seen:
            raise ShardMissing(
                f"The Delta table of {id!r} at {place.location} was there and is gone. It is not made anew, because "
                "what it held is lost. Restore it, or drop the collection and create it under another id."
            ) from None
        if schema is None and not is_log:
            raise InvalidUsage(
                f"{place.owner!r} has no schema, so its table cannot be made. Create it under another id with one."
            ) from None
        create(spark, place.location, place.table_id, schema)
    if schema is not None:
        # What the journal has accepted, the controller does to the table, too; whoever comes first.
        updates.evolve(schema)
    return updates

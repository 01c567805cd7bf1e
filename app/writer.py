"""Writing to a collection from a Spark job: finds its shard in the state, and appends to it.

    writer = Writer(spark, "orders")
    writer.append(spark.sql("SELECT 'a' AS k, 1L AS v"))

No controller and no Kafka is needed while writing: the upper of a shard is what its own log says, and the controller
reads it from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyspark.sql import DataFrame, SparkSession

from app.client_errors import CollectionMissing, HoldfastError, InvalidUsage
from app.core.descriptions import Table
from app.core.frontier import Frontier
from app.core.images import Collection, Shard
from app.core.schema import parse_schema
from app.shards.bounds import Appended, Bounds
from app.shards.errors import ShardMissing, UpperMismatch
from app.shards.updates import Updates, create
from app.state.rows import collection_image, shard_image
from app.state.schemas import read_rows
from app.status import POSITION, StateMissing, TablesBehind

_LOOK_S: Final = 0.05
TIMEOUT_S: Final = 10.0


class Writer:
    """Appends to one collection. May be used by many threads, and any number of processes may have one.

    `root` is where the controller keeps its state, `storage_options` are what deltalake needs to read it there. The
    shard itself is reached with Spark's own settings. With `at_least`, the `seq` of a reply, the state is awaited that
    the reply speaks of.

    A table with `txns` is final up to the upper of that log, too. So rows are added at or above the greater of both
    uppers, which is what `upper` says. But nothing compares with the log in the same instant: whoever advances the log
    must do so only after the appends to its tables, at times before the new upper, have been answered.
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
        state = _State(root, storage_options or {}, at_least, timeout_s)
        found, shard = state.live(collection)
        self.collection = collection
        self._shard = _opened(spark, found, shard)
        schema = found.description.schema
        self._columns = None if schema is None else [column.name for column in parse_schema(schema)]
        self._log: Updates | None = None
        source = found.description.data_source
        if isinstance(source, Table) and source.txns is not None:
            self._log = _opened(spark, *state.live(source.txns))

    @property
    def upper(self) -> Frontier:
        """Where the next rows may be: everything before it is final."""
        own = self._shard.upper
        return own if self._log is None else own.join(self._log.upper)

    def compare_and_append(
        self, rows: DataFrame, expected_upper: int, new_upper: int, *, token: str | None = None
    ) -> Appended:
        """Adds rows, each with a `_time` from `expected_upper` up to, not including, `new_upper`, and a `_diff`.

        Only if the upper is the expected one; else `UpperMismatch`, whose `actual` says where it is. After an error
        that leaves it open whether the rows were added, call again with the same `token`: they are added once.
        """
        self._catch_up(Bounds.of(expected_upper, new_upper), token)
        return self._shard.compare_and_append(rows, expected_upper, new_upper, token=token, columns=self._columns)

    def advance_upper(self, expected_upper: int, new_upper: int, *, token: str | None = None) -> Appended:
        """Says that nothing happened up to `new_upper`, so that readers need not wait."""
        self._catch_up(Bounds.of(expected_upper, new_upper), token)
        return self._shard.advance_upper(expected_upper, new_upper, token=token)

    def append(self, rows: DataFrame, *, now_ms: Callable[[], int] | None = None) -> Appended:
        """Adds rows at the current time, or at the upper if that is later. They have no `_time`.

        Without a `_diff`, each row is added once; with -1, taken away. Others may write at the same time.
        """
        clock, log = now_ms or (lambda: int(time.time() * 1_000)), self._log
        if log is None:
            return self._shard.append(rows, columns=self._columns, now_ms=clock)
        return self._shard.append(rows, columns=self._columns, now_ms=lambda: max(clock(), int(log.upper)))

    def seal(self) -> None:
        """Closes the collection for ever: its upper is `[]`. It stays readable."""
        self._shard.seal()

    def _catch_up(self, bounds: Bounds, token: str | None) -> None:
        """Moves the shard's own upper up to that of the log, if that is what the caller expects."""
        if self._log is None:
            return
        own, log = self._shard.upper, self._log.upper
        if own >= log or own > bounds.expected or (own == bounds.expected and token is not None):
            return  # the shard compares for itself; or it is a second attempt, which it recognises
        if bounds.expected != log:
            raise UpperMismatch(
                log,
                f"The upper of {self.collection!r} is {log}, that of its transaction log, not {bounds.expected}.",
            )
        self._shard.advance_upper(own, log)


class _State:
    """The rows that say where a collection's data is."""

    def __init__(self, root: str, options: Mapping[str, str], at_least: int, timeout_s: float) -> None:
        self._root = root.rstrip("/")
        self._options = dict(options)
        self._at_least = at_least
        self._deadline = time.monotonic() + timeout_s

    def live(self, id: str) -> tuple[Collection, Shard]:
        """A collection that can be written to. The tables are merged one after the other: its shard may come later."""
        while True:
            found = self._row("collections", f"id = '{_plain(id)}'")
            if found is None or found["dropped"]:
                raise CollectionMissing(
                    f"There is no live collection {id!r} in the state at {self._root}: it was never created, or was "
                    "dropped. After creating it, give the `seq` of the reply as `at_least`."
                )
            collection = collection_image(found)
            row = self._row("shards", f"shard = '{collection.shard}'")
            if row is not None:
                shard = shard_image(row)
                if shard.state in ("finalizing", "finalized"):
                    raise CollectionMissing(f"The shard of {id!r} is being given up: the collection was dropped.")
                return collection, shard
            self._wait(f"The shard {collection.shard!r} of {id!r} is not in the state yet")

    def _row(self, name: str, where: str) -> dict[str, Any] | None:
        location = f"{self._root}/state/{name}"
        while True:
            try:
                table = DeltaTable(location, storage_options=self._options)
                if (table.transaction_version(POSITION) or 0) >= self._at_least:
                    return next(read_rows(name, table, where), None)
            except (DeltaError, FileNotFoundError) as error:
                raise StateMissing(
                    f"The table at {location} cannot be read. Is the root right, and does a controller run? {error}"
                ) from error
            self._wait(f"The table {name} has not reached seq {self._at_least} yet")

    def _wait(self, why: str) -> None:
        if time.monotonic() >= self._deadline:
            raise TablesBehind(f"{why}: the controller has stopped, or is very slow.")
        time.sleep(_LOOK_S)


def _opened(spark: SparkSession, collection: Collection, shard: Shard) -> Updates:
    """The shard, with a table that has the collection's columns."""
    if shard.format != "updates":
        raise InvalidUsage(
            f"{collection.id!r} is stored as an ordinary Delta table (format {shard.format!r}) at {shard.location}: "
            "write to it with Spark as to any other."
        )
    if not shard.table_id:
        raise HoldfastError(f"The state does not say which Delta table {shard.location} is; a newer controller would.")
    updates, schema = Updates(spark, shard.location, shard.table_id), collection.description.schema
    try:
        updates.frontiers()
    except ShardMissing:
        if shard.log_version is not None:
            raise ShardMissing(
                f"The Delta table of {collection.id!r} at {shard.location} was there and is gone. It is not made anew, "
                "because what it held is lost. Restore it, or drop the collection and create it under another id."
            ) from None
        if schema is None:
            raise InvalidUsage(
                f"{collection.id!r} has no schema, so its table cannot be made. Create it under another id with one."
            ) from None
        create(spark, shard.location, shard.table_id, schema)
    if schema is not None:
        # What the journal has accepted, the controller does to the table, too; whoever comes first.
        updates.evolve(schema)
    return updates


def _plain(id: str) -> str:
    """An id inside a condition in SQL."""
    return id.replace("'", "''")

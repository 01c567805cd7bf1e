"""The only way we commit to a shard: an explicit Delta transaction.

A DataFrame's `save` does not compare: of two racing appends with app transactions both may win. A transaction fixes the
version that it works on when it begins; what it relies on is read with `recorded`, which makes Delta refuse the commit
if someone else changes it meanwhile. This is an inner interface of Delta's: it is kept small, its version is pinned,
and `tests/spark/test_updates.py` tries it against the installed one.

Every commit carries a token in its user metadata. A commit that fails in whatever way is looked for in the log: an
answer that was lost, and a conflict with ourselves, are told from a failure.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from app.shards.errors import CommitUnknown, Conflict, LogUnreadable, ShardMissing, UnsafeShard, WrongTable
from app.shards.gateway import JVM_ERRORS, Gateway, conflict_in, first_line, is_missing_file
from app.shards.lock import file_lock
from app.shards.notes import Note, new_token, note_in
from app.shards.recorded import Recorded, known_transactions, recorded_in
from app.shards.settings import FORGETS
from app.shards.stores import check_store
from app.state.store import local_path

LOCK_TIMEOUT_S: Final = 120.0
WIDENING: Final = "delta.enableTypeWidening"
PROPERTIES: Final = {"delta.checkpointInterval": "100"}
"""Of new tables. A checkpoint takes longer than many small commits, and the one who commits waits for it."""


def put(transaction: Any, actions: Any, operation: Any) -> int:
    """The commit itself. A function of its own, so that a test can lose its answer."""
    return int(transaction.commit(actions, operation))


class ShardTable:
    """The Delta table of one shard: which one it must be, and where."""

    def __init__(
        self, spark: SparkSession, location: str, table_id: str, *, lock_timeout_s: float = LOCK_TIMEOUT_S
    ) -> None:
        self.spark = spark
        self.location = location
        self.table_id = table_id
        self.gateway = Gateway(spark)
        self._local = local_path(location)
        self._lock_timeout_s = lock_timeout_s
        check_store(spark, location)

    def recorded(self) -> Recorded:
        """The app transactions of the newest version."""
        return recorded_in(self._newest())

    def schema(self) -> StructType:
        return _struct(self._newest().metadata())

    def begin(self) -> Transaction:
        """A transaction on the newest version, which is that of the right table."""
        with self._reading():
            transaction = self.log().startTransaction()
        self._check(transaction.snapshot())
        return Transaction(self, transaction)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Held around each commit on a local disk. Elsewhere the log store itself decides who is first."""
        if self._local is None:
            yield
        else:
            with file_lock(self.gateway.jvm, self._local, self._lock_timeout_s):
                yield

    def create(self, schema: StructType) -> None:
        """Makes version 0, unless it is there; then looks whether it is the right table, whoever made it."""
        if self._local is not None:
            self._local.mkdir(parents=True, exist_ok=True)
        with self.lock():
            transaction = self.log().startTransaction()
            if transaction.readVersion() < 0:
                metadata = {
                    "id": self.table_id,
                    "format": {"provider": "parquet", "options": {}},
                    "schemaString": schema.json(),
                    "partitionColumns": [],
                    "configuration": PROPERTIES,
                    "createdTime": int(time.time() * 1_000),
                }
                # True: without the defaults of this session (append-only, column mapping, …), so that the table is the
                # same whoever creates it.
                transaction.updateMetadata(self.gateway.action({"metaData": metadata}), True)
                with suppress(Conflict):  # another process was first, on a store where no lock keeps us apart
                    Transaction(self, transaction).commit(Note(new_token(), "create"), held=True, fresh=True)
        self._newest()

    @property
    def is_local(self) -> bool:
        return self._local is not None

    def find(self, token: str, *, after: int) -> int | None:
        """The version above `after` that carries this token."""
        newest = self._newest().version()
        for version in range(newest, after, -1):
            note = self.note_of(version)
            if note is not None and note.token == token:
                return version
        return None

    def note_of(self, version: int) -> Note | None:
        """What a commit says of itself; None if it is not ours, or its file is gone."""
        log = self.log()
        path = self.gateway.jvm.org.apache.hadoop.fs.Path(log.logPath(), f"{version:020}.json")
        try:
            lines = log.store().readAsIterator(path, log.newDeltaHadoopConf())
        except JVM_ERRORS as error:
            if is_missing_file(error):
                return None
            raise
        try:
            # Delta writes commitInfo first. A merge may have thousands of lines after it.
            first = json.loads(lines.next()) if lines.hasNext() else {}
        finally:
            lines.close()
        return note_in(first)

    def check_unchanged(self, version: int) -> None:
        """The table that was read is still there.

        Delta does not look again before it puts the next version: an append to a table that was deleted meanwhile would
        succeed, and leave a log that nobody can read.
        """
        newest = self._newest()
        if newest.version() < version:
            raise WrongTable(
                f"The log at {self.location} went back from version {version} to {newest.version()}: the table was "
                "replaced while we were writing to it. Nothing was committed."
            )

    def _newest(self) -> Any:
        with self._reading():
            snapshot = self.log().update(False, self.gateway.none(), self.gateway.none())
        self._check(snapshot)
        return snapshot

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except JVM_ERRORS as error:
            raise LogUnreadable(f"The Delta log at {self.location} cannot be read: {first_line(error)}") from error

    def log(self) -> Any:
        """Delta's own, which it keeps for as long as it is in use."""
        return self.gateway.delta.DeltaLog.forTable(self.gateway.session, self.location)

    def _check(self, snapshot: Any) -> None:
        if snapshot.version() < 0:
            raise ShardMissing(
                f"There is no Delta table at {self.location}: it was never created, or the collection was dropped and "
                "its shard is purged."
            )
        metadata = snapshot.metadata()
        if metadata.id() != self.table_id:
            raise WrongTable(
                f"The Delta table at {self.location} has the id {metadata.id()}, not {self.table_id}: it is not this "
                "shard, and is left alone."
            )
        if metadata.configuration().contains(FORGETS):
            raise UnsafeShard(
                f"The table at {self.location} has the property {FORGETS}, which makes Delta forget the upper. Run "
                f"ALTER TABLE delta.`{self.location}` UNSET TBLPROPERTIES ('{FORGETS}')."
            )


class Transaction:
    """One attempt to commit, on the version that was the newest when it began."""

    def __init__(self, table: ShardTable, transaction: Any) -> None:
        self._table = table
        self._transaction = transaction
        self.version = int(transaction.readVersion())

    def recorded(self, app_id: str) -> int:
        """What an app transaction is at; if someone else sets it before we commit, our commit is refused."""
        found = known_transactions(self.snapshot)
        if found is None:
            return max(0, int(self._transaction.txnVersion(app_id)))
        self._transaction.readTxn().append(app_id)  # which is how `txnVersion` makes us depend on it
        return found.get(app_id, 0)

    @property
    def schema(self) -> StructType:
        return _struct(self._transaction.metadata())

    @property
    def snapshot(self) -> Any:
        return self._transaction.snapshot()

    def can_widen(self) -> bool:
        configuration = self._transaction.metadata().configuration()
        return bool(configuration.contains(WIDENING)) and configuration.apply(WIDENING) == "true"

    def allow_widening(self) -> None:
        """Switches on Delta's widening of types, which not every reader knows; so only when it is needed."""
        self._change_metadata(lambda metadata: metadata["configuration"].update({WIDENING: "true"}))

    def change_schema(self, schema: StructType) -> None:
        """The schema from this commit on. Must come before any file is written."""
        gateway = self._table.gateway
        after = gateway.struct(schema.json())
        if self.can_widen():  # notes on each widened column from which type to which, as Delta wants it
            before = self._transaction.metadata().schema()
            after = gateway.delta.TypeWideningMetadata.addTypeWideningMetadata(self._transaction, after, before)
        self._change_metadata(lambda metadata: metadata.update(schemaString=after.json()))

    def _change_metadata(self, change: Callable[[dict[str, Any]], None]) -> None:
        metadata = json.loads(self._transaction.metadata().json())["metaData"]
        change(metadata)
        self._transaction.updateMetadata(self._table.gateway.action({"metaData": metadata}), False)

    def write_files(self, rows: DataFrame) -> list[Any]:
        """Writes the rows, which have the table's columns in its order; the actions that add the files."""
        written = self._transaction.writeFiles(rows._jdf).iterator()
        files = []
        while written.hasNext():
            files.append(written.next())
        return files

    def commit(
        self,
        note: Note,
        *,
        actions: Sequence[Any] = (),
        sets: Mapping[str, int] | None = None,
        mode: str = "Append",
        held: bool = False,
        fresh: bool = False,
    ) -> int:
        """Commits; returns the version. `held`: the caller has the lock. `fresh`: there is no table yet."""
        gateway = self._table.gateway
        now = int(time.time() * 1_000)
        everything = list(actions) + [
            gateway.action({"txn": {"appId": app, "version": int(value), "lastUpdated": now}})
            for app, value in (sets or {}).items()
        ]
        operation = gateway.write_operation(mode, note.json())
        with nullcontext() if held else self._table.lock():
            if not fresh:
                self._table.check_unchanged(self.version)
            try:
                return put(self._transaction, gateway.seq(everything), operation)
            except JVM_ERRORS as error:
                return self._find_out(note, error)

    def _find_out(self, note: Note, error: Exception) -> int:
        """Whether a commit that failed has landed all the same."""
        conflict = conflict_in(error)
        try:
            landed = self._table.find(note.token, after=self.version)
        except ShardMissing:
            landed = None
        except (LogUnreadable, *JVM_ERRORS):
            raise CommitUnknown(
                f"A commit to {self._table.location} failed, and the log cannot be read to find out whether it landed: "
                f"{first_line(error)}"
            ) from error
        if landed is not None:
            return landed
        if conflict is not None:
            raise conflict from error
        raise CommitUnknown(
            f"A commit to {self._table.location} failed, and is not in the log so far. Try again with the same token: "
            f"it is applied at most once. The error: {first_line(error)}"
        ) from error


def _struct(metadata: Any) -> StructType:
    return StructType.fromJson(json.loads(metadata.schemaString()))

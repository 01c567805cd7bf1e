"""Shards with the format `updates`: a changelog whose sum up to a time is the content at that time.

The table has `_time BIGINT, _diff BIGINT` and then the data columns. Its own log carries its frontiers, as app
transactions: `holdfast.upper`, `holdfast.since` (the physical since: what a merge has made true, or is about to) and
`holdfast.epoch` (the fence: the newest controller that moved the since). A frontier `[]` is the greatest 63-bit value.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.types import LongType, StructType

from app.core.frontier import EMPTY, Frontier
from app.shards.bounds import Appended, Bounds, Frontiers
from app.shards.columns import DIFF, TIME, checked, evolved, fitted, row_error, shard_schema, widened
from app.shards.commit_log import EPOCH, SINCE, UPPER
from app.shards.errors import CommitUnknown, Conflict, InvalidBounds, SchemaMismatch, Sealed, UpperMismatch, WrongTable
from app.shards.fence import check_fence
from app.shards.gateway import JVM_ERRORS
from app.shards.lock import append_lock
from app.shards.notes import Note, new_token
from app.shards.transaction import LOCK_TIMEOUT_S, ShardTable, Transaction

MOST_ATTEMPTS: Final = 20
"""How often a commit is tried again when the commits of others come in between."""
MOST_UNKNOWN: Final = 3
"""How many failures of which nobody knows whether they were any, before the caller is told."""
MOST_TIMES: Final = 50
"""How often `append` looks for a new time because others wrote to the same shard."""
MOST_COMMITS_BACK: Final = 1_000
"""How far back an earlier attempt is looked for; whoever made it has long given up by then."""
APPEND_WAIT_S: Final = 600.0

Pause = Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Change:
    """A commit without files."""

    note: Note
    sets: Mapping[str, int]


def create(spark: SparkSession, location: str, table_id: str, schema_ddl: str | None) -> Updates:
    """The shard at this location, with a table that is made if there is none. Any number of processes may call it.

    A table that is there keeps its columns: see `Updates.evolve`. One with another id is refused (`WrongTable`).
    """
    schema = shard_schema(schema_ddl)
    shard = Updates(spark, location, table_id)
    shard.table.create(schema)
    check_format(shard.table.schema(), location)
    return shard


class Updates:
    """One shard. Holds nothing but its address: any number of these, in any process, may be in use at once."""

    def __init__(
        self, spark: SparkSession, location: str, table_id: str, *, lock_timeout_s: float = LOCK_TIMEOUT_S
    ) -> None:
        self.table = ShardTable(spark, location, table_id, lock_timeout_s=lock_timeout_s)

    def frontiers(self) -> Frontiers:
        recorded = self.table.recorded()
        return Frontiers(recorded.version, Frontier(recorded[UPPER]), Frontier(recorded[SINCE]), recorded[EPOCH])

    @property
    def upper(self) -> Frontier:
        return self.frontiers().upper

    def compare_and_append(
        self,
        rows: DataFrame,
        expected_upper: int,
        new_upper: int,
        *,
        token: str | None = None,
        columns: Sequence[str] | None = None,
        pause: Pause | None = None,
    ) -> Appended:
        """Adds rows at times from `expected_upper` up to, not including, `new_upper`, which is then the upper.

        Only if the upper is the expected one; else `UpperMismatch`. With the `token` of an earlier call that may have
        succeeded, the answer is that of the earlier call if it did. `columns` are the data columns that the rows must
        have, by default all but nullable ones at the end. `pause` is for tests: called before the commit.
        """
        bounds, ours, retrying = Bounds.of(expected_upper, new_upper), token or new_token(), token is not None
        unknown, files, written = 0, [], None
        for _ in range(MOST_ATTEMPTS):
            transaction = self.table.begin()
            if (landed := self._compare(transaction, bounds, ours, retrying=retrying)) is not None:
                return landed
            if written != transaction.schema:
                files, written = self._write(transaction, rows, bounds, columns), transaction.schema
            if pause is not None:
                pause()
            retrying = True
            try:
                version = transaction.commit(bounds.note(ours), actions=files, sets={UPPER: bounds.upper})
                return Appended(version, bounds.upper)
            except Conflict:
                continue  # the upper moved, or the schema changed: the next look tells
            except CommitUnknown:
                # Trying again is safe. A put of ours that comes late competes for the same version as the next attempt.
                unknown += 1
                if unknown >= MOST_UNKNOWN:
                    raise
        raise self._disturbed()

    def advance_upper(self, expected_upper: int, new_upper: int, *, token: str | None = None) -> Appended:
        """Says that there is nothing at times from `expected_upper` up to `new_upper`: an append without rows."""
        bounds, ours, retrying = Bounds.of(expected_upper, new_upper), token or new_token(), token is not None
        before: list[Appended] = []

        def decide(transaction: Transaction, again: bool) -> _Change | None:
            landed = self._compare(transaction, bounds, ours, retrying=retrying or again)
            if landed is not None:
                before.append(landed)
                return None
            return _Change(bounds.note(ours), {UPPER: bounds.upper})

        version = self._commit_small(decide)
        return before[0] if version is None else Appended(version, bounds.upper)

    def append(
        self,
        rows: DataFrame,
        *,
        columns: Sequence[str] | None = None,
        now_ms: Callable[[], int] = lambda: int(time.time() * 1_000),
    ) -> Appended:
        """Adds rows at the current time in ms, or at the upper if that is later. They have no `_time`.

        Without a `_diff`, each row is added once. `now_ms` is asked again after each mismatch.
        """
        names = {name.lower() for name in rows.columns}
        if TIME in names:
            raise SchemaMismatch("`append` gives the rows their `_time`: leave it out, or use `compare_and_append`.")
        with_diff = rows if DIFF in names else rows.withColumn(DIFF, sql.lit(1).cast(LongType()))
        with append_lock(self.table.location, APPEND_WAIT_S):
            upper = self.upper
            for _ in range(MOST_TIMES):
                if upper == EMPTY:
                    raise self._sealed()
                at = max(int(upper), now_ms())
                timed = with_diff.withColumn(TIME, sql.lit(at).cast(LongType()))
                try:
                    return self.compare_and_append(timed, upper, at + 1, columns=columns)
                except UpperMismatch as mismatch:
                    upper = mismatch.actual
        raise self._disturbed()

    def seal(self, epoch: int | None = None) -> int | None:
        """Upper `[]`: every later append fails. The version that does it; None if it was sealed before.

        A controller gives its epoch, and is fenced by a newer one. A writer that closes its own shard has none.
        """

        def decide(transaction: Transaction, _: bool) -> _Change | None:
            if epoch is not None:
                self._check_fence(transaction, epoch)
            upper = transaction.recorded(UPPER)
            if upper == EMPTY:
                return None
            return _Change(Note(new_token(), "seal", expected=upper, upper=int(EMPTY)), {UPPER: EMPTY})

        return self._commit_small(decide)

    def set_since(self, since: int, epoch: int) -> int | None:
        """Physical since and fence, in one commit. Its version; None if the since is there already, or further."""
        if not 0 <= since <= EMPTY:
            raise InvalidBounds(f"{since} is no frontier.")

        def decide(transaction: Transaction, _: bool) -> _Change | None:
            fence = self._check_fence(transaction, epoch)
            if since <= transaction.recorded(SINCE):
                return None
            # The fence is written when it moves, not each time: a merge that relies on it would be refused by its own.
            sets = {SINCE: since} if fence == epoch else {SINCE: since, EPOCH: epoch}
            return _Change(Note(new_token(), "since", since=int(since)), sets)

        return self._commit_small(decide)

    def evolve(self, schema_ddl: str) -> int | None:
        """Adds nullable columns at the end and widens types, so that the table has this schema.

        The version that does it; None if the table has the schema already, or one that goes further.
        """
        wanted = shard_schema(schema_ddl)
        for _ in range(MOST_ATTEMPTS):
            with self.table.lock():
                transaction = self.table.begin()
                schema = evolved(transaction.schema, wanted)
                if schema is None:
                    return None
                wider = widened(transaction.schema, schema)
                ready = not wider or transaction.can_widen()
                if ready:
                    transaction.change_schema(schema)
                else:
                    transaction.allow_widening()  # in a commit of its own: it changes the protocol
                try:
                    version = transaction.commit(Note(new_token(), "schema" if ready else "widening"), held=True)
                except Conflict:
                    continue
                if ready:
                    return version
        raise self._disturbed()

    def _commit_small(self, decide: Callable[[Transaction, bool], _Change | None]) -> int | None:
        """A commit without files. It begins under the lock, so that no busy writer comes in between."""
        unknown = 0
        for attempt in range(MOST_ATTEMPTS):
            with self.table.lock():
                transaction = self.table.begin()
                change = decide(transaction, attempt > 0)
                if change is None:
                    return None
                try:
                    return transaction.commit(change.note, sets=change.sets, held=True)
                except Conflict:
                    continue
                except CommitUnknown:
                    unknown += 1
                    if unknown >= MOST_UNKNOWN:
                        raise
        raise self._disturbed()

    def _compare(self, transaction: Transaction, bounds: Bounds, token: str, *, retrying: bool) -> Appended | None:
        """None if the upper is the expected one; an earlier attempt if there was one; else an error."""
        actual = Frontier(transaction.recorded(UPPER))
        if actual == bounds.expected:
            return None
        if retrying and (landed := self._landed(token, bounds.expected, transaction.version)) is not None:
            return landed
        if actual == EMPTY:
            raise self._sealed()
        raise UpperMismatch(
            actual, f"The upper of {self.table.location} is {actual}, not {bounds.expected}: someone else has written."
        )

    def _landed(self, token: str, expected: Frontier, newest: int) -> Appended | None:
        """The commit that moved the upper on from `expected`, if it has this token."""
        for version in range(newest, max(-1, newest - MOST_COMMITS_BACK), -1):
            note = self.table.note_of(version)
            if note is None or note.expected is None or note.upper is None:
                continue
            if note.expected <= expected:
                same = note.expected == expected and note.token == token
                return Appended(version, Frontier(note.upper)) if same else None
        return None

    def _write(
        self, transaction: Transaction, rows: DataFrame, bounds: Bounds, columns: Sequence[str] | None
    ) -> list[Any]:
        schema = transaction.schema
        check_format(schema, self.table.location)
        fitting = fitted(rows, schema, columns=columns)
        try:
            return transaction.write_files(rows.select(*checked(fitting, lower=bounds.expected, upper=bounds.upper)))
        except JVM_ERRORS as error:
            if (wrong := row_error(error)) is not None:
                raise wrong from error
            raise

    def _check_fence(self, transaction: Transaction, epoch: int) -> int:
        fence = transaction.recorded(EPOCH)
        check_fence(self.table.location, fence=fence, epoch=epoch)
        return fence

    def _sealed(self) -> Sealed:
        return Sealed(
            f"The shard at {self.table.location} is closed for ever: it was sealed by its last writer, or because its "
            "collection was dropped."
        )

    def _disturbed(self) -> Conflict:
        return Conflict(
            f"Others kept committing to {self.table.location} in between. Nothing was committed; try again."
        )


def check_format(schema: StructType, location: str) -> None:
    """WrongTable, unless the table is a changelog."""
    begins = [(field.name, field.dataType) for field in schema.fields[:2]]
    if begins != [(TIME, LongType()), (DIFF, LongType())]:
        raise WrongTable(f"The table at {location} does not begin with the columns `{TIME} BIGINT, {DIFF} BIGINT`.")

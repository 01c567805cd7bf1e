"""The tables that users query: one row per thing, merged from the journal, each with the position it has reached.

A merge is compare-and-append, as in the journal: one commit after the version that was looked at, or none. It is made
only if the recorded position is below the new one and the recorded epoch not above ours, so a controller that was
replaced cannot set a table back, however late it comes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, Transaction, write_deltalake
from deltalake.exceptions import DeltaError

from app.core.images import COLLECTION, HOLD, SHARD, Image, Key
from app.state import rows
from app.state.changes import Change, Pending
from app.state.commit_log import NO_HOOKS
from app.state.errors import Fenced, OutcomeUnknown
from app.state.rows import CommandRow
from app.state.schemas import SCHEMAS, at_ms, gone_row, read_rows, row_of, table_of, to_arrow
from app.state.store import open_store
from app.state.table_setup import add_missing_columns, open_table
from app.state.table_upkeep import TableUpkeep, files_of_commit

log = logging.getLogger(__name__)

TABLES: Final = ("collections", "holds", "shards", "meta", "commands")
POSITION: Final = "holdfast.position"
EPOCH: Final = "holdfast.epoch"
"""App transactions: the seq up to which a table has the journal's entries, and the epoch of who merged them."""
MOST_ATTEMPTS: Final = 10
PAUSE_S: Final = 0.02
Changes = Mapping[Key, tuple[bytes | None, int, int]]


class Loaded(NamedTuple):
    """The rows of `collections`, `holds` and `shards` as images, those of `meta` as JSON, and each one's position."""

    images: dict[Key, Image]
    meta: dict[Key, bytes]
    positions: dict[str, int]


class _Part(NamedTuple):
    """A change of one table."""

    entity: str
    key: str
    change: Change
    created_seq: int
    anew: bool

    @property
    def row(self) -> rows.Row:
        return row_of(self.entity, self.key, self.change, self.created_seq)


class Tables:
    """Handles on all five. All methods may be called from any thread."""

    def __init__(self, root_uri: str, options: dict[str, str], *, read_only: bool) -> None:
        base = f"{root_uri.rstrip('/')}/state"
        self._lock = threading.RLock()
        self._tables = {name: _Table(name, f"{base}/{name}", options, read_only=read_only) for name in TABLES}

    @classmethod
    def open(cls, root_uri: str, *, storage_options: dict[str, str], read_only: bool = False) -> Tables:
        """Opens the tables of a root; creates those that are missing. The journal must be open already."""
        return cls(root_uri, storage_options, read_only=read_only)

    def positions(self) -> dict[str, int]:
        """The seq up to which each table has the journal's entries."""
        with self._lock:
            return {name: table.refreshed().position for name, table in self._tables.items()}

    def merge(self, changes: Changes, *, upto: int, epoch: int) -> None:
        """Makes all tables equal to the journal at `upto`.

        `changes` has the newest image of everything that changed after the position of the slowest table, or of more.
        Fenced if a newer controller merged. OutcomeUnknown if it failed for another reason; it can be repeated.
        """
        parts: dict[str, list[_Part]] = {name: [] for name in TABLES}
        created, anew = (changes.created, changes.anew) if isinstance(changes, Pending) else ({}, set())
        for key, (value, seq, written_in) in changes.items():
            change = Change(value, seq, written_in)
            parts[table_of(key[0])].append(_Part(*key, change, created.get(key, seq), key in anew))
        with self._lock:
            for name, table in self._tables.items():
                table.merge(parts[name], upto=upto, epoch=epoch)

    def maintain(self, *, now_ms: int, command_retention_ms: int) -> None:
        """Drops old command rows, compacts, checkpoints and cleans up, each when it is due. Harmless at any time."""
        with self._lock:
            for name, table in self._tables.items():
                before_ms = now_ms - command_retention_ms if name == "commands" else None
                table.maintain(forget_before_ms=before_ms)

    def load(self) -> Loaded:
        """Everything but the commands, each table at one version."""
        with self._lock:
            tables = {name: table.refreshed() for name, table in self._tables.items()}
            positions = {name: table.position for name, table in tables.items()}
            images: dict[Key, Image] = {}
            for row in tables["collections"].rows():
                images[COLLECTION, row["id"]] = rows.collection_image(row)
            for row in tables["holds"].rows():
                images[HOLD, row["hold"]] = rows.hold_image(row)
            for row in tables["shards"].rows():
                images[SHARD, row["shard"]] = rows.shard_image(row)
            meta = {(row["entity"], row["key"]): row["value"].encode() for row in tables["meta"].rows()}
            return Loaded(images, meta, positions)

    def load_commands(self, *, applied_since_ms: int) -> tuple[list[tuple[CommandRow, int, int]], int]:
        """The commands applied since then, in order, each with seq and epoch; and the table's position."""
        with self._lock:
            table = self._tables["commands"].refreshed()
            return _in_order(table.rows(f"applied_at >= {at_ms(applied_since_ms)}")), table.position

    def load_last_commands(self) -> list[tuple[CommandRow, int, int]]:
        """Those of the newest entry that the table has."""
        with self._lock:
            table = self._tables["commands"].refreshed()
            last = table.greatest("seq")
            return [] if last is None else _in_order(table.rows(f"seq = {last}"))

    def find_commands(self, topic: str, places: Collection[tuple[int, int]]) -> list[tuple[CommandRow, int, int]]:
        """The recorded results of records by partition and offset, in this order, each with seq and epoch.

        A topic that was deleted and made anew has the same places again: the newest row is meant.
        """
        if not places:
            return []
        offsets = [offset for _, offset in places]
        name = topic.replace("'", "''")
        where = f"topic = '{name}' AND \"offset\" BETWEEN {min(offsets)} AND {max(offsets)}"
        wanted, newest = set(places), dict[tuple[int, int], rows.Row]()
        with self._lock:
            for row in self._tables["commands"].refreshed().rows(where):
                place = (row["partition"], row["offset"])
                if place in wanted and (place not in newest or newest[place]["seq"] < row["seq"]):
                    newest[place] = row
        return [(rows.command_of(row), row["seq"], row["epoch"]) for _, row in sorted(newest.items())]


def _in_order(found: Iterable[rows.Row]) -> list[tuple[CommandRow, int, int]]:
    ordered = sorted(found, key=lambda row: (row["seq"], row["topic"], row["partition"], row["offset"]))
    return [(rows.command_of(row), row["seq"], row["epoch"]) for row in ordered]


class _Table:
    """One of them."""

    def __init__(self, name: str, uri: str, options: dict[str, str], *, read_only: bool) -> None:
        self._name = name
        self._store = open_store(uri, options)
        self._handle = open_table(name, uri, options, self._store, read_only=read_only)
        self._upkeep = TableUpkeep(name, self._store)

    @property
    def position(self) -> int:
        return self._handle.transaction_version(POSITION) or 0

    def refreshed(self) -> _Table:
        self._handle.update_incremental()
        return self

    def rows(self, where: str | None = None) -> Iterator[rows.Row]:
        return read_rows(self._name, self._handle, where)

    def greatest(self, column: str) -> int | None:
        """The greatest number in a column; reads only that."""
        batches = pa.RecordBatchReader.from_stream(self._handle.scan(columns=[column]))
        return max((pc.max(batch.column(0)).as_py() for batch in batches if batch.num_rows), default=None)

    def merge(self, parts: Sequence[_Part], *, upto: int, epoch: int) -> None:
        failure: Exception | None = None
        for attempt in range(MOST_ATTEMPTS):
            time.sleep(PAUSE_S * attempt)
            failure = self._attempt(parts, upto, epoch)
            if failure is None:
                return
            log.info("merge is tried again table=%s upto=%s error=%s", self._name, upto, failure)
        raise OutcomeUnknown(f"Merging table {self._name} up to entry {upto} failed: {failure}") from failure

    def _attempt(self, parts: Sequence[_Part], upto: int, epoch: int) -> Exception | None:
        """None if the table has reached `upto`; else why not. Also after a lost answer the recorded position tells."""
        try:
            position = self.refreshed().position
            merged_in = self._handle.transaction_version(EPOCH) or 0
            if merged_in > epoch:
                raise Fenced(
                    f"A controller with epoch {merged_in} merged table {self._name} up to entry {position}; "
                    f"this one has epoch {epoch} and must stop."
                )
            if position < upto:
                self._write([part for part in parts if part.change.seq > position], upto, epoch)
        except (DeltaError, OSError) as error:
            return error
        return None

    def _write(self, parts: Sequence[_Part], upto: int, epoch: int) -> None:
        """One commit after the handle's version, or none; durable when this returns."""
        add_missing_columns(self._name, self._handle, self._store)
        properties = CommitProperties(
            max_commit_retries=0, app_transactions=[Transaction(POSITION, upto), Transaction(EPOCH, epoch)]
        )
        before = self._handle.version()
        if self._name == "commands" and parts:
            self._append(parts, properties)
        elif parts:
            self._merge(parts, properties)
        if self._handle.version() == before:
            # Nothing to write, or a merge that matched nothing, of which delta-rs makes no commit.
            self._handle.create_write_transaction(
                [],
                "append",
                SCHEMAS[self._name].columns,
                commit_properties=properties,
                post_commithook_properties=NO_HOOKS,
            )
            self._handle.update_incremental()
        self._sync(before)

    def _append(self, parts: Sequence[_Part], properties: CommitProperties) -> None:
        added = to_arrow(self._name, [part.row for part in parts])
        write_deltalake(
            self._handle, added, mode="append", commit_properties=properties, post_commithook_properties=NO_HOOKS
        )

    def _merge(self, parts: Sequence[_Part], properties: CommitProperties) -> None:
        gone = [part.change.value is None for part in parts]
        source = to_arrow(
            self._name,
            [gone_row(self._name, part.entity, part.key) if part.change.value is None else part.row for part in parts],
        )
        source = source.append_column("gone", pa.array(gone))
        source = source.append_column("anew", pa.array([part.anew for part in parts]))
        schema = SCHEMAS[self._name]
        inserts = {f'"{name}"': f's."{name}"' for name in schema.columns.names}
        updates = dict(inserts)
        if "created_seq" in schema.columns.names:
            updates['"created_seq"'] = 'CASE WHEN s."anew" THEN s."created_seq" ELSE t."created_seq" END'
        merger = self._handle.merge(
            source,
            " AND ".join(f't."{key}" = s."{key}"' for key in schema.keys),
            source_alias="s",
            target_alias="t",
            commit_properties=properties,
            post_commithook_properties=NO_HOOKS,
        )
        merger = merger.when_matched_delete('s."gone"').when_matched_update(updates)
        merger.when_not_matched_insert(inserts, 'NOT s."gone"').execute()

    def _sync(self, before: int) -> None:
        """The journal is trimmed behind the tables, so what they have must not be lost."""
        for version in range(before + 1, self._handle.version() + 1):
            self._store.sync(files_of_commit(self._store, version))

    def maintain(self, *, forget_before_ms: int | None) -> None:
        before = self._handle.version()
        if forget_before_ms is not None:
            self._upkeep.forget(self._handle, before_ms=forget_before_ms)
        self._upkeep.run(self._handle)
        self._sync(before)

"""The journal: an append-only Delta table whose version is the sequence number, and the only thing that decides.

An entry is committed at exactly the version after the one we know, or not at all, so that two controllers can never
both go on from the same point. Whatever went wrong, the log says what happened (`app.state.journal_end`).
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import uuid
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
from deltalake.exceptions import DeltaError

from app.core.errors import Corrupt
from app.state import journal_end, upkeep
from app.state.commit_log import Commit, DataFile, DeltaWriter, LinkWriter, Mark, Writer
from app.state.entries import Entry, JournalRow, entries_of, from_parquet, to_arrow
from app.state.errors import Fenced, OutcomeUnknown, StateMissing, Trimmed, UnsafeStore
from app.state.journal_end import JournalEnd
from app.state.snapshot import Snapshot, create_journal
from app.state.store import LocalStore, Store, open_store

log = logging.getLogger(__name__)

__all__ = ["Entry", "Fenced", "Journal", "JournalRow", "OutcomeUnknown", "StateMissing", "UnsafeStore"]

MOST_ATTEMPTS: Final = 100
"""How often an entry gives way to maintenance commits before we say that something is wrong."""


class Journal:
    """A handle on the journal. All methods may be called from any thread."""

    def __init__(
        self, uri: str, store: Store, writer: Writer | None, *, options: dict[str, str], instance: str
    ) -> None:
        self._store = store
        self._writer = writer
        self._instance = instance
        self._host, self._pid = platform.node(), os.getpid()
        self._recent = upkeep.Recent(store)
        self._upkeep = upkeep.Upkeep(uri, store, options)
        self._end = JournalEnd(uri, store, options, instance=instance, recent=self._recent)
        self._lock = threading.RLock()  # around `_end` and every commit
        self._maintenance = threading.Lock()  # around a round of maintenance; taken before the other one

    @classmethod
    def open(
        cls,
        uri: str,
        *,
        storage_options: dict[str, str],
        instance: str,
        read_only: bool = False,
        through_delta: bool = False,
    ) -> Journal:
        """Opens the journal; creates it if it is missing, and checks that the store lets only one of two writers win.

        `through_delta` commits through delta-rs also on a local path, as on object stores: for tests.
        """
        store = open_store(uri, storage_options)
        if read_only:
            return cls(uri, store, None, options=storage_options, instance=instance)
        writer: Writer
        if isinstance(store, LocalStore) and not through_delta:
            store.probe()
            writer = LinkWriter(store)
        else:
            DeltaWriter.probe(uri, storage_options, store)
            writer = DeltaWriter(uri, storage_options)
        create_journal(uri, storage_options, store)
        return cls(uri, store, writer, options=storage_options, instance=instance)

    @property
    def head(self) -> int:
        """The last version that we know."""
        return self._end.now.head

    @property
    def trimmed(self) -> int:
        """Entries up to this seq are no longer there; the tables have them."""
        return self._end.now.trimmed

    @property
    def last_seq(self) -> int:
        return self._end.now.last_seq

    @property
    def last_at(self) -> int:
        return self._end.now.last_at

    def append(self, *, epoch: int, at: int, origin: str, rows: Sequence[JournalRow]) -> int:
        """Appends an entry, and returns its seq when it is durable.

        Fenced, OutcomeUnknown: see there. Anything else that could be raised would leave open whether the entry is
        there, so nothing else is, but for a journal that is corrupt.
        """
        with self._lock:
            for _ in range(MOST_ATTEMPTS):
                try:
                    self._end.prepare(epoch)
                except (DeltaError, OSError) as error:
                    raise OutcomeUnknown(f"The journal cannot be read: {error}") from error
                attempt = uuid.uuid4().hex
                seq = self._end.now.head + 1
                entry = Entry(seq, epoch, at, origin, self._instance, list(rows))
                try:
                    table = to_arrow(entry, attempt)
                except (pa.ArrowException, TypeError, ValueError) as error:
                    raise AssertionError("the rows of an entry have JSON values, in UTF-8") from error
                if self._commit("entry", epoch, attempt, table=table):
                    return seq
            raise OutcomeUnknown(f"Other commits came first {MOST_ATTEMPTS} times in a row. Is maintenance looping?")

    def look(self, epoch: int) -> None:
        """Looks whether we are still the controller; on a quiet journal, for one file that is missing.

        Raises what the store raises if it cannot be reached: then nobody knows, and nothing may be done.
        """
        with self._lock:
            self._end.look(epoch)

    def read(self, after: int) -> Iterator[Entry]:
        """The entries above `after`, in order, to the end of the journal as it is now. Trimmed if some are gone.

        Whoever writes takes all of them into its memory: the next `append` goes on after them.
        """
        with self._lock:
            self._end.refresh()
            journal = self._end.now
        tries = 0
        while (file := _file_after(journal, after)) is not None:
            data = self._store.read(file.path)
            if data is None:
                # Someone compacted it away, longer ago than readers are waited for.
                tries += 1
                if tries > 3:
                    raise Corrupt(f"The journal's file {file.path} is missing.")
                with self._lock:
                    self._end.reload()
                    journal = self._end.now
                continue
            yield from entries_of(from_parquet(data), after=after)
            after = file.last_seq

    def maintain(self, *, epoch: int, trim_to: int, now_ms: int, retention_ms: int) -> None:
        """Keeps the journal small and quick: compacts, trims, checkpoints, cleans up, each when it is due.

        Cheap if nothing is due, so that it can be called after every entry. Entries wait for it only while it looks at
        the head and while it commits. Harmless at any time, also from a controller that was replaced while it was at
        it: commits are compare-and-append, a checkpoint says what is true at its version for ever, and only files are
        deleted that no version can ever name again.
        """
        with self._maintenance:
            journal = self._looked_at(epoch)
            try:
                plan = upkeep.plan(journal.files, trim_to=trim_to, before_ms=now_ms - retention_ms)
                if plan is not None:
                    self._compact(plan, epoch, last_version=journal.head + upkeep.MOST_BEHIND)
                if self._upkeep.checkpoint_is_due(head := self.head):
                    self._upkeep.checkpoint(head)
                self._upkeep.clean(self._looked_at(epoch))
            except (DeltaError, OSError, OutcomeUnknown) as error:
                # Entries do not depend on it: the next one finds out where the journal ends.
                log.warning("maintenance of the journal is put off head=%s error=%s", self.head, error)

    def _looked_at(self, epoch: int) -> Snapshot:
        """The journal just after a look at its head."""
        with self._lock:
            self._end.look(epoch)
            return self._end.now

    def _compact(self, plan: upkeep.Plan, epoch: int, *, last_version: int) -> None:
        """Writes the new file beside the entries that come meanwhile, and then commits it, if it still fits."""
        removed = [file.path for file in plan.files]
        attempt = uuid.uuid4().hex
        try:
            table, cut = upkeep.rewrite(plan, self._recent.read)
        except Corrupt:
            # A file is missing: as it should, if we took so long that it was compacted and deleted by who replaced us.
            if self._looked_at(epoch).has(removed):
                raise
            return
        added = (
            [upkeep.write_data(self._store, upkeep.data_path(last_version, attempt), table)] if table.num_rows else []
        )
        with self._lock:
            now = self._looked_at(epoch)
            if now.head < last_version and now.has(removed):
                self._commit("maintenance", epoch, attempt, added=added, removed=removed, trimmed=cut or None)

    def _commit(
        self,
        kind: upkeep.Kind,
        epoch: int,
        attempt: str,
        *,
        table: pa.Table | None = None,
        added: Sequence[DataFile] = (),
        removed: Sequence[str] = (),
        trimmed: int | None = None,
    ) -> bool:
        """One attempt at the next version, with the rows of an entry, or with files that are there already.

        False: maintenance was quicker, and we know of it now.
        """
        if self._writer is None:
            raise AssertionError("nothing is written in read-only mode")
        version = self._end.now.head + 1
        mark = Mark(kind, self._instance, attempt, epoch, self._host, self._pid)
        path = upkeep.data_path(version, attempt)
        failure: Exception | None = None
        landed = False
        began_s = journal_end.clock_s()
        try:
            if table is not None:
                added = [upkeep.write_data(self._store, path, table)]
                self._recent.keep(path, table)
            commit = Commit(version, mark, added, removed, trimmed)
            landed = self._writer.put(commit)
        except Exception as error:  # noqa: BLE001 - whatever it is, the log says what happened
            failure = error
        self._end.check_not_late("A commit to the journal took so long that its place may have been given away.")
        if landed:
            self._end.landed(commit, began_s=began_s)
            return True
        self._recent.forget([path])
        return self._end.find_out(epoch, attempt, failure)


def _file_after(journal: Snapshot, seq: int) -> DataFile | None:
    """The file that has the entry after `seq`, if there is one."""
    if seq < journal.trimmed:
        raise Trimmed(
            f"The journal begins after entry {journal.trimmed}, and the entries from {seq + 1} on are needed: a table "
            "that had them was lost or set back. Restore the state from a backup, as a whole."
        )
    index = bisect_right(journal.files, seq, key=lambda file: file.last_seq)
    return journal.files[index] if index < len(journal.files) else None

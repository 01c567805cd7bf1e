"""The journal: an append-only Delta table whose version is the sequence number, and the only thing that decides.

An entry is committed at exactly the version after the one we know, or not at all, so that two controllers can never
both go on from the same point. Whatever went wrong, the log says what happened.

A commit that is very late must not find its version free again. Commit files are kept for `COMMITS_KEPT_MS`, and
nothing counts as done that ended more than `LATE_AFTER_S` after the moment at which we last knew where the journal
ends; beyond half of that, the log is listed anew before anything else. The clock counts suspension.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
import uuid
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import pyarrow as pa
from deltalake.exceptions import DeltaError

from app.core.errors import Corrupt
from app.state import upkeep
from app.state.commit_log import Commit, DataFile, DeltaWriter, LinkWriter, Mark, Writer, read_commit
from app.state.entries import Entry, JournalRow, entries_of, from_parquet, to_arrow, to_parquet
from app.state.errors import Fenced, OutcomeUnknown, StateMissing, UnsafeStore
from app.state.snapshot import create_journal, load_snapshot
from app.state.store import LocalStore, Store, open_store

log = logging.getLogger(__name__)

__all__ = ["Entry", "Fenced", "Journal", "JournalRow", "OutcomeUnknown", "StateMissing", "UnsafeStore"]

LATE_AFTER_S: Final = 1_800.0
MOST_ATTEMPTS: Final = 100
"""How often an entry gives way to maintenance commits before we say that something is wrong."""
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _clock_s() -> float:
    """Seconds on a clock that never goes back and counts the time for which the machine was suspended."""
    return time.clock_gettime(_CLOCK)


class Journal:
    """A handle on the journal. All methods may be called from any thread."""

    def __init__(
        self, uri: str, store: Store, writer: Writer | None, *, options: dict[str, str], instance: str
    ) -> None:
        self._uri = uri
        self._store = store
        self._writer = writer
        self._options = options
        self._instance = instance
        self._host, self._pid = platform.node(), os.getpid()
        self._lock = threading.RLock()
        self._upkeep = upkeep.Upkeep(uri, store, options)
        self._recent = upkeep.Recent(store)
        self._reload()

    def _reload(self) -> None:
        """What the journal is now, from a listing of its log: right however long we were away."""
        seen_at_s = _clock_s()
        snapshot = load_snapshot(self._uri, self._options)
        self._recent.retain({file.path for file in snapshot.files})
        last = None
        if snapshot.files:
            *_, entry = entries_of(self._recent.read(snapshot.files[-1].path), after=0)
            last = _Last(entry.seq, Mark("entry", entry.instance, "", entry.epoch, "", 0))
        # The journal ended at `_now.head` at the moment `_seen_at_s`, or later; `_last` is its last entry.
        self._now, self._last, self._seen_at_s = snapshot, last, seen_at_s

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
        return self._now.head

    @property
    def trimmed(self) -> int:
        """Entries up to this seq are no longer there; the tables have them."""
        return self._now.trimmed

    @property
    def last_seq(self) -> int:
        """The seq of the last entry, 0 if there is none; the head may be a maintenance commit."""
        files = self._now.files
        return files[-1].last_seq if files else 0

    @property
    def last_at(self) -> int:
        """The time of the last entry, 0 if there is none. The last entry is never trimmed."""
        files = self._now.files
        return files[-1].last_at if files else 0

    def append(self, *, epoch: int, at: int, origin: str, rows: Sequence[JournalRow]) -> int:
        """Appends an entry, and returns its seq when it is durable.

        Fenced, OutcomeUnknown: see there. Anything else that could be raised would leave open whether the entry is
        there, so nothing else is, but for a journal that is corrupt.
        """
        with self._lock:
            for _ in range(MOST_ATTEMPTS):
                try:
                    self._catch_up_if_late(epoch)
                except (DeltaError, OSError) as error:
                    raise OutcomeUnknown(f"The journal cannot be read: {error}") from error
                self._check(epoch)
                attempt = uuid.uuid4().hex
                seq = self._now.head + 1
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
            self._catch_up_if_late(epoch)
            self._check(epoch)
            self._judge(self._tail(), epoch)

    def read(self, after: int) -> Iterator[Entry]:
        """The entries above `after`, in order, to the end of the journal as it is now.

        Whoever writes takes all of them into its memory: the next `append` goes on after them.
        """
        with self._lock:
            self._refresh()
        if after < self._now.trimmed:
            raise Corrupt(
                f"The journal begins after entry {self._now.trimmed}, and the entries from {after + 1} on are needed: "
                "a table that had them was lost or set back. Restore the state from a backup, as a whole."
            )
        tries = 0
        while (file := self._file_after(after)) is not None:
            data = self._store.read(file.path)
            if data is None:
                # Someone compacted it away, longer ago than readers are waited for.
                tries += 1
                if tries > 3:
                    raise Corrupt(f"The journal's file {file.path} is missing.")
                with self._lock:
                    self._reload()
                continue
            yield from entries_of(from_parquet(data), after=after)
            after = file.last_seq

    def _file_after(self, seq: int) -> DataFile | None:
        files = self._now.files
        index = bisect_right(files, seq, key=lambda file: file.last_seq)
        return files[index] if index < len(files) else None

    def maintain(self, *, epoch: int, trim_to: int, now_ms: int, retention_ms: int) -> None:
        """Keeps the journal small and quick: compacts, trims, checkpoints, cleans up, each when it is due.

        Cheap if nothing is due, so that it can be called after every entry. Harmless at any time, also from a
        controller that was replaced while it was at it: commits are compare-and-append, a checkpoint says what is true
        at its version for ever, and only files are deleted that no version can ever name again.
        """
        with self._lock:
            self.look(epoch)
            try:
                self._compact(epoch, trim_to=trim_to, before_ms=now_ms - retention_ms)
                if self._upkeep.checkpoint_is_due(self._now.head):
                    self._upkeep.checkpoint()
                    self.look(epoch)
                self._upkeep.clean(self._now)
            except (DeltaError, OSError, OutcomeUnknown) as error:
                # Entries do not depend on it: the next one finds out where the journal ends.
                log.warning("maintenance of the journal is put off head=%s error=%s", self._now.head, error)

    def _compact(self, epoch: int, *, trim_to: int, before_ms: int) -> None:
        plan = upkeep.plan(self._now.files, trim_to=trim_to, before_ms=before_ms)
        if plan is not None:
            table, cut = upkeep.rewrite(plan, self._recent.read)
            removed, trimmed = [file.path for file in plan.files], cut or None
            self._commit("maintenance", epoch, uuid.uuid4().hex, table=table, removed=removed, trimmed=trimmed)

    def _commit(
        self,
        kind: upkeep.Kind,
        epoch: int,
        attempt: str,
        *,
        table: pa.Table,
        removed: Sequence[str] = (),
        trimmed: int | None = None,
    ) -> bool:
        """One attempt at the next version. False: maintenance was quicker, and we know of it now."""
        if self._writer is None:
            raise AssertionError("nothing is written in read-only mode")
        version = self._now.head + 1
        mark = Mark(kind, self._instance, attempt, epoch, self._host, self._pid)
        path = f"{version:020d}-{attempt}.parquet"
        failure: Exception | None = None
        landed = False
        began_s = _clock_s()
        try:
            added = []
            if table.num_rows:
                data = to_parquet(table)
                self._store.write(path, data)
                added.append(upkeep.describe(path, len(data), table))
            if kind == "entry":
                self._recent.keep(path, table)
            commit = Commit(version, mark, added, removed, trimmed)
            landed = self._writer.put(commit)
        except Exception as error:  # noqa: BLE001 - whatever it is, the log says what happened
            failure = error
        if _clock_s() - self._seen_at_s > LATE_AFTER_S:
            raise OutcomeUnknown("A commit to the journal took so long that its place may have been given away.")
        if landed:
            # Just before, the version was free: so that was the end of the journal.
            self._take([commit])
            self._seen_at_s = began_s
            return True
        self._recent.forget([path])
        return self._find_out(epoch, attempt, failure)

    def _find_out(self, epoch: int, attempt: str, failure: Exception | None) -> bool:
        """After an attempt of which we do not know what became."""
        try:
            tail = self._tail()
        except Corrupt:
            raise
        except Exception as error:  # noqa: BLE001 - the store may be gone in any way; we know as little as before
            raise OutcomeUnknown(f"The journal cannot be read after a failed append: {error}") from (failure or error)
        if tail and tail[0].mark is not None and tail[0].mark.attempt == attempt:
            log.warning(
                "commit found in the journal though its answer was lost seq=%s error=%s", tail[0].version, failure
            )
            self._take(tail[:1])
            return True
        self._judge(tail, epoch)
        if not tail:
            raise OutcomeUnknown(f"Appending to the journal failed, and may yet succeed: {failure}") from failure
        return False

    def _tail(self) -> list[Commit]:
        """The commits after our head. What is missing after them is not there yet, for it cannot be gone already."""
        commits: list[Commit] = []
        while True:
            looked_at_s = _clock_s()
            commit = read_commit(self._store, self._now.head + 1 + len(commits))
            if commit is None:
                break
            commits.append(commit)
        if _clock_s() - self._seen_at_s > LATE_AFTER_S:
            raise OutcomeUnknown("Reading the journal took so long that a part of it may have been cleaned up.")
        if not commits:
            self._seen_at_s = looked_at_s
        return commits

    def _judge(self, tail: Sequence[Commit], epoch: int) -> None:
        """What commits that we did not expect mean for a controller with this epoch."""
        marks = [(commit.version, commit.mark) for commit in tail if commit.mark is not None]
        for version, mark in marks:
            if mark.instance != self._instance and mark.epoch >= epoch:
                raise _fenced(epoch, version, mark)
        for version, mark in marks:
            if mark.kind == "entry":
                who = "ourselves" if mark.instance == self._instance else f"controller {mark.instance}"
                raise OutcomeUnknown(f"Entry {version} by {who} (epoch {mark.epoch}) is not in our memory.")
        self._take(tail)

    def _check(self, epoch: int) -> None:
        """No controller goes on after an entry of another one, unless it has raised the epoch."""
        if self._last is not None and self._last.mark.instance != self._instance and self._last.mark.epoch >= epoch:
            raise _fenced(epoch, self._last.seq, self._last.mark)

    def _take(self, commits: Sequence[Commit]) -> None:
        """Takes commits up. When the journal was last seen to end where it did does not change by that."""
        self._now = self._now.after(commits)
        for commit in commits:
            self._recent.forget(commit.removed)
            if commit.mark is not None and commit.mark.kind == "entry":
                self._last = _Last(commit.version, commit.mark)

    def _refresh(self) -> None:
        """Takes up whatever there is."""
        if _clock_s() - self._seen_at_s > LATE_AFTER_S / 2:
            self._reload()
        self._take(self._tail())

    def _catch_up_if_late(self, epoch: int) -> None:
        """After a long pause the commit files after our head may have been cleaned up: the log is listed anew."""
        if _clock_s() - self._seen_at_s <= LATE_AFTER_S / 2:
            return
        before = self._now, self._last, self._seen_at_s
        known = self.last_seq
        self._reload()
        if self.last_seq > known:
            try:
                self._check(epoch)
                raise OutcomeUnknown(f"There are entries after {known} in the journal that are not in our memory.")
            finally:
                # Until someone reads them, we stand where we stood.
                self._now, self._last, self._seen_at_s = before


class _Last(NamedTuple):
    """An entry, and who wrote it."""

    seq: int
    mark: Mark


def _fenced(epoch: int, seq: int, mark: Mark) -> Fenced:
    where = f" on host {mark.host}, process {mark.pid}," if mark.host else ""
    return Fenced(
        f"Another controller (instance {mark.instance},{where} epoch {mark.epoch}) took over at entry {seq} of the "
        f"journal; this one has epoch {epoch} and must stop."
    )

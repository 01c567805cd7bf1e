"""Deleting what nobody can need any more: dead files, orphans, and in the end the whole shard.

When in doubt, leak. Everything here goes by names, works only below the roots of the warehouse and only on the table
whose id is the shard's, and can be repeated after a crash at any point. A directory below the shard's that has a Delta
log of its own is somebody else's table: nothing in it is touched. Whether we still are the controller is for the caller
to know, before each call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from app.core.frontier import EMPTY
from app.failpoints import reach
from app.shards.commit_log import BadLog, full_state, live_files, read_commit
from app.shards.directory import CLOCK_PREFIX, LOG, File
from app.shards.errors import ShardError
from app.shards.fence import check_fence
from app.shards.lock import NAME as LOCK
from app.shards.log_files import (
    Names,
    commit_files,
    data_file,
    foreign_tables,
    is_below,
    is_data_file,
    is_log,
    named_paths,
)
from app.shards.places import open_directory
from app.shards.removals import Removals, first_in_a_row
from app.state.commit_log import commit_path

log = logging.getLogger(__name__)

LEAST_ORPHAN_GRACE_MS: Final = 86_400_000
PURGING: Final = "_holdfast.purging"
"""Says whose directory this is while its log goes; it goes after it."""
_BATCH: Final = 100
_SHOWN: Final = 10


class NotSealed(ShardError):
    """The shard's log does not say that it was given up. Nothing of it is deleted."""


class Deleted(NamedTuple):
    files: int = 0
    bytes: int = 0

    def plus(self, other: Deleted) -> Deleted:
        return Deleted(self.files + other.files, self.bytes + other.bytes)


class Waiting(NamedTuple):
    """Dead files that are still there: after how many ms the next is old enough, and the first version above the limit
    that removed one. None if there is none of the kind."""

    due_in_ms: int | None
    pinned: int | None


class _Purging(msgspec.Struct):
    table_id: str


class Cleaner:
    """One shard. Remembers how far it has read the log; forgetting that is harmless. For one thread at a time.

    `Fenced` if a controller with a newer epoch than ours has worked on it: then we were replaced, and delete nothing.
    """

    def __init__(
        self, *, location: str, options: dict[str, str], roots: Sequence[str], table_id: str, epoch: int
    ) -> None:
        self._location = location
        self._options = options
        self._table_id = table_id
        self._epoch = epoch
        self._directory = open_directory(location, options, roots=roots)
        self._removals = Removals(self._directory, location, table_id)
        self._looked_at_ms = 0
        self._named_until = -1

    @property
    def version(self) -> int:
        """Up to where the log was read; -1: not yet."""
        return self._removals.version

    def dead_files(self, *, upto_version: int, older_than_ms: int) -> list[str]:
        """Data files that a commit up to a version removed, at least so long ago, and that none added again since."""
        self._removals.read_on(older_than_ms=older_than_ms)
        removals = self._removals.upto(upto_version)
        if not removals:
            return []
        self._looked_at_ms = self._directory.now_ms()
        old = [each.name for each in removals if each.at_ms <= self._looked_at_ms - older_than_ms]
        if not old or (live := self._live_files()) is None:
            return []
        return [name for name in old if name not in live]

    def delete_dead_files(self, *, upto_version: int, older_than_ms: int) -> Deleted:
        deleted = Deleted()
        dead = self.dead_files(upto_version=upto_version, older_than_ms=older_than_ms)
        judged = min(upto_version, self._removals.version)
        if dead:
            self._directory.sync()  # a loss of power must not take what has replaced them
        for names in _batches(dead):
            self._removals.read_on(older_than_ms=older_than_ms)  # someone may have restored an old version meanwhile
            reach("cleaning")
            still_dead = [name for name in names if self._removals.has(name, judged)]
            deleted = deleted.plus(self._delete(still_dead))
            for name in still_dead:
                self._removals.drop(name)
        return deleted

    def waiting(self, *, upto_version: int, older_than_ms: int) -> Waiting:
        """What the last `delete_dead_files` has left."""
        ages_ms = (self._looked_at_ms - removal.at_ms for removal in self._removals.upto(upto_version))
        # Those that are old enough are live, whatever our reading of the log says.
        due_in_ms = min((older_than_ms - age_ms for age_ms in ages_ms if age_ms < older_than_ms), default=None)
        return Waiting(due_in_ms, self._removals.first_after(upto_version))

    def orphans(self, *, upto_version: int, orphan_grace_ms: int) -> list[str]:
        """Data files that nothing in the log names, and that have been there for longer than any write takes.

        Files that were removed after `upto_version` may be in use: there are no orphans if the log does not tell them.
        """
        if orphan_grace_ms < LEAST_ORPHAN_GRACE_MS:
            raise ValueError(f"A grace of {orphan_grace_ms} ms is too short: a write in progress could be destroyed.")
        # The files before the log: what is committed in between is then named.
        files = [file for file in self._directory.walk() if _is_plain(file.name)]
        live = self._live_files()
        if live is None:
            return []
        latest_ms = self._directory.now_ms() - orphan_grace_ms
        old = [file.name for file in files if file.modified_ms <= latest_ms and file.name not in live]
        if not old:
            return []
        commits = commit_files(self._directory.walk(LOG))
        if first_in_a_row(commits) > upto_version + 1:
            return []
        self._named_until = max(commits, default=-1)
        named = Names(named_paths(self._directory))
        orphans = [name for name in old if name not in named]
        foreign = foreign_tables(self._directory, orphans)
        return [name for name in orphans if not is_below(name, foreign)]

    def delete_orphans(self, *, upto_version: int, orphan_grace_ms: int) -> Deleted:
        deleted = Deleted()
        for names in _batches(self.orphans(upto_version=upto_version, orphan_grace_ms=orphan_grace_ms)):
            late = Names(self._named_since())
            deleted = deleted.plus(self._delete([name for name in names if name not in late]))
        return deleted

    def delete_everything_named(self) -> Deleted:
        """The data of a shard that was given up: all files that its sealed log names. The log stays."""
        if not self._directory.walk(LOG):
            return Deleted()  # never made
        # Before we look whose log it is: it is that of the shard, then, and not of a table that came after it.
        names = {name for path in named_paths(self._directory) if (name := data_file(path)) is not None}
        self._check_given_up()
        self._directory.sync()  # a loss of power must not take the seal
        return self._delete(sorted(names))

    def purge(self) -> Deleted:
        """Everything that is left of a shard that was given up, its log last. Without a log only what is ours goes.

        Listed before we look whose it is, and deleted only if it is still what was listed: while we were paused,
        another controller may have purged the shard, and someone made a table of his own at that place.
        """
        marker = self._directory.read(PURGING)
        listed = {file.name: file for file in self._directory.walk()}
        logs = sorted(filter(is_log, listed))
        if marker is not None:
            self._check_marker(marker)
        elif logs:
            self._check_given_up()
        else:
            listed = {name: file for name, file in listed.items() if _is_ours(name)}
        deleted = self._delete([name for name in listed if not is_log(name) and name != PURGING], listed)
        if marker is not None or logs:
            self._directory.write(PURGING, msgspec.json.encode(_Purging(self._table_id)))
            deleted = deleted.plus(self._delete(logs, listed))
            self._delete([PURGING])
        self._directory.remove_directories()
        return deleted

    def _live_files(self) -> Names | None:
        """What the newest version consists of, by another reading of the log than ours, which may have been of another
        past. None if there is no table; WrongTable if it is not the shard's, however alike their versions are."""
        found = live_files(self._location, self._options)
        if found is None:
            return None
        state, names = found
        self._removals.check_table(state.table_id)
        check_fence(self._location, fence=state.epoch, epoch=self._epoch)
        return Names(names)

    def _check_given_up(self) -> None:
        state = full_state(self._location, self._options)
        self._removals.check_table(None if state is None else state.table_id)
        if state is None or state.upper != EMPTY or state.since != EMPTY:
            raise NotSealed(f"The shard at {self._location!r} is to be deleted, but its log is not sealed.")
        check_fence(self._location, fence=state.epoch, epoch=self._epoch)

    def _check_marker(self, marker: bytes) -> None:
        """Our log may be half gone. Its first commit goes first: one that is there is ours, or of a newer table."""
        self._removals.check_table(msgspec.json.decode(marker, type=_Purging).table_id)
        first = read_commit(self._directory, 0)
        if first is not None:
            self._removals.check_table(first.table_id)

    def _named_since(self) -> Iterator[str]:
        """Paths in commits that came after those from which the orphans were worked out."""
        while (commit := read_commit(self._directory, self._named_until + 1)) is not None:
            self._named_until += 1
            yield from commit.added
        if not self._directory.exists(commit_path(self._named_until)):
            # Commits are cleaned up from the oldest on: more than this one may have gone while we waited.
            raise BadLog(f"Version {self._named_until} of the Delta log was cleaned up; orphans are looked for anew.")

    def _delete(self, names: Sequence[str], listed: Mapping[str, File] | None = None) -> Deleted:
        foreign = foreign_tables(self._directory, names)
        if foreign:
            log.warning("other tables are left location=%s below=%s", self._location, sorted(foreign)[:_SHOWN])
        files = size = 0
        for name in names:
            if is_below(name, foreign):
                continue
            freed = self._directory.delete(name, listed=None if listed is None else listed[name])
            if freed is not None:
                files, size = files + 1, size + freed
        if files:
            log.info("deleted location=%s files=%s bytes=%s", self._location, files, size)
        return Deleted(files, size)


def _is_plain(name: str) -> bool:
    """A data file, and not in a place that begins with `_` or `.`, where Delta keeps what is no data."""
    hidden = any(part.startswith(("_", ".")) and "=" not in part for part in name.split("/"))
    return is_data_file(name) and not hidden


def _is_ours(name: str) -> bool:
    return name in (LOCK, PURGING) or name.startswith(CLOCK_PREFIX)


def _batches(names: Sequence[str]) -> Iterator[list[str]]:
    rest = iter(names)
    while batch := list(islice(rest, _BATCH)):
        yield batch

"""Deleting what nobody can need any more: dead files, orphans, and in the end the whole shard.

When in doubt, leak. Everything here goes by names, works only below the roots of the warehouse and only on the table
whose id is the shard's, and can be repeated after a crash at any point. Whether we still are the controller is for the
caller to know, before each call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from app.core.frontier import EMPTY
from app.failpoints import reach
from app.shards.commit_log import BadLog, full_state, live_files, read_commit
from app.shards.directory import CLOCK_PREFIX, open_directory
from app.shards.errors import ShardError, WrongTable
from app.shards.lock import NAME as LOCK
from app.shards.log_files import LOG, Names, commit_files, data_file, is_data_file, key, named_paths
from app.state.commit_log import commit_path

log = logging.getLogger(__name__)

LEAST_ORPHAN_GRACE_MS: Final = 86_400_000
PURGING: Final = "_holdfast.purging"
"""Says whose directory this is while its log goes; it goes after it."""
_BATCH: Final = 100


class NotSealed(ShardError):
    """The shard's log does not say that it was given up. Nothing of it is deleted."""


class Deleted(NamedTuple):
    files: int = 0
    bytes: int = 0

    def plus(self, other: Deleted) -> Deleted:
        return Deleted(self.files + other.files, self.bytes + other.bytes)


class _Removal(NamedTuple):
    name: str
    version: int
    at_ms: int


class _Purging(msgspec.Struct):
    table_id: str


class Cleaner:
    """One shard. Remembers how far it has read the log; forgetting that is harmless. For one thread at a time."""

    def __init__(self, *, location: str, options: dict[str, str], roots: Sequence[str], table_id: str) -> None:
        self._location = location
        self._options = options
        self._table_id = table_id
        self._directory = open_directory(location, options, roots=roots)
        self._version = -1
        self._removed: dict[str, _Removal] = {}
        self._named_until = -1

    @property
    def has_dead_files(self) -> bool:
        """Whether there is any that was not deleted yet, because it is too young or may still be needed."""
        return bool(self._removed)

    def dead_files(self, *, upto_version: int, older_than_ms: int) -> list[str]:
        """Data files that a commit up to a version removed, at least so long ago, and that none added again since."""
        self._read_on()
        removals = [removal for removal in self._removed.values() if removal.version <= upto_version]
        if not removals or not self._is_there():
            return []
        latest_ms = self._directory.now_ms() - older_than_ms
        return [removal.name for removal in removals if removal.at_ms <= latest_ms]

    def delete_dead_files(self, *, upto_version: int, older_than_ms: int) -> Deleted:
        deleted = Deleted()
        for names in _batches(self.dead_files(upto_version=upto_version, older_than_ms=older_than_ms)):
            self._read_on()  # someone may have restored an old version meanwhile
            reach("cleaning")
            deleted = deleted.plus(self._delete([name for name in names if key(name) in self._removed]))
            for name in names:
                self._removed.pop(key(name), None)
        return deleted

    def orphans(self, *, orphan_grace_ms: int) -> list[str]:
        """Data files that nothing in the log names, and that have been there for longer than any write takes."""
        if orphan_grace_ms < LEAST_ORPHAN_GRACE_MS:
            raise ValueError(f"A grace of {orphan_grace_ms} ms is too short: a write in progress could be destroyed.")
        if not self._is_there():
            return []
        latest_ms = self._directory.now_ms() - orphan_grace_ms
        # The files before the log: what is committed in between is then named.
        old = [file.name for file in self._directory.walk() if file.modified_ms <= latest_ms and _is_plain(file.name)]
        if not old:
            return []
        self._named_until = max(commit_files(self._directory.walk(LOG)), default=-1)
        named = Names(named_paths(self._directory))
        live = Names(live_files(self._location, self._options))  # found out in another way, should ours have a hole
        return [name for name in old if name not in named and name not in live]

    def delete_orphans(self, *, orphan_grace_ms: int) -> Deleted:
        deleted = Deleted()
        for names in _batches(self.orphans(orphan_grace_ms=orphan_grace_ms)):
            late = Names(self._named_since())
            deleted = deleted.plus(self._delete([name for name in names if name not in late]))
        return deleted

    def delete_everything_named(self) -> Deleted:
        """The data of a shard that was given up: all files that its sealed log names. The log stays."""
        if not self._directory.walk(LOG):
            return Deleted()  # never made
        self._check_given_up()
        names = {name for path in named_paths(self._directory) if (name := data_file(path)) is not None}
        return self._delete(sorted(names))

    def purge(self) -> Deleted:
        """Everything that is left of a shard that was given up, its log last. Without a log only what is ours goes."""
        marker = self._directory.read(PURGING)
        if marker is None and not self._directory.walk(LOG):
            ours = [file.name for file in self._directory.walk() if _is_ours(file.name)]
            deleted = self._delete(ours)
            self._directory.remove_directories()
            return deleted
        if marker is None:
            self._check_given_up()
        else:
            self._check_marker(marker)
        files = [file.name for file in self._directory.walk()]
        deleted = self._delete([name for name in files if not _is_log(name) and name != PURGING])
        self._directory.write(PURGING, msgspec.json.encode(_Purging(self._table_id)))
        deleted = deleted.plus(self._delete(sorted(filter(_is_log, files))))
        self._delete([PURGING])
        self._directory.remove_directories()
        return deleted

    def _is_there(self) -> bool:
        """Whether there is a table. WrongTable if it is not the shard's, however alike their versions are."""
        state = full_state(self._location, self._options)
        if state is not None:
            self._compare(state.table_id)
        return state is not None

    def _check_given_up(self) -> None:
        state = full_state(self._location, self._options)
        self._compare(None if state is None else state.table_id)
        if state is None or state.upper != EMPTY or state.since != EMPTY:
            raise NotSealed(f"The shard at {self._location!r} is to be deleted, but its log is not sealed.")

    def _check_marker(self, marker: bytes) -> None:
        """Our log may be half gone. Its first commit goes first: one that is there is ours, or of a newer table."""
        self._compare(msgspec.json.decode(marker, type=_Purging).table_id)
        first = read_commit(self._directory, 0)
        if first is not None:
            self._compare(first.table_id)

    def _compare(self, table_id: str | None) -> None:
        if table_id != self._table_id:
            self._version, self._removed = -1, {}
            what = "no Delta table" if table_id is None else f"a Delta table with the id {table_id!r}"
            raise WrongTable(f"There is {what} at {self._location!r}; the shard's id is {self._table_id!r}.")

    def _read_on(self) -> None:
        """Takes in the commits that we have not read. All up to the newest: any of them may add a file again."""
        if self._version >= 0 and not self._directory.exists(commit_path(self._version + 1)) and self._has_ours():
            return
        files = commit_files(self._directory.walk(LOG))
        head = max(files, default=-1)
        first = head
        while first - 1 in files:
            first -= 1
        if self._version + 1 < first or self._version > head:
            # What was removed before may have been added again in a commit that is gone.
            self._version, self._removed = first - 1, {}
        for version in range(self._version + 1, head + 1):
            self._take_in(version, files[version].modified_ms)

    def _has_ours(self) -> bool:
        return self._directory.exists(commit_path(self._version))

    def _take_in(self, version: int, at_ms: int) -> None:
        commit = read_commit(self._directory, version)
        if commit is None:
            raise BadLog(f"Version {version} of the Delta log was cleaned up while it was to be read.")
        if commit.table_id is not None:
            self._compare(commit.table_id)
        for file in commit.removed:
            if (name := data_file(file.path)) is not None:
                self._removed[key(name)] = _Removal(name, version, at_ms)
        for added in Names(commit.added).among(self._removed.keys()):
            del self._removed[added]
        self._version = version

    def _named_since(self) -> Iterator[str]:
        """Paths in commits that came after those from which the orphans were worked out."""
        while (commit := read_commit(self._directory, self._named_until + 1)) is not None:
            self._named_until += 1
            yield from commit.added
        if not self._directory.exists(commit_path(self._named_until)):
            # Commits are cleaned up from the oldest on: more than this one may have gone while we waited.
            raise BadLog(f"Version {self._named_until} of the Delta log was cleaned up; orphans are looked for anew.")

    def _delete(self, names: Iterable[str]) -> Deleted:
        files = size = 0
        for name in names:
            freed = self._directory.delete(name)
            if freed is not None:
                files, size = files + 1, size + freed
        if files:
            log.info("deleted location=%s files=%s bytes=%s", self._location, files, size)
        return Deleted(files, size)


def _is_plain(name: str) -> bool:
    """A data file, and not in a place that begins with `_` or `.`, where Delta keeps what is no data."""
    hidden = any(part.startswith(("_", ".")) and "=" not in part for part in name.split("/"))
    return is_data_file(name) and not hidden


def _is_log(name: str) -> bool:
    return name == LOG or name.startswith(f"{LOG}/")


def _is_ours(name: str) -> bool:
    return name in (LOCK, PURGING) or name.startswith(CLOCK_PREFIX)


def _batches(names: Sequence[str]) -> Iterator[list[str]]:
    rest = iter(names)
    while batch := list(islice(rest, _BATCH)):
        yield batch

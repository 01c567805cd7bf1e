"""Which files were removed, and when: a shard's log, followed commit by commit."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final, NamedTuple

from app.shards.commit_log import BadLog, read_commit
from app.shards.directory import LOG, Directory, File
from app.shards.errors import WrongTable
from app.shards.log_files import Names, checkpoint_files, commit_files, data_file, key, paths_of_checkpoint
from app.state.commit_log import commit_path

log = logging.getLogger(__name__)

SETTLED_MS: Final = 86_400_000
SAID_FOR_MS: Final = 6 * 86_400_000
"""How long a checkpoint says that a file was removed, unless the table says otherwise: Delta's default is 7 days."""


class Removal(NamedTuple):
    name: str
    version: int
    at_ms: int


class Removals:
    """What commits have removed and none has added again. To forget it is harmless: it is read again."""

    def __init__(self, directory: Directory, location: str, table_id: str) -> None:
        self._directory = directory
        self._location = location
        self._table_id = table_id
        self._removed: dict[str, Removal] = {}
        self._last: File | None = None
        self.version = -1
        """Up to where the log was read; -1: not yet."""

    def read_on(self, *, older_than_ms: int = 0) -> None:
        """Takes in the commits that we have not read. All up to the newest: any of them may add a file again.

        `older_than_ms` is how long ago a removal must be to matter now: so far back its time is to be exact.
        """
        listed: dict[int, File] = {}
        # The last one that we know is there as it was, so those after it are: commits are cleaned up from the oldest
        # on. If it is not, commits may be gone that we have not read; or the directory is an older copy of itself, and
        # what we know is not its past.
        if self._last is None or self._directory.file(self._last.name) != self._last:
            self.forget()
            listed = self._begin(max(SETTLED_MS, older_than_ms))
        before = self.version
        while (file := listed.get(self.version + 1) or self._file(self.version + 1)) is not None:
            self._take_in(self.version + 1, file)
        if self.version > before:
            self._last = self._file(self.version)  # a listing may show a time that is rounded in another way

    def _begin(self, settled_ms: int) -> dict[int, File]:
        """At the first commit that is left, or at a checkpoint: a log may have commits of a month, and on an object
        store each takes as long as a whole checkpoint.

        What a checkpoint says was removed counts as removed with it: later than it was, so no file goes too early. A
        young checkpoint is not taken, or files would never be old enough for whoever begins again and again.
        """
        files = self._directory.walk(LOG)
        listed, checkpoints = commit_files(files), checkpoint_files(files)
        first = first_in_a_row(listed)
        latest_ms = max((file.modified_ms for file in listed.values()), default=0) - settled_ms
        settled = {v: file for v, file in checkpoints.items() if first <= v in listed and file.modified_ms <= latest_ms}
        begin = self.version = max(-1, first - 1)
        try:
            for version in _enough_of(settled):
                self._take_in_checkpoint(version, settled[version])
                self.version = version
        except BadLog as error:  # it need not be one that Delta reads; the commits are there
            log.warning("a checkpoint is passed over location=%s error=%s", self._location, error)
            self._removed, self.version = {}, begin
        self._last = self._file(self.version)
        return listed

    def _take_in_checkpoint(self, version: int, file: File) -> None:
        data = self._directory.read(file.name)
        if data is None:
            raise BadLog(f"The checkpoint {file.name} was cleaned up while it was to be read.")
        for path in paths_of_checkpoint(file.name, data, ["remove"]):
            if (name := data_file(path)) is not None:
                self._removed[key(name)] = Removal(name, version, file.modified_ms)

    def forget(self) -> None:
        self.version, self._removed, self._last = -1, {}, None

    def upto(self, version: int) -> list[Removal]:
        return [removal for removal in self._removed.values() if removal.version <= version]

    def first_after(self, version: int) -> int | None:
        """The first version above this one that removed a file."""
        return min((each.version for each in self._removed.values() if each.version > version), default=None)

    def has(self, name: str, upto_version: int) -> bool:
        """A file that was restored and removed again since is too young, and may be needed at a version in between."""
        removal = self._removed.get(key(name))
        return removal is not None and removal.version <= upto_version

    def drop(self, name: str) -> None:
        del self._removed[key(name)]

    def check_table(self, table_id: str | None) -> None:
        """WrongTable if that is not the id of the shard's; None: there is none."""
        if table_id != self._table_id:
            self.forget()
            what = "no Delta table" if table_id is None else f"a Delta table with the id {table_id!r}"
            raise WrongTable(f"There is {what} at {self._location!r}; the shard's id is {self._table_id!r}.")

    def _file(self, version: int) -> File | None:
        return self._directory.file(commit_path(version))

    def _take_in(self, version: int, file: File) -> None:
        commit = read_commit(self._directory, version)
        if commit is None:
            raise BadLog(f"Version {version} of the Delta log was cleaned up while it was to be read.")
        if commit.table_id is not None:
            self.check_table(commit.table_id)
        for removed in commit.removed:
            if (name := data_file(removed)) is not None:
                self._removed[key(name)] = Removal(name, version, file.modified_ms)
        for added in Names(commit.added).among(self._removed.keys()):
            del self._removed[added]
        self.version, self._last = version, file


def _enough_of(checkpoints: Mapping[int, File]) -> list[int]:
    """The newest, and before it as few as together say of everything that it was removed, the oldest first."""
    found: list[int] = []
    for version in sorted(checkpoints, reverse=True):
        here = checkpoints[version].modified_ms
        if len(found) > 1 and checkpoints[found[-2]].modified_ms - here <= SAID_FOR_MS:
            found[-1] = version  # the one before it reaches back to here
        else:
            found.append(version)
    return found[::-1]


def first_in_a_row(commits: Mapping[int, File]) -> int:
    """From there on all commits up to the newest are there; -1 if there are none."""
    first = max(commits, default=-1)
    while first - 1 in commits:
        first -= 1
    return first

"""The files below one shard's directory, for those who delete: nothing outside of it can be reached.

On local paths, which are here, no symbolic link is ever followed, from the root of the file system down, not even one
that is put there while we work: each part of a path is opened relative to the one before it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple, Protocol

from app.shards.commit_log import Readable

LOG: Final = "_delta_log"
CLOCK_PREFIX: Final = "_holdfast.clock-"
_LINK_IN_THE_WAY: Final = frozenset([errno.ELOOP, errno.ENOTDIR])


class File(NamedTuple):
    """`modified_ms` is by the store's clock, and never before the file came to be where it is.

    `identity` tells it from another one that has its name later, where the store knows.
    """

    name: str
    size: int
    modified_ms: int
    identity: tuple[int, int] = (0, 0)


class Directory(Readable, Protocol):
    """Names are relative to it, with `/` between their parts, none of them `..`."""

    def walk(self, below: str = "") -> list[File]:
        """All files, at any depth; links count as files of no size, and are not followed."""

    def file(self, name: str) -> File | None:
        """One of them, or None if it is not there."""

    def is_empty(self, below: str = "") -> bool:
        """Whether there is no file, at any depth. Looks no further than to the first."""

    def delete(self, name: str, *, listed: File | None = None) -> int | None:
        """Deletes a file or a link, and says how many bytes it had; None if there is none, or no way without links.

        With `listed`, only if it is still that one, and not another that has its name now.
        """

    def write(self, name: str, data: bytes) -> None:
        """Writes a file, over what was there before."""

    def sync(self) -> None:
        """Makes everything that anyone has written here survive a loss of power, if that is not so by itself."""

    def now_ms(self) -> int:
        """What the store's clock shows."""

    def remove_directories(self) -> None:
        """Removes directories that are empty, at last this one; none of another table below it."""


class LocalDirectory:
    def __init__(self, real_path: str) -> None:
        self._path = real_path

    def read(self, path: str) -> bytes | None:
        with self._parent(path) as (parent, name):
            if parent is None:
                return None
            try:
                file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
            except FileNotFoundError:
                return None
            with open(file, "rb") as opened:
                return opened.read()

    def exists(self, path: str) -> bool:
        with self._parent(path) as (parent, name):
            return parent is not None and _stat(name, parent) is not None

    def walk(self, below: str = "") -> list[File]:
        found = []
        with self._opened(below) as top:
            if top is None:
                return []
            for path, names, files, directory in os.fwalk(".", dir_fd=top, follow_symlinks=False):
                every = (*files, *names)  # a link to a directory is among the directories
                listed = (_file(_joined(below, path[2:], name), _stat(name, directory)) for name in every)
                found += [file for file in listed if file is not None]
        return found

    def file(self, name: str) -> File | None:
        with self._parent(name) as (parent, last):
            return None if parent is None else _file(name, _stat(last, parent))

    def is_empty(self, below: str = "") -> bool:
        waiting = [below]
        while waiting:
            place = waiting.pop()
            with self._opened(place) as directory:
                if directory is None:
                    continue
                with os.scandir(directory) as entries:
                    for entry in entries:
                        if not entry.is_dir(follow_symlinks=False):
                            return False
                        waiting.append(_joined(place, entry.name))
        return True

    def delete(self, name: str, *, listed: File | None = None) -> int | None:
        with self._parent(name) as (parent, last):
            if parent is None or (status := _deletable(last, parent)) is None:
                return None
            # Not by its `modified_ms`: that changes with its links, and some files in logs have two names.
            if listed is not None and _identity(status) != listed.identity:
                return None
            checksum = f".{last}.crc"  # Spark's; it goes first, as nobody would find it after a crash in between
            if last.endswith(".parquet") and _deletable(checksum, parent) is not None:
                _unlink(checksum, parent)
            _unlink(last, parent)
            return status.st_size if stat.S_ISREG(status.st_mode) else 0

    def write(self, name: str, data: bytes) -> None:
        with self._parent(name) as (parent, last):
            if parent is None:
                raise FileNotFoundError(errno.ENOENT, "no such directory", f"{self._path}/{name}")
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(last, flags, 0o644, dir_fd=parent), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.fsync(parent)

    def sync(self) -> None:
        with self._opened("") as top:
            if top is not None:
                _sync_disk(top)

    def now_ms(self) -> int:
        with self._opened("") as top:
            if top is None:
                return 0
            name = f"{CLOCK_PREFIX}{uuid.uuid4().hex}"
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=top)
            try:
                return os.fstat(file).st_mtime_ns // 1_000_000
            finally:
                os.close(file)
                os.unlink(name, dir_fd=top)

    def remove_directories(self) -> None:
        with self._opened("") as top:
            if top is None:
                return
            found = []
            for path, names, files, _ in os.fwalk(".", dir_fd=top, follow_symlinks=False):
                if path != "." and LOG in (*names, *files):
                    names.clear()  # another table: what is empty there is not ours either
                found += [_joined(path[2:], name) for name in names]
        for inner in reversed(found):
            with self._parent(inner) as (parent, last), suppress(OSError):  # not empty, or a link
                os.rmdir(last, dir_fd=parent)
        above, _, name = self._path.rpartition("/")
        with LocalDirectory(above)._opened("") as parent, suppress(OSError):  # what came meanwhile stays
            if parent is not None:
                os.rmdir(name, dir_fd=parent)

    @contextmanager
    def _opened(self, below: str) -> Iterator[int | None]:
        """The directory itself, or one below it; None if there is none, or only behind a link."""
        directory = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in [*self._path.split("/"), *parts_of(below)]:
                if part:
                    outer = directory
                    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                    directory = os.open(part, flags, dir_fd=outer)
                    os.close(outer)
        except OSError as error:
            os.close(directory)
            if error.errno != errno.ENOENT and error.errno not in _LINK_IN_THE_WAY:
                raise
            yield None
            return
        try:
            yield directory
        finally:
            os.close(directory)

    @contextmanager
    def _parent(self, name: str) -> Iterator[tuple[int | None, str]]:
        *above, last = parts_of(name)
        with self._opened("/".join(above)) as directory:
            yield directory, last


def parts_of(name: str) -> list[str]:
    """Of a name below a directory, none of which leads out of it."""
    parts = name.split("/") if name else []
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ValueError(f"{name!r} is no name of a file below a directory.")
    return parts


def _joined(*parts: str) -> str:
    return "/".join(part for part in parts if part)


def _stat(name: str, directory: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _file(name: str, status: os.stat_result | None) -> File | None:
    """A file or a link; None for a directory."""
    if status is None or stat.S_ISDIR(status.st_mode):
        return None
    # A file that was moved or copied here with its old time is as young as its place.
    changed_ns = max(status.st_mtime_ns, status.st_ctime_ns)
    size = status.st_size if stat.S_ISREG(status.st_mode) else 0
    return File(name, size, changed_ns // 1_000_000, _identity(status))


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns


def _sync_disk(directory: int) -> None:
    """The file system that a directory is on. What is older than half a minute is written by then anyway."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "syncfs"):  # only Linux has it
        os.sync()
    elif libc.syncfs(directory) != 0:
        raise OSError(ctypes.get_errno(), "the file system could not be synced")


def _deletable(name: str, directory: int) -> os.stat_result | None:
    status = _stat(name, directory)
    return status if status is not None and (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)) else None


def _unlink(name: str, directory: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)

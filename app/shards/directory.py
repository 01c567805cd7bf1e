"""The files below one shard's directory, for those who delete: nothing outside of it can be reached.

On local paths no symbolic link is ever followed, from the root of the file system down, not even one that is put there
while we work: each part of a path is opened relative to the one before it.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple, Protocol

import pyarrow.fs
from deltalake.fs import DeltaStorageHandler

from app.core.locations import is_within, normalise
from app.shards.commit_log import Readable
from app.shards.errors import ShardError
from app.state.store import YOUNG_MS, local_path, write_object

CLOCK_PREFIX: Final = "_holdfast.clock-"
_LINK_IN_THE_WAY: Final = frozenset([errno.ELOOP, errno.ENOTDIR])


class OutsideWarehouse(ShardError):
    """A shard's directory is not below a root of the warehouse, links resolved. Nothing there is touched."""


class File(NamedTuple):
    """`modified_ms` is by the store's clock, and never before the file came to be where it is."""

    name: str
    size: int
    modified_ms: int


class Directory(Readable, Protocol):
    """Names are relative to it, with `/` between their parts, none of them `..`."""

    def walk(self, below: str = "") -> list[File]:
        """All files, at any depth; links count as files of no size, and are not followed."""

    def delete(self, name: str) -> int | None:
        """Deletes a file or a link, and says how many bytes it had; None if there is none, or no way without links."""

    def write(self, name: str, data: bytes) -> None:
        """Writes a file, over what was there before."""

    def now_ms(self) -> int:
        """What the store's clock shows."""

    def remove_directories(self) -> None:
        """Removes directories that are empty, at last this one."""


def open_directory(location: str, options: dict[str, str], *, roots: Sequence[str]) -> Directory:
    path = local_path(location)
    if path is None:
        place, allowed = normalise(location), [normalise(root) for root in roots if local_path(root) is None]
    else:
        place = os.path.realpath(path)
        allowed = [os.path.realpath(local) for root in roots if (local := local_path(root)) is not None]
    if not any(is_within(place, root) and not is_within(root, place) for root in allowed):
        raise OutsideWarehouse(f"{location!r} is not inside the warehouse ({', '.join(roots)}).")
    return LocalDirectory(place) if path is not None else ObjectDirectory(place, options)


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
                for name in (*files, *names):  # a link to a directory is among the directories
                    status = _stat(name, directory)
                    if status is not None and not stat.S_ISDIR(status.st_mode):
                        # A file that was moved or copied here with its old time is as young as its place.
                        changed_ns = max(status.st_mtime_ns, status.st_ctime_ns)
                        size = status.st_size if stat.S_ISREG(status.st_mode) else 0
                        found.append(File(_joined(below, path[2:], name), size, changed_ns // 1_000_000))
        return found

    def delete(self, name: str) -> int | None:
        with self._parent(name) as (parent, last):
            status = None if parent is None else _stat(last, parent)
            if status is None or not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
                return None
            with suppress(FileNotFoundError):
                os.unlink(last, dir_fd=parent)
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
            for _, names, _, directory in os.fwalk(".", topdown=False, dir_fd=top, follow_symlinks=False):
                for name in names:
                    with suppress(OSError):  # not empty, or a link
                        os.rmdir(name, dir_fd=directory)
        above, _, name = self._path.rpartition("/")
        with LocalDirectory(above)._opened("") as parent, suppress(OSError):  # what came meanwhile stays
            if parent is not None:
                os.rmdir(name, dir_fd=parent)

    @contextmanager
    def _opened(self, below: str) -> Iterator[int | None]:
        """The directory itself, or one below it; None if there is none, or only behind a link."""
        directory = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in [*self._path.split("/"), *_parts(below)]:
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
        *above, last = _parts(name)
        with self._opened("/".join(above)) as directory:
            yield directory, last


class ObjectDirectory:
    """A prefix of an object store. There are no links and no directories."""

    def __init__(self, uri: str, options: dict[str, str]) -> None:
        self._handler = DeltaStorageHandler(uri, dict(options))
        self._files = pyarrow.fs.PyFileSystem(self._handler)

    def read(self, path: str) -> bytes | None:
        try:
            with self._files.open_input_file("/".join(_parts(path))) as file:
                return bytes(file.read())
        except FileNotFoundError:
            return None

    def exists(self, path: str) -> bool:
        return bool(self._info(path).type == pyarrow.fs.FileType.File)

    def walk(self, below: str = "") -> list[File]:
        selector = pyarrow.fs.FileSelector("/".join(_parts(below)), allow_not_found=True, recursive=True)
        found = [info for info in self._files.get_file_info(selector) if info.type == pyarrow.fs.FileType.File]
        return [File(info.path, info.size or 0, _modified_ms(info)) for info in found]

    def delete(self, name: str) -> int | None:
        info = self._info(name)
        if info.type != pyarrow.fs.FileType.File:
            return None
        with suppress(FileNotFoundError):
            self._files.delete_file(info.path)
        return info.size or 0

    def write(self, name: str, data: bytes) -> None:
        write_object(self._handler, "/".join(_parts(name)), data)

    def now_ms(self) -> int:
        name = f"{CLOCK_PREFIX}{uuid.uuid4().hex}"
        self.write(name, b"now")
        try:
            info = self._info(name)
            return 0 if info.mtime_ns is None else int(info.mtime_ns) // 1_000_000
        finally:
            self.delete(name)

    def remove_directories(self) -> None:
        """Nothing to do."""

    def _info(self, name: str) -> pyarrow.fs.FileInfo:
        return self._files.get_file_info("/".join(_parts(name)))


def _modified_ms(info: pyarrow.fs.FileInfo) -> int:
    return YOUNG_MS if info.mtime_ns is None else int(info.mtime_ns) // 1_000_000


def _parts(name: str) -> list[str]:
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

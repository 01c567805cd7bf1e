"""The files of one Delta table: read, written durably, listed, deleted. Local, or wherever delta-rs can reach."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

import pyarrow.fs
from deltalake.fs import DeltaStorageHandler

from app.state.errors import UnsafeStore

YOUNG_MS: Final = 2**62


class Listed(NamedTuple):
    """One file of a directory, with its age as the store's clock has it."""

    name: str
    modified_ms: int


class Store(Protocol):
    """Paths are relative to the table, with `/` between their parts."""

    def read(self, path: str) -> bytes | None:
        """The whole file, or None if there is none."""

    def write(self, path: str, data: bytes) -> None:
        """Writes a file under a name that nobody else uses; it survives a loss of power once this returns."""

    def exists(self, path: str) -> bool: ...

    def files(self, directory: str) -> list[Listed]:
        """The files directly in a directory, in no order."""

    def delete(self, path: str) -> None:
        """Deletes a file; not an error if it is gone."""

    def sync(self, paths: Iterable[str]) -> None:
        """Makes files that someone else wrote survive a loss of power, if that is not so by itself."""


def local_path(uri: str) -> Path | None:
    """The directory that a URI means if it is on this machine, absolute; else None."""
    if "://" not in uri and not uri.startswith("file:"):
        return Path(uri).absolute()
    parts = urlsplit(uri)
    return Path(unquote(parts.path)).absolute() if parts.scheme == "file" else None


def unsafe(uri: str) -> str:
    return (
        f"The store of {uri} let two writers create the same object. Two controllers there could both go on and lose "
        "each other's entries. Use a store with conditional puts, and no option that switches them off."
    )


def open_store(uri: str, storage_options: dict[str, str]) -> Store:
    path = local_path(uri)
    return ObjectStore(uri, storage_options) if path is None else LocalStore(path)


class LocalStore:
    """A directory. delta-rs does not sync what it writes locally, so that is done here."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)

    def read(self, path: str) -> bytes | None:
        try:
            with open(self._full(path), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def write(self, path: str, data: bytes) -> None:
        full = self._full(path)
        _write_synced(full, data)
        _sync(os.path.dirname(full))

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Creates a file whole and durable; False if the name is taken, whoever was first.

        A hard link is how delta-rs does it too, so that both may write to one log. Everything is synced before the name
        appears: what others can see cannot be lost.
        """
        full = self._full(path)
        directory, name = os.path.split(full)
        staged = os.path.join(directory, f".{name}.{uuid.uuid4().hex}.tmp")
        try:
            _write_synced(staged, data)
            try:
                os.link(staged, full)
            except FileExistsError:
                return False
        finally:
            self._unlink(staged)
        _sync(directory)
        return True

    def probe(self) -> None:
        """UnsafeStore, unless creating a file that is there is refused."""
        os.makedirs(self._root, exist_ok=True)
        name = f"_probe-{uuid.uuid4().hex}"
        try:
            first, second = self.put_if_absent(name, b"first"), self.put_if_absent(name, b"second")
            if not first or second or self.read(name) != b"first":
                raise UnsafeStore(unsafe(self._root))
        finally:
            self.delete(name)

    def exists(self, path: str) -> bool:
        return os.path.exists(self._full(path))

    def files(self, directory: str) -> list[Listed]:
        try:
            with os.scandir(self._full(directory)) as entries:
                return [
                    Listed(entry.name, entry.stat().st_mtime_ns // 1_000_000) for entry in entries if entry.is_file()
                ]
        except FileNotFoundError:
            return []

    def delete(self, path: str) -> None:
        self._unlink(self._full(path))

    def sync(self, paths: Iterable[str]) -> None:
        directories = set()
        for path in paths:
            full = self._full(path)
            directories.add(os.path.dirname(full))
            _sync(full)
        for directory in directories:
            _sync(directory)

    def _full(self, path: str) -> str:
        return os.path.join(self._root, path)

    @staticmethod
    def _unlink(full: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(full)


class ObjectStore:
    """What delta-rs reaches with `storage_options`. A put is durable when it is answered."""

    def __init__(self, uri: str, storage_options: dict[str, str]) -> None:
        self._handler = DeltaStorageHandler(uri, dict(storage_options))
        self._files = pyarrow.fs.PyFileSystem(self._handler)

    def read(self, path: str) -> bytes | None:
        try:
            with self._files.open_input_file(path) as file:
                return bytes(file.read())
        except FileNotFoundError:
            return None

    def write(self, path: str, data: bytes) -> None:
        write_object(self._handler, path, data)

    def exists(self, path: str) -> bool:
        return bool(self._files.get_file_info(path).type == pyarrow.fs.FileType.File)

    def files(self, directory: str) -> list[Listed]:
        selector = pyarrow.fs.FileSelector(directory, allow_not_found=True)
        found = [info for info in self._files.get_file_info(selector) if info.type == pyarrow.fs.FileType.File]
        return [Listed(info.base_name, _modified_ms(info)) for info in found]

    def delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._files.delete_file(path)

    def sync(self, paths: Iterable[str]) -> None:
        """Nothing to do."""


def write_object(handler: DeltaStorageHandler, path: str, data: bytes) -> None:
    """Not through pyarrow, which gives its own buffers to a stream that takes only bytes."""
    file = handler._handler.open_output_stream(path, None)
    file.write(data)
    file.close()  # type: ignore[attr-defined]  # the stub lacks it


def _modified_ms(info: pyarrow.fs.FileInfo) -> int:
    """What has no time is young: nothing is deleted because nobody knows its age."""
    return YOUNG_MS if info.mtime_ns is None else int(info.mtime_ns) // 1_000_000


def _write_synced(full: str, data: bytes) -> None:
    descriptor = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)


def _sync(full: str) -> None:
    descriptor = os.open(full, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

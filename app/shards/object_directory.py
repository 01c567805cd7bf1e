"""A shard's directory that is a prefix of an object store."""

from __future__ import annotations

import uuid
from contextlib import suppress

import pyarrow.fs
from deltalake.fs import DeltaStorageHandler

from app.shards.directory import CLOCK_PREFIX, File, parts_of
from app.state.store import YOUNG_MS, write_object


class ObjectDirectory:
    """There are no links and no directories."""

    def __init__(self, uri: str, options: dict[str, str]) -> None:
        self._handler = DeltaStorageHandler(uri, dict(options))
        self._files = pyarrow.fs.PyFileSystem(self._handler)

    def read(self, path: str) -> bytes | None:
        try:
            with self._files.open_input_file("/".join(parts_of(path))) as file:
                return bytes(file.read())
        except FileNotFoundError:
            return None

    def exists(self, path: str) -> bool:
        return bool(self._info(path).type == pyarrow.fs.FileType.File)

    def walk(self, below: str = "") -> list[File]:
        selector = pyarrow.fs.FileSelector("/".join(parts_of(below)), allow_not_found=True, recursive=True)
        found = [info for info in self._files.get_file_info(selector) if info.type == pyarrow.fs.FileType.File]
        return [File(info.path, info.size or 0, _modified_ms(info)) for info in found]

    def file(self, name: str) -> File | None:
        info = self._info(name)
        return File(name, info.size or 0, _modified_ms(info)) if info.type == pyarrow.fs.FileType.File else None

    def is_empty(self, below: str = "") -> bool:
        """Level by level: a listing cannot be ended early, and the whole of a place may be very long."""
        waiting = ["/".join(parts_of(below))]
        while waiting:
            place = waiting.pop()
            for info in self._files.get_file_info(pyarrow.fs.FileSelector(place, allow_not_found=True)):
                if info.type == pyarrow.fs.FileType.Directory:
                    waiting.append(info.path)
                elif info.path.strip("/") != place:  # that would be the object that some tools make for a directory
                    return False
        return True

    def delete(self, name: str, *, listed: File | None = None) -> int | None:
        info = self._info(name)
        if info.type != pyarrow.fs.FileType.File:
            return None
        # Of one object a listing may say the time in ms, and a look at it in seconds.
        if listed is not None and (info.size or 0, _modified_ms(info) // 1_000) != _size_and_second(listed):
            return None
        with suppress(FileNotFoundError):
            self._files.delete_file(info.path)
        return info.size or 0

    def write(self, name: str, data: bytes) -> None:
        write_object(self._handler, "/".join(parts_of(name)), data)

    def sync(self) -> None:
        """A put was durable when it was answered."""

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
        return self._files.get_file_info("/".join(parts_of(name)))


def _size_and_second(file: File) -> tuple[int, int]:
    return file.size, file.modified_ms // 1_000


def _modified_ms(info: pyarrow.fs.FileInfo) -> int:
    return YOUNG_MS if info.mtime_ns is None else int(info.mtime_ns) // 1_000_000

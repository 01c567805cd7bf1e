"""Which data files a shard's log names, and what their names mean on disk.

Whoever writes to a shard decides what is in its log, so no path in it is trusted. What is to be deleted must be plainly
a data file below the shard's directory. What is to be kept is taken in the widest sense: a path protects every file
that it could possibly mean.
"""

from __future__ import annotations

import io
import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, KeysView, Sequence
from typing import Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from app.shards.commit_log import BadLog, parse_actions
from app.shards.directory import LOG, Directory, File

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_COMMIT: Final = re.compile(rf"{LOG}/([0-9]{{20}})\.json")
_CHECKPOINT: Final = re.compile(rf"{LOG}/([0-9]{{20}})\.checkpoint\.parquet")


def data_file(path: str) -> str | None:
    """The name below the shard's directory that a path of the log means; None if it is no data file there."""
    if _SCHEME.match(path) or path.startswith("/"):
        return None
    try:
        name = unquote(path, errors="strict")
    except UnicodeDecodeError:
        return None
    return name if is_data_file(name) else None


def is_data_file(name: str) -> bool:
    """Deletion vectors, the log and whatever else is there are not for us to touch one by one."""
    parts = name.split("/")
    return (
        name.endswith(".parquet")
        and name.isprintable()
        and "\\" not in name
        and not any(part in ("", ".", "..") or part.casefold() == LOG for part in parts)
    )


def foreign_tables(directory: Directory, names: Iterable[str]) -> set[str]:
    """The directories above some files, and below the shard's, that have a log of their own: another's tables."""
    above = {place for name in names if not is_log(name) for place in _above(name)}
    logs = {place: f"{place}/{LOG}" for place in above}
    # A log that is a link, or still empty, is one as well; on object stores it is only the files in it.
    return {place for place, log in logs.items() if directory.exists(log) or not directory.is_empty(log)}


def is_below(name: str, places: Collection[str]) -> bool:
    return bool(places) and any(place in places for place in _above(name))


def is_log(name: str) -> bool:
    return name == LOG or name.startswith(f"{LOG}/")


def _above(name: str) -> Iterator[str]:
    """Every directory that a file is in, but not the shard's."""
    while cut := name.rfind("/") + 1:
        name = name[: cut - 1]
        yield name


def key(name: str) -> str:
    """The same for all names that some file system takes for the same."""
    return posixpath.normpath(name).casefold()


class Names:
    """A set of data files, named as logs do; asked for a file on disk it answers yes when in doubt."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._keys: set[str] = set()
        self._foreign: set[str] = set()
        for path in paths:
            for meant in {path, unquote(path)}:
                self._keys.add(key(meant))
                if _SCHEME.match(meant) or meant.startswith(("/", "..")):
                    self._foreign.add(posixpath.basename(key(meant)))  # may lead back here by another way

    def __contains__(self, name: str) -> bool:
        return key(name) in self._keys or posixpath.basename(key(name)) in self._foreign

    def among(self, keys: KeysView[str]) -> set[str]:
        """Those of some keys that are in this set."""
        found = self._keys & keys
        if self._foreign:
            found |= {each for each in keys if posixpath.basename(each) in self._foreign}
        return found


def commit_files(files: Iterable[File]) -> dict[int, File]:
    """Those that are commits, by version."""
    return {int(match[1]): file for file in files if (match := _COMMIT.fullmatch(file.name))}


def checkpoint_files(files: Iterable[File]) -> dict[int, File]:
    """Those that are whole checkpoints, each in one file, by version. There are other kinds."""
    return {int(match[1]): file for file in files if (match := _CHECKPOINT.fullmatch(file.name))}


def named_paths(directory: Directory) -> Iterator[str]:
    """Every path that the log names, live or removed: in commits, compacted commits and checkpoints of any kind.

    BadLog if any of these cannot be read, is missing, or goes away meanwhile: then nobody knows what it named.
    """
    files = directory.walk(LOG)
    _check_whole(files)
    for file in files:
        is_parquet = file.name.endswith(".parquet")
        if not is_parquet and not file.name.endswith(".json"):
            continue
        data = directory.read(file.name)
        if data is None:
            raise BadLog(f"The file {file.name} of the Delta log was cleaned up while it was to be read.")
        yield from paths_of_checkpoint(file.name, data) if is_parquet else _paths_of_json(file.name, data)


def _check_whole(files: Sequence[File]) -> None:
    """A log begins with version 0 or with a checkpoint, and has every version after that."""
    versions = sorted(commit_files(files))
    if not versions or versions[-1] - versions[0] != len(versions) - 1:
        raise BadLog("The Delta log has no commits, or not all of them.")
    if versions[0] > 0 and not any(".checkpoint." in file.name for file in files):
        raise BadLog(f"The Delta log begins with version {versions[0]}, and there is no checkpoint.")


def _paths_of_json(name: str, data: bytes) -> Iterator[str]:
    for action in parse_actions(name, data):
        for file in (action.add, action.remove):
            if file is not None:
                yield file.path


def paths_of_checkpoint(name: str, data: bytes, kinds: Sequence[str] = ("add", "remove")) -> Iterator[str]:
    """Files that a checkpoint says were added, or removed not long before it."""
    try:
        file = pq.ParquetFile(io.BytesIO(data))
        for kind in kinds:
            if kind in file.schema_arrow.names:
                column = file.read(columns=[f"{kind}.path"]).column(kind).combine_chunks()
                yield from (path for path in column.field("path").to_pylist() if path is not None)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise BadLog(f"The checkpoint {name} cannot be read: {error}") from error

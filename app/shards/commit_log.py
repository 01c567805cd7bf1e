"""What a shard's Delta log says, read without Spark: commit by commit, or the state of the whole table.

Anyone may write to a shard's log, also engines that know nothing of us: whatever a commit holds that we do not need is
passed over, and only what we rely on (JSON, the types of those fields) can be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

import msgspec
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from app.core.frontier import EMPTY, ZERO, Frontier
from app.core.placing import Found
from app.state.commit_log import commit_path
from app.state.store import local_path

UPPER: Final = "holdfast.upper"
SINCE: Final = "holdfast.since"
EPOCH: Final = "holdfast.epoch"
"""App transactions of a shard's log; the first two are frontiers, with the greatest 63-bit value for `[]`."""
MOST_COMMITS: Final = 1_000
"""How many commits are read at once; who comes back after a long time goes on where this ended."""


class Readable(Protocol):
    """The part of a store that is needed here."""

    def read(self, path: str) -> bytes | None: ...

    def exists(self, path: str) -> bool: ...


class BadLog(Exception):
    """A shard's log cannot be read, or is not that of this shard. Says nothing about other shards."""


class Commit(NamedTuple):
    """What one commit says; None where it says nothing. Paths are as the log has them, which is percent-encoded."""

    version: int
    upper: Frontier | None
    table_id: str | None
    added: list[str]
    removed: list[str]


class News(NamedTuple):
    """What several commits in a row say: of each value the newest."""

    version: int
    upper: Frontier | None
    table_id: str | None


class TableState(NamedTuple):
    """A shard's table at its newest version. A table that we never wrote to has frontiers 0 and epoch 0."""

    version: int
    table_id: str
    upper: Frontier
    since: Frontier
    epoch: int

    def found(self) -> Found:
        """For registering the table as a shard."""
        return Found(
            since=self.since, upper=self.upper, log_version=self.version, table_id=self.table_id, epoch=self.epoch
        )


class _Txn(msgspec.Struct, rename="camel"):
    app_id: str
    version: int


class _File(msgspec.Struct):
    path: str


class _Metadata(msgspec.Struct):
    id: str


class Action(msgspec.Struct, rename={"meta_data": "metaData"}):
    """One line of a log, as far as we need it."""

    add: _File | None = None
    remove: _File | None = None
    txn: _Txn | None = None
    meta_data: _Metadata | None = None


class _LastCheckpoint(msgspec.Struct):
    version: int


_decode_action: Final = msgspec.json.Decoder(Action).decode
_decode_checkpoint: Final = msgspec.json.Decoder(_LastCheckpoint).decode


def read_commits(store: Readable, after_version: int) -> News | None:
    """What the commits after a version say, up to the first that is missing; None if the next one is.

    A commit that cannot be read ends it too: what came before it counts, and the next call raises BadLog.
    """
    found: list[Commit] = []
    try:
        for commit in _commits_after(store, after_version):
            found.append(commit)
            if len(found) == MOST_COMMITS:
                break
    except BadLog:
        if not found:
            raise
    return _together(found) if found else None


def read_commit(store: Readable, version: int) -> Commit | None:
    """One commit, or None if its file is missing."""
    data = store.read(commit_path(version))
    return None if data is None else parse_commit(version, data)


def parse_commit(version: int, data: bytes) -> Commit:
    upper = table_id = None
    added: list[str] = []
    removed: list[str] = []
    for action in parse_actions(f"version {version}", data):
        if action.add is not None:
            added.append(action.add.path)
        elif action.remove is not None:
            removed.append(action.remove.path)
        elif action.txn is not None and action.txn.app_id == UPPER:
            upper = _frontier(UPPER, action.txn.version)
        elif action.meta_data is not None:
            table_id = action.meta_data.id
    return Commit(version, upper, table_id, added, removed)


def parse_actions(what: str, data: bytes) -> Iterator[Action]:
    """The actions of a commit file, or of any other file of a log that has one action per line."""
    lines = [line for line in data.splitlines() if line.strip()]
    if not lines:
        raise BadLog(f"The file of {what} in the Delta log is empty: it was not written completely.")
    for number, line in enumerate(lines, 1):
        try:
            yield _decode_action(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadLog(
                f"Line {number} of {what} in the Delta log cannot be read: {error}. "
                "It was not written completely, or is damaged."
            ) from error


def last_checkpoint(store: Readable) -> int | None:
    """The version of the last checkpoint, as far as the log has a note of it. It is a hint, and may be missing."""
    data = store.read("_delta_log/_last_checkpoint")
    try:
        return None if data is None else _decode_checkpoint(data).version
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def full_state(location: str, options: dict[str, str]) -> TableState | None:
    """The table at a location, read from its last checkpoint on; None if there is no table."""
    table = opened(location, options)
    return None if table is None else state_of(table)


def live_files(location: str, options: dict[str, str]) -> tuple[TableState, list[str]] | None:
    """The same, and the names below the location of all files that the newest version consists of.

    A file that is somewhere else, or reached in another way, is named by its URI.
    """
    table = opened(location, options)
    if table is None:
        return None
    here = f"{local_path(location) or table.table_uri.rstrip('/')}/"
    return state_of(table), [uri.removeprefix(here) for uri in table.file_uris()]


def state_of(table: DeltaTable) -> TableState:
    return TableState(
        version=table.version(),
        table_id=str(table.metadata().id),
        upper=_frontier(UPPER, table.transaction_version(UPPER)) or ZERO,
        since=_frontier(SINCE, table.transaction_version(SINCE)) or ZERO,
        epoch=table.transaction_version(EPOCH) or 0,
    )


def opened(location: str, options: dict[str, str]) -> DeltaTable | None:
    """None if there is no table; BadLog if there may be one."""
    try:
        return DeltaTable(location, storage_options=options)
    except TableNotFoundError:
        return None
    except (DeltaError, OSError) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]  # the rest is a stack trace of another language
        raise BadLog(f"The Delta log cannot be read: {reason}") from error


def _commits_after(store: Readable, version: int) -> Iterator[Commit]:
    while (commit := read_commit(store, version + 1)) is not None:
        yield commit
        version = commit.version


def _together(commits: list[Commit]) -> News:
    last = commits[-1]
    upper, table_id = last.upper, last.table_id
    for commit in reversed(commits):
        upper = commit.upper if upper is None else upper
        table_id = commit.table_id if table_id is None else table_id
    return News(last.version, upper, table_id)


def _frontier(name: str, version: int | None) -> Frontier | None:
    if version is None:
        return None
    if not 0 <= version <= EMPTY:
        raise BadLog(f"The app transaction {name} in the Delta log is {version}, which is no frontier.")
    return Frontier(version)

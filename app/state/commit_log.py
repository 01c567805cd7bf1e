"""The journal's Delta log: commits that land at exactly one version or not at all, and reading them back.

On local paths a commit is a hard link made here, for two reasons. delta-rs lists the whole log directory after each of
its commits, which at 10,000 commit files costs more than all the rest (an object store lists from the last checkpoint
on, so there it does not matter); and it syncs nothing, while here everything is durable before anyone can see it.
Elsewhere delta-rs commits, with the store's conditional put and no retries. Both pass the same tests.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction

from app.core.errors import Corrupt
from app.state.entries import SCHEMA
from app.state.errors import UnsafeStore
from app.state.store import LocalStore, Store, open_store, unsafe

log = logging.getLogger(__name__)

TRIMMED: Final = "holdfast.trimmed"
"""App transaction: the seq up to which entries were removed because every table has them."""
NO_HOOKS: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


class Mark(msgspec.Struct, frozen=True):
    """Who made a commit; in its commitInfo, as `userMetadata`."""

    kind: Literal["entry", "maintenance"]
    instance: str
    attempt: str
    epoch: int
    host: str
    pid: int


class DataFile(NamedTuple):
    """A file with entries `first_seq` to `last_seq`. Files do not overlap."""

    path: str
    size: int
    rows: int
    first_seq: int
    last_seq: int
    last_at: int


class Commit(NamedTuple):
    """What one version did. `mark` is None if it was not ours; then it may only have moved rows between files."""

    version: int
    mark: Mark | None
    added: Sequence[DataFile] = ()
    removed: Sequence[str] = ()
    trimmed: int | None = None


class Writer(Protocol):
    def put(self, commit: Commit) -> bool:
        """True: it is there, durably, at exactly its version. False: it is not. An exception: unknown."""


def commit_path(version: int) -> str:
    return f"_delta_log/{version:020d}.json"


class LinkWriter:
    """Commits on a local path."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store

    def put(self, commit: Commit) -> bool:
        return self._store.put_if_absent(commit_path(commit.version), _encode_commit(commit))


class DeltaWriter:
    """Commits through delta-rs, which knows how each object store creates an object only once."""

    def __init__(self, uri: str, storage_options: dict[str, str]) -> None:
        self._uri = uri
        self._options = storage_options
        self._handle: DeltaTable | None = None

    @classmethod
    def probe(cls, uri: str, storage_options: dict[str, str], store: Store) -> None:
        """UnsafeStore, unless of two writers at one version exactly the first wins. Tried on a table of its own."""
        directory = f"_probe/{uuid.uuid4().hex}"
        probed = f"{uri.rstrip('/')}/{directory}"
        DeltaTable.create(probed, SCHEMA, storage_options=storage_options, post_commithook_properties=NO_HOOKS)
        try:
            writers = [cls(probed, storage_options) for _ in range(2)]
            for writer in writers:
                writer._handle = DeltaTable(probed, storage_options=storage_options)
            marks = [Mark("maintenance", "", uuid.uuid4().hex, 0, "", 0) for _ in writers]
            writers[0].put(Commit(1, marks[0]))
            with suppress(DeltaError):
                if writers[1].put(Commit(1, marks[1])):
                    raise UnsafeStore(unsafe(uri))
            there = read_commit(open_store(probed, storage_options), 1)
            if there is None or there.mark != marks[0]:
                raise UnsafeStore(unsafe(uri))
        finally:
            for file in store.files(f"{directory}/_delta_log"):
                store.delete(f"{directory}/_delta_log/{file.name}")

    def put(self, commit: Commit) -> bool:
        handle = self._handle
        if handle is None or handle.version() > commit.version - 1:
            handle = self._handle = DeltaTable(self._uri, storage_options=self._options)
        elif handle.version() < commit.version - 1:
            handle.update_incremental()
        if handle.version() != commit.version - 1:
            return False
        now_ms = int(time.time() * 1000)
        actions: list[AddAction | RemoveAction] = [
            AddAction(file.path, file.size, {}, now_ms, _is_entry(commit), _encode_stats(file)) for file in commit.added
        ]
        actions += [RemoveAction(path, commit.trimmed is not None, now_ms) for path in commit.removed]
        handle.create_write_transaction(
            actions,
            "append",
            SCHEMA,
            commit_properties=CommitProperties(
                custom_metadata={"userMetadata": _encode_mark(commit.mark)},
                max_commit_retries=0,
                app_transactions=[] if commit.trimmed is None else [Transaction(TRIMMED, commit.trimmed, now_ms)],
            ),
            post_commithook_properties=NO_HOOKS,
        )
        return True


class _Stats(msgspec.Struct, rename="camel"):
    num_records: int
    min_values: dict[str, Any]
    max_values: dict[str, Any]


class _File(msgspec.Struct, rename="camel"):
    path: str
    size: int | None = None
    stats: str | None = None
    data_change: bool = True


class _Txn(msgspec.Struct, rename="camel"):
    app_id: str
    version: int


class _Info(msgspec.Struct, rename="camel"):
    user_metadata: str | None = None


class _Action(msgspec.Struct, rename={"meta_data": "metaData", "commit_info": "commitInfo"}):
    add: _File | None = None
    remove: _File | None = None
    txn: _Txn | None = None
    commit_info: _Info | None = None
    meta_data: msgspec.Raw | None = None
    protocol: msgspec.Raw | None = None


_decode_action: Final = msgspec.json.Decoder(_Action).decode
_decode_mark: Final = msgspec.json.Decoder(Mark).decode
_decode_stats: Final = msgspec.json.Decoder(_Stats).decode
_json: Final = msgspec.json.Encoder().encode


def read_commit(store: Store, version: int) -> Commit | None:
    """The commit at a version, or None if there is none (yet, or any more)."""
    data = store.read(commit_path(version))
    if data is None:
        return None
    actions = [_decode_action(line) for line in data.splitlines() if line]
    mark = None
    for action in actions:
        if action.commit_info is not None and action.commit_info.user_metadata is not None:
            mark = _mark_of(action.commit_info.user_metadata)
    if mark is None:
        changes_data = any(
            action.meta_data is not None or action.protocol is not None or (file is not None and file.data_change)
            for action in actions
            for file in (action.add, action.remove)
        )
        if changes_data and version > 0:
            raise Corrupt(
                f"Version {version} of the journal was not written by Holdfast and changes what the journal says. "
                "Nothing but a controller may write there; restore the journal to the version before."
            )
    return Commit(
        version,
        mark,
        [data_file(action.add.path, action.add.size or 0, action.add.stats) for action in actions if action.add],
        [action.remove.path for action in actions if action.remove],
        next((action.txn.version for action in actions if action.txn and action.txn.app_id == TRIMMED), None),
    )


def data_file(path: str, size: int, stats: str | None) -> DataFile:
    """A file as its add action describes it."""
    if stats is None:
        raise Corrupt(f"The journal's file {path} has no statistics: it was not written by Holdfast.")
    known = _decode_stats(stats)
    least, most = known.min_values, known.max_values
    return DataFile(path, size, known.num_records, least["seq"], most["seq"], most["at"])


def _mark_of(text: str) -> Mark | None:
    try:
        return _decode_mark(text)
    except msgspec.MsgspecError:
        return None


def _is_entry(commit: Commit) -> bool:
    return commit.mark is not None and commit.mark.kind == "entry"


def _encode_mark(mark: Mark | None) -> str:
    return "" if mark is None else _json(mark).decode()


def _encode_stats(file: DataFile) -> str:
    return _json(
        {
            "numRecords": file.rows,
            "minValues": {"seq": file.first_seq},
            "maxValues": {"seq": file.last_seq, "at": file.last_at},
            "nullCount": {},
        }
    ).decode()


def _encode_commit(commit: Commit) -> bytes:
    now_ms = int(time.time() * 1000)
    is_entry = _is_entry(commit)
    operation, parameters = ("WRITE", {"mode": "Append"}) if is_entry else ("OPTIMIZE", {})
    lines: list[dict[str, Any]] = [
        {
            "commitInfo": {
                "timestamp": now_ms,
                "operation": operation,
                "operationParameters": parameters,
                "engineInfo": "holdfast",
                "userMetadata": _encode_mark(commit.mark),
            }
        }
    ]
    if commit.trimmed is not None:
        lines.append({"txn": {"appId": TRIMMED, "version": commit.trimmed, "lastUpdated": now_ms}})
    lines += [
        {"remove": {"path": path, "deletionTimestamp": now_ms, "dataChange": commit.trimmed is not None}}
        for path in commit.removed
    ]
    lines += [
        {
            "add": {
                "path": file.path,
                "partitionValues": {},
                "size": file.size,
                "modificationTime": now_ms,
                "dataChange": is_entry,
                "stats": _encode_stats(file),
            }
        }
        for file in commit.added
    ]
    return b"".join(_json(line) + b"\n" for line in lines)

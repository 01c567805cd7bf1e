"""What the journal consists of at one version: its files, and up to where it was trimmed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from app.state.commit_log import NO_HOOKS, TRIMMED, Commit, DataFile, commit_path
from app.state.entries import SCHEMA
from app.state.errors import StateMissing
from app.state.store import Store

log = logging.getLogger(__name__)

MOST_LISTINGS: Final = 5
_CONFIGURATION: Final = {
    # Cleaning up is ours: no other engine that happens to write a checkpoint may do it.
    "delta.enableExpiredLogCleanup": "false",
    "delta.logRetentionDuration": "interval 2 hours",
    # Compacted files are deleted by name; their remove actions need not stay in every checkpoint.
    "delta.deletedFileRetentionDuration": "interval 1 hours",
}


class Snapshot(NamedTuple):
    """The journal at version `head`; `files` in the order of their entries."""

    head: int
    files: list[DataFile]
    trimmed: int

    @property
    def last_seq(self) -> int:
        """The seq of the last entry, 0 if there is none; the head may be a maintenance commit."""
        return self.files[-1].last_seq if self.files else 0

    @property
    def last_at(self) -> int:
        """The time of the last entry, 0 if there is none. The last entry is never trimmed."""
        return self.files[-1].last_at if self.files else 0

    def has(self, paths: Iterable[str]) -> bool:
        """Whether all these files are live."""
        return {file.path for file in self.files}.issuperset(paths)

    def after(self, commits: Sequence[Commit]) -> Snapshot:
        """The journal after the next commits."""
        head, files, trimmed = self
        for commit in commits:
            head += 1
            if commit.version != head:
                raise AssertionError(f"commit {commit.version} does not follow version {head - 1}")
            if commit.removed:
                gone = set(commit.removed)
                files = [file for file in files if file.path not in gone]
            if commit.added:
                newest = not files or commit.added[0].first_seq > files[-1].last_seq
                files = [*files, *commit.added]
                if not newest:
                    files.sort(key=lambda file: file.first_seq)
            trimmed = max(trimmed, commit.trimmed or 0)
        return Snapshot(head, files, trimmed)


def load_snapshot(uri: str, options: dict[str, str]) -> Snapshot:
    """Reads the log from its last checkpoint on."""
    table = _open(uri, options)
    actions = pa.table(table.get_add_actions(flatten=True)).select(
        ["path", "size_bytes", "num_records", "min.seq", "max.seq", "max.at"]
    )
    files = sorted(
        (DataFile(*row.values()) for row in actions.to_pylist()),  # the columns are in the order of the fields
        key=lambda file: file.first_seq,
    )
    return Snapshot(table.version(), files, table.transaction_version(TRIMMED) or 0)


def _open(uri: str, options: dict[str, str]) -> DeltaTable:
    for attempt in range(1, MOST_LISTINGS + 1):
        try:
            return DeltaTable(uri, storage_options=options)
        except TableNotFoundError as error:
            raise StateMissing(f"There is no Holdfast state: no journal at {uri}. Is `root` right?") from error
        except DeltaError as error:
            # A local directory that is listed while entries come may show one and not the one before it.
            if attempt == MOST_LISTINGS:
                raise
            log.info("the journal is listed again uri=%s error=%s", uri, error)
    raise AssertionError("the last attempt returns or raises")


def create_journal(uri: str, options: dict[str, str], store: Store) -> None:
    """Creates the journal if it is missing. Of several at once one wins, and all find the same journal."""
    if DeltaTable.is_deltatable(uri, options):
        return
    try:
        DeltaTable.create(
            uri,
            SCHEMA,
            mode="error",
            name="holdfast journal",
            configuration=_CONFIGURATION,
            storage_options=options,
            commit_properties=CommitProperties(max_commit_retries=0),
            post_commithook_properties=NO_HOOKS,
        )
        log.info("journal created uri=%s", uri)
    except Exception:  # whoever came first has made it; if nobody did, that is the error to show
        if not DeltaTable.is_deltatable(uri, options):
            raise
    store.sync([commit_path(0)])

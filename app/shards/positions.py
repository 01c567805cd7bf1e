"""Which shards are to be watched, and how far each is known: the state's `shards` table, followed as it changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from app.core.frontier import Frontier
from app.core.shard_work import WATCH
from app.shards.looking import Target
from app.state.commit_log import commit_path
from app.state.store import open_store

REOPEN_EVERY_S: Final = 300.0
"""How often everything is read anew: after a pause that was longer than commit files are kept, nothing else helps."""
_COLUMNS: Final = (
    "shard",
    "location",
    "format",
    "table_id",
    "upper",
    "log_version",
    "state",
    "last_error",
    "updated_seq",
)
_WATCHED_STATES: Final = frozenset(["live", "dropped"])


class Changes(NamedTuple):
    """Shards whose rows changed: those to watch, and those no longer to be watched. `whole`: there are no others."""

    watched: list[Target]
    ended: list[str]
    whole: bool


class Positions:
    """An open handle on the table. Rows are read again only when its files changed, and then only the new ones."""

    def __init__(self, state: str, options: dict[str, str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._uri = f"{state.rstrip('/')}/shards"
        self._options = options
        self._clock = clock
        self._store = open_store(self._uri, options)
        self._handle: DeltaTable | None = None
        self._reopen_at = 0.0
        self._files: frozenset[str] = frozenset()
        self._seq = -1

    def changes(self) -> Changes | None:
        """What changed since the last call, everything at the first; None if nothing did."""
        if self._handle is None or self._clock() >= self._reopen_at:
            return self._anew()
        if not self._store.exists(commit_path(self._handle.version() + 1)):
            return None
        try:
            self._handle.update_incremental()
        except DeltaError:  # what was between us and the head may be gone
            return self._anew()
        files = frozenset(self._handle.file_uris())
        if files == self._files:
            return None  # a commit that only says how far the table has come
        # An entry of the journal is merged whole, so rows that came later have a greater number.
        changes = self._read(self._handle, f"updated_seq > {self._seq}", whole=False)
        self._files = files
        return changes

    def _anew(self) -> Changes:
        handle = DeltaTable(self._uri, storage_options=self._options)
        self._seq = -1
        changes = self._read(handle, None, whole=True)
        self._handle, self._files = handle, frozenset(handle.file_uris())
        self._reopen_at = self._clock() + REOPEN_EVERY_S
        return changes

    def _read(self, handle: DeltaTable, where: str | None, *, whole: bool) -> Changes:
        watched, ended = [], []
        for row in _rows(handle, where):
            self._seq = max(self._seq, row["updated_seq"] or 0)
            if row["format"] != "updates" or row["state"] not in _WATCHED_STATES or row["upper"] is None:
                ended.append(row["shard"])
                continue
            version = -1 if row["log_version"] is None else row["log_version"]
            failing = (row["last_error"] or "").startswith(f"{WATCH}: ")
            upper = Frontier(row["upper"])
            watched.append(
                Target(row["shard"], row["location"], row["table_id"] or "", version, upper, failing=failing)
            )
        return Changes(watched, ended, whole)


def _rows(handle: DeltaTable, where: str | None) -> Iterator[dict[str, Any]]:
    there = {field.name for field in handle.schema().fields}  # a table may not have the newest columns yet
    scan = handle.scan(columns=[name for name in _COLUMNS if name in there], predicate=where)
    found = pa.RecordBatchReader.from_stream(scan).read_all()
    columns = [found.column(name).to_pylist() if name in there else [None] * found.num_rows for name in _COLUMNS]
    for values in zip(*columns, strict=True):
        yield dict(zip(_COLUMNS, values, strict=True))

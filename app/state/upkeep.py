"""Keeping the journal small and quick: which files to rewrite, checkpoints, and what may be deleted."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, Literal, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from app.core.errors import Corrupt
from app.state.commit_log import DataFile
from app.state.entries import from_parquet, to_parquet
from app.state.snapshot import Snapshot
from app.state.store import YOUNG_MS, Store

log = logging.getLogger(__name__)

Kind = Literal["entry", "maintenance"]
COMPACT_AFTER_FILES: Final = 100
# A checkpoint costs about a millisecond per commit since the one before, beside the entries: rather often than long.
CHECKPOINT_AFTER_COMMITS: Final = 100
SMALL_BYTES: Final = 64 * 1024
MEDIUM_BYTES: Final = 512 * 1024
TRIM_AFTER_FILES: Final = 25
RECENT_BYTES: Final = 32 * 1024 * 1024
COMMITS_KEPT_MS: Final = 2 * 3_600_000
DEAD_FILES_KEPT_S: Final = 3_600.0
CLEAN_EVERY_S: Final = 600.0
CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

MOST_BEHIND: Final = 1_000
"""How many commits may come between the plan of a compaction and its own."""
# A data file is named after the last version that may add it, so its name says whether it can still become live.
_DATA_FILE: Final = re.compile(r"([0-9]{20})-[0-9a-f]{32}\.parquet")
_LOG_FILE: Final = re.compile(r"([0-9]{20})\.(json|checkpoint\.parquet)")
_STAGED: Final = re.compile(r"\..*\.tmp")


class Plan(NamedTuple):
    """Files to become one, without their entries up to `trim_to` that are older than `before_ms`."""

    files: Sequence[DataFile]
    trim_to: int
    before_ms: int


def plan(files: Sequence[DataFile], *, trim_to: int, before_ms: int) -> Plan | None:
    """What to rewrite now, if anything: a run of small files, and whatever consists of old entries only.

    Small files become one as soon as there are many in a row, until the result is no longer small; the same once more
    with what is then medium. So the number of files stays small, and each entry is rewritten a bounded number of times.
    """
    if not files:
        return None
    # The last entry stays: it says what the time was.
    trim_to = min(trim_to, files[-1].last_seq - 1)
    old = 0
    while files[old].last_seq <= trim_to and files[old].last_at < before_ms:
        old += 1
    young = files[old:]
    run = _newest_run(young, above=-1, most=SMALL_BYTES, enough=COMPACT_AFTER_FILES)
    run = run or _newest_run(young, above=SMALL_BYTES, most=MEDIUM_BYTES, enough=16)
    if run:
        return Plan([*files[:old], *run], trim_to, before_ms)
    if old >= TRIM_AFTER_FILES or sum(file.size for file in files[:old]) >= MEDIUM_BYTES:
        return Plan(files[:old], trim_to, before_ms)
    return None


def _newest_run(files: Sequence[DataFile], *, above: int, most: int, enough: int) -> Sequence[DataFile]:
    """The newest run of files of at most `most` bytes each, if enough of them are above the other size."""
    run: list[DataFile] = []
    for file in reversed(files):
        if file.size <= most:
            run.append(file)
        elif _number_above(run, above) >= enough:
            break
        else:
            run.clear()
    return run[::-1] if _number_above(run, above) >= enough else []


def _number_above(files: Sequence[DataFile], size: int) -> int:
    return sum(file.size > size for file in files)


class Recent:
    """The rows of the files that we wrote last, so that compacting them need not read them again.

    `read` may be called while another thread does the rest: a file that is forgotten meanwhile is read again.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tables: dict[str, pa.Table] = {}
        self._bytes = 0

    def keep(self, path: str, table: pa.Table) -> None:
        if self._bytes + table.nbytes <= RECENT_BYTES:
            self._tables[path] = table
            self._bytes += table.nbytes

    def forget(self, paths: Iterable[str]) -> None:
        for path in paths:
            table = self._tables.pop(path, None)
            self._bytes -= 0 if table is None else table.nbytes

    def retain(self, paths: Collection[str]) -> None:
        self.forget([path for path in self._tables if path not in paths])

    def read(self, path: str) -> pa.Table:
        table = self._tables.get(path)
        if table is None:
            data = self._store.read(path)
            if data is None:
                raise Corrupt(f"The journal's file {path} is missing.")
            table = from_parquet(data)
        return table


def rewrite(plan: Plan, read: Callable[[str], pa.Table]) -> tuple[pa.Table, int]:
    """The rows that stay, in order, and the seq up to which entries were left out (0: none)."""
    cut = 0
    parts = []
    for file in plan.files:
        if file.last_seq <= plan.trim_to and file.last_at < plan.before_ms:
            cut = file.last_seq
            continue
        parts.append(read(file.path))
    table = pa.concat_tables(parts) if parts else pa.table({"seq": pa.array([], pa.int64())})
    if parts:
        old = pc.and_(pc.less_equal(table["seq"], plan.trim_to), pc.less(table["at"], plan.before_ms))
        oldest = table.filter(old)
        if oldest.num_rows:
            cut = max(cut, pc.max(oldest["seq"]).as_py())
        table = table.filter(pc.greater(table["seq"], cut))
    return table, cut


def data_path(last_version: int, attempt: str) -> str:
    """The name of a data file that no commit above `last_version` may add."""
    return f"{last_version:020d}-{attempt}.parquet"


def write_data(store: Store, path: str, table: pa.Table) -> DataFile:
    """Writes a data file, durably, and describes it; no reader sees it before a commit adds it."""
    data = to_parquet(table)
    store.write(path, data)
    seqs, times = pc.min_max(table["seq"]).as_py(), pc.max(table["at"]).as_py()
    return DataFile(path, len(data), table.num_rows, seqs["min"], seqs["max"], times)


class _LastCheckpoint(msgspec.Struct):
    version: int


class Upkeep:
    """Checkpoints and deletions. Remembers how far it has come; forgetting that is harmless."""

    def __init__(self, uri: str, store: Store, options: dict[str, str]) -> None:
        self._uri = uri
        self._store = store
        self._options = options
        self._checkpoint = last_checkpoint(store)
        self._cleaned_at_s = time.clock_gettime(CLOCK)
        self._dead_since_s: dict[str, float] = {}

    def checkpoint_is_due(self, head: int) -> bool:
        return head - self._checkpoint >= CHECKPOINT_AFTER_COMMITS

    def checkpoint(self, head: int) -> None:
        """Of a version that is there: a listing of what comes meanwhile may have gaps, which delta-rs refuses."""
        table = DeltaTable(self._uri, version=head, storage_options=self._options)
        self._checkpoint = write_checkpoint(table, self._store)

    def clean(self, journal: Snapshot) -> None:
        """Deletes what is no longer needed, every now and then."""
        now_s = time.clock_gettime(CLOCK)
        if now_s - self._cleaned_at_s >= CLEAN_EVERY_S:
            self._cleaned_at_s = now_s
            deleted = clean_log(self._store, self._checkpoint) + self._clean_data(journal, now_s)
            if deleted:
                log.info("journal cleaned up head=%s files_deleted=%s", journal.head, deleted)

    def _clean_data(self, journal: Snapshot, now_s: float) -> int:
        """Data files that are not live though every version that could add them is decided: never live again."""
        live = {file.path for file in journal.files}
        dead = {
            file.name
            for file in self._store.files("")
            if (match := _DATA_FILE.fullmatch(file.name)) and int(match[1]) <= journal.head and file.name not in live
        }
        self._dead_since_s = {name: self._dead_since_s.get(name, now_s) for name in dead}
        expired = [name for name, since_s in self._dead_since_s.items() if now_s - since_s >= DEAD_FILES_KEPT_S]
        for name in expired:
            self._store.delete(name)
            del self._dead_since_s[name]
        return len(expired)


def write_checkpoint(table: DeltaTable, store: Store) -> int:
    """Writes a checkpoint of the handle's version, durably: commit files are deleted because of it."""
    table.create_checkpoint()
    version = table.version()
    store.sync([f"_delta_log/{version:020d}.checkpoint.parquet", "_delta_log/_last_checkpoint"])
    return version


def last_checkpoint(store: Store) -> int:
    data = store.read("_delta_log/_last_checkpoint")
    return 0 if data is None else msgspec.json.decode(data, type=_LastCheckpoint).version


def clean_log(store: Store, checkpoint: int) -> int:
    """Deletes commit files and checkpoints behind a checkpoint, old ones by the store's own clock."""
    found = store.files("_delta_log")
    newest_ms = max((file.modified_ms for file in found if file.name.endswith(".json")), default=0)
    if newest_ms == YOUNG_MS:
        return 0  # a store that tells no time: nobody knows how old the others are
    deleted = 0
    for file in found:
        if file.modified_ms >= newest_ms - COMMITS_KEPT_MS:
            continue
        match = _LOG_FILE.fullmatch(file.name)
        if (match and int(match[1]) < checkpoint) or _STAGED.fullmatch(file.name):
            store.delete(f"_delta_log/{file.name}")
            deleted += 1
    return deleted

"""Keeping the tables quick: old commands go, small files become one, the log stays short."""

from __future__ import annotations

import logging
import time
from typing import Any, Final
from urllib.parse import unquote

import msgspec
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import DeltaError

from app.state.commit_log import NO_HOOKS, commit_path
from app.state.schemas import at_ms
from app.state.store import Store
from app.state.upkeep import CLOCK, clean_log, last_checkpoint, write_checkpoint

log = logging.getLogger(__name__)

COMPACT_AFTER_FILES: Final = 50
CHECKPOINT_AFTER_COMMITS: Final = 100
CLEAN_EVERY_S: Final = 600.0
_decode: Final = msgspec.json.Decoder(dict[str, Any]).decode


class TableUpkeep:
    """Remembers when what was done; forgetting that is harmless."""

    def __init__(self, name: str, store: Store) -> None:
        self._name = name
        self._store = store
        self._checkpoint = last_checkpoint(store)
        self._cleaned_at_s = time.clock_gettime(CLOCK)
        self._forgot_before_ms = 0

    def forget(self, handle: DeltaTable, *, before_ms: int) -> None:
        """Deletes rows of commands that were applied before then; at most once per minute of their time."""
        if before_ms - self._forgot_before_ms < 60_000:
            return
        with _Tolerant(self._name, "forget"):
            handle.update_incremental()
            handle.delete(
                f"applied_at < {at_ms(before_ms)}",
                commit_properties=CommitProperties(max_commit_retries=0),
                post_commithook_properties=NO_HOOKS,
            )
            self._forgot_before_ms = before_ms

    def run(self, handle: DeltaTable) -> None:
        if len(handle.file_uris()) >= COMPACT_AFTER_FILES:
            with _Tolerant(self._name, "compact"):
                handle.optimize.compact(post_commithook_properties=NO_HOOKS)
        if handle.version() - self._checkpoint >= CHECKPOINT_AFTER_COMMITS:
            with _Tolerant(self._name, "checkpoint"):
                self._checkpoint = write_checkpoint(handle, self._store)
        now_s = time.clock_gettime(CLOCK)
        if now_s - self._cleaned_at_s >= CLEAN_EVERY_S:
            self._cleaned_at_s = now_s
            with _Tolerant(self._name, "clean up"):
                handle.vacuum(retention_hours=1, dry_run=False, full=False, post_commithook_properties=NO_HOOKS)
                clean_log(self._store, self._checkpoint)


class _Tolerant:
    """Maintenance that fails is tried again later: the tables are right without it."""

    def __init__(self, table: str, step: str) -> None:
        self._table = table
        self._step = step

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, DeltaError | OSError):
            log.info("maintenance put off table=%s step=%s error=%s", self._table, self._step, error)
            return True
        return False


def files_of_commit(store: Store, version: int) -> list[str]:
    """The files that a commit wrote, its own first."""
    data = store.read(commit_path(version))
    actions = [_decode(line) for line in (data or b"").splitlines() if line]
    return [commit_path(version), *(unquote(action["add"]["path"]) for action in actions if "add" in action)]

"""Where the journal ends as far as we know, and what it means for us when there is more.

A commit that is very late must not find its version free again. Commit files are kept for `COMMITS_KEPT_MS`, and
nothing counts as done that ended more than `LATE_AFTER_S` after the moment at which we last knew where the journal
ends; beyond half of that, the log is listed anew before anything else. The clock counts suspension.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from app.core.errors import Corrupt
from app.state.commit_log import Commit, Mark, read_commit
from app.state.entries import entries_of
from app.state.errors import Fenced, OutcomeUnknown
from app.state.snapshot import load_snapshot
from app.state.store import Store
from app.state.upkeep import CLOCK, Recent

log = logging.getLogger(__name__)

LATE_AFTER_S: Final = 1_800.0


def clock_s() -> float:
    """Seconds on a clock that never goes back and counts the time for which the machine was suspended."""
    return time.clock_gettime(CLOCK)


class JournalEnd:
    """Not for several threads at once: the journal's lock is around every call.

    `now` can be taken at any time, and never changes: it is replaced.
    """

    def __init__(self, uri: str, store: Store, options: dict[str, str], *, instance: str, recent: Recent) -> None:
        self._uri = uri
        self._store = store
        self._options = options
        self._instance = instance
        self._recent = recent
        self.reload()

    def reload(self) -> None:
        """What the journal is now, from a listing of its log: right however long we were away."""
        seen_at_s = clock_s()
        snapshot = load_snapshot(self._uri, self._options)
        self._recent.retain({file.path for file in snapshot.files})
        last = None
        if snapshot.files:
            *_, entry = entries_of(self._recent.read(snapshot.files[-1].path), after=0)
            last = _Last(entry.seq, Mark("entry", entry.instance, "", entry.epoch, "", 0))
        # The journal ended at `now.head` at the moment `_seen_at_s`, or later; `_last` is its last entry.
        self.now, self._last, self._seen_at_s = snapshot, last, seen_at_s

    def refresh(self) -> None:
        """Takes up whatever there is."""
        if clock_s() - self._seen_at_s > LATE_AFTER_S / 2:
            self.reload()
        self._take(self._tail())

    def look(self, epoch: int) -> None:
        """Reads what is after our end, and judges it."""
        self.prepare(epoch)
        self._judge(self._tail(), epoch)

    def prepare(self, epoch: int) -> None:
        """Before an attempt at the next version: nobody else may have gone on from here, as far as we know."""
        self._catch_up_if_late(epoch)
        self._check(epoch)

    def landed(self, commit: Commit, *, began_s: float) -> None:
        """Our commit is there: just before, at `began_s`, its version was free, so that was the end of the journal."""
        self._take([commit])
        self._seen_at_s = began_s

    def check_not_late(self, what: str) -> None:
        if clock_s() - self._seen_at_s > LATE_AFTER_S:
            raise OutcomeUnknown(what)

    def find_out(self, epoch: int, attempt: str, failure: Exception | None) -> bool:
        """After an attempt of which we do not know what became. False: maintenance was quicker, we know of it now."""
        try:
            tail = self._tail()
        except Corrupt:
            raise
        except Exception as error:  # noqa: BLE001 - the store may be gone in any way; we know as little as before
            raise OutcomeUnknown(f"The journal cannot be read after a failed append: {error}") from (failure or error)
        if tail and tail[0].mark is not None and tail[0].mark.attempt == attempt:
            log.warning(
                "commit found in the journal though its answer was lost seq=%s error=%s", tail[0].version, failure
            )
            self._take(tail[:1])
            return True
        self._judge(tail, epoch)
        if not tail:
            raise OutcomeUnknown(f"Appending to the journal failed, and may yet succeed: {failure}") from failure
        return False

    def _tail(self) -> list[Commit]:
        """The commits after our head. What is missing after them is not there yet, for it cannot be gone already."""
        commits: list[Commit] = []
        while True:
            looked_at_s = clock_s()
            commit = read_commit(self._store, self.now.head + 1 + len(commits))
            if commit is None:
                break
            commits.append(commit)
        self.check_not_late("Reading the journal took so long that a part of it may have been cleaned up.")
        if not commits:
            self._seen_at_s = looked_at_s
        return commits

    def _judge(self, tail: Sequence[Commit], epoch: int) -> None:
        """What commits that we did not expect mean for a controller with this epoch."""
        marks = [(commit.version, commit.mark) for commit in tail if commit.mark is not None]
        for version, mark in marks:
            if mark.instance != self._instance and mark.epoch >= epoch:
                raise _fenced(epoch, version, mark)
        for version, mark in marks:
            if mark.kind == "entry":
                who = "ourselves" if mark.instance == self._instance else f"controller {mark.instance}"
                raise OutcomeUnknown(f"Entry {version} by {who} (epoch {mark.epoch}) is not in our memory.")
        self._take(tail)

    def _check(self, epoch: int) -> None:
        """No controller goes on after an entry of another one, unless it has raised the epoch."""
        if self._last is not None and self._last.mark.instance != self._instance and self._last.mark.epoch >= epoch:
            raise _fenced(epoch, self._last.seq, self._last.mark)

    def _take(self, commits: Sequence[Commit]) -> None:
        """Takes commits up. When the journal was last seen to end where it did does not change by that."""
        self.now = self.now.after(commits)
        for commit in commits:
            self._recent.forget(commit.removed)
            if commit.mark is not None and commit.mark.kind == "entry":
                self._last = _Last(commit.version, commit.mark)

    def _catch_up_if_late(self, epoch: int) -> None:
        """After a long pause the commit files after our head may have been cleaned up: the log is listed anew."""
        if clock_s() - self._seen_at_s <= LATE_AFTER_S / 2:
            return
        before = self.now, self._last, self._seen_at_s
        known = self.now.last_seq
        self.reload()
        if self.now.last_seq > known:
            try:
                self._check(epoch)
                raise OutcomeUnknown(f"There are entries after {known} in the journal that are not in our memory.")
            finally:
                # Until someone reads them, we stand where we stood.
                self.now, self._last, self._seen_at_s = before


class _Last(NamedTuple):
    """An entry, and who wrote it."""

    seq: int
    mark: Mark


def _fenced(epoch: int, seq: int, mark: Mark) -> Fenced:
    where = f" on host {mark.host}, process {mark.pid}," if mark.host else ""
    return Fenced(
        f"Another controller (instance {mark.instance},{where} epoch {mark.epoch}) took over at entry {seq} of the "
        f"journal; this one has epoch {epoch} and must stop."
    )

"""Brings the tables up to date behind the journal, in a thread of its own, everything that has gathered at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from app.failpoints import reach
from app.state.changes import Pending
from app.state.entries import JournalRow
from app.state.errors import Fenced
from app.state.tables import Tables

log = logging.getLogger(__name__)


class TableWriter:
    """The newest image per key waits here until the tables are merged with all of them at once."""

    def __init__(self, tables: Tables, *, after_merge: Callable[[int], None]) -> None:
        self._tables = tables
        self._after_merge = after_merge
        self._waiting = Pending()
        self._wanted = 0
        self._reached = 0
        self._stopped = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None

    @property
    def reached(self) -> int:
        """The entry up to which all tables are."""
        with self._changed:
            return self._reached

    def start(self) -> None:
        """From here on someone writes. After a failure: someone else, and it may go well this time."""
        with self._changed:
            if self._thread is not None and self.failure is None:
                return
            self.failure = None
            self._thread = threading.Thread(target=self._run, name="tables", daemon=True)
            self._thread.start()

    def submit(self, seq: int, epoch: int, rows: Sequence[JournalRow]) -> None:
        """An entry was written."""
        with self._changed:
            self._waiting.add(seq, epoch, rows)
            self._wanted = seq
            self._changed.notify_all()

    def replace(self, changes: Pending, *, upto: int) -> None:
        """The state was read back: this is what the tables lack, whatever was waiting, and whatever a merge lost."""
        with self._changed:
            self._waiting = changes
            self._wanted = upto
            if not changes:
                self._reached = max(self._reached, upto)
            self._changed.notify_all()

    def wait_for(self, seq: int) -> None:
        """Until the tables have reached `seq`; raises what made it impossible."""
        with self._changed:
            self._changed.wait_for(lambda: self._reached >= seq or self.failure is not None)
            if self.failure is not None:
                raise self.failure

    def stop(self) -> None:
        """Finishes what is waiting, and ends the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        try:
            while self._merge_once():
                self._after_merge(self._reached)
        except BaseException as error:  # whatever it is, the controller must hear of it, and reads the truth again
            if not isinstance(error, Fenced):  # to be replaced is no failure
                log.exception("the tables cannot be written")
            with self._changed:
                self.failure = error
                self._changed.notify_all()

    def _merge_once(self) -> bool:
        """Waits for something to do, and does it. False when there will be nothing more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopped)
            if not self._waiting:
                return False
            changes, upto = self._waiting, self._wanted
            self._waiting = Pending()
        reach("before_tables")
        epoch = max(change.epoch for change in changes.values())
        self._tables.merge(changes, upto=upto, epoch=epoch)
        reach("after_tables")
        with self._changed:
            self._reached = max(self._reached, upto)
            self._changed.notify_all()
        return True

"""Keeps journal and tables short, behind the writer of the tables."""

from __future__ import annotations

from typing import Final

from app.core.parameters import Parameters
from app.failpoints import reach
from app.state.journal import Journal
from app.state.tables import Tables

JOURNAL_EVERY: Final = 200
"""Entries between two rounds of maintenance of the journal."""
TABLES_EVERY_MS: Final = 60_000


class Maintenance:
    """Called by one thread, without the controller's lock: no command waits for this."""

    def __init__(self, journal: Journal, tables: Tables) -> None:
        self._journal = journal
        self._tables = tables
        self._tables_at = 0
        self._journal_at = 0

    def tables(self, parameters: Parameters, *, now: int) -> None:
        if now - self._tables_at >= TABLES_EVERY_MS:
            self._tables_at = now
            self._tables.maintain(now_ms=now, command_retention_ms=parameters.command_retention)

    def journal(self, parameters: Parameters, *, seq: int, epoch: int, tables_reached: int, now: int) -> None:
        if seq - self._journal_at < JOURNAL_EVERY:
            return
        self._journal_at = seq
        self._journal.look(epoch)
        reach("journal_maintenance")
        self._journal.maintain(
            epoch=epoch, trim_to=tables_reached, now_ms=now, retention_ms=parameters.journal_retention
        )

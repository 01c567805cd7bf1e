"""Read-only mode: follows the journal of another controller. Runs no query, and writes nothing anywhere."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from app.clock import wall_ms
from app.config import Config, texts
from app.core.errors import BrokenInvariant, Corrupt
from app.core.folding import fold
from app.core.images import TYPES, Image, Key, decode_image
from app.core.state import State
from app.state.errors import NewerFormat, StateMissing
from app.state.journal import Journal
from app.state.recovery import recover
from app.state.tables import Tables

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 1.0
_FOR_GOOD: Final = (BrokenInvariant, Corrupt, NewerFormat, StateMissing)


class StateGone(Exception):
    """The state could not be read for longer than `give_up_after`."""


class Follower:
    """The state as of the newest entry, always a moment behind the controller that writes it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._take_up()

    def _take_up(self) -> None:
        """All of it, as at a boot."""
        storage = texts(self._config.storage_options)
        self._journal = Journal.open(
            f"{self._config.state}/journal", storage_options=storage, instance="read-only", read_only=True
        )
        tables = Tables.open(self._config.root, storage_options=storage, read_only=True)
        recovered = recover(self._journal, tables, now_ms=wall_ms())
        self._images: dict[Key, Image] = dict(recovered.images)
        self.seq = recovered.seq
        self.epoch = 0 if recovered.controller is None else recovered.controller.epoch
        self.state: State = fold(self._images.items())

    def look(self) -> bool:
        """Takes up the new entries; whether there were any."""
        try:
            entries = list(self._journal.read(self.seq))
        except Corrupt:
            # We were away for longer than entries are kept; whatever else it is, reading everything anew finds it too.
            log.info("the journal was trimmed meanwhile, reading the tables seq=%d", self.seq)
            self._take_up()
            return True
        if any(entry.epoch != self.epoch for entry in entries):
            self._take_up()  # another controller: it may be of a newer version, whose entries are not for us
            return True
        for entry in entries:
            for row in entry.rows:
                if row.entity not in TYPES:
                    continue
                if row.value is None:
                    self._images.pop((row.entity, row.key), None)
                else:
                    self._images[(row.entity, row.key)] = decode_image(row.entity, row.value)
            self.seq = entry.seq
        if entries:
            self.state = fold(self._images.items())
        return bool(entries)

    def run(self, stop: threading.Event) -> None:
        """Until it is told to stop. What may pass is tried again, until `give_up_after`: then StateGone."""
        seen_at = time.monotonic()
        while not stop.wait(LOOK_EVERY_S):
            try:
                news = self.look()
            except _FOR_GOOD:
                raise
            except Exception as error:
                gone_s = time.monotonic() - seen_at
                if gone_s * 1000 > self._config.give_up_after:
                    raise StateGone(f"The state could not be read for {gone_s:.0f} s: {error}") from error
                log.warning("the state cannot be read now, trying again: %s: %s", type(error).__name__, error)
                continue
            seen_at = time.monotonic()
            if news:
                log.info(
                    "following seq=%d epoch=%d collections=%d holds=%d",
                    self.seq,
                    self.epoch,
                    len(self.state.collections),
                    len(self.state.holds),
                )

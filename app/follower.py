"""Read-only mode: follows the journal of another controller. Runs no query, and writes nothing anywhere."""

from __future__ import annotations

import logging
import threading
from typing import Final

from app.clock import wall_ms
from app.config import Config, texts
from app.core.folding import fold
from app.core.images import TYPES, Image, Key, decode_image
from app.core.state import State
from app.state.journal import Journal
from app.state.recovery import recover
from app.state.tables import Tables

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 1.0


class Follower:
    """The state as of the newest entry, always a moment behind the controller that writes it."""

    def __init__(self, config: Config) -> None:
        storage = texts(config.storage_options)
        self._journal = Journal.open(
            f"{config.state}/journal", storage_options=storage, instance="read-only", read_only=True
        )
        tables = Tables.open(config.root, storage_options=storage, read_only=True)
        recovered = recover(self._journal, tables, now_ms=wall_ms())
        self._images: dict[Key, Image] = dict(recovered.images)
        self.seq = recovered.seq
        self.epoch = 0 if recovered.controller is None else recovered.controller.epoch
        self.state: State = fold(self._images.items())

    def look(self) -> int:
        """Takes up the new entries; how many there were."""
        entries = 0
        for entry in self._journal.read(self.seq):
            for row in entry.rows:
                if row.entity not in TYPES:
                    continue
                if row.value is None:
                    self._images.pop((row.entity, row.key), None)
                else:
                    self._images[(row.entity, row.key)] = decode_image(row.entity, row.value)
            self.seq, self.epoch = entry.seq, entry.epoch
            entries += 1
        if entries:
            self.state = fold(self._images.items())
        return entries

    def run(self, stop: threading.Event) -> None:
        while not stop.wait(LOOK_EVERY_S):
            if self.look():
                log.info(
                    "following seq=%d epoch=%d collections=%d holds=%d",
                    self.seq,
                    self.epoch,
                    len(self.state.collections),
                    len(self.state.holds),
                )

"""What the journal says and the tables do not have yet, the newest image of each thing only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from app.core.images import Key
from app.state.entries import JournalRow


class Change(NamedTuple):
    """The newest image of a thing (None: it is gone), with the entry that wrote it."""

    value: bytes | None
    seq: int
    epoch: int


class Pending(dict[Key, Change]):
    """Changes by entity and key, added up entry by entry.

    A plain mapping of the same shape can be merged too, but only this one knows when something began that changed more
    than once in between, which a table needs to know: `created` has the first seq of what is there, `anew` what was
    gone before that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.created: dict[Key, int] = {}
        self.anew: set[Key] = set()

    def add(self, seq: int, epoch: int, rows: Iterable[JournalRow]) -> None:
        """Adds the next entry."""
        for entity, name, value in rows:
            key = (entity, name)
            if value is None:
                self.created.pop(key, None)
                self.anew.add(key)
            else:
                self.created.setdefault(key, seq)
            self[key] = Change(value, seq, epoch)

"""What can go wrong with the state, in kinds that never mix: replaced, unknown, unsafe, too new, not there, trimmed."""

from __future__ import annotations

from app.core.errors import Corrupt


class Fenced(Exception):
    """Another controller, with an epoch not below ours, has taken over. Halt; touch nothing more."""


class OutcomeUnknown(Exception):
    """What is in the journal may differ from what is in memory. Throw the memory away and recover."""


class UnsafeStore(Exception):
    """The store lets two writers create the same object, so it cannot decide which of two controllers is first."""


class NewerFormat(Exception):
    """The state was written by a newer version than this one, which must not touch it."""


class StateMissing(Exception):
    """There is no state where it was looked for, and we may not create it."""


class Trimmed(Corrupt):
    """Entries are no longer in the journal that are not in what was read of the tables either."""

"""Refusals. A refused command gets its error as the reply and changes nothing."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any


class Code(str, Enum):
    """Every error code that a reply can carry."""

    MALFORMED = "MALFORMED"
    UNKNOWN_COMMAND = "UNKNOWN_COMMAND"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    TOO_LARGE = "TOO_LARGE"
    STALE_COMMAND = "STALE_COMMAND"
    COLLECTION_MISSING = "COLLECTION_MISSING"
    COLLECTION_ID_REUSED = "COLLECTION_ID_REUSED"
    DEPENDENCY_MISSING = "DEPENDENCY_MISSING"
    OUTSIDE_WAREHOUSE = "OUTSIDE_WAREHOUSE"
    HOLD_MISSING = "HOLD_MISSING"
    SINCE_VIOLATION = "SINCE_VIOLATION"
    SCHEMA_MISMATCH = "SCHEMA_MISMATCH"
    SCHEMA_INCOMPATIBLE = "SCHEMA_INCOMPATIBLE"
    READ_BEFORE_SINCE = "READ_BEFORE_SINCE"
    INVALID_USAGE = "INVALID_USAGE"
    INTERNAL = "INTERNAL"


def shown(value: object) -> str:
    """A value from a message as its sender wrote it, but not more of it than a sentence can bear."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    return json.dumps(value, ensure_ascii=False)[:40]


class Refused(Exception):
    """The caller's mistake, or an ordinary mismatch that carries the actual value. Nothing has changed."""

    def __init__(self, code: Code, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details


class BrokenInvariant(Exception):
    """Our own mistake: the step would have broken a rule that always holds. Nothing has changed."""


class Corrupt(Exception):
    """The images of a journal do not fold into a state that keeps the rules: stop, touch nothing."""


def invalid(message: str, **details: Any) -> Refused:
    return Refused(Code.INVALID_ARGUMENT, message, **details)


def collection_missing(collection_id: str) -> Refused:
    return Refused(Code.COLLECTION_MISSING, f"Collection {collection_id!r} does not exist, or was dropped.")

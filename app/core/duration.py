"""Durations: milliseconds, or a number with a unit, as in `500ms`, `30s`, `15m`, `6h`, `7d`."""

from __future__ import annotations

import re
from typing import Final

from app.core.errors import shown
from app.core.frontier import MAX_TIME_GIVEN

_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
PATTERN: Final = r"^[0-9]{1,15}(ms|s|m|h|d)(?![\s\S])"
_PARTS: Final = re.compile(r"([0-9]{1,15})(ms|s|m|h|d)")


class Duration(int):
    """A length of time in milliseconds."""

    __slots__ = ()


def parse_duration(value: object) -> Duration:
    """The duration that a message means; ValueError says what was expected."""
    milliseconds: int | None = None
    if type(value) is int:
        milliseconds = value
    elif isinstance(value, str) and (parts := _PARTS.fullmatch(value)):
        milliseconds = int(parts[1]) * _UNITS_MS[parts[2]]
    if milliseconds is None or milliseconds < 0:
        raise ValueError(f"Expected a duration (milliseconds, or like `30s`, `15m`, `7d`), got {shown(value)}")
    if milliseconds > MAX_TIME_GIVEN:
        raise ValueError(f"Expected a duration of at most {MAX_TIME_GIVEN} ms, got {shown(value)}")
    return Duration(milliseconds)

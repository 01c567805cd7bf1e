"""Times and durations as people write and read them."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from typing import Any, Final

from app.clock import wall_ms
from app.core.descriptions import DEFAULT_TIMELINE
from app.core.duration import parse_duration

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_LEAST_CALENDAR_MS: Final = 100_000_000_000
"""Smaller times (before March 1973) are taken for numbers that someone counts, not for milliseconds since 1970."""
_NOW: Final = re.compile(r"now(?:([+-])([0-9]+[a-z]+))?")
_UNITS: Final = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1))
_LAST_MS: Final = 253_402_300_799_999
# In a sentence: not a part of an id, nor of anything quoted. 13 digits that begin with 1, 2 or 3 are of 2001 to 2096.
_MOMENT: Final = re.compile(r"(?<![\w'\"`./:-])[123][0-9]{12}(?![\w'\"`/:-]|\.\w| ms\b)")
_DURATION: Final = re.compile(r"(?<![\w'\"`./:-])([0-9]{4,18}) ms\b")


def parse_time(text: str) -> int:
    """A number, `now`, `now-15m`, or a date like 2026-01-31 or 2026-01-31T12:00:00Z (UTC unless it says otherwise)."""
    if text.isdecimal():
        return int(text)
    if match := _NOW.fullmatch(text):
        offset = int(parse_duration(match[2])) if match[2] else 0
        return wall_ms() + (-offset if match[1] == "-" else offset)
    try:
        moment = datetime.fromisoformat(text.removesuffix("Z") + ("+00:00" if text.endswith("Z") else ""))
    except ValueError:
        raise ValueError(
            f"Expected a time (milliseconds, `now`, `now-15m`, or like 2026-01-31T12:00:00Z), got {text!r}"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def moment(ms: int) -> str:
    """A time of day, in a form that `parse_time` reads."""
    if not 0 <= ms <= _LAST_MS:
        return str(ms)
    text = (_EPOCH + timedelta(milliseconds=ms)).isoformat(timespec="milliseconds")
    return text.removesuffix("+00:00").removesuffix(".000") + "Z"


def frontier(value: int | None, timeline: str = DEFAULT_TIMELINE) -> str:
    """`[]`, a date where the timeline has dates, else a number."""
    if value is None:
        return "[]"
    return moment(value) if is_calendar(value, timeline) else str(value)


def is_calendar(value: int | None, timeline: str = DEFAULT_TIMELINE) -> bool:
    return value is not None and timeline == DEFAULT_TIMELINE and value >= _LEAST_CALENDAR_MS


def duration(ms: int) -> str:
    """Its two greatest units: `3d 4h`."""
    parts: list[str] = []
    for unit, size in _UNITS:
        number, ms = divmod(ms, size)
        if number or parts:
            parts.append(f"{number}{unit}" if number else "")
        if len(parts) == 2:
            break
    return " ".join(part for part in parts if part) or "0"


def readable(sentence: str) -> str:
    """A sentence of the controller, which has milliseconds, with what they mean beside them."""
    sentence = _DURATION.sub(lambda match: f"{match[0]} ({duration(int(match[1]))})", sentence)
    return _MOMENT.sub(lambda match: f"{match[0]} ({moment(int(match[0]))})", sentence)


def relative(ms: int, now: int) -> str:
    """`3h ago`, `in 12m`: to the second, as one says it."""
    away = abs(ms - now)
    if away >= 1_000:
        ms = now + (away - away % 1_000) * (1 if ms > now else -1)
    return f"in {duration(ms - now)}" if ms > now else f"{duration(now - ms)} ago"


def span(difference: int, row: dict[str, Any]) -> str:
    """A difference of two times of a collection: a duration where they are dates, else a number."""
    if is_calendar(row["write_frontier"], row["timeline"]) or is_calendar(row["read_frontier"], row["timeline"]):
        return duration(difference)
    return str(difference)

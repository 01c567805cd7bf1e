"""The parameters that can be changed at run time, durably, with their ranges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from app.core.duration import parse_duration
from app.core.errors import invalid, shown
from app.core.frontier import MAX_TIME_GIVEN

SECOND_MS: Final = 1_000
HOUR_MS: Final = 3_600_000
DAY_MS: Final = 86_400_000


class Parameters(msgspec.Struct, frozen=True):
    """Durations are milliseconds."""

    finalize_shards: bool = True
    finalization_concurrency: int = 10
    since_downgrade_interval: int = 30 * SECOND_MS
    undrop_window: int = 0
    tombstone_retention: int = 7 * DAY_MS
    max_command_age: int = HOUR_MS
    command_retention: int = 7 * DAY_MS
    hold_max_lease: int | None = None
    vacuum_grace: int = HOUR_MS
    orphan_grace: int = 7 * DAY_MS
    journal_retention: int = DAY_MS

    def updated(self, values: Mapping[str, Any]) -> Parameters:
        """These parameters with some of them changed; refused as a whole if one is unknown or out of range."""
        result = msgspec.structs.replace(self, **{name: _parse(name, value) for name, value in values.items()})
        # A command that outlived the tombstone of what it names could bring a dropped collection back.
        if result.tombstone_retention <= result.max_command_age:
            raise invalid("`tombstone_retention` must be greater than `max_command_age`.", path="$.parameters")
        # A duplicate is recognised by the row of the first.
        if result.command_retention < result.max_command_age:
            raise invalid("`command_retention` must be at least `max_command_age`.", path="$.parameters")
        return result


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"Expected true or false, got {shown(value)}")  # noqa: TRY004 - one kind of error for all values
    return value


def _number(least: int, most: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"Expected an integer from {least} to {most}, got {shown(value)}")
        return value

    return parse


def _duration(least: int, most: int = MAX_TIME_GIVEN) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        milliseconds = int(parse_duration(value))
        if not least <= milliseconds <= most:
            raise ValueError(f"Expected a duration from {least} ms to {most} ms, got {shown(value)}")
        return milliseconds

    return parse


def _optional(parse: Callable[[Any], int]) -> Callable[[Any], int | None]:
    return lambda value: None if value is None else parse(value)


_PARSERS: Final[dict[str, Callable[[Any], Any]]] = {
    "finalize_shards": _switch,
    "finalization_concurrency": _number(1, 1000),
    "since_downgrade_interval": _duration(0, DAY_MS),
    "undrop_window": _duration(0, 365 * DAY_MS),
    "tombstone_retention": _duration(SECOND_MS),
    "max_command_age": _duration(SECOND_MS),
    "command_retention": _duration(SECOND_MS),
    "hold_max_lease": _optional(_duration(1)),
    "vacuum_grace": _duration(0),
    "orphan_grace": _duration(DAY_MS),
    "journal_retention": _duration(HOUR_MS),
}


def _parse(name: str, value: Any) -> Any:
    parser = _PARSERS.get(name)
    if parser is None:
        raise invalid(f"Unknown parameter {shown(name)}; there are: {', '.join(_PARSERS)}.", path="$.parameters")
    try:
        return parser(value)
    except ValueError as error:
        raise invalid(f"{error}.", path=f"$.parameters.{name}") from None

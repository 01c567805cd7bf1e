"""Taking up a table that is there already, at a location that a command gives."""

from __future__ import annotations

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from app.core.creating import Found
from app.core.errors import Code, Refused, invalid
from app.core.schema import RESERVED_COLUMNS
from app.shards.commit_log import BadLog, full_state


def found_at(location: str, format: str, options: dict[str, str]) -> Found | None:
    """The frontiers of the table at a location; None if there is none. Refused, if it cannot be such a shard."""
    try:
        state = full_state(location, options)
        if state is None:
            return None
        names = [field.name for field in DeltaTable(location, storage_options=options).schema().fields]
    except (BadLog, TableNotFoundError, DeltaError, OSError) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise Refused(Code.INTERNAL, f"What is at {location!r} cannot be looked at: {reason}") from error
    if format == "updates" and not RESERVED_COLUMNS.issubset(names[: len(RESERVED_COLUMNS)]):
        raise invalid(
            f"There is a Delta table at {location!r}, but its first columns are not `_time` and `_diff`: "
            "it is not of format `updates`."
        )
    return state.found()

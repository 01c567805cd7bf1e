"""Taking up a table that is there already, at a location that a command gives."""

from __future__ import annotations

import json
from typing import Any

from deltalake.exceptions import DeltaError

from app.core.errors import Code, Refused, invalid
from app.core.placing import Found
from app.shards.commit_log import BadLog, opened, state_of
from app.shards.places import look_into
from app.shards.settings import FORGETS, without_time_statistics


def found_at(location: str, format: str, options: dict[str, str]) -> Found | None:
    """The frontiers of the table at a location; None if there is none. Refused, if it cannot be such a shard."""
    try:
        table = opened(location, options)
        if table is None:
            # What is there would become the shard's, and be deleted with it, or before, as nothing in its log names it.
            if not look_into(location, options).is_empty():
                raise invalid(
                    f"There is no Delta table at {location!r}, but there are files: a new shard needs a place of its "
                    "own. Choose one that is empty, or does not exist."
                )
            return None
        state = state_of(table)
        metadata = {
            "partitionColumns": table.metadata().partition_columns,
            "configuration": table.metadata().configuration,
            "schemaString": table.schema().to_json(),
        }
    except (BadLog, DeltaError, OSError) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise Refused(Code.INTERNAL, f"What is at {location!r} cannot be looked at: {reason}") from error
    if format == "updates":
        _check_updates(location, metadata)
    return state.found()


def _check_updates(location: str, metadata: dict[str, Any]) -> None:
    begins = [(field["name"], field["type"]) for field in json.loads(metadata["schemaString"])["fields"][:2]]
    if begins != [("_time", "long"), ("_diff", "long")]:  # of other types, a merge would write what nobody can read
        raise invalid(
            f"There is a Delta table at {location!r}, but its first columns are not `_time BIGINT` and `_diff BIGINT`: "
            "it is not of format `updates`."
        )
    if FORGETS in metadata["configuration"]:
        raise invalid(f"The table at {location!r} has the property {FORGETS}, which makes Delta forget the upper.")
    if (reason := without_time_statistics(metadata)) is not None:
        raise invalid(
            f"The history of the table at {location!r} could never be merged: Delta would write files without "
            f"statistics of their times, because {reason}."
        )

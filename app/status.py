"""The tables as plain rows, read with deltalake: no Spark, no controller and no broker is needed.

Rows are as `holdfast simulate` dumps them: frontiers are numbers or None for `[]`, times of day are milliseconds,
what is JSON in a column is an object.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from app.client_errors import HoldfastError
from app.core.parameters import Parameters
from app.state.schemas import SCHEMAS, read_rows

Row = dict[str, Any]

# As in app.state.tables, which a client does not import: it would bring in pandas, and a second of waiting with it.
POSITION: Final = "holdfast.position"
TABLES: Final = ("collections", "holds", "shards", "meta")
_LOOK_S: Final = 0.05
_EVEN_S: Final = 1.0


class StateMissing(HoldfastError):
    """There are no tables where they were looked for."""

    code = "STATE_MISSING"


class TablesBehind(HoldfastError):
    """The tables have not reached the wanted position in time."""

    code = "TABLES_BEHIND"


@dataclass(frozen=True, slots=True)
class State:
    """All rows, and per table the journal position that it has reached."""

    collections: Mapping[str, Row] = field(default_factory=dict)
    holds: Mapping[str, Row] = field(default_factory=dict)
    shards: Mapping[str, Row] = field(default_factory=dict)
    meta: tuple[Row, ...] = ()
    positions: Mapping[str, int] = field(default_factory=dict)

    @property
    def seq(self) -> int:
        """The journal position that all of them have reached."""
        return min(self.positions.values(), default=0)

    @property
    def is_even(self) -> bool:
        """Whether they are all of one moment."""
        return len(set(self.positions.values())) <= 1

    def meta_value(self, entity: str, key: str) -> Any:
        return next((row["value"] for row in self.meta if row["entity"] == entity and row["key"] == key), None)

    @property
    def controller(self) -> Row | None:
        """Who wrote them last."""
        return next((row["value"] for row in self.meta if row["entity"] == "controller"), None)

    def parameters(self) -> tuple[dict[str, Any], set[str]]:
        """The parameters in force, and the names of those that were set."""
        changed = {row["key"]: row["value"]["value"] for row in self.meta if row["entity"] == "parameter"}
        defaults = {name: getattr(Parameters(), name) for name in Parameters.__struct_fields__}
        return {**defaults, **changed}, set(changed)


def read_state(root: str, storage_options: Mapping[str, str], *, at_least: int = 0, timeout_s: float = 10.0) -> State:
    """The state of one moment, at or after the journal position `at_least`.

    The tables are merged one after the other. They are read when all of them are at the same position, or, if they are
    changing all the time, after a moment as they are.
    """
    tables = {name: _open(root, name, storage_options) for name in TABLES}
    begun = time.monotonic()
    while True:
        positions = {name: table.transaction_version(POSITION) or 0 for name, table in tables.items()}
        waited_s = time.monotonic() - begun
        behind = min(positions.values()) < at_least
        if behind and waited_s > timeout_s:
            raise TablesBehind(
                f"The tables are at seq {min(positions.values())} and did not reach {at_least} within "
                f"{timeout_s:g} s: the controller has stopped, or writes them very slowly."
            )
        if not behind and (len(set(positions.values())) == 1 or waited_s > min(_EVEN_S, timeout_s)):
            break
        time.sleep(_LOOK_S)
        for table in tables.values():
            table.update_incremental()
    rows = {name: _rows(name, table) for name, table in tables.items()}
    return state_of(rows, positions)


def read_commands(root: str, storage_options: Mapping[str, str]) -> list[Row]:
    """The results of all recorded commands, in the order in which they were applied."""
    rows = _rows("commands", _open(root, "commands", storage_options))
    return sorted(rows, key=lambda row: (row["seq"], row["topic"], row["partition"], row["offset"]))


def state_of(dump: Mapping[str, Iterable[Row]], positions: Mapping[str, int] | None = None) -> State:
    """The same from rows at hand, as `holdfast simulate` dumps them."""
    return State(
        collections={row["id"]: row for row in dump["collections"]},
        holds={row["hold"]: row for row in dump["holds"]},
        shards={row["shard"]: row for row in dump["shards"]},
        meta=tuple(dump.get("meta", ())),
        positions=positions or {},
    )


def _open(root: str, name: str, storage_options: Mapping[str, str]) -> DeltaTable:
    location = f"{root.rstrip('/')}/state/{name}"
    try:
        return DeltaTable(location, storage_options=dict(storage_options))
    except (TableNotFoundError, FileNotFoundError):
        raise StateMissing(
            f"There is no Delta table at {location}. Is the root right? A controller makes the tables when it starts."
        ) from None
    except Exception as error:  # deltalake has many, for as many stores: all mean that it cannot be read
        raise StateMissing(f"The table at {location} cannot be read: {error}") from error


def _rows(name: str, table: DeltaTable) -> list[Row]:
    in_json = SCHEMAS[name].json | ({"value"} if name == "meta" else set())
    return [
        {
            column: json.loads(value) if column in in_json and value is not None else value
            for column, value in row.items()
        }
        for row in read_rows(name, table)
    ]

"""Where a collection's data is and how far it is, from the state tables: needs neither broker nor controller.

Only the rows that are asked for are read, so that a read costs the same among ten collections and a hundred thousand.
All rows of one table are of one of its versions, that is, of one moment.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from app.client_errors import CollectionMissing
from app.core.descriptions import Description, Table
from app.state.schemas import read_rows
from app.status import POSITION, StateMissing, TablesBehind

_LOOK_S: Final = 0.02
_decode: Final = msgspec.json.Decoder(Description).decode


class Frontiers(NamedTuple):
    """How far a collection can be read, from `since` on and before `upper`. None is `[]`."""

    collection: str
    since: int | None
    upper: int | None
    implied: int | None
    dropped: bool

    def readable(self, as_of: int) -> bool:
        return self.since is not None and self.since <= as_of and (self.upper is None or as_of < self.upper)


class Place(NamedTuple):
    """The table of a shard. `seen`: it was there already."""

    shard: str
    location: str
    format: str
    table_id: str
    seen: bool


class Source(NamedTuple):
    """What is read: a collection's columns in its shard. `logs`: those through which it is written as well."""

    collection: str
    schema: str | None
    dropped: bool
    place: Place
    logs: tuple[Place, ...]


class Catalog:
    """The state tables of one root. Its methods may be called from any thread."""

    def __init__(self, root: str, storage_options: Mapping[str, str], *, timeout_s: float) -> None:
        self._base = f"{root.rstrip('/')}/state"
        self._options = dict(storage_options)
        self._timeout_s = timeout_s

    def frontiers(self, ids: Iterable[str] | None, *, at_least: int) -> dict[str, Frontiers]:
        """Of these collections, or of all that are active, at one moment at or after a journal position."""
        wanted = None if ids is None else list(dict.fromkeys(ids))
        rows = self._collections(wanted, at_least)
        return {
            id: Frontiers(id, row["read_frontier"], row["write_frontier"], row["implied_capability"], row["dropped"])
            for id, row in rows.items()
        }

    def time_dependence(self, id: str, *, at_least: int) -> str | None:
        """`wall_clock`, if the collection's upper follows it; None if it follows only its inputs."""
        found: str | None = self._collections([id], at_least)[id]["time_dependence"]
        return found

    def source(self, id: str, *, at_least: int) -> Source:
        row = self._collections([id], at_least)[id]
        description = _decode(row["description"])
        shards, through = [row["shard"]], description
        # The log of a table is a collection, and may itself be written through another.
        while isinstance(through.data_source, Table) and through.data_source.txns is not None:
            log = self._collections([through.data_source.txns], at_least)[through.data_source.txns]
            shards.append(log["shard"])
            through = _decode(log["description"])
        places = self._places(shards, at_least)
        own, *logs = (places[shard] for shard in shards)
        return Source(id, description.schema, row["dropped"], own, tuple(logs))

    def is_dropped(self, id: str) -> bool:
        return not any(not row["dropped"] for row in self._rows("collections", "id", [id], at_least=0))

    def pins_files(self, hold: str, *, at_least: int) -> bool:
        return any(row["pin_files"] for row in self._rows("holds", "hold", [hold], at_least=at_least))

    def _collections(self, ids: list[str] | None, at_least: int) -> dict[str, dict[str, Any]]:
        rows = {row["id"]: row for row in self._rows("collections", "id", ids, at_least=at_least)}
        if missing := [id for id in ids or () if id not in rows]:
            raise CollectionMissing(
                f"There is no collection {missing[0]!r}: it was never created, or it was dropped and nobody holds it.",
                {"collections": missing},
            )
        return rows

    def _places(self, shards: list[str], at_least: int) -> dict[str, Place]:
        return {
            row["shard"]: Place(
                row["shard"], row["location"], row["format"], row["table_id"] or "", row["log_version"] is not None
            )
            for row in self._rows("shards", "shard", shards, at_least=at_least)
        }

    def _rows(self, table: str, key: str, values: list[str] | None, *, at_least: int) -> list[dict[str, Any]]:
        if values is not None and not values:
            return []
        where = None if values is None else f"{key} IN ({', '.join(map(_literal, values))})"
        return list(read_rows(table, self._open(table, at_least), where))

    def _open(self, name: str, at_least: int) -> DeltaTable:
        location = f"{self._base}/{name}"
        try:
            table = DeltaTable(location, storage_options=self._options)
        except (TableNotFoundError, FileNotFoundError):
            raise StateMissing(
                f"There is no Delta table at {location}. Is the root right? A controller makes it when it starts."
            ) from None
        except (DeltaError, OSError) as error:
            raise StateMissing(f"The table at {location} cannot be read: {error}") from error
        deadline = time.monotonic() + self._timeout_s
        while (reached := table.transaction_version(POSITION) or 0) < at_least:
            if time.monotonic() > deadline:
                raise TablesBehind(
                    f"The table {name} is at seq {reached} and did not reach {at_least} within {self._timeout_s:g} s: "
                    "the controller has stopped, or writes its tables very slowly."
                )
            time.sleep(_LOOK_S)
            table.update_incremental()
        return table


def _literal(value: str) -> str:
    escaped = value.replace("'", "''")
    return f"'{escaped}'"

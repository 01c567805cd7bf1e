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
    """The table of a shard, which has the columns of its owner.

    `seen`: it was there already. `given_up`: it is being finalized, or was.
    """

    shard: str
    owner: str
    location: str
    format: str
    table_id: str
    seen: bool
    given_up: bool


class Stored(NamedTuple):
    """A collection's columns and timeline, and the shard that has its data."""

    collection: str
    schema: str | None
    dropped: bool
    timeline: str
    place: Place


class Source(NamedTuple):
    """What is read: a collection's columns in its shard. `logs`: those through which it is written as well."""

    collection: str
    schema: str | None
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
        own, *logs = self.chain(id, at_least=at_least)
        return Source(own.collection, own.schema, own.place, tuple(log.place for log in logs))

    def chain(self, id: str, *, at_least: int) -> list[Stored]:
        """A collection, and then the logs that it is written through, if it is a table with `txns`."""
        found: list[tuple[Description, dict[str, Any]]] = []
        through: str | None = id
        # The log of a table is a collection, and may itself be written through another.
        while through is not None:
            row = self._collections([through], at_least)[through]
            description = _decode(row["description"])
            found.append((description, row))
            through = description.data_source.txns if isinstance(description.data_source, Table) else None
        places = self._places([row["shard"] for _, row in found], at_least)
        return [
            Stored(row["id"], described.schema, row["dropped"], described.timeline, places[row["shard"]])
            for described, row in found
        ]

    def schema(self, id: str, *, at_least: int) -> str | None:
        return _decode(self._collections([id], at_least)[id]["description"]).schema

    def is_dropped(self, id: str) -> bool:
        return not any(not row["dropped"] for row in self._rows("collections", "id", [id], at_least=0))

    def pins_files(self, hold: str, *, at_least: int) -> bool:
        return any(row["pin_files"] for row in self._rows("holds", "hold", [hold], at_least=at_least))

    def result_of(self, command: str, place: Mapping[str, Any], *, at_least: int) -> dict[str, Any]:
        """The result of a command whose reply only said in which row it is."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            for row in self._rows("commands", "id", [command], at_least=at_least):
                if all(row[column] == place[column] for column in ("topic", "partition", "offset")):
                    result: dict[str, Any] = msgspec.json.decode(row["result"])
                    return result
            # The reply to a duplicate has the seq of the first, and its own row comes later.
            if time.monotonic() > deadline:
                raise TablesBehind(f"The result of the command {command!r} is not in the table `commands` yet.")
            time.sleep(_LOOK_S)

    def _collections(self, ids: list[str] | None, at_least: int) -> dict[str, dict[str, Any]]:
        rows = {row["id"]: row for row in self._rows("collections", "id", ids, at_least=at_least)}
        if missing := [id for id in ids or () if id not in rows]:
            raise CollectionMissing(
                f"There is no collection {missing[0]!r}: it was never created, or it was dropped and nobody holds it.",
                {"collections": missing},
            )
        return rows

    def _places(self, shards: list[str], at_least: int) -> dict[str, Place]:
        deadline = time.monotonic() + self._timeout_s
        while True:
            found = {row["shard"]: _place(row) for row in self._rows("shards", "shard", shards, at_least=at_least)}
            missing = set(shards) - found.keys()
            if not missing:
                return found
            # The tables are merged one after the other: a shard may come later than its collection.
            if time.monotonic() > deadline:
                raise TablesBehind(
                    f"The shard {min(missing)!r} is not in the tables yet: the controller has stopped, or is very slow."
                )
            time.sleep(_LOOK_S)

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


def _place(row: Mapping[str, Any]) -> Place:
    return Place(
        row["shard"],
        row["owner"],
        row["location"],
        row["format"],
        row["table_id"] or "",
        seen=row["log_version"] is not None,
        given_up=row["state"] in ("finalizing", "finalized"),
    )


def _literal(value: str) -> str:
    escaped = value.replace("'", "''")
    return f"'{escaped}'"

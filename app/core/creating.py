"""Creating collections: all of a command or nothing, in whatever order it names them."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import Final

from app.core.capabilities import rank_of
from app.core.descriptions import (
    Description,
    Ingestion,
    IngestionExport,
    Sink,
    Table,
    source_dependencies,
    time_dependence,
)
from app.core.draft import Draft
from app.core.errors import Code, Refused, invalid
from app.core.frontier import EMPTY, ZERO, Frontier
from app.core.images import Collection, Shard
from app.core.placing import Placing
from app.core.policy import NoPolicy
from app.core.schema import RESERVED_COLUMNS, check_evolution, parse_schema

MAX_LEVELS: Final = 64


class Registrar:
    """Makes the collections of one command."""

    def __init__(self, draft: Draft, placing: Placing) -> None:
        self._draft = draft
        self._placing = placing
        self._new: dict[str, Description] = {}

    def create(self, descriptions: Iterable[Description], register_ts: int | None) -> None:
        given = _distinct(descriptions)
        if register_ts is None and any(isinstance(d.data_source, Table) for d in given.values()):
            raise invalid("A command that creates a table must give `register_ts`.", path="$.register_ts")
        self._new = {id: description for id, description in given.items() if not self._exists(description)}
        for description in self._new.values():
            plain = description.shard is not None and description.shard.format == "delta"
            parse_schema(description.schema, reserved=frozenset() if plain else RESERVED_COLUMNS)
        dependencies = {id: self._dependencies(description) for id, description in self._new.items()}
        for id, description in self._new.items():
            self._check_timelines(description, dependencies[id])
        order = list(_in_order(self._new, dependencies))
        for id in order:
            self._rank(self._new[id], dependencies[id])
        for id in order:
            self._check_schema(self._new[id])
        for id in order:
            self._register(self._new[id], dependencies[id], register_ts)

    def _exists(self, description: Description) -> bool:
        existing = self._draft.collection(description.id)
        if existing is None:
            if description.id in self._draft.state.tombstones:
                raise _reused(description.id, "was dropped, and can be used again when its tombstone is purged")
            return False
        if existing.dropped:
            raise _reused(description.id, "was dropped, and its data is still held")
        if existing.description != description:
            raise _reused(description.id, "exists with another description")
        return True

    def _dependencies(self, description: Description) -> tuple[str, ...]:
        """What a new collection depends on, all of it live or in the same command."""
        ids = set(source_dependencies(description.id, description.data_source, self._ingestion_of(description)))
        if description.primary is not None:
            ids.add(description.primary)
        for id in sorted(ids):
            self._live_or_new(id, f"{description.id!r} depends on {id!r}")
        return tuple(sorted(ids))

    def _check_timelines(self, description: Description, dependencies: Iterable[str]) -> None:
        for id in dependencies:
            timeline = self._live_or_new(id, description.id).timeline
            if timeline != description.timeline:
                raise invalid(
                    f"{description.id!r} is on the timeline {description.timeline!r}, "
                    f"but its dependency {id!r} is on {timeline!r}."
                )

    def _rank(self, description: Description, dependencies: tuple[str, ...]) -> None:
        rank = rank_of(dependencies, description.primary, ChainMap(self._draft.ranks, self._draft.state.ranks))
        if rank[0] > MAX_LEVELS:
            raise invalid(f"{description.id!r} would be on level {rank[0]} of dependencies; the limit is {MAX_LEVELS}.")
        self._draft.ranks[description.id] = rank

    def _check_schema(self, description: Description) -> None:
        """With a primary, the table has that one's columns: they must be what those of this one can become.

        Without a schema of its own a collection has whatever columns the table has.
        """
        if description.primary is None or description.schema is None:
            return
        primary = self._live_or_new(description.primary, description.id)
        older, newer = (parse_schema(each.schema, reserved=frozenset()) for each in (description, primary))
        try:
            check_evolution(older, newer)
        except Refused as refused:
            raise Refused(
                Code.SCHEMA_INCOMPATIBLE,
                f"{description.id!r} shares the table of its primary {primary.id!r}, so its schema must be an older "
                f"one, from which alter_table_desc could lead to that of {primary.id!r}. That change would be refused: "
                f"{refused.message}",
            ) from None

    def _ingestion_of(self, description: Description) -> Ingestion | None:
        if not isinstance(description.data_source, IngestionExport):
            return None
        id = description.data_source.ingestion
        source = self._live_or_new(id, f"{description.id!r} is to be an export of {id!r}").data_source
        if not isinstance(source, Ingestion):
            raise invalid(f"{description.id!r} is to be an export of {id!r}, which is no ingestion.")
        return source

    def _time_dependence(self, description: Description) -> str | None:
        if isinstance(description.data_source, IngestionExport):
            description = self._live_or_new(description.data_source.ingestion, description.id)
        return time_dependence(description.data_source, description.timeline)

    def _live_or_new(self, id: str, why: str) -> Description:
        if id in self._new:
            return self._new[id]
        collection = self._draft.collection(id)
        if collection is None or collection.dropped:
            raise Refused(Code.DEPENDENCY_MISSING, f"{why}, which does not exist, or was dropped.")
        return collection.description

    def _register(self, description: Description, dependencies: tuple[str, ...], register_ts: int | None) -> None:
        draft = self._draft
        shard = self._placing.shard_of(description)
        since = self._initial_since(description, dependencies, shard, register_ts)
        source = description.data_source
        upper = shard.upper
        if isinstance(source, Table) and source.txns is not None:
            upper = upper.join(draft.live(source.txns).upper)
        self._warn_of_lost_holds(description.id, dependencies, shard, upper)
        draft.put_collection(
            Collection(
                id=description.id,
                description=description,
                time_dependence=self._time_dependence(description),
                primary=description.primary,
                dependencies=dependencies,
                shard=shard.id,
                schema_version=0,
                policy=NoPolicy(since),
                upper=upper,
                implied=since,
                since=since,
            )
        )
        draft.count(description.id, since, +1)

    def _initial_since(
        self, description: Description, dependencies: tuple[str, ...], shard: Shard, register_ts: int | None
    ) -> Frontier:
        since = shard.since.join(Frontier(description.since or 0))
        if since == ZERO and isinstance(description.data_source, Table):
            since = Frontier(register_ts or 0)
        for id in dependencies:
            since = since.join(self._draft.live(id).implied)
        return since

    def _warn_of_lost_holds(self, id: str, dependencies: tuple[str, ...], shard: Shard, upper: Frontier) -> None:
        if upper in (ZERO, EMPTY):
            return
        for dependency in dependencies:
            implied = self._draft.live(dependency).implied
            if implied > shard.since and implied >= upper:
                self._draft.warnings.append(
                    f"{id!r} was written up to {upper}, but its dependency {dependency!r} is only readable from "
                    f"{implied} on: someone lost a hold, and {id!r} cannot be continued without a gap."
                )


def _distinct(descriptions: Iterable[Description]) -> dict[str, Description]:
    distinct: dict[str, Description] = {}
    for description in descriptions:
        if distinct.setdefault(description.id, description) != description:
            raise _reused(description.id, "is there twice in this command, with different descriptions")
    return distinct


def _reused(id: str, why: str) -> Refused:
    return Refused(Code.COLLECTION_ID_REUSED, f"The id {id!r} {why}.")


def _in_order(new: Mapping[str, Description], dependencies: Mapping[str, tuple[str, ...]]) -> Iterable[str]:
    """Dependencies first; of those that could come next, tables, then the rest, then sinks, each by id."""
    dependents: dict[str, list[str]] = {id: [] for id in new}
    missing: dict[str, int] = {}
    for id, ids in dependencies.items():
        inside = [dependency for dependency in ids if dependency in new]
        missing[id] = len(inside)
        for dependency in inside:
            dependents[dependency].append(id)
    ready = [(_place(new[id]), id) for id, number in missing.items() if number == 0]
    heapify(ready)
    done = 0
    while ready:
        _, id = heappop(ready)
        done += 1
        yield id
        for dependent in dependents[id]:
            missing[dependent] -= 1
            if missing[dependent] == 0:
                heappush(ready, (_place(new[dependent]), dependent))
    if done < len(new):
        cycle = sorted(id for id, number in missing.items() if number > 0)
        raise invalid(f"These collections depend on themselves, or on others that do: {', '.join(cycle[:10])}.")


def _place(description: Description) -> int:
    match description.data_source:
        case Table():
            return 0
        case Sink():
            return 2
        case _:
            return 1

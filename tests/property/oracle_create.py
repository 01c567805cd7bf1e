"""What creating does (sections 2 and 5): it checks everything first, then adds the rows."""

from __future__ import annotations

import posixpath
import re
from typing import Any

from tests.property.oracle_schemas import COMPATIBLE_SCHEMAS
from tests.property.oracle_state import Refused, Row, State, plain_description

WAREHOUSE = "/warehouse"
RESERVED = (WAREHOUSE, "/state", "/checkpoints")
GREATEST_DEPTH = 64
WALL_CLOCK_KINDS = ("table", "ingestion", "progress", "introspection", "webhook")


def create(state: State, line: Row) -> Row:
    """All or nothing. A missing `register_ts` may be told before or after any other fault."""
    descriptions = [plain_description(given) for given in line["collections"]]
    unregistered = line.get("register_ts") is None and any(d["data_source"]["kind"] == "table" for d in descriptions)
    try:
        new = _check(state, descriptions)
    except Refused as refused:
        raise Refused(*refused.codes, *(["INVALID_ARGUMENT"] if unregistered else []), **refused.facts) from None
    if unregistered:
        raise Refused("INVALID_ARGUMENT")
    for description in new:
        _register(state, {d["id"]: d for d in new}, description, line.get("register_ts"))
    return {}


def _check(state: State, descriptions: list[Row]) -> list[Row]:
    """The descriptions that are new, each after those it depends on; or the first refusal."""
    by_id: dict[str, Row] = {}
    for description in descriptions:
        if by_id.setdefault(description["id"], description) != description:
            raise Refused("COLLECTION_ID_REUSED")
    new = {name: d for name, d in by_id.items() if not _already_there(state, d)}
    faults = {code for description in new.values() for code in _dependency_faults(state, new, description)}
    if faults:
        raise Refused(*faults)
    ordered = _topological(state, new)
    for description in ordered:
        for dependency in _dependencies(state, new, description):
            known = new.get(dependency) or state.collections[dependency]
            if known["timeline"] != description["timeline"]:
                raise Refused("INVALID_ARGUMENT")
    _check_depth(state, new, ordered)
    _check_schemas(state, new, ordered)
    _check_locations(state, ordered)
    return ordered


def _check_depth(state: State, new: dict[str, Row], ordered: list[Row]) -> None:
    """A collection is one level above its dependencies, but on that of its primary."""
    if len(state.collections) + len(new) <= GREATEST_DEPTH:
        return
    levels: dict[str, int] = {}

    def level(name: str) -> int:
        if name not in levels:
            row = new.get(name) or state.collections[name]
            primary = row.get("primary")
            below = _dependencies(state, new, new[name]) if name in new else row["dependencies"]
            depth = 1 + max((level(other) for other in below - {primary}), default=0)
            levels[name] = max(depth, level(primary) if primary is not None else 1)
        return levels[name]

    if any(level(description["id"]) > GREATEST_DEPTH for description in ordered):
        raise Refused("INVALID_ARGUMENT")


def _check_schemas(state: State, new: dict[str, Row], ordered: list[Row]) -> None:
    """Whoever has a primary has an older schema than that, or none."""
    for description in ordered:
        own, primary = description.get("schema"), description.get("primary")
        if own is None or primary is None:
            continue
        above = new.get(primary) or state.collections[primary]["description"]
        if above.get("schema") not in COMPATIBLE_SCHEMAS[own]:
            raise Refused("SCHEMA_INCOMPATIBLE")


def _already_there(state: State, description: Row) -> bool:
    name = description["id"]
    if name in state.tombstones:
        raise Refused("COLLECTION_ID_REUSED")
    if name not in state.collections:
        return False
    if not state.live(name) or state.collections[name]["description"] != description:
        raise Refused("COLLECTION_ID_REUSED")
    return True


def _source(state: State, new: dict[str, Row], name: str) -> Row | None:
    """The data source of a collection that is live or new."""
    if name in new:
        source: Row = new[name]["data_source"]
        return source
    return state.collections[name]["source"] if state.live(name) else None


def _dependency_faults(state: State, new: dict[str, Row], description: Row) -> set[str]:
    faults = set()
    source = description["data_source"]
    if source["kind"] == "ingestion_export":
        ingestion = _source(state, new, source["ingestion"])
        if ingestion is None:
            return {"DEPENDENCY_MISSING"}
        if ingestion["kind"] != "ingestion":
            return {"INVALID_ARGUMENT", *(["DEPENDENCY_MISSING"] if _primary_missing(state, new, description) else [])}
    for dependency in _dependencies(state, new, description):
        if _source(state, new, dependency) is None:
            faults.add("DEPENDENCY_MISSING")
    return faults


def _primary_missing(state: State, new: dict[str, Row], description: Row) -> bool:
    primary = description.get("primary")
    return primary is not None and _source(state, new, primary) is None


def _dependencies(state: State, new: dict[str, Row], description: Row) -> set[str]:
    """The table of section 2. The ingestion of an export is live and an ingestion when this is asked."""
    source, name = description["data_source"], description["id"]
    found: set[str] = set()
    match source["kind"]:
        case "table":
            found = {source["txns"]} if "txns" in source else set()
        case "ingestion":
            found = {source["remap"]} - {name}
        case "ingestion_export" if source["envelope"] != "cdcv2":
            ingestion = _source(state, new, source["ingestion"])
            assert ingestion is not None
            found = {ingestion["remap"]}
        case "sink":
            found = {source["from"]}
        case "other":
            found = set(source["inputs"])
    return found | ({description["primary"]} if "primary" in description else set())


def _topological(state: State, new: dict[str, Row]) -> list[Row]:
    ranks = {"table": 0, "sink": 2}
    waiting, ordered = list(new), []
    while waiting:
        ready = [name for name in waiting if not _dependencies(state, new, new[name]) & set(waiting)]
        if not ready:
            raise Refused("INVALID_ARGUMENT")
        first = min(ready, key=lambda name: ranks.get(new[name]["data_source"]["kind"], 1))
        waiting.remove(first)
        ordered.append(new[first])
    return ordered


def overlap(one: str, other: str) -> bool:
    """Whether one location equals, contains or lies within the other."""
    return one == other or one.startswith(other.rstrip("/") + "/") or other.startswith(one.rstrip("/") + "/")


def _check_locations(state: State, ordered: list[Row]) -> None:
    taken = [shard["location"] for shard in state.shards.values()]
    placed: dict[str, str | None] = {}
    for description in ordered:
        shard, primary = description.get("shard"), description.get("primary")
        location = None if shard is None else posixpath.normpath(shard["location"])
        if primary is not None:
            if primary in placed:
                place = placed[primary]
            else:
                place = state.shards[state.collections[primary]["shard"]]["location"]
            if location not in (None, place):
                raise Refused("INVALID_ARGUMENT", *([] if location.startswith(WAREHOUSE) else ["OUTSIDE_WAREHOUSE"]))
            placed[description["id"]] = place
            continue
        placed[description["id"]] = location
        if location is None:
            continue
        if location != WAREHOUSE and not location.startswith(WAREHOUSE + "/"):
            raise Refused("OUTSIDE_WAREHOUSE")
        reserved = location == WAREHOUSE or any(overlap(location, root) for root in RESERVED[1:])
        if reserved or any(overlap(location, other) for other in taken):
            raise Refused("INVALID_ARGUMENT")
        taken.append(location)


def _time_dependence(state: State, new: dict[str, Row], description: Row) -> str | None:
    """Whether the collection follows the wall clock; an export is like its ingestion."""
    source = description["data_source"]
    if description["timeline"] != "epoch_ms":
        return None
    if source["kind"] == "ingestion_export":
        ingestion = new.get(source["ingestion"]) or state.collections[source["ingestion"]]["description"]
        return _time_dependence(state, new, ingestion)
    return "wall_clock" if source["kind"] in WALL_CLOCK_KINDS and source.get("connection") != "load_generator" else None


def _register(state: State, new: dict[str, Row], description: Row, register_ts: int | None) -> None:
    name, source = description["id"], description["data_source"]
    dependencies = _dependencies(state, new, description)
    primary = description.get("primary")
    shard = _new_shard(state, description) if primary is None else state.collections[primary]["shard"]
    since = max(state.shards[shard]["since"], description.get("since", 0))
    if since == 0 and source["kind"] == "table":
        assert register_ts is not None
        since = register_ts
    elif since == state.shards[shard]["since"] and source["kind"] == "table" and (register_ts or 0) > since:
        state.events["a table on a shard with a since did without register_ts"] += 1
    for dependency in dependencies:
        since = max(since, state.collections[dependency]["implied_capability"])
    if name in state.purged:
        state.events["a purged id was created again"] += 1
    if primary is not None:
        state.events["created on the shard of a primary"] += 1
        if description.get("schema") not in (None, state.collections[primary]["description"].get("schema")):
            state.events["created with an older schema than its primary"] += 1
    state.collections[name] = new_row(
        description=description,
        time_dependence=_time_dependence(state, new, description),
        primary=primary,
        dependencies=dependencies,
        shard=shard,
        schema_version=0,
        since=since,
    )


def new_row(*, description: Row, dependencies: set[str], since: int, **columns: Any) -> Row:
    return {
        "id": description["id"],
        "data_source": description["data_source"]["kind"],
        "source": description["data_source"],
        "description": description,
        "timeline": description["timeline"],
        "dependencies": dependencies,
        "read_policy": {"kind": "no_policy", "initial_since": since},
        "write_frontier": 0,
        "implied_capability": since,
        "dropped": False,
        "altered": None,
    } | columns


def _new_shard(state: State, description: Row) -> str:
    """A shard of its own; a number whose location is taken is left out."""
    taken = [shard["location"] for shard in state.shards.values()]
    given = description.get("shard")
    if given is not None and re.search(r"-[0-9]+$", given["location"]):
        state.numbers_may_skip = True
    stem = re.sub(r"[^A-Za-z0-9_-]", "_", description["id"])
    number = len(state.shards) + 1
    while given is None and any(overlap(f"{WAREHOUSE}/{stem}-{number}", other) for other in taken):
        number += 1
    name = f"{stem}-{number}"
    state.shards[name] = {
        "shard": name,
        "location": f"{WAREHOUSE}/{name}" if given is None else posixpath.normpath(given["location"]),
        "format": "updates" if given is None else given["format"],
        "owner": description["id"],
        "since": 0,
        "upper": 0,
        "log_version": None,
        "epoch": 0,
        "state": "live",
        "dropped_at": None,
        "finalized_at": None,
        "attempts": 0,
    }
    return name

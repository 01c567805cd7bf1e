"""What altering a table does (section 6)."""

from __future__ import annotations

from tests.property.oracle_create import new_row
from tests.property.oracle_state import Refused, Row, State

SCHEMAS = [
    "k STRING",
    "k STRING, v INT",
    "k STRING, v BIGINT",
    "k STRING, v STRING",
    "k STRING, v INT, w STRING",
    "k STRING, v BIGINT, w STRING",
    "v INT, k STRING",
    "k STRING, v INT, w STRING NOT NULL",
]
"""All that are ever used. The last is never the schema of a collection: its one column is not nullable."""

COMPATIBLE_SCHEMAS: dict[str | None, set[str]] = {
    None: set(SCHEMAS[:-1]),
    "k STRING": set(SCHEMAS[:-2]),
    "k STRING, v INT": {SCHEMAS[1], SCHEMAS[2], SCHEMAS[4], SCHEMAS[5]},
    "k STRING, v BIGINT": {SCHEMAS[2], SCHEMAS[5]},
    "k STRING, v STRING": {SCHEMAS[3]},
    "k STRING, v INT, w STRING": {SCHEMAS[4], SCHEMAS[5]},
    "k STRING, v BIGINT, w STRING": {SCHEMAS[5]},
    "v INT, k STRING": {SCHEMAS[6]},
}
"""By hand: which schemas may follow which. An absent schema has no columns."""


def alter(state: State, line: Row) -> Row:
    existing, new, version = line["existing"], line["new"], line["expected_version"]
    if not state.live(existing):
        raise Refused("COLLECTION_MISSING")
    old = state.collections[existing]
    if old["source"]["kind"] != "table" or old["primary"] is not None:
        raise Refused("INVALID_ARGUMENT")
    if new in state.collections or new in state.tombstones:
        raise Refused("COLLECTION_ID_REUSED")
    if version != old["schema_version"]:
        raise Refused("SCHEMA_MISMATCH", actual=[old["schema_version"]])
    if line["schema"] not in COMPATIBLE_SCHEMAS.get(old["description"].get("schema"), set()):
        raise Refused("SCHEMA_INCOMPATIBLE")
    if version > 0:
        state.events["an altered table was altered again"] += 1
    description = {
        "id": new,
        "data_source": old["source"],
        "schema": line["schema"],
        "timeline": old["timeline"],
    }
    state.collections[new] = new_row(
        description=description,
        time_dependence=old["time_dependence"],
        primary=None,
        dependencies={old["source"]["txns"]} if "txns" in old["source"] else set(),
        shard=old["shard"],
        schema_version=version + 1,
        since=state.since[existing],
    )
    old.update(primary=new, dependencies=old["dependencies"] | {new}, altered="old")
    state.collections[new]["altered"] = "new"
    state.shards[old["shard"]]["owner"] = new
    return {}

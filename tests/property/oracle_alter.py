"""What altering a table does (section 6)."""

from __future__ import annotations

from tests.property.oracle_create import new_row
from tests.property.oracle_schemas import COMPATIBLE_SCHEMAS
from tests.property.oracle_state import Refused, Row, State


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

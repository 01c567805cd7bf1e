"""Random commands on collections: create, alter, policies, drop, undrop, reconcile."""

from __future__ import annotations

import json
from random import Random

from tests.property.generate_common import IDS, SPARE_IDS, chance, command, free_ids, live_ids, one, several
from tests.property.oracle import Oracle
from tests.property.oracle_schemas import COMPATIBLE_SCHEMAS, SCHEMAS
from tests.property.oracle_shape import CONNECTIONS, ENVELOPES
from tests.property.oracle_state import UNDROP_PREFIX, Row

KINDS = (
    ["table"] * 9
    + ["other"] * 7
    + ["ingestion"] * 3
    + ["ingestion_export"]
    + ["sink"] * 2
    + ["progress", "introspection", "webhook"]
)


def create(rng: Random, oracle: Oracle) -> Row:
    timeline = "user" if chance(rng, 8) else "epoch_ms"
    free = free_ids(oracle)
    if len(free) >= 4 and chance(rng, 15):
        items = _diamond(rng, free)
    elif len(free) < 2 and live_ids(oracle) and chance(rng, 70):
        items = [_as_given(oracle, rng.choice(live_ids(oracle)))]
    else:
        items = _new_items(rng, oracle, free, timeline)
    if live_ids(oracle) and chance(rng, 5):
        items.append(_as_given(oracle, rng.choice(live_ids(oracle))))
    if chance(rng, 4):
        items.append(json.loads(json.dumps(rng.choice(items))))
        if chance(rng, 40):
            items[-1]["since"] = 11
    rng.shuffle(items)
    line = command(rng, oracle, "create_collections", collections=items if chance(rng, 98) else [])
    tables = any(item["data_source"]["kind"] == "table" for item in items)
    if chance(rng, 96 if tables else 20):
        line["register_ts"] = rng.choice([0, 1, 3, 5, 9, 20, 60])
    return line


def _diamond(rng: Random, free: list[str]) -> list[Row]:
    top, left, right, bottom = rng.sample(free, 4)
    kind = rng.choice(["table", "progress"])
    inputs = {top: [], left: [top], right: [top], bottom: sorted([left, right])}
    items: list[Row] = [{"id": name, "data_source": {"kind": "other", "inputs": inputs[name]}} for name in inputs]
    items[0]["data_source"] = {"kind": kind}
    return items


def _as_given(oracle: Oracle, name: str) -> Row:
    """The description of a collection that is there, as it was first given."""
    given: Row = json.loads(json.dumps(oracle.collections[name]["description"]))
    return given


def _new_items(rng: Random, oracle: Oracle, free: list[str], timeline: str) -> list[Row]:
    count = rng.choice([1, 1, 1, 2, 2, 3, 4])
    names = list(dict.fromkeys(one(rng, free, IDS, 95) for _ in range(count)))
    known = [name for name in live_ids(oracle) if oracle.collections[name]["timeline"] == timeline]
    items: list[Row] = []
    for name in names:
        item = _item(rng, oracle, name, known, items)
        if timeline != "epoch_ms" or chance(rng, 20):
            item["timeline"] = timeline
        items.append(item)
        known = [*known, name]
    if chance(rng, 25):
        _place(rng, oracle, items)
    if len(items) > 1 and chance(rng, 4):
        _tie(rng, items)
    return items


def _item(rng: Random, oracle: Oracle, name: str, known: list[str], earlier: list[Row]) -> Row:
    def reference() -> str:
        return one(rng, known, IDS, 95)

    ingestions = [other for other in known if _kind(oracle, earlier, other) == "ingestion"]
    kind = "ingestion_export" if ingestions and chance(rng, 30) else rng.choice(KINDS)
    if kind in ("sink", "ingestion_export") and not known:
        kind = "other"
    source: Row = {"kind": kind}
    match kind:
        case "table":
            if known and chance(rng, 35):
                source["txns"] = reference()
        case "ingestion":
            source.update(remap=rng.choice([name, reference()]), connection=rng.choice(CONNECTIONS))
        case "ingestion_export":
            source.update(ingestion=one(rng, ingestions, known), envelope=rng.choice(ENVELOPES))
        case "sink":
            source["from"] = reference()
        case "other":
            count = rng.choice([0, 1, 1, 2, 2, 3]) if known else 0
            source["inputs"] = sorted({reference() for _ in range(count)} - {name})
    item: Row = {"id": name, "data_source": source}
    if chance(rng, 60):
        item["schema"] = rng.choice(["k STRING", "k STRING, v INT", "k STRING, v INT", None])
    if chance(rng, 25):
        item["since"] = rng.choice([None, 0, 2, 4, 7, 12])
    if known and chance(rng, 22):
        moved = [other for other in known if other in oracle.collections and _shard(oracle, other)["since"]]
        item["primary"] = rng.choice(moved) if moved and chance(rng, 60) else reference()
        if chance(rng, 40):
            item["data_source"] = {"kind": "table"}
            item.pop("since", None)
        if "schema" in item and chance(rng, 85):
            item["schema"] = rng.choice(_older_schemas(oracle, earlier, item["primary"]))
    return item


def _older_schemas(oracle: Oracle, earlier: list[Row], primary: str) -> list[str | None]:
    """Those that a collection with this primary may have."""
    described = {item["id"]: item for item in earlier}
    if primary in oracle.collections:
        described[primary] = oracle.collections[primary]["description"]
    schema = described.get(primary, {}).get("schema")
    return [older for older, newer in COMPATIBLE_SCHEMAS.items() if older is None or schema in newer]


def _kind(oracle: Oracle, earlier: list[Row], name: str) -> str:
    kinds = {item["id"]: item["data_source"]["kind"] for item in earlier}
    return str(kinds[name] if name in kinds else oracle.collections[name]["data_source"])


def _shard(oracle: Oracle, name: str) -> Row:
    return oracle.shards[oracle.collections[name]["shard"]]


def _place(rng: Random, oracle: Oracle, items: list[Row]) -> None:
    """Give one of the collections a location: a new one, a taken one, a forbidden one, or that of its primary."""
    item = rng.choice(items)
    primary = oracle.collections.get(item.get("primary") or "")
    if "primary" in item:
        if primary is not None:
            shard = _shard(oracle, primary["id"])
            place = shard["location"] if chance(rng, 85) else "/warehouse/elsewhere"
            item["shard"] = {"location": place, "format": shard["format"]}
        return
    new = f"/warehouse/l{rng.randrange(60)}"
    taken = [shard["location"] for shard in oracle.shards.values()]
    choices = [new, new, new, f"{new}/deep/inside", f"/warehouse/x/../l{rng.randrange(60)}"]
    choices += ["/elsewhere/l1", "/warehouse", "/warehouse/../etc", "/state/x", "/warehouses/l1", *taken[-2:]]
    choices += [f"{place}/within" for place in taken[-1:]]
    if len(items) == 1:
        choices += [f"/warehouse/{rng.choice(IDS[:5])}-{len(oracle.shards) + rng.randint(1, 4)}"] * 2
    item["shard"] = {"location": rng.choice(choices)}
    if chance(rng, 30):
        item["shard"]["format"] = rng.choice(["updates", "delta"])


def _tie(rng: Random, items: list[Row]) -> None:
    """Make a cycle of two, or of one with itself."""
    first = items[0]
    if first["data_source"]["kind"] == "ingestion":
        return
    other = rng.choice(items)["id"]
    first["data_source"] = {"kind": "other", "inputs": [other]}
    items[-1]["primary"] = first["id"]
    items[-1].pop("shard", None)


def alter(rng: Random, oracle: Oracle) -> Row:
    if not live_ids(oracle):
        return create(rng, oracle)
    rows = {name: oracle.collections[name] for name in live_ids(oracle)}
    tables = [name for name, row in rows.items() if row["data_source"] == "table" and row["primary"] is None]
    existing = one(rng, tables, IDS)
    row = rows.get(existing)
    spare = [name for name in SPARE_IDS if name not in oracle.collections and name not in oracle.tombstones]
    base = row["description"].get("schema") if row else None
    version = row["schema_version"] if row and chance(rng, 92) else rng.choice([0, 1, 2])
    return command(
        rng,
        oracle,
        "alter_table_desc",
        existing=existing,
        new=one(rng, spare or free_ids(oracle), IDS, 90),
        schema=one(rng, sorted(COMPATIBLE_SCHEMAS.get(base, set())), SCHEMAS, 80),
        expected_version=version,
    )


def set_policies(rng: Random, oracle: Oracle) -> Row:
    names = several(rng, live_ids(oracle), IDS)
    policies = [{"collection": name, "policy": _policy(rng, oracle, name)} for name in names]
    if policies and all(map(oracle.live, names)) and chance(rng, 6):
        bad: Row = rng.choice(
            [
                {"kind": "multiple", "policies": []},
                {"kind": "lag_writes_by", "lag": 3, "granularity": 0},
                {"kind": "lag_writes_by", "lag": 0, "granularity": "0s"},
                {"kind": "lag_writes_by", "lag": -1},
                {"kind": "valid_from", "frontier": None},
                {"kind": "no_policy"},
            ]
        )
        nested = {"kind": "multiple", "policies": [{"kind": "step_back"}, bad]}
        rng.choice(policies)["policy"] = rng.choice([bad, nested])
    return command(rng, oracle, "set_read_policies", policies=policies)


def _policy(rng: Random, oracle: Oracle, name: str, depth: int = 0) -> Row:
    match rng.choice(["lag_writes_by", "lag_writes_by", "step_back", "valid_from", "multiple"]):
        case "lag_writes_by":
            policy: Row = {"kind": "lag_writes_by", "lag": rng.choice([0, 1, 2, 3, 5, 8, "4ms", "0s"])}
            if chance(rng, 60):
                policy["granularity"] = rng.choice([1, 2, 3, 4, 10, "2ms", "1h"])
            return policy
        case "valid_from":
            return {"kind": "valid_from", "frontier": max(0, oracle.since.get(name, 0) + rng.randint(-2, 5))}
        case "multiple" if depth < 2:
            parts = [_policy(rng, oracle, name, depth + 1) for _ in range(rng.randint(1, 3))]
            return {"kind": "multiple", "policies": parts}
    return {"kind": "step_back"}


def drop(rng: Random, oracle: Oracle) -> Row:
    names = live_ids(oracle) if chance(rng, 9) else several(rng, live_ids(oracle), IDS)
    return command(rng, oracle, "drop_collections", collections=names)


def undrop(rng: Random, oracle: Oracle) -> Row:
    saved = [name for name in IDS if UNDROP_PREFIX + name in oracle.holds]
    return command(rng, oracle, "undrop_collections", collections=several(rng, saved or live_ids(oracle), IDS))


def reconcile(rng: Random, oracle: Oracle) -> Row:
    return command(rng, oracle, "reconcile", collections=several(rng, IDS, [*IDS, "zz"]))

"""The oracle itself, on scenarios worked out by hand: whoever doubts it can check here what it believes."""

from __future__ import annotations

from typing import Any

from tests.property.generate_common import encode
from tests.property.oracle import Expected, Oracle

Row = dict[str, Any]


class Script:
    """Short forms of lines for one oracle."""

    def __init__(self) -> None:
        self.oracle = Oracle()
        self.count = 0

    def tell(self, kind: str, **body: Any) -> Expected:
        return self.raw({"type": kind} | body)

    def do(self, kind: str, **body: Any) -> Expected:
        self.count += 1
        return self.raw({"type": kind, "id": f"c{self.count}"} | body)

    def raw(self, line: Row) -> Expected:
        return self.oracle.step(line, encode(line))

    def create(self, *items: Row, register_ts: int = 0) -> Expected:
        return self.do("create_collections", collections=list(items), register_ts=register_ts)

    def hold(self, *collections: str, **body: Any) -> str:
        result = self.do("acquire_read_holds", collections=list(collections), holder="h", **body)
        return str(result.body["result"]["holds"][0]["hold"])

    def policy(self, collection: str, **policy: Any) -> Expected:
        return self.do("set_read_policies", policies=[{"collection": collection, "policy": policy}])

    def upper(self, collection: str, upper: int | None) -> Expected:
        return self.tell("upper", collection=collection, upper=upper)


def table(name: str, **more: Any) -> Row:
    txns = {"txns": more.pop("txns")} if "txns" in more else {}
    return {"id": name, "data_source": {"kind": "table"} | txns} | more


def view(name: str, *inputs: str) -> Row:
    return {"id": name, "data_source": {"kind": "other", "inputs": list(inputs)}}


def code(expected: Expected) -> set[str]:
    return set(expected.codes)


def test_a_diamond_holds_its_top_back_until_the_last_reader_is_gone() -> None:
    script = Script()
    script.create(table("a"), view("b", "a"), view("c", "a"), view("d", "b", "c"), register_ts=5)
    assert script.oracle.since == {"a": 5, "b": 5, "c": 5, "d": 5}
    hold = script.hold("d", at=7)
    for name in "abcd":
        script.policy(name, kind="valid_from", frontier=10)
    assert script.oracle.since == {"a": 7, "b": 7, "c": 7, "d": 7}
    script.do("drop_collections", collections=["a", "b", "c", "d"])
    assert script.oracle.since == {"a": 7, "b": 7, "c": 7, "d": 7}
    script.do("downgrade_read_holds", holds=[{"hold": hold, "to": 9}])
    assert script.oracle.since == {"a": 9, "b": 9, "c": 9, "d": 9}
    script.do("release_read_holds", holds=[hold])
    assert script.oracle.since == {}
    assert script.oracle.tombstones.keys() == {"a", "b", "c", "d"}
    assert script.oracle.events["a diamond went to []"] == 1


def test_policies_lag_step_back_and_stay_when_the_upper_closes() -> None:
    script = Script()
    script.create(table("a"))
    script.policy("a", kind="lag_writes_by", lag=5, granularity=4)
    script.upper("a", 12)
    assert script.oracle.since["a"] == 4  # 12 - 5 = 7, rounded down to a multiple of 4
    script.policy("a", kind="multiple", policies=[{"kind": "step_back"}, {"kind": "lag_writes_by", "lag": "3ms"}])
    assert script.oracle.since["a"] == 9
    script.policy("a", kind="valid_from", frontier=2)
    assert script.oracle.since["a"] == 9
    script.policy("a", kind="lag_writes_by", lag=0)
    assert script.oracle.since["a"] == 12
    script.upper("a", None)
    assert script.oracle.since["a"] == 12
    assert code(script.policy("a", kind="valid_from", frontier=None)) == {"INVALID_ARGUMENT"}


def test_an_initial_since_joins_the_given_one_register_ts_and_the_dependencies_capabilities() -> None:
    script = Script()
    script.create(table("a"), table("b", since=3), register_ts=8)
    assert script.oracle.since == {"a": 8, "b": 3}
    script.create(view("v", "a", "b"))
    assert script.oracle.since["v"] == 8
    script.create(table("p", primary="b"), register_ts=2)
    assert script.oracle.since["p"] == 3  # register_ts, joined with the primary's capability
    assert code(script.do("create_collections", collections=[table("q")])) == {"INVALID_ARGUMENT"}
    assert code(script.create(view("v", "a"))) == {"COLLECTION_ID_REUSED"}
    assert script.create(view("v", "a", "b")).status == "ok"
    assert code(script.create(view("w", "nobody"))) == {"DEPENDENCY_MISSING"}
    assert code(script.create(view("x", "y"), view("y", "x"))) == {"INVALID_ARGUMENT"}


def test_altering_makes_the_new_id_the_owner_and_the_old_one_depends_on_it() -> None:
    script = Script()
    script.create(table("old", schema="k STRING, v INT"), register_ts=5)
    body = {"existing": "old", "new": "new", "schema": "k STRING, v BIGINT"}
    mismatch = script.do("alter_table_desc", expected_version=1, **body)
    assert (code(mismatch), mismatch.facts) == ({"SCHEMA_MISMATCH"}, {"actual": [0]})
    assert script.do("alter_table_desc", expected_version=0, **body).status == "ok"
    rows = script.oracle.dump()
    assert rows["collections"]["old"]["primary"] == "new"
    assert rows["collections"]["old"]["dependencies"] == ["new"]
    assert rows["collections"]["new"]["schema_version"] == 1
    assert rows["shards"]["old-1"]["owner"] == "new"
    script.do("drop_collections", collections=["new"])
    assert script.oracle.dump()["shards"]["old-1"]["state"] == "live"
    script.do("drop_collections", collections=["old"])
    assert script.oracle.dump()["shards"]["old-1"]["state"] == "dropped"
    assert script.oracle.tombstones == {"old": "old-1", "new": "old-1"}


def test_members_of_a_log_follow_its_upper_from_creation_on() -> None:
    script = Script()
    script.create(table("log"))
    script.upper("log", 7)
    script.create(table("m", txns="log"))
    assert script.oracle.dump()["collections"]["m"]["write_frontier"] == 7
    script.policy("m", kind="step_back")
    script.upper("log", 20)
    assert script.oracle.since["m"] == 19
    script.upper("log", None)
    assert script.oracle.dump()["collections"]["m"]["write_frontier"] is None
    assert script.oracle.dump()["shards"]["m-2"]["upper"] == 0


def test_a_dropped_id_goes_through_downgrade_finalization_and_purge_before_it_can_be_used_again() -> None:
    script = Script()
    script.create(table("a"), register_ts=5)
    assert script.tell("downgrades").body == {"downgrades": [{"shard": "a-1", "since": 5}]}
    script.policy("a", kind="valid_from", frontier=6)
    assert script.tell("downgrades").body == {"downgrades": []}
    script.do("drop_collections", collections=["a"])
    assert script.tell("finalize", fail=[]).body == {"finalized": [], "failed": []}
    assert script.tell("downgrades").body == {"downgrades": [{"shard": "a-1", "since": None}]}
    assert script.tell("finalize", fail=["a"]).body == {"finalized": [], "failed": ["a-1"]}
    script.tell("clock", now=4_999)
    assert script.tell("finalize", fail=[]).body == {"finalized": [], "failed": []}
    script.tell("clock", now=5_000)
    assert script.tell("finalize", fail=[]).body == {"finalized": ["a-1"], "failed": []}
    assert code(script.create(table("a"))) == {"COLLECTION_ID_REUSED"}
    script.tell("clock", now=5_000 + 7 * 86_400_000 - 1)
    assert code(script.create(table("a"))) == {"COLLECTION_ID_REUSED"}
    script.tell("clock", now=5_000 + 7 * 86_400_000)
    assert script.create(table("a")).status == "ok"
    assert script.oracle.dump()["collections"]["a"]["shard"] == "a-2"


def test_an_undrop_window_keeps_the_since_and_ends_on_time_also_over_a_restart() -> None:
    script = Script()
    script.create(table("a"), table("b"), register_ts=5)
    script.do("update_parameters", parameters={"undrop_window": "10s"})
    script.do("drop_collections", collections=["a", "b"])
    assert script.oracle.since == {"a": 5, "b": 5}
    assert script.do("undrop_collections", collections=["a"]).status == "ok"
    assert script.oracle.dump()["collections"]["a"]["implied_capability"] == 5
    script.tell("clock", now=9_999)
    script.tell("restart")
    assert code(script.do("undrop_collections", collections=["a", "zz"])) == {"COLLECTION_MISSING"}
    script.tell("clock", now=10_000)
    assert code(script.do("undrop_collections", collections=["b"])) == {"COLLECTION_MISSING"}
    assert script.oracle.tombstones == {"b": "b-2"}


def test_leases_end_start_again_at_a_restart_and_the_reason_is_remembered() -> None:
    script = Script()
    script.create(table("a"), register_ts=5)
    first, second = script.hold("a", lease="1s"), script.hold("a", lease=3_000)
    script.tell("clock", now=999)
    script.tell("restart")
    script.tell("clock", now=1_998)
    assert first in script.oracle.holds
    script.tell("clock", now=1_999)
    missing = script.do("renew_read_holds", holds=[first])
    assert (code(missing), missing.facts) == ({"HOLD_MISSING"}, {"reason": ["lease expired"]})
    merged = script.do("merge_read_holds", holds=[second, script.hold("a", at=9)])
    assert merged.body["result"]["holds"] == [{"hold": second, "collection": "a", "since": 5}]
    assert script.oracle.holds[second]["lease_ms"] is None
    script.tell("clock", now=1_999 + 3_600_001)
    assert script.do("clone_read_holds", holds=[first]).facts == {"reason": ["unknown"]}


def test_duplicates_and_stale_commands_are_decided_first() -> None:
    script = Script()
    line = {"type": "reconcile", "id": "x", "collections": ["a"], "issued_at": 0}
    assert script.raw(line).body == {"result": {"extra": [], "missing": ["a"]}}
    assert script.raw(line).duplicate
    assert code(script.raw(line | {"collections": []})) == {"INVALID_ARGUMENT"}
    script.tell("clock", now=3_600_000)
    assert script.oracle.duplicate("x")
    script.tell("clock", now=7_200_001)
    assert code(script.raw(line)) == {"STALE_COMMAND"}
    assert script.raw(line).duplicate

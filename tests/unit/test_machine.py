"""Rules of the machine that cannot be shown through `holdfast simulate`: what comes from the controller around it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.core.advancing import Observation
from app.core.descriptions import Description, ShardDescription, Table
from app.core.errors import BrokenInvariant, Code, Refused
from app.core.folding import fold
from app.core.frontier import EMPTY, MAX_TIME_GIVEN, Frontier
from app.core.images import HOLD
from app.core.locations import Warehouse
from app.core.machine import Machine
from app.core.placing import Found
from app.core.shard_work import clean_up_limit
from app.simulate import Simulator


def machine(**options: Any) -> Machine:
    return Machine(warehouse=Warehouse(roots=["/warehouse"], reserved=[]), **options)


def table(id: str, location: str | None = None) -> Description:
    shard = None if location is None else ShardDescription(location=location)
    return Description(id=id, data_source=Table(), shard=shard)


def test_a_table_that_is_there_already_brings_its_frontiers() -> None:
    there = {"/warehouse/old": Found(since=Frontier(7), upper=Frontier(20), log_version=3, table_id="t-1")}
    one = machine(look=lambda location, _: there.get(location))
    one.create_collections(0, [table("a", "/warehouse/old")], register_ts=5)
    a = one.state.collections["a"]
    assert (a.since, a.upper) == (7, 20)
    assert (one.state.shards["a-1"].log_version, one.state.shards["a-1"].table_id) == (3, "t-1")
    assert not one.state.unseen


def test_a_closed_table_can_be_registered_but_not_one_that_was_given_up() -> None:
    there = {
        "/warehouse/old": Found(since=Frontier(7), upper=EMPTY, log_version=3, table_id="t-1"),
        "/warehouse/gone": Found(since=EMPTY, upper=EMPTY, log_version=9, table_id="t-2"),
    }
    one = machine(look=lambda location, _: there.get(location))
    one.create_collections(0, [table("a", "/warehouse/old")], register_ts=5)
    assert one.state.collections["a"].upper == EMPTY
    with pytest.raises(Refused, match="was given up"):
        one.create_collections(0, [table("b", "/warehouse/gone")], register_ts=5)
    fold(one.state.images().items())


def test_a_table_that_a_controller_with_a_greater_epoch_manages_is_not_taken_from_it() -> None:
    there = {
        f"/warehouse/{epoch}": Found(
            since=Frontier(7), upper=Frontier(9), log_version=3, table_id=f"t-{epoch}", epoch=epoch
        )
        for epoch in (3, 4)
    }
    one = machine(look=lambda location, _: there.get(location), epoch=3)
    with pytest.raises(Refused, match="managed by another controller: the epoch in its log is 4, ours is 3"):
        one.create_collections(0, [table("a", "/warehouse/4")], register_ts=5)
    one.create_collections(0, [table("a", "/warehouse/3")], register_ts=5)


def test_new_shards_of_two_states_over_one_warehouse_have_different_names() -> None:
    names = set()
    for namespace in ("-aa", "-bb"):
        one = machine(namespace=namespace)
        one.create_collections(0, [table("a")], register_ts=5)
        names.update(one.state.shards)
    assert names == {"a-1-aa", "a-1-bb"}


def test_a_lease_ends_only_when_everything_sent_before_its_end_was_applied() -> None:
    one = machine()
    one.create_collections(0, [table("a")], register_ts=5)
    one.acquire_read_holds(0, command_id="c", collections=["a"], at=None, holder="h", lease_ms=100)
    assert one.expire_leases(500, applied_until=99).result == []
    one.renew_read_holds(500, ["c/a"], lease_ms=None)
    assert one.expire_leases(599, applied_until=599).result == []
    assert one.expire_leases(600, applied_until=600).result == ["c/a"]


def test_an_undrop_window_ends_by_the_clock_alone() -> None:
    one = machine()
    one.create_collections(0, [table("a"), table("b")], register_ts=5)
    one.update_parameters(0, {"undrop_window": 1_000})
    one.drop_collections(0, ["a", "b"])
    one.undrop_collections(999, ["a"])
    with pytest.raises(Refused) as refused:
        one.undrop_collections(1_000, ["b"])
    assert refused.value.code is Code.COLLECTION_MISSING
    assert one.expire_leases(1_000, applied_until=0).result == ["/undrop/b"]


def test_no_lease_ends_after_the_year_9999() -> None:
    one = machine()
    one.create_collections(0, [table("a")], register_ts=5)
    step = one.acquire_read_holds(
        1_700_000_000_000, command_id="c", collections=["a"], at=None, holder="h", lease_ms=MAX_TIME_GIVEN
    )
    assert step.changes[(HOLD, "c/a")].lease_expires_at == MAX_TIME_GIVEN  # type: ignore[union-attr]  # it is a hold


def test_a_clean_up_goes_as_far_as_the_journal_has_seen_and_no_hold_pins_files() -> None:
    there = {"/warehouse/old": Found(since=Frontier(0), upper=Frontier(20), log_version=8, table_id="t-1")}
    one = machine(look=lambda location, _: there.get(location))
    one.create_collections(0, [table("a", "/warehouse/old"), table("b")], register_ts=5)
    assert clean_up_limit(one.state, "a-1") == 8
    assert clean_up_limit(one.state, "b-2") is None, "nobody has seen it on disk"
    pin = {"collections": ["a"], "at": None, "holder": "h", "lease_ms": 100, "pin_files": True}
    one.acquire_read_holds(0, command_id="c", **pin)  # type: ignore[arg-type]  # a bag of different arguments
    one.observe(1, [Observation("a-1", Frontier(30), 12)])
    assert clean_up_limit(one.state, "a-1") == 8
    one.release_read_holds(0, ["c/a"])
    assert clean_up_limit(one.state, "a-1") == 12


def test_what_is_to_be_done_on_a_shard_from_its_creation_to_its_purge() -> None:
    one = machine()
    one.create_collections(0, [table("a")], register_ts=5)
    assert one.state.unseen == {"a-1"}
    one.observe(1, [Observation("a-1", Frontier(30), 0)])
    assert not one.state.unseen
    one.drop_collections(2, ["a"])
    one.downgrade_sinces(2)
    assert one.claim_shards(3).result == ["a-1"]
    one.finalized(4, "a-1")
    assert not one.state.unpurged, "the tombstone still needs the log on disk"
    with pytest.raises(BrokenInvariant):
        one.purged(5, "a-1")
    later = 4 + one.state.parameters.tombstone_retention
    assert one.purge(later).result == ["a"]
    assert one.state.unpurged == {"a-1"} == fold(one.state.images().items()).unpurged
    one.purged(later + 1, "a-1")
    assert not one.state.unpurged
    assert one.state.shards["a-1"].purged_at == later + 1


def test_the_row_of_a_shard_says_what_went_wrong_with_it_until_it_works_again() -> None:
    one = machine()
    one.create_collections(0, [table("a")], register_ts=5)

    def said() -> str | None:
        return one.state.shards["a-1"].last_error

    assert one.work_ended(1, "a-1", "create", "no space left").changes
    assert not one.work_ended(2, "a-1", "create", "no space left").changes, "nothing new"
    assert said() == "create: no space left"
    assert not one.work_ended(3, "a-1", "evolve", None).changes, "that is no reason to take it back"
    one.work_ended(4, "a-1", "create", None)
    assert said() is None


def test_that_a_log_cannot_be_read_stays_in_the_row_until_it_can_be() -> None:
    one = machine()
    one.create_collections(0, [table("a"), table("b")], register_ts=5)
    one.watched(1, {"a-1": "it went back", "b-2": "it is gone"})
    assert not one.work_ended(2, "a-1", "tend", "no such version").changes, "that follows from it"
    assert not one.work_ended(3, "a-1", "tend", None).changes
    assert one.state.shards["a-1"].last_error == "watch: it went back"
    one.watched(4, {"a-1": None})
    assert one.state.shards["a-1"].last_error is None
    one.work_ended(5, "a-1", "tend", "no space left")
    one.begin_watching(6)
    assert [one.state.shards[id].last_error for id in ("a-1", "b-2")] == ["tend: no space left", None]


def test_a_shard_of_which_nothing_was_seen_is_still_to_be_created() -> None:
    one = machine()
    one.create_collections(0, [table("a")], register_ts=5)
    assert not one.observe(1, [Observation("a-1", Frontier(0), -1)]).changes
    assert one.state.unseen == {"a-1"}


def test_raising_max_command_age_does_not_bring_old_commands_back() -> None:
    simulator = Simulator()

    def line(**fields: object) -> dict[str, Any]:
        return json.loads(simulator.line(json.dumps(fields).encode()))

    create = {
        "type": "create_collections",
        "id": "c1",
        "issued_at": 0,
        "register_ts": 5,
        "collections": [{"id": "x", "data_source": {"kind": "table"}}],
    }
    line(type="update_parameters", id="p1", parameters={"max_command_age": "1s", "tombstone_retention": "2s"})
    line(**create)
    line(type="drop_collections", id="d1", collections=["x"])
    line(type="downgrades")
    line(type="finalize")
    line(type="clock", now=5_000)
    line(type="update_parameters", id="p2", parameters={"tombstone_retention": "7d", "max_command_age": "1h"})
    assert line(**create)["error"]["code"] == "STALE_COMMAND"
    line(type="restart")
    assert line(**{**create, "id": "c2"})["error"]["code"] == "STALE_COMMAND"
    assert line(**{**create, "id": "c3", "issued_at": 4_500})["status"] == "ok"

"""`why` names the real culprit, however far down, and says what it would take."""

from __future__ import annotations

import pytest

from app.client_errors import CollectionMissing
from app.clock import wall_ms
from app.commandline.explain import explain, short
from app.commandline.showing import find
from app.why import Graph, as_json
from tests.unit.client_world import NOW, TABLE, World, view

HOUR = 3_600_000


@pytest.fixture
def world() -> World:
    """orders → totals → monthly → export; all but the export have a policy."""
    world = World(now=wall_ms())
    world.create(
        orders=TABLE, totals=view("orders"), monthly=view("totals"), export={"kind": "sink", "from": "monthly"}
    )
    world.policy("orders", kind="lag_writes_by", lag=10, granularity=5)
    world.policy("totals", kind="step_back")
    world.policy("monthly", kind="step_back")
    for id in ("orders", "totals", "monthly"):
        world.run("upper", collection=id, upper=100)
    return world


def paths(world: World, id: str) -> list[tuple[str, ...]]:
    return [reason.path for reason in Graph(world.state()).why(id).reasons]


def test_its_own_policy_is_the_reason_if_nobody_holds_it_back() -> None:
    world = World()
    world.create(orders=TABLE)
    world.policy("orders", kind="lag_writes_by", lag="1h", granularity="1m")
    world.run("upper", collection="orders", upper=NOW)
    text = explain("orders", world.state())
    assert f"orders is readable from 2027-01-15T07:00:00Z ({NOW - HOUR}) on" in text
    assert "written up to 2027-01-15T08:00:00Z: 1h of history." in text
    assert "Its policy keeps the last 1h before its upper, in steps of 1m: that is where it is now." in text
    assert "Nobody else keeps it there." in text


def test_a_dependent_without_policy_is_found_at_the_end_of_the_chain(world: World) -> None:
    assert paths(world, "orders") == [("orders", "totals", "monthly", "export")]
    text = explain("orders", world.state())
    assert "would let it go to 90, 85 further" in text
    assert "It is held back by a dependent:" in text
    assert "1. export, which has no policy, and so keeps everything from 5 on" in text
    assert "export is a sink of monthly; monthly is computed from totals; totals is computed from orders." in text
    assert "holdfast policy export" in text
    assert "Without this, its since would move to 90, where its own policy would keep it." in text


def test_a_hold_on_a_dependent_is_told_with_holder_purpose_and_lease(world: World) -> None:
    world.run("drop_collections", collections=["export"])
    world.hold("monthly", holder="nightly", purpose="month end", lease="15m", at=99, id="nightly-1")
    world.run("upper", collection="orders", upper=500)
    world.run("upper", collection="totals", upper=500)
    world.run("upper", collection="monthly", upper=500)
    (reason,) = Graph(world.state()).why("orders").reasons
    assert (reason.path, reason.time) == (("orders", "totals", "monthly"), 99)
    text = explain("orders", world.state())
    assert "The hold nightly-1/monthly of 'nightly' on monthly, at 99, for: month end" in text
    assert "its lease of 15m ends in" in text
    assert "To let go: holdfast hold release nightly-1/monthly" in text


def test_a_hold_that_nobody_will_ever_release_is_told_as_such(world: World) -> None:
    world.hold("orders")
    assert "it has no lease and stays until it is released" in explain("orders", world.state())


def test_a_lease_that_has_passed_is_told_as_such() -> None:
    world = World(now=1_000_000)
    world.create(orders=TABLE)
    world.hold("orders", lease="1m")
    assert "its lease ended" in explain("orders", world.state())


def test_a_late_writer_is_suspected(world: World) -> None:
    world.run("drop_collections", collections=["export"])
    world.run("upper", collection="orders", upper=900)
    text = explain("orders", world.state())
    assert "totals, whose policy keeps the latest complete time only: that is from 99 on" in text
    assert "Its upper is 100, 800 behind that of orders: is its writer late?" in text


def test_a_closed_dependent_is_told_as_such(world: World) -> None:
    world.run("drop_collections", collections=["export", "monthly"])
    world.run("upper", collection="totals", upper=None)
    world.run("upper", collection="orders", upper=900)
    assert "totals is closed, so that its upper moves no more" in explain("orders", world.state())


def test_several_reasons_at_the_same_time_are_all_told_and_the_next_one_too(world: World) -> None:
    world.hold("orders", "totals", holder="a")
    why = Graph(world.state()).why("orders")
    assert sorted((r.collection, r.hold is not None) for r in why.reasons) == [
        ("export", False),
        ("orders", True),
        ("totals", True),
    ]
    assert why.next_since == 90
    assert "It is held back by 2 holds and a dependent:" in explain("orders", world.state())


def test_what_asks_for_less_than_the_others_is_no_reason(world: World) -> None:
    world.hold("orders", at=50)
    assert paths(world, "orders") == [("orders", "totals", "monthly", "export")]


def test_long_lists_are_cut_unless_all_is_asked_for(world: World) -> None:
    for number in range(12):
        world.hold("orders", holder=f"reader {number}")
    assert "… and 3 more; --all shows them." in explain("orders", world.state())
    assert "13. export" in explain("orders", world.state(), everything=True)


def test_a_policy_that_asks_for_history_that_is_gone_is_explained() -> None:
    world = World()
    world.create(orders=TABLE)
    world.run("upper", collection="orders", upper=100)
    world.policy("orders", kind="step_back")
    world.policy("orders", kind="valid_from", frontier=7)
    text = explain("orders", world.state())
    assert "(The policy asks for history from 7 on, but a since never moves back.)" in text


def test_a_dropped_collection_is_kept_by_its_undrop_window() -> None:
    world = World()
    world.run("update_parameters", parameters={"undrop_window": "365d"})
    world.create(orders=TABLE)
    world.run("drop_collections", collections=["orders"])
    text = explain("orders", world.state())
    assert "orders was dropped, but its data is still kept from 5 on." in text
    assert "The undrop window of orders, which ends" in text
    assert "holdfast undrop orders" in text
    assert "nothing would keep its data any more" in text


def test_the_older_schema_of_a_table_holds_the_newer_one_back() -> None:
    world = World()
    world.create(orders=TABLE)
    world.run("alter_table_desc", existing="orders", new="orders_v2", schema="k STRING", expected_version=0)
    world.policy("orders_v2", kind="step_back")
    world.run("upper", collection="orders_v2", upper=100)
    text = explain("orders_v2", world.state())
    assert "orders reads the shard of orders_v2, its primary." in text
    assert "the shard orders-1, which orders_v2 owns" in explain("orders", world.state())


def test_tables_that_do_not_fit_together_are_told_as_such(world: World) -> None:
    world.hold("orders", at=7)
    dump = world.dump()
    row = next(row for row in dump["collections"] if row["id"] == "orders")
    row["read_frontier"] = 3
    state = World().state()
    torn = type(state)({r["id"]: r for r in dump["collections"]}, {}, {}, (), {})
    assert "run it again" in explain("orders", torn)


def test_json_says_the_same(world: World) -> None:
    state = world.state()
    answer = as_json(Graph(state).why("orders"), shard=state.shards["orders-1"])
    assert (answer["since"], answer["upper"], answer["implied_capability"], answer["policy_asks_for"]) == (
        5,
        100,
        90,
        90,
    )
    assert answer["reasons"] == [
        {
            "kind": "policy",
            "time": 5,
            "collection": "export",
            "path": ["orders", "totals", "monthly", "export"],
            "hold": None,
        }
    ]
    assert answer["without_them"]["since"] == 90


def test_the_short_reason_of_each_collection_is_one_of_its_reasons(world: World) -> None:
    world.hold("totals", holder="a")
    graph = Graph(world.state())
    for id in graph.collections:
        reason = graph.first_reason(id)
        assert reason in graph.why(id).reasons
    first = graph.first_reason("orders")
    assert first is not None
    assert short(first, graph.collections[first.collection], "orders") == "totals: hold of 'a'"


def test_the_reasons_always_give_the_since_through_many_dependents() -> None:
    world = World()
    world.create(
        root=TABLE, **{f"v{n}": view("root" if n < 2 else f"v{n - 2}", f"v{n - 1}" if n else "root") for n in range(40)}
    )
    world.hold("v39", holder="deep")
    graph = Graph(world.state())
    for id, row in graph.collections.items():
        assert graph.why(id).reasons[0].time == row["read_frontier"]


def test_an_unknown_collection_gets_a_suggestion_and_a_dropped_one_its_story(world: World) -> None:
    with pytest.raises(CollectionMissing, match="Did you mean orders"):
        find(world.state(), "ordres")
    world.run("drop_collections", collections=["export"])
    with pytest.raises(CollectionMissing, match="'export' was dropped and nobody holds it any more; its shard"):
        find(world.state(), "export")

"""The metrics are those of the documentation, bounded in number, and served over HTTP."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

from prometheus_client import generate_latest

from app.core.advancing import Observation
from app.core.descriptions import Description, Other, Table
from app.core.frontier import Frontier
from app.core.locations import Warehouse
from app.core.machine import Machine
from app.metrics import MOST_COLLECTIONS, Metrics, StateMetrics

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def machine(*descriptions: Description) -> Machine:
    made = Machine(warehouse=Warehouse(roots=["/warehouse"], reserved=[]))
    made.create_collections(0, descriptions, register_ts=1)
    return made


def metrics_of(made: Machine, *, now: int = 0) -> Metrics:
    metrics = Metrics()
    metrics.registry.register(StateMetrics(lambda question: question(made.state, now)))
    return metrics


def test_the_documentation_has_every_metric_and_no_other() -> None:
    metrics = metrics_of(machine())
    there = {
        f"{family.name}_total" if family.type == "counter" else family.name for family in metrics.registry.collect()
    }
    assert there == set(re.findall(r"^\| `(holdfast_\w+)`", PAGE.read_text(), re.MULTILINE))


def test_a_name_that_is_no_command_makes_no_series() -> None:
    metrics = Metrics()
    for name in ("create_collections", "nonsense", "more nonsense", None):
        metrics.command(name, None if name == "create_collections" else "UNKNOWN_COMMAND")
    counted = metrics.registry.get_sample_value
    labels = {"type": "unknown", "status": "error", "code": "UNKNOWN_COMMAND"}
    assert counted("holdfast_commands_total", labels) == 3
    assert counted("holdfast_commands_total", {"type": "create_collections", "status": "ok", "code": ""}) == 1


def test_lags_are_those_of_the_state() -> None:
    made = machine(
        Description(id="t", data_source=Table()),
        Description(id="v", data_source=Other(inputs=("t",))),
        Description(id="new", data_source=Table()),
        Description(id="count", data_source=Table(), timeline="a counter"),
    )
    seen = ("t", "v", "count")
    made.observe(5, [Observation(made.state.collections[id].shard, Frontier(10_000), 1) for id in seen])
    values = metrics_of(made, now=12_500).registry.get_sample_value
    assert values("holdfast_upper_lag_seconds", {"collection": "t"}) == 2.5
    assert values("holdfast_upper_lag_seconds", {"collection": "v"}) is None, "it follows its inputs, not the clock"
    assert values("holdfast_upper_lag_seconds", {"collection": "new"}) is None, "nothing was written yet"
    assert values("holdfast_history_seconds", {"collection": "t"}) == 9.999
    assert values("holdfast_history_seconds", {"collection": "count"}) is None, "its times are no milliseconds"
    assert values("holdfast_shards", {"state": "live"}) == 4
    made.acquire_read_holds(6, command_id="c", collections=["t"], at=None, holder="h")
    made.drop_collections(7, ["t", "v"])
    values = metrics_of(made, now=12_500).registry.get_sample_value
    assert values("holdfast_upper_lag_seconds", {"collection": "t"}) is None, "nobody need write to it any more"
    assert values("holdfast_history_seconds", {"collection": "t"}) == 9.999, "it is held, and keeps its history"


def test_the_state_is_counted() -> None:
    made = machine(Description(id="a", data_source=Table()), Description(id="b", data_source=Table()))
    made.acquire_read_holds(1, command_id="c", collections=["a"], at=None, holder="h")
    shard = made.state.collections["a"].shard
    made.work_ended(2, shard, "tend", "no space left")
    made.drop_collections(3, ["b"])
    values = metrics_of(made).registry.get_sample_value
    assert values("holdfast_shards_with_error") == 1
    assert values("holdfast_holds") == 1
    assert values("holdfast_tombstones") == 1
    assert values("holdfast_pending_downgrades") == len(made.state.pending_downgrades) > 0


def test_how_long_replies_take_is_measured_from_when_kafka_had_the_command() -> None:
    metrics = Metrics()
    metrics.replied([1_000, 1_900, 2_500], now_ms=2_000)
    value = metrics.registry.get_sample_value
    assert value("holdfast_reply_seconds_count") == 3
    assert value("holdfast_reply_seconds_sum") == 1.1, "a clock that is ahead is no time saved"


def test_the_number_of_series_is_bounded() -> None:
    number = MOST_COLLECTIONS + 5
    made = machine(*(Description(id=f"t{each:05}", data_source=Table()) for each in range(number)))
    made.observe(5, [Observation(shard, Frontier(10), 1) for shard in made.state.shards])
    metrics = metrics_of(made)
    (lags,) = [each for each in metrics.registry.collect() if each.name == "holdfast_history_seconds"]
    assert len(lags.samples) == MOST_COLLECTIONS
    assert metrics.registry.get_sample_value("holdfast_collections_without_series") == 5


def test_they_are_served_on_this_machine() -> None:
    metrics = metrics_of(machine(Description(id="t", data_source=Table())))
    metrics.progress("commands", {"numInputRows": 3, "durationMs": {"addBatch": 17}, "sources": []})
    with metrics.serving(0) as port, urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read()
    assert b'holdfast_collections{state="live"} 1.0' in text
    assert b'holdfast_query_progress{query="commands",what="addBatch"} 17.0' in text
    assert text == generate_latest(metrics.registry)

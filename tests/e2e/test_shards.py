"""Data in Delta tables moves the frontiers, and what nobody may need goes: from the writer to the empty warehouse."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable
from prometheus_client import generate_latest

from app.broker import EmbeddedBroker
from app.job import Job
from app.operations import ShardOperations
from app.shards.errors import Sealed, ShardMissing
from app.writer import Writer
from tests.e2e.harness import LIMIT_S, Running, by, config_under, table, wait_until
from tests.e2e.lake import QUICK, REGISTERED, Lake, data_files
from tests.e2e.ticks import committed_at, journalled_at, ticks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LAGS = {"t1": 10, "t2": 5, "t3": 1, "t4": 15, "t5": 20}
COLLECTIONS = list(LAGS)


@pytest.fixture
def lake(spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path) -> Iterator[Lake]:
    with Running(config_under(tmp_path, broker.bootstrap_servers), spark) as running:
        lake = Lake(running, running.config, spark)
        lake.command("update_parameters", parameters=QUICK)
        yield lake


def test_five_collections_from_their_first_row_to_the_empty_warehouse(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    config = config_under(tmp_path, broker.bootstrap_servers, watch_interval_ms=1_000)  # as users have it
    with ticks(spark) as counted, Running(config, spark) as running:
        lake = Lake(running, config, spark)
        lake.command("update_parameters", parameters=QUICK)
        lake.create(*COLLECTIONS)
        for id, lag in LAGS.items():
            policy = {"kind": "lag_writes_by", "lag": lag, "granularity": 1}
            lake.command("set_read_policies", policies=[{"collection": id, "policy": policy}])
        for (id, since), version in write_and_hold(lake).items():
            committed = committed_at(lake.shards()[id]["location"], version)
            journalled = journalled_at(config, id, since)
            assert counted.between(committed, journalled) <= 2, f"ticks until the since of {id} was {since}"
        wait_until(lambda: lake.merges("t1") >= 1, "history is merged", 2 * LIMIT_S)
        wait_until(lambda: lake.shards()["t1"]["merged_to"], "its row says so")
        merged = lake.shards()["t1"]
        assert merged["merged_to"] <= merged["since"]
        assert merged["merged_bytes_before"] > 0
        for id in COLLECTIONS:
            assert lake.content(id) == +lake.written[id]
        drop_all(lake)
        check_metrics(running)


def write_and_hold(lake: Lake) -> dict[tuple[str, int], int]:
    """Writers on five collections at once, holds that come and go: sinces follow, and none passes a hold.

    The version after which each since was due that nothing but its policy held back.
    """
    versions: dict[tuple[str, int], int] = {}
    held: dict[str, int] = {}
    dying: set[str] = set()

    def followed(expected: dict[str, int]) -> bool:
        sinces = lake.sinces()
        assert all(sinces[id] <= since for id, since in held.items()), "a since passed a hold"
        return sinces == expected

    def write(upper: int, id: str) -> None:
        before = upper - 20
        updates = [(before + 1, 1, f"{id}-{upper}", upper), (before + 5, 1, "again", 1)]
        if upper > 20:
            updates.append((before + 7, -1, f"{id}-{before}", before))
        version = lake.write(id, upper, *updates)
        if id not in held.keys() | dying:
            versions[(id, max(REGISTERED, upper - LAGS[id]))] = version

    for upper in (20, 40, 60, 80):
        with ThreadPoolExecutor(len(COLLECTIONS)) as writers:
            list(writers.map(partial(write, upper), COLLECTIONS))
        expected = {id: max(REGISTERED, min(upper - lag, held.get(id, upper))) for id, lag in LAGS.items()}
        wait_until(partial(followed, expected), f"sinces follow to {expected}", 2 * LIMIT_S)
        lake.check_sinces(*COLLECTIONS)
        if upper == 20:
            lake.command("acquire_read_holds", collections=["t2", "t4"], holder="reader", id="hold")
            held |= {"t2": 20 - LAGS["t2"], "t4": 20 - LAGS["t4"]}
        if upper == 40:
            lake.command("downgrade_read_holds", holds=[{"hold": "hold/t2", "to": 30}])
            held["t2"] = 30
        if upper == 60:
            lake.command("release_read_holds", holds=["hold/t4"])
            held.pop("t4")
            # One that nobody renews: it holds for a while, and then no more.
            lake.command("acquire_read_holds", collections=["t5"], holder="dies", id="dying", lease="1s")
            dying.add("t5")
    assert by("owner", table(lake.config, "shards"))["t2"]["since"] <= 30
    return versions


def drop_all(lake: Lake) -> None:
    lake.command("drop_collections", collections=COLLECTIONS)
    others = [id for id in COLLECTIONS if id != "t2"]
    wait_until(
        lambda: all(lake.shards()[id]["state"] == "finalized" for id in others), "all but one are gone", 2 * LIMIT_S
    )
    location = lake.shards()["t2"]["location"]
    assert all(file.startswith(location) for file in data_files(lake.config))
    assert lake.content("t2") == +lake.written["t2"], "held, so its data is there"
    lake.command("release_read_holds", holds=["hold/t2"])
    wait_until(lambda: not data_files(lake.config), "no data file is left", 2 * LIMIT_S)
    wait_until(lambda: lake.shards()["t2"]["state"] == "finalized", "the last one is finalized")

    lake.command("update_parameters", parameters={"max_command_age": "1s", "tombstone_retention": "2s"})
    wait_until(lambda: all(row["purged_at"] for row in lake.shards().values()), "all are purged", 2 * LIMIT_S)
    assert list(Path(lake.config.warehouse[0]).iterdir()) == []
    wait_until(
        lambda: not [row for row in table(lake.config, "meta") if row["entity"] == "tombstone"], "no tombstone is left"
    )


def check_metrics(running: Running) -> None:
    """All of the above was counted."""
    registry = running.controller.metrics.registry

    def value(name: str, **labels: str) -> float:
        found = registry.get_sample_value(name, labels)
        assert found is not None, f"{name} {labels}"
        return found

    wait_until(lambda: not value("holdfast_work_running", kind="purge"), "no work is under way")
    for kind in ("create", "finalize", "purge"):
        assert value("holdfast_work_total", kind=kind, outcome="started") >= len(COLLECTIONS)
        assert value("holdfast_work_total", kind=kind, outcome="succeeded") == len(COLLECTIONS)
    assert value("holdfast_merges_total") >= 1
    assert value("holdfast_merged_bytes_before_total") > 0
    assert value("holdfast_merged_bytes_after_total") > 0
    for why in ("dead", "finalized"):
        assert value("holdfast_deleted_files_total", why=why) > 0
        assert value("holdfast_deleted_bytes_total", why=why) > 0
    assert value("holdfast_leases_expired_total") == 1
    assert value("holdfast_commands_total", type="drop_collections", status="ok", code="") == 1
    assert value("holdfast_entries_total", origin="frontiers") >= 4
    assert value("holdfast_reply_seconds_count") > 0
    assert value("holdfast_entry_seconds_count") >= value("holdfast_entries_total", origin="commands")
    for query in ("commands", "frontiers"):
        batches = value("holdfast_batches_total", query=query)
        assert value("holdfast_batch_seconds_bucket", query=query, le="+Inf") == batches > 4
        assert value("holdfast_query_progress", query=query, what="triggerExecution") >= 0  # 0 if it found nothing
    assert value("holdfast_shards", state="finalized") == len(COLLECTIONS)
    assert (value("holdfast_collections", state="dropped"), value("holdfast_holds")) == (0, 0)
    assert b"holdfast_batch_seconds_bucket" in generate_latest(registry)


@pytest.mark.parametrize("sharing", ["altered", "primary"])
def test_a_shared_shard_is_not_touched_when_the_collection_that_does_not_own_it_is_dropped(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path, sharing: str
) -> None:
    config = config_under(tmp_path, broker.bootstrap_servers)
    with Running(config, spark) as running:
        lake = Lake(running, config, spark)
        lake.create("a")
        lake.write("a", 10, (1, 1, "x", 1))
        lake.write("a", 20, (11, 1, "y", 2))
        owner, other = share(lake, sharing)
        lake.command("drop_collections", collections=[other])
        before = everything_at(lake.shards()[owner]["location"])
        rounds(lake)
        assert everything_at(lake.shards()[owner]["location"]) == before
    with Running(config, spark) as running:  # also after a restart
        lake.client = running
        rounds(lake)
        shard = lake.shards()[owner]
        assert shard["state"] == "live"
        assert everything_at(shard["location"]) == before
        writer = Writer(spark, owner, root=config.root)
        row = f"SELECT 'z' AS k, 2L AS v{', 3 AS w' if sharing == 'altered' else ''}"
        writer.append(spark.sql(row))
        lake.command("drop_collections", collections=[owner])
        wait_until(lambda: not data_files(config), "now it may go", 2 * LIMIT_S)
        # Who still has the table open is told that it is closed, and brings nothing back.
        with pytest.raises(Sealed):
            writer.append(spark.sql(row))
        lake.command("update_parameters", parameters={"max_command_age": "1s", "tombstone_retention": "2s"})
        wait_until(lambda: lake.shards()[owner]["purged_at"], "it is purged", 2 * LIMIT_S)
        with pytest.raises(ShardMissing):
            writer.append(spark.sql(row))
        assert not Path(shard["location"]).exists()


def share(lake: Lake, how: str) -> tuple[str, str]:
    """Another collection on the shard of `a`. Who owns it, and who does not."""
    if how == "primary":
        view = {"id": "b", "data_source": {"kind": "other"}, "schema": "k STRING", "primary": "a"}
        lake.command("create_collections", collections=[view])
        wait_until(lambda: "b" in lake.sinces(), "the tables have it")
        return "a", "b"
    lake.command("alter_table_desc", existing="a", new="a2", schema="k STRING, v BIGINT, w INT", expected_version=0)
    wait_until(lambda: "a2" in lake.shards(), "the tables have the new owner")
    location = lake.shards()["a2"]["location"]
    wait_until(lambda: "w" in DeltaTable(location).schema().to_json(), "the table has the new column", 2 * LIMIT_S)
    return "a2", "a"


def rounds(lake: Lake) -> None:
    """Finalization gets to a collection that is created and dropped now, so it had its chance with all others."""
    id = f"marker{lake.command('reconcile', collections=[])['seq']}"
    lake.create(id)
    lake.command("drop_collections", collections=[id])
    wait_until(lambda: lake.shards()[id]["state"] == "finalized", "a round of finalization has passed", 2 * LIMIT_S)


def everything_at(location: str) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in Path(location).rglob("*") if file.is_file()}


def test_one_stuck_finalization_does_not_stop_the_others(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    finalize, stuck, go_on = ShardOperations.finalize, threading.Event(), threading.Event()

    def held_up(operations: ShardOperations, job: Job) -> None:
        if job.shard.owner == "t1":
            stuck.set()
            go_on.wait()
        finalize(operations, job)

    monkeypatch.setattr(ShardOperations, "finalize", held_up)
    lake.create("t1", "t2", "t3")
    for id in ("t1", "t2", "t3"):
        lake.write(id, 10, (1, 1, "x", 1))
    try:
        lake.command("drop_collections", collections=["t1"])
        wait_until(stuck.is_set, "one is stuck", 2 * LIMIT_S)
        lake.command("drop_collections", collections=["t2", "t3"])
        location = lake.shards()["t1"]["location"]
        wait_until(lambda: all(lake.shards()[id]["state"] == "finalized" for id in ("t2", "t3")), "the others are gone")
        assert {str(Path(file).parent) for file in data_files(lake.config)} == {location}
    finally:
        go_on.set()
    wait_until(lambda: not data_files(lake.config), "it is not forgotten", 2 * LIMIT_S)


def test_a_shard_that_was_seen_and_is_gone_is_reported_and_not_made_anew(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    config = config_under(tmp_path, broker.bootstrap_servers)
    with Running(config, spark) as running:
        lake = Lake(running, config, spark)
        lake.create("a", "b")
        lake.write("a", 10, (1, 1, "x", 1))
        wait_until(lambda: lake.shards()["a"]["upper"] == 10, "it is seen")
        location = Path(lake.shards()["a"]["location"])
    away = location.rename(tmp_path / "away")
    with Running(config, spark) as running:
        lake.client = running

        def error() -> str:
            return lake.shards()["a"]["last_error"] or ""

        def with_errors() -> float | None:
            return running.controller.metrics.registry.get_sample_value("holdfast_shards_with_error")

        wait_until(lambda: error().startswith("watch: "), "it is said in its row", 2 * LIMIT_S)
        assert "is gone" in error()
        assert with_errors() == 1
        rounds(lake)
        assert not location.exists(), "whoever has it may bring it back"
        away.rename(location)
        wait_until(lambda: not error(), "it is well again", 2 * LIMIT_S)
        assert with_errors() == 0
        lake.write("a", 20, (11, 1, "y", 2))
        assert lake.content("a") == +lake.written["a"]


def test_members_of_a_transaction_log_follow_it(lake: Lake) -> None:
    """One commit to the log moves the uppers of all, and so their sinces."""
    lake.create("log")
    members = [
        {"id": id, "data_source": {"kind": "table", "txns": "log"}, "schema": "k STRING, v BIGINT"}
        for id in ("m1", "m2")
    ]
    seq = lake.command("create_collections", register_ts=1, collections=members)["seq"]
    policy = {"kind": "lag_writes_by", "lag": 3, "granularity": 1}
    lake.command("set_read_policies", policies=[{"collection": id, "policy": policy} for id in ("m1", "m2")])
    writer = Writer(lake.spark, "m1", root=lake.config.root, at_least=seq)
    writer.compare_and_append(lake.rows((4, 1, "a", 1)), writer.upper, 5)
    lake.write("log", 20)

    def uppers() -> dict[str, Any]:
        rows = by("id", table(lake.config, "collections"))
        return {id: (rows[id]["write_frontier"], rows[id]["read_frontier"]) for id in ("m1", "m2")}

    wait_until(lambda: uppers() == {"m1": (20, 17), "m2": (20, 17)}, "both have followed the log")
    assert writer.upper == 20
    lake.command("drop_collections", collections=["log", "m1"])
    wait_until(lambda: lake.shards()["m1"]["state"] == "finalized", "a member is gone", 2 * LIMIT_S)
    assert lake.shards()["log"]["state"] == "dropped", "the log lives on beneath the last member"
    lake.command("drop_collections", collections=["m2"])
    wait_until(lambda: lake.shards()["log"]["state"] == "finalized", "and goes with it", 2 * LIMIT_S)
    assert not data_files(lake.config)


def test_a_drop_is_undone_within_its_window_and_takes_effect_after_it(lake: Lake) -> None:
    lake.command("update_parameters", parameters={"undrop_window": "1h"})
    lake.create("t1")
    lake.write("t1", 10, (1, 1, "x", 1))
    wait_until(lambda: lake.shards()["t1"]["upper"] == 10, "its upper was seen")
    lake.command("drop_collections", collections=["t1"])
    rounds_with_no_window(lake)
    assert (lake.shards()["t1"]["state"], lake.content("t1")) == ("dropped", +lake.written["t1"])
    lake.command("undrop_collections", collections=["t1"])
    lake.write("t1", 20, (11, 1, "y", 2))
    assert lake.content("t1") == +lake.written["t1"]
    lake.command("update_parameters", parameters={"undrop_window": "2s"})
    lake.command("drop_collections", collections=["t1"])
    wait_until(lambda: not data_files(lake.config), "after its window it goes", 2 * LIMIT_S)
    wait_until(lambda: lake.shards()["t1"]["state"] == "finalized", "that is said in its row")
    shard = lake.shards()["t1"]
    assert shard["finalized_at"] - shard["dropped_at"] >= timedelta(seconds=2)


def rounds_with_no_window(lake: Lake) -> None:
    lake.command("update_parameters", parameters={"undrop_window": 0})
    rounds(lake)

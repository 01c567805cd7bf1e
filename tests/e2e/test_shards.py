"""Data in Delta tables moves the frontiers, and what nobody may need goes: from the writer to the empty warehouse."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from app.broker import EmbeddedBroker
from app.writer import Writer
from tests.e2e.harness import LIMIT_S, Running, by, config_under, table, wait_until
from tests.e2e.lake import QUICK, Lake, data_files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COLLECTIONS = [f"t{number}" for number in range(1, 6)]
LAG = 10


@pytest.fixture
def lake(spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path) -> Any:
    with Running(config_under(tmp_path, broker.bootstrap_servers), spark) as running:
        yield Lake(running, running.config, spark)


def test_five_collections_from_their_first_row_to_the_empty_warehouse(lake: Lake) -> None:
    lake.command("update_parameters", parameters=QUICK)
    lake.create(*COLLECTIONS)
    policy = {"kind": "lag_writes_by", "lag": LAG, "granularity": 1}
    lake.command("set_read_policies", policies=[{"collection": id, "policy": policy} for id in COLLECTIONS])

    held: dict[str, int] = {}

    def followed(expected: dict[str, int]) -> bool:
        sinces = lake.sinces()
        assert all(sinces[id] <= since for id, since in held.items()), "a since passed a hold"
        return sinces == expected

    for upper in (20, 40, 60, 80):
        for number, id in enumerate(COLLECTIONS):
            before = upper - 20
            updates = [(before + 1, 1, f"{id}-{upper}", number), (before + 5, 1, "again", 1)]
            if upper > 20:
                updates.append((before + 7, -1, f"{id}-{before}", number))
            lake.write(id, upper, *updates)
        expected = {id: min(upper - LAG, held.get(id, upper)) for id in COLLECTIONS}

        wait_until(partial(followed, expected), f"sinces follow to {expected}", 2 * LIMIT_S)
        if upper == 20:
            lake.command("acquire_read_holds", collections=["t2", "t4"], holder="reader", id="hold")
            held.update(dict.fromkeys(("t2", "t4"), 20 - LAG))
        if upper == 60:
            lake.command("release_read_holds", holds=["hold/t4"])
            held.pop("t4")

    wait_until(lambda: lake.merges("t1") >= 1, "history is merged", 2 * LIMIT_S)
    for id in COLLECTIONS:
        assert lake.content(id) == +lake.written[id]
    assert by("owner", table(lake.config, "shards"))["t2"]["since"] == 20 - LAG

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


def test_a_shared_shard_stays_when_the_collection_that_does_not_own_it_is_dropped(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    config = config_under(tmp_path, broker.bootstrap_servers)
    with Running(config, spark) as running:
        lake = Lake(running, config, spark)
        lake.command("update_parameters", parameters=QUICK)
        lake.create("a")
        lake.write("a", 10, (1, 1, "x", 1))
        lake.command("alter_table_desc", existing="a", new="a2", schema="k STRING, v BIGINT, w INT", expected_version=0)
        wait_until(lambda: "a2" in lake.shards(), "the tables have the new owner")
        location = lake.shards()["a2"]["location"]
        wait_until(lambda: "w" in DeltaTable(location).schema().to_json(), "the table has the new column", 2 * LIMIT_S)
        lake.command("drop_collections", collections=["a"])
    with Running(config, spark) as running:  # also after a restart
        lake.client = running
        heartbeats = running.heartbeats
        wait_until(lambda: running.heartbeats > heartbeats + 12, "a round of finalization has passed")
        assert lake.shards()["a2"]["state"] == "live"
        assert data_files(config)
        Writer(spark, "a2", root=config.root).append(spark.sql("SELECT 'y' AS k, 2L AS v, 3 AS w"))
        lake.command("drop_collections", collections=["a2"])
        wait_until(lambda: not data_files(config), "now it may go", 2 * LIMIT_S)

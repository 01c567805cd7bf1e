"""Whatever a command says, nothing outside of the warehouse is deleted, and nothing in it that is not the shard's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from app.broker import EmbeddedBroker
from app.shards.lock import NAME as LOCK
from tests.e2e.harness import LIMIT_S, Running, config_under, wait_until
from tests.e2e.lake import QUICK, Lake
from tests.e2e.test_shards import everything_at, rounds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def lake(spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path) -> Iterator[Lake]:
    with Running(config_under(tmp_path, broker.bootstrap_servers), spark) as running:
        lake = Lake(running, running.config, spark)
        lake.command("update_parameters", parameters={**QUICK, "max_command_age": "1s", "tombstone_retention": "2s"})
        yield lake


def delta_table(spark: SparkSession, place: Path) -> Path:
    """A changelog of somebody else's, which nothing but its place tells from a shard."""
    frame = spark.sql("SELECT 1L AS _time, 1L AS _diff, 'theirs' AS k, 1L AS v")
    frame.coalesce(1).write.format("delta").save(str(place))
    return place


def test_no_command_and_no_link_leads_out_of_the_warehouse(lake: Lake, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    delta_table(lake.spark, outside / "theirs")
    warehouse = Path(lake.config.warehouse[0])
    warehouse.mkdir(exist_ok=True)
    (warehouse / "link").symlink_to(outside)
    before = everything_at(str(outside))
    assert len(before) > 1

    hostile = [
        str(outside / "theirs"), f"{warehouse}/../outside/theirs", f"{warehouse}/link/theirs", f"{warehouse}/link",
        str(warehouse), f"{warehouse}/.", f"{warehouse}/x/..", lake.config.root, f"file://{outside}/theirs", "/", "",
        f"{warehouse}/%2e%2e/../../outside/theirs", "s3://bucket/theirs", "~", "\0",
    ]  # fmt: skip
    for number, location in enumerate(hostile):
        collection = {"id": f"h{number}", "data_source": {"kind": "table"}, "schema": "k STRING, v BIGINT"}
        (reply,) = lake.client.ask(
            {
                "type": "create_collections",
                "id": f"hostile{number}",
                "register_ts": 1,
                "collections": [{**collection, "shard": {"location": location, "format": "updates"}}],
            }
        )
        assert reply["status"] == "error", location
        assert reply["error"]["code"] in ("OUTSIDE_WAREHOUSE", "INVALID_ARGUMENT"), reply
    lake.command("drop_collections", collections=[f"h{number}" for number in range(len(hostile))])

    # A shard whose directory is replaced by a link when it is too late for any check of a command.
    lake.create("a", "b")
    lake.write("a", 10, (1, 1, "x", 1))
    lake.write("b", 10, (1, 1, "x", 1))
    location = Path(lake.shards()["a"]["location"])
    moved = location.rename(tmp_path / "moved")
    location.symlink_to(moved)
    kept = everything_at(str(moved))
    lake.command("drop_collections", collections=["a", "b"])
    wait_until(lambda: lake.shards()["b"]["state"] == "finalized", "one that is where it was is gone", 2 * LIMIT_S)
    wait_until(lambda: lake.shards()["a"]["last_error"], "what is wrong with the other one is said", 2 * LIMIT_S)
    rounds(lake)
    assert {name: data for name, data in everything_at(str(moved)).items() if name in kept and ".json" in name} == {
        name: data for name, data in kept.items() if ".json" in name
    }
    assert {name for name in kept if name.endswith(".parquet")} <= everything_at(str(moved)).keys()
    assert everything_at(str(outside)) == before


def test_other_tables_below_and_at_the_place_of_a_shard_are_left_alone(lake: Lake) -> None:
    lake.create("inner", "replaced")
    for id in ("inner", "replaced"):
        lake.write(id, 10, (1, 1, "x", 1))
    inner, replaced = (Path(lake.shards()[id]["location"]) for id in ("inner", "replaced"))
    below = delta_table(lake.spark, inner / "below")
    shutil.rmtree(replaced)
    delta_table(lake.spark, replaced)
    before: dict[Path, Any] = {place: everything_at(str(place)) for place in (below, replaced)}
    lake.command("drop_collections", collections=["inner", "replaced"])
    wait_until(lambda: lake.shards()["inner"]["purged_at"], "all of the shard is gone", 2 * LIMIT_S)
    # Whoever looked while there was none has said that it is missing: that is not the last word.
    wait_until(
        lambda: "it is not this shard" in (lake.shards()["replaced"]["last_error"] or ""),
        "it is said that there is another table",
        2 * LIMIT_S,
    )
    rounds(lake)
    for place, files in before.items():
        found = everything_at(str(place))
        found.pop(str(replaced / LOCK), None)  # empty, and made before anyone can look whose table it is
        assert found == files
    assert not list(inner.glob("*.parquet"))
    assert not (inner / "_delta_log").exists()

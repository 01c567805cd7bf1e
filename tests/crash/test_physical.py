"""Controllers that are killed, or frozen and replaced, in the middle of their work on a shard, one after the other."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from deltalake import DeltaTable

from app.broker import EmbeddedBroker
from app.service import EXIT_FENCED
from tests.e2e.harness import LIMIT_S, Client, Process, config_under, wait_until
from tests.e2e.lake import QUICK, Lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

READY = "Holdfast is running"


def test_no_controller_that_ends_in_the_middle_of_its_work_does_harm(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Frozen before a merge is committed, before dead files are deleted, and before a dropped shard's are.

    Each is replaced, and woken when those after it have gone on.
    """
    config = msgspec.structs.replace(config_under(tmp_path, broker.bootstrap_servers), parameters=QUICK)
    lake = Lake(Client(config), config, spark)
    with ExitStack() as stack:

        def start(name: str, fail_point: str | None) -> Process:
            """The next one, which takes over from those before it."""
            process = stack.enter_context(Process(config, tmp_path / name, fail_point=fail_point))
            process.wait_for_output(READY, 4 * LIMIT_S)
            return process

        merging = start("merging", "merging:stop")
        lake.create("a", "neighbour")
        lake.write("neighbour", 10, (1, 1, "n", 1))
        lake.command("set_read_policies", policies=[{"collection": "a", "policy": {"kind": "step_back"}}])
        for upper in (10, 20, 30):
            lake.write("a", upper, (upper - 5, 1, f"k{upper}", 1), (upper - 4, 1, "same", 1))
        merging.wait_for_output("fail point merging", 4 * LIMIT_S)
        merged_before = lake.merges("a")
        lake.write("a", 40, (31, -1, "k10", 1))

        cleaning = start("cleaning", "cleaning:stop")
        wait_until(lambda: lake.merges("a") > merged_before, "the next one merges", 4 * LIMIT_S)
        cleaning.wait_for_output("fail point cleaning", 4 * LIMIT_S)
        merged_before = lake.merges("a")
        there = {file.name for file in Path(lake.shards()["a"]["location"]).glob("*.parquet")}
        assert there - set(lake.named_files("a")), "what the first one has written, and is about to commit"
        wake(merging)
        assert lake.merges("a") == merged_before, "it came too late"
        assert lake.content("a") == +lake.written["a"]

        finalizing = start("finalizing", "finalizing:stop")
        # A reader that comes while the clean-up is frozen pins what it needs, and that is then merged.
        lake.command("acquire_read_holds", id="h", collections=["a"], at=45, holder="r", lease="1h", pin_files=True)
        needed, merged_before = live_files(lake), lake.merges("a")
        lake.write("a", 50, (41, 1, "last", 1))
        wait_until(lambda: lake.merges("a") > merged_before, "what the reader needs is merged", 4 * LIMIT_S)
        assert not needed & live_files(lake)
        wake(cleaning)
        assert lake.content("a") == +lake.written["a"]
        assert all(Path(file).exists() for file in needed)
        lake.command("release_read_holds", holds=["h/a"])
        lake.command("drop_collections", collections=["a"])
        finalizing.wait_for_output("fail point finalizing", 4 * LIMIT_S)
        assert lake.named_files("a"), "sealed, but nothing is deleted yet"

        last = start("last", None)
        wait_until(lambda: lake.shards()["a"]["state"] == "finalized", "the last one finalizes", 4 * LIMIT_S)
        assert not lake.named_files("a")
        location = Path(lake.shards()["a"]["location"])
        lake.command("update_parameters", parameters={"max_command_age": "1s", "tombstone_retention": "2s"})
        wait_until(lambda: lake.shards()["a"]["purged_at"], "and purges", 4 * LIMIT_S)
        wake(finalizing)
        assert not location.exists(), "nothing of it is made anew"
        assert lake.shards()["a"]["state"] == "finalized"
        assert lake.content("neighbour") == +lake.written["neighbour"]
        last.signal(signal.SIGTERM)
        assert last.wait_for_exit() == 0, last.output
    lake.client.close()


def live_files(lake: Lake) -> set[str]:
    return set(DeltaTable(lake.shards()["a"]["location"]).file_uris())


def wake(process: Process) -> None:
    """It goes on where it stopped, long after it was replaced, and halts."""
    process.signal(signal.SIGCONT)
    assert process.wait_for_exit(4 * LIMIT_S) == EXIT_FENCED, process.output

"""Controllers that are killed, or frozen and replaced, in the middle of their work on a shard, one after the other."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from app.broker import EmbeddedBroker
from app.service import EXIT_FENCED
from tests.e2e.harness import LIMIT_S, Client, Process, config_under, wait_until
from tests.e2e.lake import QUICK, Lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

READY = "Holdfast is running"


@pytest.mark.parametrize("fate", ["killed", "frozen"])
def test_no_controller_that_ends_in_the_middle_of_its_work_does_harm(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path, fate: str
) -> None:
    """Before a merge is committed, before dead files are deleted, before the files of a dropped shard are."""
    config = msgspec.structs.replace(config_under(tmp_path, broker.bootstrap_servers), parameters=QUICK)
    lake = Lake(Client(config), config, spark)
    with ExitStack() as stack:
        frozen: list[Process] = []

        def start(fail_point: str) -> Process:
            """The next one, in which something will happen at that point; it takes over from those before it."""
            spec = fail_point + (":stop" if fate == "frozen" and fail_point else "")
            name = fail_point or "last"
            process = stack.enter_context(Process(config, tmp_path / name, fail_point=spec or None))
            process.wait_for_output(READY, 4 * LIMIT_S)
            return process

        def ends_at(process: Process, fail_point: str) -> None:
            wait_until(lambda: f"fail point {fail_point}" in process.output, fail_point, 4 * LIMIT_S)
            if fate == "killed":
                assert process.wait_for_exit() == -signal.SIGKILL, process.output
            else:
                frozen.append(process)

        def wake() -> None:
            """Whoever is frozen goes on where it stopped, long after it was replaced."""
            for process in frozen:
                process.signal(signal.SIGCONT)
                assert process.wait_for_exit(4 * LIMIT_S) == EXIT_FENCED, process.output
            frozen.clear()

        process = start("merging")
        lake.create("a")
        lake.command("set_read_policies", policies=[{"collection": "a", "policy": {"kind": "step_back"}}])
        for upper in (10, 20, 30):
            lake.write("a", upper, (upper - 5, 1, f"k{upper}", 1), (upper - 4, 1, "same", 1))
        ends_at(process, "merging")
        merged_before = lake.merges("a")
        lake.write("a", 40, (31, -1, "k10", 1))

        process = start("cleaning")
        wait_until(lambda: lake.merges("a") > merged_before, "the next one merges", 4 * LIMIT_S)
        ends_at(process, "cleaning")
        wake()
        assert lake.content("a") == +lake.written["a"]

        process = start("finalizing")
        lake.write("a", 50, (41, 1, "last", 1))
        wake()
        assert lake.content("a") == +lake.written["a"]
        lake.command("drop_collections", collections=["a"])
        ends_at(process, "finalizing")
        assert lake.named_files("a"), "sealed, but nothing is deleted yet"

        process = start("")
        wait_until(lambda: lake.shards()["a"]["state"] == "finalized", "the last one finalizes", 4 * LIMIT_S)
        assert not lake.named_files("a")
        wake()
        assert not lake.named_files("a")
        process.signal(signal.SIGTERM)
        assert process.wait_for_exit() == 0, process.output
    lake.client.close()

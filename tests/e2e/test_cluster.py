"""On a real standalone cluster: one master, two workers, executors in processes of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from app.broker import EmbeddedBroker
from app.config import StreamsConfig
from app.jars import spark_home
from app.java import java_home
from tests.e2e.harness import LIMIT_S, Client, Process, Running, config_under, wait_until
from tests.e2e.lake import QUICK, Lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER = re.compile(r"spark://127\.0\.0\.1:\d+")
REGISTERED = "Successfully registered with master"
# Small executors on a small machine, and no more tasks than there is work.
SPARK: dict[str, str | int | float | bool] = {
    "spark.executor.memory": "700m",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.driver.host": "127.0.0.1",
}


class Daemon:
    """A master or a worker; it ends with the test."""

    def __init__(self, directory: Path, kind: str, *arguments: str) -> None:
        directory.mkdir(parents=True)
        self._output = directory / "output.txt"
        environment = os.environ | {
            "JAVA_HOME": str(java_home()),
            "SPARK_HOME": str(spark_home()),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
        }
        command = [f"{spark_home()}/bin/spark-class", f"org.apache.spark.deploy.{kind}", "--host", "127.0.0.1"]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, "--webui-port", "0", *arguments],
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def cluster(directory: Path) -> Iterator[tuple[str, list[Path]]]:
    """The address of the master, and the directories in which the workers keep their executors."""
    daemons = [Daemon(directory / "master", "master.Master", "--port", "0")]
    try:
        wait_until(lambda: MASTER.search(daemons[0].output), "the master is there", 2 * LIMIT_S)
        found = MASTER.search(daemons[0].output)
        assert found is not None
        work = [directory / f"worker{number}" / "work" for number in (1, 2)]
        for place in work:
            limits = ("--cores", "1", "--memory", "1g", "--work-dir", str(place))
            daemons.append(Daemon(place.parent, "worker.Worker", *limits, found[0]))
        wait_until(lambda: all(REGISTERED in each.output for each in daemons[1:]), "the workers are there", 2 * LIMIT_S)
        yield found[0], work
    finally:
        for daemon in daemons:
            daemon.stop()


@pytest.mark.slow
def test_both_queries_and_a_merge_on_a_cluster_whose_executors_watch_the_shards(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    config = config_under(tmp_path, broker.bootstrap_servers)
    streams = StreamsConfig(
        checkpoints=config.streams.checkpoints, heartbeat=config.streams.heartbeat, distribute_watching_above=1
    )
    config = msgspec.structs.replace(config, streams=streams, parameters=QUICK, spark=SPARK)
    with Running(config, spark) as running:
        # With more shards than one at its start, the next controller lets the executors look.
        Lake(running, config, spark).create("first", "second")
    lake = Lake(Client(config), config, spark)
    lake.prefix = "d"
    with (
        cluster(tmp_path / "cluster") as (master, work),
        Process(config, tmp_path / "controller", variables={"MASTER": master}) as process,
    ):
        process.wait_for_output("Holdfast is running", 4 * LIMIT_S)
        lake.create("a")
        lake.command("set_read_policies", policies=[{"collection": "a", "policy": {"kind": "step_back"}}])
        for upper in (10, 20, 30):
            lake.write("a", upper, (upper - 5, 1, f"k{upper}", 1), (upper - 4, 1, "same", 1))
        wait_until(lambda: lake.sinces()["a"] == 29, "the since has followed", 4 * LIMIT_S)
        wait_until(lambda: lake.merges("a") >= 1, "the executors have merged", 4 * LIMIT_S)
        assert lake.content("a") == +lake.written["a"]
        executors = [list(place.glob("app-*/*/stderr")) for place in work]
        assert all(executors), "both workers have had an executor"
        process.signal(signal.SIGTERM)
        assert process.wait_for_exit() == 0, process.output
    lake.client.close()

"""On a real standalone cluster: one master, two workers, executors in processes of their own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.broker import EmbeddedBroker
from app.config import MetricsConfig, StreamsConfig
from app.jars import spark_home, spark_jars
from app.java import QUICK_START, java_home
from app.service import EXIT_FENCED
from tests.e2e.harness import LIMIT_S, REPOSITORY, Client, Process, Running, config_under, wait_until
from tests.e2e.lake import QUICK, Lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER = re.compile(r"spark://127\.0\.0\.1:\d+")
REGISTERED = "Successfully registered with master"
# Small executors on a small machine, and no more tasks than there is work.
SPARK: dict[str, str | int | float | bool] = {
    "spark.executor.memory": "700m",
    "spark.executor.extraJavaOptions": " ".join(QUICK_START),
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
            "SPARK_DAEMON_JAVA_OPTS": " ".join(QUICK_START),
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


def scraped(process: Process) -> dict[str, float]:
    """The metrics that a controller serves, as Prometheus gets them; those of one name together."""
    port = re.search(r"http://127\.0\.0\.1:(\d+)/metrics", process.output)
    assert port is not None, process.output
    with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found: dict[str, float] = defaultdict(float)
    for family in families:
        for sample in family.samples:
            found[sample.name] += sample.value
            for value in sample.labels.values():
                found[f"{sample.name} {value}"] += sample.value
    return found


@pytest.mark.slow
def test_both_queries_and_a_merge_on_a_cluster_whose_executors_watch_the_shards(
    broker: EmbeddedBroker, spark: SparkSession, tmp_path: Path
) -> None:
    config = config_under(tmp_path, broker.bootstrap_servers)
    streams = StreamsConfig(
        checkpoints=config.streams.checkpoints, heartbeat=config.streams.heartbeat, distribute_watching_above=1
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = msgspec.structs.replace(
        config, streams=streams, parameters=QUICK, spark=SPARK, metrics=MetricsConfig(port=port)
    )
    with Running(config, spark) as before:
        # The next controller lets the executors look: there is more than one shard at its start.
        Lake(before, config, spark).create("first", "second")
    lake = Lake(Client(config), config, spark)
    lake.prefix = "d"
    with cluster(tmp_path / "cluster") as (master, work), ExitStack() as stack:
        # Spark's own spark-submit, as on any cluster.
        submit = [f"{spark_home()}/bin/spark-submit", "--master", master, "--jars", ",".join(map(str, spark_jars()))]
        submit += [str(REPOSITORY / "jobs/controller.py")]
        variables = {"SPARK_HOME": str(spark_home()), "JAVA_HOME": str(java_home()), "PYSPARK_PYTHON": sys.executable}
        variables |= {"SPARK_LOCAL_IP": "127.0.0.1"}
        process = stack.enter_context(Process(config, tmp_path / "submitted", variables=variables, command=submit))
        process.wait_for_output("Holdfast is running", 4 * LIMIT_S)
        assert f"http://127.0.0.1:{port}/metrics" in process.output
        lake.create("a")
        lake.command("set_read_policies", policies=[{"collection": "a", "policy": {"kind": "step_back"}}])
        for upper in (10, 20, 30):
            lake.write("a", upper, (upper - 5, 1, f"k{upper}", 1), (upper - 4, 1, "same", 1))
        wait_until(lambda: lake.sinces()["a"] == 29, "the since has followed", 4 * LIMIT_S)
        wait_until(lambda: lake.merges("a") >= 1, "the executors have merged", 4 * LIMIT_S)
        assert lake.content("a") == +lake.written["a"]
        (checkpoint,) = Path(config.streams.checkpoints).glob("frontiers-*")
        offsets = [file.read_text() for file in (checkpoint / "offsets").glob("[0-9]*")]
        assert any('"triggers"' in text for text in offsets), "not the driver but the executors look at the shards"
        for place in work:
            (executor,) = place.glob("app-*-0000/*/stderr")
            assert "Running task" in executor.read_text(), "both workers have had tasks"
        wait_until(lambda: scraped(process)["holdfast_merges_total"] >= 1, "the merge was counted")
        metrics = scraped(process)
        for query in ("commands", "frontiers"):
            assert metrics[f"holdfast_batches_total {query}"] >= 1
            assert metrics[f"holdfast_query_progress {query}"] > 0

        # The script of the README takes over, and gets the executors when the first one has halted.
        script = [str(REPOSITORY / "spark-submit.sh")]
        config = msgspec.structs.replace(config, metrics=MetricsConfig())
        second = stack.enter_context(Process(config, tmp_path / "script", variables={"MASTER": master}, command=script))
        second.wait_for_output("Holdfast is running", 4 * LIMIT_S)
        assert process.wait_for_exit(4 * LIMIT_S) == EXIT_FENCED, process.output
        lake.write("a", 40, (31, -1, "same", 1))
        wait_until(lambda: lake.sinces()["a"] == 39, "the since has followed again", 4 * LIMIT_S)
        second.signal(signal.SIGTERM)
        assert second.wait_for_exit() == 0, second.output
    lake.client.close()

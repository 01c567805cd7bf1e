"""Our session has what the application needs in it: Delta, the Kafka connector, workers with our packages."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kafka import KafkaProducer
from kafka.admin import KafkaAdminClient, NewTopic

from app.broker import EmbeddedBroker
from app.operations import POOL
from app.spark import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_it_writes_and_reads_delta(spark: SparkSession, tmp_path: Path) -> None:
    spark.range(10).write.format("delta").save(str(tmp_path / "table"))
    assert spark.sql(f"SELECT count(*) FROM delta.`{tmp_path / 'table'}`").first() == (10,)


def test_it_reads_from_kafka(spark: SparkSession, broker: EmbeddedBroker) -> None:
    admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    admin.create_topics([NewTopic("spark-reads", 1, 1)])
    admin.close()
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers)
    producer.send("spark-reads", b"a record").get(timeout=30)
    producer.close()
    options = {"kafka.bootstrap.servers": broker.bootstrap_servers, "subscribe": "spark-reads"}
    records = spark.read.format("kafka").options(**options).load()
    assert [bytes(row.value) for row in records.collect()] == [b"a record"]


def test_its_python_workers_have_our_packages(spark: SparkSession) -> None:
    def imported(_: object) -> list[str]:
        import deltalake  # noqa: PLC0415  # must be found where this runs
        import pyarrow  # noqa: PLC0415

        return [deltalake.__name__, pyarrow.__name__]

    assert spark.sparkContext.parallelize([1], 1).map(imported).collect() == [["deltalake", "pyarrow"]]


def test_work_on_shards_shares_what_its_pool_gets(spark: SparkSession) -> None:
    """A small job in that pool does not wait for the tasks of a long one."""
    pool = spark.sparkContext._jsc.sc().getPoolForName(POOL).get()
    assert str(pool.schedulingMode()) == "FAIR"


SECRETS = {
    "spark.hadoop.fs.s3a.access.key": "open5esame-1",
    "spark.hadoop.fs.s3a.secret.key": "open5esame-2",
    "spark.hadoop.fs.azure.account.key.lake.dfs.core.windows.net": "open5esame-3",
    "spark.hadoop.google.cloud.auth.service.account.private.key": "open5esame-4",
}
WITH_SECRETS = """
import json, sys
from pathlib import Path
from app.java import QUICK_START
from app.spark import session

settings, logs = json.loads(sys.stdin.readline()), Path(sys.argv[1])
settings["spark.driver.extraJavaOptions"] = " ".join(QUICK_START)
spark = session("secrets", master="local[1]", extra=settings, logs=logs)
spark.range(1).write.format("delta").save(str(logs / "table"))
known = spark.sparkContext._jsc.hadoopConfiguration()
print(json.dumps({key: known.get(key.removeprefix("spark.hadoop.")) for key in settings}), flush=True)
sys.stdin.readline()
spark.stop()
"""


def command_lines() -> Iterator[bytes]:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            yield file.read_bytes()


def test_secrets_are_in_no_list_of_processes_and_in_no_log(tmp_path: Path) -> None:
    events = {"enabled": "true", "dir": tmp_path.as_uri(), "compress": "false"}
    settings = {**SECRETS, **{f"spark.eventLog.{name}": value for name, value in events.items()}}
    command = [sys.executable, "-c", WITH_SECRETS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(settings), file=process.stdin, flush=True)
        known = json.loads(process.stdout.readline())
        running = list(command_lines())
        process.communicate("end\n")
    assert {key: known[key] for key in SECRETS} == SECRETS, "Hadoop has them"
    ours = [line for line in running if str(tmp_path).encode() in line]
    assert len(ours) == 2, "the session and its JVM"
    assert not [line for line in running if b"open5esame" in line]
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {"spark.log", "spark.out"} < {file.name for file in written}
    assert any(b"SparkListenerEnvironmentUpdate" in file.read_bytes() for file in written), "the event log"
    assert not [file for file in written if b"open5esame" in file.read_bytes()]


def test_it_leaves_our_handling_of_an_interrupt_alone(spark: SparkSession) -> None:
    def ours(*_: object) -> None: ...

    before = signal.signal(signal.SIGINT, ours)  # what it was depends on who runs the tests: in the background, ignored
    try:
        assert session("again").sparkContext is spark.sparkContext
        assert signal.getsignal(signal.SIGINT) is ours
    finally:
        signal.signal(signal.SIGINT, before)

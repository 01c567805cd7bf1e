"""Our session has what the application needs in it: Delta, the Kafka connector, workers with our packages."""

from __future__ import annotations

import signal
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


def test_it_leaves_our_handling_of_an_interrupt_alone(spark: SparkSession) -> None:
    def ours(*_: object) -> None: ...

    before = signal.signal(signal.SIGINT, ours)  # what it was depends on who runs the tests: in the background, ignored
    try:
        assert session("again").sparkContext is spark.sparkContext
        assert signal.getsignal(signal.SIGINT) is ours
    finally:
        signal.signal(signal.SIGINT, before)

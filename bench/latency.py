"""From producing a command to its durable reply, next to two other loops in the same run.

Run: .venv/bin/python -m bench.latency [--commands N] [--merges N]

- "empty loop": Kafka → foreachBatch → collect → a reply on Kafka. Nothing is remembered: nothing can be faster.
- "holdfast": the same with the core, the journal entry on disk before the reply, and the tables after it.
- "merging loop": what one would write without a journal: each batch is MERGEd into a Delta table with Spark.

One command is on its way at a time. The aims are ratios to the empty loop at p50 and p99, and to the merging loop.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from pyspark.sql import DataFrame, SparkSession

from app.broker import EmbeddedBroker
from app.config import Config, KafkaConfig, StreamsConfig
from app.service import Service
from app.spark import session

Handler = Callable[[DataFrame, KafkaProducer, str], None]
WARM_UP = 10


class Client:
    """Sends one command at a time, and waits for its reply."""

    def __init__(self, address: str, commands: str, replies: str) -> None:
        self._commands = commands
        self._where = TopicPartition(replies, 0)
        self._producer = KafkaProducer(bootstrap_servers=address, linger_ms=0)
        self._consumer = KafkaConsumer(bootstrap_servers=address, fetch_max_wait_ms=5)
        self._consumer.assign([self._where])
        self._consumer.seek_to_end(self._where)
        self._consumer.position(self._where)

    def round_trip_ms(self) -> float:
        id_ = uuid.uuid4().hex
        command = {"type": "reconcile", "id": id_, "collections": []}
        started = time.perf_counter()
        self._producer.send(self._commands, json.dumps(command).encode())
        while time.perf_counter() - started < 60:
            for record in self._consumer.poll(timeout_ms=1_000).get(self._where, []):
                if id_.encode() in record.value:
                    return (time.perf_counter() - started) * 1000
        raise SystemExit("no reply within 60 s")

    def measure(self, number: int) -> list[float]:
        for _ in range(WARM_UP):
            self.round_trip_ms()
        return [self.round_trip_ms() for _ in range(number)]

    def close(self) -> None:
        self._producer.close()
        self._consumer.close()


def empty(frame: DataFrame, producer: KafkaProducer, replies: str) -> None:
    for row in frame.collect():
        producer.send(replies, row[3])
    producer.flush()


def merging(table: str) -> Handler:
    def handle(frame: DataFrame, producer: KafkaProducer, replies: str) -> None:
        spark = frame.sparkSession
        frame.selectExpr("get_json_object(cast(value AS STRING), '$.id') AS id", "value").createOrReplaceTempView(
            "batch"
        )
        spark.sql(
            f"MERGE INTO delta.`{table}` t USING batch b ON t.id = b.id "
            "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
        )
        empty(frame, producer, replies)

    return handle


@contextmanager
def plain_loop(spark: SparkSession, address: str, place: Path, name: str, handle: Handler) -> Iterator[Client]:
    commands, replies = make_topics(address, name)
    producer = KafkaProducer(bootstrap_servers=address, linger_ms=0, acks="all")
    source = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", address)
        .option("subscribe", commands)
        .option("startingOffsets", "earliest")
        .option("kafka.fetch.max.wait.ms", "10")
        .load()
        .selectExpr("partition", "offset", "unix_millis(timestamp) AS timestamp", "value")
    )
    query = (
        source.writeStream.option("checkpointLocation", str(place / f"checkpoint-{name}"))
        .foreachBatch(lambda frame, _: handle(frame, producer, replies))
        .start()
    )
    client = Client(address, commands, replies)
    try:
        yield client
    finally:
        client.close()
        query.stop()
        producer.close()


@contextmanager
def holdfast(spark: SparkSession, address: str, place: Path) -> Iterator[Client]:
    commands, replies = make_topics(address, f"holdfast{place.name}")
    config = Config(
        root=str(place / "root"),
        warehouse=[str(place / "warehouse")],
        kafka=KafkaConfig(bootstrap_servers=address, commands_topic=commands, replies_topic=replies),
        streams=msgspec.structs.replace(StreamsConfig(), checkpoints=str(place / "checkpoints")),
    )
    service = Service(config, spark, address)
    ready = threading.Event()
    thread = threading.Thread(target=lambda: service.run(on_ready=ready.set))
    thread.start()
    ready.wait()
    client = Client(address, commands, replies)
    try:
        yield client
    finally:
        client.close()
        service.stop()
        thread.join()


def make_topics(address: str, name: str) -> tuple[str, str]:
    admin = KafkaAdminClient(bootstrap_servers=address)
    names = (f"{name}.commands", f"{name}.replies")
    admin.create_topics({each: {"num_partitions": 1} for each in names}, wait_for_metadata=True)
    admin.close()
    return names


def report(name: str, times: list[float]) -> tuple[float, float]:
    p50, p99 = statistics.median(times), statistics.quantiles(times, n=100)[98]
    print(f"{name:13} p50 {p50:7.0f} ms   p99 {p99:7.0f} ms   of {len(times)}", flush=True)
    return p50, p99


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", type=int, default=150, help="round trips of each fast loop, in three turns")
    parser.add_argument("--merges", type=int, default=15, help="round trips of the loop that merges")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as name, EmbeddedBroker(Path(name) / "kafka") as broker:
        place, address = Path(name), broker.bootstrap_servers
        spark = session("bench", master="local[2]", logs=place / "logs")
        turn = arguments.commands // 3
        fast: dict[str, list[float]] = {"empty loop": [], "holdfast": []}
        for number in range(3):  # in turns, so that a slow minute of the machine hits both
            with plain_loop(spark, address, place, f"empty{number}", empty) as client:
                fast["empty loop"] += client.measure(turn)
            with holdfast(spark, address, place / str(number)) as client:
                fast["holdfast"] += client.measure(turn)
        table = str(place / "merged")
        spark.createDataFrame([], "id STRING, value BINARY").write.format("delta").save(table)
        with plain_loop(spark, address, place, "merging", merging(table)) as client:
            merged = [client.round_trip_ms() for _ in range(3 + arguments.merges)][3:]
        base50, base99 = report("empty loop", fast["empty loop"])
        ours50, ours99 = report("holdfast", fast["holdfast"])
        merge50, _ = report("merging loop", merged)
        print(
            f"holdfast / empty loop: {ours50 / base50:.2f} x at p50 (aim: at most 1.25), "
            f"{ours99 / base99:.2f} x at p99 (aim: at most 2)"
        )
        print(f"merging loop / holdfast: {merge50 / ours50:.1f} x at p50 (aim: at least 15)")
        spark.stop()


if __name__ == "__main__":
    main()

"""How many commands a second are applied from end to end, and what the number of collections has to do with it.

Run: .venv/bin/python -m bench.throughput [--commands N] [--collections N ...]

A topic is filled with hold commands (acquire, downgrade, release, each on a collection chosen at random) before the
controller's queries start. Counted is the time from there to the last reply, so that the first batch, in which Spark
warms up, is in it. The collections share one shard. The aims are 8,000 a second on two cores, and a batch with 100,000
collections that costs at most 1.3 times one with 1,000.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime
from pathlib import Path

import msgspec
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from pyspark.sql import SparkSession

from app.broker import EmbeddedBroker
from app.config import KafkaConfig, StreamsConfig
from app.service import Service
from app.spark import session
from bench.boot import config_of, fill
from bench.latency import make_topics

BATCH = StreamsConfig().max_commands_per_batch
PATIENCE_S = 300


def count(address: str, topic: str, expected: int) -> None:
    """In a process of its own, as a client would be: says when the last reply came, and how many were refusals."""
    consumer = KafkaConsumer(bootstrap_servers=address)
    consumer.assign([where := TopicPartition(topic, 0)])
    consumer.seek_to_beginning(where)
    seen = refused = 0
    while seen < expected:
        records = consumer.poll(timeout_ms=1_000).get(where, [])
        seen += len(records)
        refused += sum(b'"status":"ok"' not in record.value for record in records)
    print(time.time(), refused)
    consumer.close()


def hold_commands(collections: int, number: int) -> list[bytes]:
    commands: list[dict[str, object]] = []
    for round_ in range(-(-number // 3)):
        collection = f"collection{random.randrange(collections)}"
        hold = f"a{round_}/{collection}"
        commands += [
            {"type": "acquire_read_holds", "id": f"a{round_}", "collections": [collection], "holder": "bench"},
            {"type": "downgrade_read_holds", "id": f"d{round_}", "holds": [{"hold": hold, "to": 10}]},
            {"type": "release_read_holds", "id": f"r{round_}", "holds": [hold]},
        ]
    return [json.dumps(command).encode() for command in commands[:number]]


def run(spark: SparkSession, address: str, place: Path, collections: int, commands: int) -> tuple[float, float]:
    """Commands a second, and the median milliseconds of a full batch."""
    topics = make_topics(address, place.name)
    config = msgspec.structs.replace(
        config_of(place),
        kafka=KafkaConfig(bootstrap_servers=address, commands_topic=topics[0], replies_topic=topics[1]),
    )
    fill(place, collections, held=False, shared=True)
    producer = KafkaProducer(bootstrap_servers=address, linger_ms=20)
    sent = [producer.send(topics[0], command) for command in hold_commands(collections, commands)]
    producer.flush()
    assert all(future.succeeded() for future in sent)
    producer.close()
    counting = [sys.executable, "-m", "bench.throughput", "--count", address, topics[1], str(len(sent))]
    counter = subprocess.Popen(counting, stdout=subprocess.PIPE, text=True)
    service = Service(config, spark, address)
    thread = threading.Thread(target=service.run)
    thread.start()
    last_s, refused = counter.communicate(timeout=PATIENCE_S)[0].split()
    if int(refused) > 0:
        raise SystemExit(f"{refused} commands were refused")
    batches = [batch for query in spark.streams.active for batch in query.recentProgress if "commands" in batch.name]
    service.stop()
    thread.join()
    batches = [batch for batch in batches if batch.numInputRows > 0]
    began_s = datetime.fromisoformat(batches[0].timestamp.replace("Z", "+00:00")).timestamp()
    full = [batch.durationMs["triggerExecution"] for batch in batches if batch.numInputRows == BATCH]
    return len(sent) / (float(last_s) - began_s), statistics.median(full)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", type=int, default=200_000)
    parser.add_argument("--collections", type=int, nargs="+", default=[1_000, 100_000])
    parser.add_argument("--count", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.count is not None:
        count(*arguments.count[:2], int(arguments.count[2]))
        return
    logging.disable(logging.INFO)
    costs = []
    with tempfile.TemporaryDirectory() as name, EmbeddedBroker(Path(name) / "kafka") as broker:
        spark = session("bench", master="local[2]", logs=Path(name) / "logs")
        for collections in arguments.collections:
            place = Path(name) / f"of{collections}"
            rate, batch_ms = run(spark, broker.bootstrap_servers, place, collections, arguments.commands)
            costs.append(batch_ms)
            print(
                f"{collections:7,} collections: {rate:7,.0f} commands/s end to end (aim: at least 8,000); "
                f"a batch of {BATCH:,} p50 {batch_ms:,.0f} ms",
                flush=True,
            )
        print(f"a batch costs {costs[-1] / costs[0]:.2f} x that with the fewest collections (aim: at most 1.3)")
        spark.stop()


if __name__ == "__main__":
    main()

"""A controller under test: in a thread on the session's Spark, or in a process of its own that can be killed.

Commands are sent and replies read with kafka-python alone, as any client would; tables are read with deltalake alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import yaml
from deltalake import DeltaTable
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import KafkaAdminClient

from app.config import Config, KafkaConfig, StreamsConfig
from app.controller import Controller
from app.core.duration import Duration
from app.java import QUICK_START
from app.service import Service

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LIMIT_S = 180.0  # on a busy machine; whatever is waited for usually comes within seconds
PAUSE_S = 0.02
MAX_REQUEST = 8 * 1024 * 1024
REPOSITORY = Path(__file__).resolve().parents[2]

Line = bytes | dict[str, Any] | None
Row = dict[str, Any]


def wait_until(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    """Returns as soon as it is so; fails with `what` if it does not become so."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s: {what}"
        time.sleep(PAUSE_S)


def config_under(
    root: Path,
    bootstrap_servers: str,
    *,
    topics: str | None = None,
    heartbeat_ms: int = 500,
    watch_interval_ms: int = 200,
    partitions: int = 1,
    give_up_after_ms: int = 120_000,
) -> Config:
    """A configuration of which nothing is shared with another test but the broker."""
    name = topics or f"t{uuid.uuid4().hex[:8]}"
    return Config(
        root=str(root / "holdfast"),
        warehouse=[str(root / "warehouse")],
        kafka=KafkaConfig(
            bootstrap_servers=bootstrap_servers,
            commands_topic=f"{name}.commands",
            replies_topic=f"{name}.replies",
            partitions=partitions,
        ),
        streams=StreamsConfig(
            checkpoints=str(root / "checkpoints"),
            heartbeat=Duration(heartbeat_ms),
            watch_interval=Duration(watch_interval_ms),
        ),
        give_up_after=Duration(give_up_after_ms),
    )


def encoded(line: Line) -> bytes | None:
    return json.dumps(line).encode() if isinstance(line, dict) else line


class Client:
    """A plain producer of commands and a plain reader of all replies since the topic began."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._bootstrap_servers = config.kafka.bootstrap_servers
        self.replies: dict[str | None, list[Row]] = defaultdict(list)
        """What was replied, by the reply's key; the replies to what has no id are under None."""
        self.reply_count = 0
        self._producer: KafkaProducer | None = None
        self._consumer: KafkaConsumer | None = None

    def close(self) -> None:
        if self._producer is not None:
            self._producer.close(timeout=10)
        if self._consumer is not None:
            self._consumer.close()
        self._producer = self._consumer = None

    def send(self, *lines: Line) -> list[tuple[int, int]]:
        """Sends records and returns their places, partition and offset, when the broker has acknowledged all."""
        if self._producer is None:
            self._producer = KafkaProducer(
                bootstrap_servers=self._bootstrap_servers, max_request_size=MAX_REQUEST, reconnect_backoff_max_ms=500
            )
        topic = self._config.kafka.commands_topic
        # kafka-python sends no record that has neither key nor value; the key means nothing to the controller.
        sent = [
            self._producer.send(topic, key=b"key" if line is None else None, value=encoded(line), partition=0)
            for line in lines
        ]
        self._producer.flush(timeout=LIMIT_S)
        places = [future.get(timeout=LIMIT_S) for future in sent]
        return [(place.partition, place.offset) for place in places]

    def read(self) -> None:
        """Takes in the replies that are there."""
        if self._consumer is None:
            partition = TopicPartition(self._config.kafka.replies_topic, 0)
            self._consumer = KafkaConsumer(
                bootstrap_servers=self._bootstrap_servers, group_id=None, reconnect_backoff_max_ms=500
            )
            self._consumer.assign([partition])
            self._consumer.seek_to_beginning(partition)
        for records in self._consumer.poll(timeout_ms=50).values():
            for record in records:
                reply = json.loads(record.value)
                key = None if record.key is None else record.key.decode()
                assert reply.get("id") == key, "a reply's key is the id of its command"
                self.replies[key].append(reply)
                self.reply_count += 1

    def wait_for_replies(self, number: int, limit_s: float = LIMIT_S) -> None:
        """Until that many replies have come since the topic began."""

        def enough() -> bool:
            self.read()
            return self.reply_count >= number

        wait_until(enough, f"{number} replies on {self._config.kafka.replies_topic}", limit_s)

    def ask(self, *lines: dict[str, Any], limit_s: float = LIMIT_S) -> list[Row]:
        """Sends commands with new ids and returns the reply to each."""
        self.send(*lines)
        return self.answers(*(line["id"] for line in lines), limit_s=limit_s)

    def answers(self, *ids: str, limit_s: float = LIMIT_S) -> list[Row]:
        """The last reply to each of these commands, when all have one."""

        def all_there() -> bool:
            self.read()
            return all(self.replies[id_] for id_ in ids)

        wait_until(all_there, f"replies to {ids}", limit_s)
        return [self.replies[id_][-1] for id_ in ids]


def table(config: Config, name: str) -> list[Row]:
    """The rows of a state table as deltalake reads them."""
    rows: list[Row] = DeltaTable(f"{config.state}/{name}").to_pyarrow_table().to_pylist()
    return rows


def by(key: str, rows: Iterable[Row]) -> dict[Any, Row]:
    """Rows by a column; no value of it may be there twice."""
    found: dict[Any, Row] = {}
    for row in rows:
        assert row[key] not in found, f"two rows with {key} {row[key]!r}"
        found[row[key]] = row
    return found


def places(config: Config) -> list[tuple[int, int]]:
    """Where on the topic the rows of `commands` come from, in order; with repetitions, if there are any."""
    return sorted((row["partition"], row["offset"]) for row in table(config, "commands"))


def delete_topic(config: Config, name: str) -> None:
    """Returns when the topic is gone."""
    admin = KafkaAdminClient(bootstrap_servers=config.kafka.bootstrap_servers)
    try:
        admin.delete_topics([name])
        wait_until(lambda: name not in admin.list_topics(), f"the topic {name} is gone")
    finally:
        admin.close()


class Running(Client):
    """A service in a thread; ready, with its first heartbeat behind it, when the block begins."""

    def __init__(self, config: Config, spark: SparkSession) -> None:
        super().__init__(config)
        self.config = config
        self.exit_code: int | None = None
        self.failure: BaseException | None = None
        self.service = Service(config, spark, config.kafka.bootstrap_servers)
        self._thread = threading.Thread(target=self._run, name="service under test", daemon=True)
        self._ready = threading.Event()
        self._heartbeats = 0
        self._expected_exit_code = 0
        self._count_heartbeats()

    @property
    def controller(self) -> Controller:
        return self.service.controller

    @property
    def heartbeats(self) -> int:
        """How many heartbeats went well: a sign of life that needs no command."""
        return self._heartbeats

    def _count_heartbeats(self) -> None:
        heartbeat = self.controller.heartbeat

        def counted(*, applied_until: int | None) -> None:
            heartbeat(applied_until=applied_until)
            self._heartbeats += 1

        self.controller.heartbeat = counted  # type: ignore[method-assign]  # nothing else tells of a heartbeat

    def _run(self) -> None:
        try:
            self.exit_code = self.service.run(on_ready=self._ready.set)
        except BaseException as error:  # noqa: BLE001 - shown by whoever waits
            self.failure = error

    def __enter__(self) -> Running:
        self._thread.start()
        wait_until(lambda: self._alive() and self._ready.is_set() and self._heartbeats, "the service is ready")
        return self

    def _alive(self) -> bool:
        assert self._thread.is_alive(), f"the service ended: exit code {self.exit_code}, {self.failure!r}"
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.service.stop()
        self._thread.join(LIMIT_S)
        self.close()
        if error is None:
            assert not self._thread.is_alive(), "the service did not stop"
            assert self.failure is None, f"the service failed: {self.failure!r}"
            assert self.exit_code == self._expected_exit_code

    def wait_for_end(self, exit_code: int, limit_s: float = LIMIT_S) -> None:
        """Until it has ended by itself, with that exit code."""
        self._expected_exit_code = exit_code
        wait_until(lambda: not self._thread.is_alive(), "the service ends", limit_s)
        assert (self.exit_code, self.failure) == (exit_code, None)

    def wait_for_tables(self) -> None:
        """Until the tables have what is in the journal now."""
        waiting = threading.Thread(target=self.controller.wait_for_tables, daemon=True)
        waiting.start()
        waiting.join(LIMIT_S)
        assert not waiting.is_alive(), "the tables did not reach the journal"

    def table(self, name: str) -> list[Row]:
        """The rows of a state table, with everything in them that has been replied to."""
        self.wait_for_tables()
        return table(self.config, name)


class Process:
    """A controller in a process of its own: `python jobs/controller.py --config FILE`, on one core of Spark.

    `command`: something else that runs it, and takes the same arguments.
    """

    def __init__(
        self,
        config: Config,
        directory: Path,
        *,
        fail_point: str | None = None,
        arguments: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        command: Sequence[str] = (sys.executable, str(REPOSITORY / "jobs/controller.py")),
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / "config.yaml"
        file.write_text(yaml.safe_dump(_as_yaml(config)))
        self._output = directory / f"output-{uuid.uuid4().hex[:8]}.txt"
        environment = {name: value for name, value in os.environ.items() if name != "HOLDFAST_FAILPOINT"}
        environment |= {"MASTER": "local[1]", "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
        environment |= variables or {}
        if fail_point is not None:
            environment["HOLDFAST_FAILPOINT"] = fail_point
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, "--config", str(file), *arguments],
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait_for_output(self, text: str, limit_s: float = 2 * LIMIT_S) -> None:
        def said() -> bool:
            ended = self._process.poll() is not None
            if text in self.output:
                return True
            assert not ended, f"ended with {self._process.returncode} before it said {text!r}:\n{self.output}"
            return False

        wait_until(said, f"the process says {text!r}", limit_s)

    def wait_for_exit(self, limit_s: float = 2 * LIMIT_S) -> int:
        """Its exit code; the negative number of the signal that killed it."""
        wait_until(lambda: self._process.poll() is not None, f"the process {self.pid} ends", limit_s)
        return self._process.returncode

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if error is not None:
            print(self.output)


def _as_yaml(config: Config) -> dict[str, Any]:
    return {
        "root": config.root,
        "warehouse": list(config.warehouse),
        "kafka": {
            "bootstrap_servers": config.kafka.bootstrap_servers,
            "commands_topic": config.kafka.commands_topic,
            "replies_topic": config.kafka.replies_topic,
            "partitions": config.kafka.partitions,
            "options": dict(config.kafka.options),
        },
        "streams": {
            "checkpoints": config.streams.checkpoints,
            "heartbeat": int(config.streams.heartbeat),
            "watch_interval": int(config.streams.watch_interval),
            "distribute_watching_above": config.streams.distribute_watching_above,
        },
        "metrics": {"port": config.metrics.port},
        "parameters": dict(config.parameters),
        "give_up_after": int(config.give_up_after),
        "spark": {
            "spark.sql.shuffle.partitions": "1",
            "spark.driver.extraJavaOptions": " ".join(QUICK_START),
            **config.spark,
        },
    }

"""The embedded broker is a real Kafka that keeps its data, stays at its address, and does not outlive us."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import KafkaAdminClient, NewTopic

from app import broker as broker_module
from app.broker import BrokerFailed, EmbeddedBroker


def make_topic(servers: str) -> str:
    topic = f"t-{uuid4()}"
    admin = KafkaAdminClient(bootstrap_servers=servers)
    admin.create_topics([NewTopic(topic, 1, 1)])
    admin.close()
    return topic


def produce(servers: str, topic: str, *values: bytes) -> None:
    producer = KafkaProducer(bootstrap_servers=servers, max_request_size=4 * 1024 * 1024)
    for sent in [producer.send(topic, value) for value in values]:
        sent.get(timeout=30)
    producer.close()


def consume(servers: str, topic: str, count: int) -> list[bytes]:
    consumer = KafkaConsumer(bootstrap_servers=servers, enable_auto_commit=False)
    partition = TopicPartition(topic, 0)
    consumer.assign([partition])
    consumer.seek_to_beginning(partition)
    values: list[bytes] = []
    deadline = time.monotonic() + 30
    while len(values) < count and time.monotonic() < deadline:
        values += [record.value for records in consumer.poll(timeout_ms=500).values() for record in records]
    consumer.close()
    return values


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = 30) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path / "broker") as running:
        yield running


def test_it_takes_and_gives_records_also_those_above_our_own_limit(broker: EmbeddedBroker) -> None:
    topic = make_topic(broker.bootstrap_servers)
    values = [b"first", b"x" * 2 * 1024 * 1024, b"last"]
    produce(broker.bootstrap_servers, topic, *values)
    assert consume(broker.bootstrap_servers, topic, 3) == values


def test_it_listens_on_the_loopback_interface_only(broker: EmbeddedBroker) -> None:
    host, port = broker.bootstrap_servers.split(":")
    assert host == "127.0.0.1"
    # Another address of the loopback interface: a server on all interfaces would answer there too.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(port)), timeout=5).close()


def test_topics_are_made_on_request_only(broker: EmbeddedBroker) -> None:
    topic = f"never-made-{uuid4()}"
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, max_block_ms=500)
    with pytest.raises(Exception, match="metadata"):
        producer.send(topic, b"lost").get(timeout=5)
    producer.close()
    admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    assert topic not in admin.list_topics()
    admin.close()


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_after_a_restart_the_data_is_there_at_the_same_address(own_broker: EmbeddedBroker, end: str) -> None:
    address, pid = own_broker.bootstrap_servers, own_broker.pid
    topic = make_topic(address)
    produce(address, topic, b"before")
    getattr(own_broker, end)()
    assert own_broker.pid is None
    assert pid is not None
    assert not is_running(pid)
    own_broker.start()
    assert own_broker.bootstrap_servers == address
    produce(address, topic, b"after")
    assert consume(address, topic, 2) == [b"before", b"after"]
    # Another object on the same data, as another process would make it, keeps the address too.
    own_broker.stop()
    with EmbeddedBroker(own_broker.data) as successor:
        assert successor.bootstrap_servers == address
        assert consume(address, topic, 2) == [b"before", b"after"]


def test_a_second_broker_on_the_same_data_is_refused_and_does_no_harm(
    own_broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "LOCK_LIMIT_S", 0.5)
    topic = make_topic(own_broker.bootstrap_servers)
    with pytest.raises(BrokerFailed, match="Another broker is using"):
        EmbeddedBroker(own_broker.data).start()
    produce(own_broker.bootstrap_servers, topic, b"still here")
    assert consume(own_broker.bootstrap_servers, topic, 1) == [b"still here"]


def test_a_given_port_that_is_taken_is_named(broker: EmbeddedBroker, tmp_path: Path) -> None:
    port = int(broker.bootstrap_servers.split(":")[1])
    with pytest.raises(BrokerFailed, match=f"Port {port} .* in use"):
        EmbeddedBroker(tmp_path / "other", port=port).start()


def test_a_port_that_is_taken_meanwhile_is_replaced(
    broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = int(broker.bootstrap_servers.split(":")[1])
    chosen = iter([taken])  # the first choice looks free, but another Kafka has it by the time ours wants it
    free_port = broker_module._free_port
    monkeypatch.setattr(broker_module, "_free_port", lambda wanted: next(chosen, None) or free_port(wanted))
    with EmbeddedBroker(tmp_path / "other") as other:
        assert other.bootstrap_servers != broker.bootstrap_servers
        assert make_topic(other.bootstrap_servers)


def test_a_broker_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "PROPERTIES", broker_module.PROPERTIES + "num.io.threads=none\n")
    with pytest.raises(BrokerFailed, match=r"none for configuration num\.io\.threads"):
        EmbeddedBroker(tmp_path / "broker").start()


def test_it_lives_on_when_the_thread_that_started_it_ends(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path / "broker")
    thread = threading.Thread(target=broker.start)
    thread.start()
    thread.join()
    try:
        assert make_topic(broker.bootstrap_servers)
    finally:
        broker.stop()


CHILD = """
import sys, time
from pathlib import Path
from app import broker as module
module.WATCH = sys.argv[2] == "watchdog" or module.WATCH
broker = module.EmbeddedBroker(Path(sys.argv[1]))
broker.start()
print(broker.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("way", ["kernel", "watchdog"])
def test_it_dies_with_us_even_when_we_are_killed(tmp_path: Path, way: str) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path / "broker"), way]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            assert is_running(pid)
            os.kill(parent.pid, signal.SIGKILL)
            parent.wait()
            wait_for(lambda: not is_running(pid), "the broker is gone", limit_s=5)
        finally:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
    with EmbeddedBroker(tmp_path / "broker") as successor:  # and the data is free for the next
        assert make_topic(successor.bootstrap_servers)

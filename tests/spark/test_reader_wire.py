"""The thread that reads replies, with a real broker: whatever comes, it goes on listening. Here the test answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kafka import KafkaConsumer, KafkaProducer

from app.broker import EmbeddedBroker
from app.client import Holdfast
from app.client_holds import Holds
from app.client_wire import Wire
from app.config import KafkaConfig
from app.topics import Topics
from tests.spark.reader_world import wait_until

COMMANDS, REPLIES = "wire.commands", "wire.replies"


@pytest.fixture(scope="module")
def servers(broker: EmbeddedBroker) -> str:
    topics = Topics(KafkaConfig(commands_topic=COMMANDS, replies_topic=REPLIES), broker.bootstrap_servers)
    topics.ensure()
    topics.close()
    return broker.bootstrap_servers


@pytest.fixture
def client(servers: str) -> Iterator[Holdfast]:
    with Holdfast(servers, commands_topic=COMMANDS, replies_topic=REPLIES, timeout=20) as there:
        yield there


@pytest.fixture
def controller(servers: str) -> Iterator[Any]:
    """Says what it is told."""
    producer = KafkaProducer(bootstrap_servers=servers)
    yield producer
    producer.close()


def answer(controller: Any, id: str) -> None:
    reply = {"id": id, "status": "ok", "result": {}, "seq": 1}
    controller.send(REPLIES, key=id.encode(), value=json.dumps(reply).encode())


def test_a_reply_to_what_is_settled_already_does_not_end_the_listening(client: Holdfast, controller: Any) -> None:
    failed, other = client.submit("failed", b"{}"), client.submit("other", b"{}")
    failed.reply.set_exception(ConnectionError("it could not be sent, it seemed"))
    for id in ("failed", "other"):
        answer(controller, id)
    assert other.reply.result(20)["id"] == "other"


def test_a_defect_while_a_reply_is_read_does_not_end_the_listening(
    client: Holdfast, controller: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hand_over = Wire._hand_over

    def failing(wire: Wire, key: bytes | None, value: bytes | None) -> None:
        if key == b"broken":
            raise RuntimeError("a defect")
        hand_over(wire, key, value)

    monkeypatch.setattr(Wire, "_hand_over", failing)
    client.submit("broken", b"{}")
    other = client.submit("other", b"{}")
    answer(controller, "broken")
    wait_until(lambda: "reading replies failed, trying again error=RuntimeError" in caplog.text, "it is told")
    assert any(each.exc_info for each in caplog.records)
    answer(controller, "other")
    assert other.reply.result(20)["id"] == "other"


def test_holds_that_end_in_the_thread_that_would_hear_the_answer_do_not_wait_for_it(
    client: Holdfast, controller: Any, servers: str
) -> None:
    holds = Holds(client, ["orders"], {}, lease_ms=None, on_lost=None)
    holds._take([{"hold": "forgotten/orders", "collection": "orders", "since": 5}])
    threads = []

    def let_go(_: object) -> None:
        """What the garbage collector may do there at any moment."""
        threads.append(threading.current_thread().name)
        holds.__exit__(None, None, None)

    first, second = client.submit("first", b"{}"), client.submit("second", b"{}")
    first.reply.add_done_callback(let_go)
    answer(controller, "first")
    answer(controller, "second")
    assert second.reply.result(10)["id"] == "second"
    assert threads == ["holdfast-replies"]
    consumer = KafkaConsumer(
        COMMANDS, bootstrap_servers=servers, auto_offset_reset="earliest", group_id=None, consumer_timeout_ms=20_000
    )
    assert any(json.loads(record.value).get("holds") == ["forgotten/orders"] for record in consumer)
    consumer.close()

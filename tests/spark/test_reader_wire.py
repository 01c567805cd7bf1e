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
from app.config import KafkaConfig
from app.topics import Topics

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

"""What a client sends before it waits, and results that are too long for Kafka: these with a real controller."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app import records
from app.client import Holdfast
from app.client_errors import NotAnswering, ReplyTooLong
from app.client_wire import Pending
from tests.spark.reader_world import DirectClient, World

MANY = [f"c{number}" for number in range(9)]


class Outbox:
    """A wire without Kafka: answers nothing before it has as many commands as it wants."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self.sent: list[dict[str, Any]] = []
        self.pending: list[Pending] = []

    def submit(self, command_id: str | None, raw: bytes) -> Pending:
        self.sent.append(json.loads(raw))
        assert self.sent[-1]["id"] == command_id
        self.pending.append(Pending())
        if len(self.sent) == self._wanted:
            for message, pending in zip(self.sent, self.pending, strict=True):
                pending.reply.set_result(
                    {"id": message["id"], "status": "ok", "result": message, "seq": len(self.sent)}
                )
        return self.pending[-1]

    def forget(self, command_id: str, pending: Pending) -> None:
        assert self.sent[self.pending.index(pending)]["id"] == command_id
        self.pending[self.pending.index(pending)] = Pending()


def connected(outbox: Outbox) -> Holdfast:
    client = Holdfast(timeout=0.2)
    client._connected = lambda: outbox  # type: ignore[assignment,return-value]  # the only place where Kafka comes in
    return client


def test_several_commands_are_sent_before_the_first_answer_is_awaited() -> None:
    outbox = Outbox(wanted=2)
    client = connected(outbox)
    results = client.send_all([{"type": "first", "id": "a"}, {"type": "second"}])
    assert [result["type"] for result in results] == ["first", "second"]
    assert "issued_at" not in results[0], "what has an id is sent as it is"
    assert "issued_at" in results[1]
    assert client.seq == 2
    silent = connected(Outbox(wanted=3))
    with pytest.raises(NotAnswering) as error:
        silent.send_all([{"type": "first", "id": "a"}, {"type": "second"}])
    assert error.value.command_id == "a"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    there = World(tmp_path)
    described = [{"id": id, "data_source": {"kind": "other"}} for id in MANY]
    there.client.create_collections(described)
    monkeypatch.setattr(records, "MAX_REPLY_BYTES", 500)  # so that these few holds are too many
    yield there
    there.close()


def test_a_result_that_is_too_long_for_kafka_is_read_from_the_tables(world: World) -> None:
    with world.client.hold(MANY, holder="me") as holds:
        assert {hold.id for hold in holds.values()} == set(world.holds())
        assert list(holds) == MANY
    assert world.holds() == {}
    acquired = world.client.acquire_read_holds(MANY, holder="me", at=5, id="mine")
    assert [hold.since for hold in acquired] == [5] * len(MANY)
    assert world.client.acquire_read_holds(MANY, holder="me", at=5, id="mine") == acquired, (
        "a duplicate has its own row"
    )
    catalogue = [f"{id}{id}" * 20 for id in MANY]
    assert world.client.reconcile(catalogue) == (MANY, catalogue)


def test_a_client_that_does_not_know_the_tables_says_so_and_leaves_no_holds(world: World) -> None:
    client = DirectClient(world.controller, world.root, first_offset=1_000)
    client.root = None
    with (
        pytest.raises(ReplyTooLong, match="was applied, but its result is too long") as error,
        client.hold(MANY, holder="me", lease=None),
    ):
        raise AssertionError("the block must not run")
    assert error.value.details["place"]["offset"] == 1_000
    assert world.holds() == {}

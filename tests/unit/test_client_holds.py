"""Holds that keep themselves, against a controller that is a function: what is sent, and what the holder hears."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from app.client import HoldLost, NotAnswering
from app.client_errors import HoldMissing
from app.client_holds import Holds, ReadHold

LEASE_MS = 300


class FakeClient:
    """Answers as a controller would; `on_renew` may refuse. No Kafka: what is tested is when what is sent."""

    def __init__(self, on_renew: Callable[[], None] = lambda: None) -> None:
        self.sent: list[str] = []
        self.renewed = threading.Event()
        self._on_renew = on_renew

    def new_command_id(self) -> str:
        return "c1"

    def send(self, command: dict[str, Any]) -> dict[str, Any]:
        self.sent.append(command["type"])
        holds = [{"hold": f"{command['id']}/{id}", "collection": id, "since": 5} for id in command["collections"]]
        return {"holds": holds}

    def renew_read_holds(self, holds: list[str], *, timeout: float) -> None:
        assert timeout >= 1
        self.sent.append(f"renew {','.join(holds)}")
        self.renewed.set()
        self._on_renew()

    def release_read_holds(self, holds: list[str]) -> None:
        self.sent.append(f"release {','.join(holds)}")

    def downgrade_read_holds(self, moves: dict[str, int]) -> list[ReadHold]:
        return [ReadHold(id, id.partition("/")[2], to) for id, to in moves.items()]

    def post(self, command: dict[str, Any]) -> None:
        self.sent.append(f"post {command['type']} {','.join(command['holds'])}")


def holds_of(client: Any, on_lost: Callable[[HoldLost], None] | None = None) -> Holds:
    return Holds(client, ["orders", "users"], {"holder": "report"}, lease_ms=LEASE_MS, on_lost=on_lost)


def test_holds_are_renewed_while_the_block_runs_and_released_at_its_end() -> None:
    client = FakeClient()
    with holds_of(client) as holds:
        assert holds["orders"] == ReadHold("c1/orders", "orders", 5)
        for _ in range(4):  # longer than the lease
            client.renewed.clear()
            assert client.renewed.wait(LEASE_MS / 1000)
            holds.check()
    assert client.sent[0] == "acquire_read_holds"
    assert client.sent[1] == "renew c1/orders,c1/users"
    assert client.sent[-1] == "release c1/orders,c1/users"


def test_holds_are_released_when_the_block_raises() -> None:
    client = FakeClient()
    with pytest.raises(KeyError), holds_of(client):
        raise KeyError
    assert client.sent[-1] == "release c1/orders,c1/users"


def test_a_hold_that_is_gone_is_noticed() -> None:
    def gone() -> None:
        raise HoldMissing("There is no hold 'c1/orders' (lease expired).", {"reason": "lease expired"})

    told: list[HoldLost] = []
    heard = threading.Event()

    def on_lost(error: HoldLost) -> None:
        told.append(error)
        heard.set()

    with holds_of(FakeClient(gone), on_lost) as holds:
        assert heard.wait(5)
        assert holds.lost
        with pytest.raises(HoldLost, match="lease expired"):
            holds.check()
    assert told[0].reason == "lease expired"


def test_silence_for_as_long_as_the_lease_counts_as_lost_until_a_renewal_succeeds() -> None:
    silent = threading.Event()
    silent.set()

    def answer() -> None:
        if silent.is_set():
            raise NotAnswering("Nobody.", {"sent": True})

    client = FakeClient(answer)
    heard = threading.Event()
    with holds_of(client, lambda _: heard.set()) as holds:
        assert not holds.lost
        assert heard.wait(5)
        with pytest.raises(HoldLost, match="may have passed"):
            holds.check()
        silent.clear()
        client.renewed.clear()
        assert client.renewed.wait(5)
        client.renewed.clear()
        assert client.renewed.wait(5)  # the renewal before this one was answered
        assert not holds.lost


def test_holds_of_which_nothing_was_heard_are_given_up() -> None:
    class Silent(FakeClient):
        def send(self, command: dict[str, Any]) -> dict[str, Any]:
            raise NotAnswering("Nobody.", {"sent": True, "id": command["id"]})

    client = Silent()
    with pytest.raises(NotAnswering), holds_of(client):
        raise AssertionError("the block must not run")
    assert client.sent == ["post release_read_holds c1/orders,c1/users"]


def test_a_downgrade_moves_all_or_some() -> None:
    with holds_of(FakeClient()) as holds:
        holds.downgrade(7)
        holds.downgrade({"users": 9})
        assert [hold.since for hold in holds.values()] == [7, 9]

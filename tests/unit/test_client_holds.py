"""Holds that keep themselves, against a controller that is a function: what is sent, and what the holder hears."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from app.client import HoldLost, NotAnswering
from app.client_errors import CollectionMissing, HoldfastError, HoldMissing, InvalidUsage
from app.client_holds import HOLDS_PER_COMMAND, Holds, ReadHold
from app.client_wire import not_waiting
from app.core.frontier import MAX_TIME_GIVEN
from app.core.holding import MAX_HOLD_ID
from app.protocol import MAX_MESSAGE_BYTES
from app.records import MAX_REPLY_BYTES

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

    def send_all(self, commands: Iterable[dict[str, Any]], *, timeout: float = 30) -> None:
        assert timeout >= 1
        for command in commands:
            assert len(command["holds"]) <= HOLDS_PER_COMMAND
            name = command["type"].removesuffix("_read_holds")
            self.sent.append(f"{name} {','.join(command['holds'])}")
            if name == "renew":
                self.renewed.set()
                self._on_renew()

    def downgrade_read_holds(self, moves: dict[str, int], *, timeout: float | None) -> list[ReadHold]:  # noqa: ARG002
        assert len(moves) <= HOLDS_PER_COMMAND
        return [ReadHold(id, id.partition("/")[2], to) for id, to in moves.items()]

    def post(self, command: dict[str, Any]) -> None:
        assert len(command["holds"]) <= HOLDS_PER_COMMAND
        self.sent.append(f"post {command['type']} {','.join(command['holds'])}")

    def post_later(self, command: dict[str, Any]) -> None:
        self.sent.append(f"later {command['type']} {','.join(command['holds'])}")

    def ids(self, name: str) -> list[str]:
        """Of the holds for which such commands were sent."""
        return [id for each in self.sent if each.startswith(f"{name} ") for id in each.rpartition(" ")[2].split(",")]


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


def test_a_renewal_that_fails_in_an_unknown_way_is_tried_again_and_told(caplog: pytest.LogCaptureFixture) -> None:
    failing = threading.Event()
    failing.set()

    def fail() -> None:
        if failing.is_set():
            raise RuntimeError("a defect")

    client = FakeClient(fail)
    heard = threading.Event()
    with holds_of(client, lambda _: heard.set()) as holds:
        assert heard.wait(5)
        with pytest.raises(HoldLost, match="The last answer was: a defect"):
            holds.check()
        assert any(each.exc_info for each in caplog.records)
        failing.clear()
        for _ in range(2):  # the renewal before the second one was answered
            client.renewed.clear()
            assert client.renewed.wait(5)
        assert not holds.lost


@pytest.mark.parametrize(
    ("failure", "given_up"),
    [
        (NotAnswering("Nobody.", {"sent": True, "id": "c1"}), True),
        (NotAnswering("Nobody to send it to."), False),
        (CollectionMissing("Refused."), False),
        (HoldfastError("Something else writes to the topic."), True),
        (KeyError("holds"), True),
        (KeyboardInterrupt(), True),
    ],
    ids=repr,
)
def test_holds_that_may_have_been_made_are_given_up_when_that_fails(failure: BaseException, given_up: bool) -> None:
    class Failing(FakeClient):
        def send(self, command: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
            raise failure

    client = Failing()
    with pytest.raises(type(failure)), holds_of(client):
        raise AssertionError("the block must not run")
    assert client.sent == (["post release_read_holds c1/orders,c1/users"] if given_up else [])


def test_thousands_of_holds_go_in_commands_of_which_each_fits() -> None:
    collections = [f"c{number}" for number in range(2 * HOLDS_PER_COMMAND + 1)]
    ids = [f"c1/{id}" for id in collections]
    client = FakeClient()
    with Holds(client, collections, {}, lease_ms=LEASE_MS, on_lost=None) as holds:  # type: ignore[arg-type]
        holds.downgrade(7)
        assert [hold.since for hold in holds.values()] == [7] * len(ids)
        assert client.renewed.wait(5)
    assert client.ids("renew")[: len(ids)] == client.ids("release") == ids

    class Silent(FakeClient):
        def send(self, command: dict[str, Any]) -> dict[str, Any]:
            raise NotAnswering("Nobody.", {"sent": True, "id": command["id"]})

    silent = Silent()
    with pytest.raises(NotAnswering), Holds(silent, collections, {}, lease_ms=None, on_lost=None):  # type: ignore[arg-type]
        pass
    assert silent.ids("post") == ids


def test_so_many_holds_fit_into_a_command_and_its_reply_whatever_their_ids() -> None:
    id, collection = "x" * MAX_HOLD_ID, "y" * 128
    moves = [{"hold": id, "to": MAX_TIME_GIVEN}] * HOLDS_PER_COMMAND
    assert len(json.dumps({"type": "downgrade_read_holds", "id": "z" * 128, "holds": moves})) < MAX_MESSAGE_BYTES
    result = [{"hold": id, "collection": collection, "since": MAX_TIME_GIVEN}] * HOLDS_PER_COMMAND
    assert len(json.dumps({"result": {"holds": result}})) < MAX_REPLY_BYTES - 1_000


def test_what_the_garbage_collector_ends_waits_for_no_answer() -> None:
    client = FakeClient()
    holds = holds_of(client).__enter__()
    with not_waiting():
        holds.__exit__(None, None, None)
    assert client.sent[-1] == "later release_read_holds c1/orders,c1/users"


def test_holds_are_for_one_block() -> None:
    client = FakeClient()
    with holds_of(client) as holds, pytest.raises(InvalidUsage, match="Call `hold` again"), holds:
        pass
    with pytest.raises(InvalidUsage, match="Call `hold` again"), holds:
        raise AssertionError("nobody would renew them")
    assert client.sent.count("acquire_read_holds") == 1


def test_a_downgrade_moves_all_or_some() -> None:
    with holds_of(FakeClient()) as holds:
        holds.downgrade(7)
        holds.downgrade({"users": 9})
        assert [hold.since for hold in holds.values()] == [7, 9]

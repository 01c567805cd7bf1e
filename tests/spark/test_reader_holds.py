"""The holds of reads against a real controller. Nothing is read here, so no Spark is started."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from app.client_errors import HoldLost, InvalidArgument, NotAnswering
from app.client_wire import Reply
from app.reading import guard
from app.reading.catalog import Catalog
from app.reading.errors import ReadTimeout
from app.reading.guard import Asked, Guard
from app.reading.planning import Planner
from tests.spark.reader_world import World, wait_until


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    there = World(tmp_path)
    there.create("orders")
    there.append("orders", [(1, 1, "a", 1)], 3)
    yield there
    there.close()


def guarded(world: World, *, at: int | None = None, hold: str | None = None, lease_ms: int = 60_000) -> Guard:
    catalog = Catalog(world.root, {}, timeout_s=30)
    asked = Asked("me", "a test", lease_ms=lease_ms)
    return Guard(world.client, catalog, "orders", at=at, hold=hold, asked=asked)


def planner(world: World, held: Guard) -> Planner:
    source = Catalog(world.root, {}, timeout_s=30).source("orders", at_least=world.client.seq)
    return Planner(source, held, {})


def test_a_clone_has_a_lease_of_its_own_before_anything_is_heard_of_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mine,) = world.client.acquire_read_holds(["orders"], holder="me", at=1)
    sent: list[list[str]] = []
    ask_all = world.client.ask_all

    def dying(commands: Iterable[Mapping[str, Any]], *, timeout: float | None = None) -> list[Reply]:
        commands = list(commands)
        sent.append([command["type"] for command in commands])
        ask_all(commands, timeout=timeout)
        raise ConnectionAbortedError("the process ends here")

    with monkeypatch.context() as patched:
        patched.setattr(world.client, "ask_all", dying)
        patched.setattr(world.client, "post", lambda _: None)  # nor does it let anything go
        with pytest.raises(ConnectionAbortedError), guarded(world, hold=mine.id):
            pass
    assert sent == [["clone_read_holds", "renew_read_holds"]], "both are on their way before anything is awaited"
    assert {hold.lease_ms for id, hold in world.holds().items() if id != mine.id} == {60_000}


def test_a_clone_that_gets_no_lease_is_let_go(world: World) -> None:
    (mine,) = world.client.acquire_read_holds(["orders"], holder="me", at=1)
    world.client.update_parameters({"hold_max_lease": "10s"})
    with pytest.raises(InvalidArgument, match="hold_max_lease"), guarded(world, hold=mine.id):
        pass
    assert set(world.holds()) == {mine.id}


def test_files_are_pinned_anew_while_a_read_waits(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guard, "PIN_AGAIN_MS", 0)
    with guarded(world, at=9) as held:
        (before,) = world.holds().values()
        world.append("orders", [], 5)
        with pytest.raises(ReadTimeout):
            planner(world, held).at(9, timeout_s=0)
        (after,) = world.holds().values()
        assert (after.pinned_version or 0) > (before.pinned_version or 0)
        assert after.since == before.since

        def silent(*_: object, **__: object) -> None:
            raise NotAnswering("Nobody.", {"sent": True, "id": "x"})

        waiting = planner(world, held)
        with monkeypatch.context() as patched:
            patched.setattr(world.client, "ask_all", silent)
            with pytest.raises(ReadTimeout):  # the hold is still there
                waiting.at(9, timeout_s=0)
        assert "could not be pinned anew" in caplog.text
        assert set(world.holds()) == {after.id}
    assert world.holds() == {}


def test_a_hold_that_is_further_on_than_we_heard_is_kept(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    downgrade = world.client.downgrade_read_holds

    def unheard(moves: Mapping[str, int | None], **options: Any) -> None:
        downgrade(moves, **options)
        raise NotAnswering("Nobody.", {"sent": True, "id": "x"})

    world.policy("orders", kind="lag_writes_by", lag=0)
    with guarded(world, at=3) as held:
        world.append("orders", [], 10)
        with monkeypatch.context() as patched:
            patched.setattr(world.client, "downgrade_read_holds", unheard)
            with pytest.raises(NotAnswering):
                held.downgrade(9)
        assert held.since == 3
        before = world.holds()
        with monkeypatch.context() as patched:
            patched.setattr(guard, "PIN_AGAIN_MS", 0)
            held.pin_again()  # at 3, which can be held no more
        assert "could not be pinned anew" in caplog.text
        assert world.holds() == before
        held.check()
        sent = len(world.client.refused)
        held.pin_again()
        assert len(world.client.refused) == sent, "it is not tried all the time"
        held.downgrade(9)
        assert held.since == 9


def test_a_hold_is_kept_when_no_other_like_it_is_given(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guard, "PIN_AGAIN_MS", 0)
    with guarded(world, at=2) as held:
        before = world.holds()
        world.client.update_parameters({"hold_max_lease": "10s"})
        held.pin_again()
        assert "hold_max_lease" in caplog.text
        assert world.holds() == before
        held.check()


def test_a_hold_that_was_removed_behind_a_read_is_a_lost_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with guarded(world, at=1, lease_ms=3_000) as held:
        world.client.release_read_holds(list(world.holds()))
        with pytest.raises(HoldLost, match="released") as lost:
            held.downgrade(2)
        assert lost.value.reason == "released"
        world.policy("orders", kind="valid_from", frontier=2)
        monkeypatch.setattr(guard, "PIN_AGAIN_MS", 0)
        held.pin_again()  # is refused, of which there may be other reasons: that it is gone, a renewal hears
        wait_until(lambda: any(holds.lost for holds in held._kept), "a renewal was refused")
        with pytest.raises(HoldLost, match="released"):
            held.check()


def test_what_is_interrupted_while_it_lets_go_leaves_nothing_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mine,) = world.client.acquire_read_holds(["orders"], holder="me", at=1)
    held = guarded(world, hold=mine.id).__enter__()  # a clone, and a second one that pins
    kept = list(held._kept)
    assert len(world.holds()) == 3
    send_all = world.client.send_all

    def interrupted(commands: Iterable[Mapping[str, Any]], **options: Any) -> list[dict[str, Any]]:
        monkeypatch.undo()
        send_all(commands, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(world.client, "send_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        held.release()
    assert set(world.holds()) == {mine.id}
    assert all(holds._ended.is_set() for holds in kept), "nothing is renewed any more"

"""Subscriptions: nothing is missed, nothing comes twice, whatever is merged, and wherever one goes on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from app.client_errors import CollectionMissing, HoldLost, InvalidArgument, NotAnswering, ReadBeforeSince
from app.reader import Reader, ReadTimeout, ShardUnreadable, Step, Subscription
from app.reading import guard, planning, subscription
from app.reading.catalog import Catalog
from app.status import StateMissing
from tests.spark.reader_world import Update, World, summed, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FIRST = [(1, 1, "a", 1), (2, 1, "b", 2)]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(subscription, "DOWNGRADE_EVERY_MS", 0)
    there = World(tmp_path)
    there.create("orders")
    there.append("orders", FIRST, 3)
    yield there
    there.close()


@pytest.fixture
def reader(world: World, spark: SparkSession) -> Reader:
    return Reader(spark, root=world.root, client=world.client)


def updates_of(step: Step) -> Counter[Update]:
    found = Counter(tuple(row) for row in step.frame.collect())
    assert Counter(tuple(row.values()) for batch in step.batches() for row in batch.to_pylist()) == found
    return found


def as_updates(content: dict[Update, int], at: int) -> Counter[Update]:
    return Counter((at, count, *data) for data, count in content.items())


def held_since(world: World) -> list[int]:
    return sorted(int(hold.since) for hold in world.holds().values())


def bounds(step: Step) -> tuple[int, int | None, bool]:
    return step.lower, step.upper, step.is_snapshot


def test_the_snapshot_comes_first_and_then_exactly_what_comes_after_it(world: World, reader: Reader) -> None:
    with reader.subscribe("orders", 1, timeout="30s") as changes:
        assert changes.completed is None
        step = next(changes)
        assert bounds(step) == (0, 2, True)
        assert updates_of(step) == as_updates(summed(FIRST, 1), 1)
        step = next(changes)
        assert bounds(step) == (2, 3, False)
        assert step.completed == 2
        assert updates_of(step) == Counter(FIRST[1:])
        more = [(3, 1, "c", 3), (3, 1, "c", 3), (4, -1, "a", 1)]
        world.append("orders", more, 6)
        step = next(changes)
        assert bounds(step) == (3, 6, False)
        assert changes.completed == 2
        assert updates_of(step) == Counter(more)
        world.append("orders", [(7, 1, "d", 4)], 2**63 - 1)
        step = next(changes)
        assert bounds(step) == (6, None, False)
        assert updates_of(step) == Counter([(7, 1, "d", 4)])
        with pytest.raises(StopIteration):
            next(changes)
    assert world.holds() == {}


def test_its_hold_follows_the_consumer_and_merges_under_it_change_nothing(world: World, reader: Reader) -> None:
    world.policy("orders", kind="lag_writes_by", lag=0)  # so that only the hold keeps anything
    with pytest.raises(ReadBeforeSince), reader.subscribe("orders", 1):
        pass
    world.append("orders", [(3, 1, "c", 3)], 4)
    seen: Counter[Update] = Counter()
    with reader.subscribe("orders", timeout="30s") as changes:
        assert held_since(world) == [4]
        world.append("orders", [(4, -1, "a", 1), (4, 1, "d", 4)], 5)
        world.merge("orders", 4)
        seen += updates_of(next(changes))
        for time in range(5, 9):
            world.append("orders", [(time, 1, "d", 4), (time, 1, "e", time)], time + 1)
            world.merge("orders", time - 1)
            step = next(changes)
            assert held_since(world) == [time - 1], "what the consumer has done with is let go"
            assert bounds(step) == (time, time + 1, False)
            seen += updates_of(step)
    everything = [*FIRST, (3, 1, "c", 3), (4, -1, "a", 1), (4, 1, "d", 4)]
    everything += [update for time in range(5, 9) for update in ((time, 1, "d", 4), (time, 1, "e", time))]
    assert summed(seen.elements(), 100) == summed(everything, 100)


def test_it_goes_on_where_another_ended(world: World, reader: Reader) -> None:
    (mine,) = world.client.acquire_read_holds(["orders"], holder="me", at=1)
    world.policy("orders", kind="lag_writes_by", lag=0)
    with reader.subscribe("orders", 1, hold=mine.id, timeout="30s") as changes:
        next(changes)
        first = updates_of(next(changes))
        world.append("orders", [(3, 1, "c", 3)], 4)
        next(changes)  # and here the consumer fails, before it is done with it
    assert held_since(world) == [1], "the hold that was given is the caller's to move"
    assert changes.completed == 2
    world.client.downgrade_read_holds({mine.id: changes.completed})
    world.append("orders", [(4, 1, "e", 5)], 6)
    world.merge("orders", 2)
    with reader.subscribe("orders", changes.completed, snapshot=False, hold=mine.id) as again:
        step = next(again)
        assert bounds(step) == (3, 6, False)
        assert first + updates_of(step) == Counter([FIRST[1], (3, 1, "c", 3), (4, 1, "e", 5)])
    with pytest.raises(InvalidArgument, match="needs `as_of`"):
        reader.subscribe("orders", snapshot=False)


def test_after_the_end_of_a_closed_collection_nothing_comes_again(world: World, reader: Reader) -> None:
    world.append("orders", [(3, 1, "c", 3)], 2**63 - 1)
    with reader.subscribe("orders", 2, snapshot=False, timeout="30s") as changes:
        assert updates_of(next(changes)) == Counter([(3, 1, "c", 3)])
        assert changes.completed == 2, "it is not done with yet"
        assert list(changes) == []
    assert changes.completed is not None
    with reader.subscribe("orders", changes.completed, snapshot=False, timeout="30s") as again:
        (step,) = ((step.upper, step.completed, step.frame.collect()) for step in again)
    assert step == (None, changes.completed, [])
    assert again.completed == changes.completed


def test_a_subscription_that_runs_for_long_does_not_pin_old_files_for_ever(
    world: World, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reader.subscribe("orders", 1, timeout="30s") as changes:
        next(changes)
        (before,) = world.holds().values()
        world.append("orders", [], 4)
        next(changes)
        monkeypatch.setattr(guard, "PIN_AGAIN_MS", 0)
        world.append("orders", [(4, 1, "c", 3)], 5)
        assert updates_of(next(changes)) == Counter([(4, 1, "c", 3)])
        (after,) = world.holds().values()
        assert after.id != before.id
        assert after.pin_files
        assert (after.pinned_version or 0) > (before.pinned_version or 0)
        assert int(after.since) == 3
    assert world.holds() == {}


def test_it_goes_on_while_nobody_answers_for_as_long_as_its_lease_lasts(
    world: World, reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def silent(*_: object, **__: object) -> None:
        raise NotAnswering("Nobody.", {"sent": True})

    with reader.subscribe("orders", 2, timeout="30s") as changes:
        next(changes)
        with monkeypatch.context() as patched:
            patched.setattr(world.client, "downgrade_read_holds", silent)
            for time in (3, 4):
                world.append("orders", [(time, 1, "c", 3)], time + 1)
                assert updates_of(next(changes)) == Counter([(time, 1, "c", 3)])
        assert "could not be moved on" in caplog.text
        assert held_since(world) == [2]
        world.append("orders", [], 6)
        next(changes)
        assert held_since(world) == [4]


def test_waiting_for_a_step_can_be_limited_and_stopped(world: World, reader: Reader) -> None:
    with reader.subscribe("orders", 2, timeout="100ms") as changes:
        next(changes)
        for _ in range(2):  # asked again, it does not say that this is the end
            with pytest.raises(ReadTimeout):
                next(changes)
    changes = reader.subscribe("orders", 2)
    steps: list[Step] = []
    consumer = threading.Thread(target=lambda: steps.extend(changes))
    consumer.start()
    wait_until(lambda: changes.completed == 2, "it waits for the next step")
    changes.stop()
    consumer.join()
    assert len(steps) == 1
    assert world.holds() == {}


def test_it_can_be_asked_again_for_what_took_too_long(world: World, reader: Reader) -> None:
    world.policy("orders", kind="lag_writes_by", lag=0)
    world.append("orders", [(3, 1, "c", 3)], 4)
    changes = reader.subscribe("orders", timeout="100ms")
    with pytest.raises(ReadTimeout, match="at 4, but it is written only up to 4"):
        next(changes)
    world.append("orders", [(4, 1, "d", 4)], 5)
    assert bounds(next(changes)) == (0, 5, True)
    for _ in range(2):
        with pytest.raises(ReadTimeout):
            next(changes)
        assert held_since(world) == [4], "nobody else can merge what comes next"
    assert changes.completed == 4
    world.append("orders", [(5, 1, "e", 5)], 6)
    world.append("orders", [(6, 1, "f", 6)], 8)
    step = next(changes)
    assert bounds(step) == (5, 8, False)
    assert updates_of(step) == Counter([(5, 1, "e", 5), (6, 1, "f", 6)])
    with pytest.raises(ReadTimeout):
        next(changes)
    del changes
    assert world.holds() == {}, "it can still be forgotten"


def test_a_store_that_fails_for_a_moment_does_not_end_it(
    world: World, reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(planning, "LOOK_AGAIN_AFTER_S", (0.0,))
    monkeypatch.setattr(subscription, "LOOK_FOR_DROP_MS", 0)
    update, is_dropped = DeltaTable.update_incremental, Catalog.is_dropped

    def read_failing(_: DeltaTable) -> None:
        monkeypatch.setattr(DeltaTable, "update_incremental", update)
        raise OSError("the shard's store is away")

    def state_failing(*_: object) -> bool:
        monkeypatch.setattr(Catalog, "is_dropped", is_dropped)
        raise StateMissing("the store of the state is away")

    with reader.subscribe("orders", 2, timeout="300ms") as changes:
        next(changes)
        monkeypatch.setattr(DeltaTable, "update_incremental", read_failing)
        monkeypatch.setattr(Catalog, "is_dropped", state_failing)
        with pytest.raises(ReadTimeout):
            next(changes)
        assert "the shard's store is away" in caplog.text
        assert "the store of the state is away" in caplog.text
        world.append("orders", [(3, 1, "c", 3)], 4)
        assert updates_of(next(changes)) == Counter([(3, 1, "c", 3)])

        def failing(_: DeltaTable) -> None:
            raise OSError("and does not come back")

        monkeypatch.setattr(DeltaTable, "update_incremental", failing)
        with pytest.raises(ShardUnreadable, match="does not come back"):
            next(changes)
    assert world.holds() == {}


def test_nobody_who_waits_for_a_step_waits_long_for_its_hold_to_move(
    world: World, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription, "DOWNGRADE_EVERY_MS", 1_000)
    now = 0
    asked: list[tuple[int, float | None]] = []

    def silent(_: object, *, timeout: float | None = None) -> None:
        asked.append((now, timeout))
        raise NotAnswering("Nobody.", {"sent": True})

    downgrade = world.client.downgrade_read_holds
    with reader.subscribe("orders", 2, timeout="30s") as changes:
        next(changes)
        world.append("orders", [], 4)
        next(changes)
        monkeypatch.setattr(world.client, "downgrade_read_holds", silent)
        monkeypatch.setattr(subscription, "steady_ms", lambda: 10_000_000 + 1_000 * now)
        for now in (0, 1, 2, 5, 6, 13, 14, 29, 30, 61, 62, 121, 122, 181, 182):
            world.append("orders", [], 5 + now)
            next(changes)
        assert [at for at, _ in asked] == [0, 2, 6, 14, 30, 62, 122, 182]
        assert {timeout for _, timeout in asked} == {subscription.DOWNGRADE_TIMEOUT_S}
        monkeypatch.setattr(world.client, "downgrade_read_holds", downgrade)
        for now in (300, 301):
            world.append("orders", [], 5 + now)
            next(changes)
            assert held_since(world) == [changes.completed], "it is moved on as often as ever"


@pytest.mark.parametrize("snapshot", [True, False])
def test_it_says_aloud_that_it_waits_for_its_first_time_and_quietly_for_what_comes_later(
    world: World, reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, snapshot: bool
) -> None:
    monkeypatch.setattr(planning, "SAY_FIRST_S", 0.0)
    changes = reader.subscribe("orders", 5, snapshot=snapshot, timeout="100ms")
    for upper, level in ((None, "WARNING"), (6, "INFO")):
        if upper is not None:
            world.append("orders", [], upper)
            if snapshot:
                next(changes)
        caplog.clear()
        with pytest.raises(ReadTimeout):
            next(changes)
        assert {each.levelname for each in caplog.records if each.message.startswith("waiting ")} == {level}
    changes.close()


def test_what_fails_after_the_hold_was_lost_is_said_to_be_that(
    world: World, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    reader = Reader(spark, root=world.root, client=world.client, lease="300ms")

    def lose(changes: Subscription) -> Step:
        step = next(changes)
        caplog.clear()
        world.client.release_read_holds(list(world.holds()))
        wait_until(lambda: "holds lost" in caplog.text, "a renewal was refused")
        for file in Path(world.shard("orders").location).glob("*.parquet"):
            file.unlink()
        return step

    def read(in_parts: bool) -> None:
        with reader.subscribe("orders", 2) as changes:
            step = lose(changes)
            if in_parts:
                with pytest.raises(HoldLost, match="released"):
                    list(step.batches())
            step.frame.collect()

    for in_parts in (True, False):
        with pytest.raises(HoldLost, match="released") as lost:
            read(in_parts)
        assert "parquet" in str(lost.value.__context__)
        assert world.holds() == {}


def test_it_is_stopped_while_there_is_always_more(world: World, reader: Reader) -> None:
    changes = reader.subscribe("orders", 1)
    assert next(changes).is_snapshot
    assert bounds(next(changes)) == (2, 3, False)
    world.append("orders", [(3, 1, "c", 3)], 4)
    changes.stop()
    assert list(changes) == []
    assert changes.completed == 2
    assert world.holds() == {}


def test_it_does_not_keep_a_dropped_collection_for_ever(
    world: World, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription, "LOOK_FOR_DROP_MS", 0)
    with reader.subscribe("orders", 2, timeout="30s") as changes:
        next(changes)
        world.append("orders", [(3, 1, "c", 3)], 4)
        world.client.drop_collections(["orders"])
        assert updates_of(next(changes)) == Counter([(3, 1, "c", 3)])
        with pytest.raises(CollectionMissing, match="up to 3 were given"):
            next(changes)
    assert world.holds() == {}
    assert world.controller.read(lambda state: "orders" not in state.collections)


def test_a_drop_is_noticed_while_there_is_always_more(
    world: World, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription, "LOOK_FOR_DROP_MS", 0)
    with reader.subscribe("orders", 2, timeout="30s") as changes:
        next(changes)
        world.client.drop_collections(["orders"])
        world.controller.wait_for_tables()
        world.append("orders", [(3, 1, "c", 3)], 4)
        assert bounds(next(changes)) == (3, 4, False)
        world.append("orders", [(4, 1, "c", 3)], 5)
        with pytest.raises(CollectionMissing, match="up to 3 were given"):
            next(changes)
    assert world.holds() == {}

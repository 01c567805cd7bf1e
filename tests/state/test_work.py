"""Which physical work is started when, and what becomes of it, with a real journal; the work itself is recorded."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.clock import wall_ms
from app.config import Config, StreamsConfig
from app.controller import Controller
from app.core.advancing import Observation
from app.core.frontier import EMPTY, Frontier
from app.core.images import Shard
from app.records import Record, Topic
from app.state.errors import Fenced
from app.work import FINALIZE_EVERY_MS, Job, Work

TOPIC = Topic("commands", "topic-1")
LIMIT_S = 30.0


def works(_: str, __: Job) -> None:
    """Nothing special happens."""


class Recording:
    """Operations that only remember what they were asked to do, and fail or wait when told to."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []
        self.jobs: list[Job] = []
        self.again_at: int | None = None
        self.behave: Callable[[str, Job], None] = works

    def _do(self, kind: str, job: Job) -> None:
        self.behave(kind, job)
        self.done.append((kind, job.shard.owner))
        self.jobs.append(job)

    def create(self, job: Job) -> None:
        self._do("create", job)

    def evolve(self, job: Job) -> None:
        self._do("evolve", job)

    def tend(self, job: Job) -> int | None:
        self._do("tend", job)
        return self.again_at

    def finalize(self, job: Job) -> None:
        self._do("finalize", job)

    def purge(self, job: Job) -> None:
        self._do("purge", job)

    def taken(self) -> list[tuple[str, str]]:
        taken, self.done = self.done, []
        return taken


class World:
    """A controller whose clock stands still until it is told to go on, and its work."""

    def __init__(self, tmp_path: Path, spawn: Callable[[Callable[[], None], str], None]) -> None:
        config = Config(
            root=str(tmp_path / "root"),
            warehouse=[str(tmp_path / "warehouse")],
            streams=StreamsConfig(checkpoints=str(tmp_path / "checkpoints")),
        )
        self.controller = Controller(config)
        self.controller.boot()
        self.time = self.controller.now()
        self.controller._clock.now = lambda: self.time  # type: ignore[method-assign]  # time passes when we say so
        self.operations = Recording()
        self.work = Work(self.controller, self.operations, spawn=spawn)
        self._offset = 0

    def command(self, type: str, **fields: Any) -> None:
        line = {"type": type, "id": f"c{self._offset}", **fields}
        (reply,) = self.controller.apply(TOPIC, [Record(0, self._offset, wall_ms(), json.dumps(line).encode())])
        assert json.loads(reply.value)["status"] == "ok", reply
        self._offset += 1

    def create(self, *ids: str) -> None:
        tables = [{"id": id, "data_source": {"kind": "table"}, "schema": "k STRING"} for id in ids]
        self.command("create_collections", register_ts=1, collections=tables)

    def shard(self, owner: str) -> Shard:
        shards = self.controller.read(lambda state: list(state.shards.values()))
        return next(shard for shard in shards if shard.owner == owner)

    def observe(self, owner: str, upper: int, version: int) -> None:
        self.controller.observe([Observation(self.shard(owner).id, Frontier(upper), version)])

    def pass_ms(self, ms: int) -> None:
        self.time += ms
        self.controller.heartbeat(applied_until=self.time)
        self.work.tick()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, spawn=lambda work, _: work())
    yield made
    made.controller.close()


def test_a_new_shard_is_created_once_and_then_left_alone_until_it_is_seen(world: World) -> None:
    world.create("a", "b")
    world.work.tick()
    assert world.operations.taken() == [("create", "a"), ("create", "b")]
    assert world.operations.jobs[0].schema == "k STRING"
    world.pass_ms(60_000)
    assert world.operations.taken() == []


def test_a_shard_is_tended_when_its_since_has_moved_and_not_more_often_than_that_may_happen(world: World) -> None:
    world.create("a")
    world.observe("a", 100, 1)
    world.operations.again_at = world.time + 6 * 3_600_000  # to look for orphans
    world.work.tick()
    assert ("tend", "a") in world.operations.taken(), "once, when it is first seen: something may be left of an earlier"
    world.command("set_read_policies", policies=[{"collection": "a", "policy": {"kind": "step_back"}}])
    world.pass_ms(1)
    assert world.operations.taken() == []
    world.pass_ms(30_000)
    assert world.operations.taken() == [("tend", "a")]
    assert world.operations.jobs[-1].shard.since == 99, "durable before anything is done because of it"
    for upper in range(101, 110):
        world.observe("a", upper, upper)
        world.pass_ms(100)
    assert world.operations.taken() == []
    world.pass_ms(30_000)
    assert world.operations.taken() == [("tend", "a")]


def test_a_clean_up_that_has_to_wait_comes_again(world: World) -> None:
    world.create("a")
    world.observe("a", 100, 7)
    world.command("acquire_read_holds", collections=["a"], holder="r", lease="1h", pin_files=True)
    world.observe("a", 101, 9)
    world.operations.again_at = world.time + 5_000
    world.work.tick()
    assert world.operations.jobs[-1].clean_up_limit == 7, "the hold pins what was there when it came"
    world.operations.again_at = None
    world.operations.taken()
    world.pass_ms(5_000)
    assert ("tend", "a") in world.operations.taken()


def test_a_dropped_shard_is_finalized_and_purged_in_time(world: World) -> None:
    world.create("a")
    world.observe("a", 100, 1)
    world.command("update_parameters", parameters={"tombstone_retention": "2h"})
    world.command("drop_collections", collections=["a"])
    world.pass_ms(FINALIZE_EVERY_MS)
    assert world.operations.taken()[-1] == ("finalize", "a")
    assert world.operations.jobs[-1].shard.state == "finalizing"
    assert (world.shard("a").state, world.shard("a").upper) == ("finalized", EMPTY)
    world.pass_ms(2 * 3_600_000)
    assert world.operations.taken() == [("purge", "a")]
    assert world.shard("a").purged_at == world.time
    world.pass_ms(3_600_000)
    assert world.operations.taken() == []


def test_what_fails_is_said_in_the_row_and_tried_again_later_and_later(world: World) -> None:
    def fail(_: str, job: Job) -> None:
        raise OSError(f"no space left for {job.shard.owner}")

    world.operations.behave = fail
    world.create("a")
    world.work.tick()
    assert world.shard("a").last_error == "create: OSError: no space left for a"
    world.operations.behave = works
    world.pass_ms(4_999)
    assert world.operations.taken() == []
    world.pass_ms(1)
    assert world.operations.taken() == [("create", "a")]
    assert world.shard("a").last_error is None


def test_a_failed_finalization_is_counted_and_does_not_stop_the_others(world: World) -> None:
    def fail(kind: str, job: Job) -> None:
        if kind == "finalize" and job.shard.owner == "a":
            raise OSError("it is in use")

    world.operations.behave = fail
    world.create("a", "b")
    world.command("drop_collections", collections=["a", "b"])
    world.pass_ms(FINALIZE_EVERY_MS)
    assert (world.shard("a").state, world.shard("b").state) == ("finalizing", "finalized")
    assert (world.shard("a").attempts, world.shard("a").last_error) == (1, "finalize: OSError: it is in use")
    world.operations.behave = works
    world.pass_ms(FINALIZE_EVERY_MS)
    assert world.shard("a").state == "finalized"


def test_one_that_was_replaced_begins_nothing_more_and_says_so(world: World, tmp_path: Path) -> None:
    world.create("a")
    successor = World(tmp_path, spawn=lambda work, _: work())
    world.work.tick()
    assert world.operations.taken() == []
    with pytest.raises(Fenced):
        world.work.check()
    successor.work.tick()
    assert successor.operations.taken() == [("create", "a")], "what is to be done follows from the state"
    successor.controller.close()


def test_altered_tables_get_their_columns_also_after_a_restart(world: World, tmp_path: Path) -> None:
    world.create("a")
    world.observe("a", 100, 1)
    world.command("alter_table_desc", existing="a", new="a2", schema="k STRING, v INT", expected_version=0)
    world.pass_ms(1)
    world.pass_ms(1)
    assert ("evolve", "a2") in world.operations.taken()
    assert world.operations.jobs[-1].schema == "k STRING, v INT"
    world.pass_ms(1)
    assert world.operations.taken() == []
    successor = World(tmp_path, spawn=lambda work, _: work())
    successor.pass_ms(1)
    successor.pass_ms(1)
    assert ("evolve", "a2") in successor.operations.taken()
    successor.controller.close()


def test_one_stuck_finalization_does_not_stop_the_others(tmp_path: Path) -> None:
    threads: list[threading.Thread] = []

    def spawn(work: Callable[[], None], name: str) -> None:
        threads.append(threading.Thread(target=work, name=name))
        threads[-1].start()

    world = World(tmp_path, spawn)
    stuck = threading.Event()

    def behave(kind: str, job: Job) -> None:
        if kind == "finalize" and job.shard.owner == "t0":
            assert stuck.wait(LIMIT_S)

    def run(ms: int) -> None:
        world.pass_ms(ms)
        for thread in threads:
            if thread.name != f"finalize {world.shard('t0').id}":
                thread.join(LIMIT_S)

    world.operations.behave = behave
    ids = [f"t{number}" for number in range(6)]
    world.create(*ids)
    world.command("update_parameters", parameters={"finalization_concurrency": 2})
    world.command("drop_collections", collections=ids)
    for _ in range(8):
        run(FINALIZE_EVERY_MS)
        finalizing = [kind for kind in world.work.busy.values() if kind == "finalize"]
        assert len(finalizing) <= 2
    assert {world.shard(id).state for id in ids[1:]} == {"finalized"}
    assert world.shard("t0").state == "finalizing"
    stuck.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert world.shard("t0").state == "finalized"
    world.controller.close()

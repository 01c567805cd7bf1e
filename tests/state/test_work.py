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
from app.core.shard_work import Merge
from app.job import Job, Tended
from app.records import Record, Topic
from app.state.errors import Fenced
from app.work import FINALIZE_EVERY_MS, WORKERS, Work

TOPIC = Topic("commands", "topic-1")
LIMIT_S = 30.0


def works(_: str, __: Job) -> None:
    """Nothing special happens."""


class Recording:
    """Operations that only remember what they were asked to do, and fail or wait when told to."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []
        self.jobs: list[Job] = []
        self.tended = Tended()
        self.merge: Merge | None = None
        self.behave: Callable[[str, Job], None] = works

    def _do(self, kind: str, job: Job) -> None:
        self.behave(kind, job)
        self.done.append((kind, job.shard.owner))
        self.jobs.append(job)

    def create(self, job: Job) -> None:
        self._do("create", job)

    def evolve(self, job: Job) -> None:
        self._do("evolve", job)

    def tend(self, job: Job, merged: Callable[[Merge], None]) -> Tended:
        self._do("tend", job)
        if self.merge is not None:
            merged(self.merge)
        return self.tended

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
        self._offset = self.controller.offsets(TOPIC).get(0, 0)

    def command(self, type: str, **fields: Any) -> None:
        line = {"type": type, "id": f"c-{self.controller.epoch}-{self._offset}", **fields}
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
    world.operations.tended = Tended(world.time + 6 * 3_600_000)  # to look for orphans
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
    world.operations.tended = Tended(world.time + 5_000)
    world.work.tick()
    assert world.operations.jobs[-1].clean_up_limit == 7, "the hold pins what was there when it came"
    world.operations.tended = Tended()
    world.operations.taken()
    world.pass_ms(5_000)
    assert ("tend", "a") in world.operations.taken()


def test_what_we_do_to_a_closed_shard_is_journalled_though_nobody_watches_it_any_more(world: World) -> None:
    world.create("open", "closed")
    world.observe("open", 100, 7)
    world.observe("closed", EMPTY, 7)
    world.operations.tended = Tended(world.time + 5_000, log_version=9)
    world.work.tick()
    assert world.shard("closed").log_version == 9
    assert world.shard("open").log_version == 7, "there may be an upper in between that nobody has seen"
    world.pass_ms(5_000)
    closed = [job for job in world.operations.jobs if job.shard.owner == "closed"]
    assert closed[-1].clean_up_limit == 9, "so that the files which it removed can go"


def test_a_shard_that_is_closed_while_it_is_merged_is_looked_after_once_more(world: World) -> None:
    """The watching ended with the seal, so nobody has seen the version in which the merge removed its files."""
    world.create("a")
    world.observe("a", 100, 1)

    def closed_meanwhile(kind: str, _: Job) -> None:
        if kind == "tend":
            world.observe("a", EMPTY, 2)

    world.operations.behave = closed_meanwhile
    world.operations.tended = Tended(log_version=3, pinned=3)
    world.work.tick()
    assert world.operations.taken() == [("tend", "a")]
    assert world.shard("a").log_version == 2
    world.operations.behave = works
    world.operations.tended = Tended(log_version=3)
    world.pass_ms(1)
    world.pass_ms(1)
    assert world.operations.taken() == [("tend", "a")], "and not again and again"
    assert world.shard("a").log_version == 3


class Later:
    """Threads that have been started, but have not come far yet."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, Callable[[], None]]] = []

    def __call__(self, work: Callable[[], None], name: str) -> None:
        self.waiting.append((name, work))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.waiting]

    def run(self) -> None:
        waiting, self.waiting = self.waiting, []
        for _, work in waiting:
            work()


def test_long_merges_keep_nothing_else_waiting(tmp_path: Path) -> None:
    later = Later()
    world = World(tmp_path, later)
    merging = [f"merging{number}" for number in range(WORKERS + 1)]
    world.create("gone", *merging)
    for id in merging:
        world.observe(id, 100, 1)
    world.command("drop_collections", collections=["gone"])
    for _ in range(2 * WORKERS):
        world.pass_ms(FINALIZE_EVERY_MS)
    tends = [name for name in later.names if name.startswith("tend")]
    assert len(tends) == WORKERS, "no more than that at once"
    assert f"finalize {world.shard('gone').id}" in later.names
    world.create("new")
    world.pass_ms(1)
    assert f"create {world.shard('new').id}" in later.names
    world.controller.close()


def test_no_shard_is_worked_on_twice_at_a_time(tmp_path: Path) -> None:
    later = Later()
    world = World(tmp_path, later)
    world.create("a")
    world.observe("a", 100, 1)
    world.command("alter_table_desc", existing="a", new="a2", schema="k STRING, v INT", expected_version=0)
    for _ in range(3):
        world.pass_ms(60_000)
    assert later.names == [f"evolve {world.shard('a2').id}"], "its clean-up is due too, but has to wait"
    later.run()
    world.pass_ms(1)
    assert later.names == [f"tend {world.shard('a2').id}"]
    world.controller.close()


def test_a_finalization_that_ends_while_the_next_round_begins_is_not_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = Later()
    world = World(tmp_path, later)
    world.create("a")
    world.command("drop_collections", collections=["a"])
    world.pass_ms(FINALIZE_EVERY_MS)
    assert later.names == [f"finalize {world.shard('a').id}"]
    step = world.controller.step

    def overtaken(origin: str, compute: Any) -> Any:
        result = step(origin, compute)
        if origin == "finalization":
            later.run()
        return result

    monkeypatch.setattr(world.controller, "step", overtaken)
    world.pass_ms(FINALIZE_EVERY_MS)
    assert world.shard("a").state == "finalized"
    assert later.names == []
    world.work.check()
    world.controller.close()


def test_a_round_tries_every_dropped_shard_as_soon_as_there_is_room(world: World) -> None:
    ids = [f"t{number}" for number in range(25)]
    world.create(*ids)
    world.command("drop_collections", collections=ids)
    world.pass_ms(FINALIZE_EVERY_MS)
    for _ in range(2):
        world.work.tick()
    assert {world.shard(id).state for id in ids} == {"finalized"}


def test_a_round_of_finalization_comes_every_five_seconds(world: World) -> None:
    world.work.tick()
    world.create("a")
    world.command("drop_collections", collections=["a"])
    world.pass_ms(4_999)
    assert world.shard("a").state == "dropped"
    world.pass_ms(1)
    assert world.shard("a").state == "finalized"


def test_whoever_switches_finalization_off_stops_what_was_claimed_but_not_begun(tmp_path: Path) -> None:
    later = Later()
    world = World(tmp_path, later)
    world.create("a", "b")
    world.command("update_parameters", parameters={"finalization_concurrency": 1})
    world.command("drop_collections", collections=["a", "b"])
    world.pass_ms(FINALIZE_EVERY_MS)
    assert (world.shard("a").state, world.shard("b").state) == ("finalizing", "finalizing")
    world.command("update_parameters", parameters={"finalize_shards": False})
    later.run()
    for wait_ms in (1, FINALIZE_EVERY_MS):
        world.pass_ms(wait_ms)
        assert later.names == []
    assert (world.shard("a").state, world.shard("b").state) == ("finalized", "finalizing")
    world.command("update_parameters", parameters={"finalize_shards": True})
    world.pass_ms(FINALIZE_EVERY_MS)
    later.run()
    assert world.shard("b").state == "finalized"
    world.controller.close()


def test_only_so_many_shards_are_made_at_once(tmp_path: Path) -> None:
    later = Later()
    world = World(tmp_path, later)
    world.create(*(f"t{number}" for number in range(3 * WORKERS)))
    for _ in range(3):
        world.pass_ms(1)
    assert len(later.names) == WORKERS
    later.run()
    world.pass_ms(1)
    assert len(later.names) == WORKERS
    world.controller.close()


def test_what_is_to_be_purged_does_not_wait_until_all_tables_are_made(tmp_path: Path) -> None:
    later = Later()
    world = World(tmp_path, later)
    world.command("update_parameters", parameters={"tombstone_retention": "2h"})
    world.create("old")
    world.command("drop_collections", collections=["old"])
    world.pass_ms(FINALIZE_EVERY_MS)
    while later.names:
        later.run()
        world.pass_ms(FINALIZE_EVERY_MS)
    assert world.shard("old").state == "finalized"
    world.create(*(f"t{number}" for number in range(3 * WORKERS)))
    world.pass_ms(2 * 3_600_000)
    assert f"purge {world.shard('old').id}" in later.names
    assert len(later.names) == WORKERS
    world.controller.close()


def test_what_is_given_up_is_not_looked_after_any_more(world: World) -> None:
    """It is deleted as a whole, as soon as that is allowed."""
    world.command("update_parameters", parameters={"finalize_shards": False})
    world.create("a")
    world.observe("a", 100, 1)
    world.operations.tended = Tended(world.time + 5_000)
    world.work.tick()
    assert ("tend", "a") in world.operations.taken()
    world.command("drop_collections", collections=["a"])
    world.pass_ms(5_000)
    assert (world.shard("a").since, world.operations.taken()) == (EMPTY, [])


def test_work_that_takes_long_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = World(tmp_path, Later())
    world.create("a")
    world.work.tick()
    world.pass_ms(9 * 60_000)
    assert "takes long" not in caplog.text
    world.pass_ms(2 * 60_000)
    assert f"work takes long kind=create shard={world.shard('a').id} minutes=11" in caplog.text
    world.controller.close()


def test_what_cannot_even_be_started_is_tried_again(tmp_path: Path) -> None:
    fails = True

    def spawn(work: Callable[[], None], _: str) -> None:
        if fails:
            raise RuntimeError("can't start new thread")
        work()

    world = World(tmp_path, spawn)
    world.create("a")
    world.work.tick()
    fails = False
    world.pass_ms(1)
    assert world.operations.taken() == [], "but not at once"
    world.pass_ms(5_000)
    assert world.operations.taken() == [("create", "a")]
    world.controller.close()


def test_dead_files_that_a_hold_pins_are_deleted_when_it_is_released(world: World) -> None:
    world.create("a")
    world.observe("a", 100, 7)
    world.command("acquire_read_holds", id="hold", collections=["a"], holder="r", lease="1h", pin_files=True)
    world.observe("a", 101, 9)
    world.operations.tended = Tended(pinned=9)
    world.work.tick()
    assert world.operations.taken() == [("tend", "a")]
    world.pass_ms(60_000)
    assert world.operations.taken() == []
    world.command("release_read_holds", holds=["hold/a"])
    world.operations.tended = Tended()
    world.pass_ms(1_000)
    assert world.operations.taken() == [("tend", "a")]
    assert world.operations.jobs[-1].clean_up_limit == 9


def test_after_a_boot_shards_are_looked_after_one_by_one_and_first_those_that_move(
    world: World, tmp_path: Path
) -> None:
    ids = [f"t{number:02}" for number in range(40)]
    world.create(*ids)
    for id in ids:
        world.observe(id, 100, 1)
    world.command("update_parameters", parameters={"since_downgrade_interval": 0})
    successor = World(tmp_path, spawn=lambda work, _: work())
    successor.pass_ms(0)
    assert successor.operations.taken() == [("tend", "t00")]
    successor.command("set_read_policies", policies=[{"collection": "t39", "policy": {"kind": "step_back"}}])
    successor.pass_ms(0)
    successor.pass_ms(0)
    assert successor.operations.taken() == [("tend", "t39")]
    for _ in ids:
        successor.pass_ms(50)
    assert sorted({id for _, id in successor.operations.taken()}) == ids[1:39]
    successor.controller.close()


def test_a_newer_epoch_on_a_shard_means_that_we_were_replaced(world: World) -> None:
    """Also if our journal does not know of it: then it is not the newest, such as one from a backup."""

    def fail(_: str, job: Job) -> None:
        if job.shard.owner == "a":
            raise Fenced("A controller with epoch 9 has worked on the shard; ours is 1.")

    world.operations.behave = fail
    world.create("a", "b")
    world.work.tick()
    with pytest.raises(Fenced, match="epoch 9"):
        world.work.check()


def test_a_merge_is_said_in_the_row_of_the_shard(world: World) -> None:
    world.create("a")
    world.observe("a", 100, 1)
    world.operations.merge = Merge(to=99, bytes_before=1_000, bytes_after=10)
    world.work.tick()
    shard = world.shard("a")
    assert (shard.merged_at, shard.merged_to) == (world.time, 99)
    assert (shard.merged_bytes_before, shard.merged_bytes_after) == (1_000, 10)


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

    tried: list[int] = []

    def counted(kind: str, job: Job) -> None:
        tried.append(world.time)
        fail(kind, job)

    world.operations.behave = counted
    world.create("a")
    world.work.tick()
    assert world.shard("a").last_error == "create: OSError: no space left for a"
    for wait_ms in (5_000, 10_000, 20_000, 40_000, 80_000, 160_000, 320_000, 600_000, 600_000):
        world.pass_ms(wait_ms - 1)
        number = len(tried)
        world.pass_ms(1)
        assert tried[number:] == [world.time], f"not before {wait_ms} ms"
    failed = {"kind": "create", "outcome": "failed"}
    assert world.controller.metrics.registry.get_sample_value("holdfast_work_total", failed) == len(tried)
    world.operations.behave = works
    world.pass_ms(600_000)
    assert world.operations.taken() == [("create", "a")]
    assert world.shard("a").last_error is None


class Panic(BaseException):
    """As deltalake raises it: no Exception."""


def test_also_what_is_no_exception_is_said_and_tried_again_later(world: World) -> None:
    tried: list[int] = []

    def panic(_: str, __: Job) -> None:
        tried.append(world.time)
        raise Panic("index out of bounds")

    world.operations.behave = panic
    world.create("a")
    for _ in range(3):
        world.work.tick()
    assert tried == [world.time]
    assert world.shard("a").last_error == "create: Panic: index out of bounds"
    world.pass_ms(5_000)
    assert len(tried) == 2


def test_what_is_dropped_need_not_wait_until_other_work_on_it_may_be_tried_again(world: World) -> None:
    """Whoever drops a table because the disk is full wants its files to go."""

    def fail(kind: str, _: Job) -> None:
        if kind in ("tend", "create"):
            raise OSError("no space left")

    world.operations.behave = fail
    world.create("a", "b")
    world.observe("a", 100, 1)
    for _ in range(10):
        world.pass_ms(600_000)
    world.command("drop_collections", collections=["a", "b"])
    world.pass_ms(FINALIZE_EVERY_MS)
    assert (world.shard("a").state, world.shard("b").state) == ("finalized", "finalized")


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
    registry = world.controller.metrics.registry
    for outcome, number in (("started", 2), ("failed", 1), ("succeeded", 1)):
        labels = {"kind": "finalize", "outcome": outcome}
        assert registry.get_sample_value("holdfast_work_total", labels) == number
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

"""What the controller does to shards, piece by piece: in Spark's pool for it, and however it fails."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from app import operations
from app.config import Config
from app.core.frontier import EMPTY, Frontier
from app.core.images import Shard
from app.core.parameters import DAY_MS, HOUR_MS, Parameters
from app.core.shard_work import Merge
from app.job import Job, Tended
from app.metrics import Metrics
from app.operations import ORPHANS_EVERY_MS, POOL, SOONEST_MS, ShardOperations
from app.shards.commit_log import SINCE
from app.shards.directory import LocalDirectory
from app.shards.errors import Conflict, Sealed, ShardMissing, UnsafeShard
from app.shards.merging import merge_if_worthwhile
from app.shards.settings import LENIENT
from app.shards.updates import Updates
from app.state.errors import Fenced
from tests.spark.helpers import content, new_shard, rows

NOW = 1_000_000_000_000
T = TypeVar("T")


class World:
    """A shard with three appends, and a controller's hands."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self.spark = spark
        self.warehouse = directory / "warehouse"
        self.operations = ShardOperations(spark, Config(warehouse=[str(self.warehouse)]), Metrics())
        self.merges: list[Merge] = []
        self.shard = self.new_shard()

    def new_shard(self) -> Updates:
        shard = new_shard(self.spark, self.warehouse)
        for upper in range(3):
            shard.compare_and_append(rows(self.spark, (upper, 1, "a", 1)), upper, upper + 1)
        return shard

    def job(self, shard: Updates | None = None, **fields: Any) -> Job:
        """As the journal would have it: everything was seen, and may be merged and cleaned up."""
        shard = shard or self.shard
        seen = shard.frontiers()
        image = Shard(
            id=Path(shard.table.location).name,
            location=shard.table.location,
            format="updates",
            owner="a",
            table_id=shard.table.table_id,
            since=Frontier(fields.pop("since", 99)),
            upper=seen.upper,
            log_version=seen.version,
        )
        job = Job(image, None, epoch=1, clean_up_limit=seen.version, parameters=Parameters(vacuum_grace=0), now=NOW)
        return msgspec.structs.replace(job, **fields)

    def tend(self, job: Job | None = None) -> Tended:
        return in_a_thread(lambda: self.operations.tend(job or self.job(), self.merges.append))

    def files(self) -> set[str]:
        return {path.name for path in Path(self.shard.table.location).glob("*.parquet")}

    def live(self) -> set[str]:
        return {Path(uri).name for uri in DeltaTable(self.shard.table.location).file_uris()}


def in_a_thread(work: Callable[[], T]) -> T:
    """As the controller works: what is set for a thread of Spark's does not stay with the others."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()


@pytest.fixture
def world(spark: SparkSession, tmp_path: Path) -> World:
    return World(spark, tmp_path)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sets how far the clock of the store is ahead, in ms."""
    ahead_ms = 0
    real = LocalDirectory.now_ms
    monkeypatch.setattr(LocalDirectory, "now_ms", lambda directory: real(directory) + ahead_ms)

    def put_ahead(by_ms: int) -> None:
        nonlocal ahead_ms
        ahead_ms = by_ms

    return put_ahead


def test_dead_files_wait_for_their_version_and_then_for_their_grace(
    world: World, clock: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.operations.random.randrange", lambda end: end - 1)  # orphans are looked for later
    parameters = Parameters(vacuum_grace=HOUR_MS)
    before = world.shard.frontiers().version
    old = world.live()
    tended = world.tend(world.job(parameters=parameters))
    merged = world.shard.frontiers().version
    (merge,) = world.merges
    assert (merge.to, merged) == (2, before + 2), "the since, and the merge"
    assert tended.pinned == tended.log_version == merged, "the journal has not seen it yet"
    assert tended.again_at is not None
    assert tended.again_at > NOW + SOONEST_MS, "it need not come again: the pins are looked at elsewhere"
    assert tended.again_at <= NOW + ORPHANS_EVERY_MS

    tended = world.tend(world.job(parameters=parameters))
    assert tended.pinned is None
    assert tended.again_at is not None
    assert NOW + HOUR_MS - 60_000 < tended.again_at <= NOW + HOUR_MS, "when the oldest is old enough"
    assert old < world.files()

    clock(HOUR_MS)
    tended = world.tend(world.job(parameters=parameters))
    assert world.files() == world.live()
    assert not old & world.files()
    assert tended.pinned is None
    assert len(world.merges) == 1


def test_orphans_go_after_the_grace_that_the_parameter_says(world: World, clock: Callable[[int], None]) -> None:
    (Path(world.shard.table.location) / "left.parquet").write_bytes(b"by a writer that died")

    def look(now: int, ahead_ms: int) -> Tended:
        clock(ahead_ms)
        return world.tend(world.job(parameters=Parameters(orphan_grace=2 * DAY_MS), now=now))

    tended = look(NOW, 3 * DAY_MS)
    assert "left.parquet" in world.files(), "not all shards are looked through at a start"
    assert tended.again_at is not None
    assert NOW < tended.again_at < NOW + ORPHANS_EVERY_MS
    look(NOW + ORPHANS_EVERY_MS, DAY_MS)
    assert "left.parquet" in world.files(), "it is too young"
    look(NOW + 2 * ORPHANS_EVERY_MS - 1, 3 * DAY_MS)
    assert "left.parquet" in world.files(), "nor is a shard looked through each time"
    tended = look(NOW + 2 * ORPHANS_EVERY_MS, 3 * DAY_MS)
    assert "left.parquet" not in world.files()
    assert tended.again_at == NOW + 3 * ORPHANS_EVERY_MS
    assert world.files() == world.live()


def test_the_since_is_durable_before_a_merge_is_committed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[int | None] = []
    location = world.shard.table.location

    def reached(name: str) -> None:
        if name == "merging":
            table = DeltaTable(location)
            noted.append(table.transaction_version(SINCE))
            assert "merge" not in str(table.history(1)[0].get("userMetadata"))

    monkeypatch.setattr(operations, "reach", reached)
    world.tend(world.job(since=1))
    assert noted == [1]
    assert [merge.to for merge in world.merges] == [1]


def test_merges_run_in_the_pool_for_them_and_share_with_the_others(world: World) -> None:
    context, job = world.spark.sparkContext, world.job()

    def tend() -> None:
        context.setJobGroup("tending", "to find the jobs of this thread")
        world.operations.tend(job, world.merges.append)

    in_a_thread(tend)
    assert len(world.merges) == 1
    spark = context._jsc.sc()
    spark.listenerBus().waitUntilEmpty()
    tracker, none = context.statusTracker(), context._gateway.new_array(context._jvm.double, 0)
    jobs = [tracker.getJobInfo(id) for id in tracker.getJobIdsForGroup("tending")]
    stages = [stage for job in jobs if job is not None for stage in job.stageIds]
    assert stages
    empty = context._jvm.java.util.ArrayList()
    known = [spark.statusStore().stageData(stage, False, empty, False, none).head() for stage in stages]
    ran = [stage for stage in known if stage.status().toString() == "COMPLETE"]  # a stage that was skipped has no pool
    assert len(ran) >= 2
    assert {stage.schedulingPool() for stage in ran} == {POOL}
    assert spark.getSchedulingMode().toString() == "FAIR"
    assert context.getLocalProperty("spark.scheduler.pool") != POOL, "only in the thread that works"


def merged_once(world: World) -> set[str]:
    """Files that a merge has left to be deleted; and there is more to merge."""
    old = world.live()
    assert merge_if_worthwhile(world.shard, 2, 1) is not None
    for upper in (3, 4):
        world.shard.compare_and_append(rows(world.spark, (upper, 1, "a", 1)), upper, upper + 1)
    assert old < world.files()
    return old


def test_a_merge_that_fails_keeps_nothing_from_being_cleaned_up(world: World, clock: Callable[[int], None]) -> None:
    dead = merged_once(world)
    (Path(world.shard.table.location) / "left.parquet").write_bytes(b"by a merge that failed")
    clock(8 * DAY_MS)
    world.spark.conf.set(LENIENT[0], "true")
    try:
        for now in (NOW, NOW + ORPHANS_EVERY_MS):
            with pytest.raises(UnsafeShard, match=LENIENT[0]):
                world.tend(world.job(now=now))
    finally:
        world.spark.conf.unset(LENIENT[0])
    assert not dead & world.files()
    assert "left.parquet" not in world.files()
    assert content(world.spark, world.shard) == {("a", 1): 5}


def test_after_a_merge_that_was_overtaken_is_cleaned_up_and_come_again_soon(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = merged_once(world)
    job = world.job()

    def reached(name: str) -> None:
        if name == "merging":
            monkeypatch.undo()
            assert merge_if_worthwhile(world.shard, 99, 1) is not None

    monkeypatch.setattr(operations, "reach", reached)
    assert world.tend(job).again_at == NOW + SOONEST_MS
    assert world.merges == []
    assert not dead & world.files()
    world.tend()
    assert content(world.spark, world.shard) == {("a", 1): 5}


def test_a_merge_that_is_overtaken_again_and_again_has_failed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try leaves its files behind: whoever has failed waits longer each time, and its row says why."""
    merged_once(world)
    job = world.job()

    def overtaken(*_: object, **__: object) -> None:
        raise Conflict("someone else was quicker")

    with monkeypatch.context() as patch:
        patch.setattr(operations, "merge_if_worthwhile", overtaken)
        world.tend(job)
        for _ in range(2):
            with pytest.raises(Conflict):
                world.tend(job)
    world.tend(job)
    monkeypatch.setattr(operations, "merge_if_worthwhile", overtaken)
    world.tend(job)  # in between one was made: it is the first again


def test_a_controller_that_was_replaced_touches_nothing_more(world: World) -> None:
    dead = merged_once(world)
    world.shard.set_since(3, 2)
    for since in (99, 0):  # with something to merge, and with nothing but dead files
        with pytest.raises(Fenced):
            world.tend(world.job(since=since))
    assert dead < world.files()


def test_only_the_shards_worked_on_last_are_remembered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MOST_CLEANERS", 2)
    first, second, third = (world.job(shard, since=0) for shard in (world.shard, world.new_shard(), world.new_shard()))
    for job in (first, second, first, third):
        world.tend(job)
    assert list(world.operations._cleaners) == [first.shard.id, third.shard.id]
    assert world.tend(second).log_version == second.shard.log_version, "forgetting is harmless"


def finalizing(world: World, *, seen: bool = True) -> Job:
    job = world.job(since=EMPTY)
    shard = msgspec.structs.replace(job.shard, state="finalizing", log_version=job.shard.log_version if seen else None)
    return msgspec.structs.replace(job, shard=shard)


def test_a_finalized_shard_has_no_data_and_is_forgotten(world: World) -> None:
    world.tend(world.job(since=0))
    in_a_thread(lambda: world.operations.finalize(finalizing(world)))
    assert world.files() == set()
    assert world.operations._cleaners == {}
    assert world.operations._orphans_at == {}
    with pytest.raises(Sealed):
        world.shard.compare_and_append(rows(world.spark, (9, 1, "late", 1)), 3, 10)


def test_a_shard_whose_disk_is_away_is_not_taken_for_finalized(world: World, tmp_path: Path) -> None:
    job = finalizing(world)
    away = tmp_path / "away"
    world.warehouse.rename(away)
    for _ in ("the mount point is missing", "it is there, and empty"):
        with pytest.raises(ShardMissing, match="is its disk not mounted"):
            in_a_thread(lambda: world.operations.finalize(job))
        assert not world.warehouse.exists() or not os.listdir(world.warehouse), "and nothing is made there"
        world.warehouse.mkdir(exist_ok=True)
    world.warehouse.rmdir()
    away.rename(world.warehouse)
    in_a_thread(lambda: world.operations.finalize(job))
    assert world.files() == set()
    assert world.shard.upper == EMPTY


def test_a_shard_that_someone_has_deleted_is_finalized(world: World) -> None:
    other = world.new_shard()
    job = finalizing(world)
    shutil.rmtree(world.shard.table.location)
    in_a_thread(lambda: world.operations.finalize(job))
    assert not Path(world.shard.table.location).exists(), "it is not made anew"
    # The last one of all: whoever has deleted it says so.
    last = msgspec.structs.replace(job, shard=msgspec.structs.replace(job.shard, location=other.table.location))
    shutil.rmtree(other.table.location)
    with pytest.raises(ShardMissing, match="put a file there"):
        in_a_thread(lambda: world.operations.finalize(last))
    (world.warehouse / "deleted-on-purpose").touch()
    in_a_thread(lambda: world.operations.finalize(last))


def test_a_shard_that_nobody_has_seen_is_made_so_that_late_writers_find_it_sealed(
    spark: SparkSession, world: World
) -> None:
    job = finalizing(world, seen=False)
    shutil.rmtree(world.shard.table.location)
    in_a_thread(lambda: world.operations.finalize(job))
    with pytest.raises(Sealed):
        world.shard.compare_and_append(rows(spark, (1, 1, "late", 1)), 0, 2)

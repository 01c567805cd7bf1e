"""Reading while a controller runs: its broker, its merges, its drops."""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from app import operations
from app.broker import EmbeddedBroker
from app.client import Holdfast
from app.client_errors import CollectionMissing, HoldMissing, ReadBeforeSince
from app.reader import Reader
from app.reading import subscription
from app.shards.cleaning import Cleaner, Deleted
from app.writer import Writer
from tests.e2e.harness import Running, config_under, wait_until
from tests.spark.reader_world import Update, counted, summed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DDL = "k STRING, v BIGINT"
COLUMNS = f"_time BIGINT, _diff BIGINT, {DDL}"
MERGED_S = 180.0  # a merge is several jobs of Spark, beside everything else that it does here


class System:
    """A controller under test, with whoever writes and reads."""

    def __init__(self, running: Running, spark: SparkSession) -> None:
        config = running.config
        self.running = running
        self.spark = spark
        self.topics = {"commands_topic": config.kafka.commands_topic, "replies_topic": config.kafka.replies_topic}
        self.client = Holdfast(config.kafka.bootstrap_servers, root=config.root, **self.topics)
        self.reader = self.new_reader()
        self._writers: dict[str, Writer] = {}
        self._uppers: Counter[str] = Counter()
        self.written: dict[str, list[Update]] = {}

    def new_reader(self, **options: Any) -> Reader:
        """Finds the broker as any program does that knows the root only."""
        return Reader(self.spark, root=self.running.config.root, **self.topics, **options)

    def close(self) -> None:
        self.reader.close()
        self.client.close()

    def create(self, id: str) -> None:
        collection = {"id": id, "data_source": {"kind": "table"}, "schema": DDL}
        self.client.create_collections([collection], register_ts=0)
        self._writers[id] = Writer(
            self.spark, id, root=self.running.config.root, at_least=self.client.seq, timeout_s=60
        )
        self.written[id] = []

    def append(self, id: str, updates: list[Update], upper: int) -> None:
        rows = self.spark.createDataFrame(updates, COLUMNS).coalesce(1)
        self._writers[id].compare_and_append(rows, self._uppers[id], upper)
        self.written[id] += updates
        self._uppers[id] = upper

    def seal(self, id: str) -> None:
        self._writers[id].seal()

    def physical_since(self, id: str) -> int:
        return DeltaTable(self.location(id)).transaction_version("holdfast.since") or 0

    def location(self, id: str) -> str:
        return self.running.controller.read(lambda state: state.shards[state.collections[id].shard].location)

    def since(self, id: str) -> int:
        return self.running.controller.read(lambda state: state.collections[id].since)

    def log_version(self, id: str) -> int:
        """Up to where the journal knows the log of its shard."""
        return self.running.controller.read(lambda state: state.shards[state.collections[id].shard].log_version or 0)

    def tend(self, id: str) -> None:
        """Lets the controller look after its shard at once."""
        shard = self.running.controller.read(lambda state: state.collections[id].shard)
        self.running.service.work._tending.by(shard, 0)

    def files(self, id: str) -> set[str]:
        """The data files that are there, in use or not."""
        return {file.name for file in Path(self.location(id)).glob("*.parquet")}

    def live_files(self, id: str) -> set[str]:
        return {Path(uri).name for uri in DeltaTable(self.location(id)).file_uris()}

    def holds(self) -> set[str]:
        return self.running.controller.read(lambda state: set(state.holds))


@pytest.fixture(scope="module")
def system(broker: EmbeddedBroker, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    config = config_under(tmp_path_factory.mktemp("reading"), broker.bootstrap_servers)
    with Running(config, spark) as running:
        note = Path(config.root) / "broker.json"  # as a controller with a broker of its own writes it
        note.write_text(json.dumps({"bootstrap_servers": broker.bootstrap_servers}))
        system = System(running, spark)
        system.client.update_parameters({"since_downgrade_interval": 0})
        yield system
        system.close()


def test_a_read_is_exact_while_the_controller_merges_and_the_next_one_comes_too_late(system: System) -> None:
    system.create("orders")
    system.append("orders", [(1, 1, "a", 1), (2, 1, "b", 2)], 3)
    system.append("orders", [(3, -1, "a", 1), (4, 1, "b", 2), (5, 1, "c", 3)], 8)
    with system.reader.snapshot("orders", 3) as rows:
        system.client.set_read_policies({"orders": {"kind": "step_back"}})
        wait_until(lambda: system.physical_since("orders") == 3, "it is merged as far as the hold lets it", MERGED_S)
        assert counted(rows.collect()) == summed(system.written["orders"], 3)
        with system.reader.snapshot("orders", 3) as again:  # the time is held, so a new read works as well
            assert counted(again.collect()) == summed(system.written["orders"], 3)
    assert system.holds() == set()
    wait_until(lambda: system.physical_since("orders") == 7, "without the hold the merging goes on", MERGED_S)
    with pytest.raises(ReadBeforeSince) as late, system.reader.snapshot("orders", 3):
        pass
    assert late.value.earliest == {"orders": 7}
    with system.reader.snapshot("orders", 7) as rows:
        assert counted(rows.collect()) == summed(system.written["orders"], 7)
    frontiers = system.reader.frontiers("orders")
    assert (frontiers.since, frontiers.upper) == (7, 8)


def test_long_reads_outlive_merges_and_clean_ups_with_a_grace_of_zero(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that began before a merge, and one whose hold was acquired while the merge was running."""
    merging, go_on = threading.Event(), threading.Event()
    limits: dict[str, list[int]] = defaultdict(list)
    delete_dead_files = Cleaner.delete_dead_files

    def noted(cleaner: Cleaner, **asked: int) -> Deleted:
        deleted = delete_dead_files(cleaner, **asked)
        limits[cleaner._location].append(asked["upto_version"])
        return deleted

    def wait_before_the_merge_is_committed(name: str) -> None:
        if name == "merging":
            merging.set()
            go_on.wait()

    system.client.update_parameters({"vacuum_grace": 0})
    system.create("long")
    location = system.location("long")
    for time in (1, 2, 3):
        system.append("long", [(time, 1, "a", time), (time, 1, "same", 1)], time + 1)
    system.append("long", [(4, -1, "a", 1), (5, 1, "b", 2)], 8)
    monkeypatch.setattr(operations, "reach", wait_before_the_merge_is_committed)
    monkeypatch.setattr(Cleaner, "delete_dead_files", noted)
    try:
        with system.reader.snapshot("long", 3) as before:
            system.client.set_read_policies({"long": {"kind": "step_back"}})
            wait_until(merging.is_set, "a merge is about to be committed", MERGED_S)
            planned = system.live_files("long")
            with system.new_reader() as other, other.snapshot("long", 5) as during:
                go_on.set()
                wait_until(lambda: planned - system.live_files("long"), "the merge is committed", MERGED_S)
                dead = planned - system.live_files("long")
                # The controller knows of the commit that removed them, and cleans up because of another one.
                merged = DeltaTable(location).version()
                wait_until(lambda: system.log_version("long") >= merged, "the merge is in the journal", MERGED_S)
                before_it = len(limits[location])
                system.append("long", [(8, 1, "late", 1)], 10)
                system.tend("long")
                wait_until(lambda: len(limits[location]) > before_it, "it is cleaned up", MERGED_S)
                assert limits[location][-1] < merged, "but only what no reader needs"
                assert counted(before.collect()) == summed(system.written["long"], 3)
                assert counted(during.collect()) == summed(system.written["long"], 5)
                assert dead <= system.files("long")
        wait_until(lambda: not dead & system.files("long"), "without the holds their files go", MERGED_S)
        with system.reader.snapshot("long", 9) as rows:
            assert counted(rows.collect()) == summed(system.written["long"], 9)
    finally:
        go_on.set()
        system.client.update_parameters({"vacuum_grace": "1h"})


def test_an_altered_collection_and_the_new_one_are_read_from_one_shard(system: System) -> None:
    """Each with its own columns, before and after a merge of what both have written."""
    system.create("plain")
    system.append("plain", [(1, 1, "a", 1), (2, 1, "b", 2)], 3)
    wide = f"{DDL}, w INT"
    system.client.alter_table_desc("plain", "wide", schema=wide, expected_version=0)
    writer = Writer(system.spark, "wide", root=system.running.config.root, at_least=system.client.seq, timeout_s=60)
    new = system.spark.createDataFrame(
        [(3, 1, "c", 3, 7), (4, -1, "a", 1, None)], f"_time BIGINT, _diff BIGINT, {wide}"
    )
    writer.compare_and_append(new.coalesce(1), 3, 5)
    system._uppers["plain"] = 5
    system.append("plain", [(5, 1, "d", 4)], 6)

    def check() -> None:
        with system.reader.snapshot("plain", 5) as rows:
            assert rows.columns == ["k", "v", "_count"]
            assert {tuple(row) for row in rows.collect()} == {("b", 2, 1), ("c", 3, 1), ("d", 4, 1)}
        with system.reader.snapshot("wide", 5) as rows:
            assert rows.columns == ["k", "v", "w", "_count"]
            assert {tuple(row) for row in rows.collect()} == {("b", 2, None, 1), ("c", 3, 7, 1), ("d", 4, None, 1)}

    check()
    system.client.set_read_policies({id: {"kind": "step_back"} for id in ("plain", "wide")})
    wait_until(lambda: len(system.live_files("wide")) == 1, "all is merged", MERGED_S)
    check()


def test_a_closed_collection_is_merged_and_its_dead_files_go(system: System) -> None:
    """Nobody watches its log any more."""
    system.client.update_parameters({"vacuum_grace": 0})
    try:
        system.create("closed")
        for time in (1, 2, 3):
            system.append("closed", [(time, 1, "same", 1)], time + 1)
        system.seal("closed")
        wait_until(lambda: system.reader.frontiers("closed").upper is None, "it is seen to be closed")
        written = system.files("closed")
        system.client.set_read_policies({"closed": {"kind": "valid_from", "frontier": 3}})
        wait_until(lambda: not written & system.files("closed"), "what was merged is deleted", MERGED_S)
        with system.reader.snapshot("closed", 3) as rows:
            assert counted(rows.collect()) == summed(system.written["closed"], 3)
    finally:
        system.client.update_parameters({"vacuum_grace": "1h"})


def test_a_dropped_collection_is_read_through_a_hold_until_it_is_let_go(system: System) -> None:
    system.create("users")
    system.append("users", [(1, 1, "a", 1), (2, 1, "b", 2)], 4)
    (hold,) = system.client.acquire_read_holds(["users"], holder="me", at=2, lease="10m", pin_files=True)
    system.client.drop_collections(["users"])
    with pytest.raises(CollectionMissing), system.reader.snapshot("users", 3):
        pass
    with system.reader.snapshot("users", 3, hold=hold.id) as rows:
        assert counted(rows.collect()) == summed(system.written["users"], 3)
    assert system.reader.frontiers("users").dropped
    system.client.release_read_holds([hold.id])
    with pytest.raises(HoldMissing, match="released"), system.reader.snapshot("users", 3, hold=hold.id):
        pass


def test_a_read_waits_for_its_time_and_blocks_nobody(system: System) -> None:
    system.create("events")
    system.append("events", [(1, 1, "a", 1)], 2)
    found: list[dict[Update, int]] = []

    def read() -> None:
        with system.reader.snapshot("events", 4, timeout="3m") as rows:
            found.append(counted(rows.collect()))

    waiting = threading.Thread(target=read)
    waiting.start()
    wait_until(system.holds, "the read holds the time that it waits for")
    with system.reader.snapshot("events", 1) as rows:
        assert counted(rows.collect()) == summed(system.written["events"], 1)
    assert found == []
    system.append("events", [(3, 1, "b", 2), (4, -1, "a", 1), (5, 1, "c", 3)], 6)
    waiting.join()
    assert found == [summed(system.written["events"], 4)]
    assert system.holds() == set()


def test_a_subscription_goes_on_in_another_reader_and_sees_everything_once(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription, "DOWNGRADE_EVERY_MS", 0)
    system.create("ticks")
    system.append("ticks", [(1, 1, "a", 1), (2, 1, "b", 2)], 3)
    system.client.set_read_policies({"ticks": {"kind": "lag_writes_by", "lag": 0}})
    wait_until(lambda: system.since("ticks") == 3, "the since has followed the upper")
    with pytest.raises(ReadBeforeSince), system.new_reader().subscribe("ticks", 1):
        pass
    seen: Counter[Update] = Counter()
    # A process that dies leaves its hold behind until the lease passes: this one is closed only after the next began.
    dying = system.new_reader(lease="10m").subscribe("ticks", timeout="3m")
    system.append("ticks", [(3, 1, "c", 3), (4, -1, "a", 1)], 5)
    step = next(dying)
    assert (step.lower, step.upper, step.is_snapshot) == (0, 4, True)
    seen.update(tuple(row) for row in step.frame.collect())
    seen.update(tuple(row) for row in next(dying).frame.collect())
    assert dying.completed == 3
    system.append("ticks", [(5, 1, "d", 4), (5, 1, "d", 4)], 6)
    next(dying)
    completed = dying.completed
    assert completed == 4
    wait_until(lambda: system.physical_since("ticks") == completed, "what is done with is merged", MERGED_S)
    with system.new_reader() as reader, reader.subscribe("ticks", completed, snapshot=False) as changes:
        dying.close()
        seen.update(tuple(row) for row in next(changes).frame.collect())
        assert {tuple(row) for row in seen if row[0] > 4} == {(5, 1, "d", 4)}
        system.append("ticks", [(6, -1, "b", 2)], 2**63 - 1)
        last = next(changes)
        assert (last.lower, last.upper) == (6, None)
        seen.update(tuple(row) for row in last.frame.collect())
        assert list(changes) == []
    assert summed(seen.elements(), 100) == summed(system.written["ticks"], 100)
    wait_until(lambda: not system.holds(), "all holds are let go")

"""From a commit in a shard's log to its entry in the journal, and what looking at all shards costs.

Run: .venv/bin/python -m bench.frontiers [--shards N ...] [--readers NAME ...] [--commits N] [--interval MS]

- "a look": all shards once, in this process and without Spark, when nothing is new; and when the state has changed.
- "a tick": one trigger of query 2 that found something, until its batch is done, as Spark measures it.
- "a tick, nothing new": the processor time, of all processes together, that goes by per trigger when nothing happens.
- "commit to journal": query 2 on real Spark, and a real controller, which has created all the shards. Commits land on
  random shards at random moments. A commit has arrived when `Controller.observe` has returned: its entry is durable.
  In the end the journal is read, and has to have every one of them. In ticks: 1 is the interval of the trigger.

Query 2 has two readers: the driver looks itself, or the executors do. The logs are bare: commit files that hold nothing
but what is looked for. The aim is 2 ticks at p95 with 10,000 shards.

With 60 commits a run ends before the minute after which the executors look less often at shards that stay quiet (see
`app.shards.watching`). To see what that costs, give it more: --commits 500.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from app.config import Config, StreamsConfig
from app.controller import Controller
from app.core.advancing import Observation
from app.core.descriptions import Description, Table
from app.core.duration import Duration
from app.core.frontier import ZERO, Frontier
from app.core.images import SHARD, Shard, decode_image
from app.shards.looking import Looker
from app.shards.positions import Positions
from app.shards.watching import Pacing, Watcher
from app.spark import session
from app.state.journal import Journal
from app.streams.frontiers import FrontierStream

LOOKS = 50
IDLE_TICKS = 10
WARM_UP = 5  # the first commits start Python
PATIENCE_S = 120
DISTRIBUTE_ABOVE = {"driver": 1_000_000, "executors": 1}


class Sent(NamedTuple):
    """A commit that is not in the journal yet."""

    version: int
    at_s: float


class Watched(NamedTuple):
    """What the ticks cost, in ms; and how long each commit was on its way, in ticks."""

    idle_ms: float
    ticks_ms: list[float]
    waits: list[float]


class World:
    """A controller with many shards, and whoever commits to them."""

    def __init__(self, root: Path, shards: int) -> None:
        self.config = Config(
            root=str(root / "root"),
            warehouse=[str(root / "warehouse")],
            streams=StreamsConfig(checkpoints=str(root / "checkpoints")),
        )
        self.controller = Controller(self.config)
        self.controller.boot()
        tables = [Description(id=f"table-{number}", data_source=Table()) for number in range(shards)]
        self.controller.step("bench", lambda core, now: core.create_collections(now, tables, register_ts=now))
        created = self.controller.read(lambda state: list(state.shards.values()))
        self._logs = {shard.id: Path(shard.location) / "_delta_log" for shard in created}
        self._versions = dict.fromkeys(self._logs, 0)
        self._sent: dict[str, Sent] = {}
        self._lock = threading.Lock()
        self.waits_s: list[float] = []
        for log in self._logs.values():
            log.mkdir(parents=True)
            _write(log, version=0, upper=0)
        self.controller.observe([Observation(id, ZERO, 0) for id in self._logs])
        self.controller.wait_for_tables()

    def commit(self) -> Observation:
        """The next commit of a shard whose last one is in the journal; what there is to be seen of it."""
        with self._lock:
            id = random.choice([id for id in self._logs if id not in self._sent])
            self._versions[id] = version = self._versions[id] + 1
            self._sent[id] = Sent(version, time.perf_counter())
            _write(self._logs[id], version=version, upper=version)
            return Observation(id, Frontier(version), version)

    def observe(self, observations: Sequence[Observation]) -> None:
        self.controller.observe(observations)
        now_s = time.perf_counter()
        with self._lock:
            for seen in observations:  # the executors may see a commit once more, before the tables have it
                sent = self._sent.get(seen.shard)
                if sent is not None and seen.log_version >= sent.version:
                    self.waits_s.append(now_s - sent.at_s)
                    del self._sent[seen.shard]

    def is_quiet(self) -> bool:
        with self._lock:
            return not self._sent

    def check_journal(self) -> None:
        """Every commit has to be in an entry."""
        journal = Journal.open(f"{self.config.state}/journal", storage_options={}, instance="bench", read_only=True)
        there = set()
        for entry in journal.read(0):
            for row in entry.rows:
                if entry.origin == "frontiers" and row.entity == SHARD and row.value is not None:
                    shard = decode_image(SHARD, row.value)
                    assert isinstance(shard, Shard)
                    there.add((shard.id, shard.log_version))
        wanted = {(id, version) for id, last in self._versions.items() for version in range(last + 1)}
        if there != wanted:
            raise SystemExit(f"the journal lacks {len(wanted - there)} of {len(wanted)} commits")


def _write(log: Path, *, version: int, upper: int) -> None:
    lines: list[dict[str, Any]] = [
        {"commitInfo": {"timestamp": 0, "operation": "WRITE"}},
        {"txn": {"appId": "holdfast.upper", "version": upper}},
    ]
    staged = log / f".{version}.tmp"
    staged.write_text("".join(json.dumps(line) + "\n" for line in lines))
    staged.rename(log / f"{version:020d}.json")


def looks_ms(world: World, shards: int) -> tuple[list[float], list[float]]:
    """When nothing is new; and after one shard's row has changed."""
    watcher = Watcher(Positions(world.config.state, {}), Looker({}), Pacing())
    while watcher.tick() or len(watcher) < shards or watcher._to_check:
        pass  # the first ones read everything, and check for gaps
    idle, changed = [], []
    for _ in range(LOOKS):
        idle.append(_timed_ms(watcher))
        world.observe([world.commit()])
        world.controller.wait_for_tables()
        changed.append(_timed_ms(watcher))
    return idle, changed


def _timed_ms(watcher: Watcher) -> float:
    started = time.perf_counter()
    watcher.tick()
    return (time.perf_counter() - started) * 1000


def watched(spark: SparkSession, world: World, reader: str, commits: int, interval_ms: int) -> Watched:
    streams = StreamsConfig(
        checkpoints=world.config.streams.checkpoints,
        watch_interval=Duration(interval_ms),
        distribute_watching_above=DISTRIBUTE_ABOVE[reader],
    )
    config = Config(root=world.config.root, warehouse=world.config.warehouse, streams=streams)

    def report(errors: Mapping[str, str | None]) -> None:
        raise SystemExit(f"logs cannot be read: {errors}")

    stream = FrontierStream(config=config, observe=world.observe, report=report)
    query = stream.start(spark)
    try:
        for _ in range(WARM_UP):
            world.commit()
            _wait(world, query)
        world.waits_s.clear()
        warm = stream.batches  # the last of them may still be ending
        idle_ms = _processor_ms_while_idle(interval_ms)
        for _ in range(commits):
            world.commit()
            time.sleep(random.uniform(0.2, 0.6) * interval_ms / 1000)
        _wait(world, query)
        ticks = [tick for tick in query.recentProgress if tick["numInputRows"] and tick["batchId"] > warm]
    finally:
        query.stop()
        stream.remove_checkpoint()
    return Watched(
        idle_ms=idle_ms,
        ticks_ms=[tick["durationMs"]["triggerExecution"] for tick in ticks],
        waits=[wait_s * 1000 / interval_ms for wait_s in world.waits_s],
    )


def _processor_ms_while_idle(interval_ms: int) -> float:
    before_s = _processor_s()
    time.sleep(IDLE_TICKS * interval_ms / 1000)
    return (_processor_s() - before_s) * 1000 / IDLE_TICKS


def _processor_s() -> float:
    """What this process and all that it has started have used so far."""
    ticks, parents = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        pid = int(stat.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(ticks[pid] for pid in ours) / os.sysconf("SC_CLK_TCK")


def _wait(world: World, query: StreamingQuery) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not world.is_quiet():
        if time.monotonic() > deadline or not query.isActive:
            raise SystemExit(f"not in the journal: {query.exception()}")
        world.controller.check()
        time.sleep(0.01)


def show(what: str, numbers: list[float], unit: str) -> None:
    p95 = statistics.quantiles(numbers, n=20, method="inclusive")[18]
    spread = f"p50 {statistics.median(numbers):8.2f}   p95 {p95:8.2f}   max {max(numbers):8.2f}"
    print(f"  {what:<30} {spread}  {unit}, {len(numbers)} of them", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--readers", nargs="+", choices=DISTRIBUTE_ABOVE, default=list(DISTRIBUTE_ABOVE))
    parser.add_argument("--commits", type=int, default=60, help="for each reader")
    parser.add_argument("--interval", type=int, default=1_000, help="of the trigger, in ms")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        spark = session("bench frontiers", master="local[2]", logs=Path(directory) / "logs")
        for shards in options.shards:
            started = time.perf_counter()
            world = World(Path(directory) / str(shards), shards)
            print(f"{shards} shards, created in {time.perf_counter() - started:.1f} s", flush=True)
            idle, changed = looks_ms(world, shards)
            show("a look, nothing new", idle, "ms")
            show("a look, the state has changed", changed, "ms")
            for reader in options.readers:
                found = watched(spark, world, reader, options.commits, options.interval)
                print(f"  {reader}: a tick, nothing new".ljust(33) + f"{found.idle_ms:.0f} ms of processor time")
                show(f"{reader}: a tick", found.ticks_ms, "ms")
                show(f"{reader}: commit to journal", found.waits, f"ticks of {options.interval} ms")
            world.check_journal()
            world.controller.close()
        spark.stop()


if __name__ == "__main__":
    main()

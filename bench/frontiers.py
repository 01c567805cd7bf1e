"""From a commit in a shard's log to its observation, and what looking at all shards costs.

Run: .venv/bin/python -m bench.frontiers [--shards N ...] [--commits N] [--interval MS] [--distributed]

- "a tick": one look at all shards, in this process, when nothing is new; and when the state's table has changed.
- "commit to observation": query 2 on real Spark. Commits land on random shards at random moments; what is observed is
  merged into the state's `shards` table, as a controller does. In ticks: 1 is the interval of the trigger.

The logs are bare: commit files that hold nothing but what is looked for. The aim is 2 ticks at p95 with 10,000 shards.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from deltalake import write_deltalake
from pyspark.sql import SparkSession

from app.config import Config, StreamsConfig
from app.core.advancing import Observation
from app.core.duration import Duration
from app.core.images import SHARD, Shard, encode_image
from app.shards.looking import Looker
from app.shards.positions import Positions
from app.shards.watching import Pacing, Watcher
from app.spark import session
from app.state.rows import shard_row
from app.state.schemas import to_arrow
from app.state.tables import Tables
from app.streams.frontiers import FrontierStream

TICKS = 50


class World:
    """Many shards and a state that knows them."""

    def __init__(self, root: Path, shards: int) -> None:
        self.root = root
        self._tables = Tables.open(str(root), storage_options={})
        self._seq = 1
        self._lock = threading.Lock()
        self.shards: dict[str, Shard] = {}
        self._sent: dict[str, float] = {}
        self.waits_s: list[float] = []
        for number in range(shards):
            id = f"shard-{number}"
            directory = root / "warehouse" / id / "_delta_log"
            directory.mkdir(parents=True)
            self._write(directory, 0, 0)
            self.shards[id] = Shard(id=id, location=str(directory.parent), format="updates", owner=id, log_version=0)
        rows = [shard_row(shard, self._seq) for shard in self.shards.values()]
        write_deltalake(f"{root}/state/shards", to_arrow("shards", rows), mode="append")

    @staticmethod
    def _write(directory: Path, version: int, upper: int) -> None:
        lines: list[dict[str, Any]] = [
            {"commitInfo": {"timestamp": 0, "operation": "WRITE"}},
            {"txn": {"appId": "holdfast.upper", "version": upper}},
        ]
        staged = directory / f".{version}.tmp"
        staged.write_text("".join(json.dumps(line) + "\n" for line in lines))
        staged.rename(directory / f"{version:020d}.json")

    def commit(self) -> None:
        """The next commit of a shard whose last one was observed."""
        with self._lock:
            shard = random.choice([shard for shard in self.shards.values() if shard.id not in self._sent])
            version = (shard.log_version or 0) + 1
            self._sent[shard.id] = time.perf_counter()
            self._write(Path(shard.location) / "_delta_log", version, version)

    def observe(self, observations: Sequence[Observation]) -> None:
        now = time.perf_counter()
        with self._lock:
            changed = []
            for seen in observations:
                if seen.shard in self._sent:
                    self.waits_s.append(now - self._sent.pop(seen.shard))
                shard = self.shards[seen.shard]
                shard = msgspec.structs.replace(shard, upper=seen.upper, log_version=seen.log_version)
                self.shards[seen.shard] = shard
                changed.append(shard)
        self.merge(changed)

    def merge(self, changed: Sequence[Shard]) -> None:
        self._seq += 1
        changes = {(SHARD, shard.id): (encode_image(shard), self._seq, 1) for shard in changed}
        self._tables.merge(changes, upto=self._seq, epoch=1)

    def is_quiet(self) -> bool:
        with self._lock:
            return not self._sent


def tick_ms(world: World) -> tuple[list[float], list[float]]:
    """When nothing is new; and after one shard's row has changed."""
    state = f"{world.root}/state"
    watcher = Watcher(Positions(state, {}), Looker({}), Pacing())
    while watcher.tick() or len(watcher) < len(world.shards) or watcher._to_check:
        pass  # the first ones read everything, and check for gaps
    idle, changed = [], []
    for number in range(TICKS):
        idle.append(_timed_ms(watcher))
        shard = random.choice(list(world.shards.values()))
        world.merge([msgspec.structs.replace(shard, attempts=number + 1)])
        changed.append(_timed_ms(watcher))
    return idle, changed


def _timed_ms(watcher: Watcher) -> float:
    started = time.perf_counter()
    watcher.tick()
    return (time.perf_counter() - started) * 1000


def waits_in_ticks(
    spark: SparkSession, world: World, commits: int, interval_ms: int, distribute_above: int
) -> list[float]:
    config = Config(
        root=str(world.root),
        streams=StreamsConfig(
            checkpoints=f"{world.root}/checkpoints",
            watch_interval=Duration(interval_ms),
            distribute_watching_above=distribute_above,
        ),
    )

    def report(shard: str, error: str) -> None:
        raise SystemExit(f"{shard}: {error}")

    stream = FrontierStream(config=config, observe=world.observe, report=report)
    query = stream.start(spark)
    try:
        for number in range(commits + 5):
            world.commit()
            if number < 5:  # the first ones start Python, and warm up
                _wait(world, query)
                world.waits_s.clear()
            time.sleep(random.uniform(0.2, 0.6) * interval_ms / 1000)
        _wait(world, query)
    finally:
        query.stop()
        stream.remove_checkpoint()
    return [wait_s * 1000 / interval_ms for wait_s in world.waits_s]


def _wait(world: World, query: Any) -> None:
    deadline = time.monotonic() + 120
    while not world.is_quiet():
        if time.monotonic() > deadline or not query.isActive:
            raise SystemExit(f"not observed: {query.exception()}")
        time.sleep(0.01)


def shown(numbers: list[float], unit: str) -> str:
    cuts = statistics.quantiles(numbers, n=20)
    return f"p50 {statistics.median(numbers):7.2f}   p95 {cuts[18]:7.2f}   max {max(numbers):7.2f}  {unit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--commits", type=int, default=60)
    parser.add_argument("--interval", type=int, default=1_000, help="of the trigger, in ms")
    parser.add_argument("--distributed", action="store_true", help="let the executors look, with any number of shards")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        spark = session("bench frontiers", master="local[2]", logs=Path(directory) / "logs")
        for shards in options.shards:
            world = World(Path(directory) / str(shards), shards)
            idle, changed = tick_ms(world)
            print(f"{shards} shards")
            print(f"  a tick, nothing new            {shown(idle, 'ms')}")
            print(f"  a tick, the state has changed  {shown(changed, 'ms')}")
            above = 1 if options.distributed else 1_000_000
            waits = waits_in_ticks(spark, world, options.commits, options.interval, above)
            print(f"  commit to observation          {shown(waits, f'ticks of {options.interval} ms')}", flush=True)
        spark.stop()


if __name__ == "__main__":
    main()

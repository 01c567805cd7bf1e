"""How fast the pure core is: hold commands per second, and what an observed upper costs.

Run: .venv/bin/python -m bench.core [--commands N]

"machine" is the state machine alone; "with messages" adds decoding, recognising duplicates and encoding the reply. The
ratio between 1,000 and 100,000 collections says whether a command's cost depends on the others. All of it is one thread
that only computes, so seconds are those of the processor: what else the machine does counts less.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Callable
from functools import partial

from app.commands import CommandProcessor
from app.core.advancing import Observation
from app.core.descriptions import Description, Other, Table
from app.core.duration import Duration
from app.core.frontier import Frontier
from app.core.locations import Warehouse
from app.core.machine import Machine
from app.core.policy import LagWritesBy


def machine_with(collections: int) -> Machine:
    machine = Machine(warehouse=Warehouse(roots=["/warehouse"], reserved=[]))
    names = [f"table{number}" for number in range(collections)]
    for start in range(0, collections, 10_000):
        chunk = [Description(id=name, data_source=Table()) for name in names[start : start + 10_000]]
        machine.create_collections(0, chunk, register_ts=1)
    return machine


def hold_commands(machine: Machine, collections: int, rounds: int) -> float:
    """Seconds for `rounds` of acquire, downgrade, release, each on a collection chosen at random."""
    chosen = [f"table{random.randrange(collections)}" for _ in range(rounds)]
    started = time.process_time()
    for number, collection in enumerate(chosen):
        acquired = machine.acquire_read_holds(
            number, command_id=f"c{number}", collections=[collection], at=None, holder="bench", lease_ms=60_000
        )
        hold = acquired.result[0].id
        machine.downgrade_read_holds(number, [(hold, Frontier(number + 2))])
        machine.release_read_holds(number, [hold])
        if number % 1_000 == 0:
            machine.purge(number)
    return time.process_time() - started


def hold_messages(machine: Machine, collections: int, rounds: int) -> float:
    """The same as JSON records: decoded, checked for duplicates, applied, answered."""
    records = []
    for number in range(rounds):
        collection = f"table{random.randrange(collections)}"
        hold = f"a{number}/{collection}"
        records += [
            {"type": "acquire_read_holds", "id": f"a{number}", "collections": [collection], "holder": "bench"},
            {"type": "downgrade_read_holds", "id": f"d{number}", "holds": [{"hold": hold, "to": number + 2}]},
            {"type": "release_read_holds", "id": f"r{number}", "holds": [hold]},
        ]
    raw = [json.dumps(record).encode() for record in records]
    processor = CommandProcessor(machine)
    started = time.process_time()
    for number, record in enumerate(raw):
        outcome = processor.apply(record, timestamp=number, now=number)
        outcome.reply(number, 1)
    return time.process_time() - started


def upper_observations(chain: int, observations: int) -> float:
    """Seconds for `observations` of uppers at the top of a chain of dependencies, each moving every since of it."""
    machine = Machine(warehouse=Warehouse(roots=["/warehouse"], reserved=[]))
    descriptions = [Description(id="c0", data_source=Table())]
    descriptions += [Description(id=f"c{n}", data_source=Other(inputs=(f"c{n - 1}",))) for n in range(1, chain)]
    machine.create_collections(0, descriptions, register_ts=0)
    machine.set_read_policies(0, [(d.id, LagWritesBy(lag=Duration(1))) for d in descriptions])
    shards = [machine.state.collections[d.id].shard for d in descriptions]
    last = shards.pop()
    machine.observe(0, [Observation(shard, Frontier(observations + 10), 0) for shard in shards])
    started = time.process_time()
    for number in range(1, observations + 1):
        machine.observe(number, [Observation(last, Frontier(number + 1), number)])
    elapsed = time.process_time() - started
    moved = {machine.state.collections[d.id].since for d in descriptions}
    assert moved == {Frontier(observations)}, "every since of the chain must have moved"
    return elapsed


def best_of(times: int, measure: Callable[[], float]) -> float:
    """The fastest of a few runs is the one that was disturbed least."""
    return min(measure() for _ in range(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", type=int, default=150_000, help="hold commands per measurement")
    rounds = parser.parse_args().commands // 3
    random.seed(1)
    for name, measure in (("machine", hold_commands), ("with messages", hold_messages)):
        rates = []
        for collections in (1_000, 100_000):
            machine = machine_with(collections)
            gc.collect()
            gc.freeze()  # as the controller does after its boot: what is there stays, and need not be looked at again
            seconds = best_of(3, partial(measure, machine, collections, rounds))
            rates.append(3 * rounds / seconds)
            print(f"{name}: {rates[-1]:>9,.0f} hold commands/s over {collections:>7,} collections", flush=True)
        print(f"{name}: a command over 100,000 collections costs {rates[0] / rates[1]:.2f} x one over 1,000")
    for chain in (1, 10):
        seconds = best_of(3, partial(upper_observations, chain, 20_000))
        print(f"upper observation through a chain of {chain:>2}: {seconds / 20_000 * 1e6:6.1f} microseconds")


if __name__ == "__main__":
    main()

"""Long random runs without hypothesis: `python -m tests.property.driver --steps 100000 --seed 1`."""

from __future__ import annotations

import argparse
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tests.property.checker import Checker, Disagreement, SimulatorLike
from tests.property.generate import random_line
from tests.property.oracle_state import Row

EPISODE = 250
"""Lines before everything starts anew: rows of shards stay for ever, so a longer life would only get slower."""


@dataclass
class Coverage:
    """What the lines of one or more runs met."""

    steps: int = 0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)


Factory = Callable[[], SimulatorLike]


def run(seed: int, steps: int, simulator_factory: Factory | None, coverage: Coverage | None = None) -> None:
    """Run `steps` random lines, in episodes that each start with a fresh program.

    Raises AssertionError, with the seed and the script of the episode, at the first disagreement. Without a factory
    only the oracle runs. The same seed gives the same lines as long as program and oracle agree.
    """
    coverage = coverage if coverage is not None else Coverage()
    for start in range(0, steps, EPISODE):
        rng = Random(f"{seed}/{start}")
        checker = Checker(
            simulator_factory() if simulator_factory else None, name=f"seed {seed}, episode {start // EPISODE},"
        )
        try:
            for _ in range(min(EPISODE, steps - start)):
                checker.step(random_line(rng, checker.oracle))
                coverage.steps += 1
        finally:
            coverage.outcomes += checker.outcomes
            coverage.events += checker.oracle.events


def shrink(disagreement: Disagreement, simulator_factory: Factory) -> Disagreement:
    """The same problem with as few lines as leaving lines out can do."""
    size = len(disagreement.lines) // 2
    while size >= 1:
        start = 0
        while start < len(disagreement.lines):
            fewer = disagreement.lines[:start] + disagreement.lines[start + size :]
            smaller = _replay(fewer, simulator_factory)
            if smaller is not None and smaller.problem == disagreement.problem:
                disagreement = smaller
            else:
                start += size
        size //= 2
    return disagreement


def _replay(lines: list[Row], simulator_factory: Factory) -> Disagreement | None:
    checker = Checker(simulator_factory(), name="smaller,")
    try:
        for line in lines:
            checker.step(line)
    except Disagreement as disagreement:
        return disagreement
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--oracle-only", action="store_true", help="look at the distribution of lines, test nothing")
    arguments = parser.parse_args()
    factory: Factory | None = None
    if not arguments.oracle_only:
        from app.simulate import Simulator  # noqa: PLC0415 - the oracle alone can be looked at without the program

        factory = Simulator
    logging.disable(logging.WARNING)  # the program warns of lost holds, as it should, and random lines lose many
    coverage = Coverage()
    started = time.perf_counter()
    result = "agreed on every line"
    try:
        run(arguments.seed, arguments.steps, factory, coverage)
    except Disagreement as disagreement:
        assert factory is not None
        result = f"DISAGREED\n{disagreement}\nand, made smaller:\n{shrink(disagreement, factory)}"
    seconds = time.perf_counter() - started
    for (kind, outcome), count in sorted(coverage.outcomes.items()):
        print(f"{kind:24} {outcome:24} {count:8}")
    for event, count in sorted(coverage.events.items()):
        print(f"{event:49} {count:8}")
    print(f"{coverage.steps} steps in {seconds:.1f} s, {coverage.steps / seconds:.0f} a second: {result}")
    if result.startswith("DISAGREED"):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

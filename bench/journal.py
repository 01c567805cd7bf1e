"""What an entry costs at the beginning of a journal and after thousands of them.

Run: .venv/bin/python -m bench.journal [--entries N]

Each entry has ten images, as a small batch of commands has. Maintenance is asked for after every entry, as it is cheap
when nothing is due; "with maintenance" is the time of both. The ratio should be
about 1, and must not be above 2.

The machine may be busier at the end than at the beginning, or less. So the last hundred entries take turns with the
first hundred of a second, new journal: "side by side" compares these two, which had the same load.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from app.state.journal import Journal, JournalRow

IMAGE = (
    b'{"id":"c%d/orders","collection":"orders","holder":"bench","purpose":null,"since":1700000000000,"acquired_at":%d}'
)
WINDOW = 100


def rows(number: int) -> list[JournalRow]:
    return [JournalRow("hold", f"c{number}/{each}", IMAGE % (number, each)) for each in range(10)]


class Times:
    """Milliseconds of each append, and of each append with the maintenance after it."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.appends: list[float] = []
        self.both: list[float] = []

    def measure(self, number: int) -> None:
        batch = rows(number)
        began = time.perf_counter()
        self.journal.append(epoch=1, at=number, origin="bench", rows=batch)
        appended = time.perf_counter()
        self.journal.maintain(epoch=1, trim_to=number, now_ms=number, retention_ms=86_400_000)
        self.appends.append((appended - began) * 1_000)
        self.both.append((time.perf_counter() - began) * 1_000)


def report(name: str, first: Sequence[float], last: Sequence[float]) -> None:
    for kind, average in (("median", statistics.median), ("mean", statistics.fmean)):
        before, after = average(first[:WINDOW]), average(last[-WINDOW:])
        print(
            f"{name:<30} {kind:<6}  first {WINDOW}: {before:6.2f} ms   last {WINDOW}: {after:6.2f} ms   "
            f"last/first: {after / before:5.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--through-delta", action="store_true", help="commit as on object stores (slow on local paths)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as root:

        def journal(name: str) -> Journal:
            uri = f"{root}/{name}/state/journal"
            return Journal.open(uri, storage_options={}, instance=name, through_delta=arguments.through_delta)

        # Importing, first use of each library: not what is measured.
        warm_up = Times(journal("warm-up"))
        for number in range(WINDOW):
            warm_up.measure(number)
        times, fresh = Times(journal("long")), Times(journal("new"))
        began = time.perf_counter()
        for number in range(arguments.entries - WINDOW):
            times.measure(number)
        for number in range(arguments.entries - WINDOW, arguments.entries):
            times.measure(number)
            fresh.measure(number)
        seconds = time.perf_counter() - began
        print(f"{arguments.entries} entries of 10 rows in {seconds:.0f} s, journal at version {times.journal.head}")
        report("append", times.appends, times.appends)
        report("with maintenance", times.both, times.both)
        report("append, side by side", fresh.appends, times.appends)
        report("with maintenance, side by side", fresh.both, times.both)
        every = f"median {statistics.median(times.both):.2f} ms, mean {statistics.fmean(times.both):.2f} ms"
        print(f"all entries, with maintenance: {every}")
        rounds = sorted((both - alone for both, alone in zip(times.both, times.appends, strict=True)), reverse=True)
        due = [each for each in rounds if each > 10]
        total = f"together {sum(due) / 1_000:.1f} s, longest {rounds[0]:.0f} ms"
        print(f"rounds of maintenance over 10 ms: {len(due)}, {total}")
        log = Path(root, "long/state/journal/_delta_log")
        print(f"files in the log: {sum(1 for _ in log.iterdir())}")
        began = time.perf_counter()
        again = Journal.open(str(log.parent), storage_options={}, instance="again", read_only=True)
        number = sum(1 for _ in again.read(again.trimmed))
        print(f"opening it again and reading {number} entries: {(time.perf_counter() - began) * 1_000:.0f} ms")


if __name__ == "__main__":
    main()

"""What an entry costs at the beginning of a journal and after thousands of them, and how long maintenance delays it.

Run: .venv/bin/python -m bench.journal [--entries N]

Each entry has ten images, as a small batch of commands has. Maintenance runs beside, in a thread of its own, after as
many entries as in the controller. The ratio of the last hundred entries to the first should be about 1, and must not be
above 2.

The machine may be busier at the end than at the beginning, or less. So the last hundred entries take turns with the
first hundred of a second, new journal: "side by side" compares these two, which had the same load. For the same reason
the worst append beside maintenance is to be seen with the worst of the others.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from app.maintenance import JOURNAL_EVERY
from app.state.journal import Journal, JournalRow

IMAGE = (
    b'{"id":"c%d/orders","collection":"orders","holder":"bench","purpose":null,"since":1700000000000,"acquired_at":%d}'
)
WINDOW = 100
RETENTION_MS = 86_400_000


def rows(number: int) -> list[JournalRow]:
    return [JournalRow("hold", f"c{number}/{each}", IMAGE % (number, each)) for each in range(10)]


class Span(NamedTuple):
    """Seconds on the clock of this process."""

    began: float
    ended: float

    @property
    def ms(self) -> float:
        return (self.ended - self.began) * 1_000


class Times:
    """When each append began and ended, and each round of maintenance."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.appends: list[Span] = []
        self.rounds: list[Span] = []
        self._due = threading.Event()
        self._stopped = False
        self._maintained_at = 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._maintain)
        self._thread.start()

    def append(self, number: int) -> None:
        batch = rows(number)
        began = time.perf_counter()
        self.journal.append(epoch=1, at=number, origin="bench", rows=batch)
        self.appends.append(Span(began, time.perf_counter()))
        if self.journal.last_seq - self._maintained_at >= JOURNAL_EVERY:
            self._due.set()

    def _maintain(self) -> None:
        try:
            while self._due.wait() and not self._stopped:
                self._due.clear()
                upto = self._maintained_at = self.journal.last_seq
                began = time.perf_counter()
                self.journal.maintain(epoch=1, trim_to=upto, now_ms=upto, retention_ms=RETENTION_MS)
                self.rounds.append(Span(began, time.perf_counter()))
        except BaseException as error:
            self._failure = error
            raise

    def stop(self) -> None:
        self._stopped = True
        self._due.set()
        self._thread.join()
        if self._failure is not None:
            raise SystemExit(f"maintenance failed: {self._failure}")

    def beside_maintenance(self) -> tuple[list[float], list[float]]:
        """Milliseconds of the appends during which maintenance was running, and of the others."""
        beside, alone = [], []
        for append in self.appends:
            overlaps = any(append.began < each.ended and each.began < append.ended for each in self.rounds)
            (beside if overlaps else alone).append(append.ms)
        return beside, alone


def report(name: str, first: Sequence[Span], last: Sequence[Span]) -> None:
    for kind, average in (("median", statistics.median), ("mean", statistics.fmean)):
        before = average(span.ms for span in first[:WINDOW])
        after = average(span.ms for span in last[-WINDOW:])
        print(
            f"{name:<20} {kind:<6}  first {WINDOW}: {before:6.2f} ms   last {WINDOW}: {after:6.2f} ms   "
            f"last/first: {after / before:5.2f}"
        )


def spread(name: str, found: Sequence[float]) -> None:
    if len(found) < 2:
        print(f"{name:<30} none")
        return
    p99 = statistics.quantiles(found, n=100, method="inclusive")[98]
    print(
        f"{name:<30} {len(found):>6}   median {statistics.median(found):7.2f} ms   p99 {p99:7.2f} ms   "
        f"worst {max(found):7.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--through-delta", action="store_true", help="commit as on object stores (slow on local paths)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as root:

        def times(name: str) -> Times:
            uri = f"{root}/{name}/state/journal"
            return Times(Journal.open(uri, storage_options={}, instance=name, through_delta=arguments.through_delta))

        # Importing, first use of each library: not what is measured.
        warm_up, long, fresh = times("warm-up"), times("long"), times("new")
        for number in range(2 * JOURNAL_EVERY):
            warm_up.append(number)
        warm_up.stop()
        began = time.perf_counter()
        for number in range(arguments.entries - WINDOW):
            long.append(number)
        for number in range(arguments.entries - WINDOW, arguments.entries):
            long.append(number)
            fresh.append(number)
        seconds = time.perf_counter() - began
        long.stop()
        fresh.stop()
        print(f"{arguments.entries} entries of 10 rows in {seconds:.0f} s, journal at version {long.journal.head}")
        report("append", long.appends, long.appends)
        report("append, side by side", fresh.appends, long.appends)
        beside, alone = long.beside_maintenance()
        spread("all appends", [span.ms for span in long.appends])
        spread("appends beside maintenance", beside)
        spread("appends without", alone)
        spread("rounds of maintenance", [span.ms for span in long.rounds])
        log = Path(root, "long/state/journal/_delta_log")
        print(f"files in the log: {sum(1 for _ in log.iterdir())}")
        began = time.perf_counter()
        again = Journal.open(str(log.parent), storage_options={}, instance="again", read_only=True)
        number = sum(1 for _ in again.read(again.trimmed))
        print(f"opening it again and reading {number} entries: {(time.perf_counter() - began) * 1_000:.0f} ms")


if __name__ == "__main__":
    main()

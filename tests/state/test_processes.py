"""Several controllers on one root, in processes of their own: nothing is lost, nothing is there twice."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.state.controllers import take_over
from tests.state.helpers import append, names, open_journal, truth


def start(root: Path, name: str, what: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-m", "tests.state.controllers", str(root), name, what]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("processes", "entries"), [(2, 40), (4, 25)])
def test_controllers_that_take_over_from_each_other_lose_nothing(tmp_path: Path, processes: int, entries: int) -> None:
    """They also create the journal, all at once."""
    running = [start(tmp_path, name, str(entries)) for name in "abcd"[:processes]]
    acknowledged: dict[str, int | None] = {}
    for process in running:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        for line in output.splitlines():
            kind, *rest = line.split()
            acknowledged[rest[-1]] = int(rest[0]) if kind == "acknowledged" else None
    journal = open_journal(tmp_path, "reader", read_only=True)
    there = {row.key: entry.seq for entry in journal.read(0) for row in entry.rows}
    assert Counter(names(journal)) == Counter(acknowledged.keys())
    assert len(acknowledged) == processes * entries
    assert all(seq is None or there[key] == seq for key, seq in acknowledged.items())
    assert truth(tmp_path) == names(journal)
    epochs = [(entry.epoch, entry.instance) for entry in journal.read(0)]
    assert epochs == sorted(epochs, key=lambda each: each[0]), "epochs never go back"
    assert len({epoch for epoch, _ in epochs}) == len(set(epochs)), "an epoch belongs to one controller"


def test_a_controller_that_was_stopped_past_its_replacement_halts(tmp_path: Path) -> None:
    old = start(tmp_path, "old", "rule")
    try:
        assert old.stdout is not None
        acknowledged = [old.stdout.readline().split()[-1] for _ in range(20)]
        old.send_signal(signal.SIGSTOP)
        new = open_journal(tmp_path, "new")
        epoch, _ = take_over(new)
        for number in range(10):
            append(new, f"new{number}", epoch=epoch)
        old.send_signal(signal.SIGCONT)
        output, errors = old.communicate(timeout=60)
    finally:
        old.kill()
    assert old.returncode == 3, errors
    *more, told = output.splitlines()
    assert "instance new" in told
    assert "fenced" in told
    acknowledged += [line.split()[-1] for line in more]
    journal = open_journal(tmp_path, "reader", read_only=True)
    everything = names(journal)
    assert everything[-10:] == [f"new{number}" for number in range(10)]
    # The last one may have landed when it was stopped, before it could say so.
    assert everything[:-10] in (acknowledged, [*acknowledged, f"old{len(acknowledged)}"])

"""Controllers in processes of their own: `python -m tests.state.controllers <root> <name> <entries>`.

Each takes over from whoever is there, again and again, until it has appended its entries. It prints a line for every
entry that was acknowledged.
"""

from __future__ import annotations

import sys
from pathlib import Path

from app.state.journal import Fenced, Journal, OutcomeUnknown
from tests.state.helpers import append, open_journal


def take_over(journal: Journal) -> tuple[int, set[str]]:
    """The next epoch, and what is there."""
    epoch, there = 0, set()
    for entry in journal.read(0):
        epoch = max(epoch, entry.epoch)
        there.update(row.key for row in entry.rows)
    return epoch + 1, there


def compete(root: Path, name: str, entries: int) -> None:
    journal = open_journal(root, name)
    number, epoch = 0, take_over(journal)[0]
    while number < entries:
        key = f"{name}{number}"
        try:
            print("acknowledged", append(journal, key, epoch=epoch), key, flush=True)
        except (Fenced, OutcomeUnknown):
            epoch, there = take_over(journal)
            if key not in there:
                continue
            print("found", key, flush=True)
        number += 1
        if number % 7 == 0:
            try:
                journal.maintain(epoch=epoch, trim_to=0, now_ms=0, retention_ms=0)
            except (Fenced, OutcomeUnknown):
                epoch, _ = take_over(journal)


def rule(root: Path, name: str) -> None:
    """A controller like any other: it takes over once, and stops when it is replaced."""
    journal = open_journal(root, name)
    epoch, _ = take_over(journal)
    number = 0
    while True:
        try:
            print("acknowledged", append(journal, f"{name}{number}", epoch=epoch), f"{name}{number}", flush=True)
            journal.maintain(epoch=epoch, trim_to=0, now_ms=0, retention_ms=0)
        except Fenced as error:
            print("fenced", error, flush=True)
            raise SystemExit(3) from None
        number += 1


if __name__ == "__main__":
    if sys.argv[3] == "rule":
        rule(Path(sys.argv[1]), sys.argv[2])
    else:
        compete(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))

"""Maintenance keeps the journal small, loses nothing that recovery needs, and is harmless at any time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from app.core.errors import Corrupt
from app.state import journal_end, upkeep
from app.state.commit_log import DataFile
from app.state.journal import Fenced, Journal
from tests.state.helpers import append, names, open_journal, truth
from tests.state.test_journal import before_next_commit


@pytest.fixture(autouse=True)
def small_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "COMPACT_AFTER_FILES", 5)
    monkeypatch.setattr(upkeep, "CHECKPOINT_AFTER_COMMITS", 10)
    monkeypatch.setattr(upkeep, "TRIM_AFTER_FILES", 2)
    monkeypatch.setattr(upkeep, "CLEAN_EVERY_S", 0.0)


def maintain(journal: Journal, *, epoch: int = 1, trim_to: int = 0, now_ms: int = 0, retention_ms: int = 0) -> None:
    journal.maintain(epoch=epoch, trim_to=trim_to, now_ms=now_ms, retention_ms=retention_ms)


def make_old(directory: Path) -> None:
    """Three hours older, all but the newest commit."""
    files = sorted(path for path in directory.iterdir() if path.is_file())
    newest = max(path for path in files if path.suffix == ".json")
    for path in files:
        if path != newest:
            os.utime(path, (time.time() - 3 * 3_600,) * 2)


def sizes(*bytes_: int) -> Iterator[DataFile]:
    return (DataFile(str(number), size, 1, number, number, 0) for number, size in enumerate(bytes_, start=1))


def run(*bytes_: int) -> list[str] | None:
    plan = upkeep.plan(list(sizes(*bytes_)), trim_to=0, before_ms=0)
    return None if plan is None else [file.path for file in plan.files]


def test_small_files_in_a_row_become_one() -> None:
    small, medium, large = 1_000, 100_000, 1_000_000
    assert run() is None
    assert run(*[small] * 4) is None
    assert run(*[small] * 5) == ["1", "2", "3", "4", "5"]
    assert run(large, *[small] * 5) == ["2", "3", "4", "5", "6"]
    assert run(*[small] * 5, large, small) == ["1", "2", "3", "4", "5"]
    assert run(*[small] * 3, large, *[small] * 3) is None
    assert run(*[medium] * 15) is None
    assert run(*[medium] * 16, small) == [str(number) for number in range(1, 18)]
    assert run(*[large] * 50) is None


@pytest.mark.parametrize("through_delta", [False, True])
def test_compacting_keeps_every_entry(tmp_path: Path, through_delta: bool) -> None:
    journal = open_journal(tmp_path, "a", through_delta=through_delta)
    written = []
    for number in range(40):
        append(journal, f"h{number}", at=number)
        written.append(f"h{number}")
        maintain(journal)
    assert names(journal) == truth(tmp_path) == written
    assert len(DeltaTable(f"{tmp_path}/state/journal").file_uris()) < 10
    assert (tmp_path / "state/journal/_delta_log/_last_checkpoint").exists()
    again = open_journal(tmp_path, "b", through_delta=through_delta)
    assert names(again) == written
    assert list(again.read(17)) == [entry for entry in again.read(0) if entry.seq > 17]
    assert (again.last_seq, again.last_at) == (journal.last_seq, 39)


def test_trimming_takes_only_what_is_old_and_in_every_table(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, "a")
    for number in range(4):
        append(journal, f"h{number}", at=1_000 * number)
    maintain(journal, trim_to=4, now_ms=3_500, retention_ms=10_000)
    assert names(journal) == ["h0", "h1", "h2", "h3"], "nothing is old enough"
    maintain(journal, trim_to=0, now_ms=20_000)
    assert names(journal) == ["h0", "h1", "h2", "h3"], "no table has anything yet"
    maintain(journal, trim_to=2, now_ms=20_000)
    assert names(journal) == ["h2", "h3"]
    assert journal.trimmed == 2
    again = open_journal(tmp_path, "b")
    assert again.trimmed == 2
    assert names(again, after=3) == ["h3"]
    with pytest.raises(Corrupt, match="begins after entry 2"):
        list(again.read(1))


def test_the_last_entry_is_never_trimmed(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, "a")
    for number in range(3):
        append(journal, f"h{number}", at=number)
    maintain(journal, trim_to=3, now_ms=10**9)
    assert names(journal) == ["h2"]
    assert open_journal(tmp_path, "b").last_at == 2


def test_what_was_compacted_is_trimmed_too(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, "a")
    last = 0
    for number in range(100):
        last = append(journal, f"h{number}", at=number)
        maintain(journal, trim_to=last, now_ms=number, retention_ms=20)
    assert 20 <= len(names(journal)) <= 30
    assert names(journal) == truth(tmp_path)
    assert names(journal)[-1] == "h99"


def test_old_commit_files_go_and_young_ones_stay(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, "a")
    written = [f"h{number}" for number in range(30)]
    for name in written:
        append(journal, name)
        maintain(journal)
    log = tmp_path / "state/journal/_delta_log"
    commits = len(list(log.glob("*.json")))
    assert commits == journal.head + 1, "none is old"
    make_old(log)
    maintain(journal)
    left = sorted(int(path.stem) for path in log.glob("*.json"))
    checkpoint = max(int(path.name[:20]) for path in log.glob("*.checkpoint.parquet"))
    assert left == list(range(checkpoint, journal.head + 1))
    assert names(open_journal(tmp_path, "b")) == truth(tmp_path) == written
    assert append(journal, "after") == journal.head


def test_dead_files_are_deleted_after_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(tmp_path, "a")
    for number in range(5):
        append(journal, f"h{number}")
    orphan = tmp_path / f"state/journal/{3:020d}-{'0' * 32}.parquet"
    in_flight = tmp_path / f"state/journal/{7:020d}-{'0' * 32}.parquet"
    foreign = tmp_path / "state/journal/notes.parquet"
    for path in (orphan, in_flight, foreign):
        path.write_bytes(b"")
    files = lambda: len(list((tmp_path / "state/journal").glob("*.parquet")))  # noqa: E731
    maintain(journal)
    assert journal.head == 6
    assert files() == 5 + 1 + 3
    monkeypatch.setattr(upkeep, "DEAD_FILES_KEPT_S", 0.0)
    maintain(journal)
    assert files() == 1 + 2
    assert in_flight.exists(), "the version that could add it is not decided"
    assert foreign.exists()
    assert names(open_journal(tmp_path, "b")) == [f"h{number}" for number in range(5)]


@pytest.mark.parametrize("through_delta", [False, True])
def test_a_replaced_controller_that_maintains_harms_nothing_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through_delta: bool
) -> None:
    old = open_journal(tmp_path, "old", through_delta=through_delta)
    written = [f"h{number}" for number in range(5)]
    for name in written:
        append(old, name)

    def replace() -> None:
        new = open_journal(tmp_path, "new", through_delta=through_delta)
        for number in range(7):
            written.append(f"n{number}")
            append(new, f"n{number}", epoch=2)
            maintain(new, epoch=2)

    before_next_commit(old, monkeypatch, replace)
    with pytest.raises(Fenced, match="instance new"):
        maintain(old, trim_to=5, now_ms=10**9)
    assert names(open_journal(tmp_path, "c")) == truth(tmp_path) == written


def test_a_controller_replaced_before_its_checkpoint_and_clean_up_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "DEAD_FILES_KEPT_S", 0.0)
    monkeypatch.setattr(upkeep, "COMPACT_AFTER_FILES", 100)
    old = open_journal(tmp_path, "old")
    written = [f"h{number}" for number in range(12)]
    for name in written:
        append(old, name)
    monkeypatch.setattr(upkeep, "COMPACT_AFTER_FILES", 5)
    checkpoint, clean = old._upkeep.checkpoint, old._upkeep.clean
    new: list[Journal] = []

    def replaced_before_checkpoint(head: int) -> None:
        new.append(open_journal(tmp_path, "new"))
        for number in range(30):
            written.append(f"n{number}")
            append(new[0], written[-1], epoch=2)
            maintain(new[0], epoch=2)
        make_old(tmp_path / "state/journal/_delta_log")
        maintain(new[0], epoch=2)
        with suppress(DeltaError):  # that version cannot be read any more
            checkpoint(head)
        # Files that are hours old have taken hours to become so.
        clock_s = journal_end.clock_s
        monkeypatch.setattr(journal_end, "clock_s", lambda: clock_s() + 3 * 3_600)

    monkeypatch.setattr(old._upkeep, "checkpoint", replaced_before_checkpoint)
    with pytest.raises(Fenced):
        maintain(old)
    # Even if it went on, with what it knew then:
    clean(old._end.now)
    assert names(open_journal(tmp_path, "c")) == truth(tmp_path) == written
    assert append(new[0], "more", epoch=2) == new[0].head


def test_maintenance_that_fails_is_put_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(tmp_path, "a")
    for number in range(6):
        append(journal, f"h{number}")

    def refuse(_commit: object) -> bool:
        raise OSError("no space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(journal._writer, "put", refuse)
        maintain(journal)
    assert append(journal, "h6") == 7
    maintain(journal)
    assert journal.head == 8
    assert names(journal) == truth(tmp_path) == [f"h{number}" for number in range(7)]


def test_a_lost_answer_to_maintenance_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(tmp_path, "a")
    for number in range(6):
        append(journal, f"h{number}")
    before_next_commit(journal, monkeypatch, lambda: None)
    put = journal._writer.put  # type: ignore[union-attr]

    def lost(commit: object) -> bool:
        put(commit)  # type: ignore[arg-type]
        raise OSError("connection reset")

    with monkeypatch.context() as flaky:
        flaky.setattr(journal._writer, "put", lost)
        maintain(journal)
    assert append(journal, "h6") == 8
    assert names(journal) == truth(tmp_path) == [f"h{number}" for number in range(7)]

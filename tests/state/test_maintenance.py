"""Maintenance goes on beside the entries: they do not wait for it, and neither harms the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from deltalake.exceptions import DeltaError

from app import maintenance
from app.config import Config, StreamsConfig
from app.controller import Controller
from app.core.errors import Corrupt
from app.state import journal_end, snapshot, upkeep
from app.state.changes import Pending
from app.state.errors import Fenced, Trimmed
from app.state.journal import Journal
from app.state.recovery import recover
from app.state.tables import Loaded, Tables
from tests.state.helpers import append, hold_rows, names, open_journal, truth
from tests.state.test_upkeep import make_old

LONGEST_S = 60.0
"""Far more than an append takes on any machine: whoever waits this long waits for maintenance."""


@pytest.fixture(autouse=True)
def small_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "COMPACT_AFTER_FILES", 5)
    monkeypatch.setattr(upkeep, "CHECKPOINT_AFTER_COMMITS", 5)
    monkeypatch.setattr(upkeep, "TRIM_AFTER_FILES", 2)
    monkeypatch.setattr(upkeep, "CLEAN_EVERY_S", 0.0)


@pytest.fixture
def elsewhere() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Runs something in another thread, and waits for it."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda step: pool.submit(step).result(timeout=LONGEST_S)


def maintain(journal: Journal, *, epoch: int = 1, trim_to: int = 0) -> None:
    journal.maintain(epoch=epoch, trim_to=trim_to, now_ms=10**9, retention_ms=0)


def filled(root: Path, instance: str = "a", **options: Any) -> Journal:
    journal = open_journal(root, instance, **options)
    for number in range(6):
        append(journal, f"h{number}")
    return journal


def before(target: Any, name: str, monkeypatch: pytest.MonkeyPatch, step: Callable[[], object]) -> None:
    """Something happens the next time that this is called, before it does anything."""
    original = getattr(target, name)

    def step_first(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(target, name, original)
        step()
        return original(*arguments, **named)

    monkeypatch.setattr(target, name, step_first)


def hours_pass(journal: Journal, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many that old commit files are cleaned up by this controller."""
    make_old(root / "state/journal/_delta_log")
    maintain(journal, epoch=2)
    clock_s = journal_end.clock_s
    monkeypatch.setattr(journal_end, "clock_s", lambda: clock_s() + 3 * 3_600)


PLACES = ["rewrite", "write_data", "write_checkpoint", "clean_log"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("through_delta", [False, True], ids=["local", "through delta-rs"])
def test_no_entry_waits_for_what_maintenance_prepares_or_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: Any, place: str, through_delta: bool
) -> None:
    journal = filled(tmp_path, through_delta=through_delta)
    before(upkeep, place, monkeypatch, lambda: elsewhere(lambda: append(journal, "meanwhile")))
    maintain(journal)
    append(journal, "after")
    assert journal.head == 6 + 1 + 2, "entries, one compaction, entries"
    assert names(journal) == truth(tmp_path) == [*(f"h{number}" for number in range(6)), "meanwhile", "after"]
    assert names(open_journal(tmp_path, "b")) == names(journal)


def test_a_compaction_whose_files_were_compacted_meanwhile_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or every entry in them would be there twice."""
    journal = filled(tmp_path)
    # The maintenance of an earlier controller, which looked before we came, and is late.
    late = open_journal(tmp_path, "late")
    late._end._last = None

    def compacted_and_noticed() -> None:
        maintain(late, epoch=0)
        append(journal, "meanwhile")

    before(upkeep, "write_data", monkeypatch, compacted_and_noticed)
    maintain(journal)
    assert names(journal) == truth(tmp_path) == [*(f"h{number}" for number in range(6)), "meanwhile"]


def test_a_file_in_the_making_is_not_taken_for_a_dead_one_however_many_entries_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "DEAD_FILES_KEPT_S", 0.0)
    journal = filled(tmp_path)

    def much_happens() -> None:
        for number in range(20):
            append(journal, f"n{number}")
        for _ in range(2):
            journal._upkeep.clean(journal._end.now)

    before(journal, "_commit", monkeypatch, much_happens)  # the file is written
    maintain(journal)
    written = [*(f"h{number}" for number in range(6)), *(f"n{number}" for number in range(20))]
    assert names(journal) == truth(tmp_path) == names(open_journal(tmp_path, "b")) == written


def test_a_compaction_that_comes_too_late_for_its_file_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of the file says up to which version it may be added; from then on anyone may delete it."""
    monkeypatch.setattr(upkeep, "MOST_BEHIND", 3)
    journal = filled(tmp_path)

    def much_happens() -> None:
        for number in range(3):
            append(journal, f"n{number}")

    before(upkeep, "write_data", monkeypatch, much_happens)
    maintain(journal)
    assert journal.head == 9, "no compaction"
    maintain(journal)
    assert journal.head == 10, "the next one comes in time"
    written = [*(f"h{number}" for number in range(6)), *(f"n{number}" for number in range(3))]
    assert names(journal) == truth(tmp_path) == written


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("through_delta", [False, True], ids=["local", "through delta-rs"])
def test_a_controller_replaced_at_any_place_of_its_maintenance_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, through_delta: bool
) -> None:
    monkeypatch.setattr(upkeep, "DEAD_FILES_KEPT_S", 0.0)
    old = filled(tmp_path, "old", through_delta=through_delta)
    written = [f"h{number}" for number in range(6)]
    new: list[Journal] = []

    def replaced() -> None:
        new.append(open_journal(tmp_path, "new", through_delta=through_delta))
        for number in range(12):
            written.append(f"n{number}")
            append(new[0], written[-1], epoch=2)
            maintain(new[0], epoch=2)
        hours_pass(new[0], tmp_path, monkeypatch)

    before(upkeep, place, monkeypatch, replaced)
    try:
        maintain(old)
    except Fenced:
        pass
    else:
        assert place in ("write_checkpoint", "clean_log"), "after these, or if they fail, it looks no more"
        with pytest.raises(Fenced):
            old.look(1)
    assert names(open_journal(tmp_path, "c")) == truth(tmp_path) == written
    assert append(new[0], "more", epoch=2) == new[0].head
    maintain(new[0], epoch=2)
    assert names(open_journal(tmp_path, "d")) == [*written, "more"]


def test_a_controller_that_slept_through_its_replacement_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For hours: the commits of the other one are cleaned up, and the next version looks free."""
    old = filled(tmp_path, "old")
    free = tmp_path / f"state/journal/_delta_log/{7:020d}.json"

    def slept() -> None:
        new = open_journal(tmp_path, "new")
        for number in range(12):
            append(new, f"n{number}", epoch=2)
        monkeypatch.setattr(upkeep, "COMPACT_AFTER_FILES", 100)
        maintain(new, epoch=2)
        hours_pass(new, tmp_path, monkeypatch)
        assert not free.exists()

    before(upkeep, "rewrite", monkeypatch, slept)
    with pytest.raises(Fenced, match="instance new"):
        maintain(old)
    assert not free.exists()


def test_a_controller_whose_files_were_deleted_by_the_one_that_replaced_it_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "DEAD_FILES_KEPT_S", 0.0)
    filled(tmp_path)
    old = open_journal(tmp_path, "old")  # which has nothing of it in memory
    append(old, "x", epoch=2)

    def replaced() -> None:
        new = open_journal(tmp_path, "new")
        append(new, "y", epoch=3)
        for _ in range(2):
            maintain(new, epoch=3)

    before(upkeep, "rewrite", monkeypatch, replaced)
    with pytest.raises(Fenced, match="instance new"):
        maintain(old, epoch=2)


def test_a_file_that_is_really_missing_is_noticed(tmp_path: Path) -> None:
    filled(tmp_path)
    journal = open_journal(tmp_path, "b")  # which has nothing of it in memory
    append(journal, "x", epoch=2)
    (tmp_path / "state/journal" / journal._end.now.files[2].path).unlink()
    with pytest.raises(Corrupt, match="is missing"):
        maintain(journal, epoch=2)


def test_a_reader_misses_nothing_of_what_is_trimmed_while_it_reads(tmp_path: Path) -> None:
    journal = filled(tmp_path)
    entries = journal.read(0)
    assert next(entries).seq == 1
    maintain(journal, trim_to=5)
    assert journal.trimmed == 5
    assert [entry.seq for entry in entries] == [2, 3, 4, 5, 6]
    with pytest.raises(Trimmed):
        next(journal.read(0))


def test_a_journal_that_is_listed_while_entries_come_is_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing a directory may show a file and not the one that came just before it; delta-rs then sees a gap."""
    journal = filled(tmp_path)
    gap, aside = tmp_path / f"state/journal/_delta_log/{3:020d}.json", tmp_path / "aside"
    gap.rename(aside)
    original, seen = snapshot.DeltaTable, []

    def there_at_the_second_look(*arguments: Any, **named: Any) -> Any:
        try:
            return original(*arguments, **named)
        except DeltaError as error:
            aside.rename(gap)
            seen.append(error)
            raise

    monkeypatch.setattr(snapshot, "DeltaTable", there_at_the_second_look)
    journal._end.reload()
    assert len(seen) == 1
    assert names(journal) == [f"h{number}" for number in range(6)]


def test_a_checkpoint_is_of_a_version_that_was_there_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the listing for it could have a gap: see the test before this one."""
    journal = filled(tmp_path)
    log = tmp_path / "state/journal/_delta_log"
    hidden = log / f"{8:020d}.json"

    def entries_come() -> None:
        for name in ("x", "y"):
            append(journal, name)
        hidden.rename(tmp_path / "aside")  # of 7, 8 and 9 the listing shows 7 and 9

    monkeypatch.setattr(upkeep, "COMPACT_AFTER_FILES", 100)
    append(journal, "w")
    before(journal._upkeep, "checkpoint", monkeypatch, entries_come)
    maintain(journal)
    assert (log / f"{7:020d}.checkpoint.parquet").exists()
    (tmp_path / "aside").rename(hidden)
    assert names(open_journal(tmp_path, "b")) == [*(f"h{number}" for number in range(6)), "w", "x", "y"]


def test_recovery_reads_the_tables_again_that_went_on_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = open_journal(tmp_path, "a")
    tables = Tables.open(str(tmp_path), storage_options={})
    pending = Pending()
    for number in range(6):
        rows = [row._replace(entity="other") for row in hold_rows(f"h{number}")]
        pending.add(journal.append(epoch=1, at=0, origin="test", rows=rows), 1, rows)
    load = tables.load

    def load_before_the_merge() -> Loaded:
        monkeypatch.setattr(tables, "load", load)
        loaded = load()
        tables.merge(pending, upto=6, epoch=1)
        maintain(journal, trim_to=6)
        assert journal.trimmed == 5
        return loaded

    monkeypatch.setattr(tables, "load", load_before_the_merge)
    assert recover(journal, tables, now_ms=0).seq == 6


def test_commands_are_applied_while_the_journal_is_maintained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: Any
) -> None:
    monkeypatch.setattr(maintenance, "JOURNAL_EVERY", 1)
    config = Config(
        root=str(tmp_path / "root"),
        warehouse=[str(tmp_path / "warehouse")],
        streams=StreamsConfig(checkpoints=str(tmp_path / "checkpoints")),
    )
    controller = Controller(config)
    controller.boot()
    maintained: list[int] = []

    def maintain_slowly(**_: Any) -> None:
        elsewhere(lambda: controller.heartbeat(applied_until=None))
        maintained.append(controller.seq)

    controller.wait_for_tables()
    monkeypatch.setattr(controller._journal, "maintain", maintain_slowly)
    controller._maintenance._journal_at = 0
    controller._maintain(controller.seq)
    assert maintained
    controller.close()

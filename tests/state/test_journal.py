"""The journal: one entry per version, and whatever goes wrong, the log says what happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError

from app.core.errors import Corrupt
from app.state import journal_end
from app.state import store as store_module
from app.state.commit_log import Commit, DeltaWriter, Mark
from app.state.journal import Fenced, Journal, JournalRow, OutcomeUnknown, StateMissing, UnsafeStore
from tests.state.helpers import append, hold_rows, names, open_journal, truth

Open = Callable[..., Journal]


@pytest.fixture(params=[False, True], ids=["local", "through delta-rs"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the journal of this test: with commits as on local paths, and as on object stores."""
    return lambda instance="a", **options: open_journal(
        tmp_path, instance, **({"through_delta": request.param} | options)
    )


def lose_answer(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next commit lands, and then its answer is lost."""
    writer: Any = journal._writer
    put = writer.put

    def put_and_fail(commit: Commit) -> bool:
        monkeypatch.setattr(writer, "put", put)
        assert put(commit)
        raise OSError("connection reset")

    monkeypatch.setattr(writer, "put", put_and_fail)


def before_next_commit(journal: Journal, monkeypatch: pytest.MonkeyPatch, step: Callable[[], object]) -> None:
    """Something happens after the journal was looked at and before the commit is put: as if we had been paused."""
    writer: Any = journal._writer
    put = writer.put

    def step_and_put(commit: Commit) -> bool:
        monkeypatch.setattr(writer, "put", put)
        step()
        return bool(put(commit))

    monkeypatch.setattr(writer, "put", step_and_put)


def test_entries_come_back_as_they_were_written(opened: Open) -> None:
    journal = opened()
    rows = [JournalRow("hold", "c1/ä", '{"purpose":"größer"}'.encode()), JournalRow("hold", "gone", None)]
    assert journal.append(epoch=1, at=5, origin="commands", rows=rows) == 1
    assert journal.append(epoch=1, at=6, origin="heartbeat", rows=[]) == 2
    for again in (journal, opened("b"), opened("c", read_only=True)):
        first, second = again.read(0)
        assert first == (1, 1, 5, "commands", "a", rows)
        assert second == (2, 1, 6, "heartbeat", "a", [])
        assert list(again.read(1)) == [second]
        assert (again.head, again.last_seq, again.last_at) == (2, 2, 6)


def test_any_delta_reader_can_read_the_journal(opened: Open, tmp_path: Path) -> None:
    journal = opened()
    append(journal, "x")
    append(journal, "y")
    assert truth(tmp_path) == ["x", "y"]
    assert DeltaTable(f"{tmp_path}/state/journal").history(1)[0]["operation"] == "WRITE"


def test_the_seq_is_the_delta_version(opened: Open, tmp_path: Path) -> None:
    journal = opened()
    for number in range(1, 6):
        assert append(journal, f"h{number}") == number == DeltaTable(f"{tmp_path}/state/journal").version()


def test_a_lost_answer_is_recognised(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened()
    append(journal, "x")
    lose_answer(journal, monkeypatch)
    assert append(journal, "y") == 2
    assert append(journal, "z") == 3
    assert names(opened("b")) == ["x", "y", "z"]


def test_a_lost_answer_is_recognised_though_another_controller_has_taken_over(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened()
    lose_answer(journal, monkeypatch)
    writer: Any = journal._writer
    put = writer.put

    def put_then_replaced(commit: Commit) -> bool:
        try:
            return bool(put(commit))
        finally:
            append(opened("b"), "theirs", epoch=2)

    monkeypatch.setattr(writer, "put", put_then_replaced)
    assert append(journal, "ours") == 1
    monkeypatch.undo()
    with pytest.raises(Fenced):
        journal.look(1)
    assert names(opened("c")) == ["ours", "theirs"]


def test_a_failed_append_leaves_the_outcome_open_and_reading_tells(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened()
    append(journal, "x")

    def refuse(_commit: Commit) -> bool:
        raise OSError("no space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(journal._writer, "put", refuse)
        with pytest.raises(OutcomeUnknown, match="no space left"):
            append(journal, "y")
    assert names(journal) == ["x"]
    assert append(journal, "y again") == 2


def test_a_put_that_arrives_late_is_found_to_be_ours(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened()
    delayed: list[Commit] = []
    writer: Any = journal._writer
    put = writer.put

    def delay(commit: Commit) -> bool:
        delayed.append(commit)
        raise OSError("timeout")

    with monkeypatch.context() as slow:
        slow.setattr(writer, "put", delay)
        with pytest.raises(OutcomeUnknown):
            append(journal, "x")
    assert put(delayed[0])
    for _ in range(2):
        with pytest.raises(OutcomeUnknown, match="ourselves"):
            append(journal, "x again")
    assert names(journal) == ["x"]
    assert append(journal, "y") == 2


def test_another_controller_with_a_higher_epoch_fences_us(opened: Open) -> None:
    journal = opened("a")
    append(journal, "x")
    append(opened("b"), "y", epoch=2)
    for act in (lambda: append(journal, "z"), lambda: journal.look(1), lambda: maintain(journal)):
        with pytest.raises(Fenced, match=r"instance b.*epoch 2.*entry 2.*epoch 1"):
            act()
    assert names(opened("c")) == ["x", "y"]


def test_another_controller_with_the_same_epoch_fences_us(opened: Open) -> None:
    first, second = opened("a"), opened("b")
    append(first, "x", epoch=1)
    with pytest.raises(Fenced):
        append(second, "y", epoch=1)
    assert names(first) == ["x"]


def test_reading_another_controllers_entries_does_not_make_us_that_controller(opened: Open) -> None:
    journal = opened("a")
    append(journal, "x")
    append(opened("b"), "y", epoch=2)
    assert names(journal) == ["x", "y"]
    with pytest.raises(Fenced):
        append(journal, "z", epoch=2)
    with pytest.raises(Fenced):
        journal.look(2)
    assert append(journal, "z", epoch=3) == 3


def test_an_entry_of_an_older_controller_means_recover(opened: Open) -> None:
    old, new = opened("a"), opened("b")
    append(old, "x", epoch=1)
    with pytest.raises(OutcomeUnknown, match="controller a"):
        append(new, "boot", epoch=2)
    assert names(new) == ["x"]
    assert append(new, "boot", epoch=2) == 2


def test_maintenance_in_between_is_given_way_to(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.state.upkeep.COMPACT_AFTER_FILES", 3)
    journal = opened("a")
    for name in ("x", "y", "z"):
        append(journal, name)
    # The maintenance of an earlier controller, which looked before we came, and is late.
    late = opened("late")
    late._end._last = None
    before_next_commit(journal, monkeypatch, lambda: maintain(late, epoch=0))
    assert append(journal, "w") == 5
    assert names(opened("b")) == ["x", "y", "z", "w"]


def maintain(journal: Journal, epoch: int = 1) -> None:
    journal.maintain(epoch=epoch, trim_to=0, now_ms=0, retention_ms=0)


def test_a_commit_of_someone_else_is_corruption(opened: Open, tmp_path: Path) -> None:
    journal = opened()
    append(journal, "x")
    table = DeltaTable(f"{tmp_path}/state/journal")
    write_deltalake(table, table.to_pyarrow_table(), mode="append")
    with pytest.raises(Corrupt, match="not written by Holdfast"):
        append(journal, "y")


def test_a_paused_controller_does_not_append(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened("a")
    append(journal, "x")
    before_next_commit(journal, monkeypatch, lambda: append(opened("b"), "y", epoch=2))
    with pytest.raises(Fenced):
        append(journal, "z")
    assert names(opened("c")) == ["x", "y"]


def test_an_append_that_took_too_long_counts_as_failed(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened()
    clock = journal_end.clock_s
    sleep = lambda: monkeypatch.setattr(journal_end, "clock_s", lambda: clock() + 1_801)  # noqa: E731
    before_next_commit(journal, monkeypatch, sleep)
    with pytest.raises(OutcomeUnknown, match="so long"):
        append(journal, "x")
    with pytest.raises(OutcomeUnknown, match="not in our memory"):
        append(journal, "x again")
    assert names(journal) == ["x"]
    assert append(journal, "y") == 2


def test_after_a_long_pause_the_end_of_the_journal_is_looked_up_anew(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened("a")
    append(journal, "x")
    successor = opened("b")
    for name in ("y", "z"):
        append(successor, name, epoch=2)
    # Cleaned up meanwhile: the next version looks free.
    DeltaTable(f"{tmp_path}/state/journal").create_checkpoint()
    (tmp_path / f"state/journal/_delta_log/{2:020d}.json").unlink()
    clock = journal_end.clock_s
    monkeypatch.setattr(journal_end, "clock_s", lambda: clock() + 7_200)
    for act in (lambda: append(journal, "lost"), lambda: journal.look(1)):
        with pytest.raises(Fenced, match="instance b"):
            act()
    assert not (tmp_path / f"state/journal/_delta_log/{2:020d}.json").exists()
    assert names(journal) == ["x", "y", "z"]


def test_read_only_writes_nothing_and_follows(opened: Open, tmp_path: Path) -> None:
    with pytest.raises(StateMissing, match="no journal at"):
        opened(read_only=True)
    assert not list(tmp_path.iterdir())
    journal = opened()
    append(journal, "x")
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    reader = opened("r", read_only=True)
    assert names(reader) == ["x"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files
    append(journal, "y")
    assert names(reader, after=1) == ["y"]


def test_a_store_that_lets_the_second_writer_win_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overwrite(self: Any, path: str, data: bytes) -> bool:
        Path(self._full(path)).write_bytes(data)
        return True

    monkeypatch.setattr(store_module.LocalStore, "put_if_absent", overwrite)
    with pytest.raises(UnsafeStore, match="conditional puts"):
        open_journal(tmp_path, "a")


def test_the_probe_through_delta_rs_notices_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = DeltaWriter.put

    def overwrite(self: DeltaWriter, commit: Commit) -> bool:
        assert self._handle is not None
        (Path(self._uri) / f"_delta_log/{commit.version:020d}.json").unlink(missing_ok=True)
        return put(self, commit)

    monkeypatch.setattr(DeltaWriter, "put", overwrite)
    with pytest.raises(UnsafeStore, match="conditional puts"):
        open_journal(tmp_path, "a", through_delta=True)


def test_of_two_commits_at_one_version_one_lands(opened: Open) -> None:
    first, second = opened("a"), opened("b")
    mark = Mark("maintenance", "", "0" * 32, 0, "", 0)
    landed = []
    for journal in (first, second):
        assert journal._writer is not None
        try:
            landed.append(journal._writer.put(Commit(1, mark)))
        except DeltaError:
            landed.append(False)
    assert landed == [True, False]


def test_values_must_be_text(opened: Open) -> None:
    journal = opened()
    with pytest.raises(AssertionError, match="UTF-8"):
        journal.append(epoch=1, at=0, origin="test", rows=[JournalRow("hold", "x", b"\xff")])
    assert journal.append(epoch=1, at=0, origin="test", rows=hold_rows("x")) == 1

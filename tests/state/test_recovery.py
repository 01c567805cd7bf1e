"""Tables and journal together give back the state, exactly, whenever the controller stopped."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from app.core.errors import Corrupt
from app.state import table_upkeep, upkeep
from app.state.errors import NewerFormat, StateMissing
from app.state.journal import JournalRow
from app.state.recovery import FORMAT, ControllerImage, controller_row, recover
from app.state.tables import Tables
from tests.property.driver import run
from tests.state.helpers import append, open_journal
from tests.state.mirror import Mirror, read_table


def controller(**changes: object) -> ControllerImage:
    image = ControllerImage(epoch=1, format=FORMAT, instance="a", host="h", pid=1, started_at=5, root="r")
    return msgspec.structs.replace(image, **changes)


@pytest.mark.parametrize("seed", [1, 2])
def test_recovery_gives_the_live_state_after_random_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(upkeep, "COMPACT_AFTER_FILES", 5)
    monkeypatch.setattr(upkeep, "CHECKPOINT_AFTER_COMMITS", 20)
    monkeypatch.setattr(table_upkeep, "COMPACT_AFTER_FILES", 3)
    monkeypatch.setattr(table_upkeep, "CHECKPOINT_AFTER_COMMITS", 5)
    made: list[Mirror] = []

    def make() -> Mirror:
        made.append(Mirror(tmp_path / str(len(made)), seed))
        return made[-1]

    run(seed, 250, make)
    (mirror,) = made
    mirror.check_recovery()
    mirror.merge()
    mirror.check_tables()
    recovered = mirror.check_recovery()
    assert not recovered.tables_behind
    assert mirror.checked > 3
    assert mirror.real.trimmed > 0, "recovery was shown with a trimmed journal"


def test_every_record_has_one_row_in_commands(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, 1)
    lines = [
        b'{"type":"create_collections","id":"c1","register_ts":5,"collections":[{"id":"a","data_source":{"kind":"table"}}]}',
        b'{"type":"create_collections","id":"c1","register_ts":5,"collections":[{"id":"a","data_source":{"kind":"table"}}]}',
        b'{"type":"acquire_read_holds","id":"c2","collections":["a"],"holder":"me","at":1}',
        b"\xff not JSON",
        b'{"type":"reconcile","id":"c1","collections":[]}',
    ]
    for line in lines:
        mirror.line(line)
    mirror.merge()
    mirror.tables.merge(mirror.pending, upto=mirror.real.last_seq, epoch=1)
    rows = sorted(read_table(tmp_path, "commands"), key=lambda row: row["offset"])
    assert [row["status"] for row in rows] == ["ok", "ok", "error", "error", "error"]
    assert rows[0]["result"] == {}
    assert rows[0]["digest"]
    assert (rows[1]["digest"], rows[1]["first_seq"]) == (None, 1)
    assert (rows[2]["error_code"], rows[2]["error_details"]) == ("SINCE_VIOLATION", {"earliest": {"a": 5}})
    assert (rows[3]["id"], rows[3]["raw"]) == (None, "/yBub3QgSlNPTg==")
    assert rows[4]["error_details"] == {"path": "$.id"}
    mirror.check_recovery()


def test_an_empty_root_recovers_to_nothing(tmp_path: Path) -> None:
    journal, tables = open_journal(tmp_path, "a"), Tables.open(str(tmp_path), storage_options={})
    recovered = recover(journal, tables, now_ms=5)
    assert (recovered.images, recovered.commands, recovered.offsets) == ({}, [], {})
    assert (recovered.controller, recovered.seq, recovered.last_at) == (None, 0, 0)


@pytest.mark.parametrize("in_tables", [False, True])
def test_the_controller_comes_back_and_a_newer_format_is_refused(tmp_path: Path, in_tables: bool) -> None:
    journal, tables = open_journal(tmp_path, "a"), Tables.open(str(tmp_path), storage_options={})
    for image in (controller(), controller(epoch=2, format=FORMAT + 1)):
        seq = journal.append(epoch=image.epoch, at=0, origin="boot", rows=[controller_row(image)])
        if image.format == FORMAT:
            assert recover(journal, tables, now_ms=0).controller == image
        if in_tables:
            rows = [JournalRow("something new", "x", b"?"), controller_row(image)]
            changes = {(row.entity, row.key): (row.value, seq, image.epoch) for row in rows}
            tables.merge(changes, upto=seq, epoch=image.epoch)
    with pytest.raises(NewerFormat, match=r"format 2.*up to 1"):
        recover(journal, tables, now_ms=0)


def test_a_lost_table_is_noticed_when_the_journal_no_longer_has_its_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "TRIM_AFTER_FILES", 1)
    journal, tables = open_journal(tmp_path, "a"), Tables.open(str(tmp_path), storage_options={})
    for number in range(4):
        append(journal, f"h{number}")
    tables.merge({}, upto=4, epoch=1)
    journal.maintain(epoch=1, trim_to=4, now_ms=10**6, retention_ms=0)
    (tmp_path / "state/holds").rename(tmp_path / "holds.lost")
    with pytest.raises(Corrupt, match="lost or set back"):
        recover(journal, Tables.open(str(tmp_path), storage_options={}), now_ms=0)


def test_tables_ahead_of_the_journal_are_noticed(tmp_path: Path) -> None:
    journal, tables = open_journal(tmp_path, "a"), Tables.open(str(tmp_path), storage_options={})
    append(journal, "x")
    tables.merge({}, upto=7, epoch=1)
    with pytest.raises(Corrupt, match="ends with 1"):
        recover(journal, tables, now_ms=0)


def test_read_only_creates_no_table(tmp_path: Path) -> None:
    with pytest.raises(StateMissing, match="no table collections"):
        Tables.open(str(tmp_path), storage_options={}, read_only=True)
    assert not list(tmp_path.iterdir())

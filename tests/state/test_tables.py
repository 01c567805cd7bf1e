"""The tables that users query: equal to the journal at their position, and never set back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from app.commands import CommandImage
from app.core.descriptions import Description
from app.core.descriptions import Table as TableSource
from app.core.frontier import EMPTY, Frontier
from app.core.images import Collection, Hold, Image, Parameter, Shard
from app.core.policy import NoPolicy
from app.protocol import Reply
from app.state import table_upkeep
from app.state.changes import Pending
from app.state.errors import Fenced, OutcomeUnknown
from app.state.journal import JournalRow
from app.state.recovery import command_row, image_row, offset_row
from app.state.rows import CommandRow
from app.state.schemas import SCHEMAS
from app.state.tables import TABLES, Tables
from tests.state.mirror import read_table

LATEST_MS = 253_402_300_799_999
OLD = Shard("old", "/w/old", "updates", "c")


def tables(root: Path) -> Tables:
    return Tables.open(str(root), storage_options={})


def pending(*entries: tuple[int, list[JournalRow]], epoch: int = 1) -> Pending:
    changes = Pending()
    for seq, rows in entries:
        changes.add(seq, epoch, rows)
    return changes


def put(entity: str, key: str, image: Image | None) -> JournalRow:
    return image_row((entity, key), image)


def hold(key: str, since: int = 1, **more: Any) -> JournalRow:
    return put("hold", key, Hold(key, "c", "me", None, Frontier(since), 5, **more))


def gone(entity: str, key: str) -> JournalRow:
    return put(entity, key, None)


def collection(key: str, since: int = 0) -> JournalRow:
    description = Description(id=key, data_source=TableSource())
    image = Collection(
        key, description, None, None, (), "s", 0, NoPolicy(initial_since=0), EMPTY, Frontier(since), Frontier(since)
    )
    return put("collection", key, image)


def command(offset: int, applied_at: int = 1_000, **more: Any) -> JournalRow:
    reply = Reply(id=f"c{offset}", type="reconcile", status="ok", result={"extra": [], "missing": []})
    image = CommandImage(f"c{offset}", "reconcile", reply, applied_at, "digest")
    topic = more.get("topic", "t")
    return command_row(f"id of {topic}", CommandRow(topic, 0, offset, image))


def holds(root: Path) -> dict[str, int]:
    return {row["hold"]: row["since"] for row in read_table(root, "holds")}


def test_rows_are_inserted_updated_and_deleted(tmp_path: Path) -> None:
    state = tables(tmp_path)
    assert state.positions() == dict.fromkeys(TABLES, 0)
    state.merge(pending((3, [hold("x"), hold("y"), put("parameter", "p", Parameter(True))])), upto=3, epoch=1)
    assert holds(tmp_path) == {"x": 1, "y": 1}
    assert state.positions() == dict.fromkeys(TABLES, 3), "all of them, also those in which nothing changed"
    state.merge(pending((4, [hold("x", 9), gone("hold", "y"), gone("hold", "never seen")])), upto=5, epoch=1)
    assert holds(tmp_path) == {"x": 9}
    assert state.positions() == tables(tmp_path).positions() == dict.fromkeys(TABLES, 5)
    state.merge(pending((6, [gone("hold", "never seen")])), upto=6, epoch=1)
    assert state.positions() == dict.fromkeys(TABLES, 6), "also after a merge that matched nothing"
    assert read_table(tmp_path, "meta") == [
        {"entity": "parameter", "key": "p", "value": '{"value":true}', "updated_seq": 3}
    ]


def test_a_plain_mapping_is_merged_too(tmp_path: Path) -> None:
    state = tables(tmp_path)
    row = hold("x")
    state.merge({(row.entity, row.key): (row.value, 2, 1)}, upto=2, epoch=1)
    assert holds(tmp_path) == {"x": 1}


def test_created_seq_is_that_of_the_first_row(tmp_path: Path) -> None:
    state = tables(tmp_path)

    def created() -> dict[str, tuple[int, int]]:
        return {row["id"]: (row["created_seq"], row["updated_seq"]) for row in read_table(tmp_path, "collections")}

    changes = pending((2, [collection("a"), collection("b")]), (3, [collection("a", 5)]))
    state.merge(changes, upto=3, epoch=1)
    assert created() == {"a": (2, 3), "b": (2, 2)}
    state.merge(pending((4, [collection("a", 6)]), (5, [collection("a", 7)])), upto=5, epoch=1)
    assert created() == {"a": (2, 5), "b": (2, 2)}
    again = pending((6, [gone("collection", "a")]), (7, [collection("a")]), (8, [collection("a", 3)]))
    state.merge(again, upto=8, epoch=1)
    assert created() == {"a": (7, 8), "b": (2, 2)}


def test_columns_whose_names_are_words_of_sql_and_extreme_times(tmp_path: Path) -> None:
    state = tables(tmp_path)
    shard = Shard(
        id="s",
        location="/w/s",
        format="updates",
        owner="c",
        table_id="t",
        since=EMPTY,
        upper=EMPTY,
        log_version=2**62,
        epoch=2**40,
        state="finalized",
        dropped_at=0,
        finalized_at=LATEST_MS,
        purged_at=LATEST_MS,
        merged_at=LATEST_MS,
        merged_to=2**63 - 2,
        merged_bytes_before=2**62,
        merged_bytes_after=0,
        attempts=3,
        last_error='it "failed"',
    )
    endless = hold("x", EMPTY, lease_ms=LATEST_MS, lease_expires_at=2 * LATEST_MS, pin_files=True, pinned_version=0)
    for seq in (1, 2):
        state.merge(pending((seq, [put("shard", "s", shard), endless])), upto=seq, epoch=1)
    loaded = state.load().images
    assert loaded["shard", "s"] == shard
    assert put("hold", "x", loaded["hold", "x"]) == endless
    (row,) = read_table(tmp_path, "shards")
    assert (row["since"], row["finalized_at"], row["dropped_at"]) == (None, LATEST_MS, 0)


def make_without(root: Path, name: str, *columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables as a version made them that did not know these columns."""
    known = SCHEMAS[name]
    older = known.columns
    for column in columns:
        older = older.remove(older.get_field_index(column))
    with monkeypatch.context() as before:
        before.setitem(SCHEMAS, name, known._replace(columns=older))  # type: ignore[arg-type]  # a dict, but not by its type
        tables(root).merge(pending((1, [put("shard", "old", OLD)])), upto=1, epoch=1)


def test_columns_that_a_table_lacks_are_added_by_the_first_merge_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_without(tmp_path, "shards", "table_id", "purged_at", monkeypatch=monkeypatch)
    state = tables(tmp_path)
    assert state.load().images == {("shard", "old"): OLD}
    assert "table_id" not in read_table(tmp_path, "shards")[0]
    new = msgspec.structs.replace(OLD, id="new", table_id="t", purged_at=LATEST_MS)
    state.merge(pending((2, [put("shard", "new", new)])), upto=2, epoch=1)
    wanted = {("shard", "old"): OLD, ("shard", "new"): new}
    assert state.load().images == tables(tmp_path).load().images == wanted
    columns = {row["shard"]: (row["table_id"], row["purged_at"]) for row in read_table(tmp_path, "shards")}
    assert columns == {"old": (None, None), "new": ("t", LATEST_MS)}
    assert state.positions() == dict.fromkeys(TABLES, 2)


def test_a_replaced_controller_adds_no_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_without(tmp_path, "shards", "table_id", monkeypatch=monkeypatch)
    with pytest.raises(Fenced):
        tables(tmp_path).merge(pending((2, [put("shard", "new", OLD)])), upto=2, epoch=0)
    assert "table_id" not in read_table(tmp_path, "shards")[0]


def test_merging_again_changes_nothing(tmp_path: Path) -> None:
    state = tables(tmp_path)
    changes = pending((1, [hold("x"), command(0)]), (2, [hold("x", 2), command(1)]))
    state.merge(changes, upto=2, epoch=1)
    versions = [DeltaTable(f"{tmp_path}/state/{name}").version() for name in TABLES]
    state.merge(changes, upto=2, epoch=1)
    assert [DeltaTable(f"{tmp_path}/state/{name}").version() for name in TABLES] == versions
    assert len(read_table(tmp_path, "commands")) == 2
    # With more behind it, only what is new is appended.
    changes.add(3, 1, [command(2)])
    state.merge(changes, upto=3, epoch=1)
    assert sorted(row["offset"] for row in read_table(tmp_path, "commands")) == [0, 1, 2]


def test_a_replaced_controller_cannot_set_a_table_back(tmp_path: Path) -> None:
    old, new = tables(tmp_path), tables(tmp_path)
    old.merge(pending((1, [hold("x", 1)])), upto=1, epoch=1)
    new.merge(pending((2, [hold("x", 2)]), (3, [hold("y", 3)]), epoch=2), upto=3, epoch=2)
    with pytest.raises(Fenced, match=r"epoch 2 merged table collections up to entry 3.*epoch 1"):
        old.merge(pending((2, [hold("x", 2), gone("hold", "y")])), upto=2, epoch=1)
    with pytest.raises(Fenced):
        old.merge(pending((9, [gone("hold", "y")])), upto=9, epoch=1)
    assert holds(tmp_path) == {"x": 2, "y": 3}


def before_write(state: Tables, name: str, monkeypatch: pytest.MonkeyPatch, step: Callable[[], object]) -> None:
    """Something happens after a table was looked at and before the merge commits: as if we had been paused."""
    table: Any = state._tables[name]
    write = table._write

    def step_and_write(*arguments: Any) -> None:
        monkeypatch.setattr(table, "_write", write)
        step()
        write(*arguments)

    monkeypatch.setattr(table, "_write", step_and_write)


@pytest.mark.parametrize("name", ["holds", "commands", "shards"])
def test_a_controller_paused_in_its_merge_harms_nothing_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    old, new = tables(tmp_path), tables(tmp_path)
    changes = pending((1, [hold("x", 1), command(0)]))
    newer = pending((1, [hold("x", 1), command(0)]), (2, [hold("x", 2), command(1)]), epoch=2)
    before_write(old, name, monkeypatch, lambda: new.merge(newer, upto=2, epoch=2))
    with pytest.raises(Fenced):
        old.merge(changes, upto=1, epoch=1)
    assert holds(tmp_path) == {"x": 2}
    assert sorted(row["offset"] for row in read_table(tmp_path, "commands")) == [0, 1]
    assert new.positions() == dict.fromkeys(TABLES, 2)


@pytest.mark.parametrize("name", ["holds", "commands", "shards"])
def test_a_merge_lands_only_right_after_the_version_that_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """delta-rs would try the next version by itself if it finds no conflict, as with maintenance: nobody looks then."""
    old, new = tables(tmp_path), tables(tmp_path)
    changes = pending((1, [hold("x", 1), command(0)]))
    table: Any = old._tables[name]
    write = table._write

    def replaced_meanwhile(*arguments: Any) -> None:
        monkeypatch.setattr(table, "_write", write)
        # A commit that says nothing of epochs, as the maintenance of the next controller makes it.
        handle = new._tables[name].refreshed()._handle
        handle.create_write_transaction([], "append", SCHEMAS[name].columns)
        try:
            write(*arguments)
        finally:
            new._tables = {name: new._tables[name]}
            new.merge(pending((2, [hold("x", 2), command(1)]), epoch=2), upto=2, epoch=2)

    monkeypatch.setattr(table, "_write", replaced_meanwhile)
    with pytest.raises(Fenced, match="epoch 2 merged"):
        old.merge(changes, upto=1, epoch=1)
    history = DeltaTable(f"{tmp_path}/state/{name}").history()
    assert [commit["version"] for commit in history] == [2, 1, 0], "made, maintained, merged by the new controller"
    assert holds(tmp_path) == {"x": 2 if name == "holds" else 1}


def test_what_an_older_controller_still_merged_is_not_appended_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tables(tmp_path), tables(tmp_path)
    first, both = pending((1, [command(0)])), pending((1, [command(0)]), (2, [command(1)]))
    old._tables = {"commands": old._tables["commands"]}  # it has merged the others
    before_write(new, "commands", monkeypatch, lambda: old.merge(first, upto=1, epoch=1))
    new.merge(both, upto=2, epoch=2)
    assert sorted(row["offset"] for row in read_table(tmp_path, "commands")) == [0, 1]


def test_a_lost_answer_does_not_append_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tables(tmp_path)
    table: Any = state._tables["commands"]
    write = table._write

    def write_and_fail(*arguments: Any) -> None:
        monkeypatch.setattr(table, "_write", write)
        write(*arguments)
        raise CommitFailedError("connection reset")

    monkeypatch.setattr(table, "_write", write_and_fail)
    state.merge(pending((1, [command(0)])), upto=1, epoch=1)
    assert [row["offset"] for row in read_table(tmp_path, "commands")] == [0]


def test_a_store_that_is_gone_leaves_the_outcome_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tables(tmp_path)
    monkeypatch.setattr("app.state.tables.PAUSE_S", 0)

    def fail(*_: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(state._tables["holds"], "_write", fail)
    with pytest.raises(OutcomeUnknown, match=r"holds up to entry 1.*no route"):
        state.merge(pending((1, [hold("x")])), upto=1, epoch=1)
    monkeypatch.undo()
    state.merge(pending((1, [hold("x")])), upto=1, epoch=1)
    assert state.positions() == dict.fromkeys(TABLES, 1)


def test_several_at_once_create_the_same_tables(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(lambda _: tables(tmp_path), range(4)))
    opened[0].merge(pending((1, [hold("x")])), upto=1, epoch=1)
    assert all(each.positions() == dict.fromkeys(TABLES, 1) for each in opened)
    assert len(list((tmp_path / "state/holds/_delta_log").glob("*0.json"))) == 1


def test_nothing_is_read_in_a_way_that_can_abort_the_process_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two of five processes that had read all tables with Arrow's dataset reader ended with SIGABRT.
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("Arrow reads in threads of its own, through Python objects")

    for reader in ("to_pyarrow_table", "to_pyarrow_dataset", "to_pandas"):
        monkeypatch.setattr(DeltaTable, reader, refuse)
    state = tables(tmp_path)
    state.merge(pending((1, [hold("x"), command(0)])), upto=1, epoch=1)
    state.maintain(now_ms=0, command_retention_ms=0)
    assert list(state.load().images) == [("hold", "x")]
    assert len(state.load_commands(applied_since_ms=0)[0]) == 1
    assert len(state.find_commands("t", [(0, 0)])) == 1


def test_commands_are_found_by_their_place(tmp_path: Path) -> None:
    state = tables(tmp_path)
    state.merge(pending((1, [command(0), command(1), command(0, topic="other")])), upto=1, epoch=1)
    state.merge(pending((2, [command(2)]), epoch=3), upto=2, epoch=3)
    found = state.find_commands("t", [(0, 2), (0, 0), (1, 0), (0, 77)])
    assert [(row.topic, row.offset, seq, epoch) for row, seq, epoch in found] == [("t", 0, 1, 1), ("t", 2, 2, 3)]
    assert state.find_commands("t", []) == []
    assert state.find_commands('it\'s "t"', [(0, 0)]) == []
    assert [seq for _, seq, _ in state.load_commands(applied_since_ms=1_000)[0]] == [1, 1, 1, 2]
    assert state.load_commands(applied_since_ms=1_001)[0] == []
    assert len(state.load_commands(applied_since_ms=-LATEST_MS)[0]) == 4


def test_of_a_topic_made_anew_the_newest_command_is_found(tmp_path: Path) -> None:
    state = tables(tmp_path)
    for seq in (1, 2):
        rows = [JournalRow("command", f"topic{seq}/0/0", command(0).value)]
        state.merge(pending((seq, rows)), upto=seq, epoch=1)
    assert [seq for _, seq, _ in state.find_commands("t", [(0, 0)])] == [2]


def test_old_commands_are_forgotten(tmp_path: Path) -> None:
    state = tables(tmp_path)
    now = 1_700_000_000_000
    rows = [command(0, now - 10_001), command(1, now - 10_000), command(2, now)]
    state.merge(pending((1, [*rows, offset_row("id", 0, 3)])), upto=1, epoch=1)
    state.maintain(now_ms=now, command_retention_ms=10_000)
    assert sorted(row["offset"] for row in read_table(tmp_path, "commands")) == [1, 2]
    assert state.positions() == dict.fromkeys(TABLES, 1), "the position stays what it was"


def test_maintenance_keeps_files_and_log_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_upkeep, "COMPACT_AFTER_FILES", 4)
    monkeypatch.setattr(table_upkeep, "CHECKPOINT_AFTER_COMMITS", 5)
    monkeypatch.setattr(table_upkeep, "CLEAN_EVERY_S", 0.0)
    state, stale = tables(tmp_path), tables(tmp_path)
    log = tmp_path / "state/commands/_delta_log"
    for seq in range(1, 13):
        state.merge(pending((seq, [hold("x", seq), command(seq)])), upto=seq, epoch=2)
        state.maintain(now_ms=0, command_retention_ms=0)
    for path in log.glob("*"):
        os.utime(path, (time.time() - 3 * 3_600,) * 2)
    state.merge(pending((13, [hold("x", 13), command(13)])), upto=13, epoch=2)
    state.maintain(now_ms=0, command_retention_ms=0)
    assert not (log / f"{1:020d}.json").exists()
    assert holds(tmp_path) == {"x": 13}
    assert sorted(row["offset"] for row in read_table(tmp_path, "commands")) == list(range(1, 14))
    assert tables(tmp_path).positions() == dict.fromkeys(TABLES, 13)
    # A handle from before all this, whose next version looks free.
    assert stale.positions() == dict.fromkeys(TABLES, 13)
    with pytest.raises(Fenced):
        stale.merge(pending((1, [gone("hold", "x")])), upto=20, epoch=1)
    stale.maintain(now_ms=0, command_retention_ms=0)
    assert holds(tmp_path) == {"x": 13}
    assert not (log / f"{1:020d}.json").exists()

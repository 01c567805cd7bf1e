"""A shard's Delta log, read commit by commit and in full; also logs that others write, and damaged ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.core.frontier import EMPTY, Frontier
from app.core.placing import Found
from app.shards import commit_log
from app.shards.commit_log import BadLog, full_state, last_checkpoint, read_commit, read_commits
from app.state.store import LocalStore
from tests.shards.helpers import SEALED, BareLog, add, append, remove, txn


@pytest.fixture
def log(tmp_path: Path) -> BareLog:
    return BareLog(tmp_path / "shard")


def test_the_newest_of_each_value_counts(log: BareLog) -> None:
    log.commit(txn("holdfast.upper", 5), txn("holdfast.since", 1), txn("holdfast.epoch", 3), add("a.parquet", 7))
    log.commit(txn("holdfast.upper", 8), add("b.parquet", 5))
    log.commit(remove("a.parquet"))
    found = read_commits(log.store, -1)
    assert found is not None
    assert (found.version, found.upper, found.table_id) == (3, 8, log.id)
    found = read_commits(log.store, 2)
    assert found is not None
    assert (found.upper, found.table_id) == (None, None)
    assert read_commits(log.store, 3) is None


def test_a_sealed_log_has_the_upper_that_nothing_comes_after(log: BareLog) -> None:
    log.upper(SEALED)
    found = read_commits(log.store, 0)
    assert found is not None
    assert found.upper == EMPTY


def test_where_there_is_no_log_there_is_no_news(tmp_path: Path) -> None:
    assert read_commits(LocalStore(tmp_path / "nothing"), -1) is None
    assert full_state(str(tmp_path / "nothing"), {}) is None
    (tmp_path / "empty").mkdir()
    assert full_state(str(tmp_path / "empty"), {}) is None
    assert last_checkpoint(LocalStore(tmp_path / "empty")) is None


def test_foreign_commits_are_passed_over(log: BareLog) -> None:
    log.commit(
        {"commitInfo": {"timestamp": "yesterday", "userMetadata": {"not": "text"}, "operation": 7}},
        {"domainMetadata": {"domain": "x", "configuration": "", "removed": False}},
        {"someFutureAction": [1, 2]},
        {"cdc": {"path": "_change_data/x.parquet", "size": 1}},
        {"txn": {"appId": "someone else's", "version": 99, "lastUpdated": None, "more": {}}},
        {"remove": {"path": "gone.parquet", "deletionVector": {"storageType": "u"}}},
    )
    assert read_commit(log.store, 1) == (1, None, None, [], ["gone.parquet"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"commitInfo":{"timest', "Line 1 of version 2"),
        ('{"commitInfo":{}}\n{"txn":{"appId":"holdfast.upper","ver', "Line 2 of version 2"),
        ("", "is empty"),
        ("\n", "is empty"),
        ('{"txn":{"appId":"holdfast.upper","version":"7"}}', "Line 1 of version 2"),
        ('{"txn":{"appId":"holdfast.upper","version":-1}}', "no frontier"),
        ('{"txn":{"appId":"holdfast.upper","version":9223372036854775808}}', "no frontier"),
        ("[]", "Line 1 of version 2"),
        ("\udcff\udcfe", "Line 1 of version 2"),
    ],
)
def test_a_damaged_commit_is_a_clear_error_after_what_came_before_it(log: BareLog, text: str, words: str) -> None:
    log.upper(5)
    log.version += 1
    log.path(2).write_bytes(text.encode(errors="surrogateescape"))
    found = read_commits(log.store, 0)
    assert found is not None
    assert (found.version, found.upper) == (1, 5)
    with pytest.raises(BadLog, match=words):
        read_commits(log.store, 1)


def test_many_commits_are_read_in_parts(log: BareLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_log, "MOST_COMMITS", 3)
    for upper in range(1, 6):
        log.upper(upper)
    found = read_commits(log.store, 0)
    assert found is not None
    assert (found.version, found.upper) == (3, 3)
    found = read_commits(log.store, 3)
    assert found is not None
    assert (found.version, found.upper) == (5, 5)


def test_the_whole_state_is_what_the_commits_say(tmp_path: Path) -> None:
    location = str(tmp_path / "shard")
    append(location, upper=5, since=2, epoch=4)
    table = append(location, upper=SEALED)
    state = full_state(location, {})
    assert state is not None
    assert state == (1, str(table.metadata().id), EMPTY, Frontier(2), 4)
    assert state.found() == Found(since=Frontier(2), upper=EMPTY, log_version=1, table_id=state.table_id, epoch=4)


def test_the_whole_state_survives_a_checkpoint_and_a_clean_up(tmp_path: Path) -> None:
    location = tmp_path / "shard"
    for upper in range(1, 4):
        append(location, upper=upper)
    append(location).create_checkpoint()
    for version in range(4):
        (location / f"_delta_log/{version:020d}.json").unlink()
    state = full_state(str(location), {})
    assert state is not None
    assert (state.version, state.upper) == (3, 3)
    assert last_checkpoint(LocalStore(location)) == 3


def test_an_ordinary_delta_table_begins_at_nothing(tmp_path: Path) -> None:
    append(tmp_path / "shard")
    state = full_state(str(tmp_path / "shard"), {})
    assert state is not None
    assert (state.version, state.upper, state.since, state.epoch) == (0, 0, 0, 0)


def test_a_damaged_table_is_an_error_of_one_line(tmp_path: Path) -> None:
    append(tmp_path / "shard")
    (tmp_path / "shard/_delta_log" / f"{1:020d}.json").write_text('{"txn":{"appI')
    with pytest.raises(BadLog) as raised:
        full_state(str(tmp_path / "shard"), {})
    assert "\n" not in str(raised.value)


def test_a_damaged_note_of_the_last_checkpoint_counts_as_none(log: BareLog) -> None:
    (log.directory / "_last_checkpoint").write_text('{"vers')
    assert last_checkpoint(log.store) is None

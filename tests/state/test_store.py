"""Both stores do the same; the object store through delta-rs, which reaches a local directory by its URI too."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from app.state.entries import JournalRow
from app.state.journal import Journal
from app.state.store import LocalStore, ObjectStore, Store


@pytest.fixture(params=["local", "object"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return LocalStore(tmp_path) if request.param == "local" else ObjectStore(f"file://{tmp_path}", {})


def test_what_is_written_is_read_listed_and_deleted(store: Store) -> None:
    assert store.read("a") is None
    store.write("a", b"data")
    assert (store.read("a"), store.exists("a"), store.exists("b")) == (b"data", True, False)
    (listed,) = store.files("")
    assert listed.name == "a"
    assert abs(listed.modified_ms - time.time() * 1000) < 60_000
    store.delete("a")
    store.delete("a")
    assert not store.exists("a")
    assert store.files("nowhere") == []


def test_a_journal_goes_through_the_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.state.journal.open_store", lambda uri, options: ObjectStore(f"file://{uri}", options))
    (tmp_path / "journal").mkdir()  # an object store needs no directories
    journal = Journal.open(str(tmp_path / "journal"), storage_options={}, instance="one")
    seqs = [
        journal.append(epoch=1, at=number, origin="test", rows=[JournalRow("thing", "key", b"1")])
        for number in range(3)
    ]
    again = Journal.open(str(tmp_path / "journal"), storage_options={}, instance="two", read_only=True)
    assert [entry.seq for entry in again.read(0)] == seqs

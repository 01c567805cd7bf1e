"""A shard that was given up: its data goes, its sealed log stays as the tombstone, and in the end all of it goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from deltalake import DeltaTable

from app.shards.cleaning import PURGING, Cleaner, Deleted, NotSealed
from app.shards.commit_log import full_state
from app.shards.directory import File, LocalDirectory
from app.shards.errors import WrongTable
from app.shards.lock import NAME as LOCK
from app.shards.object_directory import ObjectDirectory
from app.state.errors import Fenced
from tests.shards.helpers import SEALED, append


class Killed(BaseException):
    """As if the process had ended there."""


class Shard:
    def __init__(self, root: Path) -> None:
        self.warehouse = root / "warehouse"
        self.location = self.warehouse / "shard"
        self.warehouse.mkdir(parents=True)
        append(self.location, upper=1)
        append(self.location, upper=2).create_checkpoint()
        DeltaTable(self.location).delete("_time = 0")
        append(self.location, upper=3)
        (self.location / LOCK).touch()
        (self.location / "orphan.parquet").write_text("x")
        (self.location / "p=1").mkdir()
        (self.location / "p=1/orphan.parquet").write_text("x")
        self.id = str(DeltaTable(self.location).metadata().id)

    def seal(self) -> None:
        append(self.location, upper=SEALED, since=SEALED, epoch=2)

    def cleaner(self, table_id: str | None = None, epoch: int = 2) -> Cleaner:
        return Cleaner(
            location=str(self.location),
            options={},
            roots=[str(self.warehouse)],
            table_id=table_id or self.id,
            epoch=epoch,
        )

    def files(self) -> set[str]:
        found = self.location.rglob("*")
        return {str(path.relative_to(self.location)) for path in found if not path.is_dir() or path.is_symlink()}

    def data(self) -> set[str]:
        return {name for name in self.files() if not name.startswith("_")}


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    return Shard(tmp_path)


def test_what_the_sealed_log_names_goes_and_the_log_stays(shard: Shard) -> None:
    shard.seal()
    named = shard.data() - {"orphan.parquet", "p=1/orphan.parquet"}
    assert len(named) == 4
    deleted = shard.cleaner().delete_everything_named()
    assert deleted.files == 4
    assert deleted.bytes > 0
    assert shard.data() == {"orphan.parquet", "p=1/orphan.parquet"}
    assert shard.cleaner().delete_everything_named() == Deleted(0, 0)
    state = full_state(str(shard.location), {})
    assert state is not None
    assert state.table_id == shard.id


def test_the_seal_is_durable_before_the_first_file_goes(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a loss of power could leave a table that takes appends, without its files."""
    there: list[int] = []
    sync = LocalDirectory.sync
    monkeypatch.setattr(LocalDirectory, "sync", lambda place: (there.append(len(shard.data())), sync(place)))
    shard.seal()
    before = len(shard.data())
    shard.cleaner().delete_everything_named()
    assert there == [before]


def test_a_shard_that_is_not_given_up_is_not_touched(shard: Shard) -> None:
    before = shard.files()
    for transactions in ({}, {"since": SEALED}, {"upper": SEALED, "since": 5}):
        if transactions:
            append(shard.location, rows=0, **transactions)
            before = shard.files()
        with pytest.raises(NotSealed):
            shard.cleaner().delete_everything_named()
        with pytest.raises(NotSealed):
            shard.cleaner().purge()
        assert shard.files() == before


def test_another_table_is_not_touched(shard: Shard) -> None:
    shard.seal()
    before = shard.files()
    for step in (shard.cleaner("another").delete_everything_named, shard.cleaner("another").purge):
        with pytest.raises(WrongTable):
            step()
    assert shard.files() == before


def test_who_was_replaced_deletes_nothing_of_it(shard: Shard) -> None:
    shard.seal()
    before = shard.files()
    replaced = shard.cleaner(epoch=1)
    for step in (replaced.delete_everything_named, replaced.purge):
        with pytest.raises(Fenced, match="epoch 2"):
            step()
    assert shard.files() == before


def test_a_purge_leaves_nothing_and_touches_nothing_else(shard: Shard) -> None:
    shard.seal()
    precious = shard.warehouse / "precious.parquet"
    precious.write_text("precious")
    (shard.location / "link").symlink_to(shard.warehouse)
    (shard.location / "link.parquet").symlink_to(precious)
    assert shard.cleaner().purge().files > 8
    assert not shard.location.exists()
    assert list(shard.warehouse.iterdir()) == [precious]
    assert shard.cleaner().purge() == Deleted(0, 0)


def test_files_with_two_names_go_as_well(shard: Shard) -> None:
    """A put that died in the middle leaves such a pair in the log."""
    first = shard.location / f"_delta_log/{0:020d}.json"
    (shard.location / "_delta_log/_commit_staged.tmp").hardlink_to(first)
    shard.seal()
    shard.cleaner().purge()
    assert not shard.location.exists()


@pytest.mark.parametrize("at", ["the first file", "the first of its log"])
def test_a_purge_that_comes_late_leaves_the_table_that_is_there_now(
    shard: Shard, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Who purges is paused; another one purges, and the place, which was a user's own, gets a new table."""
    shard.seal()
    late, successor = shard.cleaner(), shard.cleaner(epoch=3)
    delete, meanwhile = LocalDirectory.delete, list[str]()

    def paused(place: LocalDirectory, name: str, *, listed: File | None = None) -> int | None:
        if not meanwhile and (at == "the first file" or name.startswith("_delta_log/")):
            meanwhile.append(name)
            assert successor.purge().files > 0
            assert not shard.location.exists()
            append(shard.location, rows=3)
            append(shard.location, rows=4)
        return delete(place, name, listed=listed)

    monkeypatch.setattr(LocalDirectory, "delete", paused)
    late.purge()
    assert meanwhile
    assert DeltaTable(shard.location).to_pyarrow_table().num_rows == 7
    with pytest.raises(WrongTable):
        shard.cleaner().purge()


def test_a_table_that_came_before_a_purge_was_listed_is_left(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    shard.seal()
    late, successor = shard.cleaner(), shard.cleaner(epoch=3)
    walk, meanwhile = LocalDirectory.walk, list[str]()

    def paused(place: LocalDirectory, below: str = "") -> list[File]:
        if not meanwhile and below == "":
            meanwhile.append(below)
            successor.purge()
            append(shard.location, rows=3)
        return walk(place, below)

    monkeypatch.setattr(LocalDirectory, "walk", paused)
    with pytest.raises(WrongTable):
        late.purge()
    assert DeltaTable(shard.location).to_pyarrow_table().num_rows == 3


def files_below(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*")}


def test_a_purge_leaves_another_table_below_the_shard(shard: Shard, caplog: pytest.LogCaptureFixture) -> None:
    shard.seal()
    foreign = shard.location / "eu/de"
    append(foreign, rows=3)
    (foreign / "p=1/empty").mkdir(parents=True)
    (shard.location / "eu/ours.parquet").write_text("x")
    (shard.location / "unwritten/_delta_log").mkdir(parents=True)
    before = files_below(foreign)
    shard.cleaner().purge()
    assert files_below(foreign) == before
    assert DeltaTable(foreign).to_pyarrow_table().num_rows == 3
    assert {name for name in files_below(shard.location) if not name.startswith("eu/de/")} == {
        "eu",
        "eu/de",
        "unwritten",
        "unwritten/_delta_log",
    }
    assert [(r.levelname, "eu/de" in r.getMessage()) for r in caplog.records if r.levelname == "WARNING"] == [
        ("WARNING", True)
    ]
    assert shard.cleaner().purge() == Deleted(0, 0)
    assert files_below(foreign) == before


def test_a_purge_without_a_log_deletes_only_what_is_ours(shard: Shard) -> None:
    for path in (shard.location / "_delta_log").iterdir():
        path.unlink()
    data = shard.data()
    assert shard.cleaner().delete_everything_named() == Deleted(0, 0)
    assert shard.cleaner().purge() == Deleted(1, 0)
    assert shard.files() == data


@contextmanager
def killed_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every change on disk is a step."""
    left = steps

    def counted(name: str) -> None:
        real = getattr(LocalDirectory, name)

        def step(directory: LocalDirectory, *arguments: object, **named: object) -> object:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return real(directory, *arguments, **named)

        patch.setattr(LocalDirectory, name, step)

    with monkeypatch.context() as patch:
        for name in ("delete", "write", "remove_directories"):
            counted(name)
        yield


def test_every_step_can_be_repeated_after_a_crash_at_any_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = crashes = 0
    while True:
        shard = Shard(tmp_path / str(steps))
        shard.seal()
        try:
            with killed_after(steps, monkeypatch):
                shard.cleaner().delete_everything_named()
                shard.cleaner().purge()
            break
        except Killed:
            crashes += 1
        # While anything is left, either its log is whole or it says whose it was: a late append finds no free place.
        if shard.files() and not (shard.location / PURGING).exists():
            assert full_state(str(shard.location), {}) is not None
            shard.cleaner().delete_everything_named()
        shard.cleaner().purge()
        assert not shard.location.exists()
        steps += 1
    assert crashes > 12


def test_a_table_that_appears_during_a_purge_is_not_touched(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    shard.seal()
    with pytest.raises(Killed), killed_after(len(shard.files()), monkeypatch):
        shard.cleaner().purge()
    assert (shard.location / PURGING).exists()
    for path in (shard.location / "_delta_log").iterdir():
        path.unlink()
    (shard.location / "_delta_log").rmdir()
    append(shard.location, upper=1)
    before = shard.files()
    with pytest.raises(WrongTable):
        shard.cleaner().purge()
    assert shard.files() == before


def test_a_prefix_of_an_object_store_is_deleted_alike(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    """delta-rs reaches a local directory in the way it reaches object stores."""
    shard.seal()
    monkeypatch.setattr(
        "app.shards.cleaning.open_directory", lambda location, *_, **__: ObjectDirectory(f"file://{location}", {})
    )
    ours = shard.cleaner()
    assert ours.dead_files(upto_version=9, older_than_ms=0) != []
    assert ours.dead_files(upto_version=9, older_than_ms=3_600_000) == []
    assert ours.orphans(upto_version=99, orphan_grace_ms=86_400_000) == []
    assert ours.delete_everything_named().files == 4
    append(shard.location / "eu", rows=3)
    ours.purge()
    assert {name.split("/")[0] for name in shard.files()} == {"eu"}
    assert DeltaTable(shard.location / "eu").to_pyarrow_table().num_rows == 3

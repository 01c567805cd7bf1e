"""Dead files and orphans go, by name and not too early; nothing that is live, and nothing outside, ever does."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from deltalake import DeltaTable

from app.shards import cleaning, removals
from app.shards.cleaning import Cleaner, Deleted, Waiting
from app.shards.commit_log import BadLog
from app.shards.directory import File, LocalDirectory
from app.shards.errors import WrongTable
from app.shards.places import OutsideWarehouse
from app.state.commit_log import commit_path
from app.state.errors import Fenced
from tests.shards.helpers import SEALED, BareLog, add, append, remove, txn

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
WEEK_MS = 7 * DAY_MS


class Clock:
    """Moves the clock of local stores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_ms = 0
        real = LocalDirectory.now_ms
        monkeypatch.setattr(LocalDirectory, "now_ms", lambda directory: real(directory) + self.ahead_ms)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def warehouse(tmp_path: Path) -> Path:
    return tmp_path / "warehouse"


@pytest.fixture
def log(warehouse: Path) -> BareLog:
    return BareLog(warehouse / "shard")


def cleaner(log: BareLog, **changes: object) -> Cleaner:
    settings = {"location": str(log.location), "roots": [str(log.location.parent)], "table_id": log.id, "epoch": 1}
    return Cleaner(options={}, **settings | changes)  # type: ignore[arg-type]  # as given


def touch(log: BareLog, *names: str, size: int = 10) -> None:
    for name in names:
        path = log.location / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)


def names(log: BareLog) -> list[str]:
    found = [path.relative_to(log.location) for path in log.location.rglob("*") if not path.is_dir()]
    return sorted(str(path) for path in found if path.parts[0] != "_delta_log")


def test_what_a_commit_removed_goes_when_the_version_and_the_grace_allow_it(log: BareLog, clock: Clock) -> None:
    touch(log, "a.parquet", "b.parquet", "c.parquet", size=7)
    log.commit(add("a.parquet"), add("b.parquet"), add("c.parquet"))
    log.commit(remove("a.parquet"))
    log.commit(remove("b.parquet"))
    ours = cleaner(log)
    assert ours.delete_dead_files(upto_version=2, older_than_ms=HOUR_MS) == Deleted(0, 0)
    clock.ahead_ms = HOUR_MS
    assert ours.delete_dead_files(upto_version=1, older_than_ms=HOUR_MS) == Deleted(0, 0)
    assert ours.delete_dead_files(upto_version=2, older_than_ms=HOUR_MS) == Deleted(1, 7)
    assert names(log) == ["b.parquet", "c.parquet"]
    assert ours.delete_dead_files(upto_version=99, older_than_ms=HOUR_MS) == Deleted(1, 7)
    assert ours.delete_dead_files(upto_version=99, older_than_ms=HOUR_MS) == Deleted(0, 0)
    # Another one, who remembers nothing, finds nothing to do either.
    assert cleaner(log).delete_dead_files(upto_version=99, older_than_ms=0) == Deleted(0, 0)
    assert names(log) == ["c.parquet"]


def test_a_file_that_was_added_again_stays(log: BareLog) -> None:
    touch(log, "a.parquet", "b.parquet")
    log.commit(add("a.parquet"), add("b.parquet"))
    log.commit(remove("a.parquet"), add("a.parquet"))  # as when a deletion vector changes
    ours = cleaner(log)
    assert ours.dead_files(upto_version=9, older_than_ms=0) == []
    log.commit(remove("b.parquet"))
    assert ours.dead_files(upto_version=9, older_than_ms=0) == ["b.parquet"]
    log.commit(add("b.parquet"))  # someone restored an old version
    assert ours.delete_dead_files(upto_version=9, older_than_ms=0) == Deleted(0, 0)


def test_a_file_that_is_restored_at_the_last_moment_stays(log: BareLog, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(log, "a.parquet", "b.parquet")
    log.commit(remove("a.parquet"), remove("b.parquet"))
    ours = cleaner(log)
    real = ours.dead_files

    def dead_files(**options: int) -> list[str]:
        found = real(**options)
        log.commit(add("a.parquet"))
        return found

    monkeypatch.setattr(ours, "dead_files", dead_files)
    assert ours.delete_dead_files(upto_version=9, older_than_ms=0).files == 1
    assert names(log) == ["a.parquet"]


def test_a_file_that_is_restored_and_removed_again_at_the_last_moment_stays_for_now(
    log: BareLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(log, "a.parquet", "b.parquet")
    log.commit(remove("a.parquet"), remove("b.parquet"))
    ours = cleaner(log)
    real = ours.dead_files

    def dead_files(**options: int) -> list[str]:
        found = real(**options)
        log.commit(add("a.parquet"))
        log.commit(remove("a.parquet"))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(ours, "dead_files", dead_files)
        assert ours.delete_dead_files(upto_version=1, older_than_ms=0).files == 1
    assert names(log) == ["a.parquet"], "a hold may pin version 2, which has it"
    assert ours.delete_dead_files(upto_version=3, older_than_ms=0).files == 1, "it is not forgotten"


def test_a_file_that_is_removed_again_at_the_last_moment_is_too_young(
    log: BareLog, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(log, "a.parquet")
    log.commit(remove("a.parquet"))
    clock.ahead_ms = HOUR_MS
    ours = cleaner(log)
    real = ours.dead_files

    def dead_files(**options: int) -> list[str]:
        found = real(**options)
        log.commit(add("a.parquet"))
        log.commit(remove("a.parquet"))
        return found

    monkeypatch.setattr(ours, "dead_files", dead_files)
    assert ours.delete_dead_files(upto_version=9, older_than_ms=HOUR_MS) == Deleted(0, 0)
    assert names(log) == ["a.parquet"]


def test_the_checksum_that_spark_writes_beside_a_file_goes_with_it(log: BareLog, warehouse: Path) -> None:
    touch(
        log, "a.parquet", ".a.parquet.crc", "p=1/b.parquet", "p=1/.b.parquet.crc", "live.parquet", ".live.parquet.crc"
    )
    touch(log, "linked.parquet", "odd.parquet")
    precious = warehouse / "precious"
    precious.write_text("precious")
    (log.location / ".linked.parquet.crc").symlink_to(precious)
    (log.location / ".odd.parquet.crc").mkdir()
    log.commit(
        add("live.parquet"), *(remove(n) for n in ("a.parquet", "p=1/b.parquet", "linked.parquet", "odd.parquet"))
    )
    assert cleaner(log).delete_dead_files(upto_version=9, older_than_ms=0) == Deleted(4, 40)
    assert names(log) == [".live.parquet.crc", "live.parquet"]
    assert precious.read_text() == "precious"


@pytest.mark.parametrize(
    "again", ["file:{}/a.parquet", "{}/a.parquet", "./a.parquet", "%61.parquet", "../shard/a.parquet"]
)
def test_a_file_that_was_added_again_under_another_path_stays(log: BareLog, again: str) -> None:
    touch(log, "a.parquet")
    log.commit(add("a.parquet"))
    log.commit(remove("a.parquet"))
    log.commit(add(again.format(log.location)))
    assert cleaner(log).dead_files(upto_version=9, older_than_ms=0) == []


@pytest.mark.parametrize(
    "path",
    [
        "../../precious.parquet",
        "../precious.parquet",
        "..%2Fprecious.parquet",
        "%2e%2e/precious.parquet",
        "p=1/../../precious.parquet",
        "{}/precious.parquet",
        "file://{}/precious.parquet",
        "file:{}/precious.parquet",
        "file:///etc/passwd",
        "/etc/passwd",
        "%2Fetc%2Fpasswd",
        "s3://bucket/x.parquet",
        "_delta_log/00000000000000000001.checkpoint.parquet",
        "_DELTA_LOG/x.parquet",
        "_delta_log%2F00000000000000000001.checkpoint.parquet",
        "./_delta_log/x.parquet",
        "link/precious.parquet",
        "..\\precious.parquet",
        "a.parquet\u0000",
        "a%00.parquet",
        "%ff%fe.parquet",
        "",
        ".",
        "..",
        "deletion_vector_1.bin",
        "kept.txt",
        "directory.parquet",
    ],
)
def test_a_hostile_path_deletes_nothing(log: BareLog, warehouse: Path, path: str) -> None:
    outside = [warehouse / "precious.parquet", warehouse.parent / "precious.parquet"]
    for each in outside:
        each.write_text("precious")
    (log.location / "link").symlink_to(warehouse)
    (log.location / "directory.parquet").mkdir()
    touch(log, "kept.txt", "deletion_vector_1.bin", "_delta_log/00000000000000000001.checkpoint.parquet.kept")
    log.commit(remove(path.format(warehouse)))
    before = sorted(warehouse.parent.rglob("*"))
    assert cleaner(log).delete_dead_files(upto_version=9, older_than_ms=0) == Deleted(0, 0)
    assert sorted(warehouse.parent.rglob("*")) == before
    # Nor when the whole shard is given up.
    before.append(log.path(log.commit(txn("holdfast.upper", SEALED), txn("holdfast.since", SEALED))))
    assert cleaner(log).delete_everything_named() == Deleted(0, 0)
    assert sorted(warehouse.parent.rglob("*")) == sorted(before)
    assert Path("/etc/passwd").exists()


def test_only_a_link_itself_is_deleted_never_what_it_leads_to(log: BareLog, warehouse: Path) -> None:
    precious = warehouse / "precious.parquet"
    precious.write_text("precious")
    (log.location / "link.parquet").symlink_to(precious)
    log.commit(remove("link.parquet"))
    assert cleaner(log).delete_dead_files(upto_version=9, older_than_ms=0) == Deleted(1, 0)
    assert precious.exists()


def test_percent_encoded_names_mean_the_decoded_file(log: BareLog) -> None:
    touch(log, "p=a b/x.parquet", "p=a%20b/x.parquet")
    log.commit(add("p=a%20b/x.parquet"), add("p=a%2520b/x.parquet"))
    log.commit(remove("p=a%20b/x.parquet"))
    log.commit(remove("p=a%2520b/y.parquet"))
    # The removed path, taken as it is, is the name of the file that is still live: when in doubt, keep both.
    cleaner(log).delete_dead_files(upto_version=9, older_than_ms=0)
    assert (log.location / "p=a%20b/x.parquet").exists()
    log.commit(remove("p=a%2520b/x.parquet"))
    cleaner(log).delete_dead_files(upto_version=9, older_than_ms=0)
    assert names(log) == []


def test_a_cleaner_that_missed_commits_forgets_what_it_knew(log: BareLog) -> None:
    touch(log, "a.parquet", "b.parquet")
    log.commit(add("a.parquet"))
    log.commit(remove("a.parquet"))
    ours = cleaner(log)
    assert ours.dead_files(upto_version=2, older_than_ms=0) == ["a.parquet"]
    log.commit(add("a.parquet"))
    log.commit(add("b.parquet"))
    DeltaTable(log.location).create_checkpoint()
    for version in range(4):
        log.path(version).unlink()
    assert ours.delete_dead_files(upto_version=9, older_than_ms=0) == Deleted(0, 0)
    assert names(log) == ["a.parquet", "b.parquet"]


def test_a_long_log_is_read_from_a_checkpoint_on(log: BareLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removals, "SETTLED_MS", 0)
    touch(log, "before.parquet", "after.parquet", "live.parquet", "pinned.parquet", "again.parquet")
    files = [f"{name}.parquet" for name in ("before", "after", "live", "pinned", "again")]
    log.commit(*map(add, files))
    now_ms = int(time.time() * 1_000)
    log.commit(
        *(remove(name) | {"remove": remove(name)["remove"] | {"deletionTimestamp": now_ms}} for name in files[::4])
    )
    for _ in range(100):
        log.commit()
    DeltaTable(log.location).create_checkpoint()
    checkpoint = log.version
    log.commit(remove("after.parquet"), add("again.parquet"))
    pinned = log.commit(remove("pinned.parquet"))
    read: list[str] = []
    real = LocalDirectory.read
    monkeypatch.setattr(LocalDirectory, "read", lambda place, name: (read.append(name), real(place, name))[1])
    ours = cleaner(log)
    assert ours.dead_files(upto_version=checkpoint - 1, older_than_ms=0) == []
    assert len(read) <= 5, "the checkpoint, and what comes after it"
    assert sorted(ours.dead_files(upto_version=pinned - 1, older_than_ms=0)) == ["after.parquet", "before.parquet"]
    assert ours.delete_dead_files(upto_version=pinned, older_than_ms=0).files == 3
    assert names(log) == ["again.parquet", "live.parquet"]
    monkeypatch.setattr(removals, "SETTLED_MS", DAY_MS)
    read.clear()
    assert cleaner(log).dead_files(upto_version=pinned, older_than_ms=0) != []
    assert len(read) > 100, "a checkpoint of today is not taken"


class Days:
    """Days that pass: what was written on an earlier one is as old as that, by the store's clock."""

    def __init__(self, log: BareLog, monkeypatch: pytest.MonkeyPatch) -> None:
        self.today = 0
        self._log = log
        self._written: dict[str, int] = {}
        file, walk = LocalDirectory.file, LocalDirectory.walk

        def walked(place: LocalDirectory, below: str = "") -> list[File | None]:
            return [self._dated(each) for each in walk(place, below)]

        monkeypatch.setattr(LocalDirectory, "file", lambda place, name: self._dated(file(place, name)))
        monkeypatch.setattr(LocalDirectory, "walk", walked)
        monkeypatch.setattr(LocalDirectory, "now_ms", lambda _: self.today * DAY_MS)

    def _dated(self, file: File | None) -> File | None:
        if file is None:
            return None
        return file._replace(modified_ms=self._written.setdefault(file.name, self.today) * DAY_MS)

    def end(self) -> None:
        for _ in range(3):
            self._log.commit()
        DeltaTable(self._log.location).create_checkpoint()
        LocalDirectory(str(self._log.location)).walk()  # which notes the day
        self.today += 1


@pytest.mark.parametrize("grace_days", [0, 3, 10])
def test_whoever_begins_anew_each_day_deletes_what_is_dead_in_time(
    log: BareLog, monkeypatch: pytest.MonkeyPatch, grace_days: int
) -> None:
    """From checkpoints, of which each is as if all of it were removed with it."""
    days = Days(log, monkeypatch)
    now_ms = int(time.time() * 1_000)
    touch(log, "a.parquet")
    log.commit(add("a.parquet"))
    days.end()
    log.commit({"remove": remove("a.parquet")["remove"] | {"deletionTimestamp": now_ms}})
    removed_on = days.today
    while not (deleted := cleaner(log).delete_dead_files(upto_version=99, older_than_ms=grace_days * DAY_MS).files):
        assert names(log) == ["a.parquet"]
        days.end()
        assert days.today <= removed_on + grace_days + 1
    assert deleted == 1
    assert days.today >= removed_on + grace_days


def test_what_the_newest_checkpoint_no_longer_says_an_older_one_does(
    log: BareLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = Days(log, monkeypatch)
    touch(log, "a.parquet")
    log.commit(add("a.parquet"))
    days.end()
    log.commit(remove("a.parquet"))
    for _ in range(7):
        days.end()
    week_later = log.version
    for _ in range(2):
        days.end()

    def said(name: str, _: bytes, kinds: Sequence[str]) -> Iterator[str]:
        version = int(name.removeprefix("_delta_log/").partition(".")[0])
        return iter(["a.parquet"] if version <= week_later and list(kinds) == ["remove"] else [])

    monkeypatch.setattr(removals, "paths_of_checkpoint", said)
    assert cleaner(log).dead_files(upto_version=99, older_than_ms=0) == ["a.parquet"]


def test_a_checkpoint_that_cannot_be_read_is_passed_over(log: BareLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removals, "SETTLED_MS", 0)
    touch(log, "a.parquet", "b.parquet")
    log.commit(add("a.parquet"), add("b.parquet"))
    log.commit(remove("a.parquet"))
    log.commit()
    DeltaTable(log.location).create_checkpoint()
    (log.directory / f"{1:020d}.checkpoint.parquet").write_text("damaged")
    assert cleaner(log).delete_dead_files(upto_version=9, older_than_ms=0).files == 1
    assert names(log) == ["b.parquet"]


@pytest.fixture
def rolled_back(log: BareLog, tmp_path: Path) -> Cleaner:
    """A cleaner that knows of a removal which an older copy of the table, put back since, does not have."""
    touch(log, "a.parquet", "b.parquet", "c.parquet", "d.parquet")
    log.commit(add("a.parquet"), add("b.parquet"))
    shutil.copytree(log.directory, tmp_path / "copy")
    log.commit(remove("a.parquet"))
    log.commit(remove("b.parquet"))
    ours = cleaner(log)
    assert sorted(ours.dead_files(upto_version=9, older_than_ms=0)) == ["a.parquet", "b.parquet"]
    shutil.rmtree(log.directory)
    (tmp_path / "copy").rename(log.directory)
    log.version = 1
    return ours


def test_a_table_that_went_back_and_on_past_what_we_knew_loses_nothing(log: BareLog, rolled_back: Cleaner) -> None:
    pinned = log.commit(add("c.parquet"))
    log.commit(remove("a.parquet"))
    log.commit(add("d.parquet"))
    assert rolled_back.delete_dead_files(upto_version=pinned, older_than_ms=0) == Deleted(0, 0)
    assert rolled_back.delete_dead_files(upto_version=9, older_than_ms=0).files == 1
    assert names(log) == ["b.parquet", "c.parquet", "d.parquet"]


def test_what_the_newest_version_has_stays_whatever_we_have_read(
    log: BareLog, rolled_back: Cleaner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as on a store whose files have no times, so that one commit looks like another."""

    def file(directory: LocalDirectory, name: str) -> File | None:
        return File(name, 0, 0) if directory.exists(name) else None

    monkeypatch.setattr(LocalDirectory, "file", file)
    rolled_back._removals._last = File(commit_path(3), 0, 0)
    for name in ("c.parquet", "d.parquet"):
        log.commit(add(name))
    log.commit(remove("b.parquet"))
    assert rolled_back.delete_dead_files(upto_version=9, older_than_ms=0).files == 1
    assert names(log) == ["a.parquet", "c.parquet", "d.parquet"]
    assert rolled_back.waiting(upto_version=9, older_than_ms=0) == Waiting(None, None), "it is no reason to come again"


def test_what_has_replaced_a_file_is_durable_before_the_file_goes(
    log: BareLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    def noted(name: str) -> None:
        real = getattr(LocalDirectory, name)

        def step(directory: LocalDirectory, *arguments: str, **named: object) -> object:
            steps.append(name)
            return real(directory, *arguments, **named)

        monkeypatch.setattr(LocalDirectory, name, step)

    noted("sync")
    noted("delete")
    many = [f"{number}.parquet" for number in range(150)]
    touch(log, *many)
    log.commit(*map(add, many))
    ours = cleaner(log)
    ours.delete_dead_files(upto_version=9, older_than_ms=0)
    assert steps == [], "nothing is dead"
    log.commit(*map(remove, many))
    assert ours.delete_dead_files(upto_version=9, older_than_ms=0).files == 150
    assert steps == ["sync"] + 150 * ["delete"]


def test_what_is_left_says_for_how_long_it_waits_and_for_which_version(log: BareLog, clock: Clock) -> None:
    touch(log, *(f"{name}.parquet" for name in "abcd"))
    log.commit(*(add(f"{name}.parquet") for name in "abcd"))
    limits = {"upto_version": 3, "older_than_ms": HOUR_MS}
    ours = cleaner(log)

    def left() -> Waiting:
        ours.delete_dead_files(**limits)
        return ours.waiting(**limits)

    assert left() == Waiting(None, None)
    for name in "abc":
        log.commit(remove(f"{name}.parquet"))
    clock.ahead_ms = HOUR_MS - 60_000
    waiting = left()
    assert waiting.pinned == 4
    assert waiting.due_in_ms is not None
    assert 50_000 < waiting.due_in_ms <= 60_000
    clock.ahead_ms += waiting.due_in_ms + 10_000
    assert left() == Waiting(None, 4)
    assert names(log) == ["c.parquet", "d.parquet"]
    limits["upto_version"] = 9
    assert left() == Waiting(None, None)


def test_a_new_commit_costs_one_look_however_long_the_log_is(log: BareLog, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = cleaner(log)
    ours.dead_files(upto_version=99, older_than_ms=0)
    looks: list[str] = []
    file = LocalDirectory.file
    monkeypatch.setattr(LocalDirectory, "walk", lambda *_: pytest.fail("the log was listed"))
    monkeypatch.setattr(LocalDirectory, "file", lambda directory, name: (looks.append(name), file(directory, name))[1])
    for number in range(20):
        log.commit(add(f"{number}.parquet"))
        log.commit(remove(f"{number}.parquet"))
        assert len(ours.dead_files(upto_version=99, older_than_ms=0)) == number + 1
    assert len(looks) == 20 * 5, "the last known, two new ones, the next, and the last again"
    looks.clear()
    ours.dead_files(upto_version=99, older_than_ms=0)
    assert len(looks) == 2


def test_another_table_at_the_same_place_is_not_touched(log: BareLog, clock: Clock) -> None:
    touch(log, "a.parquet", "orphan.parquet")
    log.commit(remove("a.parquet"))
    clock.ahead_ms = 2 * WEEK_MS
    stranger = cleaner(log, table_id="another")
    for step in (
        lambda: stranger.delete_dead_files(upto_version=9, older_than_ms=0),
        lambda: stranger.delete_orphans(upto_version=99, orphan_grace_ms=WEEK_MS),
    ):
        with pytest.raises(WrongTable):
            step()
    ours = cleaner(log)
    assert ours.dead_files(upto_version=0, older_than_ms=0) == []
    # It is replaced while we know it.
    for path in log.directory.iterdir():
        path.unlink()
    log.directory.rmdir()
    other = BareLog(log.location)
    other.commit(remove("a.parquet"))
    other.commit(remove("a.parquet"))
    with pytest.raises(WrongTable):
        ours.delete_dead_files(upto_version=9, older_than_ms=0)
    assert names(log) == ["a.parquet", "orphan.parquet"]


def test_who_was_replaced_deletes_nothing(log: BareLog, clock: Clock) -> None:
    touch(log, "a.parquet", "orphan.parquet")
    log.commit(remove("a.parquet"))
    log.commit(txn("holdfast.epoch", 2))
    clock.ahead_ms = 2 * WEEK_MS
    ours = cleaner(log)
    with pytest.raises(Fenced, match="epoch 2"):
        ours.delete_dead_files(upto_version=9, older_than_ms=0)
    with pytest.raises(Fenced, match="epoch 2"):
        ours.delete_orphans(upto_version=99, orphan_grace_ms=WEEK_MS)
    assert names(log) == ["a.parquet", "orphan.parquet"]
    theirs = cleaner(log, epoch=2)
    assert theirs.delete_dead_files(upto_version=9, older_than_ms=0).files == 1
    assert theirs.delete_orphans(upto_version=99, orphan_grace_ms=WEEK_MS).files == 1


def test_where_there_is_no_table_there_is_nothing_to_do(warehouse: Path) -> None:
    warehouse.mkdir()
    ours = Cleaner(location=str(warehouse / "none"), options={}, roots=[str(warehouse)], table_id="x", epoch=1)
    assert ours.delete_dead_files(upto_version=9, older_than_ms=0) == Deleted(0, 0)
    assert ours.delete_orphans(upto_version=99, orphan_grace_ms=WEEK_MS) == Deleted(0, 0)


@pytest.mark.parametrize("location", ["elsewhere", "warehouse", "warehouse/link", "warehouse/../elsewhere", "."])
def test_a_place_that_is_not_below_the_warehouse_is_refused(tmp_path: Path, warehouse: Path, location: str) -> None:
    warehouse.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (warehouse / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutsideWarehouse):
        Cleaner(location=f"{tmp_path}/{location}", options={}, roots=[str(warehouse)], table_id="x", epoch=1)


def test_a_warehouse_that_is_reached_through_a_link_is_as_good(log: BareLog, tmp_path: Path) -> None:
    (tmp_path / "way").symlink_to(log.location.parent)
    touch(log, "a.parquet")
    log.commit(remove("a.parquet"))
    ours = cleaner(log, location=str(tmp_path / "way/shard"), roots=[str(tmp_path / "way")])
    assert ours.delete_dead_files(upto_version=9, older_than_ms=0) == Deleted(1, 10)


def test_a_directory_that_becomes_a_link_while_we_work_is_not_followed(log: BareLog, tmp_path: Path) -> None:
    touch(log, "p=1/a.parquet")
    log.commit(remove("p=1/a.parquet"))
    ours = cleaner(log)
    assert ours.dead_files(upto_version=9, older_than_ms=0) == ["p=1/a.parquet"]
    (log.location / "p=1").rename(tmp_path / "moved")
    (log.location / "p=1").symlink_to(tmp_path / "moved")
    assert ours.delete_dead_files(upto_version=9, older_than_ms=0) == Deleted(0, 0)
    assert (tmp_path / "moved/a.parquet").exists()


def test_orphans_go_after_their_grace(log: BareLog, clock: Clock) -> None:
    touch(
        log,
        "live.parquet",
        "removed.parquet",
        "orphan.parquet",
        "p=1/orphan.parquet",
        "_change_data/x.parquet",
        "x.txt",
    )
    log.commit(add("live.parquet"), add("removed.parquet"))
    log.commit(remove("removed.parquet"))
    ours = cleaner(log)
    assert ours.delete_orphans(upto_version=99, orphan_grace_ms=WEEK_MS) == Deleted(0, 0)
    clock.ahead_ms = WEEK_MS + 1
    assert sorted(ours.orphans(upto_version=99, orphan_grace_ms=WEEK_MS)) == ["orphan.parquet", "p=1/orphan.parquet"]
    assert ours.delete_orphans(upto_version=99, orphan_grace_ms=WEEK_MS) == Deleted(2, 20)
    assert names(log) == ["_change_data/x.parquet", "live.parquet", "removed.parquet", "x.txt"]


def test_where_all_old_files_are_live_the_log_is_not_read_for_orphans(
    log: BareLog, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(log, "live.parquet")
    log.commit(add("live.parquet"))
    clock.ahead_ms = 2 * WEEK_MS
    ours = cleaner(log)
    monkeypatch.setattr(cleaning, "named_paths", lambda _: pytest.fail("the whole log was read"))
    assert ours.orphans(upto_version=99, orphan_grace_ms=WEEK_MS) == []


def test_another_table_below_the_shard_has_no_orphans_of_ours(log: BareLog, clock: Clock) -> None:
    append(log.location / "eu/de", rows=3)
    touch(log, "orphan.parquet", "eu/orphan.parquet", "eu/de/p=1/x.parquet", "linked/x.parquet", "new/x.parquet")
    (log.location / "linked/_delta_log").symlink_to(log.directory)
    (log.location / "new/_delta_log").mkdir()
    clock.ahead_ms = 2 * WEEK_MS
    ours = cleaner(log)
    assert sorted(ours.orphans(upto_version=99, orphan_grace_ms=WEEK_MS)) == ["eu/orphan.parquet", "orphan.parquet"]
    assert ours.delete_orphans(upto_version=99, orphan_grace_ms=WEEK_MS).files == 2
    assert DeltaTable(log.location / "eu/de").to_pyarrow_table().num_rows == 3
    assert {"eu/de/p=1/x.parquet", "linked/x.parquet", "new/x.parquet"} <= set(names(log))


def test_a_table_that_is_made_of_orphans_at_the_last_moment_stays(
    log: BareLog, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(log, "eu/x.parquet")
    clock.ahead_ms = 2 * WEEK_MS
    ours = cleaner(log)
    real = ours.orphans

    def orphans(**options: int) -> list[str]:
        found = real(**options)
        BareLog(log.location / "eu").commit(add("x.parquet"))
        return found

    monkeypatch.setattr(ours, "orphans", orphans)
    assert ours.delete_orphans(upto_version=99, orphan_grace_ms=WEEK_MS) == Deleted(0, 0)
    assert "eu/x.parquet" in names(log)


def test_a_file_is_as_young_as_its_place_whatever_time_it_carries(log: BareLog) -> None:
    touch(log, "copied.parquet")
    os.utime(log.location / "copied.parquet", (0, 0))
    assert cleaner(log).orphans(upto_version=99, orphan_grace_ms=WEEK_MS) == []


def test_a_grace_that_endangers_writers_is_refused(log: BareLog) -> None:
    with pytest.raises(ValueError, match="too short"):
        cleaner(log).orphans(upto_version=99, orphan_grace_ms=DAY_MS - 1)


def test_what_only_a_checkpoint_names_is_no_orphan_and_what_nothing_names_any_more_is(
    warehouse: Path, clock: Clock
) -> None:
    location = warehouse / "shard"
    append(location)
    append(location)
    table = DeltaTable(location)
    live = {Path(uri).name for uri in table.file_uris()}
    (location / "orphan.parquet").write_text("x")
    table.create_checkpoint()
    (location / f"_delta_log/{0:020d}.json").unlink()
    clock.ahead_ms = 2 * WEEK_MS
    ours = Cleaner(
        location=str(location), options={}, roots=[str(warehouse)], table_id=str(table.metadata().id), epoch=1
    )
    assert ours.delete_orphans(upto_version=99, orphan_grace_ms=WEEK_MS).files == 1
    assert {path.name for path in location.glob("*.parquet")} == live
    assert DeltaTable(location).to_pyarrow_table().num_rows == 2


def test_an_orphan_that_is_committed_at_the_last_moment_stays(
    log: BareLog, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(log, "late.parquet", "orphan.parquet")
    clock.ahead_ms = 2 * WEEK_MS
    ours = cleaner(log)
    real = ours.orphans

    def orphans(**options: int) -> list[str]:
        found = real(**options)
        log.commit(add("late.parquet"))
        return found

    monkeypatch.setattr(ours, "orphans", orphans)
    assert ours.delete_orphans(upto_version=99, orphan_grace_ms=WEEK_MS).files == 1
    assert names(log) == ["late.parquet"]


def test_orphans_worked_out_long_ago_are_not_deleted(
    log: BareLog, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(log, "late.parquet")
    clock.ahead_ms = 2 * WEEK_MS
    ours = cleaner(log)
    real = ours.orphans

    def orphans(**options: int) -> list[str]:
        """Between working out and deleting we are paused, until the commits of that time are cleaned up."""
        found = real(**options)
        log.commit(add("late.parquet"))
        log.commit()
        DeltaTable(log.location).create_checkpoint()
        log.path(0).unlink()
        log.path(1).unlink()
        return found

    monkeypatch.setattr(ours, "orphans", orphans)
    with pytest.raises(BadLog, match="anew"):
        ours.delete_orphans(upto_version=99, orphan_grace_ms=WEEK_MS)
    assert names(log) == ["late.parquet"]


def test_what_a_pinned_version_had_is_no_orphan_once_the_log_has_forgotten_it(log: BareLog, clock: Clock) -> None:
    touch(log, "pinned.parquet", "orphan.parquet")
    pinned = log.commit(add("pinned.parquet"))
    log.commit(remove("pinned.parquet"))
    log.commit()
    DeltaTable(log.location).create_checkpoint()
    for version in range(3):
        log.path(version).unlink()
    clock.ahead_ms = 2 * WEEK_MS
    ours = cleaner(log)
    assert ours.orphans(upto_version=pinned, orphan_grace_ms=WEEK_MS) == []
    assert "orphan.parquet" in ours.orphans(upto_version=pinned + 1, orphan_grace_ms=WEEK_MS), "released"


@pytest.mark.parametrize("damage", ["truncated", "hole", "no checkpoint", "linked"])
def test_without_a_whole_log_nothing_counts_as_an_orphan(log: BareLog, clock: Clock, damage: str) -> None:
    touch(log, "a.parquet", "b.parquet", "orphan.parquet")
    log.commit(add("a.parquet"))
    log.commit(add("b.parquet"))
    clock.ahead_ms = 2 * WEEK_MS
    ours = cleaner(log)
    assert ours.orphans(upto_version=99, orphan_grace_ms=WEEK_MS) == ["orphan.parquet"]
    if damage == "truncated":
        log.path(2).write_text('{"add":{"path":"b.par')
    elif damage == "hole":
        log.path(1).unlink()
    elif damage == "no checkpoint":
        log.path(0).unlink()
    else:
        log.directory.rename(log.location.parent / "moved")
        log.directory.symlink_to(log.location.parent / "moved")
    with pytest.raises(BadLog):
        ours.delete_orphans(upto_version=99, orphan_grace_ms=WEEK_MS)
    assert {"a.parquet", "b.parquet", "orphan.parquet"} <= set(names(log))

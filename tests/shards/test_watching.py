"""What is looked at and when, and what is passed on: positions come from the state, and nothing is lost or doubled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from app.core.frontier import EMPTY, ZERO, Frontier
from app.shards import looking
from app.shards.looking import Looker, Seen, Target
from app.shards.positions import REOPEN_EVERY_S, Positions
from app.shards.watching import Pacing, Watcher
from app.state.store import ObjectStore
from tests.shards.helpers import SEALED, BareLog, FakeState, append

MINUTE_S = 60.0


class Looks(Looker):
    """Notes what was looked at."""

    def __init__(self) -> None:
        super().__init__({})
        self.looked_at: list[str] = []

    def with_news(self, targets: Any) -> Any:
        targets = list(targets)
        self.looked_at += [target.shard for target in targets]
        return super().with_news(targets)


class World:
    """A state, bare logs, a watcher, and a clock that moves only when told to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = FakeState(root)
        self.now_s = 1_000.0
        self.looks = Looks()

    def watcher(self, **pacing: int) -> Watcher:
        positions = Positions(self.state.uri, {}, clock=lambda: self.now_s)
        return Watcher(positions, self.looks, Pacing(**pacing), clock=lambda: self.now_s)

    def shard(self, id: str, **fields: Any) -> BareLog:
        log = BareLog(self.root / "warehouse" / id)
        self.state.add(id, log.location, **{"table_id": log.id, **fields})
        return log

    def confirm(self, found: list[Seen]) -> None:
        for seen in found:
            self.state.confirm(seen.shard, seen.upper, seen.log_version)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_news_are_passed_on_once(world: World) -> None:
    log = world.shard("a")
    log.upper(5)
    watcher = world.watcher()
    assert watcher.tick() == [Seen("a", Frontier(5), 1)]
    assert watcher.tick() == []
    log.commit()
    assert watcher.tick() == [Seen("a", Frontier(5), 2)]  # the upper that nobody may have heard of goes along
    world.confirm([Seen("a", Frontier(5), 2)])
    assert watcher.tick() == []


def test_what_does_not_arrive_in_the_state_is_passed_on_again(world: World) -> None:
    log = world.shard("a")
    log.upper(5)
    watcher = world.watcher(confirm_within_ms=10_000)
    found = watcher.tick()
    world.now_s += 9.9
    assert watcher.tick() == []
    world.now_s += 0.1
    assert watcher.tick() == found
    world.confirm(found)
    world.now_s += MINUTE_S
    assert watcher.tick() == []


def test_a_state_that_follows_slowly_is_not_told_again(world: World) -> None:
    log = world.shard("a")
    watcher = world.watcher(confirm_within_ms=3_000)
    for upper in range(1, 20):
        version = log.upper(upper)
        assert [seen.log_version for seen in watcher.tick()] == [version]
        world.state.confirm("a", Frontier(upper - 1), version - 1)
        world.now_s += 1


def test_a_restarted_watcher_begins_where_the_state_is(world: World) -> None:
    log = world.shard("a", upper=Frontier(5), log_version=1)
    log.upper(5)
    log.upper(6)
    assert world.watcher().tick() == world.watcher().tick() == [Seen("a", Frontier(6), 2)]


def test_new_shards_are_looked_for_before_they_are_there(world: World) -> None:
    watcher = world.watcher()
    assert watcher.tick() == []
    world.state.add("a", world.root / "warehouse/a")
    assert watcher.tick() == []
    append(world.root / "warehouse/a", upper=3)
    assert [(seen.shard, seen.upper, seen.error) for seen in watcher.tick()] == [("a", 3, None)]


def test_a_jump_to_nothing_ends_the_watching(world: World) -> None:
    log = world.shard("a")
    watcher = world.watcher()
    log.upper(SEALED)
    found = watcher.tick()
    assert [seen.upper for seen in found] == [EMPTY]
    world.confirm(found)
    log.commit()
    world.looks.looked_at.clear()
    assert watcher.tick() == []
    assert world.looks.looked_at == []


@pytest.mark.parametrize(
    "fields",
    [{"state": "finalizing"}, {"state": "finalized"}, {"upper": EMPTY}, {"format": "delta"}],
)
def test_who_is_not_watched(world: World, fields: dict[str, Any]) -> None:
    world.shard("a", **fields).upper(5)
    world.shard("b", state="dropped").upper(5)
    watcher = world.watcher()
    assert [seen.shard for seen in watcher.tick()] == ["b"]
    world.state.change("b", **fields)
    watcher.tick()
    assert len(watcher) == 0


def test_the_state_is_read_again_only_when_it_changed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str | None] = []
    real = Positions._read

    def noted(positions: Positions, handle: DeltaTable, where: str | None, *, whole: bool) -> Any:
        reads.append(where)
        return real(positions, handle, where, whole=whole)

    monkeypatch.setattr(Positions, "_read", noted)
    for id in "abc":
        world.shard(id)
    watcher = world.watcher()
    watcher.tick()
    watcher.tick()
    assert reads == [None]
    world.state.put()  # an entry that changed no shard
    watcher.tick()
    assert reads == [None]
    world.state.change("b", upper=Frontier(1))
    watcher.tick()
    assert len(reads) == 2
    world.now_s += REOPEN_EVERY_S
    watcher.tick()
    assert reads[2:] == [None]
    assert len(watcher) == 3


def test_a_gap_is_read_in_full_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    location = world.root / "warehouse/a"
    for upper in range(1, 6):
        append(location, upper=upper)
    world.state.add("a", location, upper=Frontier(1), log_version=0)
    DeltaTable(location).create_checkpoint()
    for version in range(4):
        (location / f"_delta_log/{version:020d}.json").unlink()
    in_full: list[str] = []
    real = looking.full_state
    monkeypatch.setattr(looking, "full_state", lambda place, options: (in_full.append(place), real(place, options))[1])
    watcher = world.watcher()
    found = watcher.tick()
    assert found == [Seen("a", Frontier(5), 4)]
    world.confirm(found)
    for _ in range(5):
        world.now_s += 5 * MINUTE_S
        assert watcher.tick() == []
    assert in_full == [str(location)]
    append(location, upper=9)
    assert [seen.upper for seen in watcher.tick()] == [9]


def test_a_gap_that_comes_later_is_noticed_within_minutes(world: World) -> None:
    location = world.root / "warehouse/a"
    append(location, upper=1)
    world.state.add("a", location, upper=Frontier(1), log_version=0)
    watcher = world.watcher(check_every_ms=60_000)
    assert watcher.tick() == []
    append(location, upper=2)
    append(location, upper=3).create_checkpoint()
    (location / "_delta_log/_last_checkpoint").unlink()  # it is only a hint
    for version in range(2):
        (location / f"_delta_log/{version:020d}.json").unlink()
    assert watcher.tick() == []
    world.now_s += MINUTE_S
    assert watcher.tick() == [Seen("a", Frontier(3), 2)]


def test_a_log_that_is_gone_is_reported_once(world: World) -> None:
    log = world.shard("a", log_version=0)
    watcher = world.watcher(check_every_ms=60_000)
    assert watcher.tick() == []
    log.path(0).unlink()
    reported = []
    for _ in range(5):
        world.now_s += MINUTE_S
        reported += watcher.tick()
    assert [(seen.shard, seen.upper, seen.log_version) for seen in reported] == [("a", ZERO, 0)]
    assert "is gone" in str(reported[0].error)


def test_a_log_that_comes_back_as_it_was_is_said_to_be_well(world: World) -> None:
    log = world.shard("a", log_version=0)
    watcher = world.watcher(check_every_ms=60_000)
    watcher.tick()
    moved = log.path(0).rename(log.path(0).with_suffix(".away"))
    world.now_s += MINUTE_S
    assert [seen.error is None for seen in watcher.tick()] == [False]
    moved.rename(log.path(0))
    world.now_s += 5
    assert watcher.tick() == [Seen("a", ZERO, 0)]
    for _ in range(5):
        world.now_s += MINUTE_S
        assert watcher.tick() == []


@pytest.mark.parametrize(
    "text",
    [
        '{"commitInfo":{"timestamp":9223372036854775808,"inCommitTimestamp":1e400}}',
        '{"commitInfo":{"tags":' + "[" * 100_000 + "]" * 100_000 + "}}",
        '{"txn":{"appId":"holdfast.upper","version":9223372036854775808}}',
        '{"metaData":{"id":"\\ud800"}}',
    ],
)
def test_whatever_is_in_one_log_the_others_are_read(world: World, text: str) -> None:
    bad, good = world.shard("bad", log_version=0), world.shard("good", log_version=0)
    watcher = world.watcher()
    bad.commit_text(text)
    good.upper(3)
    found = {seen.shard: seen for seen in watcher.tick()}
    assert found["good"] == Seen("good", Frontier(3), 1)
    assert found["bad"].log_version in (0, 1)
    good.upper(4)
    assert watcher.tick() == [Seen("good", Frontier(4), 2)]


def test_a_damaged_commit_is_reported_once_and_read_when_it_is_whole(world: World) -> None:
    log, other = world.shard("a", log_version=0), world.shard("b", log_version=0)
    watcher = world.watcher()
    log.commit_text('{"txn":{"appId":"holdfast.up')
    found = watcher.tick()
    assert [seen.shard for seen in found if seen.error] == ["a"]
    other.upper(3)
    world.now_s += 1
    assert [(seen.shard, seen.upper) for seen in watcher.tick()] == [("b", 3)]
    log.version = 0
    log.upper(7)
    world.now_s += 5
    assert [(seen.shard, seen.upper, seen.error) for seen in watcher.tick()] == [("a", 7, None)]


def test_another_table_at_the_same_place_is_an_error(world: World) -> None:
    log = world.shard("a", table_id="another")
    log.upper(5)
    (seen,) = world.watcher().tick()
    assert "another Delta table" in str(seen.error)
    assert seen.upper == ZERO


def test_all_are_looked_at_on_every_tick_while_that_is_cheap(world: World) -> None:
    for id in "abc":
        world.shard(id, log_version=0)
    watcher = world.watcher()
    for _ in range(4):
        world.now_s += 3 * MINUTE_S
        world.looks.looked_at.clear()
        watcher.tick()
        assert sorted(world.looks.looked_at) == ["a", "b", "c"]


def test_quiet_shards_are_looked_at_less_often_but_boundedly_when_it_is_not(world: World) -> None:
    log = world.shard("a", log_version=0)
    watcher = world.watcher(budget_ms=0)

    def looks_in(seconds: int) -> int:
        world.looks.looked_at.clear()
        for _ in range(seconds):
            world.now_s += 1
            watcher.tick()
        return len(world.looks.looked_at)

    watcher.tick()
    assert looks_in(59) == 59
    assert 15 <= looks_in(60) <= 45  # every two to four seconds
    looks_in(120)
    assert 12 <= looks_in(60) <= 20  # every 5 s at the latest
    log.upper(SEALED)
    found = []
    for _ in range(5):
        world.now_s += 1
        found += watcher.tick()
    assert [seen.upper for seen in found] == [EMPTY]
    assert looks_in(30) == 30  # no longer quiet


def test_checks_are_spread_over_ticks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for id in "abcde":
        world.shard(id, log_version=0)
    checked: list[list[str]] = []
    real = Looker.check

    def noted(looker: Looker, targets: Any) -> Any:
        checked.append([target.shard for target in targets])
        return real(looker, targets)

    monkeypatch.setattr(Looker, "check", noted)
    watcher = world.watcher(checks_per_tick=2)
    for _ in range(4):
        watcher.tick()
    assert [len(each) for each in checked] == [2, 2, 1, 0]
    assert sorted(shard for each in checked for shard in each) == list("abcde")


def test_others_are_told_what_the_state_knows(world: World) -> None:
    log = world.shard("a", log_version=0)
    log.upper(5)
    watcher = world.watcher()
    targets, checks = watcher.targets()
    assert [(target.shard, target.version) for target in targets] == [("a", 0)]
    assert [target.shard for target in checks] == ["a"]
    looker = Looker({})
    assert looker.read(looker.with_news(targets)) == [Seen("a", Frontier(5), 1)]
    targets, checks = watcher.targets()
    assert [(target.shard, target.version) for target in targets] == [("a", 0)]
    assert checks == []


def test_logs_on_an_object_store_are_read_alike(world: World) -> None:
    """delta-rs reaches a local directory in the way it reaches object stores; `memory:` would be empty."""
    log = world.shard("a", log_version=0)
    log.upper(5)
    store = ObjectStore(f"file://{log.location.parent}", {})
    logs = looking.Logs({})
    logs._stores["s3://bucket/warehouse"] = store
    looker = Looker({})
    looker._logs = logs
    target = Target("a", "s3://bucket/warehouse/a", log.id, 0, ZERO)
    assert looker.with_news([target]) == [target]
    assert looker.read([target]) == [Seen("a", Frontier(5), 1)]
    assert looker.check([target]) == []
    looker.close()


def test_unknown_numbers_are_refused() -> None:
    assert Pacing.from_options({"watch.budget_ms": "7", "state": "x"}) == Pacing(budget_ms=7)
    with pytest.raises(ValueError, match="unknown field"):
        Pacing.from_options({"watch.nonsense": "7"})

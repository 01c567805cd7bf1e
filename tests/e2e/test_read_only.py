"""A follower beside a controller: it sees what the controller does, and nobody sees the follower."""

from __future__ import annotations

import re
import shutil
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from app.broker import EmbeddedBroker
from app.clock import wall_ms
from app.config import Config
from app.controller import Controller
from app.core.duration import Duration
from app.core.errors import Corrupt
from app.follower import Follower, StateGone
from app.records import Record, Topic
from app.service import EXIT_GAVE_UP, EXIT_OK, EXIT_USAGE
from app.state.errors import NewerFormat
from app.state.journal import Journal
from tests.e2e.harness import Process, Running, config_under, encoded, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NO_HEARTBEAT_MS = 3_600_000


def create(id_: str, *collections: str) -> dict[str, Any]:
    tables = [{"id": each, "data_source": {"kind": "table"}} for each in collections]
    return {"type": "create_collections", "id": id_, "register_ts": 5, "collections": tables}


def everything_under(root: str) -> dict[str, tuple[int, int, int]]:
    """Every file and directory, with what changes when it is written to."""
    stats = {str(path): path.stat() for path in [Path(root), *Path(root).rglob("*")]}
    return {path: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for path, stat in stats.items()}


def wait_until_quiet(running: Running) -> None:
    wait_until(lambda: not running.controller.read(lambda state: state.unseen), "all shards are seen on disk")
    running.wait_for_tables()


def test_a_follower_shows_what_the_controller_does_and_writes_nothing(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    # Without heartbeats the controller writes nothing by itself, once it has seen all shards on disk: then any change
    # would be the follower's.
    config = config_under(tmp_path, broker.bootstrap_servers, heartbeat_ms=NO_HEARTBEAT_MS)
    with Running(config, spark) as running:
        running.ask(create("c1", "orders"))
        wait_until_quiet(running)
        before = everything_under(config.root)
        with Process(config, tmp_path / "follower", arguments=["--read-only"]) as follower:
            follower.wait_for_output("Following the journal at")
            began = re.search(r"from seq (\d+); nothing is written", follower.output)
            assert began is not None
            assert int(began[1]) == running.controller.seq
            assert everything_under(config.root) == before
            for number, id_ in enumerate(("users", "events"), start=2):
                running.ask(create(f"c{number}", id_))
                wait_until_quiet(running)
                follower.wait_for_output(f"following seq={running.controller.seq} epoch=1 collections={number} holds=0")
            before = everything_under(config.root)
            follower.signal(signal.SIGTERM)
            assert follower.wait_for_exit() == EXIT_OK
            assert everything_under(config.root) == before
            assert {path.suffix for path in (tmp_path / "follower").iterdir()} == {
                ".yaml",
                ".txt",
            }
        assert running.controller.epoch == 1


def test_a_follower_without_a_state_says_so(tmp_path: Path) -> None:
    config = config_under(tmp_path, "127.0.0.1:1")
    with Process(config, tmp_path / "follower", arguments=["--read-only"]) as follower:
        assert follower.wait_for_exit() == EXIT_USAGE
        last = follower.output.strip().splitlines()[-1]
    assert last.startswith("holdfast: There is no Holdfast state: ")
    assert last.endswith("Is `root` right?")
    assert not Path(config.root).exists()


def test_a_follower_that_cannot_read_the_state_at_its_start_gives_up(tmp_path: Path) -> None:
    config = config_under(tmp_path, "127.0.0.1:1")
    Leader(config).controller.close()
    log = Path(config.state, "journal", "_delta_log")
    log.rename(tmp_path / "away")
    log.touch()  # as a mount that has gone wrong
    with Process(config, tmp_path / "follower", arguments=["--read-only"]) as follower:
        assert follower.wait_for_exit() == EXIT_GAVE_UP
        assert "gave up, storage could not be used: NotADirectoryError" in follower.output
        assert "Traceback" not in follower.output


# In this process, because they need no other; a state without Kafka is a state like any other.


class Leader:
    """A controller that is given its commands by hand."""

    def __init__(self, config: Config) -> None:
        self.controller = Controller(config)
        self.controller.boot()
        self._offset = sum(self.controller.offsets(Topic("t", "id")).values())

    def create(self, name: str) -> None:
        line = encoded(create(f"c-{name}", name)) or b""
        self.controller.apply(Topic("t", "id"), [Record(0, self._offset, wall_ms(), line)])
        self._offset += 1


def follower_and_leader(tmp_path: Path, **changes: Any) -> tuple[Follower, Leader, Config]:
    config = config_under(tmp_path, "127.0.0.1:1", **changes)
    leader = Leader(config)
    leader.create("orders")
    return Follower(config), leader, config


def test_looking_for_news_writes_nothing(tmp_path: Path) -> None:
    follower, leader, config = follower_and_leader(tmp_path)
    leader.create("users")
    leader.controller.close()
    before = everything_under(config.root)
    assert [follower.look() for _ in range(3)] == [True, False, False]
    assert everything_under(config.root) == before


def test_a_follower_goes_on_when_another_controller_takes_over(tmp_path: Path) -> None:
    follower, leader, config = follower_and_leader(tmp_path)
    assert not follower.look()
    leader.controller.close()
    Leader(config).create("users")
    assert follower.look()
    assert (follower.epoch, set(follower.state.collections)) == (2, {"orders", "users"})


def test_a_follower_does_not_read_what_a_newer_version_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follower, leader, config = follower_and_leader(tmp_path)
    leader.controller.close()
    Leader(config)
    monkeypatch.setattr("app.state.recovery.FORMAT", 0)  # as if we were older
    with pytest.raises(NewerFormat):
        follower.run(threading.Event())


def test_a_follower_that_was_away_for_long_reads_the_tables_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower, leader, _ = follower_and_leader(tmp_path)
    leader.create("users")
    leader.controller.wait_for_tables()
    read = Journal.read

    def trimmed(journal: Journal, after: int) -> Any:
        if after == known:
            raise Corrupt("The journal begins later.")
        return read(journal, after)

    known = follower.seq
    monkeypatch.setattr(Journal, "read", trimmed)
    assert follower.look()
    assert set(follower.state.collections) == {"orders", "users"}


def test_a_follower_waits_for_a_store_that_is_away_and_then_gives_up(tmp_path: Path) -> None:
    follower, leader, config = follower_and_leader(tmp_path, give_up_after_ms=2_500)
    assert config.give_up_after == Duration(2_500)
    stop = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            follower.run(stop)
        except StateGone as error:
            failures.append(error)

    leader.controller.close()
    journal, away = Path(config.state, "journal"), tmp_path / "away"
    shutil.move(journal, away)
    following = threading.Thread(target=run)
    following.start()
    shutil.move(away, journal)
    Leader(config).create("users")
    wait_until(lambda: "users" in follower.state.collections, "the follower goes on")
    shutil.move(journal, away)
    journal.write_text("no directory")
    following.join(30)
    assert not following.is_alive()
    assert len(failures) == 1

"""Controllers that are killed, frozen or replaced at the worst moment: nothing is lost, nothing is applied twice.

Each start of a process costs many seconds, so what can share one does.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from app.broker import EmbeddedBroker
from app.config import Config
from app.controller import Controller
from app.maintenance import JOURNAL_EVERY
from app.records import Record
from app.replies import Replies
from app.service import EXIT_FENCED
from app.state.journal import Journal
from app.topics import Topics
from tests.e2e.harness import (
    LIMIT_S,
    Client,
    Process,
    Row,
    by,
    config_under,
    encoded,
    places,
    table,
    wait_until,
)

READY = "Holdfast is running"


def create(id_: str, *collections: str) -> dict[str, Any]:
    tables = [{"id": each, "data_source": {"kind": "table"}, "schema": "k STRING"} for each in collections]
    return {"type": "create_collections", "id": id_, "register_ts": 5, "collections": tables}


def acquire(id_: str, collection: str) -> dict[str, Any]:
    return {"type": "acquire_read_holds", "id": id_, "collections": [collection], "holder": "a test"}


def entries_by_command(config: Config) -> dict[str, list[int]]:
    """The entries of the journal that record a command, by the command's place on the topic."""
    journal = Journal.open(f"{config.state}/journal", storage_options={}, instance="reader", read_only=True)
    found: dict[str, list[int]] = {}
    epoch = 0
    for entry in journal.read(journal.trimmed):
        assert entry.epoch >= epoch, "epochs never go back"
        epoch = entry.epoch
        for row in entry.rows:
            if row.entity == "command":
                found.setdefault(row.key.partition("/")[2], []).append(entry.seq)
    return found


class Story:
    """What was sent to one root and what must have come of it, whoever was in charge at the time."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.client = Client(config)
        self.commands: list[dict[str, Any]] = []
        topics = Topics(config.kafka, config.kafka.bootstrap_servers)
        topics.ensure()
        self._topic = topics.commands()
        topics.close()

    def send(self, command: dict[str, Any]) -> None:
        self.commands.append(command)
        self.client.send(command)

    def acquire(self) -> str:
        """One more hold; the command's id."""
        id_ = f"h{len(self.commands)}"
        self.send(acquire(id_, "orders"))
        return id_

    def is_answered(self, id_: str) -> bool:
        self.client.read()
        return bool(self.client.replies[id_])

    def acquire_until(self, condition: Callable[[], bool], what: str) -> None:
        """One hold after the other until it is so, each when the one before it is answered."""
        deadline = time.monotonic() + 3 * LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, what
            id_ = self.acquire()
            wait_until(partial(self._one_of, condition, id_), f"{id_} is answered, or {what}")

    def _one_of(self, condition: Callable[[], bool], id_: str) -> bool:
        return condition() or self.is_answered(id_)

    def acquire_answered(self) -> Row:
        (reply,) = self.client.answers(self.acquire())
        return reply

    def prefill(self, entries: int) -> None:
        """Makes a journal that is due for maintenance: as many commands, each in an entry of its own."""
        controller = Controller(self.config)
        controller.boot()
        self.send(create("c1", "orders"))
        while len(self.commands) < entries:
            self.commands.append(acquire(f"h{len(self.commands)}", "orders"))
        self.client.send(*self.commands[1:])
        replies = Replies(self.config.kafka, self.config.kafka.bootstrap_servers)
        for offset, command in enumerate(self.commands):
            record = Record(0, offset, int(time.time() * 1000), encoded(command) or b"")
            replies.send(controller.apply(self._topic, [record]))
        replies.close()
        controller.close()

    def assert_applied_once(self) -> None:
        """Each command has one row, one place in the journal, and at least one reply, always the same."""
        self.client.answers(*(command["id"] for command in self.commands))
        number = len(self.commands)
        rows = by("id", table(self.config, "commands"))
        assert rows.keys() == {command["id"] for command in self.commands}
        assert places(self.config) == [(0, offset) for offset in range(number)]
        in_journal = {place: len(seqs) for place, seqs in entries_by_command(self.config).items()}
        assert in_journal == {f"0/{offset}": 1 for offset in range(number)}
        for id_, row in rows.items():
            first, *others = self.client.replies[id_]
            assert all(reply == first for reply in others), "a reply that is sent again is the same"
            assert (first["status"], first["seq"]) == (row["status"], row["seq"]) == ("ok", row["seq"])
        holds = by("hold", table(self.config, "holds"))
        assert holds.keys() == {f"{command['id']}/orders" for command in self.commands[1:]}


def test_controllers_killed_after_their_entry_are_made_good_by_the_next(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """Killed between entry and reply, and between entry and tables, one after the other on the same root."""
    story = Story(config_under(tmp_path, broker.bootstrap_servers))
    story.send(create("c1", "orders"))
    # The first entry is that of the boot, and up to two merges are.
    for fail_point in ("after_entry@2", "before_replies", "before_tables@3"):
        with Process(story.config, tmp_path / fail_point, fail_point=fail_point) as process:
            story.acquire()
            story.acquire_until(process.has_ended, f"{fail_point} is reached")
            assert process.wait_for_exit() == -signal.SIGKILL, process.output
            assert f"fail point {fail_point.partition('@')[0]}" in process.output
        if fail_point == "after_entry@2":
            story.client.read()
            assert story.client.reply_count == 0, "it was killed before its first reply"
            assert len(entries_by_command(story.config)) >= 1
    with Process(story.config, tmp_path / "last", arguments=["--once"]) as process:
        assert process.wait_for_exit() == 0, process.output
    story.assert_applied_once()
    story.client.close()


def test_a_controller_that_was_replaced_halts_and_harms_nothing(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """Frozen while it maintains the journal, frozen while it merges tables, and in the middle of its work."""
    story = Story(config_under(tmp_path, broker.bootstrap_servers))
    story.prefill(JOURNAL_EVERY + 5)
    with ExitStack() as stack:

        def start(name: str, fail_point: str | None = None) -> Process:
            return stack.enter_context(Process(story.config, tmp_path / name, fail_point=fail_point))

        maintaining = start("maintaining", "journal_maintenance:stop")
        maintaining.wait_for_output("fail point journal_maintenance")
        merging = start("merging", "before_tables@4:stop")
        merging.wait_for_output(READY)
        maintaining.signal(signal.SIGCONT)
        assert_replaced(maintaining, by=merging)

        frozen = "fail point before_tables"
        story.acquire_until(lambda: frozen in merging.output, "it is frozen before it merges tables")
        working = start("working")
        working.wait_for_output(READY)
        story.acquire_answered()
        merging.signal(signal.SIGCONT)
        assert_replaced(merging, by=working)

        last = start("last")
        story.acquire_until(lambda: READY in last.output and working.has_ended(), "the last one has taken over")
        assert_replaced(working, by=last)
        assert story.acquire_answered()["epoch"] == 5
        last.signal(signal.SIGTERM)
        assert last.wait_for_exit() == 0, last.output
    story.assert_applied_once()
    story.client.close()


def assert_replaced(process: Process, *, by: Process) -> None:
    """It halted with the exit code for that, and said who replaced it."""
    assert process.wait_for_exit() == EXIT_FENCED, process.output
    said = [line for line in process.output.splitlines() if "another controller took over" in line]
    assert len(said) == 1, process.output
    assert f"process {by.pid}," in said[0], said

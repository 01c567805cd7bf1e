"""A merge of the tables that fails for a passing reason holds nothing up for good: the journal knows what they lack."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from app.clock import wall_ms
from app.config import Config, StreamsConfig
from app.controller import Controller
from app.records import Record, Topic
from app.state.errors import Fenced, OutcomeUnknown
from app.state.tables import Tables

TOPIC = Topic("commands", "id1")
LIMIT_S = 30.0


class Faulty:
    """The merges of `Tables`, of which those chosen fail; and a sign when one has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures_to_come = 0
        self.failed = threading.Event()
        really: Callable[..., None] = Tables.merge

        def merge(tables: Tables, *args: Any, **named: Any) -> None:
            if self.failures_to_come:
                self.failures_to_come -= 1
                self.failed.set()
                raise OutcomeUnknown("the store is away for a moment")
            really(tables, *args, **named)

        monkeypatch.setattr(Tables, "merge", merge)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Faulty:
    return Faulty(monkeypatch)


@pytest.fixture
def controller(tmp_path: Path, faulty: Faulty) -> Controller:  # noqa: ARG001  # its place is before the first merge
    config = Config(
        root=str(tmp_path / "root"),
        warehouse=[str(tmp_path / "warehouse")],
        streams=StreamsConfig(checkpoints=str(tmp_path / "checkpoints")),
    )
    booted = Controller(config)
    booted.boot()
    wait_for_tables(booted)
    return booted


def create(controller: Controller, offset: int) -> None:
    tables = [{"id": f"t{offset}", "data_source": {"kind": "table"}}]
    command = {"type": "create_collections", "id": f"c{offset}", "register_ts": 5, "collections": tables}
    controller.apply(TOPIC, [Record(0, offset, wall_ms(), json.dumps(command).encode())])


def wait_for_tables(controller: Controller) -> None:
    """As `Controller.wait_for_tables`, but not for ever."""
    problems: list[BaseException] = []

    def wait() -> None:
        try:
            controller.wait_for_tables()
        except BaseException as error:  # noqa: BLE001 - raised below, in the test
            problems.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(LIMIT_S)
    assert not waiting.is_alive(), "the tables did not reach the journal"
    if problems:
        raise problems[0]


def ids(controller: Controller, name: str) -> set[str]:
    table = DeltaTable(f"{controller._config.state}/{name}").to_pyarrow_table()
    return set(table.column("id").to_pylist())


def test_after_a_failed_merge_recovering_brings_the_tables_up(controller: Controller, faulty: Faulty) -> None:
    for offset in (0, 2):  # and again: whoever came for the first one can fail like it
        faulty.failures_to_come = 1
        create(controller, offset)
        with pytest.raises(OutcomeUnknown):
            wait_for_tables(controller)
        with pytest.raises(OutcomeUnknown):
            controller.check()
        create(controller, offset + 1)  # the journal takes entries all the same
        assert controller.tables_reached < controller.seq

        controller.recover()
        controller.check()
        wait_for_tables(controller)
        assert controller.tables_reached == controller.seq
        assert ids(controller, "collections") == {f"t{each}" for each in range(offset + 2)}
        assert ids(controller, "commands") == {f"c{each}" for each in range(offset + 2)}
    create(controller, 4)
    wait_for_tables(controller)
    controller.close()
    assert controller.failure is None
    assert "t4" in ids(controller, "collections")


def test_one_thread_writes_however_often_the_truth_is_read(controller: Controller, faulty: Faulty) -> None:
    def writers() -> list[threading.Thread]:
        thread = controller._writer._thread
        return [each for each in threading.enumerate() if each is thread]

    before = controller._writer._thread
    controller.recover()
    controller.recover()
    assert controller._writer._thread is before, "nothing had failed"
    faulty.failures_to_come = 1
    create(controller, 0)
    assert faulty.failed.wait(LIMIT_S)
    with pytest.raises(OutcomeUnknown):
        wait_for_tables(controller)
    controller.recover()
    assert len(writers()) == 1
    assert controller._writer._thread is not before
    controller.close()
    assert writers() == []


def test_a_closed_controller_says_that_its_tables_are_behind(controller: Controller, faulty: Faulty) -> None:
    faulty.failures_to_come = 1
    create(controller, 0)
    assert faulty.failed.wait(LIMIT_S)
    controller.close()
    assert isinstance(controller.failure, OutcomeUnknown)
    assert controller.tables_reached < controller.seq


def test_whoever_was_replaced_meanwhile_is_told_by_whom_and_writes_no_table(
    controller: Controller, faulty: Faulty
) -> None:
    faulty.failures_to_come = 1
    create(controller, 0)
    with pytest.raises(OutcomeUnknown):
        wait_for_tables(controller)
    successor = Controller(controller._config)
    successor.boot()
    wait_for_tables(successor)
    with pytest.raises(
        Fenced, match=rf"process {os.getpid()}, epoch 2\) took over; this one has epoch 1 and must stop"
    ):
        controller.recover()
    assert isinstance(controller.failure, OutcomeUnknown), "nobody writes for it any more"
    successor.close()

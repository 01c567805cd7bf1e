"""The controller's memory is never ahead of its journal, whatever goes wrong between the two."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from app.clock import wall_ms
from app.config import Config, StreamsConfig
from app.controller import Controller
from app.core.errors import Corrupt
from app.core.folding import fold
from app.memory import MemoryInDoubt
from app.records import Record, Topic
from app.state.errors import OutcomeUnknown
from app.state.recovery import recover
from app.state.tables import Tables

TOPIC = Topic("commands", "topic-1")


def record(offset: int, **command: Any) -> Record:
    return Record(0, offset, wall_ms(), json.dumps(command).encode())


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    config = Config(
        root=str(tmp_path / "root"),
        warehouse=[str(tmp_path / "warehouse")],
        streams=StreamsConfig(checkpoints=str(tmp_path / "checkpoints")),
    )
    booted = Controller(config)
    booted.boot()
    create = {"type": "create_collections", "id": "c1", "collections": [{"id": "a", "data_source": {"kind": "other"}}]}
    booted.apply(TOPIC, [record(0, **create)])
    yield booted
    booted.close()


def journalled_holds(controller: Controller) -> set[str]:
    controller.wait_for_tables()
    recovered = recover(controller._journal, controller._tables, now_ms=wall_ms())
    return set(fold(recovered.images.items()).holds)


def test_after_an_entry_that_may_not_be_there_nothing_is_done_before_the_truth_was_read(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(**_: Any) -> int:
        raise OutcomeUnknown("the store is gone")

    acquire = {"type": "acquire_read_holds", "id": "h1", "collections": ["a"], "holder": "me"}
    with monkeypatch.context() as patched:
        patched.setattr(controller._journal, "append", lost)
        with pytest.raises(OutcomeUnknown):
            controller.apply(TOPIC, [record(1, **acquire)])
    # Memory has a hold that the journal lacks. Were it used, its release would be journalled, or its since moved.
    with pytest.raises(MemoryInDoubt):
        controller.heartbeat(applied_until=None)
    with pytest.raises(MemoryInDoubt):
        controller.apply(TOPIC, [record(2, type="release_read_holds", id="r1", holds=["h1/a"])])
    controller.recover()
    assert controller.read(lambda state: set(state.holds)) == set()
    assert controller.offsets(TOPIC) == {0: 1}, "the record is applied when it comes again"
    controller.apply(TOPIC, [record(1, **acquire)])
    assert journalled_holds(controller) == {"h1/a"}


def test_a_lease_that_ends_with_a_batch_of_repeated_records_is_journalled(controller: Controller) -> None:
    acquire = {"type": "acquire_read_holds", "id": "h1", "collections": ["a"], "holder": "me", "lease": 1}
    held = record(1, **acquire)
    controller.apply(TOPIC, [held])
    until = controller.now()
    while controller.now() <= until + 1:
        pass
    controller._applied_until = controller.now()
    controller.apply(TOPIC, [held])  # Spark runs its last batch again
    assert controller.read(lambda state: set(state.holds)) == journalled_holds(controller) == set()


def test_a_time_of_day_that_was_set_forward_ends_no_lease_when_memory_is_read_back(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire = {"type": "acquire_read_holds", "id": "h1", "collections": ["a"], "holder": "me", "lease": "5m"}
    controller.apply(TOPIC, [record(1, **acquire)])
    before, hour_ms = controller.now(), 3_600_000
    monkeypatch.setattr("app.clock.time.time_ns", lambda: (before + hour_ms) * 1_000_000)
    controller.recover()
    assert before <= controller.now() < before + hour_ms // 2
    controller.heartbeat(applied_until=controller.now())
    assert journalled_holds(controller) == {"h1/a"}


@pytest.mark.parametrize("merged", [True, False])
def test_the_replies_to_the_last_entry_are_sent_again_however_long_the_controller_was_away(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, merged: bool
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise OutcomeUnknown("killed before it merged")

    controller.wait_for_tables()
    if not merged:
        monkeypatch.setattr(Tables, "merge", failing)
    acquire = {"type": "acquire_read_holds", "collections": ["a"], "holder": "me"}
    replies = controller.apply(TOPIC, [record(1, id="h1", **acquire), record(2, id="h2", **acquire)])
    controller.close()
    monkeypatch.undo()
    later_ns = time.time_ns() + 2 * 3_600 * 10**9  # more than `max_command_age`
    monkeypatch.setattr("app.clock.time.time_ns", lambda: later_ns)
    successor = Controller(controller._config)
    successor.boot()
    assert successor.last_replies == replies
    # What is that old is remembered for nothing else: a duplicate of it is stale.
    (again,) = successor.apply(TOPIC, [record(3, id="h1", **acquire)._replace(timestamp=later_ns // 10**6 - 7_200_000)])
    assert json.loads(again.value)["error"]["code"] == "STALE_COMMAND"
    successor.close()


def table_at(location: Path, columns: list[str], **transactions: int) -> None:
    write_deltalake(
        str(location),
        pa.table({name: pa.array([], pa.int64()) for name in columns}),
        commit_properties=CommitProperties(
            app_transactions=[Transaction(f"holdfast.{name}", version) for name, version in transactions.items()]
        ),
    )


def create_at(controller: Controller, offset: int, location: Path) -> dict[str, Any]:
    shard = {"location": str(location), "format": "updates"}
    collections = [{"id": f"t{offset}", "data_source": {"kind": "table"}, "shard": shard}]
    command = {"type": "create_collections", "id": f"c-{offset}", "register_ts": 1, "collections": collections}
    (reply,) = controller.apply(TOPIC, [record(offset, **command)])
    answer: dict[str, Any] = json.loads(reply.value)
    return answer


def test_a_table_that_is_there_already_is_registered_with_what_its_log_says(
    controller: Controller, tmp_path: Path
) -> None:
    location = tmp_path / "warehouse" / "old"
    table_at(location, ["_time", "_diff", "k"], upper=20, since=7)
    assert create_at(controller, 1, location)["status"] == "ok"
    collection, shard = controller.read(
        lambda state: (state.collections["t1"], state.shards[state.collections["t1"].shard])
    )
    assert (collection.upper, collection.since) == (20, 7)
    assert (shard.log_version, shard.table_id) == (0, str(DeltaTable(str(location)).metadata().id))


def test_what_cannot_be_a_shard_is_not_registered(controller: Controller, tmp_path: Path) -> None:
    plain, damaged = tmp_path / "warehouse" / "plain", tmp_path / "warehouse" / "damaged"
    table_at(plain, ["k", "v"])
    refused = create_at(controller, 1, plain)["error"]
    assert (refused["code"], "not of format `updates`" in refused["message"]) == ("INVALID_ARGUMENT", True)
    table_at(damaged, ["_time", "_diff"])
    (damaged / "_delta_log" / f"{0:020d}.json").write_text("{")
    refused = create_at(controller, 2, damaged)["error"]
    assert (refused["code"], "cannot be looked at" in refused["message"]) == ("INTERNAL", True)
    assert not controller.read(lambda state: [id for id in state.collections if id.startswith("t")])


def test_a_place_with_files_of_others_is_no_new_shard(controller: Controller, tmp_path: Path) -> None:
    place = tmp_path / "warehouse" / "place"
    table_at(place / "eu", ["k", "v"])
    refused = create_at(controller, 1, place)["error"]
    assert (refused["code"], "there are files" in refused["message"]) == ("INVALID_ARGUMENT", True)
    assert not controller.read(lambda state: [id for id in state.collections if id.startswith("t")])


def test_a_shard_that_is_journalled_is_not_looked_at_again(controller: Controller, tmp_path: Path) -> None:
    """Not if the command is sent anew either, after a crash that left something between the entry and the creation."""
    place = tmp_path / "warehouse" / "place"
    shard = {"location": str(place), "format": "updates"}
    collections = [{"id": "t", "data_source": {"kind": "table"}, "shard": shard}]
    command = {"type": "create_collections", "register_ts": 1, "collections": collections}
    controller.apply(TOPIC, [record(1, **command, id="first")])
    place.mkdir(parents=True)
    (place / "_holdfast.lock").touch()
    controller.recover()
    (reply,) = controller.apply(TOPIC, [record(2, **command, id="second")])
    assert json.loads(reply.value)["status"] == "ok"


def test_a_damaged_file_of_the_journal_is_corruption_and_not_a_failure_that_passes(
    controller: Controller, tmp_path: Path
) -> None:
    file = max((tmp_path / "root" / "state" / "journal").glob("*.parquet"))
    file.write_bytes(b"PAR1 not what was written PAR1")
    with pytest.raises(Corrupt, match="damaged"):
        list(controller._journal.read(0))

"""Whatever comes twice is applied once, and whatever is lost but the journal is not missed."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kafka import KafkaConsumer, TopicPartition
from kafka.admin import KafkaAdminClient

from app.broker import EmbeddedBroker
from app.config import Config
from app.controller import Controller
from app.records import Record, Topic
from app.state.errors import OutcomeUnknown
from app.streams.commands import CommandStream
from app.topics import Topics
from tests.e2e.harness import Row, Running, by, config_under, delete_topic, places, table, wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STATE = ("collections", "holds", "shards", "commands")
PARTITION = {"partition": "0"}


def create(id_: str, *collections: str) -> dict[str, Any]:
    tables = [{"id": each, "data_source": {"kind": "table"}, "schema": "k STRING"} for each in collections]
    return {"type": "create_collections", "id": id_, "register_ts": 5, "collections": tables}


def acquire(id_: str, *collections: str) -> dict[str, Any]:
    return {"type": "acquire_read_holds", "id": id_, "collections": list(collections), "holder": "a test"}


def state_of(config: Config) -> dict[str, list[Row]]:
    """All rows, without what may change by itself: a shard's since follows, and its table is made and seen."""
    followed = {"since", "epoch", "log_version", "updated_seq"}
    rows = {name: table(config, name) for name in STATE}
    rows["shards"] = [{name: row[name] for name in row if name not in followed} for row in rows["shards"]]
    return {name: sorted(each, key=repr) for name, each in rows.items()}


def records_of(config: Config) -> list[Record]:
    """All that is on the first partition of the command topic, as the controller gets it."""
    consumer = KafkaConsumer(bootstrap_servers=config.kafka.bootstrap_servers, group_id=None)
    partition = TopicPartition(config.kafka.commands_topic, 0)
    consumer.assign([partition])
    consumer.seek_to_beginning(partition)
    end = consumer.end_offsets([partition])[partition]
    found: list[Record] = []

    def all_there() -> bool:
        for records in consumer.poll(timeout_ms=100).values():
            found.extend(Record(0, each.offset, each.timestamp, each.value or b"") for each in records)
        return len(found) >= int(end)

    wait_until(all_there, f"{end} records are read back")
    consumer.close()
    return found


def test_kafka_may_be_killed_under_a_running_controller(spark: SparkSession, tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / "kafka") as own:
        config = config_under(tmp_path, own.bootstrap_servers)
        with Running(config, spark) as running:
            running.ask(create("c1", "orders"), acquire("h1", "orders"))
            own.kill()
            own.start()
            assert own.bootstrap_servers == config.kafka.bootstrap_servers
            replies = running.ask(*(acquire(f"k{number}", "orders") for number in range(3)), limit_s=120)
            assert [reply["status"] for reply in replies] == ["ok"] * 3
            assert by("id", running.table("commands")).keys() == {"c1", "h1", "k0", "k1", "k2"}
            holds = {"h1/orders", "k0/orders", "k1/orders", "k2/orders"}
            assert by("hold", running.table("holds")).keys() == holds
            assert running.controller.epoch == 1  # it was the same controller all the time


def test_the_same_command_sent_twice_is_applied_once_and_answered_twice(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    config = config_under(tmp_path, broker.bootstrap_servers)
    with Running(config, spark) as running:
        hold = acquire("h1", "orders")
        running.ask(create("c1", "orders"), hold)
        release = {"type": "release_read_holds", "id": "r1", "holds": ["h1/orders"]}
        running.ask(release)
        # In a batch of its own, and twice in one batch: the hold does not come back.
        running.send(hold)
        running.wait_for_replies(4)
        running.send(hold, release, hold)
        running.wait_for_replies(7)
        assert len(running.replies["h1"]) == 4
        assert all(reply == running.replies["h1"][0] for reply in running.replies["h1"])
        assert all(reply == running.replies["r1"][0] for reply in running.replies["r1"])
        # Other bytes under a known id are another command, and refused.
        running.send(acquire("h1", "orders") | {"purpose": "another"})
        running.wait_for_replies(8)
        assert running.replies["h1"][-1]["error"]["path"] == "$.id"
        assert running.table("holds") == []
        assert places(config) == [(0, offset) for offset in range(8)]
    # The next controller knows the ids too.
    with Running(config, spark) as running:
        before = running.controller.seq
        (place,) = running.send(hold)
        wait_until(lambda: running.controller.seq > before, "the duplicate is recorded")
        assert running.table("holds") == []
        assert places(config)[-1] == place == (0, 8)
        running.wait_for_replies(10)  # with the one that was sent again at the start
        assert running.replies["h1"][-1] == running.replies["h1"][0]


def test_a_restart_keeps_everything_and_sends_the_last_replies_again(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    config = config_under(tmp_path, broker.bootstrap_servers)
    with Running(config, spark) as running:
        running.ask(create("c1", "orders"))
        running.ask(acquire("h1", "orders"))
        beats = running.heartbeats  # the shard's since follows its collection's with the next one
        wait_until(lambda: running.heartbeats > beats + 1, "another heartbeat")
        running.wait_for_tables()
        before, epoch = state_of(config), running.controller.epoch
    with Running(config, spark) as running:
        running.wait_for_replies(3)
        assert running.replies["h1"][1:] == running.replies["h1"][:1]
        assert len(running.replies["c1"]) == 1
        assert running.controller.epoch == epoch + 1
        running.wait_for_tables()
        assert state_of(config) == before
        (reply,) = running.ask(acquire("h2", "orders"))
        assert (reply["status"], reply["epoch"]) == ("ok", epoch + 1)
        assert by("hold", running.table("holds")).keys() == {"h1/orders", "h2/orders"}


def test_what_spark_noted_may_be_lost(spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path) -> None:
    config = config_under(tmp_path, broker.bootstrap_servers)
    with Running(config, spark) as running:
        running.ask(create("c1", "orders"), acquire("h1", "orders"))
    before = state_of(config)
    running.send(acquire("h2", "orders"))  # while nobody is there
    running.close()
    shutil.rmtree(config.streams.checkpoints)
    with Running(config, spark) as running:
        assert [reply["status"] for reply in running.answers("h2")] == ["ok"]
        assert by("hold", running.table("holds")).keys() == {"h1/orders", "h2/orders"}
        assert places(config) == [(0, 0), (0, 1), (0, 2)]
        assert sorted(table(config, "collections"), key=repr) == before["collections"]


def last_done(checkpoint: Path) -> tuple[int, int]:
    """The last batch that is noted as done, and how far it went."""
    number = max((int(file.name) for file in (checkpoint / "commits").glob("[0-9]*")), default=-1)
    if number < 0:
        return -1, -1
    ((offsets,),) = [json.loads((checkpoint / f"offsets/{number}").read_text().splitlines()[-1]).values()]
    return number, offsets["0"]


def test_a_batch_that_spark_runs_again_is_not_applied_again(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a checkpoint that is kept and taken up again, and without the note that its last batch was done."""
    kept = tmp_path / "kept"
    monkeypatch.setattr(CommandStream, "_new_checkpoint", lambda *_: str(kept))
    monkeypatch.setattr(CommandStream, "remove_checkpoint", lambda _: None)
    config = config_under(tmp_path, broker.bootstrap_servers)
    with Running(config, spark) as running:
        running.ask(create("c1", "orders"))
        running.ask(acquire("h1", "orders"))
        # Which batch it is depends on whether the first one came before the first command, and was empty.
        wait_until(lambda: last_done(kept)[1] == 2, "Spark has noted that the batch with the second command is done")
    before = state_of(config)
    number, _ = last_done(kept)
    for note in (f"{number}", f".{number}.crc"):
        (kept / "commits" / note).unlink()
    with Running(config, spark) as running:
        running.wait_for_replies(4)  # that to h1 once more at boot, and once more by the batch
        assert running.replies["h1"] == [running.replies["h1"][0]] * 3
        assert state_of(config) == before
        running.ask(acquire("h2", "orders"))
        assert by("hold", running.table("holds")).keys() == {"h1/orders", "h2/orders"}
        assert places(config) == [(0, 0), (0, 1), (0, 2)]


def test_a_topic_that_was_made_anew_is_applied_from_its_beginning(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    config = config_under(tmp_path, broker.bootstrap_servers)
    with Running(config, spark) as running:
        running.ask(create("c1", "a", "b", "c", "d"))
        running.ask(acquire("h1", "a"))
        running.ask(acquire("h2", "b"))
    # Between two lives, with fewer records than the old one had; then under a running controller, with more.
    delete_topic(config, config.kafka.commands_topic)
    with Running(config, spark) as running:
        (reply,) = running.ask(acquire("n1", "c"))
        assert reply["status"] == "ok"
        running.wait_for_tables()
        assert sorted(places(config)) == [(0, 0), (0, 0), (0, 1), (0, 2)]
        delete_topic(config, config.kafka.commands_topic)
        beats = running.heartbeats
        wait_until(lambda: running.heartbeats > beats + 1, "the controller goes on with the new topic", 120)
        replies = running.ask(*(acquire(f"m{number}", "d") for number in range(5)), limit_s=120)
        assert [reply["status"] for reply in replies] == ["ok"] * 5
        expected = {"h1/a", "h2/b", "n1/c", *(f"m{number}/d" for number in range(5))}
        assert by("hold", running.table("holds")).keys() == expected
        assert by("id", running.table("commands")).keys() == {hold.partition("/")[0] for hold in expected} | {"c1"}


def test_after_kafka_has_deleted_what_was_not_applied_it_goes_on_and_says_so_once(
    spark: SparkSession,
    broker: EmbeddedBroker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = config_under(tmp_path, broker.bootstrap_servers)
    with Running(config, spark) as running:
        running.ask(create("c1", "orders"))
    running.send(*(acquire(f"lost{number}", "orders") for number in range(3)))  # while nobody is there
    admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    admin.delete_records({TopicPartition(config.kafka.commands_topic, 0): 3})
    admin.close()
    apply, failures = Controller.apply, list[OutcomeUnknown]()

    def failing_once(*arguments: Any) -> Any:
        if not failures:
            failures.append(OutcomeUnknown("the store is away for a moment"))
            raise failures[0]
        return apply(*arguments)

    monkeypatch.setattr(Controller, "apply", failing_once)
    with Running(config, spark) as running:
        running.answers("lost2")  # the one that is left
        assert by("hold", running.table("holds")).keys() == {"lost2/orders"}
        expired = running.controller.metrics.registry.get_sample_value("holdfast_expired_commands_total", PARTITION)
        assert failures, "the query began twice"
        assert expired == 2
        assert caplog.text.count("Kafka deleted up to 2 records before they were applied") == 1
        (reply,) = running.ask(acquire("h1", "orders"))
        assert reply["status"] == "ok"


def lose_tail(own: EmbeddedBroker, topic: str, *, size: int) -> None:
    """As a loss of power does it: of the partition's file only the beginning is on disk."""
    own.kill()
    os.truncate(segment(own, topic), size)
    own.start()


def segment(own: EmbeddedBroker, topic: str) -> Path:
    return own.data / "logs" / f"{topic}-0" / f"{0:020d}.log"


def test_after_kafka_has_lost_what_was_applied_last_new_commands_are_applied_in_its_place(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with EmbeddedBroker(tmp_path / "kafka") as own:
        config = config_under(tmp_path, own.bootstrap_servers)
        topic = config.kafka.commands_topic
        with Running(config, spark) as running:
            lost = running.controller.metrics.registry.get_sample_value
            running.ask(create("c1", "orders"))
            size = segment(own, topic).stat().st_size
            running.ask(acquire("h1", "orders"))
            running.ask(acquire("h2", "orders"))
            assert segment(own, topic).stat().st_size > size
            running.close()  # Kafka refuses a producer whose records it has lost
            # Under a running controller,
            lose_tail(own, topic, size=size)
            wait_until(lambda: lost("holdfast_lost_records_total", PARTITION) == 2, "it goes on where the topic ends")
            (reply,) = running.ask(acquire("n1", "orders"))
            assert reply["status"] == "ok"
            assert "Kafka has lost the newest 2 records that were applied" in caplog.text
        # and between two lives.
        lose_tail(own, topic, size=size)
        with Running(config, spark) as running:
            replies = running.ask(acquire("n2", "orders"), acquire("n3", "orders"))
            assert [reply["status"] for reply in replies] == ["ok", "ok"]
            assert running.controller.metrics.registry.get_sample_value("holdfast_lost_records_total", PARTITION) == 1
            held = {f"{id_}/orders" for id_ in ("h1", "h2", "n1", "n2", "n3")}
            assert by("hold", running.table("holds")).keys() == held
            # Each has a row, also where another one was before.
            rows = by("id", running.table("commands"))
            assert {id_: row["offset"] for id_, row in rows.items()} == {
                "c1": 0, "h1": 1, "h2": 2, "n1": 1, "n2": 1, "n3": 2,
            }  # fmt: skip


@pytest.mark.parametrize("records", [4, 2])
def test_a_topic_made_anew_between_two_batches_is_not_taken_for_the_old_one(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: int
) -> None:
    """With more records than the old one had, two: Spark goes on in the middle of the new one, and says nothing.

    With as many, it sees nothing new, and there is no batch: then the next heartbeat notices.
    """
    process, commands = CommandStream._process, Topics.commands
    held_up, go_on = threading.Event(), threading.Event()
    batches: list[list[str]] = []

    def observed(stream: CommandStream, frame: DataFrame) -> None:
        batches.append([row[3].decode() for row in frame.collect()])
        process(stream, frame)
        if any('"h1"' in line for line in batches[-1]):
            held_up.set()
            assert go_on.wait(60)

    def not_meanwhile(topics: Topics) -> Topic:
        """Nobody sees that the topic is missing for a moment: only that it is another one."""
        assert not held_up.is_set() or go_on.wait(60)
        return commands(topics)

    monkeypatch.setattr(CommandStream, "_process", observed)
    monkeypatch.setattr(Topics, "commands", not_meanwhile)
    heartbeat_ms = 3_600_000 if records > 2 else 500
    config = config_under(tmp_path, broker.bootstrap_servers, heartbeat_ms=heartbeat_ms)
    with Running(config, spark) as running:
        running.ask(create("c1", "orders"))
        running.send(acquire("h1", "orders"))
        assert held_up.wait(60)
        old_batches = len(batches)
        delete_topic(config, config.kafka.commands_topic)
        topics = Topics(config.kafka, config.kafka.bootstrap_servers)
        topics.ensure()
        topics.close()
        ids = [f"n{number}" for number in range(records)]
        running.send(*(acquire(id_, "orders") for id_ in ids))
        go_on.set()
        replies = running.answers(*ids)
        assert [reply["status"] for reply in replies] == ["ok"] * records
        running.wait_for_tables()
        if records > 2:
            # Spark did read the new topic from the middle, and these records were applied only in their turn.
            assert len(batches[old_batches]) == records - 2
        assert all(len(running.replies[id_]) == 1 for id_ in ids)
        rows = by("id", running.table("commands"))
        assert rows.keys() == {"c1", "h1", *ids}
        in_order = sorted(rows.values(), key=lambda row: (row["seq"], row["offset"]))
        assert [row["id"] for row in in_order] == ["c1", "h1", *ids]
        assert [rows[id_]["offset"] for id_ in ids] == list(range(records))


def test_a_batch_that_is_run_again_gives_the_recorded_replies_and_changes_nothing(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    config = config_under(tmp_path, broker.bootstrap_servers, heartbeat_ms=3_600_000)
    with Running(config, spark) as running:
        lines = [create("c1", "orders"), acquire("h1", "orders"), acquire("h2", "nobody")]
        running.send(
            *lines, b"\xff", None, lines[1], {"type": "release_read_holds", "id": "r1", "holds": ["h1/orders"]}
        )
        running.wait_for_replies(7)
        running.wait_for_tables()
        before, seq = state_of(config), running.controller.seq
        topics = Topics(config.kafka, config.kafka.bootstrap_servers)
        topic = topics.commands()
        topics.close()
        records = records_of(config)
        assert len(records) == 7
        again = running.controller.apply(topic, records)
        consumer = KafkaConsumer(bootstrap_servers=broker.bootstrap_servers, group_id=None)
        sent = TopicPartition(config.kafka.replies_topic, 0)
        consumer.assign([sent])
        consumer.seek_to_beginning(sent)
        got: list[tuple[bytes | None, bytes]] = []

        def all_there() -> bool:
            for found in consumer.poll(timeout_ms=100).values():
                got.extend((each.key, each.value) for each in found)
            return len(got) >= 7

        wait_until(all_there, "the replies are read back")
        consumer.close()
        assert [(reply.key, reply.value) for reply in again] == got
        # A part of it again, in another order: the same.
        assert running.controller.apply(topic, records[5:0:-2]) == [again[1], again[3], again[5]]
        running.wait_for_tables()
        assert running.controller.seq == seq
        assert state_of(config) == before
        # A batch of which a part is new: only that is applied.
        (place,) = running.send(acquire("h3", "orders"))
        running.wait_for_replies(8)
        assert place == (0, 7)
        assert by("hold", running.table("holds")).keys() == {"h3/orders"}

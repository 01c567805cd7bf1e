"""Commands through Kafka: each is answered, each has its row, and the tables are what the rule book says."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from app.broker import EmbeddedBroker
from app.controller import Controller
from app.protocol import MAX_MESSAGE_BYTES
from app.service import EXIT_OK
from app.simulate import Simulator
from app.streams.collecting import PART_BYTES
from app.topics import Topics
from tests.e2e.harness import Client, Process, Row, Running, by, config_under, encoded, places, table, wait_until
from tests.e2e.mixed_lines import LARGE, mixed_lines

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DOCUMENTED = Path(__file__).resolve().parents[2] / "docs" / "commands.md"
OTHER = {"data_source": {"kind": "other"}}
NO_HEARTBEAT_MS = 3_600_000  # but the first: what time does to the state is not simulated here
KEYS = {"collections": "id", "holds": "hold", "shards": "shard"}
JSON_COLUMNS = ("description", "read_policy")
# Entries are numbered otherwise where a batch is one entry, and the simulation's clock stands still: of a time of day
# only whether there is one can be compared.
SEQS = ("created_seq", "updated_seq")
# The simulation has no disk: whether the tables of new shards are there yet, and which they are.
ON_DISK = ("table_id", "log_version", "last_error")
TIMES = ("acquired_at", "applied_at", "lease_expires_at", "dropped_at", "finalized_at")


def documented() -> list[tuple[Row, Row]]:
    """The commands of docs/commands.md with their replies: one story in which every command comes once."""
    blocks = re.findall(r"```json (command|reply)\n(.*?)\n```", DOCUMENTED.read_text(), re.DOTALL)
    texts = [json.loads(text) for _, text in blocks]
    assert [kind for kind, _ in blocks] == ["command", "reply"] * (len(blocks) // 2)
    return list(zip(texts[::2], texts[1::2], strict=True))


def without_entry(reply: Row) -> Row:
    return {name: value for name, value in reply.items() if name not in ("seq", "epoch")}


class Names:
    """Names that a real controller makes, as the simulation makes them: shards without the root's id."""

    def __init__(self, controller: Controller, warehouse: str) -> None:
        (root,) = {shard.rpartition("-")[2] for shard in controller.machine.state.shards}
        self._suffix, self._warehouse = f"-{root}", warehouse

    def plain(self, value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(self._suffix, "").replace(self._warehouse, "/warehouse")
        if isinstance(value, list):
            return [self.plain(each) for each in value]
        if isinstance(value, dict):
            return {self.plain(key): self.plain(each) for key, each in value.items()}
        return value


def comparable(rows: list[Row], key: str) -> dict[str, Row]:
    """Rows by their key, without what differs between a controller and a simulation."""
    return by(
        key,
        [
            {
                name: value if name not in TIMES or value is None else "a time"
                for name, value in row.items()
                if name not in (*SEQS, *ON_DISK)
            }
            for row in rows
        ],
    )


def from_table(name: str, rows: list[Row], names: Names) -> dict[str, Row]:
    for row in rows:
        for column in JSON_COLUMNS:
            if row.get(column) is not None:
                row[column] = json.loads(row[column])
    return comparable([names.plain(row) for row in rows], KEYS[name])


def assert_simulated(running: Running, simulator: Simulator) -> None:
    names = Names(running.controller, running.config.warehouse[0])
    dump = json.loads(simulator.line(b'{"type":"dump"}'))
    for name, key in KEYS.items():
        assert from_table(name, running.table(name), names) == comparable(dump[name], key), name


def test_every_command_is_answered_as_documented(spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path) -> None:
    story = documented()
    config = config_under(tmp_path, broker.bootstrap_servers, heartbeat_ms=NO_HEARTBEAT_MS)
    with Running(config, spark) as running:
        replies = running.ask(*(command for command, _ in story))
        assert [without_entry(reply) for reply in replies] == [without_entry(reply) for _, reply in story]
        assert {command["type"] for command, _ in story} >= {
            "create_collections", "set_read_policies", "acquire_read_holds", "downgrade_read_holds",
            "renew_read_holds", "clone_read_holds", "merge_read_holds", "release_read_holds", "alter_table_desc",
            "update_parameters", "drop_collections", "undrop_collections", "reconcile",
        }  # fmt: skip
        rows = by("id", running.table("commands"))
        for reply in replies:
            row = rows.pop(reply["id"])
            assert (row["type"], row["status"]) == (reply["type"], reply["status"])
            assert (row["seq"], row["epoch"]) == (reply["seq"], reply["epoch"]) == (row["seq"], 1)
            assert row["error_code"] == reply.get("error", {}).get("code")
            assert (None if row["result"] is None else json.loads(row["result"])) == reply.get("result")
        assert not rows


@pytest.mark.parametrize("part_bytes", [PART_BYTES, 2_000_000], ids=["whole", "in parts"])
def test_a_thousand_mixed_commands_in_one_go_end_where_the_simulation_ends(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr("app.streams.collecting.PART_BYTES", part_bytes)
    lines = mixed_lines(seed=4, number=1_000)
    assert None in lines
    assert any(line is not None and len(line) > LARGE for line in lines)
    simulator = Simulator()
    expected = [json.loads(simulator.line(line or b"")) for line in lines]
    codes = Counter(reply.get("error", {}).get("code", "ok") for reply in expected)
    assert codes["ok"] > 400, codes
    assert codes.keys() >= {
        "MALFORMED", "UNKNOWN_COMMAND", "INVALID_ARGUMENT", "TOO_LARGE", "COLLECTION_MISSING", "HOLD_MISSING",
        "SINCE_VIOLATION",
    }, codes  # fmt: skip

    config = config_under(tmp_path, broker.bootstrap_servers, heartbeat_ms=NO_HEARTBEAT_MS)
    with Running(config, spark) as running:
        sent = running.send(*lines)
        running.wait_for_replies(len(lines), limit_s=120)
        rows = running.table("commands")
        assert_simulated(running, simulator)
        names = Names(running.controller, config.warehouse[0])
        # One row per record, and it says what the reply says.
        assert places(config) == sorted(sent)
        at = {(row["partition"], row["offset"]): row for row in rows}
        for place, reply in zip(sent, expected, strict=True):
            row = at[place]
            assert (row["id"], row["type"], row["status"]) == (reply.get("id"), reply.get("type"), reply["status"])
            error = reply.get("error", {})
            assert (row["error_code"], names.plain(row["error_message"])) == (error.get("code"), error.get("message"))
            assert (None if row["result"] is None else json.loads(row["result"])) == reply.get("result")
        # One reply per record, in the order of the records.
        running.read()
        assert running.reply_count == len(lines)
        ids: dict[str | None, list[Row]] = {}
        for reply in expected:
            ids.setdefault(reply.get("id"), []).append(without_entry(reply))
        got = {id_: [names.plain(without_entry(reply)) for reply in found] for id_, found in running.replies.items()}
        assert got == ids


def test_a_backlog_of_large_records_fits_into_a_small_heap(broker: EmbeddedBroker, tmp_path: Path) -> None:
    config = config_under(tmp_path, broker.bootstrap_servers)
    config = msgspec.structs.replace(config, spark={"spark.driver.memory": "512m"})
    topics = Topics(config.kafka, broker.bootstrap_servers)
    topics.ensure()
    topics.close()
    client = Client(config)
    for number in range(200):
        padding = base64.b64encode(os.urandom(780_000)).decode()
        line = {"type": "reconcile", "id": f"r{number}", "collections": [], "padding": padding}
        assert MAX_MESSAGE_BYTES - 20_000 < len(encoded(line) or b"") < MAX_MESSAGE_BYTES
        client.send(line)
    with Process(config, tmp_path / "process") as process:
        client.wait_for_replies(200)
        process.signal(signal.SIGTERM)
        assert process.wait_for_exit() == EXIT_OK, process.output
    codes = {id_: [reply["error"]["code"] for reply in replies] for id_, replies in client.replies.items()}
    assert codes == {f"r{number}": ["INVALID_ARGUMENT"] for number in range(200)}
    assert places(config) == [(0, offset) for offset in range(200)]
    client.close()


def test_spark_and_deltalake_read_the_same_tables(spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path) -> None:
    config = config_under(tmp_path, broker.bootstrap_servers)
    with Running(config, spark) as running:
        running.send(*[command for command, _ in documented()], b"\xff", None)
        running.wait_for_replies(len(documented()) + 2)
        running.wait_for_tables()
    for name in ("collections", "holds", "shards", "commands", "meta"):
        frame = spark.read.format("delta").load(f"{config.state}/{name}")
        by_spark = [row.asDict(recursive=True) for row in frame.collect()]
        by_deltalake = table(config, name)
        assert by_spark, name
        for row in by_deltalake:
            for column in TIMES:  # Spark gives them in the time of this machine, without a zone
                if row.get(column) is not None:
                    row[column] = row[column].astimezone().replace(tzinfo=None)
        assert sorted(by_spark, key=repr) == sorted(by_deltalake, key=repr), name
    journal = spark.read.format("delta").load(f"{config.state}/journal")
    assert journal.where("origin = 'commands'").count() > 0


def test_commands_on_several_partitions_are_each_applied_once(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    from kafka import KafkaProducer  # noqa: PLC0415  # only here records are spread

    config = config_under(tmp_path, broker.bootstrap_servers, partitions=3)
    with Running(config, spark) as running:
        producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers)
        for number in range(60):
            line = {"type": "reconcile", "id": f"r{number}", "collections": [f"c{number}"]}
            producer.send(config.kafka.commands_topic, encoded(line), partition=number % 3)
        producer.flush(30)
        producer.close()
        running.wait_for_replies(60)
        assert by("id", running.table("commands")).keys() == {f"r{number}" for number in range(60)}
        assert places(config) == [(partition, offset) for partition in range(3) for offset in range(20)]
        assert {id_: len(found) for id_, found in running.replies.items()} == {f"r{number}": 1 for number in range(60)}


def test_leases_end_though_the_topic_ends_with_the_marker_of_a_transaction(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    from kafka import KafkaProducer  # noqa: PLC0415

    config = config_under(tmp_path, broker.bootstrap_servers)
    with Running(config, spark) as running:
        running.ask({"type": "create_collections", "id": "c", "collections": [{"id": "a", **OTHER}]})
        producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, transactional_id="t")
        producer.init_transactions()
        for id_, end in (("held", producer.commit_transaction), ("never", producer.abort_transaction)):
            line = {"type": "acquire_read_holds", "id": id_, "collections": ["a"], "holder": "me", "lease": "1s"}
            producer.begin_transaction()
            producer.send(config.kafka.commands_topic, encoded(line), partition=0)
            end()
        producer.close()
        assert [reply["status"] for reply in running.answers("held")] == ["ok"]
        wait_until(lambda: not running.controller.read(lambda state: state.holds), "the lease has ended")
        assert "never" not in running.replies

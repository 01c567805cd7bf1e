"""How a controller ends when it cannot go on, what it survives, and what its exit code says."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery

from app.broker import EmbeddedBroker
from app.clock import wall_ms
from app.config import Config
from app.controller import Controller
from app.jars import JarsMissing
from app.java import JavaMissing
from app.memory import MemoryInDoubt
from app.records import Record, Topic
from app.service import EXIT_BROKEN, EXIT_GAVE_UP, EXIT_OK, EXIT_USAGE, Service
from app.state.errors import OutcomeUnknown
from app.state.journal import Journal
from app.state.tables import Tables
from app.streams.commands import CommandStream
from app.topics import Topics
from app.work import Work
from tests.e2e.harness import LIMIT_S, Client, Line, Process, Running, by, config_under, encoded, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GIVE_UP_S = 6.0
EXCESS_S = 15.0  # on a busy machine; waits that were not bounded took 21 s and more too long
"""How late it may give up: one answer waited for in vain, the closing of connections, and a busy machine."""
NOBODY = "127.0.0.1:1"


def create(id_: str, *collections: str) -> dict[str, Any]:
    tables = [{"id": each, "data_source": {"kind": "table"}} for each in collections]
    return {"type": "create_collections", "id": id_, "register_ts": 5, "collections": tables}


def config_that_gives_up(tmp_path: Path, bootstrap_servers: str) -> Config:
    return config_under(tmp_path, bootstrap_servers, give_up_after_ms=int(GIVE_UP_S * 1000))


@contextmanager
def timed() -> Iterator[None]:
    """It gives up when it said it would: not before, and not much later."""
    began = time.monotonic()
    yield
    took_s = time.monotonic() - began
    # The time runs from when something worked last: that may be a heartbeat ago.
    assert GIVE_UP_S - 1 < took_s < GIVE_UP_S + EXCESS_S, took_s


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_controller_whose_kafka_is_gone_for_good_gives_up_in_time(
    spark: SparkSession, tmp_path: Path, how: signal.Signals
) -> None:
    with (
        EmbeddedBroker(tmp_path / "kafka") as own,
        Running(config_that_gives_up(tmp_path, own.bootstrap_servers), spark) as running,
    ):
        running.ask(create("c1", "orders"))
        assert own.pid is not None
        os.kill(own.pid, how)
        with timed():
            running.wait_for_end(EXIT_GAVE_UP)
        own.kill()


def test_a_kafka_that_takes_connections_and_never_answers_is_given_up_in_time(
    spark: SparkSession, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        threads = threading.active_count()
        service = Service(config_that_gives_up(tmp_path, address(silent)), spark, address(silent))
        with timed():
            assert service.run() == EXIT_GAVE_UP
        # The writer of the tables is still there, but none of the attempts to connect.
        wait_until(lambda: threading.active_count() <= threads + 1, "no thread is left over")


def address(server: socket.socket) -> str:
    host, port = server.getsockname()
    return f"{host}:{port}"


def test_a_process_that_never_finds_its_kafka_exits_with_5(tmp_path: Path) -> None:
    config = config_that_gives_up(tmp_path, NOBODY)
    with Process(config, tmp_path / "process") as process:
        process.wait_for_output("controller booted")
        with timed():
            assert process.wait_for_exit() == EXIT_GAVE_UP
        assert f"No Kafka broker can be reached ({NOBODY}: Connection refused)." in process.output
        assert "gave up, nothing worked for" in process.output


def test_a_controller_whose_jvm_is_gone_says_so_and_exits_with_5_at_once(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    config = config_under(tmp_path, broker.bootstrap_servers)  # it would try for two minutes
    with Process(config, tmp_path / "process") as process:
        process.wait_for_output("Holdfast is running")
        (jvm,) = children(process.pid)
        os.kill(jvm, signal.SIGKILL)
        assert process.wait_for_exit(60) == EXIT_GAVE_UP
        assert "gave up, the JVM in which Spark ran has ended" in process.output
    assert not list(Path(config.streams.checkpoints).iterdir())


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_a_merge_that_fails_once_is_made_good(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = 1
    merge = Tables.merge

    def failing(tables: Tables, *args: Any, **named: Any) -> None:
        nonlocal failures
        if armed.is_set() and failures:
            failures -= 1
            raise OutcomeUnknown("the store is away for a moment")
        merge(tables, *args, **named)

    armed = threading.Event()
    monkeypatch.setattr(Tables, "merge", failing)
    with Running(config_under(tmp_path, broker.bootstrap_servers), spark) as running:
        running.ask(create("c1", "orders"))
        armed.set()
        running.ask(create("c2", "users"))
        wait_until(lambda: not failures, "a merge has failed")
        wait_until(lambda: running.controller.failure is None, "someone writes the tables again")
        assert by("id", running.table("collections")).keys() == {"orders", "users"}
        running.ask(create("c3", "events"))
        assert by("id", running.table("collections")).keys() == {"orders", "users", "events"}
        assert running.controller.epoch == 1


def test_what_fails_once_and_passes_does_not_end_once_before_its_time(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = []
    apply = Controller.apply

    def failing(controller: Controller, *args: Any) -> Any:
        if not failures:
            failures.append(OutcomeUnknown("the store is away for a moment"))
            raise failures[0]
        return apply(controller, *args)

    monkeypatch.setattr(Controller, "apply", failing)
    config = config_under(tmp_path, broker.bootstrap_servers)
    topics = Topics(config.kafka, broker.bootstrap_servers)
    topics.ensure()
    topics.close()
    client = Client(config)
    client.send(create("c1", "orders"))
    assert Service(config, spark, broker.bootstrap_servers).run(once=True) == EXIT_OK
    assert failures
    (reply,) = client.answers("c1")
    assert reply["status"] == "ok"
    client.close()


def test_why_an_entry_failed_is_said_also_when_the_work_on_shards_is_the_first_to_notice(
    spark: SparkSession,
    broker: EmbeddedBroker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    noticed = threading.Event()
    failures: list[OutcomeUnknown] = []
    append, process, tick = Journal.append, CommandStream._process, Work.tick

    def failing(journal: Journal, *, origin: str, **named: Any) -> int:
        if origin == "commands" and not failures:
            failures.append(OutcomeUnknown("No space left on device"))
            raise failures[0]
        return append(journal, origin=origin, **named)

    def slow(stream: CommandStream, frame: Any) -> None:
        try:
            process(stream, frame)
        except OutcomeUnknown:
            assert noticed.wait(LIMIT_S)
            raise

    def noticing(work: Work) -> None:
        try:
            tick(work)
        except MemoryInDoubt:
            noticed.set()
            raise

    monkeypatch.setattr(Journal, "append", failing)
    monkeypatch.setattr(CommandStream, "_process", slow)
    monkeypatch.setattr(Work, "tick", noticing)
    config = config_under(tmp_path, broker.bootstrap_servers, heartbeat_ms=3_600_000)
    with Running(config, spark) as running:
        (reply,) = running.ask(create("c1", "orders"))
        assert reply["status"] == "ok"
    assert noticed.is_set()
    assert "nothing is lost: OutcomeUnknown: No space left on device" in caplog.text


def test_a_query_that_does_not_end_in_time_is_left_behind_and_another_one_goes_on(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when Kafka's client waits for a broker that is gone. It may come back, and find what the other one reads."""
    left: list[StreamingQuery] = []
    stop, merge = StreamingQuery.stop, Tables.merge

    def too_slow(query: StreamingQuery) -> None:
        if armed.is_set() and not left and (query.name or "").startswith("commands"):
            left.append(query)
            raise PySparkException("TimeoutException: Stream Execution thread failed to stop")
        stop(query)

    def failing(tables: Tables, *args: Any, **named: Any) -> None:
        if armed.is_set() and not left:
            raise OutcomeUnknown("the store is away for a moment")
        merge(tables, *args, **named)

    armed = threading.Event()
    monkeypatch.setattr(StreamingQuery, "stop", too_slow)
    monkeypatch.setattr(Tables, "merge", failing)
    with Running(config_under(tmp_path, broker.bootstrap_servers), spark) as running:
        running.ask(create("c1", "orders"))
        armed.set()
        running.ask(create("c2", "users"))
        wait_until(lambda: left, "a query is left behind")
        wait_until(lambda: running.controller.failure is None, "someone writes the tables again")
        running.ask(create("c3", "events"))
        assert by("id", running.table("commands")).keys() == {"c1", "c2", "c3"}, "each is applied once"
        stop(left[0])


def test_tables_that_cannot_be_written_for_long_end_the_controller(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although it answers commands all the while: its users would look at tables that stay behind for ever."""
    with Running(config_that_gives_up(tmp_path, broker.bootstrap_servers), spark) as running:

        def failing(*_: Any, **__: Any) -> None:
            raise OutcomeUnknown("the store takes no tables")

        monkeypatch.setattr(Tables, "merge", failing)
        running.ask(create("c1", "orders"))
        running.wait_for_end(EXIT_GAVE_UP)


# What is wrong for good: nothing is tried again.


def entry_without_tables(config: Config, monkeypatch: pytest.MonkeyPatch, *lines: Line) -> Path:
    """A journal with an entry that the tables do not have yet; the entry's file."""
    controller = Controller(config)
    controller.boot()
    controller.wait_for_tables()
    with monkeypatch.context() as patched:
        failed = threading.Event()

        def failing(*_: Any, **__: Any) -> None:
            failed.set()
            raise OutcomeUnknown("killed before it merged")

        patched.setattr(Tables, "merge", failing)
        records = [Record(0, offset, wall_ms(), encoded(line) or b"") for offset, line in enumerate(lines)]
        controller.apply(Topic("t", "id"), records)
        assert failed.wait(LIMIT_S)
        controller.close()
    (file,) = Path(config.state, "journal").glob(f"{controller.seq:020d}-*.parquet")
    return file


def alter(file: Path, entity: str, old: str, new: str) -> None:
    """Changes the text of the entry's rows of one entity, on disk."""
    table = pq.read_table(file)
    values = [
        value.replace(old, new) if kind == entity and value is not None else value
        for kind, value in zip(table["entity"].to_pylist(), table["value"].to_pylist(), strict=True)
    ]
    assert values != table["value"].to_pylist(), table.to_pylist()
    number = table.schema.get_field_index("value")
    pq.write_table(table.set_column(number, "value", pa.array(values, pa.string())), file)


def files_of(config: Config) -> dict[str, tuple[int, int]]:
    """Every file under the root, with its size and the time of its last change."""
    stats = {str(path): path.stat() for path in Path(config.root).rglob("*") if path.is_file()}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def run_quickly(config: Config, spark: SparkSession) -> int:
    """The exit code of a service that ends before it asks for Kafka."""
    return Service(config, spark, NOBODY).run()


def test_a_journal_that_breaks_a_rule_is_not_taken_up(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_under(tmp_path, NOBODY)
    file = entry_without_tables(config, monkeypatch, create("c1", "orders"))
    original = file.read_bytes()
    for entity, old, new, problem in (
        ("collection", '"implied":', '"implied":1', "The read frontier of 'orders' is"),
        ("collection", '"id":', '"di":', "cannot be read"),
    ):
        file.write_bytes(original)
        alter(file, entity, old, new)
        before = files_of(config)
        caplog.clear()
        with caplog.at_level(logging.CRITICAL):
            assert run_quickly(config, spark) == EXIT_BROKEN
        assert problem in caplog.text
        assert files_of(config) == before, "nothing was touched"
    with Process(config, tmp_path / "process") as process:
        assert process.wait_for_exit() == EXIT_BROKEN
        assert "halted, the state breaks a rule; nothing more is touched" in process.output


def test_a_state_of_a_newer_version_is_not_touched(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_under(tmp_path, NOBODY)
    entry_without_tables(config, monkeypatch, create("c1", "orders"))
    before = files_of(config)
    monkeypatch.setattr("app.state.recovery.FORMAT", 0)  # as if we were older than the state
    assert run_quickly(config, spark) == EXIT_USAGE
    assert "written by a newer version of Holdfast" in caplog.text
    assert files_of(config) == before


def test_a_spark_that_does_not_start_is_a_matter_of_configuration(tmp_path: Path) -> None:
    config = msgspec.structs.replace(config_under(tmp_path, NOBODY), spark={"spark.master": "nonsense"})
    with Process(config, tmp_path / "process") as process:
        assert process.wait_for_exit() == EXIT_USAGE
        assert "holdfast: Spark cannot be started with master 'nonsense'" in process.output
        assert "Traceback" not in process.output


def test_without_java_or_jars_nothing_is_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from app import main  # noqa: PLC0415  # so that its log handlers are made under this test

    file = tmp_path / "config.yaml"
    file.write_bytes(msgspec.yaml.encode({"root": str(tmp_path / "root"), "kafka": {"bootstrap_servers": NOBODY}}))
    for error in (JavaMissing("No Java was found."), JarsMissing("Could not fetch.")):

        def missing(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(main, "session", missing)
        assert main.main(["--config", str(file)]) == EXIT_USAGE
        assert f"holdfast: {error}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"give_up_after": "soon"}, "give_up_after"),
        ({"kafka": {"bootstrap_servers": "nowhere"}}, "'nowhere' is no address of a broker"),
        ({"kafka": {"bootstrap_servers": NOBODY, "options": {"sasl.pasword": "s3cret"}}}, "'sasl.pasword'"),
        ({"kafka": {"bootstrap_servers": NOBODY, "options": {"request.timeout.ms": "s3cret"}}}, "request.timeout.ms"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_said_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    from app.main import main  # noqa: PLC0415  # so that its log handlers are made under this test

    file = tmp_path / "config.yaml"
    file.write_bytes(msgspec.yaml.encode({"root": str(tmp_path / "root"), **change}))
    assert main(["--config", str(file)]) == EXIT_USAGE
    told = capfd.readouterr().err
    assert said in told
    assert "s3cret" not in told
    assert not (tmp_path / "root").exists()

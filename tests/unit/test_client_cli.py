"""The command line: what is typed becomes the right message, the tables are shown, failures are told in a sentence."""

from __future__ import annotations

import json
import logging
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app import status
from app.cli import main
from app.clock import wall_ms
from app.commandline.arguments import parser
from app.commandline.help import EXAMPLES
from app.commandline.settings import UsageError
from app.commandline.times import duration, frontier, moment, parse_time, relative
from app.protocol import decode
from app.state import tables
from tests.unit.client_world import NOW, TABLE, World, view


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Not where conf/local.yaml is: tests say where things are."""
    monkeypatch.chdir(tmp_path)
    yield
    logging.getLogger("kafka").setLevel(logging.NOTSET)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    world = World()
    world.create(orders=TABLE, totals=view("orders"))
    world.run("update_parameters", parameters={"undrop_window": "1h"})
    world.policy("orders", kind="lag_writes_by", lag="1h")
    world.run("upper", collection="orders", upper=wall_ms() - 90_000)
    world.hold("totals", holder="nightly", purpose="month end", lease="15m", id="c9")
    world.run("drop_collections", collections=["totals"])
    world.write(tmp_path / "root", seq=7)
    return tmp_path / "root"


def message(*arguments: str) -> dict[str, Any]:
    """What would be sent; it must be a command that the protocol accepts."""
    options = parser().parse_args(arguments)
    made: dict[str, Any] = options.message(options)[0]
    assert decode(json.dumps({"id": "x", **made}).encode()).command is not None
    return made


def test_collections_are_described_by_options() -> None:
    assert message("create", "orders", "--table", "--schema", "k STRING", "--register-ts", "5") == {
        "type": "create_collections",
        "collections": [{"id": "orders", "data_source": {"kind": "table"}, "schema": "k STRING"}],
        "register_ts": 5,
    }
    sources = [
        (["--inputs", "a", "b"], {"kind": "other", "inputs": ["a", "b"]}),
        (["--from", "a"], {"kind": "sink", "from": "a"}),
        (["--remap", "r", "--connection", "kafka"], {"kind": "ingestion", "remap": "r", "connection": "kafka"}),
        (
            ["--ingestion", "i", "--envelope", "none"],
            {"kind": "ingestion_export", "ingestion": "i", "envelope": "none"},
        ),
        (["--kind", "webhook"], {"kind": "webhook"}),
    ]
    for options, source in sources:
        made = message("create", "x", *options)
        assert made["collections"][0]["data_source"] == source
        assert "register_ts" not in made


def test_a_table_is_readable_from_now_on_unless_said_otherwise() -> None:
    assert abs(message("create", "orders")["register_ts"] - wall_ms()) < 60_000
    options = parser().parse_args(["create", "orders", "--timeline", "mine"])
    with pytest.raises(UsageError, match="--register-ts"):
        options.message(options)


def test_descriptions_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text('[{"id":"orders","data_source":{"kind":"webhook"}}]')
    assert message("create", "--file", str(file))["collections"][0]["id"] == "orders"


def test_policies_are_combined() -> None:
    assert message("policy", "orders", "--lag", "7d", "--granularity", "1m")["policies"] == [
        {"collection": "orders", "policy": {"kind": "lag_writes_by", "lag": "7d", "granularity": "1m"}}
    ]
    several = message("policy", "a", "b", "--lag", "100", "--valid-from", "2026-01-01", "--step-back")
    assert [each["collection"] for each in several["policies"]] == ["a", "b"]
    assert several["policies"][0]["policy"] == {
        "kind": "multiple",
        "policies": [
            {"kind": "valid_from", "frontier": 1_767_225_600_000},
            {"kind": "lag_writes_by", "lag": "100ms"},
            {"kind": "step_back"},
        ],
    }


def test_every_other_command_is_made() -> None:
    assert message("params", "undrop_window=1h", "finalize_shards=false", "hold_max_lease=null")["parameters"] == {
        "undrop_window": "1h",
        "finalize_shards": False,
        "hold_max_lease": None,
    }
    acquired = message("hold", "acquire", "orders", "--holder", "me", "--at", "17", "--lease", "15m", "--pin-files")
    assert (acquired["holder"], acquired["at"], acquired["lease"], acquired["pin_files"]) == ("me", 17, "15m", True)
    assert message("hold", "acquire", "orders")["holder"]
    assert message("hold", "downgrade", "c/a", "c/b", "--to", "9")["holds"] == [
        {"hold": "c/a", "to": 9},
        {"hold": "c/b", "to": 9},
    ]
    for action in ("renew", "release", "clone", "merge"):
        assert message("hold", action, "c/a")["type"] == f"{action}_read_holds"
    for name in ("drop", "undrop", "reconcile"):
        assert message(name, "a", "b")["collections"] == ["a", "b"]
    altered = message("alter", "a", "b", "--schema", "k STRING", "--expected-version", "0")
    assert (altered["existing"], altered["new"], altered["expected_version"]) == ("a", "b", 0)


def test_common_options_are_understood_before_and_after_the_subcommand() -> None:
    for arguments in (["--root", "/r", "--json", "status"], ["status", "--root", "/r", "--json"]):
        options = parser().parse_args(arguments)
        assert (options.root, options.json) == ("/r", True)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_every_help_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*name.removeprefix("holdfast").split(), "--help"])
    assert stopped.value.code == 0
    assert EXAMPLES[name] in capsys.readouterr().out


def test_the_table_position_is_the_one_that_the_controller_records() -> None:
    assert status.POSITION == tables.POSITION
    assert set(status.TABLES) < set(tables.TABLES)


def test_status_shows_frontiers_lag_and_who_keeps_what(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--root", str(root)]) == 0
    orders, totals = (line.split("  ") for line in capsys.readouterr().out.splitlines()[1:3])
    lag, holds, kept_by = [cell.strip() for cell in orders if cell.strip()][-3:]
    assert re.fullmatch("1m [345][0-9]s", lag)  # the machine may be busy
    assert (holds, kept_by) == ("0", "totals: undrop window")
    assert totals[0] == "totals (dropped)"
    assert main(["status", "orders", "--root", str(root), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["seq"] == 7
    assert [row["id"] for row in answer["collections"]] == ["orders"]
    assert 90_000 <= answer["collections"][0]["lag_ms"] < 120_000


def test_why_dump_holds_and_params_read_the_tables(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "orders", "--root", str(root)]) == 0
    assert "The hold c9/totals of 'nightly' on totals" in capsys.readouterr().out
    assert main(["hold", "list", "--holder", "nightly", "--root", str(root), "--json"]) == 0
    (hold,) = json.loads(capsys.readouterr().out)
    assert (hold["hold"], hold["acquired_at"], hold["lease_expires_at"]) == ("c9/totals", NOW, NOW + 900_000)
    assert main(["hold", "list", "--root", str(root)]) == 0
    assert "month end" in capsys.readouterr().out
    assert main(["params", "--root", str(root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["undrop_window"] == 3_600_000
    assert main(["dump", "--root", str(root), "--json", "--commands"]) == 0
    dumped = json.loads(capsys.readouterr().out)
    assert dumped["collections"][0]["read_policy"]["lag"] == 3_600_000
    assert dumped["commands"] == []


def test_the_dump_of_the_tables_is_that_of_the_simulator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = World()
    world.create(orders=TABLE, totals=view("orders"))
    world.hold("orders", lease=253_402_300_799_999)  # ends after the last year that Python's dates know
    world.write(tmp_path, seq=3)
    assert main(["dump", "--root", str(tmp_path)]) == 0
    dumped, wanted = json.loads(capsys.readouterr().out), world.dump()
    assert {name: dumped[name] for name in ("collections", "holds", "shards")} == {
        name: wanted[name] for name in ("collections", "holds", "shards")
    }


def test_a_read_waits_for_the_seq_of_a_reply(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--root", str(root), "--seq", "7"]) == 0
    capsys.readouterr()
    assert main(["status", "--root", str(root), "--seq", "8", "--timeout", "0.3"]) == 5
    assert "are at seq 7 and did not reach 8 within 0.3 s" in capsys.readouterr().err


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    begun = time.monotonic()
    code = main(arguments)
    assert time.monotonic() - begun < 5
    error = capsys.readouterr().err
    assert error.startswith("holdfast: ")
    assert len(error.splitlines()) == 1
    return code, error


def test_what_is_wrong_is_told_in_one_sentence(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    code, error = failure(capsys, "status")
    assert (code, "There is no conf/local.yaml here" in error) == (2, True)
    code, error = failure(capsys, "status", "--root", str(tmp_path / "none"))
    assert (code, "There is no Delta table at" in error) == (2, True)
    code, error = failure(capsys, "status", "--config", "none.yaml")
    assert (code, "none.yaml" in error) == (2, True)
    code, error = failure(capsys, "why", "ordres", "--root", str(root))
    assert (code, "Did you mean orders?" in error) == (1, True)
    code, error = failure(capsys, "drop", "x", "--bootstrap-servers", address)
    assert (code, "No Kafka broker can be reached" in error) == (5, True)
    code, error = failure(capsys, "drop", "x", "--bootstrap-servers", "nonsense")
    assert (code, "is no address of a broker" in error) == (2, True)
    code, error = failure(capsys, "drop", "not an id", "--root", str(root))
    assert (code, "Expected the id of a collection" in error) == (2, True)
    code, error = failure(capsys, "params", "x", "--root", str(root))
    assert (code, "NAME=VALUE" in error) == (2, True)
    code, error = failure(capsys, "send", str(tmp_path / "none"), "--bootstrap-servers", address)
    assert code == 2


def test_a_controller_that_does_not_run_is_told_with_how_to_start_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = failure(capsys, "drop", "x", "--root", str(tmp_path))
    assert (code, error.count("is not running"), error.count("./spark-submit.sh")) == (5, 1, 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    (tmp_path / "broker.json").write_text(json.dumps({"bootstrap_servers": address, "pid": 1}))
    code, error = failure(capsys, "drop", "x", "--root", str(tmp_path))
    assert (code, error.count("is not running"), error.count("./spark-submit.sh")) == (5, 1, 1)
    (tmp_path / "broker.json").write_text("{")
    code, error = failure(capsys, "drop", "x", "--root", str(tmp_path))
    assert "broker.json does not say where the broker is" in error


def test_with_json_failures_are_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drop", "x", "--root", str(tmp_path), "--json"]) == 5
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "NOT_ANSWERING"


def test_times_as_people_write_and_read_them() -> None:
    assert parse_time("2026-01-31T12:00:00Z") == parse_time("2026-01-31T13:00:00+01:00") == 1_769_860_800_000
    assert parse_time("17") == 17
    assert abs(parse_time("now-1h") - (wall_ms() - 3_600_000)) < 60_000
    with pytest.raises(ValueError, match="Expected a time"):
        parse_time("yesterday")
    assert parse_time(moment(1_769_860_800_123)) == 1_769_860_800_123
    assert [frontier(None), frontier(5), frontier(1_769_860_800_000), frontier(1_769_860_800_000, "mine")] == [
        "[]",
        "5",
        "2026-01-31T12:00:00Z",
        "1769860800000",
    ]
    assert [duration(each) for each in (0, 5, 1_500, 60_000, 3_661_000, 273_600_000)] == [
        "0",
        "5ms",
        "1s 500ms",
        "1m",
        "1h 1m",
        "3d 4h",
    ]
    assert (relative(1_000, 4_550), relative(4_550, 1_000)) == ("3s ago", "in 3s")

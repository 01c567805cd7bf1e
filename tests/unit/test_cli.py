"""`holdfast simulate` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli import main

LINES = """\
{"type":"create_collections","id":"c1","register_ts":5,"collections":[{"id":"orders","data_source":{"kind":"table"}}]}

not json
{"type":"dump"}
"""


def simulate(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app.cli", "simulate", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def test_each_line_of_standard_input_gets_one_line() -> None:
    done = simulate(text=LINES)
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (0, "")
    assert [reply["status"] for reply in replies] == ["ok", "error", "error", "ok"]
    assert [reply.get("error", {}).get("code") for reply in replies[1:3]] == ["MALFORMED", "MALFORMED"]
    assert replies[3]["collections"][0]["read_frontier"] == 5


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text('{"type":"reconcile","id":"r","collections":["x"]}')
    assert json.loads(simulate(str(file)).stdout)["result"] == {"extra": [], "missing": ["x"]}


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    done = simulate(str(tmp_path / "none"))
    assert done.returncode == 2
    assert done.stderr.startswith("holdfast: cannot read")


def test_the_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["simulate", "--help"])
    assert stopped.value.code == 0
    assert "holdfast simulate commands.jsonl" in capsys.readouterr().out

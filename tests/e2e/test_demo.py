"""The demo runs from beginning to end, in a directory of its own, and leaves nothing behind but its log."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.e2e.harness import wait_until

JOB = Path(__file__).parents[2] / "jobs" / "demo.py"
LIMIT_S = 900  # on a very busy machine; the aim, two minutes, is for a quiet one


def start(directory: Path) -> subprocess.Popen[str]:
    (directory / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(directory / "tmp"), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, str(JOB)],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def roots(directory: Path) -> list[str]:
    return [each.name for each in (directory / "tmp").iterdir() if each.name.startswith("holdfast-demo-")]


def test_it_tells_its_story_and_removes_its_root(tmp_path: Path) -> None:
    with start(tmp_path) as demo:
        output, errors = demo.communicate(timeout=LIMIT_S)
    assert (demo.returncode, errors) == (0, "")
    lines = output.splitlines()
    assert len(lines) <= 110
    tables = re.findall(r"^  (\w+(?: \(dropped\))?) +(\S+)  (\S+)  \d+ +[\d,]+ +(.+)$", output, re.MULTILINE)
    for row in (
        ("orders", "12:00", "12:30", "no policy"),
        ("orders", "12:29", "12:50", "totals: policy"),
        ("orders", "12:40", "12:50", "policy"),
        ("orders", "12:40", "13:30", "hold of 'report'"),
        ("orders", "13:10", "13:30", "hold of 'report'"),
        ("orders (dropped)", "13:10", "13:30", "hold of 'report'"),
    ):
        assert row in tables
    (reads,) = re.findall(r"It reads them (\d+) times", output)
    assert int(reads) >= 3, "before, while and after"
    before, after = re.findall(r"(\d+) files with [\d,]+ bytes became (\d+) with", output)[0]
    assert int(after) < int(before)
    for words in ("refused, READ_BEFORE_SINCE", "lease expired", "COLLECTION_MISSING", "'finalized'"):
        assert words in output
    assert roots(tmp_path) == []
    assert (tmp_path / ".holdfast" / "logs" / "demo.log").exists()


def test_an_interrupt_ends_it_tidily(tmp_path: Path) -> None:
    with start(tmp_path) as demo:
        assert demo.stdout is not None
        assert "Starting" in demo.stdout.readline()
        wait_until(lambda: roots(tmp_path), "it has something to remove")
        demo.send_signal(signal.SIGTERM)
        _, errors = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 130
    assert "Interrupted." in errors
    assert "Traceback" not in errors
    assert roots(tmp_path) == []

"""What the scripts make of their arguments; what they run is put in place of Python here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The script, set up already, with a Python that says what it is given."""
    place = tmp_path / "repository"
    python = place / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    (place / "setup-venv.sh").write_text("ensure_java() { :; }\n")
    shutil.copy(ROOT / "spark-submit.sh", place)
    return place


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ([], []),
        (["--once"], ["--once"]),
        (["--config", "my own.yaml", "--once"], ["--config", "{here}/my own.yaml", "--once"]),
        (["--read-only", "--config=conf/my.yaml"], ["--read-only", "--config={here}/conf/my.yaml"]),
        (["--config", "/etc/my.yaml"], ["--config", "/etc/my.yaml"]),
        (["--config"], ["--config"]),
    ],
)
def test_a_configuration_is_looked_for_from_where_one_is(
    repository: Path, tmp_path: Path, given: list[str], passed: list[str]
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    run = subprocess.run(
        [str(repository / "spark-submit.sh"), *given], cwd=here, capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines() == ["jobs/controller.py", *(each.format(here=here) for each in passed)]

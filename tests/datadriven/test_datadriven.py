"""Runs the text files beside it; README.md explains them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.core.errors import Code
from app.messages import COMMAND_TYPES
from app.simulate import Simulator
from tests.datadriven.views import view

FILES = sorted(Path(__file__).parent.glob("*.txt"))
# Only a read or a defect of ours is answered with these: tests of reading, and tests/unit/test_internal.py, show them.
NOT_FROM_COMMANDS = {Code.READ_BEFORE_SINCE, Code.INVALID_USAGE, Code.INTERNAL}


def answer(simulator: Simulator, line: str) -> list[str]:
    if line in ("collections", "holds", "shards"):
        return view(simulator, line)
    written_out = re.sub(r"<<(.*?) \* (\d+)>>", lambda match: ",".join([match[1]] * int(match[2])), line)
    return [simulator.line(written_out.encode()).decode()]


def rerun(text: str) -> Iterator[str]:
    """The file as it would be written now: the same inputs, with the answers that they get."""
    simulator = Simulator()
    inputs: list[str] = []
    in_outputs = False
    for line in text.splitlines():
        if in_outputs and line:
            continue
        in_outputs = in_outputs and bool(line)
        yield line
        if line == "----":
            in_outputs = True
            for each in inputs:
                yield from answer(simulator, each)
            inputs = []
        elif line and not line.startswith("#"):
            inputs.append(line)
    assert not inputs, f"these lines have no ---- after them: {inputs}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_answers_are_as_written(file: Path) -> None:
    before = file.read_text()
    after = "\n".join(rerun(before)) + "\n"
    if os.environ.get("REWRITE"):
        file.write_text(after)
    else:
        assert after == before


def test_every_command_and_every_error_code_is_shown() -> None:
    text = "".join(file.read_text() for file in FILES)
    for command in COMMAND_TYPES:
        assert f'"type":"{command}","status":"ok"' in text, f"no file shows {command} succeeding"
    for code in set(Code) - NOT_FROM_COMMANDS:
        assert f'"code":"{code.value}"' in text, f"no file shows {code.value}"

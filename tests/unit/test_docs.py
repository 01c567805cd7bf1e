"""The documentation is true: its examples run, its schema is the one that the program has, nothing is left out."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from app.core.errors import Code
from app.core.parameters import Parameters
from app.protocol import COMMAND_TYPES, json_schema
from app.simulate import Simulator

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
EXAMPLES = ROOT / "examples.jsonl"
DOCS = ROOT / "docs"
COMMANDS = DOCS / "commands.md"
SCHEMA = DOCS / "commands.schema.json"


def matches(file: Path, current: str) -> bool:
    """Whether a generated file is up to date; with REWRITE=1 it is from now on."""
    if os.environ.get("REWRITE"):
        file.write_text(current)
    return file.read_text() == current


def with_replies(text: str) -> str:
    """The page with the replies that its commands get, all of them run in one simulator."""
    simulator = Simulator()

    def answer(example: re.Match[str]) -> str:
        reply = simulator.line(example["command"].encode()).decode()
        return f"```json command\n{example['command']}\n```\n```json reply\n{reply}\n```"

    return re.sub(r"```json command\n(?P<command>.*)\n```\n```json reply\n(?:.*\n)?```", answer, text)


def test_the_examples_of_the_commands_get_the_replies_shown() -> None:
    assert matches(COMMANDS, with_replies(COMMANDS.read_text()))


def test_the_tour_of_the_readme_is_real() -> None:
    text = README.read_text()
    (lines,) = re.findall(r"```json lines\n(.*?)```", text, re.DOTALL)
    simulator = Simulator()
    replies = "".join(simulator.line(line.encode()).decode() + "\n" for line in lines.splitlines())
    current = re.sub(r"```json replies\n.*?```", lambda _: f"```json replies\n{replies}```", text, flags=re.DOTALL)
    assert matches(README, current)
    assert matches(EXAMPLES, lines)


def test_every_command_error_and_parameter_is_documented() -> None:
    text = COMMANDS.read_text()
    for command in COMMAND_TYPES:
        assert f"## {command}\n" in text
        assert f'"type":"{command}","id"' in text
    for name in [code.value for code in Code] + list(Parameters.__struct_fields__):
        assert f"| `{name}` |" in text


def test_the_json_schema_is_up_to_date() -> None:
    assert matches(SCHEMA, json.dumps(json_schema(), indent=2) + "\n"), (
        "run REWRITE=1 ./test.sh tests/unit/test_docs.py"
    )

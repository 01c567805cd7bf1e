"""The documentation is true: its examples run, its schema is the one that the program has, nothing is left out."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from app.config import Config, load_config
from app.core.creating import MAX_LEVELS
from app.core.errors import Code
from app.core.holding import MAX_HOLD_ID
from app.core.parameters import Parameters
from app.core.schema import MAX_CHARACTERS
from app.jars import spark_home
from app.messages import COMMAND_TYPES, json_schema
from app.protocol import MAX_IDS, MAX_MESSAGE_BYTES
from app.simulate import Simulator
from app.state.schemas import SCHEMAS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXAMPLES = DOCS / "examples.jsonl"
SIMULATE = DOCS / "simulate.md"
OPERATIONS = DOCS / "operations.md"
TABLES = DOCS / "tables.md"
GUARANTEES = DOCS / "guarantees.md"
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


def test_the_example_of_the_simulator_is_real() -> None:
    text = SIMULATE.read_text()
    (lines,) = re.findall(r"```json lines\n(.*?)```", text, re.DOTALL)
    simulator = Simulator()
    replies = "".join(simulator.line(line.encode()).decode() + "\n" for line in lines.splitlines())
    current = re.sub(r"```json replies\n.*?```", lambda _: f"```json replies\n{replies}```", text, flags=re.DOTALL)
    assert matches(SIMULATE, current)
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


def config_keys(section: type, prefix: str = "") -> list[str]:
    keys = []
    for field in msgspec.structs.fields(section):
        name = f"{prefix}{field.name}"
        keys += config_keys(field.type, f"{name}.") if isinstance(field.type, type(msgspec.Struct)) else [name]
    return keys


def test_every_configuration_key_is_documented() -> None:
    keys = config_keys(Config)
    assert "kafka.options" in keys
    assert "give_up_after" in keys
    section = OPERATIONS.read_text().partition("\n## Configuration\n")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `([a-z_.]+)` \|", section, re.MULTILINE)
    assert sorted(documented) == sorted(keys)


def test_every_column_of_every_table_is_documented_with_its_type() -> None:
    types = {"string": "STRING", "int64": "BIGINT", "int32": "INT", "bool": "BOOLEAN"}
    text = TABLES.read_text()
    for name, schema in SCHEMAS.items():
        section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        documented = re.findall(r"^\| `(\w+)` \| ([A-Z]+)", section, re.MULTILINE)
        expected = [
            (field.name, types.get(str(field.type), "ARRAY" if "list" in str(field.type) else "TIMESTAMP"))
            for field in schema.columns
        ]
        assert documented == expected, name


def test_the_limits_are_those_of_the_program() -> None:
    text = GUARANTEES.read_text()
    for limit in (MAX_MESSAGE_BYTES, MAX_IDS, MAX_CHARACTERS, MAX_HOLD_ID, MAX_LEVELS):
        assert re.search(rf"^\|.*\| {limit:,}\b", text, re.MULTILINE), limit


def test_every_link_between_the_pages_leads_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md", *DOCS.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_configuration_for_a_cluster_fits_together() -> None:
    file = ROOT / "conf" / "cluster.yaml"
    config = load_config(file, environment=dict.fromkeys(re.findall(r"\$\{(\w+)\}", file.read_text()), "x"))
    places = [config.root, *config.warehouse, config.streams.checkpoints]
    (scheme,) = {urlsplit(place).scheme for place in places}
    assert config.spark[f"spark.delta.logStore.{scheme}.impl"]
    assert f"spark.hadoop.fs.{scheme}.endpoint.region" in config.spark
    versions = dict(package.rsplit(":", 1) for package in str(config.spark["spark.jars.packages"]).split(","))
    (hadoop,) = (spark_home() / "jars").glob("hadoop-client-api-*.jar")
    assert hadoop.stem.removeprefix("hadoop-client-api-") == versions["org.apache.hadoop:hadoop-aws"]
    assert versions["org.apache.hadoop:hadoop-aws"] in OPERATIONS.read_text()

"""The subcommands that send a command: what is on the command line becomes one message, and its reply is printed."""

from __future__ import annotations

import argparse
import getpass
import json
import platform
import sys
from pathlib import Path
from typing import Any

from app.client import Holdfast
from app.client_errors import InvalidArgument, refusal
from app.clock import wall_ms
from app.commandline.output import OK, print_reply
from app.commandline.settings import Settings, UsageError
from app.commandline.showing import print_status
from app.core.descriptions import DEFAULT_TIMELINE
from app.protocol import decode

Message = dict[str, Any]


def create(options: argparse.Namespace) -> tuple[Message, str]:
    if options.file is not None:
        if options.collections:
            raise UsageError("Give either the ids of collections, or --file.")
        given = read_json(options.file)
        message = given if isinstance(given, dict) and "collections" in given else {"collections": given}
        if not isinstance(message["collections"], list):
            raise UsageError(f"{options.file} must hold a list of collections.")
    else:
        if not options.collections:
            raise UsageError("Say which collections to create, or give a --file that describes them.")
        message = {"collections": [_description(options, id) for id in options.collections]}
    if options.register_ts is not None:
        message["register_ts"] = options.register_ts
    elif message.get("register_ts") is None and _new_tables(message["collections"]):
        message["register_ts"] = wall_ms()
    ids = [str(each.get("id")) for each in message["collections"] if isinstance(each, dict)]
    return {"type": "create_collections", **message}, f"Created: {', '.join(ids)}"


def _new_tables(collections: list[Any]) -> bool:
    """Whether there are tables to which `register_ts` = now applies."""
    tables = [
        each
        for each in collections
        if isinstance(each, dict)
        and isinstance(each.get("data_source"), dict)
        and each["data_source"].get("kind") == "table"
    ]
    if any(each.get("timeline", DEFAULT_TIMELINE) != DEFAULT_TIMELINE for each in tables):
        raise UsageError("A table on a timeline of its own needs --register-ts: from which time on it can be read.")
    return bool(tables)


def _description(options: argparse.Namespace, id: str) -> Message:
    source: Message = {"kind": options.kind or _kind(options)}
    for name in ("txns", "remap", "connection", "ingestion", "envelope", "inputs"):
        if getattr(options, name) is not None:
            source[name] = getattr(options, name)
    if options.from_ is not None:
        source["from"] = options.from_
    shard = {name: value for name in ("location", "format") if (value := getattr(options, name)) is not None}
    optional = {name: getattr(options, name) for name in ("schema", "since", "primary", "timeline")}
    optional["shard"] = shard or None
    return {"id": id, "data_source": source} | {name: value for name, value in optional.items() if value is not None}


def _kind(options: argparse.Namespace) -> str:
    """What kind of source the other options mean."""
    if options.inputs is not None:
        return "other"
    if options.from_ is not None:
        return "sink"
    if options.ingestion is not None:
        return "ingestion_export"
    return "ingestion" if options.remap is not None else "table"


def policy(options: argparse.Namespace) -> tuple[Message, str]:
    policies: list[Message] = [{"kind": "valid_from", "frontier": time} for time in options.valid_from]
    for lag in options.lag:
        granularity = {} if options.granularity is None else {"granularity": options.granularity}
        policies.append({"kind": "lag_writes_by", "lag": lag, **granularity})
    if options.step_back:
        policies.append({"kind": "step_back"})
    policies += options.policy
    if not policies:
        raise UsageError("Say which policy: --lag DURATION, --step-back, --valid-from TIME or --policy JSON.")
    if options.granularity is not None and not options.lag:
        raise UsageError("--granularity goes with --lag.")
    wanted = policies[0] if len(policies) == 1 else {"kind": "multiple", "policies": policies}
    listed = [{"collection": id, "policy": wanted} for id in options.collections]
    return {"type": "set_read_policies", "policies": listed}, f"Policy set: {', '.join(options.collections)}"


def alter(options: argparse.Namespace) -> tuple[Message, str]:
    message = {"existing": options.existing, "new": options.new, "schema": options.schema}
    return (
        {"type": "alter_table_desc", **message, "expected_version": options.expected_version},
        f"{options.new} now owns the table; {options.existing} reads it with the old columns",
    )


def params(options: argparse.Namespace) -> tuple[Message, str]:
    parameters = {}
    for assignment in options.assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise UsageError(f"Expected NAME=VALUE, got {assignment!r}.")
        try:
            parameters[name] = json.loads(value)
        except ValueError:
            parameters[name] = value  # a duration, such as 1h
    return {"type": "update_parameters", "parameters": parameters}, f"Set: {', '.join(parameters)}"


def acquire(options: argparse.Namespace) -> tuple[Message, str]:
    message = {
        "type": "acquire_read_holds",
        "collections": options.collections,
        "holder": options.holder or f"{getpass.getuser()}@{platform.node()}",
        "at": options.at,
        "purpose": options.purpose,
        "lease": options.lease,
        "pin_files": options.pin_files,
    }
    how_long = "until released" if options.lease is None else f"for {options.lease} unless renewed"
    return message, f"Held {how_long}"


def downgrade(options: argparse.Namespace) -> tuple[Message, str]:
    moves = [{"hold": hold, "to": options.to} for hold in options.holds]
    return {"type": "downgrade_read_holds", "holds": moves}, "Moved"


def on_holds(options: argparse.Namespace) -> tuple[Message, str]:
    message = {"type": f"{options.action}_read_holds", "holds": options.holds}
    if options.action == "renew":
        message["lease"] = options.lease
    done = {"renew": "Renewed", "release": "Released", "clone": "Cloned", "merge": "Merged"}
    return message, done[options.action]


def on_collections(options: argparse.Namespace) -> tuple[Message, str]:
    """drop, undrop, reconcile."""
    ids = list(options.collections)
    if getattr(options, "file", None) is not None:
        listed = read_json(options.file)
        if not isinstance(listed, list):
            raise UsageError(f"{options.file} must hold a JSON list of ids.")
        ids += listed
    type_ = "reconcile" if options.subcommand == "reconcile" else f"{options.subcommand}_collections"
    done = {"drop": "Dropped", "undrop": "Brought back", "reconcile": "Compared"}[options.subcommand]
    return {"type": type_, "collections": ids}, done


def run(options: argparse.Namespace, settings: Settings) -> int:
    """Sends what the subcommand makes of its options."""
    message, done = options.message(options)
    if options.id is not None:
        message = {"id": options.id, **message}
    else:
        # Shorter than the ids of programs: people type the ids of holds, which begin with it.
        message = {"id": Holdfast.new_command_id()[:12], "issued_at": wall_ms(), **message}
    raw = json.dumps(message).encode()
    _check(raw)
    with settings.connect() as client:
        reply = client.ask(message)
        code = print_reply(reply, as_json=settings.json, done=done)
        if options.show and code == OK:
            print_status(client.state(), _touched(message), as_json=settings.json)
    return code


def _check(raw: bytes) -> None:
    """Refuses at once what any controller would refuse: whoever mistypes a duration need not wait for one."""
    decoded = decode(raw)
    if decoded.command is None and decoded.refusal is not None:
        error = refusal(
            {"code": decoded.refusal.code.value, "message": decoded.refusal.message, **decoded.refusal.details}
        )
        if isinstance(error, InvalidArgument):
            raise UsageError(f"{error.message} ({error.path})")
        raise error


def _touched(message: Message) -> list[str] | None:
    """The collections that a command names; None if it names holds or parameters."""
    if "policies" in message:
        return [each["collection"] for each in message["policies"]]
    if "existing" in message:
        return [message["existing"], message["new"]]
    if message["type"] == "reconcile" or "collections" not in message:
        return None
    return [each["id"] if isinstance(each, dict) else each for each in message["collections"]]


def read_json(file: str) -> Any:
    try:
        return json.loads(sys.stdin.read() if file == "-" else Path(file).read_text())
    except OSError as error:
        raise UsageError(f"Cannot read {file}: {error.strerror}.") from None
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}.") from None

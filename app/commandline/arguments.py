"""What can be typed: every subcommand with its options, help and examples. Each names the function that runs it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.commandline import changing, raw, showing
from app.commandline.help import DESCRIPTION, EXAMPLES, SIMULATE_HELP
from app.commandline.settings import DEFAULT_CONFIG, DEFAULT_TIMEOUT_S
from app.commandline.times import parse_time
from app.core.duration import parse_duration

Subcommands = Any  # argparse keeps the type of its subparsers to itself


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="holdfast",
        description=DESCRIPTION,
        epilog=EXAMPLES["holdfast"],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[_common()],
    )
    subcommands = top.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    _add_showing(subcommands)
    _add_collections(subcommands)
    _add_policies(subcommands)
    _add_holds(subcommands)
    _add_raw(subcommands)
    return top


def _common() -> argparse.ArgumentParser:
    """Options that are understood before and after the subcommand: no defaults here, or the later would win unasked."""
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    group = common.add_argument_group("where things are, and how to print")
    group.add_argument("--config", type=Path, metavar="FILE", help=f"the configuration (default: {DEFAULT_CONFIG})")
    group.add_argument("--bootstrap-servers", metavar="HOST:PORT,…", help="Kafka, instead of the configuration's")
    group.add_argument("--root", metavar="PATH", help="where the state is, instead of the configuration's")
    group.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", help=f"how long to wait (default: {DEFAULT_TIMEOUT_S:g})"
    )
    group.add_argument("--json", action="store_true", help="print JSON")
    return common


def _add(
    subcommands: Subcommands, name: str, help: str, run: Callable[..., int], *, of: str = ""
) -> argparse.ArgumentParser:
    """`of`: the subcommand of which it is a part."""
    added: argparse.ArgumentParser = subcommands.add_parser(
        name,
        help=help,
        description=f"{help[0].upper()}{help[1:]}.",
        epilog=EXAMPLES[f"{of} {name}".strip()],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[_common()],
    )
    added.set_defaults(run=run)
    return added


def _add_sending(
    subcommands: Subcommands, name: str, help: str, message: Callable[..., Any], *, of: str = ""
) -> argparse.ArgumentParser:
    """A subcommand that sends one command."""
    added = _add(subcommands, name, help, changing.run, of=of)
    added.set_defaults(message=message)
    added.add_argument("--id", help="an id of your own for the command: sent again, it is applied once")
    added.add_argument("--show", action="store_true", help="then print the state of the collections it names")
    return added


def _add_showing(subcommands: Subcommands) -> None:
    status = _add(subcommands, "status", "show collections with their frontiers and lag", showing.status)
    status.add_argument("collections", nargs="*", metavar="COLLECTION", help="only these")
    why = _add(subcommands, "why", "explain what keeps a collection's since where it is", showing.why)
    why.add_argument("collections", nargs="+", metavar="COLLECTION")
    why.add_argument("--all", action="store_true", help="tell every reason, however many")
    dump = _add(subcommands, "dump", "print the whole state as JSON", showing.dump)
    dump.add_argument("--commands", action="store_true", help="with the results of the commands")
    for reading in (status, why, dump):
        reading.add_argument("--seq", type=int, help="wait until the tables have reached this seq, that of a reply")


def _add_collections(subcommands: Subcommands) -> None:
    create = _add_sending(subcommands, "create", "create collections", changing.create)
    create.add_argument("collections", nargs="*", metavar="COLLECTION", help="ids; all get the same description")
    create.add_argument("--file", metavar="FILE", help="descriptions as in docs/commands.md, a JSON list; - is stdin")
    create.add_argument("--table", dest="kind", action="store_const", const="table", help="a table: the default")
    create.add_argument("--kind", help="any other data source, if the options below do not say which")
    create.add_argument("--inputs", nargs="*", metavar="ID", help="computed from these collections")
    create.add_argument("--from", dest="from_", metavar="ID", help="a sink of this collection")
    create.add_argument("--txns", metavar="ID", help="a table that is written through this transaction log")
    create.add_argument("--remap", metavar="ID", help="an ingestion, whose times this collection translates")
    create.add_argument("--connection", help="of an ingestion: kafka, postgres, mysql, sql_server, load_generator")
    create.add_argument("--ingestion", metavar="ID", help="an export of this ingestion")
    create.add_argument("--envelope", help="of an export: none, upsert, debezium, cdcv2")
    create.add_argument("--schema", metavar="DDL", help="its columns, such as 'k STRING, v BIGINT'")
    create.add_argument("--since", type=_time, metavar="TIME", help="readable from this time on only")
    create.add_argument("--primary", metavar="ID", help="the collection whose shard it shares")
    create.add_argument("--timeline", help="default: epoch_ms")
    create.add_argument("--location", metavar="PATH", help="where its data is to be, inside the warehouse")
    create.add_argument("--format", help="updates or delta")
    create.add_argument(
        "--register-ts", type=_time, metavar="TIME", help="tables: readable from here on (default: now)"
    )
    for name, help in (
        ("drop", "give collections up; holds on them are honoured"),
        ("undrop", "bring dropped collections back while their undrop window lasts"),
    ):
        added = _add_sending(subcommands, name, help, changing.on_collections)
        added.add_argument("collections", nargs="+", metavar="COLLECTION")
    reconcile = _add_sending(subcommands, "reconcile", "compare with your catalogue", changing.on_collections)
    reconcile.add_argument("collections", nargs="*", metavar="COLLECTION", help="the ids that your catalogue has")
    reconcile.add_argument("--file", metavar="FILE", help="more of them, a JSON list; - is stdin")
    alter = _add_sending(subcommands, "alter", "give a table a new schema, under a new id", changing.alter)
    alter.add_argument("existing", metavar="EXISTING")
    alter.add_argument("new", metavar="NEW")
    alter.add_argument("--schema", required=True, metavar="DDL")
    alter.add_argument(
        "--expected-version", required=True, type=int, metavar="N", help="the version that you have seen"
    )


def _add_policies(subcommands: Subcommands) -> None:
    policy = _add_sending(subcommands, "policy", "say how much history collections promise", changing.policy)
    policy.add_argument("collections", nargs="+", metavar="COLLECTION")
    policy.add_argument("--lag", action="append", default=[], type=_duration, metavar="DURATION")
    policy.add_argument(
        "--granularity", type=_duration, metavar="DURATION", help="with --lag: the since moves in such steps"
    )
    policy.add_argument("--valid-from", action="append", default=[], type=_time, metavar="TIME")
    policy.add_argument("--step-back", action="store_true", help="the latest complete time only")
    policy.add_argument("--policy", action="append", default=[], type=_json, metavar="JSON", help="any policy")
    params = _add_sending(subcommands, "params", "show parameters, or change them", changing.params)
    params.add_argument("assignments", nargs="*", metavar="NAME=VALUE", help="what to change; nothing: show")
    params.set_defaults(run=_show_or_change_params)


def _show_or_change_params(options: argparse.Namespace, settings: Any) -> int:
    return (changing.run if options.assignments else showing.show_params)(options, settings)


def _add_holds(subcommands: Subcommands) -> None:
    hold = subcommands.add_parser(
        "hold",
        help="acquire, move, renew, release, list read holds",
        description="Read holds keep collections readable from a time on.",
        epilog=EXAMPLES["hold"],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[_common()],
    )
    actions = hold.add_subparsers(dest="action", required=True, metavar="ACTION")
    acquire = _add_sending(actions, "acquire", "hold collections", changing.acquire, of="hold")
    acquire.add_argument("collections", nargs="+", metavar="COLLECTION")
    acquire.add_argument("--holder", help="who holds (default: you, on this machine)")
    acquire.add_argument("--purpose", help="why, for those who will ask")
    acquire.add_argument("--at", type=_time, metavar="TIME", help="default: the earliest that is readable")
    acquire.add_argument("--lease", type=_duration, metavar="DURATION", help="default: until it is released")
    acquire.add_argument("--pin-files", action="store_true", help="also keep files that a reader may have open")
    downgrade = _add_sending(actions, "downgrade", "move holds forward", changing.downgrade, of="hold")
    downgrade.add_argument("holds", nargs="+", metavar="HOLD")
    downgrade.add_argument("--to", required=True, type=_time, metavar="TIME")
    for name, help in (
        ("renew", "begin the leases of holds anew"),
        ("release", "let holds go"),
        ("clone", "make second holds at the same times"),
        ("merge", "make one of several holds on a collection"),
    ):
        added = _add_sending(actions, name, help, changing.on_holds, of="hold")
        added.add_argument("holds", nargs="+", metavar="HOLD")
        if name == "renew":
            added.add_argument("--lease", type=_duration, metavar="DURATION", help="default: as long as before")
    listing = _add(actions, "list", "show holds", showing.hold_list, of="hold")
    listing.add_argument("collections", nargs="*", metavar="COLLECTION", help="only on these")
    listing.add_argument("--holder", help="only of this holder")
    listing.add_argument("--seq", type=int, help="wait until the tables have reached this seq, that of a reply")


def _add_raw(subcommands: Subcommands) -> None:
    send = _add(subcommands, "send", "send raw JSON lines and print their replies", raw.send)
    send.add_argument("file", nargs="?", type=Path, help="one command per line; standard input if left out")
    simulate = _add(subcommands, "simulate", "try out commands in memory", raw.simulate)
    simulate.description = SIMULATE_HELP
    simulate.add_argument("file", nargs="?", type=Path, help="the lines to run; standard input if left out")


def _checked(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _time(text: str) -> int:
    return int(_checked(parse_time, text))


def _duration(text: str) -> str:
    """Checked, and sent as it was typed."""
    _checked(lambda each: parse_duration(int(each) if each.isdecimal() else each), text)
    return text if not text.isdecimal() else f"{text}ms"


def _json(text: str) -> Any:
    return _checked(json.loads, text)


def _seconds(text: str) -> float:
    seconds = float(_checked(float, text))
    if not 0 < seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"Expected seconds, got {text!r}")
    return seconds

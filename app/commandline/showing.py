"""The subcommands that read the tables: nothing but the files is needed for them."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from app.client_errors import CollectionMissing
from app.clock import wall_ms
from app.commandline.explain import explain, short
from app.commandline.output import OK, complain, counted, print_json, print_table
from app.commandline.settings import Settings
from app.commandline.times import duration, frontier, is_calendar, moment, relative, span
from app.core.descriptions import WALL_CLOCK
from app.status import Row, State, read_commands, read_state
from app.why import Graph, as_json


def status(options: argparse.Namespace, settings: Settings) -> int:
    state = _read(options, settings)
    if not options.collections:
        print_status(state, None, as_json=settings.json)
        return OK
    for id in options.collections:
        find(state, id)
    print_status(state, options.collections, as_json=settings.json)
    return OK


def why(options: argparse.Namespace, settings: Settings) -> int:
    state = _read(options, settings)
    rows = [find(state, id) for id in options.collections]
    if settings.json:
        graph = Graph(state)
        print_json([as_json(graph.why(row["id"]), shard=state.shards.get(row["shard"])) for row in rows])
    else:
        print("\n\n".join(explain(row["id"], state, everything=options.all) for row in rows))
    return OK


def dump(options: argparse.Namespace, settings: Settings) -> int:
    """The rows, in the form of `holdfast simulate`, so that the two can be compared."""
    state = _read(options, settings)
    rows: dict[str, Any] = {
        "seq": state.seq,
        "collections": [state.collections[key] for key in sorted(state.collections)],
        "holds": [state.holds[key] for key in sorted(state.holds)],
        "shards": [state.shards[key] for key in sorted(state.shards)],
        "meta": sorted(state.meta, key=lambda row: (row["entity"], row["key"])),
    }
    if options.commands:
        rows["commands"] = read_commands(settings.root, settings.storage_options)
    print_json(rows, pretty=not settings.json)
    return OK


def hold_list(options: argparse.Namespace, settings: Settings) -> int:
    state = _read(options, settings)
    for id in options.collections:
        find(state, id)
    holds = [
        hold
        for _, hold in sorted(state.holds.items())
        if (not options.collections or hold["collection"] in options.collections)
        and options.holder in (None, hold["holder"])
    ]
    if settings.json:
        print_json(holds)
        return OK
    now = wall_ms()
    print_table(
        ("HOLD", "COLLECTION", "SINCE", "HOLDER", "PURPOSE", "ACQUIRED", "LEASE ENDS"),
        (
            (
                hold["hold"],
                hold["collection"],
                frontier(hold["since"]),
                hold["holder"],
                hold["purpose"] or "-",
                relative(hold["acquired_at"], now),
                "never" if hold["lease_expires_at"] is None else relative(hold["lease_expires_at"], now),
            )
            for hold in holds
        ),
    )
    return OK


def show_params(options: argparse.Namespace, settings: Settings) -> int:
    values, changed = _read(options, settings).parameters()
    if settings.json:
        print_json(values)
        return OK
    print_table(
        ("PARAMETER", "VALUE", ""),
        ((name, _parameter(name, value), "set" if name in changed else "") for name, value in values.items()),
    )
    return OK


def _parameter(name: str, value: Any) -> str:
    if isinstance(value, bool) or value is None or name == "finalization_concurrency":
        return json.dumps(value)
    return duration(value)


def find(state: State, id: str) -> Row:
    """A collection's row; CollectionMissing says what became of it, or what may have been meant."""
    row = state.collections.get(id)
    if row is not None:
        return row
    tombstone = state.meta_value("tombstone", id)
    if tombstone is not None:
        shard = state.shards.get(tombstone["shard"], {})
        raise CollectionMissing(
            f"Collection {id!r} was dropped and nobody holds it any more; its shard {tombstone['shard']} is "
            f"{shard.get('state', 'gone')}."
        )
    alike = difflib.get_close_matches(id, state.collections, n=3)
    hint = f" Did you mean {' or '.join(alike)}?" if alike else ""
    raise CollectionMissing(f"There is no collection {id!r}.{hint}")


def print_status(state: State, ids: Iterable[str] | None, *, as_json: bool) -> None:
    wanted = sorted(state.collections) if ids is None else [id for id in dict.fromkeys(ids) if id in state.collections]
    now = wall_ms()
    if as_json:
        collections = [_status_json(state.collections[id], now) for id in wanted]
        print_json({"seq": state.seq, "controller": state.controller, "collections": collections})
        return
    if not wanted:
        print("There are no collections. `holdfast create orders` makes one.")
    else:
        graph = Graph(state)
        print_table(
            ("COLLECTION", "SOURCE", "SINCE", "UPPER", "HISTORY", "LAG", "HOLDS", "SINCE IS KEPT BY"),
            (_status_cells(state.collections[id], graph, now) for id in wanted),
            right=(4, 5, 6),
        )
    if ids is None:
        _print_footer(state)


def _status_cells(row: Row, graph: Graph, now: int) -> tuple[str, ...]:
    since, upper, timeline = row["read_frontier"], row["write_frontier"], row["timeline"]
    lag = lag_of(row, now)
    reason = graph.first_reason(row["id"])
    return (
        f"{row['id']} (dropped)" if row["dropped"] else row["id"],
        row["data_source"],
        frontier(since, timeline),
        frontier(upper, timeline),
        "-" if upper is None or since is None else span(max(upper - since, 0), row),
        "-" if lag is None else duration(lag),
        str(len(graph.holds_on(row["id"]))),
        "-" if reason is None else short(reason, graph.collections[reason.collection], row["id"]),
    )


def lag_of(row: Mapping[str, Any], now: int) -> int | None:
    """How far its data is behind the time of day, for a collection that follows it and has any."""
    upper = row["write_frontier"]
    if row["time_dependence"] != WALL_CLOCK or not is_calendar(upper, row["timeline"]):
        return None
    return int(max(now - upper, 0))


def _status_json(row: Row, now: int) -> Row:
    since, upper = row["read_frontier"], row["write_frontier"]
    history = None if since is None or upper is None else max(upper - since, 0)
    return {**row, "history": history, "lag_ms": lag_of(row, now)}


def _print_footer(state: State) -> None:
    number = f"{counted(len(state.collections), 'collection')}, {counted(len(state.holds), 'hold')}"
    line = f"\n{number}; the tables are at seq {state.seq}"
    controller = state.controller
    if controller is not None:
        line += (
            f", written by the controller with epoch {controller['epoch']} on {controller['host']} "
            f"(pid {controller['pid']}), started {moment(controller['started_at'])}"
        )
    print(f"{line}.")


def _read(options: argparse.Namespace, settings: Settings) -> State:
    at_least = getattr(options, "seq", None) or 0
    state = read_state(settings.root, settings.storage_options, at_least=at_least, timeout_s=settings.timeout_s)
    if not state.is_even:
        complain("the tables are being written just now, and are not all of the same moment.")
    return state

"""A thousand lines that mean something one after the other, with everything among them that can be wrong with one.

No line depends on the time of day, so that a simulation of them ends in the same state as a controller does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

from app.simulate import Simulator

POLICIES: list[dict[str, Any]] = [
    {"kind": "step_back"},
    {"kind": "lag_writes_by", "lag": "1m", "granularity": "10s"},
    {"kind": "multiple", "policies": [{"kind": "valid_from", "frontier": 7}, {"kind": "step_back"}]},
]
LARGE = 2 * 1024 * 1024


def mixed_lines(seed: int, number: int) -> list[bytes | None]:
    """Lines in their order, with unique command ids but for a few that come twice; None is a record without value."""
    rng = Random(seed)
    simulator = Simulator()
    lines: list[bytes | None] = []
    for line in _lines(rng, simulator):
        lines.append(line)
        simulator.line(line or b"")
        if len(lines) == number:
            break
    return lines


def _lines(rng: Random, simulator: Simulator) -> Iterator[bytes | None]:
    # Whatever is dropped can be brought back for the whole of the run.
    yield _encode({"type": "update_parameters", "id": "first", "parameters": {"undrop_window": "1h"}})
    large = 0
    last: bytes = b"{}"
    for count in range(1, 1_000_000):
        kind = rng.randrange(100)
        if kind < 70:
            last = _encode(_good(rng, simulator, count))
            yield last
        elif kind < 75:
            yield last  # the same bytes again
        elif kind == 75 and large < 3:
            large += 1
            yield _encode({"type": "reconcile", "id": f"large{count}", "collections": ["x" * LARGE]})
        else:
            yield _bad(rng, count)


def _encode(line: dict[str, Any]) -> bytes:
    return json.dumps(line).encode()


def _good(rng: Random, simulator: Simulator, count: int) -> dict[str, Any]:
    """A command that mostly succeeds."""
    state, id_ = simulator.machine.state, f"c{count}"
    live = sorted(each.id for each in state.collections.values() if not each.dropped)
    dropped = sorted(each.id for each in state.collections.values() if each.dropped)
    holds = sorted(hold for hold in state.holds if hold.startswith("c"))
    choices: list[str] = ["create_collections", "create_collections", "reconcile", "update_parameters"]
    if live:
        choices += ["set_read_policies", "acquire_read_holds", "acquire_read_holds", "drop_collections", "alter"]
    if dropped:
        choices += ["undrop_collections"]
    if holds:
        choices += ["downgrade_read_holds", "release_read_holds", "clone_read_holds", "merge_read_holds", "renew"]
    match rng.choice(choices):
        case "create_collections":
            return _create(rng, id_, count, live)
        case "reconcile":
            return {"type": "reconcile", "id": id_, "collections": [*live[:3], "nobody"]}
        case "update_parameters":
            parameters = {"finalization_concurrency": rng.randrange(1, 9)}
            return {"type": "update_parameters", "id": id_, "parameters": parameters}
        case "set_read_policies":
            policies = [{"collection": rng.choice(live), "policy": rng.choice(POLICIES)} for _ in range(2)]
            return {"type": "set_read_policies", "id": id_, "policies": policies}
        case "acquire_read_holds":
            some = sorted({rng.choice(live) for _ in range(2)})
            line = {"type": "acquire_read_holds", "id": id_, "collections": some, "holder": "a report — ü"}
            return line | ({} if rng.randrange(3) else {"at": rng.randrange(12), "purpose": "q"})
        case "drop_collections":
            return {"type": "drop_collections", "id": id_, "collections": [rng.choice(live)]}
        case "undrop_collections":
            return {"type": "undrop_collections", "id": id_, "collections": [rng.choice(dropped)]}
        case "alter":
            return {
                "type": "alter_table_desc",
                "id": id_,
                "existing": rng.choice(live),
                "new": f"v{count}",
                "schema": "k STRING, v BIGINT, w STRING",
                "expected_version": rng.choice([0, 0, 0, 1]),
            }
        case "downgrade_read_holds":
            move = {"hold": rng.choice(holds), "to": rng.choice([5, 10, 20, None])}
            return {"type": "downgrade_read_holds", "id": id_, "holds": [move]}
        case "renew":  # without a lease to renew: refused
            return {"type": "renew_read_holds", "id": id_, "holds": [rng.choice(holds)]}
        case "merge_read_holds":
            one = rng.choice(holds)
            same = [each for each in holds if state.holds[each].collection == state.holds[one].collection]
            return {"type": "merge_read_holds", "id": id_, "holds": [one, *(each for each in same if each != one)][:3]}
        case other:
            return {"type": other, "id": id_, "holds": [rng.choice(holds)]}


def _create(rng: Random, id_: str, count: int, live: list[str]) -> dict[str, Any]:
    table = {"id": f"t{count}", "data_source": {"kind": "table"}, "schema": "k STRING, v BIGINT"}
    view = {"id": f"o{count}", "data_source": {"kind": "other", "inputs": [f"t{count}", *live[-2:]]}}
    sink = {"id": f"s{count}", "data_source": {"kind": "sink", "from": f"t{count}"}}
    collections = rng.choice([[table], [view, table], [sink, view, table], [view]])
    return {"type": "create_collections", "id": id_, "register_ts": rng.randrange(10), "collections": collections}


def _bad(rng: Random, count: int) -> bytes | None:
    """Something that is refused, for every reason that there is."""
    id_ = f"b{count}"
    lines: list[dict[str, Any]] = [
        {"type": "compact_everything", "id": id_},
        {"type": "reconcile", "id": id_, "collections": [], "colour": "red"},
        {"type": "reconcile", "id": id_, "collections": "all"},
        {"type": "reconcile", "id": id_, "collections": ["a"] * 10_001},
        {"type": "reconcile", "id": 7, "collections": []},
        {"type": "reconcile", "id": "a/b", "collections": []},
        {"type": 7, "id": id_},
        {"id": id_},
        {},
        {"type": "acquire_read_holds", "id": id_, "collections": ["nobody"], "holder": "h"},
        {"type": "release_read_holds", "id": id_, "holds": ["nobody/a"]},
        {"type": "downgrade_read_holds", "id": id_, "holds": [{"hold": "nobody/a", "to": 3}]},
        {"type": "update_parameters", "id": id_, "parameters": {"undrop_window": -1}},
        {"type": "reconcile", "id": "first", "collections": []},  # another command's id
        {"type": "create_collections", "id": id_, "collections": [{"id": "no spaces"}]},
    ]
    raws = [b"", b"  ", b"\x00\xff\xfe", b"[1]", b"null", b"nonsense", b'{"type":"reconcile"', b"[" * 5_000, b"\xc3("]
    raws += [b'{"id":"\xff","type":"reconcile","collections":[]}', b'{"id":"' + id_.encode() + b'"} {}']
    return rng.choice([None, rng.choice(raws), *(_encode(rng.choice(lines)) for _ in range(4))])

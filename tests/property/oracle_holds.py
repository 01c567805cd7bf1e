"""What the hold commands do (section 7), one function for each: they check everything first, then change the rows."""

from __future__ import annotations

from typing import Any

from tests.property.oracle_shape import milliseconds
from tests.property.oracle_state import UNDROP_PREFIX, Refused, Row, State, order

GREATEST_HOLD_ID = 512


def _distinct(items: list[str]) -> list[str]:
    return list(dict.fromkeys(items))


def _report(state: State, holds: list[str]) -> Row:
    rows = [(hold, state.holds[hold]) for hold in holds]
    return {"holds": [{"hold": hold, "collection": row["collection"], "since": row["since"]} for hold, row in rows]}


def _missing_reasons(state: State, hold: str) -> list[str]:
    """Why a hold is not there. A memory that is, or at some time was, older than the greatest age is lost."""
    memory = state.departed.get(hold)
    return ["unknown"] if memory is None or memory["at"] < state.oldest() else [memory["reason"]]


def _existing(state: State, holds: list[str]) -> list[str]:
    for hold in holds:
        if hold not in state.holds or hold.startswith(UNDROP_PREFIX):
            reasons = _missing_reasons(state, hold)
            state.events[f"a hold was missing: {' or '.join(reasons)}"] += 1
            raise Refused("HOLD_MISSING", reason=reasons)
    return holds


def _check_new_ids(state: State, holds: list[str]) -> None:
    for hold in holds:
        if hold in state.holds or len(hold) > GREATEST_HOLD_ID:
            state.events["a hold id was in use" if hold in state.holds else "a hold id was too long"] += 1
            raise Refused("INVALID_ARGUMENT")


def _check_lease(state: State, lease: int | None) -> None:
    longest = state.parameters["hold_max_lease"]
    if lease is None or lease == 0 or (longest is not None and lease > longest):
        raise Refused("INVALID_ARGUMENT")


def acquire(state: State, line: Row) -> Row:
    collections, at = _distinct(line["collections"]), line.get("at")
    lease, pin_files = milliseconds(line.get("lease")), bool(line.get("pin_files"))
    if lease is not None or pin_files:
        _check_lease(state, lease)
    if not all(state.live(name) for name in collections):
        raise Refused("COLLECTION_MISSING")
    new = {f"{line['id']}/{name}": name for name in collections}
    _check_new_ids(state, list(new))
    if at is not None and any(state.since[name] > at for name in collections):
        raise Refused("SINCE_VIOLATION", earliest=[{name: state.since[name] for name in collections}])
    for hold, name in new.items():
        seen = state.shards[state.collections[name]["shard"]]["log_version"]
        state.holds[hold] = {
            "hold": hold,
            "collection": name,
            "holder": line["holder"],
            "purpose": line.get("purpose"),
            "since": state.since[name] if at is None else at,
            "acquired_at": state.now,
            "lease_ms": lease,
            "lease_expires_at": state.expiry(lease),
            "pin_files": pin_files,
            "pinned_version": (seen or 0) if pin_files else None,
        }
    return _report(state, list(new))


def downgrade(state: State, line: Row) -> Row:
    steps = [(step["hold"], step["to"]) for step in line["holds"]]
    twice = len({hold for hold, _ in steps}) < len(steps)
    try:
        _existing(state, [hold for hold, _ in steps])
    except Refused as missing:
        raise Refused(*missing.codes, *(["INVALID_ARGUMENT"] if twice else []), **missing.facts) from None
    if twice:
        raise Refused("INVALID_ARGUMENT")
    for hold, to in steps:
        if order(to) < state.holds[hold]["since"]:
            raise Refused("SINCE_VIOLATION", actual=[state.holds[hold]["since"]])
    result = {
        "holds": [{"hold": hold, "collection": state.holds[hold]["collection"], "since": to} for hold, to in steps]
    }
    for hold, to in steps:
        if to is None:
            state.depart(hold, "released")
        else:
            state.holds[hold]["since"] = to
    return result


def release(state: State, line: Row) -> Row:
    found = [hold for hold in _distinct(line["holds"]) if hold in state.client_holds()]
    result = {"holds": [{"hold": hold, "collection": state.holds[hold]["collection"], "since": None} for hold in found]}
    for hold in found:
        state.depart(hold, "released")
    return result


def clone(state: State, line: Row) -> Row:
    originals = _existing(state, _distinct(line["holds"]))
    new = {f"{line['id']}/{hold}": hold for hold in originals}
    _check_new_ids(state, list(new))
    for hold, original in new.items():
        row = dict(state.holds[original], hold=hold, acquired_at=state.now)
        row["lease_expires_at"] = state.expiry(row["lease_ms"])
        state.holds[hold] = row
        if state.collections[row["collection"]]["dropped"]:
            state.events["a hold on a dropped collection was cloned"] += 1
    return _report(state, list(new))


def merge(state: State, line: Row) -> Row:
    holds = _existing(state, _distinct(line["holds"]))
    if not holds:
        return {"holds": []}
    rows = [state.holds[hold] for hold in holds]
    if len({row["collection"] for row in rows}) > 1:
        raise Refused("INVALID_ARGUMENT")

    def lasting(row: Row) -> tuple[Any, Any]:
        return (order(row["lease_expires_at"]), order(row["lease_ms"]))

    longest = max(rows, key=lasting)
    versions = [row["pinned_version"] for row in rows if row["pin_files"]]
    if versions and longest["lease_expires_at"] is None:
        state.events["a merge would have pinned files for ever"] += 1
        raise Refused("INVALID_ARGUMENT")
    if len(set(versions)) > 1:
        state.events["a merge chose between pinned versions"] += 1
    if rows[0]["since"] > min(row["since"] for row in rows):
        state.events["a merge brought the first hold back"] += 1
    state.holds[holds[0]] = rows[0] | {
        "since": min(row["since"] for row in rows),
        "lease_ms": longest["lease_ms"],
        "lease_expires_at": longest["lease_expires_at"],
        "pin_files": bool(versions),
        "pinned_version": min(versions, default=None),
    }
    for hold in holds[1:]:
        state.depart(hold, "released")
    return _report(state, holds[:1])


def renew(state: State, line: Row) -> Row:
    holds = _existing(state, _distinct(line["holds"]))
    given = milliseconds(line.get("lease"))
    periods = {hold: state.holds[hold]["lease_ms"] if given is None else given for hold in holds}
    for period in periods.values():
        _check_lease(state, period)
    for hold, period in periods.items():
        state.holds[hold].update(lease_ms=period, lease_expires_at=state.expiry(period))
    return _report(state, holds)

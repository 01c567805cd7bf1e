"""Read holds: each is one capability that its holder moves, and nobody else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from app.core.draft import Draft
from app.core.errors import Code, Refused, invalid
from app.core.frontier import EMPTY, MAX_TIME_GIVEN, Frontier
from app.core.images import Departed, Hold

MAX_HOLD_ID: Final = 512


def acquire(
    draft: Draft,
    *,
    command_id: str,
    collections: Iterable[str],
    at: Frontier | None,
    holder: str,
    purpose: str | None,
    lease_ms: int | None,
    pin_files: bool,
) -> list[Hold]:
    if lease_ms is not None:
        _check_lease(draft, lease_ms)
    elif pin_files:
        raise invalid("`pin_files` needs a `lease`, so that files cannot be pinned for ever.", path="$.pin_files")
    wanted = [draft.live(id) for id in dict.fromkeys(collections)]
    ids = [_new_id(draft, command_id, collection.id) for collection in wanted]
    if at is not None and (gone := [collection for collection in wanted if at < collection.since]):
        raise Refused(
            Code.SINCE_VIOLATION,
            f"{gone[0].id!r} can only be read from {int(gone[0].since)} on, not at {int(at)}.",
            earliest={collection.id: int(collection.since) for collection in wanted},
        )
    expires_at = expiry_of(draft, lease_ms)
    holds = []
    for id, collection in zip(ids, wanted, strict=True):
        hold = Hold(
            id=id,
            collection=collection.id,
            holder=holder,
            purpose=purpose,
            since=collection.since if at is None else at,
            acquired_at=draft.now,
            lease_ms=lease_ms,
            lease_expires_at=expires_at,
            pin_files=pin_files,
            pinned_version=(draft.shard(collection.shard).log_version or 0) if pin_files else None,
        )
        draft.add_hold(hold)
        holds.append(hold)
    return holds


def downgrade(draft: Draft, moves: Sequence[tuple[str, Frontier]]) -> list[Hold]:
    holds = [_held(draft, id) for id, _ in moves]
    if len(holds) > 1 and len({hold.id for hold in holds}) < len(holds):
        raise invalid("A hold can be downgraded only once in a command.")
    for hold, (_, to) in zip(holds, moves, strict=True):
        if to < hold.since:
            raise Refused(
                Code.SINCE_VIOLATION,
                f"Hold {hold.id!r} is at {int(hold.since)} and cannot go back to {int(to)}.",
                actual=int(hold.since),
            )
    return [_move(draft, hold, to) for hold, (_, to) in zip(holds, moves, strict=True)]


def release(draft: Draft, ids: Iterable[str]) -> list[Hold]:
    """Always ok: whoever releases a hold only wants it gone."""
    found = [hold for id in dict.fromkeys(ids) if (hold := draft.hold(id)) and not hold.is_controllers]
    return [_move(draft, hold, EMPTY) for hold in found]


def clone(draft: Draft, command_id: str, ids: Iterable[str]) -> list[Hold]:
    clones = []
    for hold in [_held(draft, id) for id in dict.fromkeys(ids)]:
        copy = msgspec.structs.replace(
            hold,
            id=_new_id(draft, command_id, hold.id),
            acquired_at=draft.now,
            lease_expires_at=expiry_of(draft, hold.lease_ms),
        )
        draft.add_hold(copy)
        clones.append(copy)
    return clones


def merge(draft: Draft, ids: Iterable[str]) -> list[Hold]:
    holds = [_held(draft, id) for id in dict.fromkeys(ids)]
    if not holds:
        return []
    if len({hold.collection for hold in holds}) > 1:
        raise invalid("Only holds on one collection can be merged.")
    first, *others = holds
    last = max(holds, key=lambda hold: (_expiry_order(hold), hold.lease_ms or 0))
    pins = any(hold.pin_files for hold in holds)
    if pins and last.lease_expires_at is None:
        raise invalid("A hold with `pin_files` cannot be merged with one without a lease: it would pin files for ever.")
    for hold in others:
        _move(draft, hold, EMPTY)
    versions = [hold.pinned_version for hold in holds if hold.pinned_version is not None]
    merged = msgspec.structs.replace(
        first,
        since=min(hold.since for hold in holds),
        lease_ms=last.lease_ms,
        lease_expires_at=last.lease_expires_at,
        pin_files=pins,
        pinned_version=min(versions, default=None),
    )
    _replace(draft, first, merged)
    return [merged]


def renew(draft: Draft, ids: Iterable[str], lease_ms: int | None) -> list[Hold]:
    renewed = []
    for hold in [_held(draft, id) for id in dict.fromkeys(ids)]:
        period = hold.lease_ms if lease_ms is None else lease_ms
        if period is None:
            raise invalid(f"Hold {hold.id!r} has no lease; give one with `lease`.", path="$.lease")
        _check_lease(draft, period)
        again = msgspec.structs.replace(hold, lease_ms=period, lease_expires_at=expiry_of(draft, period))
        _replace(draft, hold, again)
        renewed.append(again)
    return renewed


def expire(draft: Draft, hold: Hold) -> None:
    """Releases a hold whose time has passed: a lease, or an undrop window."""
    draft.remove_hold(hold)
    if not hold.is_controllers:
        draft.remember_departure(hold, Departed("lease expired", draft.now))


def expiry_of(draft: Draft, lease_ms: int | None) -> int | None:
    """When a lease that begins now ends; at the latest with the year 9999, or no calendar could show it."""
    return None if lease_ms is None else min(draft.now + lease_ms, MAX_TIME_GIVEN)


def _move(draft: Draft, hold: Hold, to: Frontier) -> Hold:
    moved = msgspec.structs.replace(hold, since=to)
    if to == EMPTY:
        draft.remove_hold(hold)
        draft.remember_departure(hold, Departed("released", draft.now))
    elif to != hold.since:
        _replace(draft, hold, moved)
    return moved


def _replace(draft: Draft, old: Hold, new: Hold) -> None:
    if new != old:
        draft.remove_hold(old)
        draft.add_hold(new)


def _held(draft: Draft, id: str) -> Hold:
    hold = draft.hold(id)
    if hold is not None and not hold.is_controllers:
        return hold
    departed = draft.state.departed.get(id)
    remembered = departed is not None and departed.at >= draft.state.oldest_remembered(draft.now)
    reason = departed.reason if departed is not None and remembered else "unknown"
    raise Refused(Code.HOLD_MISSING, f"There is no hold {id[:MAX_HOLD_ID]!r} ({reason}).", reason=reason)


def _new_id(draft: Draft, command_id: str, rest: str) -> str:
    id = f"{command_id}/{rest}"
    if len(id) > MAX_HOLD_ID:
        raise invalid(f"The hold's id would have {len(id)} characters; the limit is {MAX_HOLD_ID}.")
    if draft.hold(id) is not None:
        raise invalid(f"The hold id {id!r} is in use; send the command under another id.")
    return id


def _check_lease(draft: Draft, lease_ms: int) -> None:
    most = draft.parameters.hold_max_lease
    if lease_ms == 0:
        raise invalid("A lease of zero has passed before it begins.", path="$.lease")
    if most is not None and lease_ms > most:
        raise invalid(f"The lease is {lease_ms} ms; `hold_max_lease` is {most} ms.", path="$.lease")


def _expiry_order(hold: Hold) -> float:
    return float("inf") if hold.lease_expires_at is None else hold.lease_expires_at

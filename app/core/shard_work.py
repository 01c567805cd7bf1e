"""What is to be done on shards, and what was done: since downgrades, finalization, pinned versions.

Whether something is to be done follows from the state. How long to wait before it is not part of the state: a restarted
controller finds everything due.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from app.core.draft import Draft
from app.core.errors import BrokenInvariant
from app.core.frontier import EMPTY, Frontier
from app.core.images import Shard
from app.core.state import State

FIRST_RETRY_MS: Final = 5_000
LONGEST_RETRY_MS: Final = 600_000
MAX_ERROR_LENGTH: Final = 1_000
WATCH: Final = "watch"
"""Looking at the shards' logs."""


class Downgrade(msgspec.Struct, frozen=True):
    """A shard's since is to become, or became, this."""

    shard: str
    since: Frontier


class Merge(msgspec.Struct, frozen=True):
    """A merge that was made: its rows have the time `to` now."""

    to: int
    bytes_before: int
    bytes_after: int


class Pace:
    """When each shard may be worked on again. Forgotten at a restart, on purpose."""

    def __init__(self) -> None:
        self.downgraded_at: dict[str, int] = {}
        self.retry_at: dict[str, int] = {}

    def due_downgrades(self, state: State, now: int) -> list[Downgrade]:
        """Joined: one per shard, to where its owner is now. The one to `[]` is never delayed."""
        interval = state.parameters.since_downgrade_interval
        due = []
        for id in state.pending_downgrades:
            since = state.wanted_since(state.shards[id])
            last = self.downgraded_at.get(id)
            if since == EMPTY or last is None or last + interval <= now:
                due.append(Downgrade(id, since))
        return sorted(due, key=lambda downgrade: downgrade.shard)

    def eligible_for_finalization(self, state: State, now: int) -> list[str]:
        """Shards to be claimed, or claimed already, whose wait after a failure is over."""
        if not state.parameters.finalize_shards:
            return []
        return [
            id
            for id in sorted(state.finalization_log)
            if self.retry_at.get(id, 0) <= now and (state.shards[id].state == "finalizing" or _is_claimable(state, id))
        ]


def _is_claimable(state: State, id: str) -> bool:
    return state.shards[id].since == EMPTY and not state.on_shard.get(id)


def downgrade_sinces(draft: Draft, downgrades: Iterable[Downgrade], epoch: int) -> None:
    """Makes sinces durable, before anything is merged or deleted because of them. Never moves one back."""
    for wanted in downgrades:
        shard = draft.shard(wanted.shard)
        if wanted.since <= shard.since:
            continue
        if wanted.since > draft.state.wanted_since(shard):
            raise BrokenInvariant(f"The since of shard {shard.id!r} would pass the read frontier of its owner.")
        draft.put_shard(msgspec.structs.replace(shard, since=wanted.since, epoch=epoch))


def claim(draft: Draft, ids: Iterable[str]) -> list[str]:
    """Marks shards as being finalized, after checking all of it again. A live reference wins: back to `live`."""
    claimed = []
    for id in ids:
        shard = draft.shard(id)
        if return_to_live_if_referenced(draft, shard) or not draft.parameters.finalize_shards:
            continue
        if shard.state == "finalizing":
            claimed.append(id)
        elif shard.state == "dropped" and _is_claimable(draft.state, id):
            draft.put_shard(msgspec.structs.replace(shard, state="finalizing"))
            claimed.append(id)
    return claimed


def return_to_live_if_referenced(draft: Draft, shard: Shard) -> bool:
    """Whether a live collection is stored on a shard of the finalization log, which it must then leave."""
    if not draft.state.live_on_shard.get(shard.id):
        return False
    if shard.state != "live":
        draft.put_shard(msgspec.structs.replace(shard, state="live", dropped_at=None))
    return True


def finalized(draft: Draft, id: str) -> None:
    """Its log is sealed and its data is deleted."""
    shard = _claimed(draft, id)
    done = msgspec.structs.replace(shard, state="finalized", finalized_at=draft.now, upper=EMPTY, last_error=None)
    draft.put_shard(done)


def finalization_failed(draft: Draft, id: str, error: str) -> int:
    """Notes a failure; returns how long to wait before the next attempt, in ms."""
    shard = _claimed(draft, id)
    attempts = shard.attempts + 1
    draft.put_shard(msgspec.structs.replace(shard, attempts=attempts, last_error=error[:MAX_ERROR_LENGTH]))
    # The exponent is bounded too: a shard that failed for months must not make us compute 2 to the power of 50,000.
    return min(FIRST_RETRY_MS << min(attempts - 1, 20), LONGEST_RETRY_MS)


def purged(draft: Draft, id: str) -> None:
    """Its log, which kept late writers out, is deleted as well: whoever still comes is older than any command."""
    shard = draft.shard(id)
    if shard.state != "finalized" or draft.state.tombstones_of.get(id):
        raise BrokenInvariant(f"Shard {id!r} was purged, but it is {shard.state!r}, or a tombstone needs it.")
    draft.put_shard(msgspec.structs.replace(shard, purged_at=draft.now, last_error=None))


def note_merge(draft: Draft, id: str, merge: Merge) -> None:
    """What a merge has done, for those who look at the shard's row. Nothing is decided by it."""
    shard = draft.shard(id)
    draft.put_shard(
        msgspec.structs.replace(
            shard,
            merged_at=draft.now,
            merged_to=merge.to,
            merged_bytes_before=merge.bytes_before,
            merged_bytes_after=merge.bytes_after,
        )
    )


def note_error(draft: Draft, id: str, what: str, error: str | None) -> None:
    """What went wrong with a shard while we did something to it, for those who look at its row; None: it went well.

    Going well takes back only what the same thing had to say. What `WATCH` says stays until it is taken back: the log
    cannot be read, and all else may follow from that.
    """
    shard = draft.shard(id)
    before = shard.last_error or ""
    if error is None:
        last_error = None if before.startswith(f"{what}: ") else shard.last_error
    elif before.startswith(f"{WATCH}: ") and what != WATCH:
        last_error = shard.last_error
    else:
        last_error = f"{what}: {error}"[:MAX_ERROR_LENGTH]
    if shard.last_error != last_error:
        draft.put_shard(msgspec.structs.replace(shard, last_error=last_error))


def _claimed(draft: Draft, id: str) -> Shard:
    shard = draft.shard(id)
    if shard.state != "finalizing" or shard.since != EMPTY or draft.state.on_shard.get(id):
        raise BrokenInvariant(f"Shard {id!r} was worked on as if it had been claimed, but it is {shard.state!r}.")
    return shard


def clean_up_limit(state: State, shard_id: str) -> int | None:
    """Files that a commit up to this version removed may go; None: nothing may.

    It is the least version that a hold with `pin_files` has recorded, or else the last one in the journal. A hold that
    comes while the clean-up is under way records no lesser one, so it needs none of these files.
    """
    seen = state.shards[shard_id].log_version
    pins = (state.pins.get(id, {}) for id in state.on_shard.get(shard_id, ()))
    return None if seen is None else min((version for each in pins for version in each.values()), default=seen)

"""What time alone does: leases and undrop windows pass, tombstones are purged, old reasons are forgotten."""

from __future__ import annotations

import msgspec

from app.core.draft import Draft
from app.core.holding import expire, expiry_of
from app.core.images import DEPARTED, HOLD, TOMBSTONE
from app.core.shard_work import return_to_live_if_referenced


def expire_leases(draft: Draft, until: int) -> list[str]:
    """Releases every hold whose lease ended at or before `until`, and every undrop window that ended by now."""
    expired = []
    for id in draft.state.leases.due(draft.now):
        hold = draft.state.holds[id]
        if hold.is_controllers or (hold.lease_expires_at or 0) <= until:
            expire(draft, hold)
            expired.append(id)
    return expired


def purge_tombstones(draft: Draft) -> list[str]:
    """Forgets the ids whose shard was finalized long enough ago; they can be used again."""
    purged = []
    for shard in draft.state.purges.due(draft.now - draft.parameters.tombstone_retention):
        for id in sorted(draft.state.tombstones_of[shard]):
            draft.changes[(TOMBSTONE, id)] = None
            purged.append(id)
    return purged


def forget_departures(draft: Draft) -> None:
    """Forgets why holds are gone once no command that is young enough can ask."""
    for id in draft.state.departures.due(draft.state.oldest_remembered(draft.now) - 1):
        draft.changes[(DEPARTED, id)] = None


def boot(draft: Draft) -> None:
    """What a new controller puts right: every lease begins anew, and no shard with a live collection is given up."""
    for hold in draft.state.holds.values():
        expiry = expiry_of(draft, hold.lease_ms)
        if expiry is not None and expiry != hold.lease_expires_at:
            draft.changes[(HOLD, hold.id)] = msgspec.structs.replace(hold, lease_expires_at=expiry)
    for id in sorted(draft.state.finalization_log):
        return_to_live_if_referenced(draft, draft.state.shards[id])

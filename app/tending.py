"""When each shard is to be looked after: its history merged, its dead files deleted.

Nothing of this is durable. After a boot every shard is looked after once, because something may be left of an earlier
life; one after the other, so that those whose since moves need not wait for all the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from heapq import heappop, heappush
from typing import Final

from app.core.frontier import EMPTY
from app.core.images import Shard
from app.core.shard_work import clean_up_limit
from app.core.state import State
from app.job import Tended
from app.shards.merge_plan import merge_target

FIRST_LOOKS_EVERY_MS: Final = 50
PINS_EVERY_MS: Final = 1_000


def _target(shard: Shard) -> int:
    """Up to where its history may be merged now."""
    return merge_target(shard.since, shard.upper) or 0


class Tending:
    """For one thread. Costs what changes, not what is there."""

    def __init__(self) -> None:
        self._targets: dict[str, int] = {}  # by shard: the merge target that its next look will reach, or its last did
        self._at: dict[str, int] = {}
        self._queue: list[tuple[int, str]] = []  # an item counts only while `_at` says the same
        self._pinned: dict[str, int] = {}  # by shard: the version that its pins must reach for a dead file to go
        self._pins_at = 0
        self._closed: set[str] = set()

    def note(self, touched: Collection[Shard], interval_ms: int, now: int) -> None:
        """Takes in shards that have changed. None is looked after more often than its since may move."""
        first_looks = 0
        for shard in touched:
            if shard.since == EMPTY or shard.state in ("finalizing", "finalized"):
                self.forget(shard.id)  # nobody reads it: what is there is deleted as a whole, soon
            elif shard.format == "updates" and shard.log_version is not None:
                target, before = _target(shard), self._targets.get(shard.id)
                if before is None:
                    self.by(shard.id, now + first_looks * FIRST_LOOKS_EVERY_MS)
                    first_looks += 1
                elif target > before:
                    self.by(shard.id, now + interval_ms)
                if shard.upper == EMPTY and shard.id not in self._closed:
                    # Its log is watched no more, so what a merge that is under way commits is seen only by the next.
                    self._closed.add(shard.id)
                    self.by(shard.id, now)
                self._targets[shard.id] = max(target, before or 0)

    def by(self, id: str, at: int) -> None:
        """To be looked after at this time, or earlier if that was said before."""
        if at < self._at.get(id, at + 1):
            self._at[id] = at
            heappush(self._queue, (at, id))

    def ended(self, id: str, tended: Tended) -> None:
        """It was looked after; what is left is for later."""
        if tended.again_at is not None:
            self.by(id, tended.again_at)
        self._pinned.pop(id, None)
        if tended.pinned is not None and id in self._targets:  # it may have been given up meanwhile
            self._pinned[id] = tended.pinned

    def forget(self, id: str) -> None:
        for memory in (self._targets, self._at, self._pinned):
            memory.pop(id, None)
        self._closed.discard(id)

    def release(self, state: State, now: int) -> None:
        """Those whose dead files nobody pins any more are due."""
        if now < self._pins_at:
            return
        self._pins_at = now + PINS_EVERY_MS
        for id, version in list(self._pinned.items()):
            limit = clean_up_limit(state, id)
            if limit is not None and limit >= version:
                del self._pinned[id]
                self.by(id, now)

    def due(self, now: int, *, most: int, may: Callable[[str], bool]) -> list[str]:
        """Those whose time has come, the earliest first; those that may not be worked on now keep their place."""
        found: list[str] = []
        kept = []
        while self._queue and self._queue[0][0] <= now and len(found) < most:
            at, id = item = heappop(self._queue)
            if self._at.get(id) != at:
                continue
            if may(id):
                del self._at[id]
                found.append(id)
            else:
                kept.append(item)
        for item in kept:
            heappush(self._queue, item)
        return found

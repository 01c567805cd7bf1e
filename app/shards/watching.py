"""Which shards to look at now, and which of what was found to pass on.

Level-triggered: positions come from the state, and what was passed on but is not in the state after a while is looked
for again. Until then it is only not said twice. So nothing is lost with whoever was told, and a repeat is harmless.

All shards are looked at on every tick while that is cheap, as it is on local paths. If it is not (`budget_ms`), those
that stay quiet are looked at less often: after `quiet_after_ms` every 30th of the time for which they were quiet, but
at least every `longest_pause_ms`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Final

import msgspec

from app.shards.looking import Looker, Seen, Target, well_again
from app.shards.positions import Changes, Positions

_PART_OF_QUIET: Final = 30
_PREFIX: Final = "watch."


class Pacing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often to look; milliseconds and numbers of shards."""

    budget_ms: int = 250
    quiet_after_ms: int = 60_000
    longest_pause_ms: int = 5_000
    confirm_within_ms: int = 10_000  # how far the state's tables may be behind before something is said again
    check_every_ms: int = 300_000  # gaps, and tables that are gone
    checks_per_tick: int = 1_000

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Pacing:
        """From options of the data source whose names begin with `watch.`."""
        given = {name[len(_PREFIX) :]: value for name, value in options.items() if name.startswith(_PREFIX)}
        return msgspec.convert(given, cls, strict=False)


class _Watched(Target):
    """A shard, how far the state knows it, and when to look at it. Times are on the watcher's clock, in seconds."""

    __slots__ = ("active_at", "due_at", "in_state", "retry_at")

    def __init__(self, target: Target, now: float) -> None:
        super().__init__(target.shard, target.location, target.table_id, target.version, target.upper)
        self.in_state = target
        self.active_at = now
        self.due_at = now
        self.retry_at = now


class Watcher:
    """For one thread. Looks by itself (`tick`), or says what is to be looked at elsewhere (`targets`)."""

    def __init__(
        self,
        positions: Positions,
        looker: Looker,
        pacing: Pacing,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._positions = positions
        self._looker = looker
        self._pacing = pacing
        self._clock = clock
        self._watched: dict[str, _Watched] = {}
        self._unconfirmed: dict[str, float] = {}
        self._errors: dict[str, None] = {}  # as we have found them, on this side
        self._failing: dict[str, None] = {}  # as the state has them, whoever found them
        self._to_check: dict[str, None] = {}
        self._check_all_at = clock() + pacing.check_every_ms / 1000
        self._look_s = 0.0

    def __len__(self) -> int:
        return len(self._watched)

    def follow(self) -> None:
        """Takes in what changed in the state."""
        changes = self._positions.changes()
        if changes is not None:
            self._take_in(changes)

    def tick(self) -> list[Seen]:
        """Looks at what is due; what is new, and errors that were not reported yet."""
        now = self._clock()
        self.follow()
        self._go_back(now)
        due = self._due(now)
        started = time.perf_counter()
        news = self._looker.with_news(due)
        if due:
            self._look_s = (time.perf_counter() - started) / len(due)
        found = self._looker.read([target for target in news if target.retry_at <= now])
        failing = [self._watched[shard] for shard in self._errors if self._watched[shard].retry_at <= now]
        found += self._looker.check(self._checks(now) + failing)
        return [seen for seen in found + well_again(failing, found) if self._is_new(seen, now)]

    def targets(self) -> tuple[list[Target], list[Target]]:
        """What others are to look at, and which to check; what they find, and what fails, is seen only in the state."""
        now = self._clock()
        self.follow()
        self._look_s = 1.0  # others look because it takes long
        due = [watched.in_state for watched in self._due(now)]
        due_again = (self._watched[shard] for shard in self._failing if self._watched[shard].retry_at <= now)
        failing = list(islice(due_again, self._pacing.checks_per_tick))
        for watched in failing:
            watched.retry_at = now + self._pacing.longest_pause_ms / 1000
        return due, [watched.in_state for watched in self._checks(now) + failing]

    def _take_in(self, changes: Changes) -> None:
        now = self._clock()
        ended = set(changes.ended)
        if changes.whole:
            ended |= self._watched.keys() - {target.shard for target in changes.watched}
        for shard in ended:
            for memory in (self._watched, self._unconfirmed, self._errors, self._failing, self._to_check):
                memory.pop(shard, None)
        for target in changes.watched:
            watched = self._watched.get(target.shard)
            if watched is None:
                self._watched[target.shard] = _Watched(target, now)
                self._to_check[target.shard] = None
            elif target.version != watched.in_state.version or target.upper != watched.in_state.upper:
                self._moved(watched, target, now)
            self._watched[target.shard].in_state = target
            if target.failing:
                self._failing[target.shard] = None
            else:
                self._failing.pop(target.shard, None)

    def _moved(self, watched: _Watched, target: Target, now: float) -> None:
        """The state knows more of a shard."""
        watched.active_at = watched.due_at = now
        watched.upper = watched.upper.join(target.upper)
        self._unconfirmed.pop(watched.shard, None)
        if target.version >= watched.version:
            watched.version = target.version
        else:
            self._unconfirmed[watched.shard] = now + self._pacing.confirm_within_ms / 1000

    def _go_back(self, now: float) -> None:
        """What was passed on and did not arrive in the state is looked for again."""
        while self._unconfirmed:
            shard, until = next(iter(self._unconfirmed.items()))
            if until > now:
                return
            del self._unconfirmed[shard]
            watched = self._watched[shard]
            watched.version, watched.upper = watched.in_state.version, watched.in_state.upper
            watched.due_at = now
            self._to_check[shard] = None

    def _due(self, now: float) -> list[_Watched]:
        every = list(self._watched.values())
        if self._look_s * len(every) * 1000 <= self._pacing.budget_ms:
            return every
        due = [watched for watched in every if watched.due_at <= now]
        for watched in due:
            watched.due_at = now + self._pause_s(now - watched.active_at)
        return due

    def _pause_s(self, quiet_s: float) -> float:
        if quiet_s * 1000 < self._pacing.quiet_after_ms:
            return 0.0
        # Not all at the same moment, though all may have been quiet from the same moment on.
        part = _PART_OF_QUIET * random.uniform(1.0, 1.25)
        return min(quiet_s / part, self._pacing.longest_pause_ms / 1000 * random.uniform(0.75, 1.0))

    def _checks(self, now: float) -> list[_Watched]:
        if now >= self._check_all_at:
            self._check_all_at = now + self._pacing.check_every_ms / 1000
            self._to_check |= dict.fromkeys(self._watched)
        shards = [shard for shard, _ in zip(self._to_check, range(self._pacing.checks_per_tick), strict=False)]
        for shard in shards:
            del self._to_check[shard]
        return [self._watched[shard] for shard in shards]

    def _is_new(self, seen: Seen, now: float) -> bool:
        watched = self._watched[seen.shard]
        if seen.error is not None:
            watched.retry_at = now + self._pacing.longest_pause_ms / 1000
            known = seen.shard in self._errors
            self._errors[seen.shard] = None
            return not known  # whatever the text is now: some stores put times into theirs
        self._errors.pop(seen.shard, None)
        watched.version, watched.upper = seen.log_version, seen.upper
        watched.active_at = watched.due_at = now
        if seen.log_version > watched.in_state.version:
            self._unconfirmed.setdefault(seen.shard, now + self._pacing.confirm_within_ms / 1000)
        return True

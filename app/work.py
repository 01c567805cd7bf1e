"""Physical work on shards: what is due follows from the state, threads do it, and the loop never waits for them.

Everything here may be done twice, late, or not at all before a crash: whether it is still to be done is found out anew
from the journal and the shard's own log. Before each piece of work the journal is looked at, so that a controller that
was replaced does not begin anything; what it has begun already is harmless (see app/shards).

All memory of what is under way belongs to the thread that calls `tick`. The threads that work tell it, by a queue, when
they have ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

from app.controller import Controller
from app.core.frontier import EMPTY
from app.core.images import Shard
from app.core.shard_work import FIRST_RETRY_MS, LONGEST_RETRY_MS
from app.core.state import State
from app.job import Operations, Tended
from app.tending import Tending
from app.worker import Ended, Kind, Worker

log = logging.getLogger(__name__)

FINALIZE_EVERY_MS: Final = 5_000
WORKERS: Final = 4
"""How many shards are merged and cleaned up at once; as many others are made, altered or purged beside them. How many
are finalized is a parameter. Long merges keep none of the others waiting."""
LONG_MS: Final = 600_000


class _Busy(NamedTuple):
    kind: Kind
    since: int


class Work:
    """Decides in `tick` what is due and starts it. One piece of work per shard at a time.

    `spawn` runs a function in a thread of the given name; `wake` is called when one has ended, so that there may be
    more to start.
    """

    def __init__(
        self,
        controller: Controller,
        operations: Operations,
        *,
        spawn: Callable[[Callable[[], None], str], None],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._controller = controller
        self._spawn = spawn
        self._wake = wake
        self._worker = Worker(controller, operations)
        self._busy: dict[str, _Busy] = {}  # by shard
        self._ended: SimpleQueue[Ended] = SimpleQueue()
        self._failures: dict[tuple[Kind, str], int] = {}
        self._not_before: dict[tuple[Kind, str], int] = {}
        self._created: set[str] = set()
        self._evolved: dict[str, str] = {}  # by shard: the owner whose schema it has
        self._to_evolve: set[str] = set()
        self._tending = Tending()
        self._to_finalize: list[str] = []
        self._finalize_at = 0
        self._complain_at = 0

    def stop(self) -> None:
        """What is under way is left to itself. It may fail, because Spark ends, and that is no news."""
        self._worker.stop()

    def check(self) -> None:
        """Raises what ended the work, if it is more than one shard's matter; then everything can go on."""
        if (failure := self._worker.take_failure()) is not None:
            raise failure

    @property
    def busy(self) -> dict[str, Kind]:
        return {id: busy.kind for id, busy in self._busy.items()}

    def tick(self) -> None:
        """Quick: starts what is due, and waits for nothing."""
        now = self._controller.now()
        self._take_ended()
        self._take_touched(now)
        if now >= self._finalize_at:
            self._finalize_at = now + FINALIZE_EVERY_MS
            # Whoever is busy now stays so until the next tick: nothing is started a second time.
            self._to_finalize = self._controller.step("finalization", lambda machine, now: machine.claim_shards(now))
        for kind, shard in self._controller.read(lambda state: self._chosen(state, now)):
            self._start(kind, shard, now)
        self._complain(now)

    # What has happened.

    def _take_ended(self) -> None:
        while True:
            try:
                kind, shard, at, outcome, tended = self._ended.get_nowait()
            except Empty:
                return
            del self._busy[shard.id]
            key = kind, shard.id
            if outcome == "succeeded":
                self._succeeded(kind, shard, tended)
            elif outcome == "failed" and kind != "finalize":  # of those the machine knows when they are tried again
                number = self._failures[key] = self._failures.get(key, 0) + 1
                self._not_before[key] = at + min(FIRST_RETRY_MS << min(number - 1, 20), LONGEST_RETRY_MS)
            if outcome != "succeeded":
                self._put_off(kind, shard.id, at)

    def _succeeded(self, kind: Kind, shard: Shard, tended: Tended | None) -> None:
        self._failures.pop((kind, shard.id), None)
        self._not_before.pop((kind, shard.id), None)
        if kind == "create":
            self._created.add(shard.id)  # it may be a while until it is seen
        elif kind == "evolve":
            self._evolved[shard.id] = shard.owner
        elif tended is not None:
            self._tending.ended(shard.id, tended)

    def _put_off(self, kind: Kind, id: str, at: int) -> None:
        """It is still to be done. What the state says anyway (create, finalize, purge) is found due by itself."""
        if kind == "tend":
            self._tending.by(id, self._not_before.get((kind, id), at))
        if kind == "evolve":
            self._to_evolve.add(id)

    def _take_touched(self, now: int) -> None:
        touched = self._controller.touched_shards()
        if not touched:
            return
        for shard in touched:
            if shard.log_version is not None:
                self._created.discard(shard.id)
            if shard.state in ("finalizing", "finalized"):
                self._evolved.pop(shard.id, None)
                self._to_evolve.discard(shard.id)
        interval_ms, altered = self._controller.read(
            lambda state: (state.parameters.since_downgrade_interval, self._altered(state, touched))
        )
        self._tending.note(touched, interval_ms, now)
        self._to_evolve |= altered

    def _altered(self, state: State, touched: Iterable[Shard]) -> set[str]:
        """Those whose table may lack columns of their newest schema."""
        return {
            shard.id
            for shard in touched
            if shard.log_version is not None
            and shard.format == "updates"
            and shard.state in ("live", "dropped")
            and (owner := state.collections.get(shard.owner)) is not None
            and owner.schema_version > 0
            and self._evolved.get(shard.id) != owner.id
        }

    # What is to be done.

    def _chosen(self, state: State, now: int) -> list[tuple[Kind, Shard]]:
        """What to start, as far as there is room. Nothing here goes through all shards."""
        taken = set(self._busy)

        def may(kind: Kind, id: str) -> bool:
            return id not in taken and self._not_before.get((kind, id), 0) <= now

        found: list[tuple[Kind, str]] = []

        def take(kind: Kind, ids: Iterable[str], room: int) -> None:
            chosen = sorted(islice((id for id in ids if may(kind, id)), max(0, room)))
            taken.update(chosen)
            found.extend((kind, id) for id in chosen)

        busy = [each.kind for each in self._busy.values()]
        if state.parameters.finalize_shards:
            claimed = (id for id in self._to_finalize if state.shards[id].state == "finalizing")
            take("finalize", claimed, state.parameters.finalization_concurrency - busy.count("finalize"))
        room = WORKERS - sum(kind in ("create", "evolve", "purge") for kind in busy) + len(found)
        take("evolve", self._to_evolve, room - len(found))  # first: creating many tables takes long
        take("purge", state.unpurged, min(1 - busy.count("purge"), room - len(found)))
        take("create", (id for id in state.unseen if id not in self._created), room - len(found))
        take("purge", state.unpurged, room - len(found))
        self._tending.release(state, now)
        room_to_tend = max(0, WORKERS - busy.count("tend"))
        tended = self._tending.due(now, most=room_to_tend, may=lambda id: may("tend", id))
        # One of them may have been given up since it was put off.
        found.extend(("tend", id) for id in tended if state.shards[id].since != EMPTY)
        return [(kind, state.shards[id]) for kind, id in found]

    def _start(self, kind: Kind, shard: Shard, now: int) -> None:
        if kind == "evolve":
            self._to_evolve.discard(shard.id)  # before it begins: it may be altered again meanwhile
        if kind == "finalize":
            self._to_finalize.remove(shard.id)  # one attempt in each round
        self._busy[shard.id] = _Busy(kind, now)
        self._controller.metrics.working.labels(kind).inc()
        self._controller.metrics.work.labels(kind, "started").inc()
        try:
            self._spawn(lambda: self._run(kind, shard, now), f"{kind} {shard.id}")
        except Exception as error:  # noqa: BLE001 - too many threads, or the JVM is gone: later, then
            log.warning("work could not be started kind=%s shard=%s error=%s", kind, shard.id, error)
            self._end(Ended(kind, shard, now, "failed"))

    def _run(self, kind: Kind, shard: Shard, now: int) -> None:
        """In a thread of its own. However it ends, it is known to have ended."""
        ended = Ended(kind, shard, now, "broken off")
        try:
            ended = self._worker.run(kind, shard)
        finally:
            self._end(ended)

    def _end(self, ended: Ended) -> None:
        self._controller.metrics.working.labels(ended.kind).dec()
        self._controller.metrics.work.labels(ended.kind, ended.outcome).inc()
        self._ended.put(ended)
        self._wake()

    def _complain(self, now: int) -> None:
        """Nothing is ever interrupted: it might be about to commit. But someone should know."""
        if now < self._complain_at:
            return
        self._complain_at = now + LONG_MS
        for id, busy in self._busy.items():
            if now - busy.since >= LONG_MS:
                minutes = (now - busy.since) // 60_000
                log.warning("work takes long kind=%s shard=%s minutes=%d", busy.kind, id, minutes)

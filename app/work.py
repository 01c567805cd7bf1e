"""Physical work on shards: what is due follows from the state, threads do it, and the loop never waits for them.

Everything here may be done twice, late, or not at all before a crash: whether it is still to be done is found out anew
from the journal and the shard's own log. Before each piece of work the journal is looked at, so that a controller that
was replaced does not begin anything; what it has begun already is harmless (see app/shards).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import msgspec

from app.controller import Controller, MemoryInDoubt, Stopping
from app.core.errors import BrokenInvariant, Corrupt
from app.core.frontier import EMPTY
from app.core.images import Shard
from app.core.parameters import Parameters
from app.core.shard_work import FIRST_RETRY_MS, LONGEST_RETRY_MS, clean_up_limit
from app.core.state import State
from app.shards.merge_plan import merge_target
from app.state.errors import Fenced, OutcomeUnknown

log = logging.getLogger(__name__)

FINALIZE_EVERY_MS: Final = 5_000
WORKERS: Final = 4
"""How many shards are worked on at once, apart from finalizations, which have a limit of their own."""

# Not a matter of one shard: whoever supervises us has to know.
FATAL: Final = (Fenced, BrokenInvariant, Corrupt, OutcomeUnknown)


class Job(msgspec.Struct, frozen=True):
    """A shard as the journal has it, and what whoever works on it needs to know beside."""

    shard: Shard
    schema: str | None
    epoch: int
    clean_up_limit: int | None
    parameters: Parameters
    now: int


class Operations(Protocol):
    """What can be done to a shard. Each may be repeated, and finds out by itself what is done already."""

    def create(self, job: Job) -> None: ...

    def evolve(self, job: Job) -> None: ...

    def tend(self, job: Job) -> int | None:
        """Merges and cleans up, as far as it is due; when to come again though nothing changes, if at all."""

    def finalize(self, job: Job) -> None: ...

    def purge(self, job: Job) -> None: ...


def _target(shard: Shard) -> int:
    """Up to where its history may be merged now."""
    return merge_target(shard.since, shard.upper) or 0


class Work:
    """Decides in `tick` what is due and starts it. One piece of work per shard at a time."""

    def __init__(
        self, controller: Controller, operations: Operations, *, spawn: Callable[[Callable[[], None], str], None]
    ) -> None:
        self._controller = controller
        self._operations = operations
        self._spawn = spawn
        self._lock = threading.Lock()
        self._busy: dict[str, str] = {}  # by shard: what is being done to it
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, int] = {}
        self._created: set[str] = set()
        self._evolved: dict[str, str] = {}  # by shard: the owner whose schema it has
        self._to_evolve: set[str] = set()
        self._tended: dict[str, int] = {}  # by shard: the merge target when it was last tended
        self._tend_at: dict[str, int] = {}
        self._finalize_at = 0
        self._failure: BaseException | None = None
        self._stopped = False

    def stop(self) -> None:
        """What is under way is left to itself. It may fail, because Spark ends, and that is no news."""
        self._stopped = True

    def check(self) -> None:
        """Raises what ended the work, if it is more than one shard's matter; then everything can go on."""
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @property
    def busy(self) -> dict[str, str]:
        with self._lock:
            return dict(self._busy)

    def tick(self) -> None:
        """Quick: starts what is due, and waits for nothing."""
        now = self._controller.now()
        if touched := self._controller.touched_shards():
            for shard in touched:
                self._note(shard, now)
            self._to_evolve |= self._controller.read(lambda state: self._altered(state, touched))
        if now >= self._finalize_at:
            self._finalize_at = now + FINALIZE_EVERY_MS
            self._start_finalizations()
        for kind, ids in self._due(now).items():
            for id in ids:
                if len(self._others()) >= WORKERS:
                    return
                self._start(kind, id)

    def _note(self, shard: Shard, now: int) -> None:
        """Remembers when a shard that has changed is to be tended: not more often than its since moves."""
        if shard.log_version is not None:
            self._created.discard(shard.id)
        if shard.state in ("finalizing", "finalized"):
            for forgotten in (self._tended, self._tend_at, self._evolved):
                forgotten.pop(shard.id, None)
        elif shard.format == "updates" and shard.log_version is not None:
            before = self._tended.get(shard.id)
            if before is None:
                self._tend_by(shard.id, now)
            elif _target(shard) > before:
                interval = self._controller.read(lambda state: state.parameters.since_downgrade_interval)
                self._tend_by(shard.id, now + interval)

    def _tend_by(self, id: str, at: int) -> None:
        with self._lock:
            self._tend_at[id] = min(at, self._tend_at.get(id, at))

    def _due(self, now: int) -> dict[str, list[str]]:
        tend = sorted((at, id) for id, at in list(self._tend_at.items()) if at <= now)  # a copy: threads add to it

        def ask(state: State) -> dict[str, list[str]]:
            return {
                "create": [id for id in sorted(state.unseen) if id not in self._created],
                "evolve": sorted(self._to_evolve),
                # Nobody reads a shard whose since is []: what is there is deleted as a whole, soon.
                "tend": [id for _, id in tend if state.shards[id].since != EMPTY],
                "purge": sorted(state.unpurged),
            }

        due = self._controller.read(ask)
        busy = self.busy
        return {
            kind: [id for id in ids if id not in busy and self._not_before.get(id, 0) <= now]
            for kind, ids in due.items()
        }

    def _altered(self, state: State, touched: Iterable[Shard]) -> set[str]:
        """Those whose table may lack columns of their newest schema."""
        return {
            shard.id
            for shard in touched
            if shard.log_version is not None
            and shard.state in ("live", "dropped")
            and (owner := state.collections.get(shard.owner)) is not None
            and owner.schema_version > 0
            and self._evolved.get(shard.id) != owner.id
        }

    def _others(self) -> list[str]:
        return [id for id, kind in self.busy.items() if kind != "finalize"]

    def _start_finalizations(self) -> None:
        claimed = self._controller.step("finalization", lambda machine, now: machine.claim_shards(now))
        most = self._controller.read(lambda state: state.parameters.finalization_concurrency)
        for id in claimed:
            busy = self.busy
            if list(busy.values()).count("finalize") >= most:
                return
            if id not in busy:
                self._start("finalize", id)

    def _start(self, kind: str, id: str) -> None:
        if kind == "tend":
            self._tend_at.pop(id, None)
            self._tended[id] = self._controller.read(lambda state: _target(state.shards[id]))
        if kind == "evolve":
            self._to_evolve.discard(id)  # before it begins: it may be altered again meanwhile
        with self._lock:
            self._busy[id] = kind
        self._count(kind, "started")
        self._spawn(lambda: self._run(kind, id), f"{kind} {id}")

    def _count(self, kind: str, outcome: str) -> None:
        self._controller.metrics.work.labels(kind, outcome).inc()

    def _run(self, kind: str, id: str) -> None:
        """One piece of work, in a thread of its own."""
        try:
            self._controller.look()
            self._perform(kind, self._job(id))
            self._failures.pop(id, None)
            self._not_before.pop(id, None)
            self._count(kind, "succeeded")
            if kind != "finalize":
                self._controller.step(kind, lambda machine, now: machine.work_succeeded(now, id))
        except (Stopping, MemoryInDoubt):
            self._put_off(kind, id, 0)
        except FATAL as error:
            self._put_off(kind, id, 0)
            with self._lock:
                self._failure = self._failure or error
        except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this shard alone and is tried again
            self._failed(kind, id, error)
        finally:
            with self._lock:
                self._busy.pop(id, None)

    def _put_off(self, kind: str, id: str, until: int) -> None:
        """It is still to be done. What the state says anyway (create, finalize, purge) is found due by itself."""
        if kind == "tend":
            self._tend_by(id, until)
        if kind == "evolve":
            self._to_evolve.add(id)

    def _job(self, id: str) -> Job:
        def ask(state: State) -> Job:
            shard = state.shards[id]
            owner = state.collections.get(shard.owner)
            return Job(
                shard=shard,
                schema=None if owner is None else owner.description.schema,
                epoch=self._controller.epoch,
                clean_up_limit=clean_up_limit(state, id),
                parameters=state.parameters,
                now=self._controller.now(),
            )

        return self._controller.read(ask)

    def _perform(self, kind: str, job: Job) -> None:
        id = job.shard.id
        match kind:
            case "create":
                self._operations.create(job)
                self._created.add(id)
            case "evolve":
                self._operations.evolve(job)
                self._evolved[id] = job.shard.owner
            case "tend":
                again_at = self._operations.tend(job)
                if again_at is not None:
                    self._tend_by(id, again_at)
            case "finalize":
                self._operations.finalize(job)
                self._controller.step("finalized", lambda machine, now: machine.finalized(now, id))
                log.info("finalized shard=%s location=%s", id, job.shard.location)
            case "purge":
                self._operations.purge(job)
                self._controller.step("purged", lambda machine, now: machine.purged(now, id))
                log.info("purged shard=%s location=%s", id, job.shard.location)

    def _failed(self, kind: str, id: str, error: Exception) -> None:
        if self._stopped:
            return
        sentence = f"{kind}: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        log.warning("work failed, it is tried again shard=%s error=%s", id, sentence)
        self._count(kind, "failed")
        try:
            if kind == "finalize":
                self._controller.step("failed", lambda machine, now: machine.finalization_failed(now, id, sentence))
                return
            number = self._failures[id] = self._failures.get(id, 0) + 1
            pause = min(FIRST_RETRY_MS << min(number - 1, 20), LONGEST_RETRY_MS)
            self._not_before[id] = self._controller.now() + pause
            self._put_off(kind, id, self._not_before[id])
            self._controller.step("failed", lambda machine, now: machine.work_failed(now, id, sentence))
        except (Stopping, MemoryInDoubt):
            pass
        except FATAL as fatal:
            with self._lock:
                self._failure = self._failure or fatal

"""One piece of work on a shard, in a thread of its own: is it still ours to do? Does it, and journals what it did."""

from __future__ import annotations

import logging
import threading
from typing import Final, Literal, NamedTuple

from app.controller import Controller
from app.core.advancing import Observation
from app.core.errors import BrokenInvariant, Corrupt
from app.core.frontier import EMPTY
from app.core.images import Shard
from app.core.shard_work import Merge, clean_up_limit
from app.core.state import State
from app.job import Job, Operations, Tended
from app.memory import MemoryInDoubt, Stopping
from app.state.errors import Fenced, OutcomeUnknown

log = logging.getLogger(__name__)

# Not a matter of one shard: whoever supervises us has to know. A newer epoch on a shard means that we were replaced,
# even if our journal does not know of it: then it is not the newest one, but one from a backup, say.
FATAL: Final = (Fenced, BrokenInvariant, Corrupt, OutcomeUnknown)

Kind = Literal["create", "evolve", "purge", "tend", "finalize"]
Outcome = Literal["succeeded", "failed", "broken off"]


class Ended(NamedTuple):
    """A piece of work that is over. `broken off`: it is not known to be done, and nobody's fault."""

    kind: Kind
    shard: Shard
    at: int
    outcome: Outcome
    tended: Tended | None = None


class Worker:
    """Used by many threads at once, each with a shard of its own."""

    def __init__(self, controller: Controller, operations: Operations) -> None:
        self._controller = controller
        self._operations = operations
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._stopped = False

    def stop(self) -> None:
        """From now on failures are no news."""
        self._stopped = True

    def take_failure(self) -> BaseException | None:
        """What is more than one shard's matter, once."""
        with self._lock:
            failure, self._failure = self._failure, None
        return failure

    def run(self, kind: Kind, shard: Shard) -> Ended:
        outcome: Outcome = "broken off"
        tended = None
        try:
            self._controller.look()
            tended = self._perform(kind, self._job(shard.id))
            if kind != "finalize":
                self._controller.step(kind, lambda machine, now: machine.work_ended(now, shard.id, kind, None))
            outcome = "succeeded"
        except (Stopping, MemoryInDoubt):
            pass
        except FATAL as error:
            self._halt(error)
        except BaseException as error:  # noqa: BLE001 - whatever it is (a panic of deltalake's is no Exception), it
            # concerns this shard alone and is tried again, later.
            if not self._stopped:
                outcome = "failed"
                self._say_failed(kind, shard.id, error)
        return Ended(kind, shard, self._controller.now(), outcome, tended)

    def _halt(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error

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

    def _perform(self, kind: Kind, job: Job) -> Tended | None:
        id = job.shard.id
        match kind:
            case "create":
                self._operations.create(job)
            case "evolve":
                self._operations.evolve(job)
            case "tend":
                tended = self._operations.tend(job, lambda merge: self._note_merged(id, merge))
                if job.shard.upper == EMPTY:
                    # Nobody watches its log any more: without this, the files that we removed would stay for ever.
                    self._controller.observe([Observation(id, EMPTY, tended.log_version)])
                return tended
            case "finalize":
                self._operations.finalize(job)
                self._controller.step("finalized", lambda machine, now: machine.finalized(now, id))
                log.info("finalized shard=%s location=%s", id, job.shard.location)
            case "purge":
                self._operations.purge(job)
                self._controller.step("purged", lambda machine, now: machine.purged(now, id))
                log.info("purged shard=%s location=%s", id, job.shard.location)
        return None

    def _note_merged(self, id: str, merge: Merge) -> None:
        self._controller.step("merged", lambda machine, now: machine.merged(now, id, merge))

    def _say_failed(self, kind: Kind, id: str, error: BaseException) -> None:
        sentence = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        log.warning("work failed, it is tried again kind=%s shard=%s error=%s", kind, id, sentence)
        try:
            if kind == "finalize":
                said = f"{kind}: {sentence}"
                self._controller.step("failed", lambda machine, now: machine.finalization_failed(now, id, said))
            else:
                self._controller.step("failed", lambda machine, now: machine.work_ended(now, id, kind, sentence))
        except (Stopping, MemoryInDoubt):
            pass
        except FATAL as fatal:
            self._halt(fatal)

"""The state machine: every change of the state is one of these steps.

A step is computed whole and then installed; a refused one (`Refused`, `BrokenInvariant`) changes nothing. What it
returns as `changes` is what the journal stores, and folding all of it gives this state again. `now` is the
controller's clock, one reading per batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from app.core import advancing, altering, dropping, folding, holding, housekeeping, shard_work
from app.core.advancing import Observation
from app.core.creating import Registrar
from app.core.descriptions import Description
from app.core.draft import Draft
from app.core.errors import BrokenInvariant, Refused
from app.core.frontier import Frontier
from app.core.images import HORIZON_KEY, PARAMETER, Changes, Hold, Horizon, Image, Key, Parameter
from app.core.locations import Warehouse
from app.core.placing import Look, Placing, nothing_there
from app.core.policy import SettablePolicy
from app.core.shard_work import Downgrade, Merge, Pace

R = TypeVar("R")


class Step(msgspec.Struct, Generic[R], frozen=True):
    """What a step did: its result, the new image of everything that changed, and what someone should know."""

    result: R
    changes: Changes
    warnings: list[str]


class Reconciliation(msgspec.Struct, frozen=True):
    """How a catalogue and our live collections differ."""

    extra: list[str]
    missing: list[str]


class Machine:
    """Read holds, policies and drops over all collections."""

    def __init__(
        self,
        *,
        warehouse: Warehouse,
        epoch: int = 1,
        images: Iterable[tuple[Key, Image]] = (),
        namespace: str = "",
        look: Look = nothing_there,
    ) -> None:
        """`namespace` ends the name of every new shard: another state over the same warehouse has another one.

        `look` says what is at a location that a command gives.
        """
        self.state = folding.fold(images)
        self.epoch = epoch
        self.pace = Pace()
        self._warehouse = warehouse
        self._namespace = namespace
        self._look = look

    # Commands of clients.

    def create_collections(
        self,
        now: int,
        descriptions: Iterable[Description],
        *,
        register_ts: int | None,
    ) -> Step[None]:
        def create(draft: Draft) -> None:
            placing = Placing(draft, self._warehouse, self._look, self._namespace, self.epoch)
            Registrar(draft, placing).create(descriptions, register_ts)

        return self._step(now, create)

    def alter_table_desc(self, now: int, *, existing: str, new: str, schema: str, expected_version: int) -> Step[None]:
        return self._step(
            now,
            lambda draft: altering.alter_table(
                draft, existing_id=existing, new_id=new, schema=schema, expected_version=expected_version
            ),
        )

    def drop_collections(self, now: int, ids: Iterable[str]) -> Step[None]:
        return self._step(now, lambda draft: dropping.drop(draft, ids))

    def undrop_collections(self, now: int, ids: Iterable[str]) -> Step[None]:
        return self._step(now, lambda draft: dropping.undrop(draft, ids))

    def set_read_policies(self, now: int, policies: Iterable[tuple[str, SettablePolicy]]) -> Step[None]:
        return self._step(now, lambda draft: advancing.set_policies(draft, policies))

    def acquire_read_holds(
        self,
        now: int,
        *,
        command_id: str,
        collections: Iterable[str],
        at: Frontier | None,
        holder: str,
        purpose: str | None = None,
        lease_ms: int | None = None,
        pin_files: bool = False,
    ) -> Step[list[Hold]]:
        return self._step(
            now,
            lambda draft: holding.acquire(
                draft,
                command_id=command_id,
                collections=collections,
                at=at,
                holder=holder,
                purpose=purpose,
                lease_ms=lease_ms,
                pin_files=pin_files,
            ),
        )

    def downgrade_read_holds(self, now: int, moves: Sequence[tuple[str, Frontier]]) -> Step[list[Hold]]:
        return self._step(now, lambda draft: holding.downgrade(draft, moves))

    def release_read_holds(self, now: int, ids: Iterable[str]) -> Step[list[Hold]]:
        return self._step(now, lambda draft: holding.release(draft, ids))

    def clone_read_holds(self, now: int, ids: Iterable[str], *, command_id: str) -> Step[list[Hold]]:
        return self._step(now, lambda draft: holding.clone(draft, command_id, ids))

    def merge_read_holds(self, now: int, ids: Iterable[str]) -> Step[list[Hold]]:
        return self._step(now, lambda draft: holding.merge(draft, ids))

    def renew_read_holds(self, now: int, ids: Iterable[str], *, lease_ms: int | None) -> Step[list[Hold]]:
        return self._step(now, lambda draft: holding.renew(draft, ids, lease_ms))

    def update_parameters(self, now: int, values: Mapping[str, Any]) -> Step[None]:
        def update(draft: Draft) -> None:
            updated = draft.parameters.updated(values)
            for name in values:
                if getattr(updated, name) != getattr(draft.parameters, name):
                    draft.changes[(PARAMETER, name)] = Parameter(getattr(updated, name))
            if updated.max_command_age > draft.parameters.max_command_age:
                draft.changes[HORIZON_KEY] = Horizon(draft.state.oldest_remembered(now))

        return self._step(now, update)

    def reconcile(self, catalogue: Iterable[str]) -> Reconciliation:
        wanted = set(catalogue)
        live = {collection.id for collection in self.state.collections.values() if not collection.dropped}
        return Reconciliation(extra=sorted(live - wanted), missing=sorted(wanted - live))

    # What the controller sees and does by itself.

    def boot(self, now: int) -> Step[None]:
        """The first step of a new controller on a state that it has folded."""
        return self._step(now, housekeeping.boot)

    def observe(self, now: int, observations: Iterable[Observation]) -> Step[None]:
        return self._step(now, lambda draft: advancing.observe(draft, observations))

    def expire_leases(self, now: int, *, applied_until: int) -> Step[list[str]]:
        """What was on the command topic at `applied_until` has been applied: a renewal in a backlog counts."""
        return self._step(now, lambda draft: housekeeping.expire_leases(draft, min(now, applied_until)))

    def purge(self, now: int) -> Step[list[str]]:
        """Tombstones that are old enough, and the reasons of holds long gone."""

        def purge(draft: Draft) -> list[str]:
            housekeeping.forget_departures(draft)
            return housekeeping.purge_tombstones(draft)

        return self._step(now, purge)

    def downgrade_sinces(self, now: int) -> Step[list[Downgrade]]:
        """Makes those since downgrades durable that are due now; the work that they allow comes after."""
        due = self.pace.due_downgrades(self.state, now)
        step = self._step(now, lambda draft: shard_work.downgrade_sinces(draft, due, self.epoch))
        self.pace.downgraded_at.update((downgrade.shard, now) for downgrade in due)
        return Step(due, step.changes, step.warnings)

    def claim_shards(self, now: int) -> Step[list[str]]:
        """The shards to finalize in this round, those of earlier rounds included."""
        eligible = self.pace.eligible_for_finalization(self.state, now)
        return self._step(now, lambda draft: shard_work.claim(draft, eligible))

    def finalized(self, now: int, shard: str) -> Step[None]:
        step = self._step(now, lambda draft: shard_work.finalized(draft, shard))
        self.pace.retry_at.pop(shard, None)
        self.pace.downgraded_at.pop(shard, None)
        return step

    def finalization_failed(self, now: int, shard: str, error: str) -> Step[int]:
        step = self._step(now, lambda draft: shard_work.finalization_failed(draft, shard, error))
        self.pace.retry_at[shard] = now + step.result
        return step

    def purged(self, now: int, shard: str) -> Step[None]:
        """Nothing of a finalized shard is left on disk."""
        self.pace.retry_at.pop(shard, None)
        return self._step(now, lambda draft: shard_work.purged(draft, shard))

    def merged(self, now: int, shard: str, merge: Merge) -> Step[None]:
        return self._step(now, lambda draft: shard_work.note_merge(draft, shard, merge))

    def work_ended(self, now: int, shard: str, kind: str, error: str | None) -> Step[None]:
        """Some work on a shard did not go well, and is tried again; None: it did."""
        return self._step(now, lambda draft: shard_work.note_error(draft, shard, kind, error))

    def watched(self, now: int, errors: Mapping[str, str | None]) -> Step[None]:
        """What is wrong with the logs of shards, or (None) no longer is."""

        def note(draft: Draft) -> None:
            for shard, error in errors.items():
                shard_work.note_error(draft, shard, shard_work.WATCH, error)

        return self._step(now, note)

    def begin_watching(self, now: int) -> Step[None]:
        """Whoever watched before has ended. What is still wrong is said again at the first look."""
        ids = [shard.id for shard in self.state.shards.values() if shard.last_error is not None]
        return self.watched(now, dict.fromkeys(ids))

    def _step(self, now: int, compute: Callable[[Draft], R]) -> Step[R]:
        draft = Draft(self.state, now)
        try:
            result = compute(draft)
            draft.finish()
        except (Refused, BrokenInvariant):
            raise
        except Exception as error:  # whatever a mistake of ours raises, nothing has been installed yet
            raise BrokenInvariant(f"A step failed with {type(error).__name__}: {error}") from error
        return Step(result, draft.install(), draft.warnings)

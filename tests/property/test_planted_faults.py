"""Tests of the tests: each plausible mistake, planted in the program, is noticed by comparing with the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest

from app import commands
from app.core import advancing, altering, capabilities, creating, dropping, folding, holding, housekeeping, shard_work
from app.core.capabilities import Capabilities
from app.core.draft import Draft
from app.core.frontier import EMPTY, Frontier
from app.core.images import HOLD, TOMBSTONE, Collection, Hold, Image, Key
from app.core.machine import Machine
from app.core.shard_work import Downgrade, Pace
from app.core.state import State
from app.simulate import Simulator
from tests.property.driver import run

Plant = Callable[[pytest.MonkeyPatch], None]
STEPS = 30_000  # most are noticed within a few hundred
replace = msgspec.structs.replace


def least_and_greatest_exchanged(patch: pytest.MonkeyPatch) -> None:
    def greatest_after(self: Capabilities, deltas: dict[Frontier, int]) -> Frontier:
        counts = self.counts()
        for time, delta in deltas.items():
            counts[time] = counts.get(time, 0) + delta
        return max((time for time, count in counts.items() if count > 0), default=EMPTY)

    patch.setattr(Capabilities, "least_after", greatest_after)


def an_expired_lease_leaves_its_count(patch: pytest.MonkeyPatch) -> None:
    def expire(draft: Draft, hold: Hold) -> None:
        draft.changes[(HOLD, hold.id)] = None

    patch.setattr(housekeeping, "expire", expire)


def the_rate_limit_applies_to_the_downgrade_to_empty(patch: pytest.MonkeyPatch) -> None:
    def due_downgrades(self: Pace, state: State, now: int) -> list[Downgrade]:
        interval = state.parameters.since_downgrade_interval
        return [
            Downgrade(id, state.wanted_since(state.shards[id]))
            for id in sorted(state.pending_downgrades)
            if self.downgraded_at.get(id, -interval) + interval <= now
        ]

    patch.setattr(Pace, "due_downgrades", due_downgrades)


def the_first_error_ends_the_rest(patch: pytest.MonkeyPatch) -> None:
    """A round of finalization in which one failed leaves out those that come after it."""
    claim_shards = Machine.claim_shards

    def claim(self: Machine, now: int) -> Any:
        step = claim_shards(self, now)
        failed_before = [id for id in step.result if self.state.shards[id].attempts]
        return replace(step, result=failed_before or step.result)

    patch.setattr(Machine, "claim_shards", claim)


def a_policy_may_go_back(patch: pytest.MonkeyPatch) -> None:
    def move_implied(self: Draft, collection: Collection, wanted: Frontier) -> Collection:
        self.count(collection.id, collection.implied, -1)
        self.count(collection.id, wanted, +1)
        return replace(collection, implied=wanted)

    patch.setattr(Draft, "move_implied", move_implied)


def a_shared_shard_is_given_up_with_its_first_collection(patch: pytest.MonkeyPatch) -> None:
    drop = dropping.drop

    def drop_shard_too(draft: Draft, ids: Iterable[str]) -> None:
        drop(draft, ids)
        for id in ids:
            collection = draft.collection(id)
            if collection is not None and draft.shard(collection.shard).state == "live":
                draft.put_shard(replace(draft.shard(collection.shard), state="dropped", dropped_at=draft.now))

    patch.setattr(dropping, "drop", drop_shard_too)


def the_primary_is_lost_on_restart(patch: pytest.MonkeyPatch) -> None:
    fold = folding.fold

    def forgetful(images: Iterable[tuple[Key, Image]]) -> State:
        return fold((key, replace(i, primary=None) if isinstance(i, Collection) else i) for key, i in images)

    patch.setattr(folding, "fold", forgetful)


def changes_that_meet_are_not_summed(patch: pytest.MonkeyPatch) -> None:
    """Collections are taken by name instead of by rank."""
    patch.setattr(capabilities, "_descending", lambda rank: (0, 0) if rank else rank)


def a_restart_prolongs_the_undrop_window(patch: pytest.MonkeyPatch) -> None:
    boot = housekeeping.boot

    def prolonging(draft: Draft) -> None:
        boot(draft)
        for hold in draft.state.holds.values():
            if hold.is_controllers and hold.lease_expires_at is not None:
                window = hold.lease_expires_at - hold.acquired_at
                draft.changes[(HOLD, hold.id)] = replace(hold, lease_expires_at=draft.now + window)

    patch.setattr(housekeeping, "boot", prolonging)


def a_restart_does_not_renew_leases(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(housekeeping, "boot", lambda draft: None)  # noqa: ARG005 - that is the fault


def a_duplicate_is_applied_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commands.CommandProcessor, "_remember", lambda *_: None)


def a_duplicate_is_forgotten_on_restart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commands.CommandProcessor, "restore", lambda *_, **__: None)


def a_tombstone_goes_before_its_shard_is_finalized(patch: pytest.MonkeyPatch) -> None:
    def purge(draft: Draft) -> list[str]:
        draft.changes.update(dict.fromkeys([(TOMBSTONE, id) for id in draft.state.tombstones], None))
        return []

    patch.setattr(housekeeping, "purge_tombstones", purge)


def a_transaction_log_does_not_move_its_members(patch: pytest.MonkeyPatch) -> None:
    def observe(draft: Draft, observations: Iterable[advancing.Observation]) -> None:
        patch.setattr(draft.state, "members", {})
        original(draft, observations)

    original = advancing.observe
    patch.setattr(advancing, "observe", observe)


def a_merged_hold_is_at_the_greatest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(holding, "min", lambda times, **_: max(times, default=None), raising=False)


def a_hold_is_acquired_at_the_implied_capability(patch: pytest.MonkeyPatch) -> None:
    live = Draft.live
    patch.setattr(Draft, "live", lambda self, id: replace(live(self, id), since=live(self, id).implied))


def a_failed_finalization_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shard_work, "FIRST_RETRY_MS", 0)


def an_altered_table_keeps_its_shard(patch: pytest.MonkeyPatch) -> None:
    """The new collection does not become the shard's owner."""
    take_over = altering._take_over

    def keep(draft: Draft, existing: Collection, *rest: Any) -> None:
        take_over(draft, existing, *rest)
        draft.put_shard(replace(draft.shard(existing.shard), owner=existing.id))

    patch.setattr(altering, "_take_over", keep)


def a_dependency_is_not_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(creating, "source_dependencies", lambda *_: iter(()))


def any_schema_may_share_the_table_of_a_primary(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(creating.Registrar, "_check_schema", lambda *_: None)


def a_claim_ignores_rows_that_are_still_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shard_work, "_is_claimable", lambda *_: True)
    patch.setattr(shard_work, "_claimed", Draft.shard)  # or the program would notice by itself


FAULTS: list[Plant] = [
    least_and_greatest_exchanged,
    an_expired_lease_leaves_its_count,
    the_rate_limit_applies_to_the_downgrade_to_empty,
    the_first_error_ends_the_rest,
    a_policy_may_go_back,
    a_shared_shard_is_given_up_with_its_first_collection,
    the_primary_is_lost_on_restart,
    changes_that_meet_are_not_summed,
    a_restart_prolongs_the_undrop_window,
    a_restart_does_not_renew_leases,
    a_duplicate_is_applied_again,
    a_duplicate_is_forgotten_on_restart,
    a_tombstone_goes_before_its_shard_is_finalized,
    a_transaction_log_does_not_move_its_members,
    a_merged_hold_is_at_the_greatest,
    a_hold_is_acquired_at_the_implied_capability,
    a_failed_finalization_does_not_wait,
    an_altered_table_keeps_its_shard,
    a_dependency_is_not_held,
    any_schema_may_share_the_table_of_a_primary,
    a_claim_ignores_rows_that_are_still_there,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_noticed(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"seed 1, episode \d+, line \d+") as noticed:
        run(1, STEPS, Simulator)
    assert "the program crashed" not in str(noticed.value), "the fault must give a wrong answer, not a broken program"


def test_without_a_fault_the_same_lines_pass() -> None:
    run(1, 5_000, Simulator)

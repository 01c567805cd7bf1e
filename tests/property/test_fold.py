"""Folding the images that the steps returned gives the same state: the durable part, and all that follows from it."""

from __future__ import annotations

from typing import Any

from app.core.folding import fold
from app.core.state import State
from app.simulate import Simulator
from tests.property.driver import run

STEPS = 4_000


def derived(state: State) -> dict[str, Any]:
    """What a state derives from its images, in a form that can be compared."""
    last = 2**62
    return {
        "parameters": state.parameters,
        "capabilities": {id: each.counts() for id, each in state.capabilities.items()},
        "on_shard": {shard: ids for shard, ids in state.on_shard.items() if ids},
        "live_on_shard": {shard: number for shard, number in state.live_on_shard.items() if number},
        "members": {log: ids for log, ids in state.members.items() if ids},
        "pins": {id: pins for id, pins in state.pins.items() if pins},
        "taken": {shard.location: state.taken.overlapping(shard.location) for shard in state.shards.values()},
        "finalization_log": state.finalization_log,
        "pending_downgrades": state.pending_downgrades,
        "unseen": state.unseen,
        "unpurged": state.unpurged,
        "tombstones_of": {shard: ids for shard, ids in state.tombstones_of.items() if ids},
        "leases": sorted(state.leases.due(last)),
        "departures": sorted(state.departures.due(last)),
        "purges": sorted(state.purges.due(last)),
        "levels": {id: level for id, (level, _) in state.ranks.items()},
    }


class FoldingSimulator(Simulator):
    """Compares its state with the folded journal after every line."""

    def line(self, raw: bytes) -> bytes:
        reply = super().line(raw)
        live, folded = self.machine.state, fold(self.journal.decoded().items())
        assert folded.images() == live.images()
        assert derived(folded) == derived(live)
        for collection in live.collections.values():
            for dependency in collection.dependencies:
                assert live.ranks[dependency] < live.ranks[collection.id], "a dependency ranks below its dependents"
        return reply


def test_folding_the_journal_rebuilds_the_state() -> None:
    run(2, STEPS, FoldingSimulator)

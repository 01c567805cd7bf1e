"""From the images of a journal back to the state, with a look at everything that must be true of it.

Whoever works on shards goes by this state, so images that break a rule are not taken up: stop, touch nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from app.core.capabilities import Capabilities, Deltas, rank_of
from app.core.errors import Corrupt
from app.core.frontier import EMPTY, Frontier
from app.core.images import SHARD, TYPES, Collection, Image, Key, Parameter, Tombstone
from app.core.parameters import Parameters
from app.core.state import State


def fold(images: Iterable[tuple[Key, Image]]) -> State:
    """The state that a journal's images describe, exactly; Corrupt if they break a rule."""
    by_key = dict(images)
    for (entity, key), image in by_key.items():
        if entity not in TYPES:
            raise Corrupt(f"There is no entity {entity!r}.")
        if isinstance(image, Collection | Tombstone) and (SHARD, image.shard) not in by_key:
            raise Corrupt(f"The shard of {entity} {key!r} is missing.")
        if isinstance(image, Parameter) and key not in Parameters.__struct_fields__:
            raise Corrupt(f"There is no parameter {key!r}.")
    state = State()
    state.install(by_key, {})
    _rank(state)
    _count(state)
    _check_shards(state)
    return state


def _rank(state: State) -> None:
    """Dependencies first, whatever their depth."""
    collections, ranks = state.collections, state.ranks
    for start in collections:
        path = [] if start in ranks else [(start, iter(collections[start].dependencies))]
        while path:
            id, dependencies = path[-1]
            missing = next((each for each in dependencies if each not in ranks), None)
            if missing is None:
                ranks[id] = rank_of(collections[id].dependencies, collections[id].primary, ranks)
                path.pop()
            elif missing not in collections or len(path) > len(collections):
                raise Corrupt(f"The dependencies of {id!r} are not all there, or form a cycle.")
            else:
                path.append((missing, iter(collections[missing].dependencies)))


def _count(state: State) -> None:
    """Counts all capabilities anew, and checks that the frontiers are those which the images say."""
    batch: dict[str, Deltas] = {id: {} for id in state.collections}

    def count(collection: str, time: Frontier) -> None:
        if collection not in batch:
            raise Corrupt(f"There is a capability on {collection!r}, which does not exist.")
        batch[collection][time] = batch[collection].get(time, 0) + 1

    for collection in state.collections.values():
        if collection.implied != EMPTY:
            count(collection.id, collection.implied)
        for dependency in collection.dependencies:
            count(dependency, collection.since)
    for hold in state.holds.values():
        count(hold.collection, hold.since)
    for id, deltas in batch.items():
        capabilities = state.capabilities[id] = Capabilities()
        capabilities.apply(deltas)
        since = state.collections[id].since
        if capabilities.least_after({}) != since or since == EMPTY:
            raise Corrupt(f"The read frontier of {id!r} is {since} but its capabilities are {sorted(deltas)}.")


def _check_shards(state: State) -> None:
    """What must be true between shards and collections, or work on shards could destroy what someone needs."""
    for id in state.collections.keys() & state.tombstones.keys():
        raise Corrupt(f"Collection {id!r} has a row and a tombstone.")
    for shard in state.shards.values():
        if (other := state.taken.overlapping(shard.location)) != shard.id:
            raise Corrupt(f"The shards {other!r} and {shard.id!r} are at one place.")
        if not (stored := state.on_shard.get(shard.id)):
            continue
        if shard.owner not in stored:
            raise Corrupt(f"Collections are stored on shard {shard.id!r}, but not its owner {shard.owner!r}.")
        if shard.state == "finalized":
            raise Corrupt(f"Collections are stored on shard {shard.id!r}, which was finalized.")
        if shard.since > state.wanted_since(shard):
            raise Corrupt(f"The since of shard {shard.id!r} is beyond the read frontier of its owner.")

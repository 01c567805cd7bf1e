"""Read capabilities: the one rule that moves every since.

Each collection has a multiset of times, with one count for its implied capability, for every hold on it, and for the
read frontier of every collection that depends on it. Its read frontier is the least of them. `plan` is the only place
where changes of counts become changes of frontiers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush

from app.core.errors import BrokenInvariant
from app.core.frontier import EMPTY, Frontier

Deltas = dict[Frontier, int]
"""Per time, how many counts come (+) or go (-)."""

Rank = tuple[int, int]
"""Where a collection stands in the order of dependencies: always above everything that it depends on."""


class Capabilities:
    """A multiset of times whose least element costs O(log n), however many there are.

    The heap holds every time that has a count, and perhaps some that no longer have one: they are dropped when they
    come to the top, or all at once when they outnumber the others.
    """

    __slots__ = ("_counts", "_heap")

    def __init__(self) -> None:
        self._counts: Deltas = {}
        self._heap: list[Frontier] = []

    def least_after(self, deltas: Mapping[Frontier, int]) -> Frontier:
        """The least time if `deltas` were applied, `[]` if none were left. Changes nothing."""
        counts, heap = self._counts, self._heap
        least = EMPTY
        for time, delta in deltas.items():
            count = counts.get(time, 0) + delta
            if count < 0:
                raise BrokenInvariant(f"The count at {time} would become {count}.")
            if count > 0 and time < least:
                least = time
        given_up = []
        while heap and heap[0] < least:
            time = heap[0]
            if time not in counts:
                heappop(heap)
            elif time in deltas:  # it would have been the least already if anything of it were left
                given_up.append(heappop(heap))
            else:
                least = time
        for time in given_up:
            heappush(heap, time)
        return least

    def apply(self, deltas: Mapping[Frontier, int]) -> None:
        counts, heap = self._counts, self._heap
        for time, delta in deltas.items():
            before = counts.get(time, 0)
            after = before + delta
            if after == 0:
                counts.pop(time, None)
            else:
                counts[time] = after
                if before == 0:
                    heappush(heap, time)
        if len(heap) > 2 * len(counts) + 64:
            self._heap = list(counts)
            heapify(self._heap)

    def counts(self) -> Deltas:
        """A copy, for those who want to look."""
        return dict(self._counts)


def rank_of(dependencies: Iterable[str], primary: str | None, ranks: Mapping[str, Rank]) -> Rank:
    """Where a collection with these dependencies stands: (level, position among those of its shard).

    Primaries do not count as levels, so that a table can be altered any number of times; the second part keeps a
    collection above its primary all the same.
    """
    level = 1 + max((ranks[id][0] for id in dependencies if id != primary), default=0)
    if primary is None:
        return (level, 0)
    primary_level, position = ranks[primary]
    return (max(level, primary_level), position + 1)


def plan(
    batch: dict[str, Deltas],
    *,
    capabilities: Mapping[str, Capabilities],
    since: Callable[[str], Frontier | None],
    dependencies: Callable[[str], Iterable[str]],
    rank: Callable[[str], Rank],
) -> dict[str, Frontier]:
    """What `batch` does to the frontiers, transitively; nothing is installed.

    `since` gives a collection's frontier before the batch, None for one that is being created. Returns the frontiers
    that move, and completes `batch` with what goes on to dependencies. A collection comes after all that depend on it,
    so that changes which meet there are summed before they count.
    """
    moved: dict[str, Frontier] = {}
    waiting = [(_descending(rank(collection)), collection) for collection in batch]
    heapify(waiting)
    while waiting:
        place, collection = heappop(waiting)
        deltas = batch[collection]
        before = since(collection)
        known = capabilities.get(collection)
        if known is None:
            known = Capabilities()
        after = known.least_after(deltas)
        if before is not None and after < before:
            raise BrokenInvariant(f"The read frontier of {collection!r} would go back from {before} to {after}.")
        if after == before:
            continue
        moved[collection] = after
        for dependency in dependencies(collection):
            onward = batch.get(dependency)
            if onward is None:
                onward = batch[dependency] = {}
                heappush(waiting, (_descending(rank(dependency)), dependency))
            if _descending(rank(dependency)) <= place:
                raise BrokenInvariant(f"{collection!r} depends on {dependency!r}, which does not rank below it.")
            if before is not None:
                onward[before] = onward.get(before, 0) - 1
            if after != EMPTY:
                onward[after] = onward.get(after, 0) + 1
    return moved


def _descending(rank: Rank) -> Rank:
    return (-rank[0], -rank[1])

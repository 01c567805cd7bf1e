"""What keeps a collection's since where it is.

A since is the least of the implied capability, the holds, and the sinces of the dependents; each of those again. So it
is the least over the implied capabilities and the holds of everything that depends on the collection, itself included:
there are only two kinds of reasons, a policy and a hold, and a path of dependents that leads to each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from app.core.frontier import frontier_of, value_of
from app.core.images import decode_custom
from app.core.policy import Policy
from app.status import Row, State

UNDROP_PREFIX: Final = "/undrop/"


@dataclass(frozen=True, slots=True)
class Reason:
    """Something that needs history from `time` on: a hold, or, without one, the policy of `path[-1]`."""

    time: int
    path: tuple[str, ...]  # from the collection asked about, dependent by dependent
    hold: Row | None = None

    @property
    def collection(self) -> str:
        return self.path[-1]

    @property
    def is_own_policy(self) -> bool:
        return self.hold is None and len(self.path) == 1

    @property
    def is_undrop_window(self) -> bool:
        return self.hold is not None and self.hold["hold"].startswith(UNDROP_PREFIX)


@dataclass(frozen=True, slots=True)
class Why:
    """The answer for one collection. `reasons` keep it where it is; without all of them, `next_reasons` would."""

    row: Row
    reasons: tuple[Reason, ...]
    next_reasons: tuple[Reason, ...]

    @property
    def held_back_by(self) -> tuple[Reason, ...]:
        """What keeps it from where its own policy would let it go."""
        return tuple(reason for reason in self.reasons if not reason.is_own_policy)

    @property
    def policy_is_reason(self) -> bool:
        return any(reason.is_own_policy for reason in self.reasons)

    @property
    def next_since(self) -> int | None:
        """Where it would go if all of `reasons` let go: None is `[]`."""
        return self.next_reasons[0].time if self.next_reasons else None

    @property
    def is_torn(self) -> bool:
        """The tables were read while they changed: the reasons do not give the since."""
        return not self.reasons or self.reasons[0].time != self.row["read_frontier"]


class Graph:
    """Who depends on whom, and who holds what."""

    def __init__(self, state: State) -> None:
        self.collections = state.collections
        self._dependents: dict[str, list[str]] = {}
        self._holds: dict[str, list[Row]] = {}
        for id, row in sorted(state.collections.items()):
            for dependency in row["dependencies"]:
                self._dependents.setdefault(dependency, []).append(id)
        for _, hold in sorted(state.holds.items()):
            self._holds.setdefault(hold["collection"], []).append(hold)
        self._first: dict[str, Reason | None] = {}

    def holds_on(self, id: str) -> list[Row]:
        return self._holds.get(id, [])

    def why(self, id: str) -> Why:
        times: dict[int, list[Reason]] = {}
        for reason in self._all_reasons(id):
            times.setdefault(reason.time, []).append(reason)
        in_order = [tuple(times[time]) for time in sorted(times)[:2]] + [(), ()]
        return Why(self.collections[id], in_order[0], in_order[1])

    def first_reason(self, id: str) -> Reason | None:
        """One reason for the since of a collection, the nearest: for a list of many collections at little cost."""
        below: list[str] = []
        at = self.collections[id]["read_frontier"]
        while id not in self._first:
            row = self.collections[id]
            if row["implied_capability"] == at:
                self._first[id] = Reason(at, (id,))
            elif hold := next((hold for hold in self.holds_on(id) if hold["since"] == at), None):
                self._first[id] = Reason(at, (id,), hold)
            else:
                dependents = self._dependents.get(id, ())
                onward = next((each for each in dependents if self.collections[each]["read_frontier"] == at), None)
                if onward is None:
                    self._first[id] = None
                else:
                    below.append(id)
                    id = onward
        reason = self._first[id]
        for each in reversed(below):
            reason = None if reason is None else Reason(reason.time, (each, *reason.path), reason.hold)
            self._first[each] = reason
        return reason

    def _all_reasons(self, id: str) -> Iterator[Reason]:
        """Everything that needs history of `id`, the nearest first, each with a shortest path to it."""
        waiting: deque[tuple[str, ...]] = deque([(id,)])
        seen = {id}
        while waiting:
            path = waiting.popleft()
            row = self.collections[path[-1]]
            if row["implied_capability"] is not None:
                yield Reason(row["implied_capability"], path)
            for hold in self.holds_on(path[-1]):
                if hold["since"] is not None:
                    yield Reason(hold["since"], path, hold)
            for dependent in self._dependents.get(path[-1], ()):
                if dependent not in seen:
                    seen.add(dependent)
                    waiting.append((*path, dependent))


def wanted(row: Row) -> int | None:
    """What a collection's policy asks for, at its upper."""
    policy = msgspec.convert(row["read_policy"], Policy, dec_hook=decode_custom)
    return value_of(policy.frontier(frontier_of(row["write_frontier"])))


def as_json(why: Why, *, shard: Mapping[str, Any] | None) -> Row:
    """The answer for programs."""
    return {
        "collection": why.row["id"],
        "since": why.row["read_frontier"],
        "upper": why.row["write_frontier"],
        "dropped": why.row["dropped"],
        "policy": why.row["read_policy"],
        "policy_asks_for": None if why.row["dropped"] else wanted(why.row),
        "implied_capability": why.row["implied_capability"],
        "shard_since": None if shard is None else shard["since"],
        "reasons": [_reason_as_json(reason) for reason in why.reasons],
        "without_them": {
            "since": why.next_since,
            "reasons": [_reason_as_json(reason) for reason in why.next_reasons],
        },
    }


def _reason_as_json(reason: Reason) -> Row:
    kind = "policy" if reason.hold is None else "undrop_window" if reason.is_undrop_window else "hold"
    return {
        "kind": kind,
        "time": reason.time,
        "collection": reason.collection,
        "path": list(reason.path),
        "hold": reason.hold,
    }

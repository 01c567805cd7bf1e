"""Read policies: what since a collection wants, as a function of its upper. Policies are data, not code."""

from __future__ import annotations

from typing import Final

import msgspec

from app.core.duration import Duration
from app.core.frontier import EMPTY, ZERO, Frontier, Time

MAX_NESTING: Final = 16
"""How deep `multiple` may be nested: a limit, so that nobody meets Python's."""


class _Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    def frontier(self, upper: Frontier) -> Frontier:
        """The since that the policy wants for a collection with this upper."""
        raise NotImplementedError


class NoPolicy(_Policy, frozen=True, tag="no_policy"):
    """What a collection has until someone sets a policy; it cannot be set."""

    initial_since: int

    def frontier(self, upper: Frontier) -> Frontier:  # noqa: ARG002 - the same for every upper
        return Frontier(self.initial_since)


class ValidFrom(_Policy, frozen=True, tag="valid_from"):
    """Everything from a fixed time on stays readable."""

    # Never []: only a drop gives a collection up.
    value: Time = msgspec.field(name="frontier")

    def frontier(self, upper: Frontier) -> Frontier:  # noqa: ARG002 - the same for every upper
        return Frontier(self.value)


class LagWritesBy(_Policy, frozen=True, tag="lag_writes_by"):
    """The last `lag` before the upper stays readable; the since moves in steps of `granularity`."""

    lag: Duration
    granularity: Duration = msgspec.field(default_factory=lambda: Duration(1))

    def __post_init__(self) -> None:
        if self.granularity == 0:
            raise ValueError("`granularity` must be at least 1")

    def frontier(self, upper: Frontier) -> Frontier:
        if upper == EMPTY:
            return ZERO
        if self.lag == 0:
            return upper
        wanted = max(upper - self.lag, 0)
        return Frontier(wanted - wanted % min(self.lag, self.granularity))


class StepBack(_Policy, frozen=True, tag="step_back"):
    """The latest complete time stays readable."""

    def frontier(self, upper: Frontier) -> Frontier:
        return ZERO if upper in (EMPTY, ZERO) else Frontier(upper - 1)


class Multiple(_Policy, frozen=True, tag="multiple"):
    """Whatever any of several policies needs."""

    policies: list[SettablePolicy]

    def __post_init__(self) -> None:
        if not self.policies:
            raise ValueError("`policies` must name at least one policy")
        if _nesting(self) > MAX_NESTING:
            raise ValueError(f"Policies may be nested at most {MAX_NESTING} deep")

    def frontier(self, upper: Frontier) -> Frontier:
        return min(policy.frontier(upper) for policy in self.policies)


SettablePolicy = ValidFrom | LagWritesBy | StepBack | Multiple
Policy = NoPolicy | SettablePolicy


def number_of_policies(policy: SettablePolicy) -> int:
    return 1 + sum(map(number_of_policies, policy.policies)) if isinstance(policy, Multiple) else 1


def _nesting(policy: SettablePolicy) -> int:
    return 1 + max(map(_nesting, policy.policies)) if isinstance(policy, Multiple) else 1

"""The program does what the rule book says: random lines, each checked against the oracle and the invariants."""

from __future__ import annotations

from random import Random

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from app.simulate import Simulator
from tests.property import generate, generate_collections, generate_holds
from tests.property.checker import Checker
from tests.property.driver import Coverage, run
from tests.property.generate_common import live_ids

seeds = st.integers(0, 2**40)
"""Hypothesis chooses the kinds of lines and their order, and shrinks those; what is inside a line follows from a seed.

If it made every choice inside a line too, rare choices would be as frequent as others, and shrinking would be slow.
"""


class Machine(RuleBasedStateMachine):
    """One rule for each kind of line; every line is compared, reply and rows, as it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.checker = Checker(Simulator(), name="hypothesis,")

    def step(self, generator: generate.Generator, seed: int) -> None:
        self.checker.step(generator(Random(seed), self.checker.oracle))

    def has_live(self) -> bool:
        return bool(live_ids(self.checker.oracle))

    def has_holds(self) -> bool:
        return bool(self.checker.oracle.client_holds())

    @rule(seed=seeds)
    def create(self, seed: int) -> None:
        self.step(generate_collections.create, seed)

    @precondition(has_live)
    @rule(seed=seeds)
    def alter(self, seed: int) -> None:
        self.step(generate_collections.alter, seed)

    @precondition(has_live)
    @rule(seed=seeds)
    def set_policies(self, seed: int) -> None:
        self.step(generate_collections.set_policies, seed)

    @precondition(has_live)
    @rule(seed=seeds)
    def acquire(self, seed: int) -> None:
        self.step(generate_holds.acquire, seed)

    @precondition(has_holds)
    @rule(seed=seeds, generator=st.sampled_from(generate.ON_HOLDS))
    def use_holds(self, seed: int, generator: generate.Generator) -> None:
        self.step(generator, seed)

    @precondition(has_live)
    @rule(seed=seeds)
    def drop(self, seed: int) -> None:
        self.step(generate_collections.drop, seed)

    @rule(seed=seeds)
    def undrop(self, seed: int) -> None:
        self.step(generate_collections.undrop, seed)

    @rule(seed=seeds)
    def parameters(self, seed: int) -> None:
        self.step(generate.parameters, seed)

    @precondition(has_live)
    @rule(seed=seeds)
    def upper(self, seed: int) -> None:
        self.step(generate.upper, seed)

    @rule(seed=seeds)
    def clock(self, seed: int) -> None:
        self.step(generate.clock, seed)

    @rule(seed=seeds, generator=st.sampled_from([generate.downgrades, generate.finalize, generate.restart]))
    def work(self, seed: int, generator: generate.Generator) -> None:
        self.step(generator, seed)

    @rule(seed=seeds, generator=st.sampled_from([generate.duplicate, generate.broken, generate_collections.reconcile]))
    def odd_lines(self, seed: int, generator: generate.Generator) -> None:
        self.step(generator, seed)


def test_the_program_agrees_with_the_oracle_on_what_hypothesis_finds() -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=120,
            deadline=None,
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
            # Long scripts make an example slow; that is meant.
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


def test_the_program_agrees_with_the_oracle_on_how_deep_dependencies_may_go() -> None:
    """Too deep for random lines over few ids: a chain to the last level, primaries that do not count, one too many."""
    checker = Checker(Simulator(), name="depth,")

    def create(number: int, *items: tuple[str, list[str], str | None]) -> None:
        descriptions = [
            {"id": name, "data_source": {"kind": "other", "inputs": inputs}, "primary": primary}
            for name, inputs, primary in items
        ]
        checker.step({"type": "create_collections", "id": f"c{number}", "collections": descriptions})

    create(1, ("v1", [], None), *((f"v{n}", [f"v{n - 1}"], None) for n in range(64, 1, -1)))
    create(2, ("v65", ["v64"], None))
    create(3, ("p", [], "v64"), ("q", ["v63"], "p"))
    create(4, ("w", ["p"], None))
    checker.step({"type": "restart"})
    create(5, ("x", ["q"], None))
    create(6, ("y", ["v63"], "q"))
    assert checker.outcomes == {
        ("create_collections", "ok"): 3,
        ("create_collections", "INVALID_ARGUMENT"): 3,
        ("restart", "ok"): 1,
    }


SEEDS = range(3, 7)
STEPS = 2_000

OUTCOMES = {
    "create_collections": [
        "COLLECTION_ID_REUSED",
        "DEPENDENCY_MISSING",
        "INVALID_ARGUMENT",
        "OUTSIDE_WAREHOUSE",
        "SCHEMA_INCOMPATIBLE",
        "STALE_COMMAND",
    ],
    "alter_table_desc": [
        "COLLECTION_ID_REUSED",
        "COLLECTION_MISSING",
        "INVALID_ARGUMENT",
        "SCHEMA_INCOMPATIBLE",
        "SCHEMA_MISMATCH",
    ],
    "set_read_policies": ["COLLECTION_MISSING", "INVALID_ARGUMENT"],
    "acquire_read_holds": ["COLLECTION_MISSING", "INVALID_ARGUMENT", "SINCE_VIOLATION", "STALE_COMMAND"],
    "downgrade_read_holds": ["HOLD_MISSING", "INVALID_ARGUMENT", "SINCE_VIOLATION"],
    "clone_read_holds": ["HOLD_MISSING", "INVALID_ARGUMENT"],
    "merge_read_holds": ["HOLD_MISSING", "INVALID_ARGUMENT"],
    "renew_read_holds": ["HOLD_MISSING", "INVALID_ARGUMENT"],
    "release_read_holds": ["INVALID_ARGUMENT"],
    "drop_collections": ["INVALID_ARGUMENT"],
    "undrop_collections": ["COLLECTION_MISSING"],
    "reconcile": [],
    "update_parameters": ["INVALID_ARGUMENT"],
    "upper": ["COLLECTION_MISSING", "INVALID_ARGUMENT"],
    "clock": ["INVALID_ARGUMENT"],
    "restart": ["INVALID_ARGUMENT"],
    "downgrades": [],
    "finalize": ["INVALID_ARGUMENT"],
}
"""The codes, beside ok, that each type of line must have met."""

EVENTS = [
    "a command id with other bytes",
    "a diamond went to []",
    "a downgrade to [] did not wait",
    "a downgrade waited for its interval",
    "a drop left the shard to another live collection",
    "a duplicate",
    "a failed finalization waited",
    "a finalization failed, then succeeded",
    "a forgotten command id was used again",
    "a hold on a dropped collection was cloned",
    "a hold id was in use",
    "a hold id was too long",
    "a hold was missing: lease expired",
    "a hold was missing: released",
    "a hold was missing: unknown",
    "a lease expired",
    "a merge brought the first hold back",
    "a merge chose between pinned versions",
    "a purged id was created again",
    "a restart renewed a lease",
    "a table on a shard with a since did without register_ts",
    "a tombstone was purged",
    "an altered table was altered again",
    "an undrop window passed",
    "an upper was closed",
    "created on the shard of a primary",
    "created with an older schema than its primary",
    "member moved by its log",
    "the new id of an alter was dropped",
    "the old id of an alter was dropped",
    "undrop",
]


def test_the_program_agrees_with_the_oracle_on_fixed_seeds_and_they_cover_the_rule_book() -> None:
    coverage = Coverage()
    for seed in SEEDS:
        run(seed, STEPS, Simulator, coverage)
    wanted = {(kind, outcome) for kind, codes in OUTCOMES.items() for outcome in ["ok", *codes]}
    wanted |= {("malformed", "MALFORMED"), ("compact_everything", "UNKNOWN_COMMAND")}
    assert sorted(wanted - set(coverage.outcomes)) == []
    assert [event for event in EVENTS if not coverage.events[event]] == []

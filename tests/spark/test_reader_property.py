"""Random histories, really merged at random: a read at every readable time equals a sum in plain Python."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.client_errors import ReadBeforeSince
from app.reader import Reader
from app.shards.merging import merge_if_worthwhile
from app.shards.updates import Updates
from tests.spark.reader_world import Update, World, counted, summed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = 12

data = st.tuples(st.sampled_from(["a", "b", None]), st.sampled_from([0, 1, None]))
diffs = st.integers(-2, 2)
batches = st.lists(
    st.tuples(st.lists(st.tuples(st.integers(0, 2), diffs, data), max_size=6), st.integers(1, 3), st.booleans()),
    min_size=1,
    max_size=4,
)
"""Per append: updates (how long after the upper, diff, row), by how much the upper moves on, and whether to merge."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(history=batches, behind=st.integers(0, 3))
def test_every_read_equals_the_sum_of_the_updates(
    shared: World, spark: SparkSession, history: list[tuple[list[tuple[int, int, Update]], int, bool]], behind: int
) -> None:
    world, upper = shared, 0
    id = f"c{len(world.controller.read(lambda state: state.shards))}"
    world.create(id)
    reader = Reader(spark, root=world.root, client=world.client)
    everything: list[Update] = []
    since = 0
    for updates, step, merge in history:
        written = [(upper + later, diff, *row) for later, diff, row in updates if later < step]
        upper += step
        world.append(id, written, upper)
        everything += written
        if merge and upper - 1 - behind > since:
            since = upper - 1 - behind
            world.policy(id, kind="valid_from", frontier=since)
            shard = world.shard(id)
            merge_if_worthwhile(Updates(spark, shard.location, shard.table_id), since, 1, fraction=0)
            world.observe(id)
    for as_of in range(since, upper):
        with reader.snapshot(id, as_of) as rows:
            assert counted(rows.collect()) == summed(everything, as_of)
    with reader.snapshot_and_stream(id, upper - 1) as stream:
        streamed = [tuple(row.values()) for batch in stream for row in batch.to_pylist()]
    assert summed(streamed, upper - 1) == summed(everything, upper - 1)
    if since > 0:
        with pytest.raises(ReadBeforeSince), reader.snapshot(id, since - 1):
            pass
    with reader.subscribe(id, since, timeout="30s") as changes:
        followed: Counter[Update] = Counter(tuple(row) for row in next(changes).frame.collect())
        if upper - 1 > since:
            followed += Counter(tuple(row) for row in next(changes).frame.collect())
    later = Counter(update for update in everything if update[0] > since)
    assert Counter(each for each in followed.elements() if each[0] > since) == later
    assert summed(followed.elements(), upper) == summed(everything, upper)
    assert world.holds() == {}

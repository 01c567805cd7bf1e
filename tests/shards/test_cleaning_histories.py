"""Random histories of adds, removes and adds again: what is live, or pinned by its version, is never deleted."""

from __future__ import annotations

import tempfile
from pathlib import Path
from urllib.parse import quote

from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from app.shards.cleaning import Cleaner
from tests.shards.helpers import BareLog, add, remove

FILES = ["a.parquet", "b.parquet", "p=1/a.parquet", "p=x y/c.parquet", "d%20e.parquet", "ü.parquet"]
files = st.lists(st.sampled_from(FILES), max_size=3, unique=True)
steps = st.one_of(
    st.tuples(st.just("commit"), files, files),
    st.tuples(st.just("clean"), st.integers(0, 4), st.booleans()),
    st.tuples(st.just("forget log"), st.none(), st.none()),
)


class Model:
    """What each file is, worked out from the history alone."""

    def __init__(self) -> None:
        self.live: set[str] = set()
        self.removed_in: dict[str, int] = {}

    def commit(self, version: int, added: list[str], removed: list[str]) -> None:
        for name in removed:
            self.live.discard(name)
            self.removed_in[name] = version
        for name in added:
            self.live.add(name)
            self.removed_in.pop(name, None)


@settings(deadline=None, max_examples=120)
@given(st.lists(steps, max_size=25))
def test_nothing_live_or_pinned_is_ever_deleted(history: list[tuple[str, object, object]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        log = BareLog(Path(directory) / "warehouse/shard")
        model, oldest, written = Model(), 0, set[str]()

        def fresh() -> Cleaner:
            return Cleaner(
                location=str(log.location), options={}, roots=[f"{directory}/warehouse"], table_id=log.id, epoch=1
            )

        ours = fresh()
        for kind, first, second in history:
            if kind == "commit":
                assert isinstance(first, list)
                assert isinstance(second, list)
                for name in first:
                    path = log.location / name
                    path.parent.mkdir(exist_ok=True)
                    path.touch()
                    written.add(name)
                version = log.commit(*(remove(quote(name)) for name in second), *(add(quote(name)) for name in first))
                model.commit(version, first, second)
            elif kind == "clean":
                assert isinstance(first, int)
                upto = log.version - first
                ours = fresh() if second else ours
                before = {name for name in written if (log.location / name).exists()}
                ours.delete_dead_files(upto_version=upto, older_than_ms=0)
                there = {name for name in written if (log.location / name).exists()}
                pinned = {name for name, version in model.removed_in.items() if version > upto}
                assert model.live <= there
                assert pinned & before <= there
                dead = {name for name, version in model.removed_in.items() if oldest <= version <= upto}
                assert not dead & there
            elif log.version > oldest:
                DeltaTable(log.location).create_checkpoint()
                for version in range(oldest, log.version):
                    log.path(version).unlink()
                oldest = log.version

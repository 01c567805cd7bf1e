"""A mistake of ours is refused like any other, changes nothing and stops nothing; broken state is not taken up."""

from __future__ import annotations

import json

import msgspec
import pytest

from app.core.draft import Draft
from app.core.errors import Corrupt
from app.core.folding import fold
from app.core.frontier import Frontier
from app.core.images import COLLECTION, SHARD, Collection
from app.simulate import Simulator

CREATE = (
    b'{"type":"create_collections","id":"c1","register_ts":5,"collections":[{"id":"a","data_source":{"kind":"table"}}]}'
)
DUMP = b'{"type":"dump"}'


@pytest.fixture
def simulator() -> Simulator:
    simulator = Simulator()
    assert b'"status":"ok"' in simulator.line(CREATE)
    return simulator


def test_a_step_that_would_break_an_invariant_is_refused_and_changes_nothing(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = simulator.line(DUMP)
    with monkeypatch.context() as patch:
        patch.setattr(Draft, "add_hold", lambda self, hold: self.count(hold.collection, Frontier(3), +1))
        reply = json.loads(simulator.line(b'{"type":"acquire_read_holds","id":"c2","collections":["a"],"holder":"h"}'))
    assert reply["error"]["code"] == "INTERNAL"
    assert "would go back from [5] to [3]" in reply["error"]["message"]
    assert simulator.line(DUMP) == before
    again = json.loads(simulator.line(b'{"type":"acquire_read_holds","id":"c3","collections":["a"],"holder":"h"}'))
    assert again["status"] == "ok"


def test_a_crash_inside_a_step_is_refused_and_changes_nothing(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise ZeroDivisionError("planted")

    before = simulator.line(DUMP)
    monkeypatch.setattr(Draft, "put_collection", crash)
    reply = json.loads(simulator.line(b'{"type":"drop_collections","id":"c2","collections":["a"]}'))
    assert reply["error"]["code"] == "INTERNAL"
    assert "ZeroDivisionError: planted" in reply["error"]["message"]
    assert simulator.line(DUMP) == before


def test_images_that_break_the_rules_are_not_taken_up(simulator: Simulator) -> None:
    images = simulator.journal.decoded()
    collection = images[(COLLECTION, "a")]
    assert isinstance(collection, Collection)
    for broken, reason in [
        ({"since": Frontier(4)}, "read frontier"),
        ({"implied": Frontier(9)}, "read frontier"),
        ({"dependencies": ("gone",)}, "dependencies"),
        ({"dependencies": ("a",)}, "dependencies"),
        ({"shard": "gone"}, "shard"),
    ]:
        changed = msgspec.structs.replace(collection, **broken)
        with pytest.raises(Corrupt, match=reason):
            fold({**images, (COLLECTION, "a"): changed}.items())
    with pytest.raises(Corrupt, match="no entity"):
        fold({**images, ("planet", "a"): collection}.items())
    del images[(SHARD, "a-1")]
    with pytest.raises(Corrupt, match="shard of collection 'a' is missing"):
        fold(images.items())

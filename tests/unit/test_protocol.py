"""Messages: whatever arrives is read, or refused with a code, a path and a reason. Nothing raises."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app import protocol
from app.core.duration import parse_duration
from app.core.errors import Code
from app.messages import COMMAND_TYPES

DROP = {"type": "drop_collections", "id": "c1", "collections": ["orders"]}


def refusal(message: Any) -> tuple[Code, str | None]:
    raw = message if isinstance(message, bytes) else json.dumps(message).encode()
    refused = protocol.decode(raw).refusal
    assert refused is not None
    assert refused.message.endswith(".")
    return refused.code, refused.details.get("path")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x00\xff\xfe",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b'{"type":"reconcile"',
        b'{"id":"\xff"}',
        b"{} {}",
        b"{'id':1}",
        b'{"n":NaN}',
        b"[" * 100_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        json.dumps(DROP).encode("utf-16"),
    ],
)
def test_what_is_not_one_json_object_is_malformed(raw: bytes) -> None:
    assert refusal(raw) == (Code.MALFORMED, None)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"id": ""}, "$.id"),
        ({"id": "a/b"}, "$.id"),
        ({"id": "x" * 129}, "$.id"),
        ({"id": 5}, "$.id"),
        ({"id": None}, "$.id"),
        ({"type": 5}, "$.type"),
        ({"collections": None}, "$.collections"),
        ({"collections": ["orders\n"]}, "$.collections[0]"),
        ({"collections": ["a", "no spaces"]}, "$.collections[1]"),
        ({"collections": ["x" * 129]}, "$.collections[0]"),
        ({"issued_at": -1}, "$.issued_at"),
        ({"issued_at": 1.5}, "$.issued_at"),
        ({"issued_at": 253402300800000}, "$.issued_at"),
        ({"colections": []}, "$"),
        ({"matching regex": 1}, "$"),
        ({"x - at `$.fake`": 1}, "$"),
    ],
)
def test_a_wrong_field_is_refused_with_its_path(change: dict[str, Any], path: str) -> None:
    assert refusal({**DROP, **change}) == (Code.INVALID_ARGUMENT, path)


def test_errors_do_not_echo_more_than_a_reply_can_bear() -> None:
    for message in [{**DROP, "x" * 500_000: 1}, {"type": "x" * 500_000, "id": "c"}, {**DROP, "collections": {"x": 1}}]:
        refused = protocol.decode(json.dumps(message).encode()).refusal
        assert refused is not None
        assert len(json.dumps(msgspec.to_builtins(protocol.error_body(refused)))) < 5_000


def test_a_missing_field_is_refused() -> None:
    for field in DROP:
        code, _ = refusal({name: value for name, value in DROP.items() if name != field})
        assert code is Code.INVALID_ARGUMENT


def test_the_id_of_a_refused_command_is_known_if_it_has_a_good_one() -> None:
    decoded = protocol.decode(b'{"type":"drop_everything","id":"c1"}')
    assert (decoded.id, decoded.type) == ("c1", "drop_everything")
    assert decoded.refusal is not None
    assert decoded.refusal.code is Code.UNKNOWN_COMMAND
    assert protocol.decode(b'{"type":"drop_everything","id":"a/b"}').id is None


def test_limits_on_the_size_of_a_message_and_of_its_lists() -> None:
    assert refusal({**DROP, "id": "big", "collections": ["x" * 100] * 11_000})[0] is Code.TOO_LARGE
    assert refusal({**DROP, "collections": ["x"] * 10_001})[0] is Code.TOO_LARGE
    assert protocol.decode(json.dumps({**DROP, "collections": ["x"] * 10_000}).encode()).command is not None
    too_big = protocol.decode(json.dumps({**DROP, "collections": ["x" * 2**20]}).encode())
    assert too_big.id == "c1"
    assert too_big.refusal is not None
    assert too_big.refusal.code is Code.TOO_LARGE


@pytest.mark.parametrize(
    ("given", "milliseconds"), [(0, 0), (5, 5), ("500ms", 500), ("30s", 30_000), ("15m", 900_000), ("7d", 604_800_000)]
)
def test_durations(given: object, milliseconds: int) -> None:
    assert parse_duration(given) == milliseconds


@pytest.mark.parametrize(
    "given", [-1, 1.5, True, None, "", "5", "s", "-5s", "5 s", "5S", "1e3s", "5s\n", "٣s", 2**63, "9" * 15 + "d"]
)
def test_what_is_no_duration(given: object) -> None:
    with pytest.raises(ValueError, match="Expected a duration"):
        parse_duration(given)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ["id", "collections", "holds", "policies", "lease", "at", "schema", "parameters", "register_ts", "issued_at"]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_no_bytes_make_it_raise(raw: bytes) -> None:
    assert protocol.decode(raw).refusal is not None


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(sorted(COMMAND_TYPES)), st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_no_object_makes_it_raise(kind: str, fields: dict[str, Any]) -> None:
    decoded = protocol.decode(json.dumps({"type": kind, **fields}).encode())
    assert (decoded.command is None) != (decoded.refusal is None)

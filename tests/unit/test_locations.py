"""Locations: one spelling per place, inside the warehouse, overlapping nothing."""

from __future__ import annotations

import pytest

from app.core.errors import Code, Refused
from app.core.locations import TakenLocations, Warehouse, normalise


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("/a/b", "/a/b"),
        ("/a//b/./c/../d/", "/a/b/d"),
        ("file:/a/b", "/a/b"),
        ("file:///a/b", "/a/b"),
        ("FILE:///a", "/a"),
        ("/../..", "/"),
        ("//a", "/a"),
        ("s3://bucket/a/../b/", "s3://bucket/b"),
        ("s3a://bucket/a", "s3a://bucket/a"),
        ("s3://bucket/../../x", "s3://bucket/x"),
        ("s3://bucket", "s3://bucket"),
        ("abfss://box@account/a", "abfss://box@account/a"),
    ],
)
def test_a_place_has_one_spelling(given: str, meant: str) -> None:
    assert normalise(given) == meant


@pytest.mark.parametrize("given", ["a/b", "./a", "s3:a", "s3:///a", "file://host/a", "file:a"])
def test_what_names_no_place_is_refused(given: str) -> None:
    with pytest.raises(Refused, match=r"absolute path or URI|names a host"):
        normalise(given)


def warehouse(links: dict[str, str] | None = None) -> Warehouse:
    return Warehouse(
        roots=["/lake/one", "s3://bucket/lake"],
        reserved=["/lake/one/state"],
        resolve=lambda location: (links or {}).get(location, location),
    )


@pytest.mark.parametrize("given", ["/lake/one/orders", "/lake/one/a/b/c", "s3a://bucket/lake/orders"])
def test_places_inside_are_accepted(given: str) -> None:
    places = warehouse()
    places.check(places.resolved(given))


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("/lake/two/orders", Code.OUTSIDE_WAREHOUSE),
        ("/lake/onetwo/orders", Code.OUTSIDE_WAREHOUSE),
        ("/lake/one/../two", Code.OUTSIDE_WAREHOUSE),
        ("/lake/one/link", Code.OUTSIDE_WAREHOUSE),
        ("/", Code.OUTSIDE_WAREHOUSE),
        ("s3://other/lake/orders", Code.OUTSIDE_WAREHOUSE),
        ("/lake/one", Code.INVALID_ARGUMENT),
        ("/lake/one/", Code.INVALID_ARGUMENT),
        ("/lake/one/state", Code.INVALID_ARGUMENT),
        ("/lake/one/state/journal", Code.INVALID_ARGUMENT),
        ("/lake/one/a%2e%2e", Code.INVALID_ARGUMENT),
        ("/lake/one/a*", Code.INVALID_ARGUMENT),
        ("/lake/one/a\x00", Code.INVALID_ARGUMENT),
        ("/lake/one/a\nb", Code.INVALID_ARGUMENT),
        ("/lake/one/" + "x" * 256, Code.INVALID_ARGUMENT),
        ("/lake/one/_delta_log/x", Code.INVALID_ARGUMENT),
        ("/lake/one/a\u202eb", Code.INVALID_ARGUMENT),
    ],
)
def test_other_places_are_refused(given: str, code: Code) -> None:
    places = warehouse({"/lake/one/link": "/etc"})
    with pytest.raises(Refused) as refused:
        places.check(places.resolved(given))
    assert refused.value.code is code


def test_a_location_may_not_overlap_that_of_any_shard() -> None:
    taken = TakenLocations()
    taken.add("/lake/one/orders", "orders-1")
    taken.add("/lake/one/deep/down/users", "users-2")
    assert taken.overlapping("/lake/one/orders") == "orders-1"
    assert taken.overlapping("/lake/one/orders/part") == "orders-1"
    assert taken.overlapping("/lake/one/deep") == "users-2"
    assert taken.overlapping("/lake/one/orders2") is None
    assert taken.overlapping("/lake/one/deep/up") is None
    taken.add("s3a://bucket/lake/events", "events-3")
    assert taken.overlapping("s3://bucket/lake/events/x") == "events-3", "one store may go by several schemes"

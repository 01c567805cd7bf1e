"""A table that is gone, and one whose disk is only away, as far as that can be told."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.shards.places import empty_above


@pytest.fixture
def warehouse(tmp_path: Path) -> Path:
    return tmp_path / "warehouse"


def empty(warehouse: Path, shard: str = "shard") -> str | None:
    return empty_above(str(warehouse / shard), roots=["s3://bucket/warehouse", str(warehouse)])


def test_a_mount_point_without_its_disk_is_empty_or_missing(warehouse: Path) -> None:
    assert empty(warehouse) == str(warehouse)
    warehouse.mkdir()
    assert empty(warehouse) == str(warehouse)
    (warehouse / "disk").mkdir()
    assert empty(warehouse, "disk/shard") == str(warehouse / "disk")


def test_beside_other_things_a_table_is_really_gone(warehouse: Path) -> None:
    (warehouse / "other").mkdir(parents=True)
    assert empty(warehouse) is None
    assert empty(warehouse, "deeper/shard") is None, "with the directory that it was in"
    (warehouse / "shard").mkdir()
    assert empty(warehouse) is None, "it is there"


def test_what_is_above_the_warehouse_says_nothing(warehouse: Path) -> None:
    (warehouse.parent / "other").mkdir()
    assert empty(warehouse) == str(warehouse)
    assert empty_above(f"file://{warehouse}/shard", roots=[str(warehouse)]) == str(warehouse)


def test_links_are_followed(warehouse: Path) -> None:
    (warehouse.parent / "link").symlink_to(warehouse)
    assert empty(warehouse.parent / "link") == str(warehouse)
    assert empty_above(str(warehouse.parent / "link/shard"), roots=[str(warehouse.parent / "link")]) == str(warehouse)


def test_an_object_store_has_no_mount_points() -> None:
    assert empty_above("s3://bucket/warehouse/shard", roots=["s3://bucket/warehouse"]) is None

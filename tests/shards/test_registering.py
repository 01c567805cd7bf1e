"""A command may give a location: a table there is taken up, and what else is there is never taken for ours."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from app.core.errors import Code, Refused
from app.shards import registering
from app.shards.object_directory import ObjectDirectory
from app.shards.registering import found_at
from tests.shards.helpers import append


@pytest.fixture(params=["local", "object store"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "object store":  # delta-rs reaches a local directory in the way it reaches object stores
        monkeypatch.setattr(
            registering, "look_into", lambda location, options: ObjectDirectory(f"file://{location}", options)
        )
    place = tmp_path / "warehouse" / "place"
    place.mkdir(parents=True)
    return place


def refusal(place: Path) -> Code:
    with pytest.raises(Refused) as refused:
        found_at(str(place), "updates", {})
    return refused.value.code


@pytest.mark.parametrize("name", ["x.parquet", "p=1/q=2/x.parquet", ".hidden", "_delta_log/x.tmp"])
def test_a_place_with_files_but_without_a_table_is_refused(place: Path, name: str) -> None:
    (place / "empty").mkdir()
    (place / name).parent.mkdir(parents=True, exist_ok=True)
    (place / name).write_text("precious")
    assert refusal(place) == Code.INVALID_ARGUMENT


def test_a_place_with_a_table_further_below_is_refused(place: Path) -> None:
    append(place / "eu")
    assert refusal(place) == Code.INVALID_ARGUMENT


def test_an_empty_place_is_free(place: Path) -> None:
    assert found_at(str(place), "updates", {}) is None
    (place / "a/b").mkdir(parents=True)
    (place / "_delta_log").mkdir()
    assert found_at(str(place), "updates", {}) is None


def test_a_place_that_does_not_exist_is_free(tmp_path: Path) -> None:
    assert found_at(str(tmp_path / "none"), "updates", {}) is None
    assert not (tmp_path / "none").exists()


def test_a_link_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    (tmp_path / "place/link").symlink_to(tmp_path)
    assert refusal(tmp_path / "place") == Code.INVALID_ARGUMENT


def test_a_table_is_taken_up_with_whatever_is_beside_its_log(place: Path) -> None:
    append(place, upper=3)
    (place / "x.parquet").write_text("x")
    found = found_at(str(place), "updates", {})
    assert found is not None
    assert found.upper == 3


def of_kind(place: Path, *, partition_by: list[str] | None = None, **configuration: str) -> None:
    table = pa.table({name: pa.array([1], pa.int64()) for name in ("_time", "_diff", "k")})
    properties = {f"delta.{name}": value for name, value in configuration.items()}
    write_deltalake(place, table, partition_by=partition_by, configuration=properties)


def with_column_mapping(place: Path, physical_name: str) -> None:
    """As Spark makes it; delta-rs can only read it."""
    of_kind(place)
    mapped = json.loads(DeltaTable(place).schema().to_json())
    for number, field in enumerate(mapped["fields"], 1):
        name = physical_name if field["name"] == "_time" else field["name"]
        field["metadata"] = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": name}
    metadata = {
        "id": str(DeltaTable(place).metadata().id),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps(mapped),
        "partitionColumns": [],
        "configuration": {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "3"},
        "createdTime": 0,
    }
    actions = [{"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}}, {"metaData": metadata}]
    (place / f"_delta_log/{1:020d}.json").write_text("".join(json.dumps(action) + "\n" for action in actions))


def test_a_table_whose_files_get_no_statistics_of_their_times_is_refused(tmp_path: Path) -> None:
    """Its history could never be merged."""
    of_kind(tmp_path / "partitioned", partition_by=["_time"])
    of_kind(tmp_path / "none", dataSkippingNumIndexedCols="0")
    of_kind(tmp_path / "others", dataSkippingStatsColumns="_diff,k")
    with_column_mapping(tmp_path / "renamed", "col-1234")
    for place in sorted(tmp_path.iterdir()):
        with pytest.raises(Refused, match="could never be merged") as refused:
            found_at(str(place), "updates", {})
        assert refused.value.code == Code.INVALID_ARGUMENT
        assert found_at(str(place), "delta", {}) is not None


def test_a_table_whose_files_get_them_is_taken_up(tmp_path: Path) -> None:
    of_kind(tmp_path / "partitioned", partition_by=["k"])
    of_kind(tmp_path / "few", dataSkippingNumIndexedCols="1")
    of_kind(tmp_path / "all", dataSkippingNumIndexedCols="-1")
    of_kind(tmp_path / "named", dataSkippingStatsColumns="k, `_time`", dataSkippingNumIndexedCols="0")
    with_column_mapping(tmp_path / "mapped", "_time")
    for place in sorted(tmp_path.iterdir()):
        assert found_at(str(place), "updates", {}) is not None, place.name


def test_the_columns_of_ours_must_be_in_their_order(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "place", pa.table({name: pa.array([1], pa.int64()) for name in ("_diff", "_time")}))
    assert refusal(tmp_path / "place") == Code.INVALID_ARGUMENT


@pytest.mark.parametrize("other", ["_time", "_diff"])
@pytest.mark.parametrize("type", [pa.int32(), pa.timestamp("us", "UTC"), pa.float64()])
def test_the_columns_of_ours_must_be_bigint(tmp_path: Path, other: str, type: pa.DataType) -> None:
    """A merge would write files that do not fit the table's schema, and nobody could read it any more."""
    types = {"_time": pa.int64(), "_diff": pa.int64(), other: type}
    write_deltalake(tmp_path / "place", pa.table({name: pa.array([1], each) for name, each in types.items()}))
    assert refusal(tmp_path / "place") == Code.INVALID_ARGUMENT


def test_a_table_that_would_forget_its_upper_is_refused(place: Path) -> None:
    of_kind(place, setTransactionRetentionDuration="interval 7 days")
    with pytest.raises(Refused, match="forget the upper"):
        found_at(str(place), "updates", {})

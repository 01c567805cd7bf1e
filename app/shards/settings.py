"""Settings under which a merge would lose data, or could not be told from what others wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from app.shards.errors import UnsafeShard

if TYPE_CHECKING:  # the controller looks at tables without Spark
    from pyspark.sql import SparkSession

LENIENT: Final = ("spark.sql.files.ignoreMissingFiles", "spark.sql.files.ignoreCorruptFiles")
"""With these, Spark leaves out what it cannot read, and says nothing."""
FORGETS: Final = "delta.setTransactionRetentionDuration"
"""A property that makes Delta forget app transactions, and so the upper."""
COLLECT: Final = "spark.databricks.delta.stats.collect"
_TIME: Final = "_time"
_STATS_COLUMNS: Final = "delta.dataSkippingStatsColumns"
_INDEXED: Final = "delta.dataSkippingNumIndexedCols"
_PHYSICAL_NAME: Final = "delta.columnMapping.physicalName"


def lenient_setting(spark: SparkSession) -> str | None:
    """One of `LENIENT` that is switched on."""
    return next((setting for setting in LENIENT if "true" in _values(spark, setting, "false")), None)


def check_strict(spark: SparkSession) -> None:
    """UnsafeShard if what cannot be read would be left out of what is written instead: it would be lost for ever."""
    setting = lenient_setting(spark)
    if setting is not None:
        raise UnsafeShard(f"With {setting} Spark leaves out what it cannot read, and a merge would lose it. Unset it.")


def collects_statistics(spark: SparkSession) -> bool:
    return "false" not in _values(spark, COLLECT, "true")


def _values(spark: SparkSession, setting: str, default: str) -> set[str]:
    """In this session, and in the one that is active in this thread: which of them counts depends on the step."""
    jvm: Any = spark._jvm
    active = jvm.org.apache.spark.sql.internal.SQLConf.get().getConfString(setting, default)
    return {str(value).strip().lower() for value in (spark.conf.get(setting, default), active)}


def without_time_statistics(metadata: Mapping[str, Any]) -> str | None:
    """Why Delta writes no least and greatest `_time` for the files of a table; None if it does.

    `metadata` is the action of Delta's log, with `partitionColumns`, `configuration` and `schemaString`.
    """
    if _TIME in metadata["partitionColumns"]:
        return f"it is partitioned by `{_TIME}`"
    time = next(field for field in json.loads(metadata["schemaString"])["fields"] if field["name"] == _TIME)
    physical_name = time.get("metadata", {}).get(_PHYSICAL_NAME, _TIME)
    if physical_name != _TIME:
        return f"its column mapping gives `{_TIME}` another name in the files ({physical_name})"
    columns = metadata["configuration"].get(_STATS_COLUMNS)
    if columns is not None:  # then the other property does not count
        named = {name.strip().strip("`").lower() for name in columns.split(",")}
        return None if _TIME in named else f"its property {_STATS_COLUMNS} does not name `{_TIME}`"
    if metadata["configuration"].get(_INDEXED, "").strip() == "0":
        return f"its property {_INDEXED} is 0"
    return None

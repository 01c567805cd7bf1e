"""The updates of one version of a shard as DataFrames: a collection's own columns, as they are or summed."""

from __future__ import annotations

from typing import Final

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.types import (
    ArrayType,
    DataType,
    LongType,
    MapType,
    StructField,
    StructType,
    VariantType,
)

from app.client_errors import InvalidUsage
from app.reading.errors import MANY
from app.reading.planning import Plan
from app.shards.columns import DIFF, TIME, holds, quoted, shard_schema, stored
from app.shards.settings import lenient_setting

_TOO_OLD: Final = "DELTA_UNSUPPORTED_TIME_TRAVEL_BEYOND_DELETED_FILE_RETENTION_DURATION"


class VersionTooOld(Exception):
    """The planned version is not the newest any more, and too old for Delta's time travel. A new plan is not."""


def updates(
    spark: SparkSession, plan: Plan, schema: str | None, *, at_least: int | None = None, at_most: int | None = None
) -> DataFrame:
    """`_time`, `_diff` and a collection's own columns, of the updates from one time up to another, both included."""
    if plan.version is None:
        return spark.createDataFrame([], stored(shard_schema(schema)))
    table = _load(spark, plan.location, plan.version)
    if at_least is not None:
        table = table.where(sql.col(TIME) >= sql.lit(at_least))
    if at_most is not None:
        table = table.where(sql.col(TIME) <= sql.lit(at_most))
    return table.select(TIME, DIFF, *_own_columns(table.schema, schema))


def consolidated(rows: DataFrame, count: str) -> DataFrame:
    """Each row once, with its count, which is never 0. A count below 0 is there if the data is so."""
    columns = _summable(rows)
    if count.lower() in (name.lower() for name in columns):
        raise InvalidUsage(
            f"The collection has a column {count!r} of its own. Give the count another name: Reader(…, count_column=…)."
        )
    summed = rows.groupBy(*map(_column, columns)).agg(sql.sum(DIFF).alias(count))
    return summed.where(_column(count) != 0)


def each_once(rows: DataFrame) -> DataFrame:
    """The rows without a count, if every count is 1; else whatever is computed from all of them fails with `MANY`.

    Also if the result needs only some: Spark takes no filter below one that is not deterministic. It would else filter
    before it sums, and not see that another row is there twice. What is cut off, as by `limit`, is not counted.
    """
    columns = _summable(rows)
    # Without columns there is one sum, also of nothing: then it is null.
    total = sql.coalesce(sql.sum(DIFF), sql.lit(0)).alias(DIFF)
    summed = rows.groupBy(*map(_column, columns)).agg(total)
    wrong = sql.raise_error(sql.concat(sql.lit(f"{MANY} "), _column(DIFF).cast("string")))
    # As a filter: a check in a column would not be evaluated when nobody asks for that column.
    barrier = sql.when(sql.spark_partition_id() < 0, False)  # never; but for Spark it is not deterministic
    checked = barrier.when(_column(DIFF) == 0, False).when(_column(DIFF) == 1, True).otherwise(wrong)
    return summed.where(checked).select(*map(_column, columns))


def at_time(counted: DataFrame, time: int, count: str) -> DataFrame:
    """What `consolidated` gives, as updates at one time."""
    columns = [name for name in counted.columns if name != count]
    first = [sql.lit(time).cast(LongType()).alias(TIME), _column(count).alias(DIFF)]
    return counted.select(*first, *map(_column, columns))


def _load(spark: SparkSession, location: str, version: int) -> DataFrame:
    if (setting := lenient_setting(spark)) is not None:
        raise InvalidUsage(f"With {setting} Spark leaves out what it cannot read: such a read is not exact. Unset it.")
    try:
        return spark.read.format("delta").option("versionAsOf", version).load(location)
    except AnalysisException as error:
        if _TOO_OLD in str(error):
            raise VersionTooOld from error
        raise


def _own_columns(table: StructType, schema: str | None) -> list[Column]:
    """The columns that a collection was created with; all, if it was created without a schema.

    The table may have more, and wider ones, if it was altered; or not yet, if that was just now.
    """
    there = {field.name.lower(): field for field in table.fields if field.name.lower() not in (TIME, DIFF)}
    if schema is None:
        return [_column(field.name) for field in there.values()]
    wanted = stored(shard_schema(schema)).fields[2:]
    return [_as(there.get(field.name.lower()), field) for field in wanted]


def _as(there: StructField | None, wanted: StructField) -> Column:
    if there is None:
        return sql.lit(None).cast(wanted.dataType).alias(wanted.name)
    column = _column(there.name)
    if _same(there.dataType, wanted.dataType):
        return column.alias(wanted.name)
    # A table that was altered may have values by now that the old type does not: never a wrong one instead.
    misfit = sql.raise_error(
        sql.lit(
            f"A value of {wanted.name} does not fit into {wanted.dataType.simpleString()}, its type in this "
            "collection: the table was altered. Read the collection that it was altered to."
        )
    )
    cast = column.try_cast(wanted.dataType)
    back = cast.cast(there.dataType)
    fits = _comparable(back, there.dataType).eqNullSafe(_comparable(column, there.dataType))
    return sql.when(fits, cast).otherwise(misfit.cast(wanted.dataType)).alias(wanted.name)


def _comparable(value: Column, type: DataType) -> Column:
    """The same value, with the entries of maps in their order: maps themselves cannot be compared."""
    if not holds(MapType, type):
        return value
    match type:
        case MapType():
            return sql.transform(
                sql.map_entries(value),
                lambda entry: sql.struct(
                    _comparable(entry["key"], type.keyType), _comparable(entry["value"], type.valueType)
                ),
            )
        case ArrayType():
            return sql.transform(value, lambda element: _comparable(element, type.elementType))
        case StructType():
            fields = [_comparable(value[field.name], field.dataType).alias(field.name) for field in type.fields]
            return sql.when(value.isNotNull(), sql.struct(*fields))
        case _:
            raise TypeError(f"{type.simpleString()} has no parts")


def _summable(rows: DataFrame) -> list[str]:
    """The data columns, if rows can be told apart by them."""
    for field in rows.schema.fields:
        if holds(VariantType, field.dataType):
            raise InvalidUsage(
                f"The column {field.name!r} is a VARIANT, and of two such values nobody knows whether they are equal: "
                "rows cannot be summed. Read the updates as they are, with snapshot_and_stream."
            )
    return [name for name in rows.columns if name not in (TIME, DIFF)]


def _column(name: str) -> Column:
    return sql.col(quoted(name))


def _same(one: DataType, other: DataType) -> bool:
    return one.simpleString().lower() == other.simpleString().lower()

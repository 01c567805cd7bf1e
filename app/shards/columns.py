"""The columns of a shard: how a schema becomes those of its table, and how rows are fitted into them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sql
from pyspark.sql.types import (
    ArrayType,
    CharType,
    DataType,
    MapType,
    StringType,
    StructField,
    StructType,
    VarcharType,
)

from app.core.errors import Refused
from app.core.frontier import MAX_TIME_GIVEN, Frontier
from app.core.schema import Array, Map, Struct, Type, check_evolution, parse_schema, spelled_out
from app.core.schema import Column as Described
from app.shards.errors import InvalidRows, SchemaMismatch

TIME: Final = "_time"
DIFF: Final = "_diff"
MARK: Final = "[HOLDFAST_ROWS]"
"""Begins the message of what our own checks raise inside Spark."""

_OURS: Final = f"{TIME} BIGINT, {DIFF} BIGINT"
_RAW_TYPE: Final = "__CHAR_VARCHAR_TYPE_STRING"  # where Spark keeps that a STRING was declared as CHAR or VARCHAR


def shard_schema(ddl: str | None) -> StructType:
    """The columns of the table of a collection with this schema, whatever this session makes of its words."""
    try:
        parse_schema(ddl)
    except Refused as refused:
        raise SchemaMismatch(refused.message) from None
    schema = StructType.fromDDL(_OURS if ddl is None else f"{_OURS}, {spelled_out(ddl)}")
    if not isinstance(schema, StructType):
        raise TypeError("Spark reads a list of columns as something else")
    return schema


def stored(schema: StructType) -> StructType:
    """Nullable, and with CHAR and VARCHAR as the STRING that Delta stores."""
    return StructType([StructField(field.name, _stored_type(field.dataType)) for field in schema.fields])


def _stored_type(type: DataType) -> DataType:
    match type:
        case CharType() | VarcharType():
            return StringType()
        case ArrayType():
            return ArrayType(_stored_type(type.elementType))
        case MapType():
            return MapType(_stored_type(type.keyType), _stored_type(type.valueType))
        case StructType():
            return stored(type)
        case _:
            return type


def described(schema: StructType) -> tuple[Described, ...]:
    """Columns as the rules of evolution see them."""
    if not schema.fields:
        return ()
    return tuple(column for field in schema.fields for column in _parse(_ddl(field)))


def _ddl(field: StructField) -> str:
    raw = (field.metadata or {}).get(_RAW_TYPE)
    if raw is None:
        return StructType([StructField(field.name, field.dataType, field.nullable)]).toDDL()
    name = field.name.replace("`", "``")
    return f"`{name}` {raw}{'' if field.nullable else ' NOT NULL'}"


def _parse(ddl: str) -> tuple[Described, ...]:
    try:
        return parse_schema(ddl, reserved=frozenset())
    except Refused as refused:
        raise SchemaMismatch(refused.message) from None


def fitted(rows: DataFrame, shard: StructType, *, columns: Sequence[str] | None = None) -> list[Column]:
    """The rows' columns as the table has them: in its order, widened to its types, nulls for what was added later.

    `columns` are those that must be there, by default all but nullable ones at the end. Whatever does not fit is
    refused here, before anything is written: Delta would write files of the wrong type.
    """
    given = _given(rows, shard, "shard")
    last = max(index for index, field in enumerate(shard.fields) if field.name.lower() in given or not field.nullable)
    wanted = shard.names[: last + 1] if columns is None else [TIME, DIFF, *columns]
    if missing := [name for name in wanted if name.lower() not in given]:
        raise SchemaMismatch(f"The rows lack the columns {missing}. The shard has {shard.names}.")
    return [_fitted(rows, given.get(field.name.lower()), field) for field in shard.fields]


def check_own(rows: DataFrame, ddl: str) -> None:
    """Refuses rows that are not those of a collection with this schema; `_time` and `_diff` may be missing.

    Its shard may take them: if the collection was altered, the table has more columns by now, and wider ones.
    """
    own = stored(shard_schema(ddl))
    given = _given(rows, own, "collection")
    if missing := [name for name in own.names[2:] if name.lower() not in given]:
        raise SchemaMismatch(f"The rows lack the columns {missing}. The collection has {own.names}.")
    for field in own.fields:
        if (there := given.get(field.name.lower())) is not None:
            _check_type(there, field, "collection")


def _given(rows: DataFrame, wanted: StructType, of: str) -> dict[str, StructField]:
    """The rows' columns by their names in lower case; all of them are wanted."""
    given = {field.name.lower(): field for field in rows.schema.fields}
    if len(given) < len(rows.schema.fields):
        raise SchemaMismatch("The rows have two columns of the same name, or that differ in upper and lower case only.")
    known = {field.name.lower() for field in wanted.fields}
    if extra := [field.name for name, field in given.items() if name not in known]:
        raise SchemaMismatch(
            f"The rows have columns {extra}, which the {of} does not have. It has {wanted.names}; a column is added "
            "with alter_table_desc."
        )
    return given


def _fitted(rows: DataFrame, given: StructField | None, wanted: StructField) -> Column:
    if given is None:
        return sql.lit(None).cast(wanted.dataType).alias(wanted.name)
    column = rows[quoted(given.name)]
    if given.dataType == wanted.dataType:
        return column.alias(wanted.name)
    _check_type(given, wanted, "shard")
    return column.cast(wanted.dataType).alias(wanted.name)


def _check_type(given: StructField, wanted: StructField, of: str) -> None:
    if given.dataType == wanted.dataType:
        return
    before, after = (_parse(_ddl(StructField("c", field.dataType))) for field in (given, wanted))
    try:
        check_evolution(_lenient(before), _lenient(after))
    except Refused:
        raise SchemaMismatch(
            f"The column {given.name!r} of the rows is {given.dataType.simpleString()}, but the {of}'s is "
            f"{wanted.dataType.simpleString()}; cast it."
        ) from None


def quoted(name: str) -> str:
    """A column's name as Spark takes it, whatever is in it."""
    return "`" + name.replace("`", "``") + "`"


def holds(kind: type[DataType], type: DataType) -> bool:
    """Whether a type is, or contains, one of a kind."""
    match type:
        case ArrayType():
            inner: Sequence[DataType] = [type.elementType]
        case MapType():
            inner = [type.keyType, type.valueType]
        case StructType():
            inner = [field.dataType for field in type.fields]
        case _:
            inner = []
    return isinstance(type, kind) or any(holds(kind, each) for each in inner)


def _lenient(columns: Sequence[Described]) -> list[Described]:
    """Without NOT NULL at any depth: whether nulls are there is checked row by row, when they are written."""
    return [Described(column.name, _lenient_type(column.type), True) for column in columns]


def _lenient_type(type: Type) -> Type:
    match type:
        case Array(element):
            return Array(_lenient_type(element))
        case Map(key, value):
            return Map(_lenient_type(key), _lenient_type(value))
        case Struct(fields):
            return Struct(tuple(_lenient(fields)))
        case _:
            return type


def checked(columns: Sequence[Column], *, lower: Frontier, upper: Frontier) -> list[Column]:
    """The same columns, with the bounds as a part of what computes them.

    So they are checked on the very rows that are written: a DataFrame that is evaluated a second time may give others.
    """
    time, diff, *data = columns
    # Also if the upper is to be `[]`: whatever is written must be at a time that can be held and read.
    end = min(int(upper), MAX_TIME_GIVEN + 1)
    in_bounds = (time >= sql.lit(int(lower))) & (time < sql.lit(end))
    wrong_time = _raised("the time ", time, f" is not in [{int(lower)}, {end})")
    no_diff = _raised("there is a row without a diff at the time ", time, "")
    return [
        sql.when(in_bounds, time).otherwise(wrong_time).alias(TIME),
        sql.when(diff.isNotNull(), diff).otherwise(no_diff).alias(DIFF),
        *data,
    ]


def _raised(before: str, value: Column, after: str) -> Column:
    shown = sql.coalesce(value.cast("string"), sql.lit("null"))
    return sql.raise_error(sql.concat(sql.lit(f"{MARK} {before}"), shown, sql.lit(f"{after}."))).cast("bigint")


def row_error(error: Exception) -> InvalidRows | None:
    """What was wrong with a row, if that is why a write failed."""
    text = str(error)
    if MARK in text:
        message = text.partition(MARK)[2].partition(" SQLSTATE")[0].splitlines()[0].strip()
        return InvalidRows(f"Nothing was appended: {message}")
    if "DeltaInvariantViolationException" in text:
        message = text.partition("DeltaInvariantViolationException:")[2].splitlines()[0].strip()
        return InvalidRows(f"Nothing was appended: {message}")
    return None


def evolved(before: StructType, after: StructType) -> StructType | None:
    """The table's columns after a change of its schema; None if there is nothing to do.

    Nothing, too, if the table has gone further already: the change came late. Refuses any other.
    """
    old, new = described(before), described(after)
    try:
        check_evolution(old, new)
    except Refused as refused:
        try:
            check_evolution(new, old)
        except Refused:
            raise SchemaMismatch(refused.message) from None
        return None
    if old == new:
        return None
    fields = [
        kept if was == becomes else _retyped(kept, wanted)
        for kept, wanted, was, becomes in zip(before.fields, after.fields, old, new, strict=False)
    ]
    return StructType([*fields, *after.fields[len(fields) :]])


def widened(before: StructType, after: StructType) -> bool:
    """Whether a column that is there gets another type."""
    return any(a.type != b.type for a, b in zip(described(before), described(after), strict=False))


def _retyped(field: StructField, wanted: StructField) -> StructField:
    metadata: dict[str, Any] = {key: value for key, value in (field.metadata or {}).items() if key != _RAW_TYPE}
    return StructField(field.name, wanted.dataType, field.nullable, metadata)

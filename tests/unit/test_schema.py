"""Schemas: what can be read, and which changes a table can take."""

from __future__ import annotations

import contextlib
import time

import pytest

from app.core.errors import Code, Refused
from app.core.schema import check_evolution, parse_schema, spelled_out


@pytest.mark.parametrize(
    "ddl",
    [
        "k STRING",
        "k STRING, v BIGINT NOT NULL COMMENT 'the value, in cents'",
        "`größe` int, `c``d` DATE, `1st` STRING",
        'k STRING COMMENT "the \\"key\\""',
        "m MAP<STRING, ARRAY<STRUCT<a: INT, b: DECIMAL(10,2) NOT NULL>>>",
        "d DECIMAL, e DEC(5), f NUMERIC(38, 38), g VARCHAR(10), h TIMESTAMP_NTZ, i BINARY",
    ],
)
def test_schemas_that_can_be_read(ddl: str) -> None:
    assert parse_schema(ddl)
    assert parse_schema(spelled_out(ddl)) == parse_schema(ddl)


@pytest.mark.parametrize(
    ("ddl", "words"),
    [
        ("t: Timestamp, timestamp TIMESTAMP_NTZ", "`t` : timestamp_ltz , `timestamp` TIMESTAMP_NTZ"),
        ("m MAP<STRING, TIMESTAMP> NOT NULL", "`m` MAP < STRING , timestamp_ltz > NOT NULL"),
        ("s STRUCT<order: TIMESTAMP_LTZ, `c``d` INT>", "`s` STRUCT < `order` : TIMESTAMP_LTZ , `c``d` INT >"),
        ("k INT COMMENT 'TIMESTAMP'", "`k` INT COMMENT 'TIMESTAMP'"),
        (r"""k INT COMMENT "it's a \" \' \\" """, r"""`k` INT COMMENT 'it\'s a \" \' \\'"""),
    ],
)
def test_a_schema_is_spelled_out_in_words_that_no_setting_changes(ddl: str, words: str) -> None:
    assert spelled_out(ddl) == words


@pytest.mark.parametrize(
    ("ddl", "reason"),
    [
        ("", "expected the name of a column"),
        ("k", "expected a type, found the end"),
        ("k STRING,", "expected the name of a column"),
        ("k STRING v INT", "expected a comma after column 'k'"),
        ("k STRNG", "'strng' is no type"),
        ("k STRING, K INT", "is there twice"),
        ("k DECIMAL(39,1)", "out of range"),
        ("k DECIMAL(3,4)", "out of range"),
        ("k ARRAY<INT", "expected '>'"),
        ("k STRING NOT", "expected 'null'"),
        ("k STRING; DROP TABLE x", "expected a comma"),
        ("1st INT", "unusual names need backquotes"),
        ("größe INT", "expected a type"),
        ("`a b` INT", "which Delta does not take"),
        ("s STRUCT<`x;y`: INT>", "which Delta does not take"),
        ("k INT COMMENT 'never closed", "expected a quoted text"),
        ("k INT" + " " * 100_000, "the limit is 100000"),
        ("_time BIGINT", "reserved"),
        ("_DIFF BIGINT", "reserved"),
        ("k " + "ARRAY<" * 100 + "INT" + ">" * 100, "nested more than 32 deep"),
    ],
)
def test_schemas_that_cannot_be_read_are_refused_with_a_reason(ddl: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason.replace("'", ".")) as refused:
        parse_schema(ddl)
    assert refused.value.code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("ddl", ["k INT" + " " * 90_000, "k INT COMMENT '" + "\\'" * 45_000, "`" * 90_000])
def test_reading_takes_time_in_proportion_to_the_length(ddl: str) -> None:
    started = time.process_time()
    with contextlib.suppress(Refused):
        parse_schema(ddl)
    assert time.process_time() - started < 5, "at a hundred times the linear cost, this took hours"


def test_a_plain_delta_table_may_have_columns_of_any_name() -> None:
    assert parse_schema("_time BIGINT", reserved=frozenset())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("k STRING", "k STRING"),
        ("k STRING", "k STRING, v INT"),
        ("v TINYINT", "v SMALLINT"),
        ("v INT", "v BIGINT"),
        ("v INT", "v DOUBLE"),
        ("v FLOAT", "v DOUBLE"),
        ("v DATE", "v TIMESTAMP_NTZ"),
        ("v DECIMAL(10,2)", "v DECIMAL(12,3)"),
        ("v INT", "v DECIMAL(10,0)"),
        ("v BIGINT", "v DECIMAL(22,2)"),
        ("v ARRAY<STRUCT<a: INT>>", "v ARRAY<STRUCT<a: BIGINT>>"),
        ("v MAP<STRING, FLOAT>", "v MAP<STRING, DOUBLE>"),
        (None, "k STRING"),
    ],
)
def test_changes_that_a_table_can_take(before: str | None, after: str) -> None:
    check_evolution(parse_schema(before), parse_schema(after))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("k STRING, v INT", "k STRING"),
        ("k STRING, v INT", "v INT, k STRING"),
        ("k STRING", "v INT, k STRING"),
        ("k STRING", "K STRING"),
        ("k STRING", "k STRING, v INT NOT NULL"),
        ("k STRING", "k STRING NOT NULL"),
        ("k STRING NOT NULL", "k STRING"),
        ("v BIGINT", "v INT"),
        ("v BIGINT", "v DOUBLE"),
        ("v DOUBLE", "v FLOAT"),
        ("v INT", "v STRING"),
        ("v DATE", "v TIMESTAMP"),
        ("v INT", "v DECIMAL(9,0)"),
        ("v DECIMAL(10,2)", "v DECIMAL(10,3)"),
        ("v DECIMAL(10,2)", "v DECIMAL(12,1)"),
        ("v ARRAY<INT>", "v ARRAY<STRING>"),
        ("v STRUCT<a: INT>", "v STRUCT<a: INT, b: INT>"),
        ("v VARCHAR(5)", "v VARCHAR(9)"),
    ],
)
def test_changes_that_a_table_cannot_take(before: str, after: str) -> None:
    with pytest.raises(Refused) as refused:
        check_evolution(parse_schema(before), parse_schema(after))
    assert refused.value.code is Code.SCHEMA_INCOMPATIBLE

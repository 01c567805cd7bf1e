"""Schemas in Spark's DDL (`k STRING, v BIGINT NOT NULL`), and which changes of one a table can take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from app.core.errors import Code, Refused, invalid

MAX_NESTING: Final = 32
MAX_CHARACTERS: Final = 100_000
# Delta refuses these in the name of a column, also in one with backquotes.
FORBIDDEN_IN_NAMES: Final = frozenset(" ,;{}()\n\t=")
RESERVED_COLUMNS: Final = frozenset({"_time", "_diff"})

_SYNONYMS: Final = {
    "boolean": "boolean", "tinyint": "tinyint", "byte": "tinyint", "smallint": "smallint", "short": "smallint",
    "int": "int", "integer": "int", "bigint": "bigint", "long": "bigint", "float": "float", "real": "float",
    "double": "double", "date": "date", "timestamp": "timestamp", "timestamp_ltz": "timestamp",
    "timestamp_ntz": "timestamp_ntz", "string": "string", "binary": "binary", "variant": "variant",
}  # fmt: skip
# To what each simple type can be widened without rewriting files.
_WIDER: Final = {
    "tinyint": {"smallint", "int", "bigint", "double"},
    "smallint": {"int", "bigint", "double"},
    "int": {"bigint", "double"},
    "float": {"double"},
    "date": {"timestamp_ntz"},
}
# How many digits before the point a decimal needs to take every value of an integer type.
_INTEGER_DIGITS: Final = {"tinyint": 10, "smallint": 10, "int": 10, "bigint": 20}


class Simple(msgspec.Struct, frozen=True):
    name: str


class Decimal(msgspec.Struct, frozen=True):
    precision: int
    scale: int


class Text(msgspec.Struct, frozen=True):
    """CHAR(n) or VARCHAR(n)."""

    name: str
    length: int


class Array(msgspec.Struct, frozen=True):
    element: Type


class Map(msgspec.Struct, frozen=True):
    key: Type
    value: Type


class Struct(msgspec.Struct, frozen=True):
    fields: tuple[Column, ...]


Type = Simple | Decimal | Text | Array | Map | Struct


class Column(msgspec.Struct, frozen=True):
    name: str
    type: Type
    nullable: bool


def parse_schema(ddl: str | None, *, reserved: frozenset[str] = RESERVED_COLUMNS) -> tuple[Column, ...]:
    """The columns of a schema; none for an absent one. Refuses what is no schema, naming the place."""
    if ddl is None:
        return ()
    if len(ddl) > MAX_CHARACTERS:
        raise invalid(f"The schema has {len(ddl)} characters; the limit is {MAX_CHARACTERS}.")
    parser = _Parser(ddl)
    columns = parser.columns(end="", depth=0)
    for column in columns:
        if column.name.lower() in reserved:
            raise invalid(f"Column {column.name!r} is reserved: Holdfast adds `_time` and `_diff` itself.")
    return columns


def spelled_out(ddl: str) -> str:
    """The same schema in words that mean the same in every Spark session.

    `TIMESTAMP` is one type or the other by `spark.sql.timestampType`. What is a reserved word, or in double quotes, may
    not be read at all under the settings of `spark.sql.ansi`.
    """
    parser = _Parser(ddl)
    parser.columns(end="", depth=0)
    return parser.spelled_out()


def check_evolution(before: Sequence[Column], after: Sequence[Column]) -> None:
    """Refuses a change that data already written cannot follow."""
    if len(after) < len(before):
        missing = [column.name for column in before[len(after) :]]
        raise _incompatible(f"columns {missing} are missing")
    for old, new in zip(before, after, strict=False):
        if old.name != new.name:
            raise _incompatible(f"column {old.name!r} became {new.name!r}; new columns go to the end")
        if old.nullable != new.nullable:
            raise _incompatible(f"column {old.name!r} was {_nullability(old)} and became {_nullability(new)}")
        if not _can_become(old.type, new.type):
            raise _incompatible(f"the type of column {old.name!r} changed to one that it cannot be widened to")
    for column in after[len(before) :]:
        if not column.nullable:
            raise _incompatible(f"the new column {column.name!r} is NOT NULL, which the rows already there are not")


def _nullability(column: Column) -> str:
    return "nullable" if column.nullable else "NOT NULL"


def _incompatible(reason: str) -> Refused:
    message = f"The new schema may only add nullable columns at the end or widen types: {reason}."
    return Refused(Code.SCHEMA_INCOMPATIBLE, message)


def _can_become(old: Type, new: Type) -> bool:
    match old, new:
        case Simple(), Simple():
            return old == new or new.name in _WIDER.get(old.name, ())
        case Simple(), Decimal():
            digits = _INTEGER_DIGITS.get(old.name)
            return digits is not None and new.precision - new.scale >= digits
        case Decimal(), Decimal():
            return new.scale >= old.scale and new.precision - new.scale >= old.precision - old.scale
        case Array(), Array():
            return _can_become(old.element, new.element)
        case Map(), Map():
            return _can_become(old.key, new.key) and _can_become(old.value, new.value)
        case Struct(), Struct():
            return len(old.fields) == len(new.fields) and all(
                a.name == b.name and a.nullable == b.nullable and _can_become(a.type, b.type)
                for a, b in zip(old.fields, new.fields, strict=True)
            )
        case _:
            return old == new


# A quote that is never closed is one bad token up to the end, so that reading is linear whatever was sent.
_TOKEN: Final = re.compile(
    r"""(`(?:[^`]|``)+`)|('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|([A-Za-z0-9_]+)|([<>(),:])|(['"`].*|[^\s])""", re.DOTALL
)
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _found(token: str) -> str:
    return repr(token) if token else "the end"


def _in_single_quotes(text: str) -> str:
    return "'" + re.sub(r"\\(.)|(')", r"\\\1\2", text[1:-1], flags=re.DOTALL) + "'"


class _Parser:
    """Recursive descent over the tokens of one DDL string."""

    def __init__(self, ddl: str) -> None:
        self._ddl = ddl
        self._tokens = [
            next((kind, text) for kind, text in zip("`'wp?", match.groups(), strict=True) if text is not None)
            for match in _TOKEN.finditer(ddl)
        ]
        self._next = 0
        self._words = [text for _, text in self._tokens]

    def spelled_out(self) -> str:
        """What was read, token by token, with those replaced that could mean something else."""
        return " ".join(self._words)

    def columns(self, *, end: str, depth: int) -> tuple[Column, ...]:
        """`name[:] TYPE [NOT NULL] [COMMENT 'text'], …` up to `end`."""
        columns: list[Column] = []
        names: set[str] = set()
        while True:
            name = self._name()
            if name.lower() in names:
                raise self._bad(f"the column {name!r} is there twice")
            names.add(name.lower())
            if self._peek() == ":":
                self._take()
            columns.append(self._rest_of_column(name, depth))
            token = self._take()
            if token == end:
                return tuple(columns)
            if token != ",":
                raise self._bad(f"expected a comma after column {name!r}, found {_found(token)}")

    def _rest_of_column(self, name: str, depth: int) -> Column:
        column_type = self._type(depth)
        nullable = True
        if self._peek().lower() == "not":
            self._take()
            self._expect("null")
            nullable = False
        if self._peek().lower() == "comment":
            self._take()
            if self._kind() != "'":
                raise self._bad("expected a quoted text after COMMENT")
            self._spell(_in_single_quotes(self._take()))
        return Column(name, column_type, nullable)

    def _type(self, depth: int) -> Type:
        if depth > MAX_NESTING:
            raise self._bad(f"types are nested more than {MAX_NESTING} deep")
        if self._kind() != "w":
            raise self._bad(f"expected a type, found {_found(self._peek())}")
        name = self._take().lower()
        match name:
            case "decimal" | "dec" | "numeric":
                return self._decimal()
            case "char" | "character" | "varchar":
                return Text("varchar" if name == "varchar" else "char", self._lengths(1)[0])
            case "array":
                self._expect("<")
                element = self._type(depth + 1)
                self._expect(">")
                return Array(element)
            case "map":
                self._expect("<")
                key = self._type(depth + 1)
                self._expect(",")
                value = self._type(depth + 1)
                self._expect(">")
                return Map(key, value)
            case "struct":
                self._expect("<")
                return Struct(self.columns(end=">", depth=depth + 1))
            case _ if name in _SYNONYMS:
                if name == "timestamp":
                    self._spell("timestamp_ltz")
                return Simple(_SYNONYMS[name])
            case _:
                raise self._bad(f"{name!r} is no type that Delta can store")

    def _decimal(self) -> Decimal:
        precision, scale = (*self._lengths(2), 0)[:2] if self._peek() == "(" else (10, 0)
        if not (1 <= precision <= 38 and 0 <= scale <= precision):
            raise self._bad(f"DECIMAL({precision},{scale}) is out of range")
        return Decimal(precision, scale)

    def _lengths(self, most: int) -> list[int]:
        """`(n)` or `(n, m)`."""
        self._expect("(")
        numbers: list[int] = []
        while True:
            token = self._take()
            if not (token.isascii() and token.isdigit() and len(token) <= 9):
                raise self._bad(f"expected a number, found {_found(token)}")
            numbers.append(int(token))
            if len(numbers) < most and self._peek() == ",":
                self._take()
                continue
            self._expect(")")
            return numbers

    def _name(self) -> str:
        kind, token = self._kind(), self._take()
        if kind == "`":
            token = token[1:-1].replace("``", "`")
        elif kind != "w" or not _NAME.fullmatch(token):
            raise self._bad(f"expected the name of a column, found {_found(token)}; unusual names need backquotes")
        if forbidden := FORBIDDEN_IN_NAMES.intersection(token):
            raise self._bad(f"the name {token!r} contains {min(forbidden)!r}, which Delta does not take")
        self._spell("`" + token.replace("`", "``") + "`")
        return token

    def _expect(self, wanted: str) -> None:
        if (token := self._take()).lower() != wanted:
            raise self._bad(f"expected {wanted!r}, found {_found(token)}")

    def _kind(self) -> str:
        return self._tokens[self._next][0] if self._next < len(self._tokens) else ""

    def _peek(self) -> str:
        return self._tokens[self._next][1] if self._next < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        self._next += 1
        return token

    def _spell(self, word: str) -> None:
        """What stands for the token that was just taken."""
        self._words[self._next - 1] = word

    def _bad(self, reason: str) -> Refused:
        return invalid(f"The schema {self._ddl!r:.200} cannot be read: {reason}.")

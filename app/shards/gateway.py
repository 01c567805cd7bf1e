"""What we use of Delta's and Spark's inside, through py4j: the few classes, and what their exceptions mean."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from app.shards.errors import Conflict, TableChanged

JVM_ERRORS: Final = (Py4JError, PySparkException)
"""What a call into the JVM can raise. Which of the two it is depends on what pyspark knows of the exception."""

_PACKAGE: Final = "io.delta.exceptions."
_TABLE_CHANGES: Final = frozenset({"MetadataChangedException", "ProtocolChangedException"})
_LONGEST_CHAIN: Final = 20


class Gateway:
    """The JVM of a session."""

    def __init__(self, spark: SparkSession) -> None:
        jvm: Any = spark._jvm
        self.jvm = jvm
        self.session: Any = spark._jsparkSession
        self.delta = jvm.org.apache.spark.sql.delta

    def none(self) -> Any:
        return self.jvm.scala.Option.empty()

    def some(self, value: Any) -> Any:
        return self.jvm.scala.Some(value)

    def seq(self, values: Sequence[Any]) -> Any:
        return self.jvm.org.apache.spark.api.python.PythonUtils.toSeq(list(values))

    def action(self, action: Mapping[str, Any]) -> Any:
        """An action of Delta's log from its JSON: that form is a public protocol, the constructors are not."""
        return self.delta.actions.Action.fromJson(json.dumps(action))

    def write_operation(self, mode: str, user_metadata: str) -> Any:
        """The only operation of Delta's that carries user metadata and fits any set of actions."""
        save_mode = getattr(self.jvm.org.apache.spark.sql.SaveMode, mode)
        none = self.none()
        operation = getattr(self.delta, "DeltaOperations$Write")
        return operation(save_mode, none, none, self.some(user_metadata), none, none, none, none, none)

    def struct(self, schema_json: str) -> Any:
        return self.jvm.org.apache.spark.sql.types.DataType.fromJson(schema_json)


def conflict_in(error: BaseException) -> Conflict | None:
    """The conflict that Delta reported, if that is what happened."""
    for name in _java_classes(error):
        if name.startswith(_PACKAGE):
            kind = name.removeprefix(_PACKAGE)
            return (TableChanged if kind in _TABLE_CHANGES else Conflict)(f"{kind}: {first_line(error)}")
    return None


def is_missing_file(error: BaseException) -> bool:
    return "java.io.FileNotFoundException" in _java_classes(error)


def _java_classes(error: BaseException) -> list[str]:
    """The names of the classes of the Java exception and its causes."""
    found = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    names: list[str] = []
    while isinstance(found, JavaObject) and len(names) < _LONGEST_CHAIN:
        names.append(found.getClass().getName())
        found = found.getCause()
    return names


def first_line(error: BaseException) -> str:
    """What went wrong, without the stack of the JVM."""
    return (text_of(error).strip().splitlines() or [""])[0][:300]


def text_of(error: BaseException) -> str:
    """That of the Java exception, if it is one. It is asked of the JVM, which may have ended."""
    try:
        return str(getattr(error, "java_exception", None) or error)
    except Exception:  # noqa: BLE001 - whatever py4j says of a JVM that does not answer
        return str(getattr(error, "errmsg", "the JVM does not say, it has ended"))

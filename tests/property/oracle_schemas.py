"""The schemas that random commands use, and which of them may follow which."""

from __future__ import annotations

SCHEMAS = [
    "k STRING",
    "k STRING, v INT",
    "k STRING, v BIGINT",
    "k STRING, v STRING",
    "k STRING, v INT, w STRING",
    "k STRING, v BIGINT, w STRING",
    "v INT, k STRING",
    "k STRING, v INT, w STRING NOT NULL",
]
"""All that are ever used. The last is never the schema of a collection: its one column is not nullable."""

COMPATIBLE_SCHEMAS: dict[str | None, set[str]] = {
    None: set(SCHEMAS[:-1]),
    "k STRING": set(SCHEMAS[:-2]),
    "k STRING, v INT": {SCHEMAS[1], SCHEMAS[2], SCHEMAS[4], SCHEMAS[5]},
    "k STRING, v BIGINT": {SCHEMAS[2], SCHEMAS[5]},
    "k STRING, v STRING": {SCHEMAS[3]},
    "k STRING, v INT, w STRING": {SCHEMAS[4], SCHEMAS[5]},
    "k STRING, v BIGINT, w STRING": {SCHEMAS[5]},
    "v INT, k STRING": {SCHEMAS[6]},
}
"""By hand: which schemas may follow which. An absent schema has no columns."""

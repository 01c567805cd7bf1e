"""What a well-formed message looks like, for the oracle: one predicate per field."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

GREATEST_TIME = 253_402_300_799_999
SECOND = 1_000
HOUR = 3_600 * SECOND
DAY = 24 * HOUR

UNITS_MS = {"ms": 1, "s": SECOND, "m": 60 * SECOND, "h": HOUR, "d": DAY}
CONNECTIONS = ("kafka", "postgres", "mysql", "sql_server", "load_generator")
ENVELOPES = ("none", "upsert", "debezium", "cdcv2")

Check = Callable[[Any], bool]


def milliseconds(value: Any) -> int | None:
    """A duration in milliseconds, or None if it is not one."""
    if isinstance(value, str):
        match = re.fullmatch(r"([0-9]+)(ms|s|m|h|d)", value)
        if match is None:
            return None
        value = int(match[1]) * UNITS_MS[match[2]]
    return value if is_time(value) else None


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def is_time(value: Any) -> bool:
    return is_int(value) and 0 <= value <= GREATEST_TIME


def is_duration(value: Any) -> bool:
    return milliseconds(value) is not None


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_command_id(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= 128 and "/" not in value


def is_collection_id(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_.:-]{1,128}", value) is not None


def is_version(value: Any) -> bool:
    return is_int(value) and value >= 0


def is_holder(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= 128


def is_purpose(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 1_024


def one_of(*values: str) -> Check:
    return lambda value: isinstance(value, str) and value in values


def list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(check(item) for item in value)


def or_null(check: Check) -> Check:
    return lambda value: value is None or check(value)


def fields(required: dict[str, Check], optional: dict[str, Check] | None = None) -> Check:
    """An object with these fields and no others; an optional field that is null counts as not given."""
    nullable = {name: or_null(check) for name, check in (optional or {}).items()}
    known = required | nullable

    def check_object(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and required.keys() <= value.keys() <= known.keys()
            and all(known[name](item) for name, item in value.items())
        )

    return check_object


def tagged(variants: dict[str, Check]) -> Check:
    """An object whose `kind` says which other fields it has."""

    def check_object(value: Any) -> bool:
        if not isinstance(value, dict) or not isinstance(value.get("kind"), str) or value["kind"] not in variants:
            return False
        return variants[value["kind"]]({name: item for name, item in value.items() if name != "kind"})

    return check_object


is_data_source = tagged(
    {
        "table": fields({}, {"txns": is_collection_id}),
        "ingestion": fields({"remap": is_collection_id, "connection": one_of(*CONNECTIONS)}),
        "ingestion_export": fields({"ingestion": is_collection_id, "envelope": one_of(*ENVELOPES)}),
        "progress": fields({}),
        "introspection": fields({}),
        "webhook": fields({}),
        "sink": fields({"from": is_collection_id}),
        "other": fields({}, {"inputs": list_of(is_collection_id)}),
    }
)

is_description = fields(
    {"id": is_collection_id, "data_source": is_data_source},
    {
        "schema": is_text,
        "since": is_time,
        "primary": is_collection_id,
        "timeline": is_text,
        "shard": fields({"location": is_text}, {"format": one_of("updates", "delta")}),
    },
)


def is_policy(value: Any) -> bool:
    """A policy that may be set: at no depth `no_policy`, `valid_from([])`, `multiple` of nothing or granularity 0."""
    return tagged(
        {
            "valid_from": fields({"frontier": is_time}),
            "lag_writes_by": fields({"lag": is_duration}, {"granularity": lambda g: bool(milliseconds(g))}),
            "step_back": fields({}),
            "multiple": fields({"policies": lambda p: isinstance(p, list) and p != [] and all(map(is_policy, p))}),
        }
    )(value)


_ids = {"collections": list_of(is_collection_id)}
_holds = {"holds": list_of(is_text)}

BODIES: dict[str, tuple[dict[str, Check], dict[str, Check]]] = {
    "create_collections": ({"collections": list_of(is_description)}, {"register_ts": is_time}),
    "alter_table_desc": (
        {"existing": is_collection_id, "new": is_collection_id, "schema": is_text, "expected_version": is_version},
        {},
    ),
    "drop_collections": (_ids, {}),
    "undrop_collections": (_ids, {}),
    "reconcile": (_ids, {}),
    "set_read_policies": (
        {"policies": list_of(fields({"collection": is_collection_id, "policy": is_policy}))},
        {},
    ),
    "acquire_read_holds": (
        _ids | {"holder": is_holder},
        {"at": is_time, "purpose": is_purpose, "lease": is_duration, "pin_files": is_bool},
    ),
    "downgrade_read_holds": ({"holds": list_of(fields({"hold": is_text, "to": or_null(is_time)}))}, {}),
    "release_read_holds": (_holds, {}),
    "clone_read_holds": (_holds, {}),
    "merge_read_holds": (_holds, {}),
    "renew_read_holds": (_holds, {"lease": is_duration}),
    "update_parameters": ({"parameters": lambda value: isinstance(value, dict)}, {}),
}

COMMAND_SHAPES: dict[str, Check] = {
    name: fields({"type": is_text, "id": is_command_id} | required, {"issued_at": is_time} | optional)
    for name, (required, optional) in BODIES.items()
}

CONTROL_SHAPES: dict[str, Check] = {
    "upper": fields({"type": is_text, "collection": is_collection_id, "upper": or_null(is_time)}),
    "clock": fields({"type": is_text, "now": is_time}),
    "restart": fields({"type": is_text}),
    "downgrades": fields({"type": is_text}),
    "finalize": fields({"type": is_text}, {"fail": list_of(is_text)}),
}


def valid_parameters(values: dict[str, Any]) -> bool:
    """Whether a whole set of parameters, after a change, is in range; durations are milliseconds by now."""
    return (
        is_bool(values["finalize_shards"])
        and is_int(values["finalization_concurrency"])
        and 1 <= values["finalization_concurrency"] <= 1_000
        and values["since_downgrade_interval"] <= DAY
        and values["undrop_window"] <= 365 * DAY
        and SECOND <= values["max_command_age"] < values["tombstone_retention"]
        and values["max_command_age"] <= values["command_retention"]
        and values["hold_max_lease"] != 0
        and values["orphan_grace"] >= DAY
        and values["journal_retention"] >= HOUR
    )

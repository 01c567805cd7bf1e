"""The commands, as structs. The JSON Schema in docs/ is generated from here."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from app.core.descriptions import CollectionId, Description, Name
from app.core.duration import PATTERN as DURATION_PATTERN
from app.core.duration import Duration
from app.core.frontier import MAX_TIME_GIVEN, Time
from app.core.policy import SettablePolicy

# No `/`: hold ids are made of a command's id, a slash and the rest. See ID_PATTERN for the end of the pattern.
COMMAND_ID_PATTERN: Final = r"^[^/]{1,128}(?![\s\S])"
CommandId = Annotated[str, msgspec.Meta(pattern=COMMAND_ID_PATTERN)]
Purpose = Annotated[str, msgspec.Meta(max_length=1024)]


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something inside a message."""


class _Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", kw_only=True):
    id: CommandId
    issued_at: Time | None = None


class CreateCollections(_Command, frozen=True, tag="create_collections", kw_only=True):
    collections: list[Description]
    register_ts: Time | None = None


class AlterTableDesc(_Command, frozen=True, tag="alter_table_desc", kw_only=True):
    existing: CollectionId
    new: CollectionId
    schema: str
    expected_version: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class DropCollections(_Command, frozen=True, tag="drop_collections", kw_only=True):
    collections: list[CollectionId]


class UndropCollections(_Command, frozen=True, tag="undrop_collections", kw_only=True):
    collections: list[CollectionId]


class CollectionPolicy(_Part, frozen=True):
    collection: CollectionId
    policy: SettablePolicy


class SetReadPolicies(_Command, frozen=True, tag="set_read_policies", kw_only=True):
    policies: list[CollectionPolicy]


class AcquireReadHolds(_Command, frozen=True, tag="acquire_read_holds", kw_only=True):
    collections: list[CollectionId]
    holder: Name
    at: Time | None = None
    purpose: Purpose | None = None
    lease: Duration | None = None
    pin_files: bool = False


class HoldMove(_Part, frozen=True):
    hold: str
    to: Time | None


class DowngradeReadHolds(_Command, frozen=True, tag="downgrade_read_holds", kw_only=True):
    holds: list[HoldMove]


class ReleaseReadHolds(_Command, frozen=True, tag="release_read_holds", kw_only=True):
    holds: list[str]


class CloneReadHolds(_Command, frozen=True, tag="clone_read_holds", kw_only=True):
    holds: list[str]


class MergeReadHolds(_Command, frozen=True, tag="merge_read_holds", kw_only=True):
    holds: list[str]


class RenewReadHolds(_Command, frozen=True, tag="renew_read_holds", kw_only=True):
    holds: list[str]
    lease: Duration | None = None


class UpdateParameters(_Command, frozen=True, tag="update_parameters", kw_only=True):
    parameters: dict[str, Any]


class Reconcile(_Command, frozen=True, tag="reconcile", kw_only=True):
    collections: list[CollectionId]


Command = (
    CreateCollections
    | AlterTableDesc
    | DropCollections
    | UndropCollections
    | SetReadPolicies
    | AcquireReadHolds
    | DowngradeReadHolds
    | ReleaseReadHolds
    | CloneReadHolds
    | MergeReadHolds
    | RenewReadHolds
    | UpdateParameters
    | Reconcile
)
COMMAND_TYPES: Final[dict[str, type[Command]]] = {
    str(command.__struct_config__.tag): command for command in Command.__args__
}


def json_schema() -> dict[str, Any]:
    """The JSON Schema of every command."""

    def describe(custom: type) -> dict[str, Any]:
        if custom is Duration:
            return {
                "description": "A duration: milliseconds, or a number with a unit.",
                "anyOf": [
                    {"type": "integer", "minimum": 0, "maximum": MAX_TIME_GIVEN},
                    {"type": "string", "pattern": DURATION_PATTERN},
                ],
            }
        raise NotImplementedError

    (schema,), components = msgspec.json.schema_components(
        [Command], schema_hook=describe, ref_template="#/$defs/{name}"
    )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Holdfast commands",
        **schema,
        "$defs": components,
    }

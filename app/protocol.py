"""Records of the command topic become commands, and results become replies.

Decoding is strict, and an error names the place and the reason.
"""

from __future__ import annotations

import re
from typing import Any, Final, get_args, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType

from app.core.descriptions import ID_PATTERN, DataSource, Ingestion, IngestionExport, Other, ShardDescription
from app.core.errors import BrokenInvariant, Code, Refused
from app.core.frontier import value_of
from app.core.images import Hold, decode_custom
from app.core.policy import SettablePolicy, number_of_policies
from app.messages import (
    COMMAND_ID_PATTERN,
    COMMAND_TYPES,
    AcquireReadHolds,
    AlterTableDesc,
    CloneReadHolds,
    Command,
    CreateCollections,
    DowngradeReadHolds,
    DropCollections,
    MergeReadHolds,
    Reconcile,
    ReleaseReadHolds,
    RenewReadHolds,
    SetReadPolicies,
    UndropCollections,
    UpdateParameters,
)

MAX_MESSAGE_BYTES: Final = 1024 * 1024
MAX_IDS: Final = 10_000
MAX_ERROR_CHARACTERS: Final = 2_000

_PATTERNS_IN_WORDS: Final = {
    ID_PATTERN: "Expected the id of a collection: 1 to 128 of the characters A-Z, a-z, 0-9, `_`, `.`, `:` and `-`",
    COMMAND_ID_PATTERN: "Expected the id of a command: 1 to 128 characters, none of them `/`",
}
_PATH_AT_END: Final = re.compile(r"(?P<reason>.*) - at `(?P<path>\$[^`]*)`", re.DOTALL)
_is_command_id: Final = re.compile(COMMAND_ID_PATTERN).search


class ErrorBody(msgspec.Struct, frozen=True):
    """What was wrong. The message says what happened and what to do; the rest is for programs."""

    code: str
    message: str
    path: str | UnsetType = UNSET
    earliest: dict[str, int] | UnsetType = UNSET
    actual: int | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one command. `id` and `type` are left out if they could not be read."""

    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    status: str
    result: dict[str, Any] | UnsetType = UNSET
    error: ErrorBody | UnsetType = UNSET
    seq: int | UnsetType = UNSET
    epoch: int | UnsetType = UNSET


class Decoded(msgspec.Struct, frozen=True):
    """A record as far as it could be read: a command, or a refusal. One with too long a list is both."""

    id: str | None
    type: str | None
    issued_at: int | None = None
    command: Command | None = None
    refusal: Refused | None = None


_decode_command: Final = msgspec.json.Decoder(Command, dec_hook=decode_custom).decode
_encode: Final = msgspec.json.Encoder().encode


def decode(raw: bytes) -> Decoded:
    """Reads a record. Never raises: what cannot be read is a refusal like any other."""
    if len(raw) <= MAX_MESSAGE_BYTES:
        try:
            command = _decode_command(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return _explain(raw, error)
        type_ = str(command.__struct_config__.tag)
        refusal = None
        if (number := _longest_list(command)) > MAX_IDS:
            refusal = Refused(Code.TOO_LARGE, f"A list in the command has {number} elements; the limit is {MAX_IDS}.")
        return Decoded(command.id, type_, command.issued_at, command, refusal)
    return _explain(raw, None)


def _explain(raw: bytes, error: Exception | None) -> Decoded:
    """Why a record is no command, with its id and type if it has any. Slow, and only for what is wrong."""
    try:
        message = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as reason:
        return Decoded(None, None, refusal=Refused(Code.MALFORMED, f"This is not one JSON object ({reason})."))
    if not isinstance(message, dict):
        return Decoded(None, None, refusal=Refused(Code.MALFORMED, "This is JSON, but not an object."))
    id_, type_ = message.get("id"), message.get("type")
    id_ = id_ if isinstance(id_, str) and _is_command_id(id_) else None
    if error is None:
        text = f"The message has {len(raw)} bytes; the limit is {MAX_MESSAGE_BYTES}."
        refusal = Refused(Code.TOO_LARGE, text)
    elif isinstance(type_, str) and type_ not in COMMAND_TYPES:
        known = ", ".join(COMMAND_TYPES)
        refusal = Refused(Code.UNKNOWN_COMMAND, f"There is no command {type_!r:.100}; there are: {known}.")
    else:
        refusal = shape_error(error)
    type_ = type_ if isinstance(type_, str) and len(type_) <= 128 else None
    issued_at = message.get("issued_at")
    return Decoded(id_, type_, issued_at if type(issued_at) is int else None, refusal=refusal)


def shape_error(error: Exception) -> Refused:
    """What msgspec says of a message that has the wrong shape, as a refusal with a path."""
    # The reason may quote what the client sent, so only the end of the text is taken for a path.
    match = _PATH_AT_END.fullmatch(str(error))
    reason, path = (match["reason"], match["path"]) if match else (str(error), "$")
    field = path.rpartition(".")[2]
    if reason.startswith("Invalid") and (allowed := _allowed(field, path)):
        reason = f"{reason.replace(' enum ', ' ')}; there are: {', '.join(allowed)}"
    elif field == "frontier" and "got `null`" in reason:
        reason = f"{reason}; only a drop gives a collection up"
    for pattern, words in _PATTERNS_IN_WORDS.items():
        if reason == f"Expected `str` matching regex {pattern!r}":
            reason = words
    return Refused(Code.INVALID_ARGUMENT, f"{reason}.", path=path)


def _allowed(field: str, path: str) -> list[str]:
    """The values that a field may have, if these are a few names."""
    if field == "kind":
        sources: Any = DataSource if "data_source" in path else SettablePolicy
        return [str(each.__struct_config__.tag) for each in sources.__args__]
    choices = {"connection": Ingestion, "envelope": IngestionExport, "format": ShardDescription}
    return list(get_args(get_type_hints(choices[field])[field])) if field in choices else []


def _longest_list(command: Command) -> int:
    match command:
        case CreateCollections(collections=things):
            inputs = [len(each.data_source.inputs) for each in things if isinstance(each.data_source, Other)]
            return max(len(things), *inputs, 0)
        case SetReadPolicies(policies=things):
            return len(things) + sum(number_of_policies(each.policy) - 1 for each in things)
        case (
            AcquireReadHolds(collections=things)
            | DropCollections(collections=things)
            | UndropCollections(collections=things)
            | Reconcile(collections=things)
            | DowngradeReadHolds(holds=things)
            | ReleaseReadHolds(holds=things)
            | CloneReadHolds(holds=things)
            | MergeReadHolds(holds=things)
            | RenewReadHolds(holds=things)
        ):
            return len(things)
        case AlterTableDesc() | UpdateParameters():
            return 1


def internal_error(error: BrokenInvariant) -> Refused:
    return Refused(Code.INTERNAL, f"This is a defect of Holdfast; nothing was changed. {error}")


def error_body(refusal: Refused) -> ErrorBody:
    """Errors quote what was sent, but not all of it: a reply must fit into a Kafka record."""
    message = refusal.message
    if len(message) > MAX_ERROR_CHARACTERS:
        message = f"{message[:MAX_ERROR_CHARACTERS]}… (cut)"
    path = refusal.details.get("path", UNSET)
    return ErrorBody(
        code=refusal.code.value,
        message=message,
        path=path if path is UNSET else path[:MAX_ERROR_CHARACTERS],
        earliest=refusal.details.get("earliest", UNSET),
        actual=refusal.details.get("actual", UNSET),
        reason=refusal.details.get("reason", UNSET),
    )


def holds_result(holds: list[Hold]) -> dict[str, Any]:
    """The holds a command concerned, as they now are."""
    return {
        "holds": [{"hold": hold.id, "collection": hold.collection, "since": value_of(hold.since)} for hold in holds]
    }


def at_entry(reply: Reply, seq: int, epoch: int) -> Reply:
    """The reply with the entry that recorded it; one that has it already is left as it is."""
    return reply if reply.seq is not UNSET else msgspec.structs.replace(reply, seq=seq, epoch=epoch)


def encode_reply(reply: Reply) -> bytes:
    return _encode(reply)


def too_long_for_kafka(reply: bytes, *, topic: str, partition: int, offset: int) -> bytes:
    """Instead of a reply that Kafka would not take: where its result is to be found."""
    full = msgspec.json.decode(reply, type=Reply)
    place = {"table": "commands", "topic": topic, "partition": partition, "offset": offset}
    if full.error is UNSET:
        return encode_reply(msgspec.structs.replace(full, result={"too_long": place}))
    assert isinstance(full.error, ErrorBody)
    error = ErrorBody(full.error.code, f"{full.error.message} The details are in the row {place}.")
    return encode_reply(msgspec.structs.replace(full, error=error))

"""Between images and the rows that users see in the tables, both ways.

`collection_row`, `hold_row` and `shard_row` give a row as JSON would show it: times of day are milliseconds, JSON is
nested. In the tables times of day are TIMESTAMP and JSON is text; see `app.state.schemas`.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET

from app.commands import CommandImage
from app.core.descriptions import Description, source_kind
from app.core.errors import Corrupt
from app.core.frontier import frontier_of, value_of
from app.core.images import Collection, Hold, Shard, decode_custom, encode_custom
from app.core.policy import Policy
from app.protocol import ErrorBody, Reply

Row = dict[str, Any]


class CommandRow(msgspec.Struct, frozen=True, gc=False):
    """The recorded result of one record, with the record's place on Kafka."""

    topic: str
    partition: int
    offset: int
    image: CommandImage


_encode: Final = msgspec.json.Encoder(enc_hook=encode_custom).encode
_decode_description: Final = msgspec.json.Decoder(Description, dec_hook=decode_custom).decode
_decode_policy: Final[msgspec.json.Decoder[Policy]] = msgspec.json.Decoder(Policy, dec_hook=decode_custom)
_decode_command: Final = msgspec.json.Decoder(CommandRow, dec_hook=decode_custom).decode
_decode_object: Final = msgspec.json.Decoder(dict[str, Any]).decode
_ERROR_DETAILS: Final = ("path", "earliest", "actual", "reason")


def collection_row(image: Collection, created_seq: int, updated_seq: int) -> Row:
    return {
        "id": image.id,
        "data_source": source_kind(image.description.data_source),
        "description": msgspec.to_builtins(image.description),
        "timeline": image.description.timeline,
        "time_dependence": image.time_dependence,
        "primary": image.primary,
        "dependencies": list(image.dependencies),
        "shard": image.shard,
        "schema_version": image.schema_version,
        "read_policy": msgspec.to_builtins(image.policy, enc_hook=encode_custom),
        "write_frontier": value_of(image.upper),
        "implied_capability": value_of(image.implied),
        "read_frontier": value_of(image.since),
        "dropped": image.dropped,
        "created_seq": created_seq,
        "updated_seq": updated_seq,
    }


def hold_row(image: Hold, updated_seq: int) -> Row:
    return _row("hold", image, updated_seq)


def shard_row(image: Shard, updated_seq: int) -> Row:
    return _row("shard", image, updated_seq)


def _row(key: str, image: Hold | Shard, updated_seq: int) -> Row:
    """The fields are the columns, but for the id, which is named after what it is the id of."""
    row: Row = msgspec.to_builtins(image, enc_hook=encode_custom)
    return {key: row.pop("id"), **row, "updated_seq": updated_seq}


def command_row(row: CommandRow, seq: int, epoch: int) -> Row:
    """One row per record.

    `digest`, `error_details`, `first_seq` and `first_epoch` are there so that a reply can be repeated exactly: the last
    two are the entry that the reply to a duplicate names.
    """
    image, reply = row.image, row.image.reply
    error = None if reply.error is UNSET else reply.error
    details = {} if error is None else {name: getattr(error, name) for name in _ERROR_DETAILS}
    details = {name: value for name, value in details.items() if value is not UNSET}
    return {
        "topic": row.topic,
        "partition": row.partition,
        "offset": row.offset,
        "id": image.id,
        "type": image.type,
        "status": reply.status,
        "error_code": None if error is None else error.code,
        "error_message": None if error is None else error.message,
        "error_details": details or None,
        "result": None if reply.result is UNSET else reply.result,
        "raw": image.raw,
        "digest": image.digest,
        "first_seq": None if reply.seq is UNSET else reply.seq,
        "first_epoch": None if reply.epoch is UNSET else reply.epoch,
        "seq": seq,
        "epoch": epoch,
        "applied_at": image.applied_at,
    }


def collection_image(row: Row) -> Collection:
    """The inverse of `collection_row`, for a row whose JSON columns are text; likewise the next ones."""
    return Collection(
        id=row["id"],
        description=_decode_description(row["description"]),
        time_dependence=row["time_dependence"],
        primary=row["primary"],
        dependencies=tuple(row["dependencies"]),
        shard=row["shard"],
        schema_version=row["schema_version"],
        policy=_decode_policy.decode(row["read_policy"]),
        upper=frontier_of(row["write_frontier"]),
        implied=frontier_of(row["implied_capability"]),
        since=frontier_of(row["read_frontier"]),
        dropped=row["dropped"],
    )


def hold_image(row: Row) -> Hold:
    return _image(Hold, "hold", row)


def shard_image(row: Row) -> Shard:
    if row["table_id"] is None:  # written before there was this column
        row = {column: value for column, value in row.items() if column != "table_id"}
    return _image(Shard, "shard", row)


_Image = TypeVar("_Image", Hold, Shard)


def _image(kind: type[_Image], key: str, row: Row) -> _Image:
    try:
        return msgspec.convert({**row, "id": row[key]}, kind, dec_hook=decode_custom)
    except msgspec.ValidationError as error:
        raise Corrupt(f"The row of {key} {row[key]!r} cannot be read: {error}") from error


def command_of(row: Row) -> CommandRow:
    error: Any = UNSET
    if row["error_code"] is not None:
        details = {} if row["error_details"] is None else _decode_object(row["error_details"])
        error = ErrorBody(code=row["error_code"], message=row["error_message"], **details)
    reply = Reply(
        id=UNSET if row["id"] is None else row["id"],
        type=UNSET if row["type"] is None else row["type"],
        status=row["status"],
        result=UNSET if row["result"] is None else _decode_object(row["result"]),
        error=error,
        seq=UNSET if row["first_seq"] is None else row["first_seq"],
        epoch=UNSET if row["first_epoch"] is None else row["first_epoch"],
    )
    image = CommandImage(row["id"], row["type"], reply, row["applied_at"], row["digest"], row["raw"])
    return CommandRow(row["topic"], row["partition"], row["offset"], image)


def encode_command(row: CommandRow) -> bytes:
    """The value of a command's row in the journal."""
    return _encode(row)


def decode_command(value: bytes) -> CommandRow:
    return _decode_command(value)


def as_json(value: Any) -> str | None:
    """A JSON column's text."""
    return None if value is None else _encode(value).decode()

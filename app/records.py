"""What comes from the command topic, and what goes back to the topic of replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from app import protocol
from app.commands import Outcome
from app.state.entries import JournalRow
from app.state.recovery import command_row, offset_row
from app.state.rows import CommandRow

MAX_REPLY_BYTES: Final = 900_000
"""Kafka takes records of up to 1 MiB by default; a larger reply only says where the result is."""


class Record(NamedTuple):
    """One record of the command topic."""

    partition: int
    offset: int
    timestamp: int
    value: bytes


class Topic(NamedTuple):
    """The command topic. A topic that was deleted and made anew has another id, and its offsets start anew."""

    name: str
    id: str


class Reply(NamedTuple):
    key: bytes | None
    value: bytes


def rows_of(topic: Topic, done: Sequence[tuple[Record, Outcome]]) -> list[JournalRow]:
    """What an entry says of the records that it applied, in their order: each result, and how far the topic is done."""
    rows = [
        command_row(topic.id, CommandRow(topic.name, record.partition, record.offset, outcome.image))
        for record, outcome in done
    ]
    return rows + offset_rows(topic, {record.partition: record.offset + 1 for record, _ in done})


def offset_rows(topic: Topic, ends: Mapping[int, int]) -> list[JournalRow]:
    """How far each of these partitions is done."""
    return [offset_row(topic.id, partition, end) for partition, end in sorted(ends.items())]


def reply_to(record: Record, outcome: Outcome, topic: Topic, *, seq: int, epoch: int) -> Reply:
    """The reply to a record that was applied by the entry `seq`."""
    return _reply(outcome.image.id, outcome.reply(seq, epoch), topic.name, record.partition, record.offset)


def recorded_reply(row: CommandRow, seq: int, epoch: int) -> Reply:
    """The same reply once more, from what was recorded of it."""
    value = protocol.encode_reply(protocol.at_entry(row.image.reply, seq, epoch))
    return _reply(row.image.id, value, row.topic, row.partition, row.offset)


def _reply(command_id: str | None, value: bytes, topic: str, partition: int, offset: int) -> Reply:
    if len(value) > MAX_REPLY_BYTES:
        value = protocol.too_long_for_kafka(value, topic=topic, partition=partition, offset=offset)
    return Reply(None if command_id is None else command_id.encode(), value)

"""How far each command topic is applied, and what its records did: records in, outcomes out, each record once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from app.clock import wall_ms
from app.commands import CommandProcessor, Outcome
from app.core.images import Changes
from app.core.machine import Machine
from app.records import Record, Topic, recorded_reply
from app.state.recovery import Recovered


class Batch(NamedTuple):
    """What became of the records of a batch. `repeated` were applied before; nothing is done to them again."""

    done: list[tuple[Record, Outcome]]
    repeated: list[Record]
    changes: Changes
    warnings: int


class AppliedTopics:
    """Topics by their Kafka id: one that was made anew starts anew. All of it follows from what was recovered."""

    def __init__(self, machine: Machine, recovered: Recovered) -> None:
        self._commands = CommandProcessor(machine)
        for row, seq, epoch in recovered.commands:
            self._commands.restore(row.image, seq=seq, epoch=epoch)
        self._offsets = dict(recovered.offsets)
        last = max((seq for _, seq, _ in recovered.commands), default=0)
        self.last_replies = [recorded_reply(row, seq, epoch) for row, seq, epoch in recovered.commands if seq == last]

    def offsets(self, topic: Topic) -> dict[int, int]:
        """Per partition, the offset of the first record that has not been applied."""
        prefix = f"{topic.id}/"
        return {
            int(key.removeprefix(prefix)): next_offset
            for key, next_offset in self._offsets.items()
            if key.startswith(prefix)
        }

    def go_on_at(self, topic: Topic, offsets: Mapping[int, int]) -> None:
        """Per partition, the offset of the next record to apply: whatever has a lesser one counts as applied."""
        self._offsets.update({f"{topic.id}/{partition}": offset for partition, offset in offsets.items()})

    def apply(self, topic: Topic, records: Sequence[Record], *, now: int) -> Batch:
        """In the order of partition and offset, with one reading of the clock."""
        done: list[tuple[Record, Outcome]] = []
        repeated: list[Record] = []
        changes: Changes = {}
        wall = wall_ms()
        warnings = self._commands.warnings
        for record in sorted(records):
            key = f"{topic.id}/{record.partition}"
            if record.offset < self._offsets.get(key, 0):
                repeated.append(record)
                continue
            outcome = self._commands.apply(record.value, timestamp=record.timestamp, now=now, wall=wall)
            changes.update(outcome.changes)
            done.append((record, outcome))
            self._offsets[key] = record.offset + 1
        return Batch(done, repeated, changes, self._commands.warnings - warnings)

    def written(self, seq: int, epoch: int) -> None:
        """Everything that was applied is in the journal, in the entry `seq`."""
        self._commands.written(seq, epoch)

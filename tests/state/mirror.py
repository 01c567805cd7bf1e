"""The simulator with a real journal and real tables beside it, which must say the same at every moment."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from app.commands import CommandProcessor
from app.core.images import Changes
from app.simulate import Journal as MemoryJournal
from app.simulate import Simulator, _command_image
from app.state.changes import Pending
from app.state.journal import Journal, JournalRow
from app.state.recovery import Recovered, command_row, image_row, offset_row, recover
from app.state.rows import CommandRow
from app.state.tables import TABLES, Tables
from tests.state.helpers import open_journal

JSON_COLUMNS = {"description", "read_policy", "result", "error_details"}


class RecordingJournal(MemoryJournal):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[int, Changes]] = []

    def append(self, changes: Changes) -> int:
        seq = super().append(changes)
        self.written.append((seq, changes))
        return seq


class Mirror(Simulator):
    """Every entry goes to the real journal too; now and then the tables are merged, all of them or some."""

    def __init__(self, root: Path, seed: int) -> None:
        super().__init__()
        self.root = root
        self.rng = Random(seed)
        self.journal: RecordingJournal = RecordingJournal()
        self.real = open_journal(root, "mirror")
        self.tables = Tables.open(str(root), storage_options={})
        self.pending = Pending()
        self.seqs: dict[int, int] = {}  # of the simulator → of the real journal
        self.checked = 0

    def line(self, raw: bytes) -> bytes:
        known = len(self.journal.commands)
        reply = super().line(raw)
        for seq, changes in self.journal.written:
            rows = [image_row(key, image) for key, image in changes.items()]
            rows += self._command_rows(known, seq)
            self._append(seq, rows)
        self.journal.written.clear()
        return reply

    def _command_rows(self, known: int, seq: int) -> list[JournalRow]:
        rows = []
        for offset, (written, _, value) in enumerate(self.journal.commands[known:], start=known):
            if written == seq:
                rows.append(command_row("topic-id", CommandRow("topic", 0, offset, _command_image(value))))
                rows.append(offset_row("topic-id", 0, offset + 1))
        return rows

    def _append(self, seq: int, rows: list[JournalRow]) -> None:
        epoch = self.machine.epoch
        self.seqs[seq] = self.real.append(epoch=epoch, at=self.now, origin="test", rows=rows)
        self.pending.add(self.seqs[seq], epoch, rows)
        chosen = self.rng.random()
        if chosen < 0.06:
            self.merge()
        elif chosen < 0.08:
            self._merge_some()
        elif chosen < 0.12:
            upto = min(self.tables.positions().values())
            self.real.maintain(epoch=epoch, trim_to=upto, now_ms=self.now, retention_ms=self.rng.choice([0, 10_000]))
            self.tables.maintain(now_ms=self.now, command_retention_ms=self.parameters.command_retention)
        if chosen > 0.97:
            self.check_recovery()

    @property
    def parameters(self) -> Any:
        return self.machine.state.parameters

    def merge(self) -> None:
        self.tables.merge(self.pending, upto=self.real.last_seq, epoch=self.machine.epoch)
        self.pending = Pending()

    def _merge_some(self) -> None:
        """A crash between two tables: the rest stay behind, and get the same changes again later."""
        left_out = self.rng.sample(TABLES, 2)
        kept = {name: self.tables._tables.pop(name) for name in left_out}
        self.tables.merge(self.pending, upto=self.real.last_seq, epoch=self.machine.epoch)
        self.tables._tables.update(kept)
        self.check_recovery()

    def check_recovery(self) -> Recovered:
        """A controller that boots now, from the files alone, has what we have."""
        journal = Journal.open(f"{self.root}/state/journal", storage_options={}, instance="x", read_only=True)
        recovered = recover(journal, Tables.open(str(self.root), storage_options={}), now_ms=self.now)
        assert recovered.images == self.journal.decoded() == self.machine.state.images()
        assert recovered.seq == self.real.last_seq
        assert recovered.last_at == self.now
        number = len(self.journal.commands)
        assert recovered.offsets == ({"topic-id/0": number} if number else {})
        oldest = self.now - self.parameters.max_command_age
        images = [_command_image(value) for _, _, value in self.journal.commands]
        wanted = [
            (CommandRow("topic", 0, offset, image), self.seqs[seq], epoch)
            for offset, (image, (seq, epoch, _)) in enumerate(zip(images, self.journal.commands, strict=True))
            if image.applied_at >= oldest
        ]
        assert recovered.commands == wanted
        self._check_duplicates(recovered)
        self.checked += 1
        return recovered

    def _check_duplicates(self, recovered: Recovered) -> None:
        """Every result that a duplicate would get now, it would get from the recovered controller too."""
        processor = CommandProcessor(self.machine)
        for row, seq, epoch in recovered.commands:
            processor.restore(row.image, seq=seq, epoch=epoch)
        oldest = self.machine.state.oldest_remembered(self.now)
        live, again = (
            {
                id: (each.reply, each.digest, each.applied_at, each.epoch, each.seq)
                for id, each in of._recorded.items()
                if each.applied_at >= oldest
            }
            for of in (self._commands, processor)
        )
        assert again == {id: (*rest, self.seqs[seq or 0]) for id, (*rest, seq) in live.items()}

    def check_tables(self) -> None:
        """What users see is what `dump` says."""
        dump = json.loads(super().line(b'{"type":"dump"}'))
        for name, key in (("collections", "id"), ("holds", "hold"), ("shards", "shard")):
            wanted = dump[name]
            for row in wanted:
                for column in ("created_seq", "updated_seq"):
                    if column in row:
                        row[column] = self.seqs[row[column]]
            assert sorted(read_table(self.root, name), key=lambda row: row[key]) == wanted


def read_table(root: Path, name: str) -> list[dict[str, Any]]:
    """A table as plain deltalake reads it, in the form of a dump."""
    table = DeltaTable(f"{root}/state/{name}").to_pyarrow_table()
    rows = []
    times = {field.name for field in table.schema if pa.types.is_timestamp(field.type)}
    for column in times:
        number = table.schema.get_field_index(column)
        table = table.set_column(number, column, table[column].cast(pa.int64()))
    for row in table.to_pylist():
        for column, value in row.items():
            if value is not None and column in times:
                row[column] = value // 1_000
            elif value is not None and column in JSON_COLUMNS:
                row[column] = json.loads(value)
        rows.append(row)
    return rows

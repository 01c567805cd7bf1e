"""What the tests of the state share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from app.state.journal import Journal, JournalRow


def open_journal(root: Path, instance: str, **options: Any) -> Journal:
    return Journal.open(f"{root}/state/journal", storage_options={}, instance=instance, **options)


def hold_rows(*names: str) -> list[JournalRow]:
    """Rows whose values the journal does not look into."""
    return [JournalRow("hold", name, f'{{"name":"{name}"}}'.encode()) for name in names]


def append(journal: Journal, name: str, *, epoch: int = 1, at: int = 0) -> int:
    return journal.append(epoch=epoch, at=at, origin="test", rows=hold_rows(name))


def names(journal: Journal, after: int | None = None) -> list[str]:
    """The keys of all entries, in order."""
    entries = journal.read(journal.trimmed if after is None else after)
    return [row.key for entry in entries for row in entry.rows]


def truth(root: Path) -> list[str]:
    """The same as any reader of Delta tables sees it."""
    table = DeltaTable(f"{root}/state/journal").to_pyarrow_table().sort_by("seq")
    return [
        key
        for key, entity in zip(table["key"].to_pylist(), table["entity"].to_pylist(), strict=True)
        if entity == "hold"
    ]

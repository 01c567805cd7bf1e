"""Boot: the tables, and the journal's entries after them, give the state exactly as it was when it was last written."""

from __future__ import annotations

import os
import platform
from typing import Any, Final

import msgspec

from app.core.errors import Corrupt
from app.core.images import PARAMETER, TYPES, Image, Key, decode_image, encode_image
from app.core.parameters import Parameters
from app.state.changes import Pending
from app.state.entries import Entry, JournalRow
from app.state.errors import Fenced, NewerFormat, Trimmed
from app.state.journal import Journal
from app.state.rows import CommandRow, decode_command, encode_command
from app.state.schemas import COMMAND
from app.state.tables import Loaded, Tables

FORMAT: Final = 1
"""The format of the state that this version writes. A version reads its own and older ones."""
CONTROLLER: Final = "controller"
OFFSET: Final = "offset"
_CONTROLLER_KEY: Final[Key] = (CONTROLLER, "controller")


class ControllerImage(msgspec.Struct, frozen=True):
    """The controller that booted last. `root` is a short random id, made once for each root."""

    epoch: int
    format: int
    instance: str
    host: str
    pid: int
    started_at: int
    root: str


class Recovered(msgspec.Struct):
    """The state at entry `seq`.

    `commands` are in order, and only those that duplicates may still come of, or the last entry's, if all are older.
    """

    images: dict[Key, Image]
    commands: list[tuple[CommandRow, int, int]]
    offsets: dict[str, int]
    controller: ControllerImage | None
    seq: int
    last_at: int
    tables_behind: Pending


class _Format(msgspec.Struct):
    format: int
    epoch: int = 0


def recover(journal: Journal, tables: Tables, *, now_ms: int) -> Recovered:
    """Reads the state. NewerFormat if we must not touch it, Corrupt if tables and journal do not belong together."""
    loaded, entries = _read(journal, tables)
    for entry in entries:
        for row in entry.rows:
            if (row.entity, row.key) == _CONTROLLER_KEY:
                _check_format(row.value)
    if max(loaded.positions.values()) > journal.last_seq:
        raise Corrupt(
            f"The tables have the journal up to entry {max(loaded.positions.values())}, but it ends with "
            f"{journal.last_seq}: they are not of one root, or the journal was set back. Restore them as a whole."
        )
    return _fold(journal, tables, loaded, entries, now_ms)


def check_booted_last(last: ControllerImage | None, instance: str, epoch: int) -> None:
    """Fenced, if another controller than this one, with this epoch, booted last."""
    if last is None:
        raise Fenced("The journal does not know this controller: another one is in its place.")
    if last.instance != instance:
        raise Fenced(
            f"Another controller (instance {last.instance}, on host {last.host}, process {last.pid}, epoch "
            f"{last.epoch}) took over; this one has epoch {epoch} and must stop."
        )


def _read(journal: Journal, tables: Tables) -> tuple[Loaded, list[Entry]]:
    """The tables, and the entries after the slowest of them."""
    read_before = -1
    while True:
        loaded = tables.load()
        # Before anything else is understood: what a newer version wrote may mean something else.
        _check_format(loaded.meta.get(_CONTROLLER_KEY))
        position = min(loaded.positions.values())
        try:
            return loaded, list(journal.read(position))
        except Trimmed:
            # The tables may have gone on since they were read, and the journal was trimmed behind them.
            if position <= read_before:
                raise
            read_before = position


def _fold(journal: Journal, tables: Tables, loaded: Loaded, entries: list[Entry], now_ms: int) -> Recovered:
    images, others = dict(loaded.images), dict(loaded.meta)
    for known in [known for known in others if known[0] in TYPES]:
        images[known] = decode_image(known[0], others.pop(known))
    behind = Pending()
    new_commands: list[tuple[bytes, int, int]] = []
    for entry in entries:
        behind.add(entry.seq, entry.epoch, entry.rows)
        for entity, name, value in entry.rows:
            key = (entity, name)
            if entity == COMMAND:
                if value is not None:
                    new_commands.append((value, entry.seq, entry.epoch))
            elif value is None:
                images.pop(key, None)
                others.pop(key, None)
            elif entity in TYPES:
                images[key] = decode_image(entity, value)
            else:
                others[key] = value
    controller = others.get(_CONTROLLER_KEY)
    return Recovered(
        images=images,
        commands=_commands(tables, new_commands, oldest_ms=max(now_ms, journal.last_at) - _max_command_age(images)),
        offsets={key: msgspec.json.decode(value, type=int) for (kind, key), value in others.items() if kind == OFFSET},
        controller=None if controller is None else msgspec.json.decode(controller, type=ControllerImage),
        seq=journal.last_seq,
        last_at=journal.last_at,
        tables_behind=behind,
    )


def _commands(
    tables: Tables, entries: list[tuple[bytes, int, int]], *, oldest_ms: int
) -> list[tuple[CommandRow, int, int]]:
    commands, position = tables.load_commands(applied_since_ms=oldest_ms)
    newer = [(decode_command(value), seq, epoch) for value, seq, epoch in entries if seq > position]
    commands += [each for each in newer if each[0].image.applied_at >= oldest_ms]
    if not commands:  # those of the last entry are needed, however old: their replies may not have been sent
        commands = [each for each in newer if each[1] == newer[-1][1]] or tables.load_last_commands()
    return commands


def _max_command_age(images: dict[Key, Image]) -> int:
    image: Any = images.get((PARAMETER, "max_command_age"))
    return Parameters().max_command_age if image is None else int(image.value)


def _check_format(value: bytes | None) -> None:
    if value is None:
        return
    found = msgspec.json.decode(value, type=_Format)
    if found.format > FORMAT:
        raise NewerFormat(
            f"The state has format {found.format}, written by a newer version of Holdfast (epoch {found.epoch}). "
            f"This version knows formats up to {FORMAT}: install the version that wrote it, or a newer one."
        )


# What a controller writes into an entry.


def image_row(key: Key, image: Image | None) -> JournalRow:
    return JournalRow(*key, None if image is None else encode_image(image))


def command_row(topic_id: str, command: CommandRow) -> JournalRow:
    """Keyed by the topic's id, not its name: a topic that was made anew has the same offsets again."""
    return JournalRow(COMMAND, f"{topic_id}/{command.partition}/{command.offset}", encode_command(command))


def offset_row(topic_id: str, partition: int, next_offset: int) -> JournalRow:
    """The offset from which on a partition's records are not applied yet; found again as `<topic id>/<partition>`."""
    return JournalRow(OFFSET, f"{topic_id}/{partition}", str(next_offset).encode())


def this_controller(epoch: int, instance: str, root: str, *, started_at: int) -> ControllerImage:
    """What this process writes when it boots."""
    return ControllerImage(
        epoch=epoch,
        format=FORMAT,
        instance=instance,
        host=platform.node(),
        pid=os.getpid(),
        started_at=started_at,
        root=root,
    )


def controller_row(image: ControllerImage) -> JournalRow:
    return JournalRow(*_CONTROLLER_KEY, msgspec.json.encode(image))

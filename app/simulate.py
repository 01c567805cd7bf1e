"""`holdfast simulate`: the whole rule book in memory, one JSON line in, one JSON line out.

For trying out a policy before it is used, and for tests. Commands are answered exactly as on Kafka; control lines stand
for what the controller sees and does by itself: uppers, the clock, a restart, since downgrades, finalization.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from app import protocol
from app.commands import CommandImage, CommandProcessor
from app.core.advancing import Observation
from app.core.descriptions import CollectionId
from app.core.errors import BrokenInvariant, Refused, collection_missing
from app.core.frontier import Time, frontier_of, value_of
from app.core.images import (
    Changes,
    Collection,
    Hold,
    Image,
    Key,
    Shard,
    decode_custom,
    decode_image,
    encode_custom,
    encode_image,
)
from app.core.locations import Warehouse
from app.core.machine import Machine
from app.state import rows


class _Control(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class Upper(_Control, frozen=True, tag="upper"):
    """The shard of a collection was observed with this upper."""

    collection: CollectionId
    upper: Time | None


class Clock(_Control, frozen=True, tag="clock"):
    """The time is now this; it never goes back."""

    now: Time


class Restart(_Control, frozen=True, tag="restart"):
    """A new controller takes the journal over."""


class Downgrades(_Control, frozen=True, tag="downgrades"):
    """The since downgrades that are due are done."""


class Finalize(_Control, frozen=True, tag="finalize"):
    """One round of finalization, in which some fail."""

    fail: list[CollectionId] = []


class Dump(_Control, frozen=True, tag="dump"):
    """The rows of the tables."""


Control = Upper | Clock | Restart | Downgrades | Finalize | Dump
_CONTROL_TYPES: Final = frozenset(str(control.__struct_config__.tag) for control in Control.__args__)


class _Header(msgspec.Struct):
    type: str


_header: Final = msgspec.json.Decoder(_Header).decode
_control: Final[msgspec.json.Decoder[Control]] = msgspec.json.Decoder(Control)
_json: Final = msgspec.json.Encoder(enc_hook=encode_custom).encode
_command_image: Final = msgspec.json.Decoder(CommandImage, dec_hook=decode_custom).decode


def _type_of(raw: bytes) -> str | None:
    try:
        return _header(raw).type
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _decode_control(raw: bytes) -> Control:
    try:
        return _control.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise protocol.shape_error(error) from None


class _Stored(msgspec.Struct, frozen=True):
    """The newest image of a thing, as the journal has it."""

    value: bytes
    created_seq: int
    updated_seq: int


class Journal:
    """What a journal would hold, folded as it grows: only bytes survive a restart."""

    def __init__(self) -> None:
        self.seq = 0
        self.images: dict[Key, _Stored] = {}
        self.commands: list[tuple[int, int, bytes]] = []  # seq, epoch, image

    def append(self, changes: Changes) -> int:
        self.seq += 1
        for key, image in changes.items():
            if image is None:
                self.images.pop(key, None)
            else:
                old = self.images.get(key)
                created = self.seq if old is None else old.created_seq
                self.images[key] = _Stored(encode_image(image), created, self.seq)
        return self.seq

    def decoded(self) -> dict[Key, Image]:
        return {key: decode_image(key[0], stored.value) for key, stored in self.images.items()}


class Simulator:
    """A controller without Kafka, Spark and files."""

    def __init__(self) -> None:
        self.now = 0
        self.journal = Journal()
        self._warehouse = Warehouse(roots=["/warehouse"], reserved=["/state", "/checkpoints"])
        self.machine = Machine(warehouse=self._warehouse)
        self._commands = CommandProcessor(self.machine)

    def line(self, raw: bytes) -> bytes:
        """Answers one line. A bad one gets an error, and changes nothing."""
        kind = _type_of(raw)
        if kind not in _CONTROL_TYPES:
            return self._command(raw)
        try:
            return _json({"type": kind, "status": "ok", **self._do(_decode_control(raw))})
        except BrokenInvariant as error:
            refusal = protocol.internal_error(error)
        except Refused as error:
            refusal = error
        return _json({"type": kind, "status": "error", "error": protocol.error_body(refusal)})

    def _command(self, raw: bytes) -> bytes:
        outcome = self._commands.apply(raw, timestamp=self.now, now=self.now)
        seq, epoch = self.journal.append(outcome.changes), self.machine.epoch
        self.journal.commands.append((seq, epoch, _json(outcome.image)))
        self._commands.written(seq, epoch)
        return outcome.reply(seq, epoch)

    def _do(self, control: Control) -> dict[str, Any]:
        match control:
            case Upper(collection=collection, upper=upper):
                return self._observe(collection, upper)
            case Clock(now=now):
                return self._advance_clock(now)
            case Restart():
                return self._restart()
            case Downgrades():
                return self._downgrade()
            case Finalize(fail=fail):
                return self._finalize(fail)
            case Dump():
                return self._dump()

    def _write(self, changes: Changes) -> None:
        if changes:
            self.journal.append(changes)

    def _observe(self, id: str, upper: int | None) -> dict[str, Any]:
        collection = self.machine.state.collections.get(id)
        if collection is None:
            raise collection_missing(id)
        shard = self.machine.state.shards[collection.shard]
        if frontier_of(upper) > shard.upper:
            version = 0 if shard.log_version is None else shard.log_version + 1
            seen = Observation(shard.id, frontier_of(upper), version)
            self._write(self.machine.observe(self.now, [seen]).changes)
        return {}

    def _advance_clock(self, now: int) -> dict[str, Any]:
        self.now = max(self.now, now)
        self._write(self.machine.expire_leases(self.now, applied_until=self.now).changes)
        self._write(self.machine.purge(self.now).changes)
        return {}

    def _restart(self) -> dict[str, Any]:
        epoch = self.machine.epoch + 1
        self.machine = Machine(warehouse=self._warehouse, epoch=epoch, images=self.journal.decoded().items())
        self._commands = CommandProcessor(self.machine)
        for seq, written_in, image in self.journal.commands:
            self._commands.restore(_command_image(image), seq=seq, epoch=written_in)
        self.journal.append(self.machine.boot(self.now).changes)
        return {}

    def _downgrade(self) -> dict[str, Any]:
        step = self.machine.downgrade_sinces(self.now)
        self._write(step.changes)
        return {"downgrades": [{"shard": done.shard, "since": value_of(done.since)} for done in step.result]}

    def _finalize(self, fail: list[str]) -> dict[str, Any]:
        state = self.machine.state
        named = (state.collections.get(id) or state.tombstones.get(id) for id in fail)
        failing = {thing.shard for thing in named if thing is not None}
        claimed = self.machine.claim_shards(self.now)
        self._write(claimed.changes)
        for shard in claimed.result:
            if shard in failing:
                self._write(self.machine.finalization_failed(self.now, shard, "It was told to fail.").changes)
            else:
                self._write(self.machine.finalized(self.now, shard).changes)
        return {
            "finalized": [shard for shard in claimed.result if shard not in failing],
            "failed": [shard for shard in claimed.result if shard in failing],
        }

    def _dump(self) -> dict[str, Any]:
        collections, holds, shards = [], [], []
        for (entity, _), stored in sorted(self.journal.images.items()):
            image = decode_image(entity, stored.value)
            if isinstance(image, Collection):
                collections.append(rows.collection_row(image, stored.created_seq, stored.updated_seq))
            elif isinstance(image, Hold):
                holds.append(rows.hold_row(image, stored.updated_seq))
            elif isinstance(image, Shard):
                shards.append(rows.shard_row(image, stored.updated_seq))
        return {"collections": collections, "holds": holds, "shards": shards}

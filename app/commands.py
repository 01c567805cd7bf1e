"""What happens to one record of the command topic: decoded, recognised if it is a duplicate, applied or refused.

Pure, like the core: it needs no Kafka and no clock, so that `holdfast simulate` answers exactly as the controller does.
"""

from __future__ import annotations

import base64
import hashlib
import logging
from typing import Any

import msgspec
from msgspec import UNSET

from app import messages, protocol
from app.core.errors import BrokenInvariant, Code, Refused
from app.core.frontier import Frontier, frontier_of
from app.core.images import Changes
from app.core.machine import Machine, Step
from app.messages import Command
from app.protocol import Reply

log = logging.getLogger(__name__)


class CommandImage(msgspec.Struct, frozen=True):
    """The recorded result of one record. `digest` is only there if duplicates of it are to be recognised."""

    id: str | None
    type: str | None
    reply: Reply
    applied_at: int
    digest: str | None = None
    raw: str | None = None  # base64, of what is no JSON object


class Recorded:
    """A result that duplicates get again, with the position of the entry that recorded it."""

    __slots__ = ("applied_at", "digest", "epoch", "reply", "seq")

    def __init__(self, reply: Reply, digest: str, applied_at: int) -> None:
        self.reply = reply
        self.digest = digest
        self.applied_at = applied_at
        self.seq: int | None = None  # until its entry is written
        self.epoch = 0


class Outcome(msgspec.Struct, frozen=True):
    """What a record did: the image that records it, the changes, and what the reply is made of."""

    image: CommandImage
    changes: Changes
    recorded: Recorded | None

    def reply(self, seq: int, epoch: int) -> bytes:
        """The reply, for an entry that was written at `seq`; that of a duplicate names the entry of the first."""
        if self.recorded is not None and self.recorded.seq is not None:
            seq, epoch = self.recorded.seq, self.recorded.epoch
        return protocol.encode_reply(protocol.at_entry(self.image.reply, seq, epoch))


class CommandProcessor:
    """Applies records to a machine, each exactly once within `max_command_age`."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._recorded: dict[str, Recorded] = {}  # by command id, oldest first
        self._unwritten: list[Recorded] = []
        self.internal_errors = 0
        self.warnings = 0  # someone lost a hold

    def restore(self, image: CommandImage, *, seq: int, epoch: int) -> None:
        """Takes up a result that was recorded earlier; in the order of the entries."""
        if image.id is not None and image.digest is not None:
            recorded = Recorded(image.reply, image.digest, image.applied_at)
            recorded.seq, recorded.epoch = seq, epoch
            self._remember(image.id, recorded)

    def apply(self, raw: bytes, *, timestamp: int, now: int, wall: int | None = None) -> Outcome:
        """Applies one record. `timestamp` is the one that Kafka gave it.

        `now` is the controller's clock, `wall` the time of day if it is another: only a record's age goes by it.
        """
        decoded = protocol.decode(raw)
        self._forget_old(now)
        digest = hashlib.blake2b(raw, digest_size=16).hexdigest()
        first = None if decoded.id is None else self._recorded.get(decoded.id)
        if first is not None and first.digest == digest:
            # The position of the first goes into the image: the reply to this record must be the same after a restart.
            reply = first.reply if first.seq is None else protocol.at_entry(first.reply, first.seq, first.epoch)
            return Outcome(CommandImage(decoded.id, decoded.type, reply, now), {}, first)
        changes: Changes = {}
        id_ = UNSET if decoded.id is None else decoded.id
        type_ = UNSET if decoded.type is None else decoded.type
        try:
            result, changes = self._result(
                decoded, first, timestamp=timestamp, now=now, wall=now if wall is None else wall
            )
            reply = Reply(id=id_, type=type_, status="ok", result=result)
        except Refused as refusal:
            reply = Reply(id=id_, type=type_, status="error", error=protocol.error_body(refusal))
        if decoded.id is None or first is not None:
            malformed = decoded.refusal is not None and decoded.refusal.code is Code.MALFORMED
            text = base64.b64encode(raw).decode() if malformed else None
            return Outcome(CommandImage(decoded.id, decoded.type, reply, now, raw=text), changes, None)
        recorded = Recorded(reply, digest, now)
        self._unwritten.append(recorded)
        self._remember(decoded.id, recorded)
        return Outcome(CommandImage(decoded.id, decoded.type, reply, now, digest), changes, recorded)

    def written(self, seq: int, epoch: int) -> None:
        """Everything that was applied since the last call is in the journal, in the entry `seq`."""
        for recorded in self._unwritten:
            recorded.seq, recorded.epoch = seq, epoch
        self._unwritten.clear()

    def _result(
        self, decoded: protocol.Decoded, first: Recorded | None, *, timestamp: int, now: int, wall: int
    ) -> tuple[dict[str, Any], Changes]:
        if first is not None:
            text = "Another command was sent under this id; every command needs an id of its own."
            raise Refused(Code.INVALID_ARGUMENT, text, path="$.id")
        refusal = decoded.refusal
        if refusal is not None and decoded.command is None and refusal.code in (Code.MALFORMED, Code.TOO_LARGE):
            raise refusal
        sent_at = timestamp if decoded.issued_at is None else min(timestamp, decoded.issued_at)
        if sent_at < (oldest := self._machine.state.oldest_remembered(wall)):
            text = f"The command was sent {wall - sent_at} ms ago; the oldest taken now is {wall - oldest} ms old."
            raise Refused(Code.STALE_COMMAND, f"{text} Send it anew, under a new id, if you still want it.")
        if refusal is not None or decoded.command is None:
            raise refusal or AssertionError("a record is a command, or refused")
        try:
            result, changes, warnings = execute(self._machine, decoded.command, now)
        except BrokenInvariant as error:
            self.internal_errors += 1
            log.exception("command refused, it would break an invariant id=%r type=%r", decoded.id, decoded.type)
            raise protocol.internal_error(error) from error
        for warning in warnings:
            self.warnings += 1
            log.warning("%s", warning)
        return result, changes

    def _remember(self, id: str, recorded: Recorded) -> None:
        self._recorded.pop(id, None)
        self._recorded[id] = recorded

    def _forget_old(self, now: int) -> None:
        oldest = self._machine.state.oldest_remembered(now)
        while self._recorded:
            id, recorded = next(iter(self._recorded.items()))
            if recorded.applied_at >= oldest:
                return
            del self._recorded[id]


def execute(machine: Machine, command: Command, now: int) -> tuple[dict[str, Any], Changes, list[str]]:
    """Runs a command on the machine: its result, what changed, and what someone should know."""
    step: Step[Any]
    match command:
        case messages.CreateCollections(collections=collections, register_ts=register_ts):
            step = machine.create_collections(now, collections, register_ts=register_ts)
        case messages.AlterTableDesc(existing=existing, new=new, schema=schema, expected_version=version):
            step = machine.alter_table_desc(now, existing=existing, new=new, schema=schema, expected_version=version)
        case messages.DropCollections(collections=ids):
            step = machine.drop_collections(now, ids)
        case messages.UndropCollections(collections=ids):
            step = machine.undrop_collections(now, ids)
        case messages.SetReadPolicies(policies=policies):
            step = machine.set_read_policies(now, [(each.collection, each.policy) for each in policies])
        case messages.UpdateParameters(parameters=parameters):
            step = machine.update_parameters(now, parameters)
        case messages.Reconcile(collections=ids):
            return msgspec.structs.asdict(machine.reconcile(ids)), {}, []
        case _:
            step = _execute_on_holds(machine, command, now)
            return protocol.holds_result(step.result), step.changes, step.warnings
    return {}, step.changes, step.warnings


HoldCommand = (
    messages.AcquireReadHolds
    | messages.DowngradeReadHolds
    | messages.ReleaseReadHolds
    | messages.CloneReadHolds
    | messages.MergeReadHolds
    | messages.RenewReadHolds
)


def _execute_on_holds(machine: Machine, command: HoldCommand, now: int) -> Step[Any]:
    match command:
        case messages.AcquireReadHolds():
            return machine.acquire_read_holds(
                now,
                command_id=command.id,
                collections=command.collections,
                at=None if command.at is None else Frontier(command.at),
                holder=command.holder,
                purpose=command.purpose,
                lease_ms=None if command.lease is None else int(command.lease),
                pin_files=command.pin_files,
            )
        case messages.DowngradeReadHolds(holds=moves):
            return machine.downgrade_read_holds(now, [(move.hold, frontier_of(move.to)) for move in moves])
        case messages.ReleaseReadHolds(holds=holds):
            return machine.release_read_holds(now, holds)
        case messages.CloneReadHolds(holds=holds):
            return machine.clone_read_holds(now, holds, command_id=command.id)
        case messages.MergeReadHolds(holds=holds):
            return machine.merge_read_holds(now, holds)
        case messages.RenewReadHolds(holds=holds, lease=lease):
            return machine.renew_read_holds(now, holds, lease_ms=None if lease is None else int(lease))

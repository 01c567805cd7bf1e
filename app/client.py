"""Holdfast for Python programs: every command as a method, and read holds that keep themselves.

    from app.client import Holdfast

    with Holdfast("broker:9092") as holdfast:
        holdfast.create_collections([{"id": "orders", "data_source": {"kind": "table"}}], register_ts=5)
        with holdfast.hold(["orders"], holder="report", lease="15m") as holds:
            read(as_of=holds["orders"].since)
            holds.check()   # raises HoldLost if the lease may have passed

A refused command raises the exception of its error code; nobody answering, `NotAnswering`. All methods may be called
from any thread. Nothing is sent or opened before the first command.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as NotYet
from datetime import timedelta
from typing import Any, Final, NamedTuple

from app.client_errors import *  # noqa: F403 - the exceptions are one table, there, and users import them from here
from app.client_errors import HoldfastError, HoldLost, NotAnswering, refusal
from app.client_holds import Holds, ReadHold, holds_of
from app.client_wire import Pending, Reply, Topics, Wire
from app.clock import wall_ms
from app.core.duration import parse_duration
from app.status import State, read_state

Lease = int | str | timedelta
"""Milliseconds, or like `15m`, or a timedelta."""

FIRST_RESEND_S: Final = 10.0


class Reconciled(NamedTuple):
    """`extra`: live collections that the catalogue lacks. `missing`: its ids that are not live."""

    extra: list[str]
    missing: list[str]


class Holdfast:
    """A client of one controller. `options` are Kafka's (SASL, TLS) under Kafka's names; `root` is for `state()`."""

    def __init__(
        self,
        bootstrap_servers: str | Sequence[str] = "127.0.0.1:9092",
        *,
        commands_topic: str = "holdfast.commands",
        replies_topic: str = "holdfast.replies",
        options: Mapping[str, Any] | None = None,
        root: str | None = None,
        storage_options: Mapping[str, str] | None = None,
        timeout: float = 30.0,
    ) -> None:
        self.bootstrap_servers = (
            bootstrap_servers if isinstance(bootstrap_servers, str) else ",".join(bootstrap_servers)
        )
        self.root = root
        self.timeout = timeout
        self.seq = 0  # the greatest that a reply had: what `state()` waits for
        self._topics = Topics(commands_topic, replies_topic)
        self._options = dict(options or {})
        self._storage_options = dict(storage_options or {})
        self._name = f"holdfast-client-{uuid.uuid4().hex[:12]}"
        self._wire: Wire | None = None
        self._closed = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        """Without the options: they may hold a password."""
        return f"Holdfast({self.bootstrap_servers!r}, commands_topic={self._topics.commands!r}, root={self.root!r})"

    def __enter__(self) -> Holdfast:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    # Commands as such.

    def send(self, command: Mapping[str, Any], *, timeout: float | None = None) -> dict[str, Any]:
        """Sends a command and returns its result; raises the exception of its code if it was refused.

        Without an `id` it gets one, and the time of sending. With an `id` of your own it is sent as it is, so that the
        same command can be sent again, from another process too, and is applied once.
        """
        reply = self.ask(command, timeout=timeout)
        if reply.get("status") != "ok":
            raise refusal(reply.get("error", {}))
        result: dict[str, Any] = reply.get("result", {})
        return result

    def ask(self, command: Mapping[str, Any], *, timeout: float | None = None) -> Reply:
        """Sends a command and returns its reply as it is on Kafka, be it ok or an error."""
        message = dict(command)
        if message.get("id") is None:
            # With the time of sending in its bytes, a copy that comes late cannot be applied again: it is stale.
            message |= {"id": self.new_command_id(), "issued_at": wall_ms()}
        return self._wait(message["id"], json.dumps(message).encode(), self.timeout if timeout is None else timeout)

    def post(self, command: Mapping[str, Any]) -> None:
        """Sends a command and waits for nothing."""
        message = {**command, "id": self.new_command_id(), "issued_at": wall_ms()}
        self._connected().submit(None, json.dumps(message).encode())

    @staticmethod
    def new_command_id() -> str:
        return uuid.uuid4().hex

    def submit(self, command_id: str | None, raw: bytes) -> Pending:
        """Sends any bytes and does not wait. The reply comes to `.reply`, a future, if they have that id."""
        return self._connected().submit(command_id, raw)

    def _wait(self, command_id: str, raw: bytes, timeout: float) -> Reply:
        wire = self._connected()
        pending = wire.submit(command_id, raw)
        begun = time.monotonic()
        deadline, pause = begun + timeout, FIRST_RESEND_S
        again_at = begun + pause
        try:
            while True:
                now = time.monotonic()
                try:
                    reply = pending.reply.result(max(0.0, min(deadline, again_at) - now))
                except NotYet:
                    if time.monotonic() >= deadline:
                        raise self._not_answering(command_id, pending, timeout) from None
                    wire.post(raw, pending)
                    pause *= 2
                    again_at = time.monotonic() + pause
                else:
                    self._saw(reply)
                    return reply
        finally:
            wire.forget(command_id, pending)

    def _connected(self) -> Wire:
        with self._lock:
            if self._closed:
                raise HoldfastError("This client was closed.")
            if self._wire is None:
                wire = Wire(
                    self.bootstrap_servers, self._topics, self._options, name=self._name, timeout_s=self.timeout
                )
                # A client that is forgotten without `close` must not leave its thread and its connections behind.
                weakref.finalize(self, wire.close)
                self._wire = wire
            return self._wire

    def _not_answering(self, command_id: str, pending: Pending, timeout: float) -> NotAnswering:
        sent = pending.position is not None
        if sent:
            text = (
                f"No controller answered within {timeout:g} s; is one running, with the broker "
                f"{self.bootstrap_servers}? The command {command_id!r} waits on {self._topics.commands!r} "
                "and may still be applied."
            )
        else:
            why = f" ({pending.problem})" if pending.problem is not None else ""
            text = (
                f"Kafka at {self.bootstrap_servers} did not take the command within {timeout:g} s{why}; it may still."
            )
        return NotAnswering(text, {"id": command_id, "sent": sent})

    def _saw(self, reply: Reply) -> None:
        with self._lock:
            self.seq = max(self.seq, reply.get("seq") or 0)

    # One method per command; docs/commands.md explains them. `id`: your own id of the command, see `send`.

    def create_collections(
        self, collections: Iterable[Mapping[str, Any]], *, register_ts: int | None = None, id: str | None = None
    ) -> None:
        described = [dict(each) for each in collections]
        self.send({"type": "create_collections", "id": id, "collections": described, "register_ts": register_ts})

    def set_read_policies(self, policies: Mapping[str, Mapping[str, Any]], *, id: str | None = None) -> None:
        """Per collection, its policy, such as `{"kind": "lag_writes_by", "lag": "7d"}`."""
        listed = [{"collection": collection, "policy": dict(policy)} for collection, policy in policies.items()]
        self.send({"type": "set_read_policies", "id": id, "policies": listed})

    def acquire_read_holds(
        self,
        collections: Iterable[str],
        *,
        holder: str,
        at: int | None = None,
        purpose: str | None = None,
        lease: Lease | None = None,
        pin_files: bool = False,
        id: str | None = None,
    ) -> list[ReadHold]:
        """Holds that you renew and release yourself. See `hold` for such as do it by themselves."""
        command = {
            "type": "acquire_read_holds",
            "id": id,
            "collections": list(collections),
            "holder": holder,
            "at": at,
            "purpose": purpose,
            "lease": None if lease is None else milliseconds(lease),
            "pin_files": pin_files,
        }
        return holds_of(self.send(command))

    def downgrade_read_holds(self, moves: Mapping[str, int | None], *, id: str | None = None) -> list[ReadHold]:
        """Per hold, the time to which it moves forward; None releases it."""
        listed = [{"hold": hold, "to": to} for hold, to in moves.items()]
        return holds_of(self.send({"type": "downgrade_read_holds", "id": id, "holds": listed}))

    def renew_read_holds(
        self, holds: Iterable[str], *, lease: Lease | None = None, id: str | None = None, timeout: float | None = None
    ) -> list[ReadHold]:
        period = None if lease is None else milliseconds(lease)
        command = {"type": "renew_read_holds", "id": id, "holds": list(holds), "lease": period}
        return holds_of(self.send(command, timeout=timeout))

    def release_read_holds(
        self, holds: Iterable[str], *, id: str | None = None, timeout: float | None = None
    ) -> list[ReadHold]:
        """Always ok; returns those that were still there."""
        return holds_of(self.send({"type": "release_read_holds", "id": id, "holds": list(holds)}, timeout=timeout))

    def clone_read_holds(self, holds: Iterable[str], *, id: str | None = None) -> list[ReadHold]:
        return holds_of(self.send({"type": "clone_read_holds", "id": id, "holds": list(holds)}))

    def merge_read_holds(self, holds: Iterable[str], *, id: str | None = None) -> list[ReadHold]:
        """Holds on one collection become one, under the id of the first."""
        return holds_of(self.send({"type": "merge_read_holds", "id": id, "holds": list(holds)}))

    def alter_table_desc(
        self, existing: str, new: str, *, schema: str, expected_version: int, id: str | None = None
    ) -> None:
        command = {"type": "alter_table_desc", "id": id, "existing": existing, "new": new}
        self.send({**command, "schema": schema, "expected_version": expected_version})

    def drop_collections(self, collections: Iterable[str], *, id: str | None = None) -> None:
        self.send({"type": "drop_collections", "id": id, "collections": list(collections)})

    def undrop_collections(self, collections: Iterable[str], *, id: str | None = None) -> None:
        self.send({"type": "undrop_collections", "id": id, "collections": list(collections)})

    def update_parameters(self, parameters: Mapping[str, Any], *, id: str | None = None) -> None:
        self.send({"type": "update_parameters", "id": id, "parameters": dict(parameters)})

    def reconcile(self, collections: Iterable[str], *, id: str | None = None) -> Reconciled:
        """Tells which ids your catalogue has, and hears in what it differs. Drops nothing."""
        result = self.send({"type": "reconcile", "id": id, "collections": list(collections)})
        return Reconciled(result["extra"], result["missing"])

    # Holds that keep themselves, and the tables.

    def hold(
        self,
        collections: Iterable[str],
        *,
        holder: str,
        lease: Lease | None = "15m",
        purpose: str | None = None,
        at: int | None = None,
        pin_files: bool = False,
        on_lost: Callable[[HoldLost], None] | None = None,
    ) -> Holds:
        """A context: acquires holds, renews them in the background, and releases them at the end, come what may."""
        command = {"holder": holder, "purpose": purpose, "at": at, "pin_files": pin_files}
        lease_ms = None if lease is None else milliseconds(lease)
        return Holds(self, list(collections), command, lease_ms=lease_ms, on_lost=on_lost)

    def state(self, *, timeout: float | None = None) -> State:
        """The tables, after everything that this client was told to be done."""
        if self.root is None:
            raise HoldfastError("Say where the tables are: Holdfast(…, root=…).")
        return read_state(
            self.root,
            self._storage_options,
            at_least=self.seq,
            timeout_s=self.timeout if timeout is None else timeout,
        )


def milliseconds(lease: Lease) -> int:
    if isinstance(lease, timedelta):
        return lease // timedelta(milliseconds=1)
    return int(parse_duration(lease))

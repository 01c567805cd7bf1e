"""A connection to one controller: commands go out as JSON objects, and results or exceptions come back.

What is sent under one id is applied once. So a command of which nothing is heard is simply sent again.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as NotYet
from typing import Any, Final

from app.client_errors import HoldfastError, NotAnswering, ReplyTooLong, refusal
from app.client_wire import Pending, Reply, Topics, Wire
from app.clock import wall_ms
from app.reading.catalog import Catalog

FIRST_RESEND_S: Final = 10.0


class Connection:
    """Nothing is sent or opened before the first command. All methods may be called from any thread."""

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
        self._lock = threading.RLock()  # reentrant: see `Wire`

    def close(self) -> None:
        with self._lock:
            self._closed = True
            wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def send(self, command: Mapping[str, Any], *, timeout: float | None = None) -> dict[str, Any]:
        """Sends a command and returns its result; raises the exception of its code if it was refused.

        Without an `id` it gets one, and the time of sending. With an `id` of your own it is sent as it is, so that the
        same command can be sent again, from another process too, and is applied once.
        """
        return self._result(self.ask(command, timeout=timeout))

    def send_all(self, commands: Iterable[Mapping[str, Any]], *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Sends several, which are applied in this order, and returns their results; raises for the first refused."""
        return [self._result(reply) for reply in self.ask_all(commands, timeout=timeout)]

    def ask(self, command: Mapping[str, Any], *, timeout: float | None = None) -> Reply:
        """Sends a command and returns its reply as it is on Kafka, be it ok or an error."""
        return self.ask_all([command], timeout=timeout)[0]

    def ask_all(self, commands: Iterable[Mapping[str, Any]], *, timeout: float | None = None) -> list[Reply]:
        """The same with several: all are sent before the first answer is awaited."""
        limit_s = self.timeout if timeout is None else timeout
        wire = self._connected()
        sent: list[tuple[str, bytes, Pending]] = []
        try:
            for command in commands:
                # With the time of sending in its bytes, a copy that comes late cannot be applied again: it is stale.
                stamp = self._new_stamp() if command.get("id") is None else {}
                message = {**command, **stamp}
                id, raw = message["id"], json.dumps(message).encode()
                sent.append((id, raw, wire.submit(id, raw)))
            begun = time.monotonic()
            return [self._wait(wire, *each, begun=begun, timeout=limit_s) for each in sent]
        finally:
            for id, _, pending in sent:
                wire.forget(id, pending)

    def post(self, command: Mapping[str, Any]) -> None:
        """Sends a command and waits for nothing."""
        self._connected().submit(None, json.dumps({**command, **self._new_stamp()}).encode())

    def post_later(self, command: Mapping[str, Any]) -> None:
        """The same where nothing may be waited for, not even a lock. Not sent if the client was closed."""
        wire = self._wire
        if wire is not None:
            wire.post_later(json.dumps({**command, **self._new_stamp()}).encode())

    @staticmethod
    def new_command_id() -> str:
        return uuid.uuid4().hex

    def _new_stamp(self) -> dict[str, Any]:
        return {"id": self.new_command_id(), "issued_at": wall_ms()}

    def _result(self, reply: Reply) -> dict[str, Any]:
        if reply.get("status") != "ok":
            raise refusal(reply.get("error", {}))
        result: dict[str, Any] = reply.get("result", {})
        if (place := result.get("too_long")) is None:
            return result
        if self.root is None:
            raise ReplyTooLong(
                "The command was applied, but its result is too long for Kafka. A client that is told the `root` reads "
                f"it from the tables; it is in this row: {place}.",
                {"place": place},
            )
        catalog = Catalog(self.root, self._storage_options, timeout_s=self.timeout)
        return catalog.result_of(reply["id"], place, at_least=reply["seq"])

    def submit(self, command_id: str | None, raw: bytes) -> Pending:
        """Sends any bytes and does not wait. The reply comes to `.reply`, a future, if they have that id."""
        return self._connected().submit(command_id, raw)

    def _wait(
        self, wire: Wire, command_id: str, raw: bytes, pending: Pending, *, begun: float, timeout: float
    ) -> Reply:
        deadline, pause = begun + timeout, FIRST_RESEND_S
        again_at = begun + pause
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

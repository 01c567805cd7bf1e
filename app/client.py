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

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from app.client_connection import Connection
from app.client_errors import *  # noqa: F403 - the exceptions are one table, there, and users import them from here
from app.client_errors import HoldfastError, HoldLost, InvalidArgument
from app.client_holds import Holds, ReadHold, holds_of
from app.core.duration import parse_duration
from app.status import State, read_state

Lease = int | str | timedelta
"""Milliseconds, or like `15m`, or a timedelta."""


class Reconciled(NamedTuple):
    """`extra`: live collections that the catalogue lacks. `missing`: its ids that are not live."""

    extra: list[str]
    missing: list[str]


class Holdfast(Connection):
    """A client of one controller. `options` are Kafka's (SASL, TLS) under Kafka's names; `root` is for `state()`."""

    def __repr__(self) -> str:
        """Without the options: they may hold a password."""
        return f"Holdfast({self.bootstrap_servers!r}, commands_topic={self._topics.commands!r}, root={self.root!r})"

    def __enter__(self) -> Holdfast:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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

    def downgrade_read_holds(
        self, moves: Mapping[str, int | None], *, id: str | None = None, timeout: float | None = None
    ) -> list[ReadHold]:
        """Per hold, the time to which it moves forward; None releases it."""
        listed = [{"hold": hold, "to": to} for hold, to in moves.items()]
        return holds_of(self.send({"type": "downgrade_read_holds", "id": id, "holds": listed}, timeout=timeout))

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
    try:
        return int(parse_duration(lease // timedelta(milliseconds=1) if isinstance(lease, timedelta) else lease))
    except ValueError as error:
        raise InvalidArgument(f"{error}.") from None

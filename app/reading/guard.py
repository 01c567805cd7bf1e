"""The holds under which is read: short leases with pinned files, renewed while the read runs, and then let go.

A hold at a time proves that the time is readable, and keeps it so. A hold with `pin_files` has recorded a version of
the shard's log: no file that is part of that version or a later one is deleted. So whoever plans the newest version
*after* the hold was acquired has all of its files for as long as the hold is there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Final, NamedTuple

from app.client import Holdfast
from app.client_errors import (
    CollectionMissing,
    HoldfastError,
    HoldMissing,
    InvalidArgument,
    SinceViolation,
)
from app.client_holds import Holds, lost, never_sent
from app.clock import steady_ms, wall_ms
from app.reading.catalog import Catalog
from app.reading.errors import before_since

log = logging.getLogger(__name__)

PIN_AGAIN_MS: Final = 300_000
"""How long a read that goes on for ever keeps the files of one version, before it pins a newer one."""


class Asked(NamedTuple):
    """Who reads, why, and how long a lease is: what its holds look like to others."""

    holder: str
    purpose: str
    lease_ms: int


class _Clone(Holds):
    """A hold like another one, but with a lease of our own: a clone of one without lease would outlive us for ever."""

    def __init__(self, client: Holdfast, hold: str, lease_ms: int) -> None:
        super().__init__(client, [], {}, lease_ms=lease_ms, on_lost=None)
        self._cloned = hold

    def _begin(self, command_id: str) -> dict[str, Any]:
        # Both are sent before anything is awaited, and applied in this order: whoever dies here leaves behind neither,
        # or a hold that ends with its lease.
        clone = {"type": "clone_read_holds", "id": command_id, "issued_at": wall_ms(), "holds": [self._cloned]}
        renewal = {"type": "renew_read_holds", "holds": self._expected_ids(command_id), "lease": self._lease_ms}
        cloned, _ = self._client.send_all([clone, renewal])
        return cloned

    def _made_nothing(self, error: BaseException) -> bool:
        return never_sent(error)  # if the renewal was refused, the clone is there

    def _expected_ids(self, command_id: str) -> list[str]:
        return [f"{command_id}/{self._cloned}"]


class Guard:
    """A context: `at` None holds the earliest time there is, or that of the hold that is cloned."""

    def __init__(
        self, client: Holdfast, catalog: Catalog, collection: str, *, at: int | None, hold: str | None, asked: Asked
    ) -> None:
        self._client = client
        self._catalog = catalog
        self.collection = collection
        self._at = at
        self._hold = hold
        self._asked = asked
        self._kept: list[Holds] = []
        self._pinned_at = 0

    def __enter__(self) -> Guard:
        try:
            if self._hold is None:
                self._acquire(self._at)
            else:
                self._clone(self._hold)
        except BaseException:
            self.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        kept, self._kept = self._kept, []
        _let_go(kept)

    @property
    def since(self) -> int:
        """From when on it is held."""
        held = [hold.since for holds in self._kept for hold in holds.values() if hold.since is not None]
        return min(held)

    def check(self) -> None:
        """Raises `HoldLost` if what is read may be gone."""
        for holds in self._kept:
            holds.check()

    def downgrade(self, to: int, *, timeout: float | None = None) -> None:
        """What is before this time is no longer needed."""
        for holds in self._kept:
            if any(hold.since is not None and hold.since < to for hold in holds.values()):
                try:
                    holds.downgrade(to, timeout=timeout)
                except HoldMissing as error:  # heard of it before a renewal did
                    raise lost(error) from error

    def pin_again(self) -> None:
        """Lets go of files that only older versions have, now and then. To be called between two plans."""
        if steady_ms() - self._pinned_at < PIN_AGAIN_MS:
            return
        old = list(self._kept)
        try:
            self._acquire(self.since)
        except CollectionMissing:  # it was dropped meanwhile, and takes no new holds: the old one stays
            self._pinned_at = steady_ms()
        except HoldfastError as error:
            # The old one is as good, and nothing that is said of a new one means that it is gone: it may be further on
            # than we know, if the answer to a downgrade was lost. That it is there is for renewals and `check` to say.
            log.warning("files could not be pinned anew collection=%s error=%s", self.collection, error)
            self._pinned_at = steady_ms()
        else:
            self._kept = self._kept[len(old) :]
            _let_go(old)

    def _acquire(self, at: int | None) -> None:
        holds = self._client.hold(
            [self.collection],
            holder=self._asked.holder,
            purpose=self._asked.purpose,
            lease=self._asked.lease_ms,
            at=at,
            pin_files=True,
        )
        try:
            self._kept.append(holds.__enter__())
        except SinceViolation as error:
            earliest = (error.earliest or {}).get(self.collection)
            if at is None or earliest is None:
                raise
            raise before_since(self.collection, at, earliest) from None
        except CollectionMissing as error:
            raise CollectionMissing(
                f"{error.message} One that was dropped can be read only under a hold from before: give it with `hold`.",
                error.details,
            ) from None
        self._pinned_at = steady_ms()

    def _clone(self, hold: str) -> None:
        clone = _Clone(self._client, hold, self._asked.lease_ms)
        self._kept.append(clone.__enter__())
        (held,) = clone.values()
        if held.collection != self.collection:
            raise InvalidArgument(f"The hold {hold!r} is on {held.collection!r}, not on {self.collection!r}.")
        since = held.since or 0
        at = since if self._at is None else self._at
        if at < since:
            raise before_since(self.collection, at, since)
        if self._catalog.pins_files(held.id, at_least=self._client.seq):
            self._pinned_at = steady_ms()
            return
        try:
            self._acquire(at)
        except CollectionMissing:
            # Its time is held, so a merge changes nothing of what is read; only files may go, `vacuum_grace` after a
            # merge. Then the read fails, and can be repeated.
            self._pinned_at = steady_ms()
            log.warning(
                "reading a dropped collection without pinned files collection=%s hold=%s", held.collection, hold
            )


def _let_go(kept: Sequence[Holds]) -> None:
    """All of them, also if letting one go is interrupted: nobody could end the renewing of those after it."""
    for holds in kept:
        holds.stop_renewing()
    with ExitStack() as stack:
        for holds in kept:
            stack.push(holds)

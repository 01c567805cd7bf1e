"""Read holds that renew themselves while a `with` block runs, and are released at its end.

The client counts a lease from the moment of sending, on a clock that goes on while the machine sleeps; the controller
counts it from the moment it applied the command, which is later. So while ours says that the lease lasts, it does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from app.client_errors import HoldfastError, HoldLost, HoldMissing, NotAnswering
from app.clock import steady_ms, wall_ms

if TYPE_CHECKING:
    from app.client import Holdfast

log = logging.getLogger(__name__)

RENEWALS_PER_LEASE: Final = 3
_PAUSE_AFTER_FAILURE_MS: Final = 1_000


class ReadHold(NamedTuple):
    """A read hold as it now is. `since` None: released."""

    id: str
    collection: str
    since: int | None


def holds_of(result: Mapping[str, Any]) -> list[ReadHold]:
    """The holds that the result of a command names."""
    return [ReadHold(each["hold"], each["collection"], each["since"]) for each in result["holds"]]


class Holds(Mapping[str, ReadHold]):
    """The holds of one `with` block, by collection.

    `lost` is true once a hold is known to be gone, and while the lease may have passed because nobody answered our
    renewals. In the second case renewing goes on, and if it succeeds the holds were there all along.
    """

    def __init__(
        self,
        client: Holdfast,
        collections: list[str],
        command: Mapping[str, Any],
        *,
        lease_ms: int | None,
        on_lost: Callable[[HoldLost], None] | None,
    ) -> None:
        self._client = client
        self._collections = collections
        self._command = dict(command)
        self._lease_ms = lease_ms
        self._on_lost = on_lost
        self._told = False
        self._holds: dict[str, ReadHold] = {}
        self._lasts_until: int | None = None  # on our own steady clock
        self._gone: HoldLost | None = None
        self._last_problem: HoldfastError | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def __getitem__(self, collection: str) -> ReadHold:
        return self._holds[collection]

    def __iter__(self) -> Iterator[str]:
        return iter(self._holds)

    def __len__(self) -> int:
        return len(self._holds)

    @property
    def ids(self) -> list[str]:
        return [hold.id for hold in self._holds.values()]

    # The block.

    def __enter__(self) -> Holds:
        command_id = self._client.new_command_id()
        sent_at = steady_ms()
        try:
            result = self._client.send({**self._beginning(), "id": command_id, "issued_at": wall_ms()})
        except NotAnswering as error:
            if error.command_id is not None:  # it is under way, or was; else there was nobody to send it to
                self._give_up(command_id)
            raise
        except (KeyboardInterrupt, SystemExit):
            self._give_up(command_id)
            raise
        self._take(result["holds"])
        self._keep(sent_at)
        return self

    def _beginning(self) -> dict[str, Any]:
        """The command that makes the holds."""
        return {
            "type": "acquire_read_holds",
            "collections": self._collections,
            "lease": self._lease_ms,
            **self._command,
        }

    def _expected_ids(self, command_id: str) -> list[str]:
        """The ids that they get."""
        return [f"{command_id}/{collection}" for collection in dict.fromkeys(self._collections)]

    def _keep(self, sent_at: int) -> None:
        """Renews them from now on. `sent_at`: when the command that began their lease was sent."""
        if self._lease_ms is not None:
            self._lasts_until = sent_at + self._lease_ms
            threading.Thread(target=self._renew_until_ended, name="holdfast-renewals", daemon=True).start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        try:
            self._client.release_read_holds(self.ids)
        except HoldfastError as failure:
            log.warning("holds could not be released holds=%s error=%s", self.ids, failure)
            if self._lease_ms is None and kind is None:  # nothing else will ever release them
                raise

    def _give_up(self, command_id: str) -> None:
        """Holds may have been made of which we heard nothing: their ids are known, so nobody need wait for a lease."""
        ids = self._expected_ids(command_id)
        try:
            self._client.post({"type": "release_read_holds", "holds": ids})
        except HoldfastError as error:
            log.warning("holds could not be released holds=%s error=%s", ids, error)

    # Inside the block.

    def downgrade(self, to: int | Mapping[str, int]) -> None:
        """Moves the holds forward: all to one time, or some, by collection. What is before is no longer needed."""
        wanted = to if isinstance(to, Mapping) else dict.fromkeys(self._holds, to)
        moved = self._client.downgrade_read_holds({self[collection].id: time for collection, time in wanted.items()})
        self._take([hold._asdict() | {"hold": hold.id} for hold in moved])

    @property
    def lost(self) -> bool:
        """Whether what is held may be gone."""
        return self._loss() is not None

    def check(self) -> None:
        """Raises `HoldLost` if what is held may be gone: whatever was read since the last check may be wrong."""
        loss = self._loss()
        if loss is not None:
            raise loss

    def _loss(self) -> HoldLost | None:
        with self._lock:
            if self._gone is not None:
                return self._gone
            if self._lasts_until is None or steady_ms() < self._lasts_until:
                return None
            why = f" The last answer was: {self._last_problem}" if self._last_problem is not None else ""
            text = f"The lease of {', '.join(self.ids)} may have passed: it could not be renewed in time.{why}"
            return HoldLost(text, {"holds": self.ids})

    def _take(self, holds: list[dict[str, Any]]) -> None:
        with self._lock:
            for each in holds:
                self._holds[each["collection"]] = ReadHold(each["hold"], each["collection"], each["since"])

    # Renewing, in a thread of its own.

    def _renew_until_ended(self) -> None:
        lease_ms = self._lease_ms or 0
        wait_ms = lease_ms / RENEWALS_PER_LEASE
        while not self._ended.wait(wait_ms / 1000):
            sent_at = steady_ms()
            try:
                # Half of the interval at most: a reply that was lost must not use up the time for another try.
                self._client.renew_read_holds(self.ids, timeout=max(1.0, lease_ms / RENEWALS_PER_LEASE / 2 / 1000))
            except HoldMissing as error:
                if not self._ended.is_set():
                    self._mark_gone(error)
                return
            except HoldfastError as error:
                with self._lock:
                    self._last_problem = error
                log.warning("holds could not be renewed, trying again holds=%s error=%s", self.ids, error)
                wait_ms = min(_PAUSE_AFTER_FAILURE_MS, lease_ms / RENEWALS_PER_LEASE)
            else:
                with self._lock:
                    self._lasts_until, self._last_problem = sent_at + lease_ms, None
                wait_ms = max(0.0, sent_at + lease_ms / RENEWALS_PER_LEASE - steady_ms())
            self._tell()

    def _mark_gone(self, error: HoldfastError) -> None:
        with self._lock:
            self._gone = HoldLost(f"{error.message} What it protected may be gone.", error.details)
        self._tell()

    def _tell(self) -> None:
        """Calls the holder back, the first time that the holds may be lost."""
        loss = self._loss()
        if loss is None or self._told or self._ended.is_set():
            return
        self._told = True
        log.warning("holds lost holds=%s reason=%s", self.ids, loss.message)
        if self._on_lost is not None:
            try:
                self._on_lost(loss)
            except Exception:  # theirs; renewing must go on
                log.exception("the callback for lost holds failed")

"""Read holds that renew themselves while a `with` block runs, and are released at its end.

The client counts a lease from the moment of sending, on a clock that goes on while the machine sleeps; the controller
counts it from the moment it applied the command, which is later. So while ours says that the lease lasts, it does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from app.client_errors import ERRORS, HoldfastError, HoldLost, HoldMissing, InvalidUsage, NotAnswering
from app.client_wire import may_wait
from app.clock import steady_ms, wall_ms

if TYPE_CHECKING:
    from app.client import Holdfast

log = logging.getLogger(__name__)

RENEWALS_PER_LEASE: Final = 3
HOLDS_PER_COMMAND: Final = 1_000
"""So many, with ids as long as they may be, fit into one message, and what is said of them into one reply."""
_PAUSE_AFTER_FAILURE_MS: Final = 1_000


class ReadHold(NamedTuple):
    """A read hold as it now is. `since` None: released."""

    id: str
    collection: str
    since: int | None


def holds_of(result: Mapping[str, Any]) -> list[ReadHold]:
    """The holds that the result of a command names."""
    return [ReadHold(each["hold"], each["collection"], each["since"]) for each in result["holds"]]


def lost(error: HoldfastError) -> HoldLost:
    """What it means for the holder that there is no such hold."""
    return HoldLost(f"{error.message} What it protected may be gone.", error.details)


def never_sent(error: BaseException) -> bool:
    """There was nobody to send the command to."""
    return isinstance(error, NotAnswering) and error.command_id is None


class Holds(Mapping[str, ReadHold]):
    """The holds of one `with` block, by collection. They are made by one command: all, or none.

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
        self._last_problem: Exception | None = None
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
        if self._holds or self._ended.is_set():
            raise InvalidUsage("These holds were for one block, and are not made anew. Call `hold` again.")
        command_id = self._client.new_command_id()
        sent_at = steady_ms()
        try:
            self._take(self._begin(command_id)["holds"])
            self._keep(sent_at)
        except BaseException as error:
            if not self._made_nothing(error):
                self._give_up(command_id)
            raise
        return self

    def _begin(self, command_id: str) -> dict[str, Any]:
        """Makes the holds; the result of the command that does it."""
        command = {
            "type": "acquire_read_holds",
            "id": command_id,
            "issued_at": wall_ms(),
            "collections": self._collections,
            "lease": self._lease_ms,
            **self._command,
        }
        return self._client.send(command)

    def _made_nothing(self, error: BaseException) -> bool:
        """Whether it is certain that there are no holds."""
        return never_sent(error) or isinstance(error, tuple(ERRORS.values()))

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
        self.stop_renewing()
        releases = _commands("release_read_holds", self.ids)
        try:
            if may_wait():
                self._client.send_all(releases)
            else:
                for release in releases:
                    self._client.post_later(release)
        except HoldfastError as failure:
            log.warning("holds could not be released holds=%s error=%s", _some(self.ids), failure)
            if self._lease_ms is None and kind is None:  # nothing else will ever release them
                raise

    def stop_renewing(self) -> None:
        """They end with their lease now, whatever becomes of their release."""
        self._ended.set()

    def _give_up(self, command_id: str) -> None:
        """Holds may have been made of which we heard nothing: their ids are known, so nobody need wait for a lease."""
        ids = self._expected_ids(command_id)
        try:
            for release in _commands("release_read_holds", ids):
                self._client.post(release)
        except HoldfastError as error:
            log.warning("holds could not be released holds=%s error=%s", _some(ids), error)

    # Inside the block.

    def downgrade(self, to: int | Mapping[str, int], *, timeout: float | None = None) -> None:
        """Moves the holds forward: all to one time, or some, by collection. What is before is no longer needed.

        More than `HOLDS_PER_COMMAND` in several commands: if one is refused, those before it have moved theirs.
        """
        wanted = to if isinstance(to, Mapping) else dict.fromkeys(self._holds, to)
        moves = {self[collection].id: time for collection, time in wanted.items()}
        for part in _parts(list(moves)):
            moved = self._client.downgrade_read_holds({id: moves[id] for id in part}, timeout=timeout)
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
            text = f"The lease of {_some(self.ids)} may have passed: it could not be renewed in time.{why}"
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
                limit_s = max(1.0, lease_ms / RENEWALS_PER_LEASE / 2 / 1000)
                self._client.send_all(_commands("renew_read_holds", self.ids), timeout=limit_s)
            except HoldMissing as error:
                if not self._ended.is_set():
                    self._mark_gone(error)
                return
            except Exception as error:
                with self._lock:
                    self._last_problem = error
                # Whatever it is: if this thread ended, the holds would be lost, and nobody would hear of it.
                log.warning(
                    "holds could not be renewed, trying again holds=%s error=%s", _some(self.ids), error,
                    exc_info=not isinstance(error, HoldfastError),
                )  # fmt: skip
                wait_ms = min(_PAUSE_AFTER_FAILURE_MS, lease_ms / RENEWALS_PER_LEASE)
            else:
                with self._lock:
                    self._lasts_until, self._last_problem = sent_at + lease_ms, None
                wait_ms = max(0.0, sent_at + lease_ms / RENEWALS_PER_LEASE - steady_ms())
            self._tell()

    def _mark_gone(self, error: HoldfastError) -> None:
        with self._lock:
            self._gone = lost(error)
        self._tell()

    def _tell(self) -> None:
        """Calls the holder back, the first time that the holds may be lost."""
        loss = self._loss()
        if loss is None or self._told or self._ended.is_set():
            return
        self._told = True
        log.warning("holds lost holds=%s reason=%s", _some(self.ids), loss.message)
        if self._on_lost is not None:
            try:
                self._on_lost(loss)
            except Exception:  # theirs; renewing must go on
                log.exception("the callback for lost holds failed")


def _parts(ids: Sequence[str]) -> list[Sequence[str]]:
    return [ids[start : start + HOLDS_PER_COMMAND] for start in range(0, len(ids), HOLDS_PER_COMMAND)]


def _commands(type: str, ids: Sequence[str]) -> list[dict[str, Any]]:
    return [{"type": type, "holds": part} for part in _parts(ids)]


def _some(ids: Sequence[str]) -> str:
    """For a text that people read: there may be thousands."""
    more = f" and {len(ids) - 3:,} more" if len(ids) > 3 else ""
    return f"{', '.join(ids[:3])}{more}"

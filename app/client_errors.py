"""What can go wrong for a client: one exception per error code, made from one table, and three of the client's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from app.core.errors import Code


class HoldfastError(Exception):
    """Whatever Holdfast could not do. As the reply to a command: it was refused, and nothing has changed."""

    code: ClassVar[str] = "ERROR"

    def __init__(self, message: str, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.details = dict(details or {})

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.details)

    # The facts that errors carry for programs; None where an error has none. docs/commands.md says which has which.

    @property
    def path(self) -> str | None:
        """Where in the command it is wrong."""
        return self.details.get("path")

    @property
    def earliest(self) -> dict[str, int] | None:
        """Per collection, the earliest time at which it can be held."""
        return self.details.get("earliest")

    @property
    def actual(self) -> int | None:
        """What is there instead of what was expected."""
        return self.details.get("actual")

    @property
    def reason(self) -> str | None:
        """Why a hold is missing: `lease expired`, `released`, `unknown`."""
        return self.details.get("reason")


ERRORS: Final[dict[str, type[HoldfastError]]] = {}
"""Per code, its exception."""


def _error(code: Code, meaning: str) -> type[HoldfastError]:
    """COLLECTION_MISSING → CollectionMissing."""
    name = "".join(word.capitalize() for word in code.value.split("_"))
    error = type(name, (HoldfastError,), {"__doc__": meaning, "__module__": __name__, "code": code.value})
    ERRORS[code.value] = error
    return error


Malformed = _error(Code.MALFORMED, "The record is not one JSON object.")
UnknownCommand = _error(Code.UNKNOWN_COMMAND, "The controller knows no such command; it may be older than this client.")
InvalidArgument = _error(Code.INVALID_ARGUMENT, "Something is wrong with the command; `path` says where.")
TooLarge = _error(Code.TOO_LARGE, "The message or a list in it is too large: send several.")
StaleCommand = _error(Code.STALE_COMMAND, "The command is older than `max_command_age`; or a clock is wrong.")
CollectionMissing = _error(Code.COLLECTION_MISSING, "No such collection is live.")
CollectionIdReused = _error(Code.COLLECTION_ID_REUSED, "The id is, or was until lately, something else.")
DependencyMissing = _error(Code.DEPENDENCY_MISSING, "A collection that it depends on is not live.")
OutsideWarehouse = _error(Code.OUTSIDE_WAREHOUSE, "The location is not inside the warehouse.")
HoldMissing = _error(Code.HOLD_MISSING, "There is no such hold; `reason` says why.")
SinceViolation = _error(Code.SINCE_VIOLATION, "History before that time may be gone; see `earliest` and `actual`.")
SchemaMismatch = _error(Code.SCHEMA_MISMATCH, "The table's schema has another version, `actual`.")
SchemaIncompatible = _error(Code.SCHEMA_INCOMPATIBLE, "The rows that are there cannot have the new schema.")
ReadBeforeSince = _error(Code.READ_BEFORE_SINCE, "A read asked for a time before the since.")
InvalidUsage = _error(Code.INVALID_USAGE, "Such a read is not possible on this collection.")
Internal = _error(Code.INTERNAL, "A defect of Holdfast; nothing was changed.")


def refusal(body: Mapping[str, Any]) -> HoldfastError:
    """The exception for the `error` of a reply. A code of a newer controller gives the base class, with that code."""
    code, message = str(body.get("code")), str(body.get("message"))
    details = {name: value for name, value in body.items() if name not in ("code", "message")}
    if code in ERRORS:
        return ERRORS[code](message, details)
    return HoldfastError(f"{code}: {message}", {"code": code, **details})


class NotAnswering(HoldfastError):
    """Nobody answered in time, and it is not known whether the command was applied, or will be.

    `sent`: Kafka has it. If not, it may still get there while the client lives. No `command_id`: nothing was sent.
    """

    code = "NOT_ANSWERING"

    @property
    def sent(self) -> bool:
        return bool(self.details.get("sent"))

    @property
    def command_id(self) -> str | None:
        return self.details.get("id")


class ReplyTooLong(HoldfastError):
    """The command was applied, but its result does not fit into a Kafka record: it is in the table `commands`.

    A client that knows the `root` reads it there by itself.
    """

    code = "REPLY_TOO_LONG"


class HoldLost(HoldfastError):
    """The lease of a hold passed, or may have: what it protected may be gone."""

    code = "HOLD_LOST"

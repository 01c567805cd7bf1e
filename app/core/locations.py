"""Where shards may be: inside the warehouse, and never where anything else of ours is or was."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from typing import Final

from app.core.errors import Code, Refused, invalid

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
# Control characters, and what some file systems or Spark would read as a pattern, a query or an escape.
_FORBIDDEN: Final = re.compile(r"[\x00-\x1f\x7f%?#*{}\[\]\\]")
_SAME_STORE: Final = {"s3a": "s3", "s3n": "s3"}
_MAX_NAME_BYTES: Final = 255


def normalise(location: str) -> str:
    """One spelling per place: absolute, without `.`, `..`, doubled or trailing slashes; local paths without scheme."""
    match = _SCHEME.fullmatch(location)
    scheme, rest = (match[1].lower(), match[2]) if match else ("file", location)
    if scheme == "file":
        if match and rest.startswith("//") and not rest.startswith("///"):
            raise invalid(f"Location {location!r} names a host; a local path is wanted.")
        if not rest.startswith("/"):
            raise invalid(f"Location {location!r} is not an absolute path or URI.")
        return "/" + posixpath.normpath(rest).strip("/")
    authority, slash, path = rest[2:].partition("/")
    if not rest.startswith("//") or not authority:
        raise invalid(f"Location {location!r} is not an absolute path or URI.")
    path = posixpath.normpath("/" + path).strip("/") if slash else ""
    return f"{scheme}://{authority}/{path}".rstrip("/")


def comparable(location: str) -> str:
    """The same text for the same place: one store may go by several schemes, and each is needed as it was given."""
    scheme, colon, rest = location.partition("://")
    return f"{_SAME_STORE.get(scheme, scheme)}{colon}{rest}"


def _ancestors(location: str) -> Iterator[str]:
    """Every place above a normalised location, nearest first."""
    head = location
    while (cut := head.rfind("/")) > 0 and head[cut - 1] != "/":
        head = head[:cut]
        yield head
    if location.startswith("/") and location != "/":
        yield "/"


def is_within(location: str, place: str) -> bool:
    location, place = comparable(location), comparable(place)
    return location == place or place in _ancestors(location)


class Warehouse:
    """The places that the configuration allows.

    `reserved` are those that no shard may overlap: where the state tables and the checkpoints are (not a directory
    above the warehouse). `resolve` follows links; without one, names are taken as they are.
    """

    def __init__(
        self, *, roots: list[str], reserved: list[str], resolve: Callable[[str], str] = lambda location: location
    ) -> None:
        self._resolve = resolve
        self._roots = [self.resolved(root) for root in roots]
        self._reserved = [self.resolved(place) for place in reserved]

    def resolved(self, location: str) -> str:
        if match := _FORBIDDEN.search(location):
            raise invalid(f"Location {location!r:.200} contains {match[0]!r}, which cannot be part of a location.")
        for name in location.split("/"):
            if len(name.encode()) > _MAX_NAME_BYTES or not name.isprintable() or name == "_delta_log":
                raise invalid(f"Location {location!r:.200} has a part that cannot be the name of a directory.")
        return normalise(self._resolve(normalise(location)))

    def new_location(self, name: str) -> str:
        return f"{self._roots[0].rstrip('/')}/{name}"

    def check(self, location: str) -> None:
        """Refuses a resolved location that is not inside the warehouse, or is where state is kept."""
        if not any(is_within(location, root) for root in self._roots):
            raise Refused(
                Code.OUTSIDE_WAREHOUSE, f"{location!r} is not inside the warehouse ({', '.join(self._roots)})."
            )
        for root in self._roots:
            if is_within(root, location):
                raise invalid(f"{location!r} is, or contains, the warehouse {root!r}.")
        for place in self._reserved:
            if is_within(place, location) or is_within(location, place):
                raise invalid(f"{location!r} overlaps {place!r}, where Holdfast keeps its own state.")


class TakenLocations:
    """The locations of all shards there ever were; asking whether a place is free costs its depth."""

    def __init__(self) -> None:
        self._taken: dict[str, str] = {}
        self._above: dict[str, str] = {}

    def add(self, location: str, shard: str) -> None:
        location = comparable(location)
        self._taken[location] = shard
        for place in _ancestors(location):
            self._above.setdefault(place, shard)

    def overlapping(self, location: str) -> str | None:
        """A shard that is at, above or below this place."""
        location = comparable(location)
        if (shard := self._taken.get(location) or self._above.get(location)) is not None:
            return shard
        return next((self._taken[place] for place in _ancestors(location) if place in self._taken), None)

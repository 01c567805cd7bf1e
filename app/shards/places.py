"""Where a shard's files are: opening the place, and what it means if there is nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from app.core.locations import is_within, normalise
from app.shards.directory import Directory, LocalDirectory
from app.shards.errors import ShardError
from app.shards.object_directory import ObjectDirectory
from app.state.store import local_path


class OutsideWarehouse(ShardError):
    """A shard's directory is not below a root of the warehouse, links resolved. Nothing there is touched."""


def look_into(location: str, options: dict[str, str]) -> Directory:
    """Any place, to look at it. Who deletes opens it with the roots of the warehouse."""
    path = local_path(location)
    return ObjectDirectory(normalise(location), options) if path is None else LocalDirectory(os.path.realpath(path))


def open_directory(location: str, options: dict[str, str], *, roots: Sequence[str]) -> Directory:
    path = local_path(location)
    if path is None:
        place, allowed = normalise(location), [normalise(root) for root in roots if local_path(root) is None]
    else:
        place, allowed = os.path.realpath(path), _local(roots)
    if not any(is_within(place, root) and not is_within(root, place) for root in allowed):
        raise OutsideWarehouse(f"{location!r} is not inside the warehouse ({', '.join(roots)}).")
    return LocalDirectory(place) if path is not None else ObjectDirectory(place, options)


def empty_above(location: str, *, roots: Sequence[str]) -> str | None:
    """The place, not above the warehouse, from where on there is nothing on the way to a local directory; else None.

    So it looks while a disk is not mounted: its mount point is empty, or missing.
    """
    path = local_path(location)
    if path is None:
        return None
    place = Path(os.path.realpath(path))
    if place.exists():
        return None
    root = next((root for root in _local(roots) if is_within(str(place), root)), "/")
    above = place.parent
    while not above.is_dir() and str(above) != root:
        above = above.parent
    return None if above.is_dir() and any(above.iterdir()) else str(above)


def _local(roots: Sequence[str]) -> list[str]:
    return [os.path.realpath(path) for root in roots if (path := local_path(root)) is not None]

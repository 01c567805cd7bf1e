"""One commit at a time on a shard that is on a local disk.

Delta's log store for local files is only safe within one JVM: it looks whether the next commit file exists, and then
renames. So each of our commits holds a lock file beside `_delta_log`.

The lock is the JVM's, not one that this Python process holds: if we are killed, the JVM lives on for a moment and may
still be about to rename. The kernel frees the lock when the JVM is gone, and not before. A lock of a JVM does not keep
its own threads apart, so there is one of Python's for them. It is a POSIX lock: from Python, `fcntl.lockf` is its kin,
`flock` is not.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from py4j.protocol import Py4JJavaError

from app.shards.errors import LockTimeout, ShardMissing

NAME: Final = "_holdfast.lock"
"""Delta takes names that begin with `_` for nobody's data: no VACUUM touches it, no reader reads it."""

LONGEST_PAUSE_S: Final = 0.02

_threads: Final[weakref.WeakValueDictionary[str, _ThreadLock]] = weakref.WeakValueDictionary()
_registry: Final = threading.Lock()


class _ThreadLock:
    """A lock that is forgotten when nobody waits for it or holds it: there may be many shards."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


@contextmanager
def thread_lock(name: str, timeout_s: float, too_long: str) -> Iterator[None]:
    """Excludes the other threads of this process that ask for the same name. `too_long` is what a timeout says."""
    with _registry:
        ours = _threads.setdefault(name, _ThreadLock())
    if not ours.lock.acquire(timeout=timeout_s):
        raise LockTimeout(too_long)
    try:
        yield
    finally:
        ours.lock.release()


@contextmanager
def append_lock(location: str, timeout_s: float) -> Iterator[None]:
    """One after the other: threads of one process that append at once would only make each other begin anew."""
    too_long = (
        f"Other threads of this process have been appending to {location} for {timeout_s:g} s, one at a time, and it "
        "was not this one's turn. Nothing of it was appended: try again, or append with fewer threads."
    )
    with thread_lock(f"appends to {location}", timeout_s, too_long):
        yield


@contextmanager
def file_lock(jvm: Any, table: Path, timeout_s: float) -> Iterator[None]:
    """Excludes every other process and thread that commits to the table in this directory."""
    deadline = time.monotonic() + timeout_s
    with thread_lock(str(table), timeout_s, _too_long(table, timeout_s)):
        try:
            file = jvm.java.io.RandomAccessFile(str(table / NAME), "rw")
        except Py4JJavaError as error:
            if not table.is_dir():
                raise ShardMissing(
                    f"There is no directory {table}: the shard was never created, or is purged."
                ) from None
            raise LockTimeout(f"The lock file {table / NAME} cannot be opened: {error.java_exception}") from error
        try:
            lock = _acquired(file.getChannel(), table, deadline, timeout_s)
            try:
                yield
            finally:
                lock.release()
        finally:
            file.close()


def _acquired(channel: Any, table: Path, deadline: float, timeout_s: float) -> Any:
    """Tried again and again: waiting inside the JVM could neither be limited nor interrupted."""
    while (lock := channel.tryLock()) is None:
        if time.monotonic() >= deadline:
            raise LockTimeout(_too_long(table, timeout_s))
        time.sleep(random.uniform(0.1, 1) * LONGEST_PAUSE_S)
    return lock


def _too_long(table: Path, timeout_s: float) -> str:
    return (
        f"The lock {table / NAME} was not free within {timeout_s:g} s: another process is committing to this "
        "shard, or hangs in a commit. It becomes free by itself when that process ends; `fuser` names it."
    )

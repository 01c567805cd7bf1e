"""One look at a shard's log: is there news, and what does it say? Remembers nothing, so it can be done anywhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, TypeVar

from app.core.frontier import Frontier
from app.shards.commit_log import BadLog, Readable, full_state, last_checkpoint, read_commits
from app.state.commit_log import commit_path
from app.state.store import LocalStore, Store, local_path, open_store

THREADS: Final = 32
"""An object store answers in tens of milliseconds, and many at a time."""


class Target:
    """A shard to look at, and how far it is known: `version` -1 if its table was never seen.

    `failing`: the state says that its log could not be read.
    """

    __slots__ = ("failing", "location", "shard", "table_id", "upper", "version")

    def __init__(
        self, shard: str, location: str, table_id: str, version: int, upper: Frontier, *, failing: bool = False
    ) -> None:
        self.shard = shard
        self.location = location
        self.table_id = table_id
        self.version = version
        self.upper = upper
        self.failing = failing


_SomeTarget = TypeVar("_SomeTarget", bound=Target)
_Result = TypeVar("_Result")


class Seen(NamedTuple):
    """What a look has found. With an error, upper and version are those known before."""

    shard: str
    upper: Frontier
    log_version: int
    error: str | None = None


class Logs:
    """Opens the logs of shards. On an object store those in one directory share a client."""

    def __init__(self, options: dict[str, str]) -> None:
        self.options = options
        self._stores: dict[str, Store] = {}

    def of(self, location: str) -> Readable:
        path = local_path(location)
        if path is not None:
            return LocalStore(path)
        parent, _, name = location.rstrip("/").rpartition("/")
        if parent not in self._stores:
            self._stores[parent] = open_store(parent, self.options)
        return _Below(self._stores[parent], name)


class _Below:
    """A directory of a store."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    def read(self, path: str) -> bytes | None:
        return self._store.read(f"{self._name}/{path}")

    def exists(self, path: str) -> bool:
        return self._store.exists(f"{self._name}/{path}")


class Looker:
    """Looks at many shards, on object stores many at a time. For one thread."""

    def __init__(self, options: dict[str, str]) -> None:
        self._logs = Logs(options)
        self._pool: ThreadPoolExecutor | None = None

    def with_news(self, targets: Iterable[_SomeTarget]) -> list[_SomeTarget]:
        """Those whose next commit is there. A store that fails counts as news: reading will say why."""
        local: list[_SomeTarget] = []
        remote: list[_SomeTarget] = []
        exists = os.path.exists  # this loop runs over all shards on every tick
        for target in targets:
            if not _is_local(target):
                remote.append(target)
            elif exists(f"{target.location}/_delta_log/{target.version + 1:020d}.json"):
                local.append(target)
        news = self._many(self._has_news, remote)
        return local + [target for target, is_news in zip(remote, news, strict=True) if is_news]

    def read(self, targets: Sequence[Target]) -> list[Seen]:
        """What is new of each, if anything is."""
        return [seen for seen in self._many(self._read, targets) if seen is not None]

    def check(self, targets: Sequence[Target]) -> list[Seen]:
        """What a look for the next commit cannot notice: that it was cleaned up already, or that the table is gone."""
        return [seen for seen in self._many(self._check, targets) if seen is not None]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _many(self, step: Callable[[Target], _Result], targets: Sequence[Target]) -> list[_Result]:
        if all(map(_is_local, targets)):
            return list(map(step, targets))
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="look")
        return list(self._pool.map(step, targets))

    def _has_news(self, target: Target) -> bool:
        try:
            return self._logs.of(target.location).exists(commit_path(target.version + 1))
        except BaseException:  # noqa: BLE001 - see _failed
            return True

    def _read(self, target: Target) -> Seen | None:
        try:
            commits = read_commits(self._logs.of(target.location), target.version)
            if commits is None:
                return None
            if commits.table_id is not None:
                _check_id(target, commits.table_id)
        except BaseException as error:  # noqa: BLE001 - see _failed
            return _failed(target, error)
        upper = target.upper if commits.upper is None else target.upper.join(commits.upper)
        return Seen(target.shard, upper, commits.version)

    def _check(self, target: Target) -> Seen | None:
        try:
            return None if self._seems_whole(target) else self._in_full(target)
        except BaseException as error:  # noqa: BLE001 - see _failed
            return _failed(target, error)

    def _seems_whole(self, target: Target) -> bool:
        log = self._logs.of(target.location)
        if log.exists(commit_path(target.version + 1)):
            return True  # it will be read
        noted = last_checkpoint(log)
        if noted is not None and noted >= target.version:
            return noted == target.version
        # Commits are cleaned up from the oldest on: while ours is there, those after it are.
        return target.version >= 0 and log.exists(commit_path(target.version))

    def _in_full(self, target: Target) -> Seen | None:
        state = full_state(target.location, self._logs.options)
        if state is None:
            if target.version < 0:
                return None  # its table was not made yet
            raise BadLog(f"The Delta log is gone. Version {target.version} of it was there before.")
        _check_id(target, state.table_id)
        if state.version < target.version:
            raise BadLog(f"The Delta log went back from version {target.version} to version {state.version}.")
        if state.version == target.version:
            return None
        return Seen(target.shard, target.upper.join(state.upper), state.version)


def well_again(failing: Iterable[Target], found: Iterable[Seen]) -> list[Seen]:
    """Those which could not be read, and now can, though nothing is new: that is news."""
    said = {seen.shard for seen in found}
    return [Seen(each.shard, each.upper, each.version) for each in failing if each.shard not in said]


def _is_local(target: Target) -> bool:
    return target.location.startswith("/")


def _check_id(target: Target, table_id: str) -> None:
    if target.table_id and table_id != target.table_id:
        raise BadLog(f"There is another Delta table: its id is {table_id!r}, that of this shard {target.table_id!r}.")


def _failed(target: Target, error: BaseException) -> Seen:
    """Whatever it is: anybody may write to a shard's log, and what is wrong with one must not hide all the others.

    A panic of deltalake's is no `Exception`.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    reason = (str(error).splitlines() or [""])[0] or type(error).__name__
    return Seen(target.shard, target.upper, target.version, error=reason.encode(errors="backslashreplace").decode())

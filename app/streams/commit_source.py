"""The Spark data source `holdfast_commits`: what is new in the Delta logs of the shards, one row per shard.

Options: `state`, the directory of the state tables; `storage_options`, as JSON; `distribute_above`, the number of
shards above which the executors look instead of the driver; `partitions`, into how many parts they then divide the
shards; `alive_every_ms`, how often there is a batch at least, be it an empty one; and the numbers of
`app.shards.watching.Pacing`, each with `watch.` before its name.

Its offset is a counter and means nothing: where to look comes from the state. Spark runs a batch when the offset has
changed, so on the driver it moves only when something was found, or as a sign of life. The executors have to be asked
to find that out, so there it moves on every trigger. Which of the two it is, is decided when the stream is loaded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, cast

from pyspark.errors import PySparkNotImplementedError
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition, SimpleDataSourceStreamReader
from pyspark.sql.types import StructType

from app.core.frontier import value_of
from app.shards.looking import Looker, Seen, Target, well_again
from app.shards.positions import Positions
from app.shards.watching import Pacing, Watcher

FORMAT: Final = "holdfast_commits"
SCHEMA: Final = "shard STRING, upper BIGINT, log_version BIGINT, error STRING"
"""`upper` is null for `[]`. With an `error` nothing else is new."""
_Row = tuple[str, int | None, int, str | None]


class _Settings(NamedTuple):
    """All that a reader needs; it makes the rest where it runs, because handles cannot be sent to other processes."""

    state: str
    storage: dict[str, str]
    pacing: Pacing
    partitions: int
    alive_every_ms: int

    def watcher(self) -> Watcher:
        return Watcher(Positions(self.state, self.storage), Looker(self.storage), self.pacing)


class CommitSource(DataSource):
    """Made once per stream; copies of it go to the processes in which the readers run, which have no Spark session."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._settings = _Settings(
            state=options["state"],
            storage=json.loads(options.get("storage_options", "{}")),
            pacing=Pacing.from_options(options),
            partitions=int(options.get("partitions", "2")),
            alive_every_ms=int(options.get("alive_every_ms", "5000")),
        )
        above = options.get("distribute_above")
        self._is_distributed = above is not None and self._number_of_shards() > int(above)

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802 - Spark's interface
        if self._is_distributed:
            return ExecutorsReader(self._settings)
        # This is how Spark learns to ask for the other kind.
        raise PySparkNotImplementedError(errorClass="NOT_IMPLEMENTED", messageParameters={"feature": "streamReader"})

    def simpleStreamReader(self, schema: StructType) -> SimpleDataSourceStreamReader:  # noqa: ARG002, N802
        return DriverReader(self._settings)

    def _number_of_shards(self) -> int:
        watcher = self._settings.watcher()
        watcher.follow()
        return len(watcher)


class DriverReader(SimpleDataSourceStreamReader):
    """Looks at all shards itself."""

    def __init__(self, settings: _Settings) -> None:
        self._settings = settings
        self._watcher: Watcher | None = None
        self._alive_at_ms = 0.0

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"found": 0}

    def read(self, start: dict[str, int]) -> tuple[Iterator[_Row], dict[str, int]]:
        if self._watcher is None:
            self._watcher = self._settings.watcher()
        rows = [_row(seen) for seen in self._watcher.tick()]
        now_ms = time.monotonic() * 1000
        if not rows and now_ms < self._alive_at_ms:
            return iter(()), start
        self._alive_at_ms = now_ms + self._settings.alive_every_ms
        return iter(rows), {"found": start["found"] + 1}

    def readBetweenOffsets(self, start: dict[str, int], end: dict[str, int]) -> Iterator[_Row]:  # noqa: ARG002, N802
        """Nothing: what a batch that is run again had found is found again, because the state lacks it."""
        return iter(())


class Part(InputPartition):
    """What one task is to look at, and which shards it is to check for gaps."""

    def __init__(self, targets: Sequence[Target], checks: Sequence[Target]) -> None:
        super().__init__(None)
        self.targets = targets
        self.checks = checks


class ExecutorsReader(DataSourceStreamReader):
    """Divides the shards among the executors. What they find is known here only when the state has it."""

    def __init__(self, settings: _Settings) -> None:
        self._settings = settings
        self._watcher: Watcher | None = None
        self._triggers = 0

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"triggers": 0}

    def latestOffset(self) -> dict[str, int]:  # noqa: N802
        self._triggers += 1
        return {"triggers": self._triggers}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        if start == end:
            return []
        if self._watcher is None:
            self._watcher = self._settings.watcher()
        targets, checks = self._watcher.targets()
        number = self._settings.partitions
        parts = [Part(targets[part::number], checks[part::number]) for part in range(number)]
        return [part for part in parts if part.targets or part.checks]

    def read(self, partition: InputPartition) -> Iterator[_Row]:
        part = cast(Part, partition)
        looker = Looker(self._settings.storage)
        failing = [target for target in part.checks if target.failing]
        try:
            found = looker.read([*looker.with_news(part.targets), *failing]) + looker.check(part.checks)
        finally:
            looker.close()
        return iter([_row(seen) for seen in found + well_again(failing, found)])


def _row(seen: Seen) -> _Row:
    return seen.shard, value_of(seen.upper), seen.log_version, seen.error

"""The collections of a controller under test, written with `Writer` as a job would, and what was written to them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltalake import DeltaTable
from pyspark.errors import PySparkException

from app.config import Config
from app.writer import Writer
from tests.e2e.harness import Client, Row, by, table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = "_time BIGINT, _diff BIGINT, k STRING, v BIGINT"
READS = 5
REGISTERED = 1
QUICK = {"since_downgrade_interval": 0, "vacuum_grace": 0}


class Lake:
    """Commands go to whoever is in charge; nothing here knows who that is."""

    def __init__(self, client: Client, config: Config, spark: SparkSession) -> None:
        self.client = client
        self.config = config
        self.spark = spark
        self._commands = 0
        self.prefix = "c"  # of the ids of commands: two of these on one root need different ones
        self._writers: dict[str, Writer] = {}
        self.written: dict[str, Counter[tuple[str, int]]] = {}

    def command(self, type: str, **fields: Any) -> Row:
        """Its reply, which must be ok."""
        self._commands += 1
        (reply,) = self.client.ask({"type": type, "id": f"{self.prefix}{self._commands}", **fields})
        assert reply["status"] == "ok", reply
        return reply

    def create(self, *ids: str) -> None:
        tables = [{"id": id, "data_source": {"kind": "table"}, "schema": "k STRING, v BIGINT"} for id in ids]
        reply = self.command("create_collections", register_ts=REGISTERED, collections=tables)
        for id in ids:
            self._writers[id] = Writer(self.spark, id, root=self.config.root, at_least=reply["seq"])
            self.written[id] = Counter()

    def write(self, id: str, upper: int, *updates: tuple[int, int, str, int]) -> int:
        """Appends updates (time, diff, k, v), up to an upper; the version that has them."""
        writer = self._writers[id]
        if updates:
            appended = writer.compare_and_append(self.rows(*updates), writer.upper, upper)
        else:
            appended = writer.advance_upper(writer.upper, upper)
        for _, diff, k, v in updates:
            self.written[id][(k, v)] += diff
        return appended.version

    def rows(self, *updates: tuple[int, int, str, int]) -> DataFrame:
        return self.spark.createDataFrame(list(updates), SCHEMA).coalesce(1)

    def sinces(self) -> dict[str, int]:
        return {id: row["read_frontier"] for id, row in by("id", table(self.config, "collections")).items()}

    def check_sinces(self, *ids: str) -> None:
        """Of the three sinces each is at most the one before: what a merge has made true, what it may, what is read."""
        physical = {id: self._recorded_since(self.shards()[id]["location"]) for id in ids}
        durable = {id: self.shards()[id]["since"] for id in ids}
        readable = self.sinces()  # read last, and none of them ever moves back
        for id in ids:
            assert physical[id] <= durable[id] <= readable[id], id

    def _recorded_since(self, location: str) -> int:
        return DeltaTable(location).transaction_version("holdfast.since") or 0

    def shards(self) -> dict[str, Row]:
        return by("owner", table(self.config, "shards"))

    def content(self, id: str) -> Counter[tuple[str, int]]:
        """The sum of the changelog, read as anyone would: without a hold, so that files may go while it reads."""
        for _ in range(READS):
            frame = self.spark.read.format("delta").load(self.shards()[id]["location"])
            try:
                rows = frame.collect()
            except PySparkException as error:
                if "FILE_NOT_EXIST" not in str(error):
                    raise
                continue  # a merge has replaced it, and nobody waits with a grace of zero
            total: Counter[tuple[str, int]] = Counter()
            for row in rows:
                total[(row.k, row.v)] += row["_diff"]
            return +total
        raise AssertionError(f"{id} was merged and cleaned up during each of {READS} reads")

    def named_files(self, id: str) -> list[str]:
        """The data files that its log names, live or not, and that are there. (Those of an aborted write are not.)"""
        location = Path(self.shards()[id]["location"])
        actions = [
            json.loads(line) for log in location.glob("_delta_log/*.json") for line in log.read_text().splitlines()
        ]
        paths = {action["add"]["path"] for action in actions if "add" in action}
        return sorted(path for path in paths if (location / path).exists())

    def merges(self, id: str) -> int:
        history = DeltaTable(self.shards()[id]["location"]).history()
        return sum('"what":"merge"' in commit.get("userMetadata", "") for commit in history)


def data_files(config: Config) -> list[str]:
    """Everything in the warehouse but the logs."""
    root = Path(config.warehouse[0])
    return sorted(str(file) for file in root.rglob("*.parquet") if "_delta_log" not in file.parts)

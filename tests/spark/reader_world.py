"""A controller without Kafka, and shards to read: commands go straight into it, and tables are written by delta-rs.

Everything about holds is real; only the wire between client and controller is missing.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from app.client import Holdfast
from app.client_wire import Reply
from app.clock import wall_ms
from app.config import Config, StreamsConfig
from app.controller import Controller
from app.core.advancing import Observation
from app.core.frontier import EMPTY, Frontier
from app.core.images import Hold, Shard
from app.core.schema import parse_schema
from app.records import Record, Topic

TOPIC = Topic("commands", "topic-1")
DDL = "k STRING, v BIGINT"
TYPES = {"string": pa.string(), "bigint": pa.int64(), "int": pa.int32(), "double": pa.float64(), "float": pa.float32()}
DELTA_TYPES = {"bigint": "long", "int": "integer"}
LIMIT_S = 60.0

Update = tuple[Any, ...]
"""`(time, diff, *data)`."""


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S:.0f} s: {what}"
        time.sleep(0.01)


def summed(updates: Iterable[Update], as_of: int) -> dict[Update, int]:
    """What a collection holds at a time."""
    counts: Counter[Update] = Counter()
    for at, diff, *data in updates:
        if at <= as_of:
            counts[tuple(data)] += diff
    return {data: count for data, count in counts.items() if count}


def counted(rows: Iterable[Any]) -> dict[Update, int]:
    """The same from rows whose last column is the count; each may be there once only."""
    found: dict[Update, int] = {}
    for row in rows:
        *data, count = row
        assert tuple(data) not in found, f"{data} is there twice"
        found[tuple(data)] = count
    return found


class DirectClient(Holdfast):
    """Hands commands to a controller, one by one, from any thread."""

    def __init__(self, controller: Controller, root: str, *, first_offset: int = 0) -> None:
        super().__init__(root=root)
        self._controller = controller
        self._offset = first_offset
        self._sending = threading.Lock()
        self.refused: list[Reply] = []
        self.later = 0  # how much was sent without waiting for anything

    def ask_all(self, commands: Iterable[Mapping[str, Any]], *, timeout: float | None = None) -> list[Reply]:  # noqa: ARG002
        return [self._apply(command) for command in commands]

    def post(self, command: Mapping[str, Any]) -> None:
        self._apply(command)

    def post_later(self, command: Mapping[str, Any]) -> None:
        self.later += 1
        self._apply(command)

    def _apply(self, command: Mapping[str, Any]) -> Reply:
        message = {"id": self.new_command_id(), **{key: value for key, value in command.items() if value is not None}}
        with self._sending:
            record = Record(0, self._offset, wall_ms(), json.dumps(message).encode())
            self._offset += 1
            (answer,) = self._controller.apply(TOPIC, [record])
        reply: Reply = json.loads(answer.value)
        self._saw(reply)
        if reply["status"] != "ok":
            self.refused.append({**reply, "command": message})
        return reply


class World:
    def __init__(self, directory: Path) -> None:
        self.root = str(directory / "root")
        config = Config(
            root=self.root,
            warehouse=[str(directory / "warehouse")],
            streams=StreamsConfig(checkpoints=str(directory / "checkpoints")),
        )
        self.controller = Controller(config)
        self.controller.boot()
        self.client = DirectClient(self.controller, self.root)

    def close(self) -> None:
        self.controller.close()

    # Collections and their tables.

    def create(self, id: str, ddl: str | None = DDL, *, register_ts: int = 0, **source: Any) -> None:
        """A table, and on disk as well."""
        described: dict[str, Any] = {"id": id, "data_source": {"kind": "table", **source}}
        if ddl is not None:
            described["schema"] = ddl
        self.client.create_collections([described], register_ts=register_ts)
        self.make_table(id, ddl)

    def make_table(self, id: str, ddl: str | None = DDL, *, table_id: str | None = None) -> None:
        """As the controller would: with the shard's own id, which delta-rs would choose itself."""
        shard = self.shard(id)
        types = [("_time", "bigint"), ("_diff", "bigint")]
        types += [(column.name, column.type.name) for column in parse_schema(ddl)]  # type: ignore[union-attr]  # simple
        fields = [
            {"name": name, "type": DELTA_TYPES.get(type, type), "nullable": True, "metadata": {}}
            for name, type in types
        ]
        metadata = {
            "id": table_id or shard.table_id,
            "format": {"provider": "parquet", "options": {}},
            "schemaString": json.dumps({"type": "struct", "fields": fields}),
            "partitionColumns": [],
            "configuration": {},
            "createdTime": wall_ms(),
        }
        actions = [
            {"commitInfo": {"timestamp": wall_ms(), "operation": "CREATE TABLE"}},
            {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
            {"metaData": metadata},
        ]
        log = Path(shard.location) / "_delta_log"
        log.mkdir(parents=True)
        (log / f"{0:020d}.json").write_text("".join(json.dumps(action) + "\n" for action in actions))
        self.observe(id)

    def shard(self, id: str) -> Shard:
        return self.controller.read(lambda state: state.shards[state.collections[id].shard])

    def table(self, id: str) -> DeltaTable:
        return DeltaTable(self.shard(id).location)

    def append(self, id: str, updates: Iterable[Update], upper: int, *, observe: bool = True) -> None:
        self._write(id, updates, "append", {"holdfast.upper": upper})
        if observe:
            self.observe(id)

    def seal(self, id: str) -> None:
        self.append(id, [], int(EMPTY))

    def merge(self, id: str, since: int) -> None:
        """What a merge leaves behind: everything up to since is summed, and at since."""
        table = self.table(id)
        assert since < (table.transaction_version("holdfast.upper") or 0)
        rows = [tuple(row.values()) for row in table.to_pyarrow_table().to_pylist()]
        merged = [(since, count, *data) for data, count in summed(rows, since).items()]
        self._write(id, [], "append", {"holdfast.since": since})
        self._write(id, merged + [row for row in rows if row[0] > since], "overwrite", {})
        self.observe(id)

    def _write(self, id: str, updates: Iterable[Update], mode: str, transactions: dict[str, int]) -> None:
        table = self.table(id)
        schema = pa.schema(table.schema().to_arrow())
        columns = list(zip(*updates, strict=True)) or [()] * len(schema)
        data = pa.table([pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)], schema)
        marks = [Transaction(name, version) for name, version in transactions.items()]
        properties = CommitProperties(app_transactions=marks)
        write_deltalake(table, data, mode=mode, commit_properties=properties)  # type: ignore[call-overload]

    def observe(self, id: str) -> None:
        """What query 2 would tell the controller."""
        table = self.table(id)
        upper = Frontier(table.transaction_version("holdfast.upper") or 0)
        self.controller.observe([Observation(self.shard(id).id, upper, table.version())])

    # Time, and holds.

    def policy(self, id: str, **policy: Any) -> None:
        self.client.set_read_policies({id: policy})

    def holds(self) -> dict[str, Hold]:
        return self.controller.read(lambda state: dict(state.holds))

    def expire(self) -> None:
        """Everything on the topic is applied, and it is now."""
        self.controller.heartbeat(applied_until=self.controller.now())

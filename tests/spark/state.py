"""State tables as a controller would write them, without one: commands run in the simulator, its rows become tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deltalake import CommitProperties, Transaction, write_deltalake

from app.simulate import Simulator
from app.state.schemas import to_arrow
from app.status import POSITION

ORDERS = {"id": "orders", "data_source": {"kind": "table"}, "schema": "k STRING, v BIGINT"}


def create(*collections: dict[str, Any]) -> dict[str, Any]:
    return {"type": "create_collections", "id": "c", "register_ts": 1, "collections": list(collections)}


class World:
    """A root with state, and the warehouse beside it."""

    def __init__(self, directory: Path) -> None:
        self.root = str(directory / "root")
        self.warehouse = directory / "warehouse"
        self._simulator = Simulator()
        self._sent = 0

    def run(self, *lines: dict[str, Any], seen: int | None = None) -> World:
        """Runs commands and writes the tables. `seen`: the log version at which every shard was seen on disk."""
        for line in lines:
            self._sent += 1
            named = {**line, "id": f"{line['id']}{self._sent}"} if "id" in line else line
            reply = json.loads(self._simulator.line(json.dumps(named).encode()))
            assert reply["status"] == "ok", reply
        dump = json.loads(self._simulator.line(b'{"type":"dump"}'))
        for name in ("collections", "shards"):
            rows = dump["dump"][name] if "dump" in dump else dump[name]
            if name == "shards":
                rows = [{**row, "location": self.location(row), "log_version": seen} for row in rows]
            write_deltalake(
                f"{self.root}/state/{name}",
                to_arrow(name, rows),
                mode="overwrite",
                commit_properties=CommitProperties(app_transactions=[Transaction(POSITION, self._sent)]),
            )
        return self

    def location(self, row: dict[str, Any]) -> str:
        return str(self.warehouse / row["location"].removeprefix("/warehouse/"))

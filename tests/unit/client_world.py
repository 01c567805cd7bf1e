"""A small world for the tests of the client: commands run in the simulator, its rows as state or as Delta tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deltalake import CommitProperties, Transaction, write_deltalake

from app.simulate import Simulator
from app.state.schemas import SCHEMAS, to_arrow
from app.status import POSITION, State, state_of

TABLE = {"kind": "table"}
NOW = 1_800_000_000_000


def view(*inputs: str) -> dict[str, Any]:
    return {"kind": "other", "inputs": list(inputs)}


class World:
    """Runs commands at `NOW`; each line must be answered with ok."""

    def __init__(self, now: int = NOW) -> None:
        self._simulator = Simulator()
        self._number = 0
        self.run("clock", now=now)

    def run(self, type: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        line = {"type": type, **fields}
        if type not in ("upper", "clock", "downgrades", "dump", "finalize"):
            line.setdefault("id", f"c{self._number}")
        reply: dict[str, Any] = json.loads(self._simulator.line(json.dumps(line).encode()))
        assert reply["status"] == "ok", reply
        return reply

    def create(self, register_ts: int = 5, **sources: dict[str, Any]) -> None:
        collections = [{"id": id, "data_source": source} for id, source in sources.items()]
        self.run("create_collections", register_ts=register_ts, collections=collections)

    def policy(self, collection: str, **policy: Any) -> None:
        self.run("set_read_policies", policies=[{"collection": collection, "policy": policy}])

    def hold(self, *collections: str, holder: str = "report", **fields: Any) -> None:
        self.run("acquire_read_holds", collections=list(collections), holder=holder, **fields)

    def dump(self) -> dict[str, Any]:
        rows = self.run("dump")
        meta = [
            {"entity": entity, "key": key, "value": json.loads(stored.value), "updated_seq": stored.updated_seq}
            for (entity, key), stored in self._simulator.journal.images.items()
            if entity in ("tombstone", "parameter")
        ]
        return {**rows, "meta": meta}

    def state(self) -> State:
        return state_of(self.dump())

    def write(self, root: Path, *, seq: int) -> None:
        """As Delta tables that have reached `seq`."""
        dump = self.dump()
        for name in SCHEMAS:
            rows = dump.get(name, [])
            if name == "meta":
                rows = [{**row, "value": json.dumps(row["value"])} for row in rows]
            write_deltalake(
                str(root / "state" / name),
                to_arrow(name, rows),
                mode="overwrite",
                commit_properties=CommitProperties(app_transactions=[Transaction(POSITION, seq)]),
            )

"""Shards made by hand, and a state that says where they are."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from app.core.frontier import Frontier
from app.core.images import SHARD, Shard, encode_image
from app.state.commit_log import NO_HOOKS
from app.state.store import LocalStore
from app.state.tables import Tables

SEALED = 2**63 - 1
SCHEMA = json.dumps(
    {
        "type": "struct",
        "fields": [{"name": n, "type": "long", "nullable": True, "metadata": {}} for n in ("_time", "_diff")],
    }
)


class BareLog:
    """A Delta log whose commits are written line by line: anything can be in them."""

    def __init__(self, location: Path) -> None:
        self.location = location
        self.directory = location / "_delta_log"
        self.directory.mkdir(parents=True)
        self.store = LocalStore(location)
        self.id = str(uuid.uuid4())
        self.version = -1
        self.commit(
            {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
            {
                "metaData": {
                    "id": self.id,
                    "format": {"provider": "parquet", "options": {}},
                    "schemaString": SCHEMA,
                    "partitionColumns": [],
                    "configuration": {},
                    "createdTime": 0,
                }
            },
        )

    def commit(self, *actions: dict[str, Any], at: int | None = None) -> int:
        """Appends a commit; with `at`, in milliseconds, as the store's time of it."""
        lines = [{"commitInfo": {"timestamp": 1_000 + self.version, "operation": "WRITE"}}, *actions]
        return self.commit_text("".join(json.dumps(line) + "\n" for line in lines), at=at)

    def commit_text(self, text: str, *, at: int | None = None) -> int:
        self.version += 1
        path = self.path(self.version)
        staged = path.with_suffix(".staged")
        staged.write_text(text)
        if at is not None:
            os.utime(staged, (at / 1000, at / 1000))
        staged.rename(path)
        return self.version

    def path(self, version: int) -> Path:
        return self.directory / f"{version:020d}.json"

    def upper(self, upper: int) -> int:
        return self.commit(txn("holdfast.upper", upper))


def txn(name: str, version: int) -> dict[str, Any]:
    return {"txn": {"appId": name, "version": version, "lastUpdated": 1}}


def add(path: str, size: int = 10) -> dict[str, Any]:
    return {"add": {"path": path, "partitionValues": {}, "size": size, "modificationTime": 0, "dataChange": True}}


def remove(path: str, size: int | None = 10) -> dict[str, Any]:
    return {"remove": {"path": path, "deletionTimestamp": 0, "dataChange": True, "size": size}}


def append(location: Path | str, *, rows: int = 1, **app_transactions: int) -> DeltaTable:
    """A commit of delta-rs; `upper=3` is the app transaction `holdfast.upper` with version 3."""
    transactions = [Transaction(f"holdfast.{name}", version) for name, version in app_transactions.items()]
    write_deltalake(
        location,
        pa.table({"_time": pa.array(range(rows), pa.int64()), "_diff": pa.array([1] * rows, pa.int64())}),
        mode="append",
        commit_properties=CommitProperties(app_transactions=transactions),
        post_commithook_properties=NO_HOOKS,
    )
    return DeltaTable(location)


class FakeState:
    """The `shards` table as a controller writes it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = f"{root}/state"
        self.shards: dict[str, Shard] = {}
        self._tables = Tables.open(str(root), storage_options={})
        self._seq = 0

    def put(self, *shards: Shard) -> None:
        self._seq += 1
        self.shards |= {shard.id: shard for shard in shards}
        changes = {(SHARD, shard.id): (encode_image(shard), self._seq, 1) for shard in shards}
        self._tables.merge(changes, upto=self._seq, epoch=1)

    def add(self, id: str, location: Path | str, **fields: Any) -> Shard:
        shard = Shard(id=id, location=str(location), format="updates", owner=id)
        shard = msgspec.structs.replace(shard, **fields)
        self.put(shard)
        return shard

    def change(self, id: str, **fields: Any) -> None:
        self.put(msgspec.structs.replace(self.shards[id], **fields))

    def confirm(self, id: str, upper: Frontier, log_version: int) -> None:
        """What a controller does with an observation."""
        self.change(id, upper=upper, log_version=log_version)

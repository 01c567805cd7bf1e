"""Short, readable views of a dump, so that a text test can be checked by eye."""

from __future__ import annotations

import json
from typing import Any

from app.simulate import Simulator


def view(simulator: Simulator, name: str) -> list[str]:
    """The rows of one table, a line each; `none` if there are none."""
    rows = json.loads(simulator.line(b'{"type":"dump"}'))[name]
    render = {"collections": _collection, "holds": _hold, "shards": _shard}[name]
    return [render(row) for row in rows] or ["none"]


def _frontier(value: int | None) -> str:
    return "[]" if value is None else str(value)


def _collection(row: dict[str, Any]) -> str:
    parts = [
        f"since {_frontier(row['read_frontier'])}",
        f"upper {_frontier(row['write_frontier'])}",
        f"implied {_frontier(row['implied_capability'])}",
        json.dumps(row["read_policy"], separators=(",", ":")),
    ]
    if row["dropped"]:
        parts.append("dropped")
    if row["primary"]:
        parts.append(f"primary {row['primary']}")
    if row["dependencies"]:
        parts.append(f"depends on {' '.join(row['dependencies'])}")
    if row["schema_version"]:
        parts.append(f"schema version {row['schema_version']}")
    if row["timeline"] != "epoch_ms":
        parts.append(f"timeline {row['timeline']}")
    parts.append("follows the clock" if row["time_dependence"] == "wall_clock" else "follows its inputs")
    return f"{row['id']} ({row['data_source']} on {row['shard']}): {', '.join(parts)}"


def _hold(row: dict[str, Any]) -> str:
    parts = [f"at {_frontier(row['since'])} on {row['collection']}", f"by {row['holder']}"]
    if row["purpose"]:
        parts.append(f"for {row['purpose']}")
    if row["lease_ms"] is not None:
        parts.append(f"lease {row['lease_ms']}")
    if row["lease_expires_at"] is not None:
        parts.append(f"until {row['lease_expires_at']}")
    if row["pin_files"]:
        parts.append(f"pins files from version {row['pinned_version']}")
    return f"{row['hold']}: {', '.join(parts)}"


def _shard(row: dict[str, Any]) -> str:
    parts = [
        row["state"],
        f"since {_frontier(row['since'])}",
        f"upper {_frontier(row['upper'])}",
        f"owner {row['owner']}",
        row["location"],
    ]
    if row["format"] != "updates":
        parts.append(f"format {row['format']}")
    if row["log_version"] is not None:
        parts.append(f"log version {row['log_version']}")
    if row["epoch"]:
        parts.append(f"epoch {row['epoch']}")
    parts += [f"{name} {row[name]}" for name in ("dropped_at", "finalized_at", "attempts", "last_error") if row[name]]
    return f"{row['shard']}: {', '.join(parts)}"

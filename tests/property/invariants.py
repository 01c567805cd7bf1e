"""What must be true of the rows after every line, whatever the line was (section 4), seen in the program's own dumps.

Nothing here comes from the oracle's model: a mistake that the oracle shares with the program is still caught if it
breaks one of these.
"""

from __future__ import annotations

from typing import Any

from tests.property.oracle_create import overlap
from tests.property.oracle_state import Row, order

Dump = dict[str, dict[str, Row]]

SHARD_STATES = ["live", "dropped", "finalizing", "finalized"]
NEVER_BACK = ("since", "upper", "log_version", "epoch", "attempts")
UNCHANGING = ("shard", "location", "format")


class History:
    """Where each id was stored last, over all dumps of one run: one dump does not show who was there before."""

    def __init__(self) -> None:
        self.stored_on: dict[str, str] = {}


def check_invariants(before: Dump, after: Dump, *, line_type: str | None, may_change: bool, history: History) -> None:
    """Raise AssertionError if `after`, or the step from `before`, breaks an invariant."""
    if not may_change:
        require(after == before, "a refused command, a duplicate and a question change nothing", line_type)
        return
    for row in after["collections"].values():
        _check_collection(row, before, after, line_type)
        _check_return(row, before, after, history)
    for row in after["holds"].values():
        _check_hold(row, before, after, line_type)
    for name, row in after["shards"].items():
        if row["state"] != "finalized" or before["shards"].get(name) is not row:
            _check_shard(row, before, after, line_type)
    require(before["shards"].keys() <= after["shards"].keys(), "rows of shards stay for ever")
    _check_disjoint(before, after)
    _check_sequence(before, after)
    if line_type == "restart":
        _check_restart(before, after)
    history.stored_on.update((name, row["shard"]) for name, row in after["collections"].items())


def require(true: bool, promise: str, *context: Any) -> None:
    if not true:
        raise AssertionError(f"broken invariant: {promise}: {context}")


def _check_collection(row: Row, before: Dump, after: Dump, line_type: str | None) -> None:
    since, shard = row["read_frontier"], after["shards"][row["shard"]]
    require(since is not None, "a collection whose since is [] has no row", row)
    require(
        row["dropped"] == (row["implied_capability"] is None), "exactly the dropped have given up their capability", row
    )
    require(since <= order(row["implied_capability"]), "since <= implied capability", row)
    for name in row["dependencies"]:
        require(name in after["collections"], "a dependency lives as long as its dependents", row, name)
        dependency = after["collections"][name]
        require(dependency["read_frontier"] <= since, "a dependency's since <= each dependent's", row, dependency)
        require(dependency["timeline"] == row["timeline"], "a dependency is on the same timeline", row, dependency)
    require(
        row["dropped"] or shard["state"] == "live", "a shard with a live collection is not being finalized", row, shard
    )
    require(shard["state"] in SHARD_STATES[:2], "a shard with a collection is not claimed", row, shard)
    require(order(shard["upper"]) <= order(row["write_frontier"]), "an upper is at least its shard's", row, shard)
    if row["primary"] is None:
        require(shard["owner"] == row["id"], "who has no primary owns its shard", row, shard)
    else:
        require(row["primary"] in row["dependencies"], "a primary is a dependency", row)
        require(after["collections"][row["primary"]]["shard"] == row["shard"], "a primary shares its shard", row)
    old = before["collections"].get(row["id"])
    if old is None:
        return
    require(old["read_frontier"] <= since, "since never regresses", old, row)
    require(order(old["write_frontier"]) <= order(row["write_frontier"]), "an upper never regresses", old, row)
    if line_type != "undrop_collections":
        moved = order(old["implied_capability"]) <= order(row["implied_capability"])
        require(moved, "an implied capability never moves back, but by an undrop", old, row)
        require(row["dropped"] or not old["dropped"], "a dropped id comes back only by an undrop", old, row)


def _check_return(row: Row, before: Dump, after: Dump, history: History) -> None:
    """An id that comes back after it was gone must have been purged, so its old shard is finalized."""
    old_shard = history.stored_on.get(row["id"])
    if row["id"] not in before["collections"] and old_shard is not None:
        state = after["shards"][old_shard]["state"]
        require(state == "finalized", "a dropped id is not seen again before its purge", row, old_shard)
        require(row["shard"] != old_shard, "a finalized shard is not used again", row)


def _check_hold(row: Row, before: Dump, after: Dump, line_type: str | None) -> None:
    require(row["collection"] in after["collections"], "a held collection stays", row)
    collection = after["collections"][row["collection"]]
    require(collection["read_frontier"] <= order(row["since"]), "since <= every hold", row, collection)
    require(row["since"] is not None, "a hold at [] is released", row)
    leased = row["lease_expires_at"] is not None
    require(leased == (row["lease_ms"] is not None) or row["hold"].startswith("/undrop/"), "a lease has its end", row)
    require(row["pin_files"] == (row["pinned_version"] is not None), "exactly a pinning hold records a version", row)
    old = before["holds"].get(row["hold"])
    if old is not None and line_type != "merge_read_holds":
        require(old["since"] <= row["since"], "a hold never moves back, but by a merge", old, row)
        require(old["collection"] == row["collection"], "a hold stays on its collection", old, row)


def _check_shard(row: Row, before: Dump, after: Dump, line_type: str | None) -> None:
    owner = after["collections"].get(row["owner"])
    state = row["state"]
    if owner is not None and owner["shard"] == row["shard"]:
        require(order(row["since"]) <= owner["read_frontier"], "shards.since <= the owner's since", row, owner)
    if state in ("finalizing", "finalized"):
        require(row["since"] is None, "a claimed shard has since []", row)
    require((row["finalized_at"] is not None) == (state == "finalized"), "exactly the finalized say when", row)
    require((row["dropped_at"] is None) == (state == "live"), "exactly the dropped say when", row)
    if state == "finalized":
        require(row["upper"] is None, "a finalized shard has upper []", row)
    old = before["shards"].get(row["shard"])
    if old is None:
        require(state == "live", "a new shard is live", row)
        return
    for column in NEVER_BACK:
        lower = -1 if column == "log_version" else EMPTY_AT_THE_END
        require(_place(old[column], lower) <= _place(row[column], lower), f"{column} never goes back", old, row)
    require(all(old[column] == row[column] for column in UNCHANGING), "a shard stays what it is", old, row)
    forward = SHARD_STATES.index(old["state"]) <= SHARD_STATES.index(state)
    saved = line_type == "undrop_collections" and old["state"] == "dropped" and state == "live"
    require(forward or saved, "a shard comes back only by an undrop, and never once claimed", old, row)
    if old["state"] == "finalized":
        require(old == row, "a finalized shard never changes", old, row)


EMPTY_AT_THE_END = order(None)


def _place(value: int | None, null: int) -> int:
    return null if value is None else value


def _check_disjoint(before: Dump, after: Dump) -> None:
    for name in after["shards"].keys() - before["shards"].keys():
        location = after["shards"][name]["location"]
        others = [row["location"] for other, row in after["shards"].items() if other != name]
        require(not any(overlap(location, other) for other in others), "no two shards overlap", location)


def _check_sequence(before: Dump, after: Dump) -> None:
    """A row says which entry made it and which touched it last; a row that changed was touched by a later one."""
    for table, rows in after.items():
        for key, row in rows.items():
            old = before[table].get(key)
            if old is None or old is row:
                continue
            require(old.get("created_seq") == row.get("created_seq"), "created_seq stays", old, row)
            later = old["updated_seq"] < row["updated_seq"]
            require(later or old == row, "a changed row has a later updated_seq", old, row)


def _check_restart(before: Dump, after: Dump) -> None:
    """A restart loses nothing and invents nothing; it only gives every lease a full period."""
    moving = {"updated_seq", "lease_expires_at"}
    for table, rows in after.items():
        require(before[table].keys() == rows.keys(), "a restart keeps all rows", table)
        for key, row in rows.items():
            kept = {column for column in row if column not in moving}
            require(all(before[table][key][c] == row[c] for c in kept), "a restart keeps every row", table, row)

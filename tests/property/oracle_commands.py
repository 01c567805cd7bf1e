"""What the commands on whole collections and on the parameters do: policies, drop, undrop, reconcile, parameters."""

from __future__ import annotations

from collections.abc import Callable

from tests.property import oracle_alter, oracle_create, oracle_holds
from tests.property.oracle_shape import is_duration, milliseconds, valid_parameters
from tests.property.oracle_state import UNDROP_PREFIX, Refused, Row, State, plain_policy

PLAIN_PARAMETERS = ("finalize_shards", "finalization_concurrency")


def set_policies(state: State, line: Row) -> Row:
    """Only the last policy for an id counts; `settle` evaluates it."""
    last = {item["collection"]: plain_policy(item["policy"]) for item in line["policies"]}
    if not all(state.live(name) for name in last):
        raise Refused("COLLECTION_MISSING")
    for name, policy in last.items():
        state.collections[name]["read_policy"] = policy
    return {}


def drop(state: State, line: Row) -> Row:
    names = [name for name in dict.fromkeys(line["collections"]) if state.live(name)]
    window = state.parameters["undrop_window"]
    for name in names:
        row = state.collections[name]
        row.update(dropped=True, implied_capability=None)
        if row["altered"] is not None:
            state.events[f"the {row['altered']} id of an alter was dropped"] += 1
        if window > 0:
            state.holds[UNDROP_PREFIX + name] = {
                "hold": UNDROP_PREFIX + name,
                "collection": name,
                "holder": "holdfast",
                "purpose": "undrop window",
                "since": state.since[name],
                "acquired_at": state.now,
                "lease_ms": None,
                "lease_expires_at": state.expiry(window),
                "pin_files": False,
                "pinned_version": None,
            }
    for shard in dict.fromkeys(state.collections[name]["shard"] for name in names):
        if all(row["dropped"] for row in state.stored_on(shard)):
            state.shards[shard].update(state="dropped", dropped_at=state.now)
        else:
            state.events["a drop left the shard to another live collection"] += 1
    return {}


def undrop(state: State, line: Row) -> Row:
    names = [name for name in dict.fromkeys(line["collections"]) if not state.live(name)]
    if any(UNDROP_PREFIX + name not in state.holds for name in names):
        raise Refused("COLLECTION_MISSING")
    for name in names:
        del state.holds[UNDROP_PREFIX + name]
        since = state.since[name]
        row = state.collections[name]
        row.update(dropped=False, implied_capability=since, read_policy={"kind": "no_policy", "initial_since": since})
        state.shards[row["shard"]].update(state="live", dropped_at=None)
        state.events["undrop"] += 1
    return {}


def reconcile(state: State, line: Row) -> Row:
    live = {name for name in state.collections if state.live(name)}
    told = set(line["collections"])
    return {"extra": sorted(live - told), "missing": sorted(told - live)}


def update_parameters(state: State, line: Row) -> Row:
    """The rules between parameters hold for the result of the whole command."""
    changed = dict(state.parameters)
    for name, value in line["parameters"].items():
        if name not in changed:
            raise Refused("INVALID_ARGUMENT")
        if name in PLAIN_PARAMETERS or (name == "hold_max_lease" and value is None):
            changed[name] = value
        elif is_duration(value):
            changed[name] = milliseconds(value)
        else:
            raise Refused("INVALID_ARGUMENT")
    if not valid_parameters(changed):
        raise Refused("INVALID_ARGUMENT")
    state.parameters = changed
    return {}


COMMANDS: dict[str, Callable[[State, Row], Row]] = {
    "create_collections": oracle_create.create,
    "alter_table_desc": oracle_alter.alter,
    "set_read_policies": set_policies,
    "drop_collections": drop,
    "undrop_collections": undrop,
    "reconcile": reconcile,
    "update_parameters": update_parameters,
    "acquire_read_holds": oracle_holds.acquire,
    "downgrade_read_holds": oracle_holds.downgrade,
    "release_read_holds": oracle_holds.release,
    "clone_read_holds": oracle_holds.clone,
    "merge_read_holds": oracle_holds.merge,
    "renew_read_holds": oracle_holds.renew,
}

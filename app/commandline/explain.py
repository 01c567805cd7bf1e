"""`holdfast why` in plain sentences."""

from __future__ import annotations

from typing import Any, Final

from app.clock import wall_ms
from app.commandline.times import duration, frontier, is_calendar, moment, relative, span
from app.status import Row, State
from app.why import Graph, Reason, Why, wanted

SHOWN: Final = 10
"""Reasons that are told in full; `--all` tells all."""


def policy_words(policy: Row) -> str:
    """What a policy promises."""
    match policy:
        case {"kind": "no_policy"}:
            return "none was set, so that nothing is given up"
        case {"kind": "valid_from", "frontier": value}:
            return f"everything from {frontier(value)} on"
        case {"kind": "lag_writes_by", "lag": lag, "granularity": step} if step > 1:
            return f"the last {duration(lag)} before its upper, in steps of {duration(min(lag, step) or step)}"
        case {"kind": "lag_writes_by", "lag": lag}:
            return f"the last {duration(lag)} before its upper"
        case {"kind": "step_back"}:
            return "the latest complete time only"
        case {"kind": "multiple", "policies": policies}:
            return f"all that any of these needs: {'; '.join(policy_words(each) for each in policies)}"
    return str(policy)


def explain(id: str, state: State, *, everything: bool = False) -> str:
    """The whole answer, ready to print."""
    graph = Graph(state)
    why = graph.why(id)
    speaker = _Speaker(graph, why, shown=None if everything else SHOWN)
    parts: list[str | None] = [speaker.frontiers(), speaker.own_policy(), *speaker.culprits(), speaker.outlook()]
    shard = state.shards.get(why.row["shard"])
    if shard is not None:
        parts.append(speaker.shard(shard))
    if why.is_torn:
        parts.append("The tables changed while they were read, so this may not fit together: run it again.")
    return "\n".join(part for part in parts if part is not None)


class _Speaker:
    def __init__(self, graph: Graph, why: Why, *, shown: int | None) -> None:
        self._graph = graph
        self._why = why
        self._row = why.row
        self._id = why.row["id"]
        self._shown = shown
        self._now = wall_ms()

    def _time(self, value: int | None) -> str:
        return frontier(value, self._row["timeline"])

    def frontiers(self) -> str:
        since, upper = self._row["read_frontier"], self._row["write_frontier"]
        exact = f" ({since})" if is_calendar(since, self._row["timeline"]) else ""
        first = f"{self._id} is readable from {self._time(since)}{exact} on: that is its since."
        if self._row["dropped"]:
            first = f"{self._id} was dropped, but its data is still kept from {self._time(since)}{exact} on."
        if upper is None:
            return f"{first} It is closed: its upper is []."
        if upper == 0:
            return f"{first} Nothing was written yet: its upper is 0."
        if since is not None and upper <= since:
            return f"{first} It is written up to {self._time(upper)}, so that there is nothing to read yet."
        history = span(upper - (since or 0), self._row)
        return f"{first} It is written up to {self._time(upper)}: {history} of history."

    def own_policy(self) -> str:
        row, implied = self._row, self._row["implied_capability"]
        if row["dropped"]:
            return "It has no say in this any more: whoever still needs it decides."
        if row["read_policy"]["kind"] == "no_policy":
            words = f"It has no policy, and so keeps everything from {self._time(implied)} on"
        else:
            words = f"Its policy keeps {policy_words(row['read_policy'])}"
        if self._why.policy_is_reason:
            text = f"{words}: that is where it is now."
            if row["read_policy"]["kind"] == "no_policy":
                text += f" To change that: {_remedy(self._id)}."
        else:
            further = span(implied - row["read_frontier"], row)
            text = f"{words}, and would let it go to {self._time(implied)}, {further} further."
        asked = wanted(row)
        if asked is not None and asked < implied:
            text += f" (The policy asks for history from {self._time(asked)} on, but a since never moves back.)"
        return text

    def culprits(self) -> list[str]:
        reasons = self._why.held_back_by
        if not reasons:
            return ["Nobody else keeps it there."]
        if self._why.policy_is_reason:
            head = f"With another policy, {_counted(reasons)} would still keep it at {self._time(reasons[0].time)}:"
        else:
            head = f"It is held back by {_counted(reasons)}:"
        lines = ["", head]
        for number, reason in enumerate(reasons[: self._shown], start=1):
            first, *others = self._tell(reason)
            lines.append(f"  {number}. {first}")
            lines += [f"     {other}" for other in others if other]
        if self._shown is not None and len(reasons) > self._shown:
            lines.append(f"  … and {len(reasons) - self._shown} more; --all shows them.")
        lines.append("")
        return lines

    def _tell(self, reason: Reason) -> list[str]:
        row = self._graph.collections[reason.collection]
        if reason.hold is None:
            told = self._tell_policy(reason, row)
        elif reason.is_undrop_window:
            told = self._tell_undrop_window(reason, reason.hold)
        else:
            told = self._tell_hold(reason, reason.hold)
        return [told[0], self._path(reason), *told[1:]]

    def _tell_hold(self, reason: Reason, hold: Row) -> list[str]:
        purpose = f", for: {hold['purpose']}" if hold["purpose"] else ""
        age = f"Acquired {relative(hold['acquired_at'], self._now)} ({moment(hold['acquired_at'])})"
        ends_at = hold["lease_expires_at"]
        if ends_at is None:
            lease = "it has no lease and stays until it is released"
        elif ends_at > self._now:
            lease = (
                f"its lease of {duration(hold['lease_ms'])} ends {relative(ends_at, self._now)} unless it is renewed"
            )
        else:
            lease = f"its lease ended {relative(ends_at, self._now)}; a running controller releases it shortly"
        pin = f" It also pins files, from version {hold['pinned_version']} on." if hold["pin_files"] else ""
        return [
            f"The hold {hold['hold']} of {hold['holder']!r} on {reason.collection}, "
            f"at {self._time(hold['since'])}{purpose}",
            f"{age}; {lease}.{pin}",
            f"To let go: holdfast hold release {hold['hold']}",
        ]

    def _tell_undrop_window(self, reason: Reason, hold: Row) -> list[str]:
        return [
            f"The undrop window of {reason.collection}, which ends {relative(hold['lease_expires_at'], self._now)} "
            f"({moment(hold['lease_expires_at'])})",
            f"Until then it can be brought back: holdfast undrop {reason.collection}",
        ]

    def _tell_policy(self, reason: Reason, row: Row) -> list[str]:
        policy, upper, id = row["read_policy"], row["write_frontier"], row["id"]
        if policy["kind"] == "no_policy":
            return [
                f"{id}, which has no policy, and so keeps everything from {self._time(reason.time)} on",
                f"To let go: {_remedy(id)}, or drop it",
            ]
        head = f"{id}, whose policy keeps {policy_words(policy)}: that is from {self._time(reason.time)} on"
        if policy["kind"] == "valid_from":
            return [head]
        if upper is None:
            return [head, f"{id} is closed, so that its upper moves no more, and neither does its since."]
        ours = self._row["write_frontier"]
        late = ours is None or upper < ours
        if late and ours is not None:
            behind = span(ours - upper, self._row)
            return [head, f"Its upper is {self._time(upper)}, {behind} behind that of {self._id}: is its writer late?"]
        return [head, f"Its upper is {self._time(upper)}; its since follows when that moves on."]

    def _path(self, reason: Reason) -> str:
        steps = [
            _edge(self._graph.collections[dependent], dependency)
            for dependency, dependent in zip(reason.path, reason.path[1:], strict=False)
        ]
        return f"{'; '.join(reversed(steps))}." if steps else ""

    def outlook(self) -> str | None:
        if self._why.policy_is_reason:  # it goes where its policy lets it, and that is not for us to guess
            return None
        what = "If all of these let go" if len(self._why.reasons) > 1 else "Without this"
        if not self._why.next_reasons:
            return f"{what}, nothing would keep its data any more, and it would be deleted."
        keeper = self._keeper(self._why.next_reasons[0])
        return f"{what}, its since would move to {self._time(self._why.next_since)}, where {keeper} would keep it."

    def _keeper(self, reason: Reason) -> str:
        if reason.hold is not None:
            what = "the undrop window" if reason.is_undrop_window else f"the hold of {reason.hold['holder']!r}"
            return what if reason.collection == self._id else f"{what} on {reason.collection}"
        return "its own policy" if reason.is_own_policy else f"the policy of {reason.collection}"

    def shard(self, shard: Row) -> str:
        since, shared = shard["since"], shard["owner"] != self._id
        whose = f"the shard {shard['shard']}, which {shard['owner']} owns" if shared else f"its shard {shard['shard']}"
        text = f"On disk: {whose}, {shard['format']} at {shard['location']}, since {self._time(since)}"
        if not shared and since != self._row["read_frontier"]:
            return f"{text}; it follows with the next downgrade (`since_downgrade_interval`)."
        return f"{text}."


def short(reason: Reason, row: Row, asked: str) -> str:
    """A reason in a few words, for a cell of a table. `row` is that of the collection that it is about."""
    if reason.hold is None:
        words = "no policy" if row["read_policy"]["kind"] == "no_policy" else "policy"
    else:
        words = "undrop window" if reason.is_undrop_window else f"hold of {reason.hold['holder']!r}"
    return words if reason.collection == asked else f"{reason.collection}: {words}"


def _remedy(id: str) -> str:
    return f"holdfast policy {id} --lag 1d, or --step-back"


def _counted(reasons: tuple[Reason, ...]) -> str:
    """`a hold`, `3 holds and the policies of 2 dependents`."""
    holds = sum(1 for reason in reasons if reason.hold is not None)
    policies = len(reasons) - holds
    parts = []
    if holds:
        parts.append("a hold" if holds == 1 else f"{holds} holds")
    if policies:
        parts.append("a dependent" if policies == 1 else f"{policies} dependents")
    return " and ".join(parts)


def _edge(dependent: dict[str, Any], dependency: str) -> str:
    """Why the one depends on the other."""
    id, source = dependent["id"], dependent["description"]["data_source"]
    match source:
        case _ if dependent["primary"] == dependency:
            return f"{id} reads the shard of {dependency}, its primary"
        case {"kind": "table", "txns": txns} if txns == dependency:
            return f"{id} is written through {dependency}"
        case {"kind": "sink"}:
            return f"{id} is a sink of {dependency}"
        case {"kind": "ingestion" | "ingestion_export"}:
            return f"{id} gets its times from {dependency}"
    return f"{id} is computed from {dependency}"

"""What is printed: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from app.client_errors import refusal
from app.commandline.times import frontier, readable

Reply = dict[str, Any]

OK, REFUSED, USAGE, UNREACHABLE = 0, 1, 2, 5


def print_json(value: Any, *, pretty: bool = True) -> None:
    print(json.dumps(value, indent=2 if pretty else None, ensure_ascii=False))


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> None:
    """Columns as wide as they need to be; those in `right` are aligned to the right."""
    lines = [list(headings), *(list(row) for row in rows)]
    widths = [max(len(line[number]) for line in lines) for number in range(len(headings))]
    to_right = set(right)
    for line in lines:
        cells = [
            cell.rjust(width) if number in to_right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def complain(message: str) -> None:
    print(f"holdfast: {readable(message)}", file=sys.stderr)


def print_reply(reply: Reply, *, as_json: bool, done: str) -> int:
    """A reply as on Kafka, or in words. Returns the exit code."""
    ok = reply.get("status") == "ok"
    if as_json:
        print_json(reply, pretty=False)
    elif not ok:
        complain(str(refusal(reply.get("error", {}))))
    else:
        _print_result(reply, done)
    return OK if ok else REFUSED


def _print_result(reply: Reply, done: str) -> None:
    result = reply.get("result") or {}
    print(f"{done} (seq {reply.get('seq')})")
    holds = result.get("holds")
    if holds:
        print_table(
            ("HOLD", "COLLECTION", "SINCE"),
            (
                (hold["hold"], hold["collection"], "released" if hold["since"] is None else frontier(hold["since"]))
                for hold in holds
            ),
        )
    for name in ("extra", "missing"):
        if name in result:
            print(f"{name}: {', '.join(result[name]) or '-'}")

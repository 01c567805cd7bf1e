"""What people read: milliseconds have their meaning beside them, and one thing is not called several."""

from __future__ import annotations

import pytest

from app.commandline.output import complain, counted
from app.commandline.times import readable


@pytest.mark.parametrize(
    ("said", "read"),
    [
        (
            "'orders' can be held from 1795000000000 on.",
            "'orders' can be held from 1795000000000 (2026-11-18T11:06:40Z) on.",
        ),
        ("It is at 1795000000123.", "It is at 1795000000123 (2026-11-18T11:06:40.123Z)."),
        (
            "The command was sent 7200000 ms ago; the oldest taken now is 3600000 ms old.",
            "The command was sent 7200000 ms (2h) ago; the oldest taken now is 3600000 ms (1h) old.",
        ),
        ("The lease is 90061000 ms; the limit is 500 ms.", "The lease is 90061000 ms (1d 1h); the limit is 500 ms."),
        # Neither times that someone counts, nor what is a part of a name.
        ("It is at 17, and its upper is 42.", "It is at 17, and its upper is 42."),
        ("There is no hold 'a-1795000000000/orders'.", "There is no hold 'a-1795000000000/orders'."),
        ("There is no hold '1795000000000'.", "There is no hold '1795000000000'."),
        ("See /warehouse/1795000000000.", "See /warehouse/1795000000000."),
    ],
)
def test_times_in_a_refusal_are_readable(said: str, read: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert readable(said) == read
    complain(said)
    assert capsys.readouterr().err == f"holdfast: {read}\n"


def test_one_thing_is_not_several() -> None:
    assert [counted(number, "hold") for number in (0, 1, 2)] == ["0 holds", "1 hold", "2 holds"]

"""How a batch of large records is divided; what is collected is in tests/e2e/test_commands.py."""

from __future__ import annotations

from typing import Any

import pytest

from app.streams.collecting import parted


@pytest.mark.parametrize(
    ("sizes", "runs"),
    [
        ([], [[]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([10, 10, 1], [[10], [10], [1]]),
        ([4, 6, 1, 9, 1], [[4, 6], [1, 9], [1]]),
        ([25, 0, 1], [[25], [0, 1]]),
        ([0, 25, 1], [[0, 25], [1]]),
    ],
)
def test_no_part_is_larger_than_allowed_unless_it_is_one_record(sizes: list[Any], runs: list[list[int]]) -> None:
    assert list(parted(sizes, sizes, 10)) == runs

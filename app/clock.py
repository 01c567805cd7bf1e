"""The controller's clock: begins at the time of day, and then only counts.

Leases are measured on it, so a time of day that is set back or forward while we run must not move it. It never shows
less than what the journal has seen, and it goes on while the machine sleeps.
"""

from __future__ import annotations

import time


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


def steady_ms() -> int:
    """Milliseconds since some moment, counting those in which the machine was suspended."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return int(time.clock_gettime(clock) * 1000)


class Clock:
    def __init__(self) -> None:
        self._start = wall_ms()
        self._steady_start = steady_ms()

    def never_below(self, moment: int) -> None:
        """What someone else's clock has shown may be ahead of ours."""
        self._start += max(0, moment - self.now())

    def now(self) -> int:
        return self._start + steady_ms() - self._steady_start

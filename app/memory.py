"""The controller's memory: one lock around it, and whether it may be used.

Whatever goes wrong before an entry is known to be written leaves memory ahead of the truth, or may. From then on nobody
may use it, in whatever thread, until the truth was read back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Stopping(Exception):
    """Not a failure: the controller takes no more batches."""


class MemoryInDoubt(Exception):
    """Memory is ahead of the journal, or may be: nothing is done until it was read back.

    Its cause is what left it so. That may have been in another thread, and this one is the first to be heard.
    """


class Memory:
    """`lock` is for what does not depend on it: the journal, the clock, and reading it anew."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_closed = False
        self._doubt: BaseException | None = None

    @contextmanager
    def used(self) -> Iterator[None]:
        with self.lock:
            if self.is_closed:
                raise Stopping
            if self._doubt is not None:
                text = "An entry failed; the state has to be read back before anything else."
                raise MemoryInDoubt(text) from self._doubt
            yield

    @contextmanager
    def changed(self) -> Iterator[None]:
        """What is raised in the block leaves it in doubt."""
        with self.used():
            try:
                yield
            except BaseException as error:
                self._doubt = error
                raise

    def was_read_back(self) -> None:
        self._doubt = None

    def close(self) -> None:
        """The change in hand is finished; there is no other."""
        with self.lock:
            self.is_closed = True

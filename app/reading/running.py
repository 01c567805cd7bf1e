"""A read under way, as an iterator that does not look complete when it is not."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Any, TypeVar

from app.client_wire import not_waiting

T = TypeVar("T")
_Self = TypeVar("_Self", bound="Run[Any]")


class Run(Iterator[T]):
    """What a generator gives after its first value. That starts it: only what was started can be ended.

    An error ends a generator, which then says that there is nothing more: a part would look like the whole. So whoever
    asks again gets the same error again. What the read holds is let go at its end, by `close` or `with`, or when it is
    forgotten.
    """

    def __init__(self, run: Generator[Any, None, None]) -> None:
        self._run = run
        self._failure: BaseException | None = None
        self._first = next(run)

    def __next__(self) -> T:
        if self._failure is not None:
            raise self._failure
        try:
            value: T = next(self._run)
        except StopIteration:
            raise
        except BaseException as error:
            if inspect.getgeneratorstate(self._run) == inspect.GEN_CLOSED:  # else another thread is waiting in it
                self._failure = error
            raise
        return value

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._run.close()

    def __del__(self) -> None:
        with not_waiting():
            self._run.close()

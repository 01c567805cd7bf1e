"""The subcommands that take raw JSON lines: `send` to a controller, `simulate` in memory."""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from app.client import Holdfast
from app.client_errors import HoldfastError, NotAnswering
from app.client_wire import Pending
from app.commandline.output import OK, REFUSED, UNREACHABLE, complain
from app.commandline.settings import Settings, UsageError
from app.protocol import decode
from app.simulate import Simulator

_UNDER_WAY: Final = 5_000
"""Lines that may wait for their replies; reading goes on when there are fewer."""


def simulate(options: argparse.Namespace) -> int:
    simulator = Simulator()
    with _lines(options.file) as lines:
        for line in lines:
            sys.stdout.buffer.write(simulator.line(line.rstrip(b"\r\n")) + b"\n")
            sys.stdout.buffer.flush()  # who types lines by hand wants each answer at once
    return OK


def send(options: argparse.Namespace, settings: Settings) -> int:
    """Each line is one record, sent as it is; one line is printed for each, in their order, as soon as it is there."""
    with settings.connect() as client, _lines(options.file) as lines:
        printer = _Printer(settings)
        try:
            for line in lines:
                raw = line.rstrip(b"\r\n")
                if raw:
                    printer.expect(client, raw)
                if printer.stopped:
                    break
        finally:
            printer.finish()
    return printer.code


class _Printer:
    """Prints replies in the order of their lines, in a thread of its own, so that lines can be read meanwhile."""

    def __init__(self, settings: Settings) -> None:
        self.code = OK
        self.stopped = False
        self._settings = settings
        self._queue: queue.Queue[tuple[str | None, Pending] | None] = queue.Queue(_UNDER_WAY)
        self._thread = threading.Thread(target=self._run, name="holdfast-printer", daemon=True)
        self._thread.start()

    def expect(self, client: Holdfast, raw: bytes) -> None:
        command_id = decode(raw).id
        self._queue.put((command_id, client.submit(command_id, raw)))

    def finish(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self.stopped:
                continue  # only to let go of whoever waits to put something in
            try:
                line = self._answer(*item)
            except HoldfastError as error:
                self.stopped, self.code = True, UNREACHABLE if isinstance(error, NotAnswering) else REFUSED
                complain(str(error))
            else:
                if line.get("status") == "error":
                    self.code = REFUSED
                self._print(line)

    def _print(self, line: dict[str, Any]) -> None:
        try:
            print(json.dumps(line, ensure_ascii=False, separators=(",", ":")), flush=True)
        except BrokenPipeError:  # whoever read has seen enough; what is under way is under way
            self.stopped = True

    def _answer(self, command_id: str | None, pending: Pending) -> dict[str, Any]:
        timeout_s = self._settings.timeout_s
        if command_id is not None:
            try:
                return pending.reply.result(timeout_s)
            except NotYet:
                raise NotAnswering(
                    f"No controller answered the command {command_id!r} within {timeout_s:g} s, and nothing more was "
                    "sent. What was sent may still be applied.",
                    {"sent": True},
                ) from None
        pending.taken.wait(timeout_s)
        if pending.position is None:
            raise NotAnswering(f"Kafka did not take a line within {timeout_s:g} s ({pending.problem}).")
        return {
            "status": "sent",
            "partition": pending.position.partition,
            "offset": pending.position.offset,
            "message": "It has no id by which its reply could be told; the row of `commands` with this offset has it.",
        }


@contextmanager
def _lines(file: Path | None) -> Iterator[BinaryIO]:
    if file is None or str(file) == "-":
        yield sys.stdin.buffer
        return
    try:
        stream = file.open("rb")
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    with stream:
        yield stream

"""The command line: `holdfast`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from app.simulate import Simulator

_SIMULATE_HELP: Final = """\
Reads JSON lines, one command or control line each, runs them in memory and prints one JSON line for each.
Nothing is stored and nothing is needed: no Kafka, no Spark. Commands are those of docs/commands.md, answered exactly as
on Kafka. Control lines stand for what happens around them:

  {"type":"upper","collection":"orders","upper":100}   its data is complete up to 100 (null: for ever)
  {"type":"clock","now":60000}                         the time is now 60000 ms; leases and windows pass
  {"type":"restart"}                                   a new controller takes over
  {"type":"downgrades"}                                does the since downgrades that are due
  {"type":"finalize","fail":["orders"]}                one round of finalization, in which these fail
  {"type":"dump"}                                      the rows of the tables
"""
_SIMULATE_EXAMPLES: Final = """\
examples:
  holdfast simulate commands.jsonl
  echo '{"type":"reconcile","id":"r1","collections":["orders"]}' | holdfast simulate
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="holdfast", description="Read holds, retention policies and safe drops for Delta Lake."
    )
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    simulate = subcommands.add_parser(
        "simulate",
        help="try out commands in memory",
        description=_SIMULATE_HELP,
        epilog=_SIMULATE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    simulate.add_argument("file", nargs="?", type=Path, help="the lines to run; standard input if left out")
    return parser


def _simulate(file: Path | None) -> int:
    simulator = Simulator()
    with ExitStack() as stack:
        try:
            lines = sys.stdin.buffer if file is None else stack.enter_context(file.open("rb"))
        except OSError as error:
            print(f"holdfast: cannot read {file}: {error.strerror}", file=sys.stderr)
            return 2
        for line in lines:
            sys.stdout.buffer.write(simulator.line(line.rstrip(b"\r\n")) + b"\n")
            sys.stdout.buffer.flush()  # who types lines by hand wants each answer at once
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return _simulate(options.file)
    except BrokenPipeError:  # whoever read our output has seen enough, as `head` does
        sys.stderr.close()  # or Python would complain about the pipe once more on its way out
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

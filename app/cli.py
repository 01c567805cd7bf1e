"""The command line: `holdfast`. What can be typed is in app/commandline; here is what becomes of failures."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from app.client_errors import HoldfastError, NotAnswering
from app.commandline import raw
from app.commandline.arguments import parser
from app.commandline.output import REFUSED, UNREACHABLE, USAGE, complain, print_json
from app.commandline.settings import Settings, UsageError, settings_of
from app.status import StateMissing, TablesBehind


def _run(options: argparse.Namespace) -> int:
    if options.run is raw.simulate:  # needs nothing, so nothing can be wrong with it
        done: int = raw.simulate(options)
        return done
    settings = settings_of(options)
    try:
        code: int = options.run(options, settings)
    except HoldfastError as error:
        return _failed(settings.explained(error) if isinstance(error, NotAnswering) else error, settings)
    return code


def _failed(error: HoldfastError, settings: Settings) -> int:
    if settings.json:
        print_json(
            {"status": "error", "error": {"code": error.code, "message": error.message, **error.details}}, pretty=False
        )
    complain(error.message)
    if isinstance(error, NotAnswering | TablesBehind):
        return UNREACHABLE
    return USAGE if isinstance(error, StateMissing) else REFUSED


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    # kafka-python tells of every attempt to connect; we say in one sentence what came of them.
    logging.getLogger("kafka").setLevel(logging.CRITICAL + 1)
    try:
        return _run(options)
    except UsageError as error:
        complain(str(error))
        return USAGE
    except BrokenPipeError:  # whoever read our output has seen enough, as `head` does
        sys.stderr.close()  # or Python would complain about the pipe once more on its way out
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

"""Named places where a test can stop the process as if it had been killed, or freeze it.

`HOLDFAST_FAILPOINT=after_entry` kills the process with SIGKILL when it comes to that place, `after_entry:stop` freezes
it with SIGSTOP, once. `after_entry@3` waits for the third time. Without the variable nothing happens.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections import Counter
from typing import Final

VARIABLE: Final = "HOLDFAST_FAILPOINT"
_SPEC: Final = re.compile(r"(?P<name>[a-z_]+)(?:@(?P<time>\d+))?(?P<stop>:stop)?")
_reached: Counter[str] = Counter()


def reach(name: str) -> None:
    spec = os.environ.get(VARIABLE)
    if not spec or not (match := _SPEC.fullmatch(spec)) or match["name"] != name:
        return
    _reached[name] += 1
    if _reached[name] != int(match["time"] or 1):
        return
    print(f"fail point {name}", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSTOP if match["stop"] else signal.SIGKILL)

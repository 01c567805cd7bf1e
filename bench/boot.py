"""How long a controller takes to boot, against the size of its state.

Run: .venv/bin/python -m bench.boot [--collections N ...]

As many holds as collections, one on each; every collection has a shard of its own. Each boot is that of a new process,
from its first look at the root to the entry that raises its epoch; starting Python is not counted. "tables" is a boot
after a stop; "journal" is one after a crash before any table was written, so that all of the state is in the journal.
The aim is 30 s with 100,000 collections.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

from app.clock import wall_ms
from app.config import Config, StreamsConfig
from app.controller import Controller
from app.records import Record, Topic

TOPIC = Topic("bench.commands", "bench")
AT_ONCE = 10_000


def config_of(place: Path) -> Config:
    return Config(
        root=str(place / "root"),
        warehouse=[str(place / "warehouse")],
        streams=StreamsConfig(checkpoints=str(place / "checkpoints")),
    )


def fill(place: Path, collections: int, *, held: bool = True, shared: bool = False, tables: bool = True) -> None:
    """Commands as they come from Kafka, but not through it. Without `tables` it ends as if it had crashed."""
    controller = Controller(config_of(place))
    controller.boot()
    if not tables:
        controller._writer.submit = lambda *_: None  # type: ignore[method-assign]
    offsets = count()
    ids = [f"collection{number}" for number in range(collections)]
    # The first goes alone: the others may be stored on its shard.
    for chunk in [ids[:1], *(ids[first : first + AT_ONCE] for first in range(1, collections, AT_ONCE))]:
        primary = ids[0] if shared and chunk[0] != ids[0] else None
        created = [{"id": id, "data_source": {"kind": "webhook"}, "primary": primary} for id in chunk]
        apply(controller, next(offsets), type="create_collections", collections=created)
        if held:
            apply(controller, next(offsets), type="acquire_read_holds", collections=chunk, holder="bench", lease="1h")
    controller.close()


def apply(controller: Controller, offset: int, **command: object) -> None:
    record = Record(0, offset, wall_ms(), json.dumps({"id": f"fill{offset}", **command}).encode())
    (reply,) = controller.apply(TOPIC, [record])
    if b'"status":"ok"' not in reply.value:
        raise SystemExit(f"refused: {reply.value[:500]!r}")


def boot(place: Path) -> None:
    """In a process of its own."""
    started = time.perf_counter()
    controller = Controller(config_of(place))
    controller.boot()
    print(time.perf_counter() - started)
    controller.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collections", type=int, nargs="+", default=[1_000, 100_000])
    parser.add_argument("--boot", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    if arguments.boot is not None:
        boot(arguments.boot)
        return
    for collections in arguments.collections:
        for name in ("tables", "journal"):
            with tempfile.TemporaryDirectory() as place:
                fill(Path(place), collections, tables=name == "tables")
                command = [sys.executable, "-m", "bench.boot", "--boot", place]
                seconds = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(
                f"{collections:7,} collections, {collections:7,} holds, from the {name:7}: {seconds:6.2f} s", flush=True
            )


if __name__ == "__main__":
    main()

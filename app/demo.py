"""`./spark-submit.sh demo`: a controller with its own broker on a temporary root, and the story that it is told.

Everything is real: commands go over Kafka, through Spark, into the journal; data is written to Delta tables and read
from them with Spark; and what is printed is read from the tables.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from app.broker import BrokerFailed
from app.client import Holdfast
from app.client_errors import HoldfastError
from app.config import Config, StreamsConfig
from app.core.duration import Duration
from app.demo_lake import Lake, Unexpected
from app.demo_story import Story
from app.jars import JarsMissing
from app.java import QUICK_START, JavaMissing
from app.service import EXIT_GAVE_UP, EXIT_OK, Service, broker
from app.spark import LOGS, SparkFailed, session, stop

log = logging.getLogger(__name__)

EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130
READY_LIMIT_S: Final = 120.0
STOP_LIMIT_S: Final = 60.0
REPLY_LIMIT_S: Final = 90.0
"""Spark's first batch can take half a minute on a busy machine."""


class NotStarted(Exception):
    """The controller did not come up; with the exit code that says why."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


_FAILURES: Final = (
    JavaMissing,
    JarsMissing,
    SparkFailed,
    BrokerFailed,
    NotStarted,
    HoldfastError,
    Unexpected,
    OSError,
)


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(
        prog="./spark-submit.sh demo",
        description="Shows what holds, policies and drops do, with a controller of its own on a temporary root.",
    ).parse_args(arguments)
    log_file = _log_to_file()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end it the same way: tidily
    began = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    try:
        _play(root)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except _FAILURES as error:
        log.exception("the demo failed")
        print(f"\nholdfast: The demo could not go on: {error}\nThe whole log is {log_file}.", file=sys.stderr)
        return error.code if isinstance(error, NotStarted) else EXIT_FAILED
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(f"It took {time.monotonic() - began:.0f} s in all, and {root} is removed.")
    return EXIT_OK


def _play(root: Path) -> None:
    print(f"Starting Kafka, Spark and a controller, with everything under {root}; half a minute ...", flush=True)
    config = Config(
        root=str(root),
        warehouse=[str(root / "warehouse")],
        streams=StreamsConfig(checkpoints=str(root / "checkpoints"), heartbeat=Duration(500)),
        # In real life history goes at its leisure; here someone is waiting for it.
        parameters={"since_downgrade_interval": 500, "vacuum_grace": 0},
    )
    with broker(config) as bootstrap_servers:
        spark = session(
            "holdfast demo", master="local[2]", extra={"spark.driver.extraJavaOptions": " ".join(QUICK_START)}
        )
        try:
            service = Service(config, spark, bootstrap_servers)
            with _running(service), Holdfast(bootstrap_servers, root=config.root, timeout=REPLY_LIMIT_S) as client:
                Story(client, Lake(spark, client, config.root)).tell()
        finally:
            stop(spark)


@contextmanager
def _running(service: Service) -> Iterator[None]:
    """The service in a thread of its own, from when it takes commands until it has ended."""
    ready, codes = threading.Event(), list[int]()
    thread = threading.Thread(
        target=lambda: codes.append(service.run(on_ready=ready.set)), name="controller", daemon=True
    )
    thread.start()
    try:
        deadline = time.monotonic() + READY_LIMIT_S
        while not ready.wait(0.1):
            if not thread.is_alive():
                raise NotStarted("The controller stopped while it was starting.", codes[0] if codes else EXIT_FAILED)
            if time.monotonic() > deadline:
                raise NotStarted(f"The controller was not ready after {READY_LIMIT_S:.0f} s.", EXIT_GAVE_UP)
        yield
    finally:
        service.stop()
        thread.join(STOP_LIMIT_S)


def _log_to_file() -> Path:
    """The console is for the story; what the controller logs goes beside Spark's log."""
    LOGS.mkdir(parents=True, exist_ok=True)
    file = LOGS / "demo.log"
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)-7s %(message)s", filename=file, filemode="w", force=True
    )
    for noisy in ("kafka", "py4j"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    return file

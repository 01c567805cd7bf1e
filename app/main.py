"""What `./spark-submit.sh` runs: reads the arguments, says what is running where, and hands over to the service."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from deltalake.exceptions import DeltaError

from app.broker import BrokerFailed
from app.clock import wall_ms
from app.config import Config, ConfigError, load_config
from app.core.errors import BrokenInvariant, Corrupt
from app.follower import Follower, StateGone
from app.jars import JarsMissing
from app.java import JavaMissing
from app.kafka import KafkaOptionError, addresses, client_options, java_options
from app.metrics import Metrics, PortTaken, StateMetrics
from app.service import EXIT_BROKEN, EXIT_GAVE_UP, EXIT_OK, EXIT_USAGE, Service, broker, handle_signals
from app.spark import SparkFailed, session, stop
from app.state.errors import NewerFormat, StateMissing

log = logging.getLogger(__name__)

_USAGE: Final = (
    ConfigError,
    KafkaOptionError,
    JavaMissing,
    JarsMissing,
    SparkFailed,
    BrokerFailed,
    StateMissing,
    NewerFormat,
    PortTaken,
)
DEFAULT_CONFIG: Final = Path("conf/local.yaml")
_EXAMPLES: Final = """\
examples:
  ./spark-submit.sh                                            everything on this machine, state under .holdfast/
  ./spark-submit.sh demo                                       shows the whole life of a collection
  ./spark-submit.sh --config conf/cluster.yaml                 your Kafka, your object store
  ./spark-submit.sh --once                                     applies what is on the topic, then stops
  MASTER=spark://host:7077 ./spark-submit.sh --config conf/cluster.yaml

exit codes: 0 stopped as asked, 2 usage or configuration, 3 another controller took over,
            4 a broken invariant, 5 storage or Kafka gone for longer than `give_up_after`, or Spark's JVM ended
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    _log_to_console()
    try:
        config = load_config(options.config)
        return _follow(config) if options.read_only else _serve(config, once=options.once)
    except _USAGE as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (DeltaError, OSError) as error:  # while the service runs, it tries again until it gives up
        log.error("gave up, storage could not be used: %s: %s", type(error).__name__, error)
        log.debug("where that was", exc_info=True)
        return EXIT_GAVE_UP
    except (BrokenInvariant, Corrupt) as error:
        log.critical("the state cannot be taken up; nothing was touched: %s", error)
        return EXIT_BROKEN


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./spark-submit.sh",
        description="Runs the Holdfast controller: read holds, retention policies and safe drops for Delta Lake.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        default=DEFAULT_CONFIG,
        help="the configuration (conf/local.yaml)",
    )
    parser.add_argument("--once", action="store_true", help="apply what is on the command topic now, then stop")
    parser.add_argument("--read-only", action="store_true", help="follow the journal; run no query, write nothing")
    return parser


def _log_to_console() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(message)s", stream=sys.stderr)
    for noisy in ("kafka", "py4j"):  # what they have to say comes as an exception too, and then once
        logging.getLogger(noisy).setLevel(logging.CRITICAL)


def _serve(config: Config, *, once: bool) -> int:
    _check_kafka(config)
    with broker(config) as bootstrap_servers:
        spark = session("holdfast", master=None, extra={name: str(value) for name, value in config.spark.items()})
        try:
            service = Service(config, spark, bootstrap_servers)
            handle_signals(service)
            with service.controller.metrics.serving(config.metrics.port) as port:
                return service.run(once=once, on_ready=lambda: _welcome(config, bootstrap_servers, service, port))
        finally:
            stop(spark)


def _check_kafka(config: Config) -> None:
    """Before anything is started: what is wrong with these settings does not pass by trying again."""
    client_options(config.kafka.options)
    java_options(config.kafka.options)
    if not config.embedded:
        addresses(config.kafka.bootstrap_servers)


def _welcome(config: Config, bootstrap_servers: str, service: Service, metrics_port: int) -> None:
    print(
        f"""
Holdfast is running (epoch {service.controller.epoch}).
  commands   {config.kafka.commands_topic} on {bootstrap_servers}{" (embedded broker)" if config.embedded else ""}
  replies    {config.kafka.replies_topic}
  state      {config.state}/{{collections,holds,shards,commands,meta}}, Delta tables
  warehouse  {", ".join(config.warehouse)}
  metrics    http://127.0.0.1:{metrics_port}/metrics

Send a first command from another terminal:
  .venv/bin/holdfast create orders --table --schema 'k STRING, v BIGINT'
  .venv/bin/holdfast status
Stop with Ctrl-C.
""",
        flush=True,
    )


def _follow(config: Config) -> int:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    follower = Follower(config)
    print(
        f"Following the journal at {config.state} from seq {follower.seq}; nothing is written. Stop with Ctrl-C.",
        flush=True,
    )
    metrics = Metrics()
    metrics.registry.register(StateMetrics(lambda question: question(follower.state, wall_ms())))
    try:
        with metrics.serving(config.metrics.port) as port:
            print(f"Metrics: http://127.0.0.1:{port}/metrics", flush=True)
            follower.run(stop)
    except StateGone as error:
        log.error("gave up: %s", error)
        return EXIT_GAVE_UP
    return EXIT_OK

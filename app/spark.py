"""The one way to a SparkSession, with Delta and the Kafka connector in it and its noise kept off the console."""

import logging
import os
import re
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from py4j.java_gateway import JavaGateway
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from app.jars import spark_home, spark_jars
from app.java import java_home
from app.shards.gateway import JVM_ERRORS, first_line

log = logging.getLogger(__name__)

LOGS = Path(".holdfast/logs")
CONF = Path(__file__).resolve().parent.parent / "conf"
LOGGING = CONF / "log4j2.properties"
POOLS = CONF / "scheduler.xml"

SECRETS: Final = r"(?i)secret|password|token|access[.]?key|account[.]?key|private[.]?key|[.]sas[.]"
"""Settings with such names are in no list of processes and no log: Spark's own idea, and the keys of more stores."""

# Settings that are lists: what the user asks for comes in addition to what we need.
LISTS = {"spark.jars": ",", "spark.sql.extensions": ",", "spark.driver.extraJavaOptions": " "}


class SparkFailed(Exception):
    """Spark cannot be started; the message says what it said."""


def session(
    app_name: str, *, master: str | None = None, extra: Mapping[str, str] | None = None, logs: Path = LOGS
) -> SparkSession:
    """A session; there is one JVM per process, so its first call decides what only a new JVM can take.

    Without a master: that of the environment variable MASTER, or the one that spark-submit was given, or this machine.
    """
    logs = logs.resolve()
    logs.mkdir(parents=True, exist_ok=True)
    master = master or os.environ.get("MASTER")
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # spark-submit has started the JVM, and it has started us
    if submitted:
        SparkContext._ensure_initialized()  # so that what spark-submit was told is in the defaults
    conf = SparkConf(loadDefaults=submitted).setAppName(app_name)
    if master is not None:
        conf.setMaster(master)
    conf.setIfMissing("spark.master", "local[*]")
    local = conf.get("spark.master", "").startswith("local")
    for key, value in _settings(local=local, logs=logs).items():
        conf.setIfMissing(key, value)
    if not conf.contains("spark.jars"):
        conf.set("spark.jars", ",".join(map(str, spark_jars())))
    for key, value in (extra or {}).items():
        ours = conf.get(key, "") if key in LISTS else ""
        conf.set(key, f"{ours}{LISTS[key]}{value}" if ours and value else ours or value)
    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        if SparkContext._gateway is None:
            SparkContext._ensure_initialized(gateway=_start(conf, local=local, logs=logs))
        spark = SparkSession.builder.config(conf=conf).getOrCreate()
    except JVM_ERRORS as error:
        raise SparkFailed(
            f"Spark cannot be started with master {conf.get('spark.master')!r}: {first_line(error)} Look at it, "
            f"at `spark` in the configuration, and at what the JVM said, at the end of {logs / 'spark.out'}."
        ) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, on_interrupt)  # Spark has put its own there, which cancels all jobs
    if not local:
        spark.sparkContext.addPyFile(str(_zip_of_app(logs)))
    return spark


def jvm_has_ended() -> bool:
    """Whether the JVM that this process had is gone. It gets no other one: all that there is of Spark belongs to it."""
    gateway = SparkContext._gateway
    if gateway is None:
        return False
    process = getattr(gateway, "proc", None)
    if process is not None:
        return process.poll() is not None
    parameters = gateway.gateway_parameters  # it is our parent, under Spark's own spark-submit
    try:
        socket.create_connection((parameters.address, parameters.port), timeout=1).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def stop(spark: SparkSession) -> None:
    """Whatever goes wrong with that must not hide how we ended: if the JVM is gone, every call into it fails."""
    try:
        spark.stop()
    except Exception as error:  # noqa: BLE001 - see above
        log.warning("Spark did not stop as it should: %s: %s", type(error).__name__, error)


def _zip_of_app(directory: Path) -> Path:
    """What executors need of us; their Python must have our dependencies."""
    package = Path(__file__).resolve().parent
    return Path(shutil.make_archive(str(directory / "app"), "zip", root_dir=package.parent, base_dir=package.name))


def _settings(*, local: bool, logs: Path) -> dict[str, str]:
    options = ["-Xss4m"]  # stopping a query with a Python data source overflowed the default stack, in a regex
    if LOGGING.exists():
        options.append(f'"-Dlog4j2.configurationFile={LOGGING.as_uri()}" "-Dholdfast.logs={logs}"')
    settings = {
        "spark.driver.extraJavaOptions": " ".join(options),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.session.timeZone": "UTC",
        "spark.redaction.regex": SECRETS,
        # Beside Spark's own `url`: keys of object stores are in the options of our source, which plans show.
        "spark.sql.redaction.options.regex": "(?i)url|storage_options",
        "spark.scheduler.mode": "FAIR",  # a merge of a large shard must not keep the next command waiting
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    if POOLS.exists():
        settings["spark.scheduler.allocation.file"] = POOLS.as_uri()
    if local:
        settings |= {
            "spark.driver.host": "127.0.0.1",  # the host's name need not lead to this machine
            "spark.driver.bindAddress": "127.0.0.1",
            # One machine: every partition more is only one more task to start.
            "spark.sql.shuffle.partitions": "2",
            "spark.databricks.delta.snapshotPartitions": "1",
        }
    return settings


def _start(conf: SparkConf, *, local: bool, logs: Path) -> JavaGateway:
    """Starts the JVM, which ends with us: it reads from a pipe that breaks when we are gone.

    It has a session of its own: a signal to our process group is ours to handle, while Spark is still there.
    """
    os.environ["JAVA_HOME"] = str(java_home())
    os.environ["SPARK_HOME"] = str(spark_home())  # of the pyspark that we import, whatever else is installed
    if local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        os.environ["PYSPARK_PYTHON"] = sys.executable
    # `spark.pyspark.python` does not do it: only spark-submit looks at that, and the workers were without pyarrow.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # All that is given here is on the JVM's command line. What is left out gets there with the session.
    public = SparkConf(loadDefaults=False)
    public.setAll([(key, value) for key, value in conf.getAll() if not re.search(SECRETS, key)])
    with (logs / "spark.out").open("ab") as output:
        gateway: JavaGateway = launch_gateway(  # type: ignore[no-untyped-call]  # pyspark has no types here
            public, {"stdout": output, "stderr": output, "start_new_session": True}
        )
        return gateway

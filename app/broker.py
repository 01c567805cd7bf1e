"""The embedded broker: a real Apache Kafka, one node in KRaft mode, on the loopback interface, as a child process.

Its data directory can be used again and again, by one broker at a time. The broker does not outlive us, however we end,
and a Ctrl-C in the terminal does not reach it: we stop it when we are done with it.
"""

import contextlib
import fcntl
import logging
import os
import queue
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from base64 import urlsafe_b64encode
from pathlib import Path
from types import TracebackType
from typing import IO

from app.broker_settings import LOGGING, PROPERTIES
from app.jars import broker_jars
from app.java import QUICK_START, java

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
START_LIMIT_S = 60
STOP_LIMIT_S = 15
LOCK_LIMIT_S = 5
PORT_ATTEMPTS = 5
# Above our own limit of 1 MiB, so that a command that is too large is answered by us, and not by the client's library.
MESSAGE_MAX_BYTES = 8 * 1024 * 1024

# C1 alone and the serial collector: a faster start and less memory, for less throughput at the top.
JVM_OPTIONS = ("-Xmx512m", "-Xms64m", *QUICK_START, "-Djava.awt.headless=true")

# Where the kernel cannot be asked to end the broker with us, a process of its own looks once a second.
WATCH = sys.platform != "linux"
_WATCHDOG = 'while kill -0 "$1" && kill -0 "$2"; do sleep 1; done; kill -9 "$2"'
# Runs before Java, in its process: asks the kernel to kill it when the thread that started it ends, and looks whether
# it has ended already. (Not in `preexec_fn`: Python code between fork and exec can deadlock where there are threads.)
_LAUNCHER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class BrokerFailed(Exception):
    """The embedded broker does not answer; the message has the end of its log."""


class EmbeddedBroker:
    """`start` and `stop` may be repeated; the port stays, so that clients find it again."""

    def __init__(self, data: Path, *, port: int | None = None) -> None:
        self.data = data.resolve()
        self.log_file = self.data / "broker.log"
        self._given_port = port
        self._port: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log_from = 0

    @property
    def bootstrap_servers(self) -> str:
        if self._port is None:
            raise BrokerFailed("The embedded broker has not been started, so it has no address yet.")
        return f"{HOST}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Of the running broker; None if there is none."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def __enter__(self) -> "EmbeddedBroker":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when the broker answers."""
        if self.pid is not None:
            return
        began = time.monotonic()
        classpath = os.pathsep.join(map(str, broker_jars()))
        logs = self.data / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with self._lock() as lock:
            for attempt in range(1, PORT_ATTEMPTS + 1):
                self._port = self._choose_port(anew=attempt > 1)
                self._write_settings(logs)
                if not (logs / "meta.properties").exists():
                    self._format(classpath)
                self._log_from = self.log_file.stat().st_size if self.log_file.exists() else 0
                self._launch([*self._java(classpath), "kafka.Kafka", str(self.data / "server.properties")], lock)
                try:
                    self._wait_until_it_answers(time.monotonic() + START_LIMIT_S)
                    break
                except BrokerFailed:
                    self.kill()
                    # Between choosing a port and using it, someone else may have taken it.
                    if self._given_port or attempt == PORT_ATTEMPTS or "Address already in use" not in self._said():
                        raise
                except BaseException:
                    self.kill()
                    raise
        (self.data / "port").write_text(str(self._port))
        took_s = time.monotonic() - began
        log.info(
            "broker started address=%s pid=%s took_s=%.1f data=%s", self.bootstrap_servers, self.pid, took_s, self.data
        )

    def stop(self) -> None:
        """Lets it close its files; when it takes too long, ends it all the same: Kafka recovers at the next start."""
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            log.warning("broker did not stop in time, killing it pid=%d limit_s=%d", process.pid, STOP_LIMIT_S)
            process.kill()
            process.wait()
        self._process = None

    def kill(self) -> None:
        """Ends it at once, as a power cut would, but for what the operating system still holds."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _lock(self) -> IO[bytes]:
        """Locks the data. The broker inherits the open file, so the lock lasts exactly as long as there is a broker.

        Kafka's own lock comes too late: a second broker has then written to the metadata of the first already.
        """
        lock = (self.data / "lock").open("ab")
        deadline = time.monotonic() + LOCK_LIMIT_S  # one that has just been killed takes a moment to be gone
        while not _try_lock(lock):
            if time.monotonic() > deadline:
                lock.close()
                raise BrokerFailed(
                    f"Another broker is using {self.data}, and only one can. Is another controller with the same root "
                    "running? Stop it, or give this one another root."
                )
            time.sleep(0.05)
        return lock

    def _choose_port(self, *, anew: bool) -> int:
        """The given one; else the one used last with this data, so that clients find it again; else any free one."""
        if self._given_port:
            try:
                return _free_port(self._given_port)
            except OSError as taken:
                raise BrokerFailed(
                    f"Port {self._given_port} for the embedded broker is in use. Choose another, or none at all."
                ) from taken
        if not anew:
            with contextlib.suppress(OSError, ValueError):
                return _free_port(self._port or int((self.data / "port").read_text()))
        return _free_port(0)

    def _write_settings(self, logs: Path) -> None:
        text = PROPERTIES.format(
            host=HOST, port=self._port, controller_port=_free_port(0), logs=logs, message_max_bytes=MESSAGE_MAX_BYTES
        )
        (self.data / "server.properties").write_text(text)
        (self.data / "log4j2.properties").write_text(LOGGING.format(log_file=self.log_file))

    def _java(self, classpath: str) -> list[str]:
        return [java(), *JVM_OPTIONS, f"-Dlog4j2.configurationFile={self.data / 'log4j2.properties'}", "-cp", classpath]

    def _format(self, classpath: str) -> None:
        """Once per data directory: its cluster id is what makes it the same broker after a restart."""
        cluster = urlsafe_b64encode(b"\0" + uuid.uuid4().bytes[1:]).decode().rstrip("=")  # must not begin with a dash
        arguments = ["kafka.tools.StorageTool", "format", "--cluster-id", cluster, "--ignore-formatted"]
        command = [*self._java(classpath), *arguments, "--config", str(self.data / "server.properties")]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = done.stderr or done.stdout
            raise BrokerFailed(f"Kafka could not prepare {self.data} for its data, exit code {done.returncode}: {said}")

    def _launch(self, command: list[str], lock: IO[bytes]) -> None:
        """From a thread of its own that lasts as long as we do: to the kernel, a parent is a thread, not a process."""
        outcome: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()

        def keep() -> None:
            try:
                with (self.data / "broker.out").open("wb") as output:
                    process = _spawn(command, output, lock)
            except OSError as error:
                outcome.put(error)
                return
            outcome.put(process)
            process.wait()

        threading.Thread(target=keep, name="embedded-broker", daemon=True).start()
        result = outcome.get()
        if isinstance(result, OSError):
            raise BrokerFailed(f"Java could not be started for the embedded broker: {result}") from result
        self._process = result

    def _wait_until_it_answers(self, deadline: float) -> None:
        while not self._answers():
            code = self._process.poll() if self._process else None
            if code is not None:
                raise BrokerFailed(f"The embedded broker ended at once, with exit code {code}. {self._log_end()}")
            if time.monotonic() > deadline:
                raise BrokerFailed(f"The embedded broker did not answer within {START_LIMIT_S} s. {self._log_end()}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        """Whether our broker, and not one that has taken our port, answers a request for its metadata.

        An open port is not enough: Kafka opens it before it takes requests.
        """
        body = struct.pack(">hhihi?", 3, 5, 1, -1, 0, False)  # Metadata, version 5, id, no client, no topics, make none
        try:
            with socket.create_connection((HOST, self._port or 0), timeout=2) as connection:
                connection.sendall(struct.pack(">i", len(body)) + body)
                answer = connection.recv(4096)
        except OSError:
            return False
        cluster = re.search(rb"^cluster\.id=(\S+)", (self.data / "logs" / "meta.properties").read_bytes(), re.MULTILINE)
        return cluster is not None and cluster[1] in answer

    def _said(self) -> str:
        """What the broker has written since this start."""
        said = (self.data / "broker.out").read_text(errors="replace")
        if self.log_file.exists():
            with self.log_file.open("rb") as file:
                # A file that is shorter than it was has been rolled over: all of it is of this start.
                file.seek(self._log_from if self._log_from <= self.log_file.stat().st_size else 0)
                said += file.read().decode(errors="replace")
        return said

    def _log_end(self, lines: int = 20) -> str:
        """The end of that, without the stack traces, among which one would not see the reason."""
        told = [line for line in self._said().splitlines() if not line.startswith("\t")]
        return "\n".join([f"The end of {self.log_file}:", *told[-lines:]])


def _try_lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _free_port(wanted: int) -> int:
    """The wanted port if it is free, or any; OSError if it is taken."""
    with socket.socket() as probe:
        # As Kafka does: connections of the broker before us that are still closing do not count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((HOST, wanted))
        port: int = probe.getsockname()[1]
        return port


def _spawn(command: list[str], output: IO[bytes], lock: IO[bytes]) -> subprocess.Popen[bytes]:
    """In a session of its own, so that a Ctrl-C in our terminal is ours alone."""
    us = str(os.getpid())
    if not WATCH:
        command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, us, *command]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        pass_fds=[lock.fileno()],
    )
    if WATCH:
        quiet = subprocess.DEVNULL
        watchdog = ["sh", "-c", _WATCHDOG, "sh", us, str(process.pid)]
        subprocess.Popen(watchdog, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    return process

"""Who tries again and again to reach a broker that does not answer runs out of nothing."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kafka.errors import KafkaError

from app.client import Holdfast
from app.client_errors import NotAnswering
from app.config import KafkaConfig
from app.replies import Replies


@pytest.fixture
def silent() -> Iterator[str]:
    """Where somebody listens, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def ask(servers: str) -> None:
    with Holdfast(servers, timeout=0.2) as client, pytest.raises(NotAnswering, match="does not answer as Kafka"):
        client.reconcile([])


def answer(servers: str) -> None:
    with pytest.raises(KafkaError):
        Replies(KafkaConfig(), servers, connect_s=1, limit_s=1)


@pytest.mark.parametrize("attempt", [ask, answer])
def test_an_attempt_that_fails_leaves_no_thread_and_no_file(silent: str, attempt: Callable[[str], None]) -> None:
    def ours() -> set[threading.Thread | str]:
        """Kafka's threads, and what is open but is no file: so much is not any other test's."""
        threads = {thread for thread in threading.enumerate() if "kafka" in thread.name}
        links = (os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink())
        return threads | {link for link in links if not link.startswith("/")}

    before = ours()
    for _ in range(2):
        attempt(silent)
    assert ours() - before == set()

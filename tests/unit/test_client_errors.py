"""One exception per error code, and clear words when there is nobody to talk to."""

from __future__ import annotations

import pickle
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from app import client, client_errors
from app.client import Holdfast
from app.client_errors import ERRORS, HoldfastError, HoldMissing, NotAnswering, SinceViolation, refusal
from app.core.errors import Code


def test_every_code_has_an_exception_named_after_it_that_programs_can_import() -> None:
    assert list(ERRORS) == [code.value for code in Code]
    for code, error in ERRORS.items():
        assert error.__name__.lower() == code.replace("_", "").lower()
        assert getattr(client, error.__name__) is getattr(client_errors, error.__name__) is error
        assert issubclass(error, HoldfastError)
        assert error.__doc__


def test_a_refusal_carries_its_facts() -> None:
    error = refusal({"code": "SINCE_VIOLATION", "message": "Gone.", "earliest": {"orders": 5}})
    assert isinstance(error, SinceViolation)
    assert (error.code, error.message, error.earliest, error.actual) == (
        "SINCE_VIOLATION",
        "Gone.",
        {"orders": 5},
        None,
    )
    assert str(error) == "SINCE_VIOLATION: Gone."
    missing = refusal({"code": "HOLD_MISSING", "message": "No.", "reason": "lease expired"})
    assert isinstance(missing, HoldMissing)
    assert missing.reason == "lease expired"


def test_a_code_of_a_newer_controller_is_still_told() -> None:
    error = refusal({"code": "NEW_CODE", "message": "Hm."})
    assert type(error) is HoldfastError
    assert "NEW_CODE: Hm." in str(error)


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(refusal({"code": "HOLD_MISSING", "message": "No.", "reason": "released"})))
    assert (type(error), error.message, error.reason) == (HoldMissing, "No.", "released")


@contextmanager
def listener() -> Iterator[int]:
    """Something that listens and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def failure_of(servers: str) -> tuple[HoldfastError, float]:
    begun = time.monotonic()
    with Holdfast(servers, timeout=1) as holdfast, pytest.raises(HoldfastError) as failed:
        holdfast.drop_collections(["orders"])
    return failed.value, time.monotonic() - begun


def test_nobody_listening_is_said_at_once() -> None:
    with listener() as port:
        pass
    error, seconds = failure_of(f"127.0.0.1:{port}")
    assert isinstance(error, NotAnswering)
    assert not error.sent
    assert f"127.0.0.1:{port}: Connection refused" in error.message
    assert seconds < 3


def test_somebody_who_is_not_kafka_is_said_within_seconds() -> None:
    with listener() as port:
        error, seconds = failure_of(f"127.0.0.1:{port}")
    assert isinstance(error, NotAnswering)
    assert "does not answer as Kafka" in error.message
    assert seconds < 5


def test_a_wrong_address_is_named() -> None:
    error, _ = failure_of("no-port-here")
    assert re.search("'no-port-here' is no address", error.message)


def test_a_closed_client_says_so() -> None:
    holdfast = Holdfast("127.0.0.1:1")
    holdfast.close()
    with pytest.raises(HoldfastError, match="closed"):
        holdfast.drop_collections(["orders"])

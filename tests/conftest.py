"""One broker and one Spark for all tests of a process: each takes seconds to start. Jars are fetched once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from app.broker import EmbeddedBroker
from app.java import QUICK_START

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

for noisy in ("kafka", "py4j"):
    logging.getLogger(noisy).setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    from app.spark import session  # noqa: PLC0415  # only those who ask for Spark wait for its import

    running = session(
        "holdfast tests",
        master="local[2]",
        logs=tmp_path_factory.mktemp("spark"),
        extra={"spark.driver.extraJavaOptions": " ".join(QUICK_START)},
    )
    yield running
    running.stop()

"""How an error ends the application; everything that needs Spark or Kafka is in tests/e2e/test_endings.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from app.config import Config, StreamsConfig
from app.controller import Controller
from app.service import EXIT_FENCED, EXIT_GAVE_UP, Service
from app.shards.gateway import first_line


def test_a_controller_that_slept_for_longer_than_it_would_try_says_that_it_was_replaced(tmp_path: Path) -> None:
    config = Config(
        root=str(tmp_path / "root"),
        warehouse=[str(tmp_path / "warehouse")],
        streams=StreamsConfig(checkpoints=str(tmp_path / "checkpoints")),
    )
    service = Service(config, cast("Any", None), "127.0.0.1:1")
    service._boot()
    assert service._exit_code(OSError("Kafka is gone")) is None
    service._last_progress -= 1_000
    assert service._exit_code(OSError("Kafka is gone")) == EXIT_GAVE_UP
    successor = Controller(config)
    successor.boot()
    assert service._exit_code(OSError("Kafka is gone")) == EXIT_FENCED
    successor.close()
    service.controller.close()


class OfADeadJvm(Exception):
    """As py4j has them: the text is asked of the JVM."""

    errmsg = "An error occurred while calling o7.collect."

    @property
    def java_exception(self) -> object:
        raise ConnectionRefusedError("nobody listens there any more")


def test_an_error_of_a_jvm_that_has_ended_has_a_text_all_the_same() -> None:
    assert first_line(OfADeadJvm()) == OfADeadJvm.errmsg

"""Where the broker and the tables are: from the configuration, and from options that overrule it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from app.client import Holdfast
from app.client_errors import HoldfastError, NotAnswering
from app.config import EMBEDDED, Config, ConfigError, load_config, texts
from app.kafka import KafkaOptionError, addresses, client_options

DEFAULT_CONFIG: Final = Path("conf/local.yaml")
DEFAULT_TIMEOUT_S: Final = 10.0
START: Final = "Start it with ./spark-submit.sh"


class UsageError(Exception):
    """The call cannot work as it is: exit code 2."""


class ControllerNotRunning(NotAnswering):
    """The broker is the controller's own, and not there."""


@dataclass(frozen=True, slots=True)
class Settings:
    root: str
    bootstrap_servers: str
    commands_topic: str
    replies_topic: str
    timeout_s: float
    json: bool
    storage_options: Mapping[str, str] = field(repr=False)
    kafka_options: Mapping[str, str] = field(repr=False)

    def connect(self) -> Holdfast:
        """A client; says in one sentence what to do if there is nobody to talk to."""
        servers = self.bootstrap_servers
        if servers == EMBEDDED:
            servers = embedded_address(self.root)
        return Holdfast(
            servers,
            commands_topic=self.commands_topic,
            replies_topic=self.replies_topic,
            options=self.kafka_options,
            root=self.root,
            storage_options=self.storage_options,
            timeout=self.timeout_s,
        )

    def explained(self, error: NotAnswering) -> NotAnswering:
        """With the embedded broker, nobody there means that the controller does not run."""
        if self.bootstrap_servers != EMBEDDED or error.sent or isinstance(error, ControllerNotRunning):
            return error
        return ControllerNotRunning(
            f"The controller of {self.root} is not running: {error.message} {START}, and leave it running.",
            error.details,
        )


def settings_of(options: argparse.Namespace) -> Settings:
    config = _config(options)
    kafka = config.kafka
    servers = getattr(options, "bootstrap_servers", None) or kafka.bootstrap_servers
    try:
        client_options(kafka.options)
        if servers != EMBEDDED:
            addresses(servers)
    except KafkaOptionError as error:
        raise UsageError(str(error)) from None
    given_root = getattr(options, "root", None)
    return Settings(
        root=config.root if given_root is None else _absolute(given_root),
        bootstrap_servers=servers,
        commands_topic=kafka.commands_topic,
        replies_topic=kafka.replies_topic,
        timeout_s=getattr(options, "timeout", DEFAULT_TIMEOUT_S),
        json=getattr(options, "json", False),
        storage_options=texts(config.storage_options),
        kafka_options=texts(kafka.options),
    )


def embedded_address(root: str) -> str:
    """The address of the broker that the controller of this root runs."""
    file = Path(root) / "broker.json"
    try:
        address = json.loads(file.read_text())["bootstrap_servers"]
    except FileNotFoundError:
        raise ControllerNotRunning(
            f"The controller of {root} is not running: there is no {file}, in which it says where its broker listens. "
            f"{START}, and leave it running; or say where it is, with --root or --bootstrap-servers."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HoldfastError(f"{file} does not say where the broker is ({error}). {START}: it writes it anew.") from None
    return str(address)


def _config(options: argparse.Namespace) -> Config:
    path: Path | None = getattr(options, "config", None)
    if path is None:
        # Elsewhere than in the project's directory, --root or --bootstrap-servers is enough.
        told = getattr(options, "root", None) or getattr(options, "bootstrap_servers", None)
        if not DEFAULT_CONFIG.exists() and not told:
            raise UsageError(
                f"There is no {DEFAULT_CONFIG} here. Run this in Holdfast's directory, or say where things are: "
                "--config FILE, or --root DIRECTORY."
            )
        path = DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None
    try:
        return load_config(path)
    except ConfigError as error:
        raise UsageError(str(error)) from None


def _absolute(root: str) -> str:
    return root if "://" in root else str(Path(root).expanduser().absolute())

"""Configuration: YAML, typed. Every key is optional; an unknown key or a wrong value is an error that names it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import yaml

from app.core.duration import Duration, parse_duration
from app.core.errors import Refused
from app.core.locations import normalise
from app.core.parameters import Parameters

EMBEDDED: Final = "embedded"

_Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]
_Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Settings = dict[str, str | int | float | bool]


class ConfigError(Exception):
    """The configuration cannot be used; the message says which file, which key, and why."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class KafkaConfig(_Section, frozen=True):
    bootstrap_servers: _Text = EMBEDDED
    commands_topic: _Text = "holdfast.commands"
    replies_topic: _Text = "holdfast.replies"
    partitions: _Count = 1
    options: _Settings = {}  # Kafka's own names, for source, producer and client alike; may hold secrets

    def __repr__(self) -> str:
        """Without the options: they may hold a password."""
        return f"KafkaConfig(bootstrap_servers={self.bootstrap_servers!r}, options={sorted(self.options)})"


class StreamsConfig(_Section, frozen=True):
    checkpoints: _Text = "checkpoints"
    max_commands_per_batch: Annotated[int, msgspec.Meta(ge=1, le=20_000)] = 20_000
    watch_interval: Duration = msgspec.field(default_factory=lambda: Duration(1_000))
    heartbeat: Duration = msgspec.field(default_factory=lambda: Duration(5_000))
    distribute_watching_above: _Count = 50_000


class MetricsConfig(_Section, frozen=True):
    port: _Port = 0


class Config(_Section, frozen=True):
    """All of it, with paths made absolute."""

    root: _Text = ".holdfast"
    warehouse: Annotated[list[_Text], msgspec.Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: [".holdfast/warehouse"]
    )
    storage_options: _Settings = {}
    kafka: KafkaConfig = KafkaConfig()
    streams: StreamsConfig = msgspec.field(default_factory=StreamsConfig)
    parameters: dict[str, Any] = {}
    spark: _Settings = {}
    metrics: MetricsConfig = MetricsConfig()
    give_up_after: Duration = msgspec.field(default_factory=lambda: Duration(300_000))

    @property
    def embedded(self) -> bool:
        """Whether we run the broker ourselves."""
        return self.kafka.bootstrap_servers == EMBEDDED

    @property
    def state(self) -> str:
        """Where the state tables and the journal are."""
        return f"{self.root.rstrip('/')}/state"

    def __repr__(self) -> str:
        """Without options and settings: they may hold secrets."""
        return f"Config(root={self.root!r}, warehouse={self.warehouse!r}, kafka={self.kafka!r})"


def texts(settings: _Settings) -> dict[str, str]:
    """Settings as the libraries that take them want them."""
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in settings.items()}


def load_config(path: Path | None, *, environment: dict[str, str] | None = None) -> Config:
    """Reads a file; without one, the defaults. Relative paths are relative to the working directory."""
    if path is None:
        return _absolute(Config())
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"Cannot read the configuration {path}: {error.strerror}.") from error
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    environment = dict(os.environ) if environment is None else environment
    try:
        # Replaced after parsing: a secret with a `#` or a `:` in it must not be read as YAML.
        config = msgspec.convert(_replaced(loaded or {}, environment), Config, dec_hook=_decode)
        Parameters().updated(config.parameters)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `")
        raise ConfigError(f"{path}: {reason}{f', at {where[:-1]}' if where else ''}.") from None
    except Refused as error:
        raise ConfigError(f"{path}: {error.message}") from None
    except KeyError as error:
        raise ConfigError(f"{path}: the environment variable {error.args[0]} is not set.") from None
    return _absolute(config)


def _decode(wanted: type, value: Any) -> Any:
    if wanted is Duration:
        return parse_duration(value)
    raise NotImplementedError


def _replaced(value: Any, environment: dict[str, str]) -> Any:
    """`${NAME}` in any text becomes what the environment says."""
    if isinstance(value, str):
        return re.sub(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}", lambda match: environment[match[1]], value)
    if isinstance(value, dict):
        return {key: _replaced(each, environment) for key, each in value.items()}
    if isinstance(value, list):
        return [_replaced(each, environment) for each in value]
    return value


def _absolute(config: Config) -> Config:
    def absolute(location: str) -> str:
        return normalise(location if ":" in location else str(Path(location).expanduser().absolute()))

    streams = msgspec.structs.replace(config.streams, checkpoints=absolute(config.streams.checkpoints))
    return msgspec.structs.replace(
        config, root=absolute(config.root), warehouse=[absolute(each) for each in config.warehouse], streams=streams
    )

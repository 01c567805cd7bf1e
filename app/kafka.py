"""Kafka's options, given once under Kafka's own names, as each library wants them.

The configuration names them as the Java client does, or as librdkafka does where that is shorter (`sasl.username`,
`ssl.ca.location`). `client_options` makes arguments of kafka-python of them, `java_options` what Spark's connector and
the Java client understand. No text made here ever contains a value: any of them may be a secret.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

PEM: Final = "PEM"
REQUEST_LIMIT_S: Final = 30.0
"""How long we wait for an answer of Kafka, unless we are told to give up sooner."""
_PROBE_S: Final = 1.5


class KafkaOptionError(ValueError):
    """An option cannot be used; the message names the option, and never its value."""


def _text(value: str) -> str:
    return value


def _check_hostname(value: str) -> bool:
    if value.lower() not in ("https", "", "none"):
        raise ValueError
    return value.lower() == "https"


# Kafka's name → the argument of kafka-python, and how its value is read.
_ARGUMENTS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "security.protocol": ("security_protocol", str.upper),
    "sasl.mechanism": ("sasl_mechanism", str.upper),
    "sasl.mechanisms": ("sasl_mechanism", str.upper),
    "sasl.username": ("sasl_plain_username", _text),
    "sasl.password": ("sasl_plain_password", _text),
    "sasl.kerberos.service.name": ("sasl_kerberos_service_name", _text),
    "ssl.ca.location": ("ssl_cafile", _text),
    "ssl.certificate.location": ("ssl_certfile", _text),
    "ssl.key.location": ("ssl_keyfile", _text),
    "ssl.key.password": ("ssl_password", _text),
    "ssl.crl.location": ("ssl_crlfile", _text),
    "ssl.truststore.location": ("ssl_cafile", _text),
    "ssl.keystore.location": ("ssl_certfile", _text),  # as PEM it holds the key too
    "ssl.endpoint.identification.algorithm": ("ssl_check_hostname", _check_hostname),
    "client.id": ("client_id", _text),
    "request.timeout.ms": ("request_timeout_ms", int),
    "connections.max.idle.ms": ("connections_max_idle_ms", int),
    "metadata.max.age.ms": ("metadata_max_age_ms", int),
    "retry.backoff.ms": ("retry_backoff_ms", int),
    "reconnect.backoff.ms": ("reconnect_backoff_ms", int),
    "reconnect.backoff.max.ms": ("reconnect_backoff_max_ms", int),
    "receive.buffer.bytes": ("receive_buffer_bytes", int),
    "send.buffer.bytes": ("send_buffer_bytes", int),
}
_STORES: Final = ("ssl.truststore", "ssl.keystore")
_JAAS: Final = "sasl.jaas.config"
_JAAS_SETTING: Final = re.compile(r'(\w+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))')
_JAAS_MODULES: Final = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
# Tuning of Java's consumers and producers, of which Spark makes use: kafka-python may do without. Everything else that
# is unknown is refused, because a misspelt security setting that is left out quietly is a hole, or a riddle.
_JAVA_ONLY: Final = re.compile(
    r"(fetch|max|min|session|heartbeat|isolation|group|default|interceptor|metrics?|partition|check|linger|batch"
    r"|compression|acks|buffer|delivery|allow|client\.rack|client\.dns|socket|auto)[.\w]*"
    r"|ssl\.(protocol|provider|enabled\.protocols|cipher\.suites|keymanager\.algorithm|trustmanager\.algorithm"
    r"|secure\.random\.implementation)"
)


def addresses(servers: str) -> list[tuple[str, int]]:
    """`host:port,host:port` in parts."""
    found = []
    for server in servers.split(","):
        host, _, port = server.strip().rpartition(":")
        if not host or not port.isdecimal():
            raise KafkaOptionError(f"{server.strip()!r} is no address of a broker; expected host:port.")
        found.append((host.strip("[]"), int(port)))
    return found


def unreachable(servers: str) -> str | None:
    """Why nobody listens there, if so: kafka-python would try for as long as it may, and not say what is wrong."""
    problems = []
    for host, port in addresses(servers):
        try:
            socket.create_connection((host, port), timeout=_PROBE_S).close()
        except (OSError, OverflowError) as error:
            problems.append(f"{host}:{port}: {getattr(error, 'strerror', None) or error}")
        else:
            return None
    return f"No Kafka broker can be reached ({'; '.join(problems)})."


def opened(kind: Any, **options: Any) -> Any:
    """A consumer or producer of kafka-python; if it cannot connect, nothing of it is left over.

    By itself it leaves a thread and five files each time, and who waits for a broker tries again and again.
    """
    made: list[Any] = []

    def client(**settings: Any) -> Any:
        made.append(kind.DEFAULT_CONFIG["kafka_client"](**settings))
        return made[-1]

    try:
        return kind(kafka_client=client, **options)
    except BaseException:
        for each in made:
            each.close()
        raise


def client_options(options: Mapping[str, Any], *, limit_s: float | None = None) -> dict[str, Any]:
    """The arguments for kafka-python's producers, consumers and admin clients; no request takes longer than that."""
    given = _texts(options)
    # By itself it would wait up to half a minute between attempts, and so stay away for long after a broker is back.
    arguments: dict[str, Any] = {"reconnect_backoff_max_ms": 1_000}
    for store in _STORES:
        _check_store(given, store)
    if (jaas := given.pop(_JAAS, None)) is not None:
        arguments.update(_from_jaas(jaas))
    for name, value in given.items():
        if name in _ARGUMENTS:
            argument, parse = _ARGUMENTS[name]
            try:
                arguments[argument] = parse(value)
            except ValueError:
                raise KafkaOptionError(_unusable(name)) from None
        elif not _JAVA_ONLY.fullmatch(name):
            raise KafkaOptionError(_unknown(name))
    if limit_s is not None:
        limit_ms = int(limit_s * 1000)
        arguments["request_timeout_ms"] = min(limit_ms, arguments.get("request_timeout_ms", limit_ms))
    return arguments


def java_options(options: Mapping[str, Any], *, limit_s: float | None = None) -> dict[str, str]:
    """The same options for Java, without any prefix. PEM files are read here: executors need not have them."""
    given = _texts(options)
    if limit_s is not None:
        for name in ("request.timeout.ms", "default.api.timeout.ms"):
            given[name] = str(min(int(limit_s * 1000), _number(name, given.get(name, str(10**9)))))
    for short, java in (("sasl.mechanisms", "sasl.mechanism"),):
        if short in given:
            given[java] = given.pop(short)
    _add_jaas(given)
    if (authorities := given.pop("ssl.ca.location", None)) is not None:
        given |= {"ssl.truststore.type": PEM, "ssl.truststore.certificates": _read("ssl.ca.location", authorities)}
    if (chain := given.pop("ssl.certificate.location", None)) is not None:
        key = given.pop("ssl.key.location", chain)
        given |= {
            "ssl.keystore.type": PEM,
            "ssl.keystore.certificate.chain": _read("ssl.certificate.location", chain),
            "ssl.keystore.key": _read("ssl.key.location", key),
        }
    return given


def _texts(options: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}


def _number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise KafkaOptionError(_unusable(name)) from None


def _unusable(name: str) -> str:
    return f"The value of the Kafka option {name!r} cannot be used."


def _unknown(name: str) -> str:
    if name.startswith(_STORES):
        return f"The Kafka option {name!r} is for Java alone; give PEM files, with 'ssl.ca.location' and its like."
    return f"The Kafka option {name!r} is not known to the Python client; is it misspelt?"


def _check_store(given: dict[str, str], store: str) -> None:
    """Takes a store's type away, after a look that Python can read it."""
    kind = given.pop(f"{store}.type", "JKS")
    if f"{store}.location" in given and kind.upper() != PEM:
        raise KafkaOptionError(
            f"'{store}.location' must be a PEM file, with '{store}.type' PEM: Python cannot read Java's key stores."
        )


def _from_jaas(jaas: str) -> dict[str, str]:
    settings = {name: quoted or plain for name, quoted, plain in _JAAS_SETTING.findall(jaas)}
    found = {
        argument: re.sub(r"\\(.)", r"\1", settings[name])
        for name, argument in (
            ("username", "sasl_plain_username"),
            ("password", "sasl_plain_password"),
            ("serviceName", "sasl_kerberos_service_name"),
        )
        if name in settings
    }
    if not found:
        raise KafkaOptionError(f"{_JAAS!r} names neither `username` and `password` nor `serviceName`.")
    return found


def _add_jaas(given: dict[str, str]) -> None:
    username, password = given.pop("sasl.username", None), given.pop("sasl.password", None)
    if username is None or _JAAS in given:
        return
    module = _JAAS_MODULES.get(given.get("sasl.mechanism", "").upper())
    if module is None:
        raise KafkaOptionError(
            f"'sasl.username' needs 'sasl.mechanism', one of {', '.join(_JAAS_MODULES)}; else give {_JAAS!r}."
        )
    given[_JAAS] = f"{module} required username={_quoted(username)} password={_quoted(password or '')};"


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _read(option: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise KafkaOptionError(f"Cannot read the file of {option!r}: {error.strerror}.") from None

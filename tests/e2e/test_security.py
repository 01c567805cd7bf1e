"""SASL and TLS for real: a broker that wants both, the secret from the environment, and never in any text."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kafka.errors import KafkaError

from app.broker import HOST, EmbeddedBroker, _free_port
from app.client import Holdfast
from app.config import KafkaConfig
from app.service import EXIT_OK
from app.topics import Topics
from tests.e2e.harness import Process, config_under

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")

USER = "holdfast"
FRAGMENT = "open5esame"  # whoever tells the secret, however quoted, tells this
SECRET = f'{FRAGMENT} #: "b\\rot" ä'  # what YAML, JAAS and properties might trip over
VARIABLE = "HOLDFAST_TEST_PASSWORD"


def certificate(directory: Path) -> tuple[Path, Path]:
    """A certificate for this host that vouches for itself, alone and together with its key."""
    key, cert, both = (directory / name for name in ("key.pem", "cert.pem", "both.pem"))
    what = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"]
    where = ["-addext", f"subjectAltName=IP:{HOST}", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", "req", *what, *where], check=True, capture_output=True)
    both.write_text(key.read_text() + cert.read_text())
    return cert, both


class SecureBroker(EmbeddedBroker):
    """The embedded one with a second door, for which one needs TLS and a password."""

    def __init__(self, data: Path, identity: Path) -> None:
        super().__init__(data)
        self._identity = identity
        self._secure_port = _free_port(0)

    @property
    def secure_servers(self) -> str:
        return f"{HOST}:{self._secure_port}"

    def _write_settings(self, logs: Path) -> None:
        super()._write_settings(logs)
        file = self.data / "server.properties"
        door = f"SECURE://{self.secure_servers},PLAINTEXT://"
        text = file.read_text().replace("listeners=PLAINTEXT://", f"listeners={door}")
        text = text.replace("protocol.map=", "protocol.map=SECURE:SASL_SSL,")
        quoted = SECRET.replace("\\", "\\\\").replace('"', '\\"')
        module = "org.apache.kafka.common.security.plain.PlainLoginModule"
        settings = {
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.name.secure.sasl.enabled.mechanisms": "PLAIN",
            "listener.name.secure.plain.sasl.jaas.config": f'{module} required user_{USER}="{quoted}";',
            "listener.name.secure.ssl.keystore.type": "PEM",
            "listener.name.secure.ssl.keystore.location": str(self._identity),
        }
        file.write_text(text + "".join(f"{name}={_property(value)}\n" for name, value in settings.items()))


def _property(value: str) -> str:
    escaped = value.replace("\\", "\\\\")
    return "".join(each if each.isascii() else f"\\u{ord(each):04x}" for each in escaped)


def options(authority: Path, secret: str) -> dict[str, str | int | float | bool]:
    return {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "sasl.username": USER,
        "sasl.password": secret,
        "ssl.ca.location": str(authority),
    }


def files_with_the_secret(directory: Path) -> list[str]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return [str(path) for path in files if FRAGMENT.encode() in path.read_bytes()]


def test_commands_are_answered_over_tls_with_a_password_that_is_in_no_text(tmp_path: Path) -> None:
    cert, identity = certificate(tmp_path)
    with SecureBroker(tmp_path / "broker", identity) as broker:
        world = tmp_path / "world"
        config = config_under(world, broker.secure_servers)
        # The file says where the secret is; the process is given it in its environment.
        kafka = msgspec.structs.replace(config.kafka, options=options(cert, f"${{{VARIABLE}}}"))
        config = msgspec.structs.replace(config, kafka=kafka)
        with Process(config, world / "process", variables={VARIABLE: SECRET}) as process:
            process.wait_for_output("Holdfast is running")
            with Holdfast(
                broker.secure_servers,
                commands_topic=kafka.commands_topic,
                replies_topic=kafka.replies_topic,
                options=options(cert, SECRET),
                root=config.root,
            ) as holdfast:
                holdfast.create_collections([{"id": "orders", "data_source": {"kind": "table"}}], register_ts=5)
                assert list(holdfast.state().collections) == ["orders"]
                assert FRAGMENT not in repr(holdfast)
            assert files_with_the_secret(world) == [], "while it runs"
            process.signal(signal.SIGTERM)
            assert process.wait_for_exit() == EXIT_OK
        assert files_with_the_secret(world) == [], "when it has ended"
        assert list(world.rglob("spark*.log")), "Spark's own log was among them"
        assert files_with_the_secret(tmp_path) == [str(broker.data / "server.properties")], "the search finds it"
        assert_refused(kafka, broker.secure_servers, options(cert, "wr0ng"))
        assert_refused(kafka, broker.secure_servers, options(identity_of_another(tmp_path), SECRET))


def identity_of_another(tmp_path: Path) -> Path:
    directory = tmp_path / "another"
    directory.mkdir()
    return certificate(directory)[0]


def assert_refused(kafka: KafkaConfig, servers: str, given: dict[str, Any]) -> None:
    """Whoever has another password, or trusts another authority, does not get in, and is not told any secret."""
    with pytest.raises(KafkaError) as refused:
        Topics(msgspec.structs.replace(kafka, options=given), servers, connect_s=2.0)
    assert str(given["sasl.password"]) not in str(refused.value)

"""Kafka's options under Kafka's names become what kafka-python and Java want, and no secret is ever told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer

from app.client import Holdfast
from app.commandline.settings import Settings
from app.kafka import _ARGUMENTS, KafkaOptionError, client_options, java_options

PLAIN_JAAS = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="ann" password="a\\"b\\\\c";'
SCRAM = {
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "SCRAM-SHA-512",
    "sasl.username": "ann",
    "sasl.password": 'a"b\\c',
}


def given(options: dict[str, Any]) -> dict[str, Any]:
    found = client_options(options)
    del found["reconnect_backoff_max_ms"]
    return found


def test_names_of_librdkafka_become_arguments() -> None:
    assert given({**SCRAM, "ssl.ca.location": "/ca.pem", "client.id": "me", "request.timeout.ms": "5000"}) == {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "ann",
        "sasl_plain_password": 'a"b\\c',
        "ssl_cafile": "/ca.pem",
        "client_id": "me",
        "request_timeout_ms": 5000,
    }


def test_names_of_java_become_arguments() -> None:
    assert given(
        {
            "sasl.jaas.config": PLAIN_JAAS,
            "sasl.mechanism": "plain",
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": "/ca.pem",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": "/me.pem",
            "ssl.key.password": "k",
            "ssl.endpoint.identification.algorithm": "",
        }
    ) == {
        "sasl_mechanism": "PLAIN",
        "sasl_plain_username": "ann",
        "sasl_plain_password": 'a"b\\c',
        "ssl_cafile": "/ca.pem",
        "ssl_certfile": "/me.pem",
        "ssl_password": "k",
        "ssl_check_hostname": False,
    }


def test_a_jaas_configuration_without_quotes_and_one_for_kerberos() -> None:
    assert given({"sasl.jaas.config": "X required username=ann password=p;"})["sasl_plain_password"] == "p"
    assert given({"sasl.jaas.config": 'Krb5LoginModule required serviceName="kafka1";'}) == {
        "sasl_kerberos_service_name": "kafka1"
    }


def test_every_argument_is_known_to_every_client_of_kafka_python() -> None:
    for client in (KafkaProducer, KafkaConsumer, KafkaAdminClient):
        unknown = {argument for argument, _ in _ARGUMENTS.values()} - set(client.DEFAULT_CONFIG)
        assert not unknown, client.__name__


def test_tuning_of_java_clients_is_left_to_java() -> None:
    assert given({"fetch.max.wait.ms": 10, "ssl.cipher.suites": "x"}) == {}
    assert java_options({"fetch.max.wait.ms": 10}) == {"fetch.max.wait.ms": "10"}


@pytest.mark.parametrize(
    "options",
    [
        {"secuirty.protocol": "hunter2"},
        {"ssl.truststore.location": "hunter2"},
        {"ssl.keystore.password": "hunter2"},
        {"sasl.jaas.config": "hunter2"},
        {"request.timeout.ms": "hunter2"},
        {"ssl.endpoint.identification.algorithm": "hunter2"},
    ],
)
def test_what_cannot_be_used_is_refused_by_name_and_without_its_value(options: dict[str, str]) -> None:
    with pytest.raises(KafkaOptionError) as refused:
        client_options(options)
    assert next(iter(options)).rpartition(".")[0] in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_java_gets_its_own_names_and_texts_instead_of_files(tmp_path: Path) -> None:
    authorities, chain, key = tmp_path / "ca", tmp_path / "chain", tmp_path / "key"
    for file in (authorities, chain, key):
        file.write_text(f"PEM of {file.name}")
    files = {"ssl.ca.location": authorities, "ssl.certificate.location": chain, "ssl.key.location": key}
    assert java_options({**SCRAM, **files}) == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.jaas.config": (
            'org.apache.kafka.common.security.scram.ScramLoginModule required username="ann" password="a\\"b\\\\c";'
        ),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.certificates": "PEM of ca",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.certificate.chain": "PEM of chain",
        "ssl.keystore.key": "PEM of key",
    }


def test_what_java_is_told_means_the_same_to_python() -> None:
    said = java_options(SCRAM)
    assert given(said) == given(SCRAM)
    with pytest.raises(KafkaOptionError, match="mechanism"):
        java_options({"sasl.username": "ann", "sasl.password": "hunter2"})


def test_no_secret_is_in_a_repr() -> None:
    secret = {"sasl.password": "hunter2"}
    settings = Settings("/r", "b:1", "c", "r", 1.0, False, {"AWS_SECRET_ACCESS_KEY": "hunter2"}, secret)
    client = Holdfast("b:1", options=secret, storage_options={"AWS_SECRET_ACCESS_KEY": "hunter2"})
    assert "hunter2" not in repr(settings) + repr(client)

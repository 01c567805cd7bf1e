"""Sends replies. A reply counts as sent only when Kafka has acknowledged it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kafka import KafkaProducer

from app.config import KafkaConfig
from app.kafka import client_options
from app.records import Reply

SEND_TIMEOUT_S: Final = 30.0


class Replies:
    def __init__(self, kafka: KafkaConfig, bootstrap_servers: str) -> None:
        self._topic = kafka.replies_topic
        self._producer = KafkaProducer(
            bootstrap_servers=bootstrap_servers,
            acks="all",
            linger_ms=0,
            max_request_size=2 * 1024 * 1024,
            **client_options(kafka.options),
        )

    def send(self, replies: Sequence[Reply]) -> None:
        """Returns when all are acknowledged; raises if one is not. Sending some of them twice does no harm."""
        sent = [self._producer.send(self._topic, key=reply.key, value=reply.value) for reply in replies]
        self._producer.flush(timeout=SEND_TIMEOUT_S)
        for future in sent:
            future.get(timeout=SEND_TIMEOUT_S)  # flush() returns normally although a send failed

    def close(self) -> None:
        self._producer.close(timeout=5)

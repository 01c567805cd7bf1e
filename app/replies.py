"""Sends replies. A reply counts as sent only when Kafka has acknowledged it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from kafka import KafkaProducer
from kafka.errors import KafkaError

from app.config import KafkaConfig
from app.kafka import REQUEST_LIMIT_S, client_options, opened
from app.records import Reply

CLOSE_LIMIT_S: Final = 1.0


class Replies:
    """`connect_s` is how long to try to connect, `limit_s` how long to wait for what was sent to be acknowledged."""

    def __init__(
        self,
        kafka: KafkaConfig,
        bootstrap_servers: str,
        *,
        connect_s: float = REQUEST_LIMIT_S,
        limit_s: float = REQUEST_LIMIT_S,
    ) -> None:
        self._topic = kafka.replies_topic
        self._limit_s = limit_s
        limit_ms = int(limit_s * 1000)
        self._producer = opened(
            KafkaProducer,
            bootstrap_servers=bootstrap_servers,
            bootstrap_timeout_ms=int(connect_s * 1000),
            acks="all",
            linger_ms=0,
            max_request_size=2 * 1024 * 1024,
            # A batch of commands has as many replies: a request for every hundred of them would take most of the time.
            batch_size=256 * 1024,
            max_block_ms=limit_ms,
            # What is late fails by itself, so that nothing is left over when the producer is closed.
            delivery_timeout_ms=limit_ms,
            **client_options(kafka.options, limit_s=limit_s),
        )

    def send(self, replies: Sequence[Reply]) -> None:
        """Returns when all are acknowledged; raises if one is not. Sending some of them twice does no harm."""
        sent = [self._producer.send(self._topic, key=reply.key, value=reply.value) for reply in replies]
        self._producer.flush(timeout=self._limit_s + CLOSE_LIMIT_S)
        for future in sent:
            future.get(timeout=self._limit_s)  # flush() returns normally although a send failed

    def close(self) -> None:
        # Whoever sent has heard whether it arrived; a failure here would only hide why we close.
        with suppress(KafkaError):
            self._producer.close(timeout=CLOSE_LIMIT_S)

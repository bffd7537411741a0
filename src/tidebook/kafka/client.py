"""The librdkafka configuration of every Kafka client."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaException

from tidebook.core.errors import InvalidInput
from tidebook.kafka.settings import KafkaSettings

LOGGER = logging.getLogger("tidebook.log.kafka")
LOGGER.addHandler(logging.NullHandler())

T = TypeVar("T")

_WARNING = 4
_EMERGENCY = 0
#: Record sizes are limited by each topic, not by the client.
_MESSAGE_BYTES_MAX = 1_000_000_000
#: How often an admin client refreshes its metadata: one small request.
ADMIN_REFRESH_MS = 2_000


def common_config(settings: KafkaSettings) -> dict[str, Any]:
    """Return the settings of all clients: servers, security, and reconnect backoff."""
    config: dict[str, Any] = {
        "bootstrap.servers": ",".join(settings.servers),
        "client.id": settings.client_id,
        "security.protocol": settings.protocol,
        "allow.auto.create.topics": False,
        "socket.timeout.ms": settings.request_timeout_ms,
        "socket.connection.setup.timeout.ms": max(1000, settings.request_timeout_ms),
        "socket.keepalive.enable": True,
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 1000,
        "retry.backoff.ms": 50,
        "log.connection.close": False,
        "log_level": _EMERGENCY,
    }
    if settings.protocol.startswith("sasl"):
        secret = settings.secret()
        config["sasl.mechanism"] = settings.mechanism
        config["sasl.username"] = settings.user
        config["sasl.password"] = "" if secret is None else secret.reveal()
    files = {"ssl.ca.location": "ca_file", "ssl.certificate.location": "cert_file", "ssl.key.location": "key_file"}
    for name, field in files.items():
        file = getattr(settings, field)
        if file is not None:
            if not os.access(file, os.R_OK):
                raise InvalidInput(f"[log] for Kafka: {field} {file} cannot be read")
            config[name] = file
    return config


def admin_config(settings: KafkaSettings) -> dict[str, Any]:
    """Return the librdkafka configuration of an admin client.

    It sends most requests to the broker that it knows as the controller. If that one is down, it asks for another only
    when it refreshes its metadata, by default every five minutes, and until then every request times out.
    """
    return common_config(settings) | {"topic.metadata.refresh.interval.ms": ADMIN_REFRESH_MS}


def producer_config(settings: KafkaSettings, *, batch_bytes: int) -> dict[str, Any]:
    """Return the settings of an idempotent producer with acks=all and batches of at most `batch_bytes`."""
    return common_config(settings) | {
        "acks": "all",
        "enable.idempotence": True,
        "linger.ms": settings.linger_ms,
        "compression.type": settings.compression,
        "batch.size": batch_bytes,
        "max.in.flight.requests.per.connection": settings.requests_in_flight_max,
        "message.max.bytes": _MESSAGE_BYTES_MAX,
        "message.timeout.ms": settings.send_timeout_ms,
        "request.timeout.ms": min(settings.send_timeout_ms, 30_000),
        "queue.buffering.max.messages": settings.in_flight_records_max,
        "queue.buffering.max.kbytes": max(1, settings.in_flight_bytes_max // 1024),
        "log_level": _WARNING,
    }


def consumer_config(settings: KafkaSettings, *, fetch_wait_ms: int) -> dict[str, Any]:
    """Return the settings of a consumer without a group: partitions are assigned, nothing is committed.

    An offset that is out of range raises an error; the position is never reset.
    """
    return common_config(settings) | {
        "group.id": f"{settings.client_id}-unused",  # librdkafka requires a group id
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "enable.partition.eof": True,
        "isolation.level": "read_uncommitted",
        "check.crcs": True,
        "fetch.wait.max.ms": fetch_wait_ms,
        "fetch.queue.backoff.ms": 5,
        "fetch.error.backoff.ms": 50,
        "queued.min.messages": 100_000,
        "queued.max.messages.kbytes": max(1, settings.prefetch_bytes_max // 1024),
        "max.poll.interval.ms": 86_400_000,
    }


def connect(client: Callable[..., T], config: dict[str, Any], **options: Any) -> T:
    """Create a client, which connects in the background; raise InvalidInput for settings that librdkafka rejects."""
    try:
        return client(config, **options)
    except KafkaException as error:
        # librdkafka's message names settings and files, never secrets.
        raise InvalidInput(f"[log] for Kafka: {error.args[0].str()}") from error


def new_consumer(settings: KafkaSettings, *, fetch_wait_ms: int) -> Consumer:
    """Return a consumer for partitions that are assigned explicitly."""
    return connect(Consumer, consumer_config(settings, fetch_wait_ms=fetch_wait_ms))

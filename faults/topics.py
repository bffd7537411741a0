"""Faults of topics: records that Tidebook did not write, and partitions that it did not create."""

from __future__ import annotations

import random

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]

from faults.plan import TOPIC
from tidebook.core.record import encode_plain_append

TIMEOUT_S = 10.0
#: Above the topic's limit for a record, and below the broker's limit for a batch.
OVERSIZED_BYTES = 1_001_000
RECORDS = 6
#: librdkafka must not log that brokers are down, because they are down on purpose.
LOG_LEVEL = 0


def send_foreign(brokers: str, chance: random.Random, key: str) -> int:
    """Send random, empty, truncated and oversized records to both partitions, some under the key of a journal."""
    settings = {"message.max.bytes": 2_000_000, "message.timeout.ms": 8_000}
    producer = Producer({"bootstrap.servers": brokers, "log_level": LOG_LEVEL, **settings})
    whole = encode_plain_append(1, chance.randbytes(16), 0, b"foreign" * 10)
    values = [None, b"", chance.randbytes(40), whole[: len(whole) // 2], b"{}", bytes(OVERSIZED_BYTES)]
    keys = [None, b"\xff\xfe", key.encode()]
    for value in chance.sample(values, RECORDS):
        producer.produce(TOPIC, value, chance.choice(keys), partition=chance.randrange(2))
    return int(producer.flush(TIMEOUT_S))


def add_partition(brokers: str) -> None:
    """Add a partition to the topic of the journals, and to no other topic."""
    admin = AdminClient({"bootstrap.servers": brokers, "log_level": LOG_LEVEL})
    count = len(admin.list_topics(TOPIC, timeout=TIMEOUT_S).topics[TOPIC].partitions)
    for future in admin.create_partitions([NewPartitions(TOPIC, count + 1)], request_timeout=TIMEOUT_S).values():
        try:
            future.result(TIMEOUT_S)
        except (KafkaException, TimeoutError):  # a broker is down: skip this fault
            return

"""The log on Apache Kafka."""

from __future__ import annotations

from tidebook.log.kafka.log import KafkaLog, open_kafka_log
from tidebook.log.kafka.settings import KafkaSettings

__all__ = ["KafkaLog", "KafkaSettings", "open_kafka_log"]

"""The log on Apache Kafka."""

from __future__ import annotations

from tidebook.kafka.settings import KafkaSettings
from tidebook.log.kafka.log import KafkaLog, open_kafka_log

__all__ = ["KafkaLog", "KafkaSettings", "open_kafka_log"]

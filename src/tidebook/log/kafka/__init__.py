"""The log on Apache Kafka."""

from __future__ import annotations

from tidebook.kafka.settings import KafkaSettings
from tidebook.log.kafka.log import KafkaLog

__all__ = ["KafkaLog", "KafkaSettings"]

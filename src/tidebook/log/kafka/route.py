"""The short way of records to a topic that was sent to before: what is plainly right is not looked at again."""

from __future__ import annotations

from typing import Final

from tidebook.log.kafka.producer import KafkaProducer
from tidebook.log.kafka.topics import FRAME_BYTES, KafkaTopic
from tidebook.log.port import Many, Outgoing

#: What batch and record headers may take of FRAME_BYTES.
RECORD_FRAME_BYTES: Final = 96
_KEY_BYTES_MAX: Final = FRAME_BYTES - RECORD_FRAME_BYTES


class Route:
    """Where records of a topic go, and what they may be."""

    __slots__ = ("limit_bytes", "partitions", "send", "send_many", "topic")

    def __init__(self, known: KafkaTopic, producer: KafkaProducer) -> None:
        self.topic = known.state.topic
        self.partitions = known.state.partitions
        self.limit_bytes = known.limit_bytes
        self.send = producer.send
        self.send_many = producer.send_many

    def takes_all(self, many: Many) -> bool:
        """Whether all of them are."""
        partitions = set(many.partitions)
        return (
            bool(partitions)
            and min(partitions) >= 0
            and max(partitions) < self.partitions
            and max(map(len, many.values)) <= self.limit_bytes
            and max(map(len, many.keys)) <= _KEY_BYTES_MAX
        )

    def takes(self, record: Outgoing) -> bool:
        """Whether it is plainly right."""
        return (
            record.topic == self.topic
            and 0 <= record.partition < self.partitions
            and len(record.value) <= self.limit_bytes
            and not record.headers
            and (record.key is None or len(record.key) <= _KEY_BYTES_MAX)
        )

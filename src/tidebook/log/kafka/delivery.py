"""The delivery callback of a single record."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from confluent_kafka import KafkaError

from tidebook.core.errors import OutcomeUnknown, TidebookError
from tidebook.log.kafka.slice_reader import Message
from tidebook.log.port import Acknowledged, Outgoing


class DeliverySink(Protocol):
    """The producer, as a delivery callback sees it."""

    #: A flat list [callback, result, …]; the result of a `ProduceBatch` is None.
    completed: list[Any]

    def delivery_error(self, record: Outgoing, error: KafkaError | None) -> TidebookError:
        """Return the error of a record that was not delivered."""
        ...


class DeliveryCallback(msgspec.Struct, gc=False):
    """A record in flight: librdkafka calls it when the record was delivered or has failed."""

    producer: DeliverySink
    record: Outgoing
    on_sent: Any
    #: If the record still waits in this process at this time, it fails.
    deadline: float

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        """Add the result; runs in the polling thread, and never raises, because librdkafka would drop the result."""
        try:
            offset = message.offset()
            if error is None and offset is not None:
                result: Any = Acknowledged(self.record.partition, offset, message.timestamp()[1])
            else:
                result = self.producer.delivery_error(self.record, error)
        except Exception as failure:
            result = OutcomeUnknown(f"the acknowledgement could not be read: {failure!r}")
        self.producer.completed += (self, result)

    def resolve(self, result: Acknowledged | TidebookError) -> None:
        """Call the sender's callback with the result; runs in the event loop."""
        self.on_sent(result)

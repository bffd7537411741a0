"""A record on its way to Kafka."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from confluent_kafka import KafkaError

from tidebook.core.errors import OutcomeUnknown, TidebookError
from tidebook.log.kafka.reading import Message
from tidebook.log.port import Outgoing, Sent


class Reporting(Protocol):
    """Whoever sends it, and hands on what came of it."""

    #: Records and what came of them, by turns.
    done: list[Any]

    def undelivered(self, record: Outgoing, error: KafkaError | None) -> TidebookError:
        """What is told of a record that was not delivered."""
        ...


class Sending(msgspec.Struct, gc=False):
    """A record on its way, and what the client calls once it was delivered or not."""

    producer: Reporting
    record: Outgoing
    on_sent: Any
    #: Should it still wait in this process then, it is given up.
    give_up_at: float

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        """In whichever thread polls. Whatever it raised, the client would lose, and the answer with it."""
        try:
            offset = message.offset()
            if error is None and offset is not None:
                result: Any = Sent(self.record.partition, offset, message.timestamp()[1])
            else:
                result = self.producer.undelivered(self.record, error)
        except Exception as failure:
            result = OutcomeUnknown(f"the acknowledgement could not be read: {failure!r}")
        self.producer.done += (self, result)

    def tell(self, result: Sent | TidebookError) -> None:
        """In the event loop."""
        self.on_sent(result)

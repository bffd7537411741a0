"""Records of one partition that go together: one call hands them all to the client, and one list takes its reports."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

from confluent_kafka import KafkaError

from tidebook.core.errors import OutcomeUnknown, TidebookError
from tidebook.log.kafka.reading import Message
from tidebook.log.port import Many, OnSentMany, Outgoing, Sent, SentTogether

#: A run of records that are larger than others has fewer of them.
RUN_BYTES = 1_000_000
#: What is told of a record that was not delivered; without an error, the client does not know where it lies.
Undelivered = Callable[[Outgoing, KafkaError | None], TidebookError]
#: Places, and what came of the records in them.
Told = list[tuple[Sequence[int], Sequence[Sent | TidebookError]]]


def runs(many: Many) -> Iterator[tuple[int, Sequence[int]]]:
    """Partitions, each with the places of its records, cut where they would be too large together."""
    by_partition: defaultdict[int, list[int]] = defaultdict(list)
    for place, partition in enumerate(many.partitions):
        by_partition[partition].append(place)
    largest = max(map(len, many.values), default=0)
    length = max(1, RUN_BYTES // max(1, largest))
    for partition, places in by_partition.items():
        for start in range(0, len(places), length):
            yield partition, places[start : start + length]


class Run:
    """In the order in which they were sent. The client calls `report` for each of them, delivered or not."""

    __slots__ = (
        "_counted", "_many", "_odd", "_offsets", "_on_sent", "_refused", "_timestamps_ms",
        "give_up_at", "partition", "places", "report", "size_bytes", "topic",
    )  # fmt: skip

    def __init__(
        self,
        many: Many,
        partition: int,
        places: Sequence[int],
        on_sent: OnSentMany,
        done: Callable[[Run], None],
        give_up_at: float,
    ) -> None:
        self.topic = many.topic
        self.partition = partition
        self.places = places
        self.size_bytes = sum(map(len, map(many.values.__getitem__, places)))
        #: Should they still wait in this process then, they are given up.
        self.give_up_at = give_up_at
        self._many = many
        self._on_sent = on_sent
        #: Of the first ones, as long as all is well with them and they come in order.
        self._offsets: list[int] = []
        self._timestamps_ms: list[int] = []
        #: All reports from the first on with which that is not so.
        self._odd: list[Message] = []
        #: By number, those that the client did not take.
        self._refused: dict[int, TidebookError] = {}
        #: Reports come in one thread while another one may refuse: who draws the last number is the last.
        self._counted = count(1)
        self.report = self._reporter(done)

    def _reporter(self, done: Callable[[Run], None]) -> Callable[[KafkaError | None, Message], None]:
        """What the client calls, in whichever thread polls. It keeps no report, for thousands of them are large.

        A report gives its record back, so which one it speaks of is certain.
        """
        expected = map(self._many.values.__getitem__, self.places).__next__
        add_offset, add_timestamp_ms, odd = self._offsets.append, self._timestamps_ms.append, self._odd
        count, counted = len(self.places), self._counted

        def report(error: KafkaError | None, message: Message) -> None:
            try:
                plain = error is None and not odd and message.value() == expected()
                offset, timestamp_ms = (message.offset(), message.timestamp()[1]) if plain else (-1, -1)
            except Exception:
                offset, timestamp_ms = -1, -1  # whoever tells of it meets the same error
            if offset >= 0:
                add_offset(offset)
                add_timestamp_ms(timestamp_ms)
            else:
                odd.append(message)
            if next(counted) == count:
                done(self)

        return report

    def record(self, number: int) -> Outgoing:
        """One of them."""
        return self._many.record(self.places[number])

    def messages(self) -> list[dict[str, Any]]:
        """The records as the client takes many."""
        places, many = self.places, self._many
        columns = zip(map(many.values.__getitem__, places), map(many.keys.__getitem__, places), strict=True)
        return [{"value": value, "key": key} for value, key in columns]

    def refuse(self, number: int, error: TidebookError) -> bool:
        """The client did not take this one: there will be no report of it. True if it is the last that was awaited."""
        self._refused[number] = error
        return next(self._counted) == len(self.places)

    def tell(self, result: Sent | TidebookError) -> None:
        """The same of all of them, in the event loop."""
        self._tell([(self.places, [result] * len(self.places))])

    def tell_reported(self, undelivered: Undelivered) -> None:
        """What the client reported, in the event loop; what cannot be read of it is unknown, for all of them."""
        try:
            told = self._reported(undelivered)
        except Exception as failure:
            unknown = OutcomeUnknown(
                f"sending to {self.topic}/{self.partition}: the acknowledgements could not be read: {failure!r}",
                partition=self.partition,
            )
            told = [(self.places, [unknown] * len(self.places))]
        self._tell(told)

    def _tell(self, told: Told) -> None:
        """All of it, though one who is told may fail: the others still wait."""
        del self.report  # it holds the run, which would stay until the garbage collector finds it
        failed: Exception | None = None
        for places, results in told:
            try:
                self._on_sent(places, results)
            except Exception as error:
                failed = error
        if failed is not None:
            raise failed

    def _reported(self, undelivered: Undelivered) -> Told:
        sent = SentTogether(self.partition, self._offsets, self._timestamps_ms)
        if len(sent) == len(self.places):
            return [(self.places, sent)]
        told: Told = [((self.places[number],), (refusal,)) for number, refusal in self._refused.items()]
        # By what the reports gave back; of equal records each may stand for the other.
        keys, values, waiting = self._many.keys, self._many.values, self._unrefused()
        for place, each in zip(self.places, sent, strict=False):
            told.append(((waiting[keys[place], values[place]].popleft(),), (each,)))
        for report in self._odd:
            place, error, offset = waiting[report.key(), report.value()].popleft(), report.error(), report.offset()
            if error is None and offset >= 0:
                result: Sent | TidebookError = Sent(self.partition, offset, report.timestamp()[1])
            else:
                result = undelivered(self._many.record(place), error)
            told.append(((place,), (result,)))
        return told

    def _unrefused(self) -> dict[tuple[bytes | None, bytes | None], deque[int]]:
        """The places of what the client took, by key and value, in their order."""
        found: defaultdict[tuple[bytes | None, bytes | None], deque[int]] = defaultdict(deque)
        for number, place in enumerate(self.places):
            if number not in self._refused:
                found[self._many.keys[place], self._many.values[place]].append(place)
        return found

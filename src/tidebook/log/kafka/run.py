"""Records of one partition that go together: the client is handed them in one loop, and its reports are read in one."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count, repeat
from operator import itemgetter

from confluent_kafka import KafkaError
from confluent_kafka import Message as ClientMessage

from tidebook.core.errors import OutcomeUnknown, TidebookError
from tidebook.log.kafka.reading import Message
from tidebook.log.port import Many, OnSentMany, Outgoing, Sent, SentTogether

#: Reports that are kept before they are read: read together they cost half, and thousands would leave the cache.
REPORTS_AT_ONCE = 32
#: A run of records that are larger than others has fewer of them.
RUN_BYTES = 1_000_000
#: What is told of a record that was not delivered; without an error, the client does not know where it lies.
Undelivered = Callable[[Outgoing, KafkaError | None], TidebookError]
#: The client's `produce`.
Produce = Callable[[str, bytes, bytes, int, Callable[[KafkaError | None, Message], None]], None]
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


_value_of, _offset_of, _time_of = ClientMessage.value, ClientMessage.offset, ClientMessage.timestamp


class Run:
    """In the order in which they were sent. The client calls `report` for each of them, delivered or not."""

    __slots__ = (
        "_counted", "_keys", "_many", "_odd", "_offsets", "_on_sent", "_refused", "_reports", "_timestamps_ms",
        "_values", "give_up_at", "handed", "in_flight", "partition", "places", "report", "size_bytes", "topic",
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
        #: How many the client was given, those that it refused included.
        self.handed = 0
        #: Whether they count as in flight: from the first try to hand them over until all are told.
        self.in_flight = False
        #: Should they still wait in this process then, they are given up.
        self.give_up_at = give_up_at
        self._many = many
        take = itemgetter(slice(0), *places)  # a slice too, for of a single place it would make no tuple
        self._values: Sequence[bytes] = take(many.values)[1:]
        self._keys: Sequence[bytes] = take(many.keys)[1:]
        self.size_bytes = sum(map(len, self._values))
        self._on_sent = on_sent
        #: Not yet read.
        self._reports: list[Message] = []
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
        """What the client calls, in whichever thread polls."""
        keep, reports, read, odd = self._reports.append, self._reports, self._read, self._odd
        count, counted = len(self.places), self._counted

        def report(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                read()
                odd.append(message)
            else:
                keep(message)
                if len(reports) == REPORTS_AT_ONCE:
                    read()
            if next(counted) == count:
                done(self)

        return report

    def _read(self) -> None:
        """Take in what was reported. A report gives its record back, so which one it speaks of is certain."""
        reports, at = self._reports.copy(), len(self._offsets)
        self._reports.clear()
        offsets: list[int | None] = []
        timestamps_ms: list[int] = []
        try:
            if not self._odd and tuple(map(_value_of, reports)) == self._values[at : at + len(reports)]:
                offsets = list(map(_offset_of, reports))
                timestamps_ms = [timestamp_ms for _, timestamp_ms in map(_time_of, reports)]
        except Exception:
            offsets = []  # whoever tells of it meets the same error
        known = [offset for offset in offsets if offset is not None]  # it has none where the broker forgot it
        if len(known) == len(reports):
            self._offsets += known
            self._timestamps_ms += timestamps_ms
        else:
            self._odd += reports

    def hand_over(self, produce: Produce) -> None:
        """Give the client all that it was not given; what it raises, it raises of number `handed`."""
        handed, topic, partition = self.handed, self.topic, self.partition
        values, keys = (self._values[handed:], self._keys[handed:]) if handed else (self._values, self._keys)
        try:
            # A call for each, yet no Python between the calls: less than half of what `produce_batch()` takes.
            for _ in map(produce, repeat(topic), values, keys, repeat(partition), repeat(self.report)):
                handed += 1
        finally:
            self.handed = handed

    def record(self, number: int) -> Outgoing:
        """One of them."""
        return self._many.record(self.places[number])

    def refuse(self, error: TidebookError) -> bool:
        """The client does not get the next one: there will be no report of it. True if it is the last awaited."""
        self._refused[self.handed] = error
        self.handed += 1
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
        self._read()
        sent = SentTogether(self.partition, self._offsets, self._timestamps_ms)
        if len(sent) == len(self.places):
            return [(self.places, sent)]
        told: Told = [((self.places[number],), (refusal,)) for number, refusal in self._refused.items()]
        # By what the reports gave back; of equal records each may stand for the other.
        waiting = self._unrefused()
        for key, value, each in zip(self._keys, self._values, sent, strict=False):
            told.append(((waiting[key, value].popleft(),), (each,)))
        for report in self._odd:
            place, error, offset = waiting[report.key(), report.value()].popleft(), report.error(), report.offset()
            if error is None and offset is not None:
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
                found[self._keys[number], self._values[number]].append(place)
        return found

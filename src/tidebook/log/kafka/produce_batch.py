"""A batch of records of one partition, produced in one loop and acknowledged together."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count, repeat
from operator import itemgetter

from confluent_kafka import KafkaError
from confluent_kafka import Message as ClientMessage

from tidebook.core.errors import OutcomeUnknown, TidebookError
from tidebook.log.kafka.slice_reader import Message
from tidebook.log.port import Acknowledged, AcknowledgedBatch, OnSentMany, Outgoing, RecordColumns

#: Delivery reports that are read together: that halves their cost, and thousands would not fit in the CPU cache.
REPORTS_AT_ONCE = 32
#: The maximum size of a batch; a batch of larger records has fewer of them.
BATCH_BYTES = 1_000_000
#: Returns the error of a record that was not delivered; without a KafkaError, the broker no longer knows its offset.
DeliveryError = Callable[[Outgoing, KafkaError | None], TidebookError]
#: The `produce` method of a confluent_kafka producer.
Produce = Callable[[str, bytes, bytes, int, Callable[[KafkaError | None, Message], None]], None]
#: Indexes of records, and the result of each.
Outcomes = list[tuple[Sequence[int], Sequence[Acknowledged | TidebookError]]]


def produce_batches(columns: RecordColumns) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield each partition with the indexes of its records, split at `BATCH_BYTES`."""
    by_partition: defaultdict[int, list[int]] = defaultdict(list)
    for index, partition in enumerate(columns.partitions):
        by_partition[partition].append(index)
    largest = max(map(len, columns.values), default=0)
    length = max(1, BATCH_BYTES // max(1, largest))
    for partition, indexes in by_partition.items():
        for start in range(0, len(indexes), length):
            yield partition, indexes[start : start + length]


_value_of, _offset_of, _time_of = ClientMessage.value, ClientMessage.offset, ClientMessage.timestamp


class ProduceBatch:
    """Records of one partition in send order; the client calls `report` once for each, delivered or not."""

    __slots__ = (
        "_columns",
        "_completions",
        "_irregular",
        "_keys",
        "_offsets",
        "_on_sent",
        "_rejected",
        "_reports",
        "_timestamps_ms",
        "_values",
        "deadline",
        "in_flight",
        "indexes",
        "partition",
        "produced",
        "report",
        "size_bytes",
        "topic",
    )  # fmt: skip

    def __init__(
        self,
        columns: RecordColumns,
        partition: int,
        indexes: Sequence[int],
        on_sent: OnSentMany,
        completed: Callable[[ProduceBatch], None],
        deadline: float,
    ) -> None:
        self.topic = columns.topic
        self.partition = partition
        self.indexes = indexes
        #: How many records the client was given, including those that it rejected.
        self.produced = 0
        #: Whether the batch counts as in flight: from the first attempt to produce it until all results are known.
        self.in_flight = False
        #: If the batch still waits in this process at this time, the rest of it fails.
        self.deadline = deadline
        self._columns = columns
        take = itemgetter(slice(0), *indexes)  # the slice makes the result a tuple even for a single index
        self._values: Sequence[bytes] = take(columns.values)[1:]
        self._keys: Sequence[bytes] = take(columns.keys)[1:]
        self.size_bytes = sum(map(len, self._values))
        self._on_sent = on_sent
        #: Reports that are not read yet.
        self._reports: list[Message] = []
        #: The results of the first records, as long as reports come in order and without an error.
        self._offsets: list[int] = []
        self._timestamps_ms: list[int] = []
        #: All reports from the first one that is out of order or has an error.
        self._irregular: list[Message] = []
        #: The records that the client rejected, by their position in the batch.
        self._rejected: dict[int, TidebookError] = {}
        #: One thread may report while another rejects: the one that draws the last number completes the batch.
        self._completions = count(1)
        self.report = self._reporter(completed)

    def _reporter(self, completed: Callable[[ProduceBatch], None]) -> Callable[[KafkaError | None, Message], None]:
        """Return the delivery callback; it runs in the polling thread."""
        add_report, reports, read_reports, irregular = (
            self._reports.append,
            self._reports,
            self._read_reports,
            self._irregular,
        )
        count, completions = len(self.indexes), self._completions

        def report(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                read_reports()
                irregular.append(message)
            else:
                add_report(message)
                if len(reports) == REPORTS_AT_ONCE:
                    read_reports()
            if next(completions) == count:
                completed(self)

        return report

    def _read_reports(self) -> None:
        """Read the collected reports; each returns its record, which identifies it."""
        reports, at = self._reports.copy(), len(self._offsets)
        self._reports.clear()
        offsets: list[int | None] = []
        timestamps_ms: list[int] = []
        try:
            if not self._irregular and tuple(map(_value_of, reports)) == self._values[at : at + len(reports)]:
                offsets = list(map(_offset_of, reports))
                timestamps_ms = [timestamp_ms for _, timestamp_ms in map(_time_of, reports)]
        except Exception:
            offsets = []  # `_outcomes` meets the same error and handles it
        known = [offset for offset in offsets if offset is not None]  # None if the broker no longer knows it
        if len(known) == len(reports):
            self._offsets += known
            self._timestamps_ms += timestamps_ms
        else:
            self._irregular += reports

    def produce_all(self, produce: Produce) -> None:
        """Produce the remaining records; on error, `produced` is the position of the record that failed."""
        produced, topic, partition = self.produced, self.topic, self.partition
        values, keys = (self._values[produced:], self._keys[produced:]) if produced else (self._values, self._keys)
        try:
            # One call a record but no Python code between them: less than half the cost of `produce_batch()`.
            for _ in map(produce, repeat(topic), values, keys, repeat(partition), repeat(self.report)):
                produced += 1
        finally:
            self.produced = produced

    def record(self, number: int) -> Outgoing:
        """Return the record at this position in the batch."""
        return self._columns.record(self.indexes[number])

    def reject(self, error: TidebookError) -> bool:
        """Fail the next record, which the client does not get; return whether that completes the batch."""
        self._rejected[self.produced] = error
        self.produced += 1
        return next(self._completions) == len(self.indexes)

    def resolve(self, result: Acknowledged | TidebookError) -> None:
        """Give all records the same result; runs in the event loop."""
        self._notify([(self.indexes, [result] * len(self.indexes))])

    def resolve_reported(self, delivery_error: DeliveryError) -> None:
        """Give each record its reported result; if the reports are unreadable, the outcome of all is unknown."""
        try:
            outcomes = self._outcomes(delivery_error)
        except Exception as failure:
            unknown = OutcomeUnknown(
                f"sending to {self.topic}/{self.partition}: the acknowledgements could not be read: {failure!r}",
                partition=self.partition,
            )
            outcomes = [(self.indexes, [unknown] * len(self.indexes))]
        self._notify(outcomes)

    def _notify(self, outcomes: Outcomes) -> None:
        """Call back with all results, even if one callback raises: the other senders still wait."""
        del self.report  # breaks the reference cycle, which would keep the batch until a garbage collection
        failed: Exception | None = None
        for indexes, results in outcomes:
            try:
                self._on_sent(indexes, results)
            except Exception as error:
                failed = error
        if failed is not None:
            raise failed

    def _outcomes(self, delivery_error: DeliveryError) -> Outcomes:
        self._read_reports()
        sent = AcknowledgedBatch(self.partition, self._offsets, self._timestamps_ms)
        if len(sent) == len(self.indexes):
            return [(self.indexes, sent)]
        outcomes: Outcomes = [((self.indexes[number],), (rejection,)) for number, rejection in self._rejected.items()]
        # Match reports to records by key and value; equal records are interchangeable.
        unmatched = self._accepted_indexes()
        for key, value, each in zip(self._keys, self._values, sent, strict=False):
            outcomes.append(((unmatched[key, value].popleft(),), (each,)))
        for report in self._irregular:
            index, error, offset = unmatched[report.key(), report.value()].popleft(), report.error(), report.offset()
            if error is None and offset is not None:
                result: Acknowledged | TidebookError = Acknowledged(self.partition, offset, report.timestamp()[1])
            else:
                result = delivery_error(self._columns.record(index), error)
            outcomes.append(((index,), (result,)))
        return outcomes

    def _accepted_indexes(self) -> dict[tuple[bytes | None, bytes | None], deque[int]]:
        """Return the indexes of the records that the client accepted, by key and value, in order."""
        found: defaultdict[tuple[bytes | None, bytes | None], deque[int]] = defaultdict(deque)
        for number, index in enumerate(self.indexes):
            if number not in self._rejected:
                found[self._keys[number], self._values[number]].append(index)
        return found

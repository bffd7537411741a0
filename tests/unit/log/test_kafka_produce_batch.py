"""Produce batches: each sender gets its own result, whatever the client reports and in whatever order."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
from confluent_kafka import KafkaError, Message

from tidebook.core.errors import OutcomeUnknown, TidebookError, Unavailable
from tidebook.log.kafka import producer as producing
from tidebook.log.kafka.producer import ProduceBatch, split_columns
from tidebook.log.port import Acknowledged, Outgoing, RecordColumns


class Report(Message):
    """The delivered message, as the client passes it to a callback."""

    def __init__(self, value: bytes, offset: int, error: KafkaError | None = None, key: bytes = b"k") -> None:
        super().__init__("t", 3, offset, key, value, error=error, timestamp=(1, 1000 + offset))


class Sender:
    """The producer, as a batch sees it."""

    in_flight = 0

    def __init__(self) -> None:
        self.done: deque[ProduceBatch] = deque()
        self.failures: list[Exception] = []

    def delivery_error(self, record: Outgoing, error: KafkaError | None) -> TidebookError:
        return Unavailable(f"{record.value!r}") if error is not None else OutcomeUnknown(f"{record.value!r}")

    def callback_failed(self, error: Exception) -> None:
        self.failures.append(error)

    def resolve_done(self) -> None:
        while self.done:
            self.done.popleft().resolve()


def batch(sender: Any, values: Sequence[bytes], on_sent: Any) -> ProduceBatch:
    columns = RecordColumns("t", [3] * len(values), [b"k"] * len(values), list(values))
    return ProduceBatch(sender, columns, 3, range(len(values)), on_sent, 0.0)


class Reported:
    """The results of the senders of a batch."""

    def __init__(self, values: Sequence[bytes]) -> None:
        self.results: dict[int, Acknowledged | TidebookError] = {}
        self.sender = Sender()
        self.batch = batch(self.sender, values, self._take)

    def _take(self, indexes: Sequence[int], results: Sequence[Acknowledged | TidebookError]) -> None:
        self.results |= dict(zip(indexes, results, strict=True))

    def report(self, *reports: Report) -> dict[int, Any]:
        for each in reports:
            assert list(self.sender.done) == []
            self.batch.report(each.error(), each)
        self.sender.resolve_done()
        return self.results


FAILED = KafkaError(KafkaError._MSG_TIMED_OUT)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_offsets_grow_in_the_order_of_sending_whatever_the_order_of_reports(order: tuple[int, ...]) -> None:
    values = [b"a", b"b", b"c"]
    reported = Reported(values).report(*(Report(values[n], 7 + 2 * n) for n in order))
    assert reported == {n: Acknowledged(3, 7 + 2 * n, 1007 + 2 * n) for n in range(3)}


@pytest.mark.parametrize("failed", [{0}, {1}, {2}, {0, 2}, {0, 1, 2}])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_errors_are_reported_for_the_records_that_failed(order: tuple[int, ...], failed: set[int]) -> None:
    values = [b"a", b"b", b"c"]
    reports = [Report(values[n], -1, FAILED) if n in failed else Report(values[n], 7 + n) for n in order]
    reported = Reported(values).report(*reports)
    for n in range(3):
        if n in failed:
            assert isinstance(reported[n], Unavailable)
            assert str(reported[n]) == f"{values[n]!r}"
        else:
            assert reported[n] == Acknowledged(3, 7 + n, 1007 + n)


def test_a_record_without_an_offset_has_an_unknown_outcome() -> None:
    reported = Reported([b"a", b"b"]).report(Report(b"a", -1), Report(b"b", 9))
    assert isinstance(reported[0], OutcomeUnknown)
    assert reported[1] == Acknowledged(3, 9, 1009)


def test_one_of_several_equal_records_fails() -> None:
    reported = Reported([b"a", b"a", b"b"]).report(Report(b"b", 5), Report(b"a", 4), Report(b"a", -1, FAILED))
    assert reported[2] == Acknowledged(3, 5, 1005)
    assert [type(reported[0]), type(reported[1])] == [Acknowledged, Unavailable]


@pytest.mark.parametrize("refused_first", [True, False])
def test_a_record_that_the_client_rejects_has_its_own_error(refused_first: bool) -> None:
    reported, refusal = Reported([b"a", b"a", b"c"]), Unavailable("full")
    reported.batch.produced = 1
    if refused_first:
        reported.batch.reject(refusal)
    reported.batch.report(None, Report(b"a", 4))
    assert list(reported.sender.done) == []
    reported.batch.report(None, Report(b"c", 5))
    if not refused_first:
        assert list(reported.sender.done) == []
        reported.batch.reject(refusal)
    reported.sender.resolve_done()
    assert reported.results == {0: Acknowledged(3, 4, 1004), 1: refusal, 2: Acknowledged(3, 5, 1005)}


def test_a_batch_whose_last_report_and_last_rejection_come_at_the_same_time_is_resolved_once() -> None:
    reported = Reported([b"a", b"b"])
    reported.batch.produced = 1
    reported.batch.report(None, Report(b"a", 4))
    reported.batch.reject(Unavailable("full"))
    reported.sender.done.append(reported.batch)  # as another thread's report would at this moment
    reported.sender.in_flight = 1
    reported.sender.resolve_done()
    assert reported.sender.in_flight == 0
    assert reported.results[0] == Acknowledged(3, 4, 1004)


def test_a_resolved_batch_is_freed_at_once() -> None:
    """Reference counting frees the batch, not the garbage collector, because a batch may hold thousands of results."""

    class Receiver:
        def take(self, _: Sequence[int], __: Sequence[Acknowledged | TidebookError]) -> None: ...

    received = Receiver()
    gone = weakref.ref(received)
    each = batch(sender := Sender(), [b"a"], received.take)
    gc.disable()
    try:
        each.report(None, Report(b"a", 4))
        sender.resolve_done()
        del each, received
        assert gone() is None
    finally:
        gc.enable()


def test_a_failing_callback_does_not_affect_the_results_of_other_senders() -> None:
    received: list[int] = []

    def take(indexes: Sequence[int], _: Sequence[Acknowledged | TidebookError]) -> None:
        if 0 in indexes:
            raise RuntimeError("mine")
        received.extend(indexes)

    each = batch(sender := Sender(), [b"a", b"b"], take)
    each.report(FAILED, Report(b"a", -1, FAILED))
    each.report(None, Report(b"b", 4))
    sender.resolve_done()
    assert received == [1]
    assert [str(error) for error in sender.failures] == ["mine"]


def test_a_batch_has_records_of_one_partition_in_order_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producing, "BATCH_BYTES", 25)
    many = RecordColumns("t", [0, 1, 0, 0, 1, 0], [b"k"] * 6, [b"x" * 10] * 6)
    assert list(split_columns(many)) == [(0, [0, 2]), (0, [3, 5]), (1, [1, 4])]
    assert list(split_columns(RecordColumns("t", [0, 0], [b"k"] * 2, [b"x" * 1000] * 2))) == [(0, [0]), (0, [1])]
    assert list(split_columns(RecordColumns("t", [], [], []))) == []


@pytest.mark.parametrize("count", [31, 32, 33, 64, 100])
@pytest.mark.parametrize("odd", [None, 0, 30, 31, 32, 63])
def test_reports_are_read_in_groups_and_a_failed_one_is_matched_to_its_record(count: int, odd: int | None) -> None:
    values = [b"%d" % n for n in range(count)]
    reports = [Report(value, -1, FAILED) if n == odd else Report(value, 7 + n) for n, value in enumerate(values)]
    reported = Reported(values).report(*reports)
    assert [n for n, result in reported.items() if not isinstance(result, Acknowledged)] == (
        [] if odd is None else [odd]
    )[: count > (odd or 0)]
    assert all(result == Acknowledged(3, 7 + n, 1007 + n) for n, result in reported.items() if n != odd)


def test_the_rest_of_a_batch_is_produced_after_the_clients_queue_was_full() -> None:
    reported, given = Reported([b"a", b"b", b"c"]), list[bytes]()

    def produce(_: str, value: bytes, *__: object) -> None:
        if len(given) == 1 and reported.batch.produced == 0:
            raise BufferError
        given.append(value)

    with pytest.raises(BufferError):
        reported.batch.produce_rest(produce)
    assert reported.batch.produced == 1
    reported.batch.produce_rest(produce)
    assert (reported.batch.produced, given) == (3, [b"a", b"b", b"c"])

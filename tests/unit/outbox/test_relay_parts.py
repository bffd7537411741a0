"""Small parts of the relay: partitioner, wake-ups, shutdown, journal messages and producers."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from hypothesis import given
from hypothesis import strategies as st

from tidebook.core.action import NEVER
from tidebook.core.errors import Corrupt, InvalidInput
from tidebook.core.event import Event
from tidebook.outbox.journal import append_id
from tidebook.outbox.kafka.producer import (
    ClientCall,
    RelayProducer,
    choose_partition,
    closing_count,
    fatal_cause,
    murmur2,
)
from tidebook.outbox.message import journal_message, read_journal_message
from tidebook.outbox.relay import RelayWakeup, nudge
from tidebook.outbox.sql import dialect
from tidebook.outbox.topic_relay import RelayShutdown


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_equals_that_of_kafkas_own_clients(data: bytes, expected: int) -> None:
    assert murmur2(data) == expected & 0xFFFFFFFF


@given(st.binary(max_size=40), st.integers(1, 1000))
def test_a_chosen_partition_is_in_range(data: bytes, partitions: int) -> None:
    assert 0 <= choose_partition(data, partitions) < partitions


def test_a_nudge_wakes_every_relay_of_the_process() -> None:
    one, two = RelayWakeup(), RelayWakeup()
    threading.Timer(0.01, nudge).start()
    assert one.wait(5)
    assert two.wait(5)
    assert one.nudged
    assert not one.wait(0)


def test_a_shutdown_is_overdue_only_after_its_deadline() -> None:
    stop = RelayShutdown()
    assert not stop.requested()
    assert not stop.overdue()
    stop.request(0.02)
    stop.request(100)
    assert stop.requested()
    deadline = time.monotonic() + 5
    while not stop.overdue():
        assert time.monotonic() < deadline


def test_an_append_round_trips_through_its_message() -> None:
    events = [Event({"a": 1}, tags={"t"}, metadata={"m": 2}), Event("text"), Event(b"bytes")]
    made = journal_message("orders", "o-1", events, expected=3, expire_after=timedelta(days=1))
    assert (made.topic, made.key) == ("journal:orders", b"o-1")
    append = read_journal_message(made.payload)
    assert (append.id, append.expected, append.expiry()) == ("o-1", 3, timedelta(days=1))
    assert append.decoded_events() == events
    forever = read_journal_message(journal_message("orders", "o-1", events, expire_after=NEVER).payload)
    assert forever.expiry() == NEVER


@pytest.mark.parametrize("events", [[], Event(1), "text", [1]])
def test_an_append_without_events_is_refused(events: object) -> None:
    with pytest.raises(InvalidInput):
        journal_message("orders", "o-1", events)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "how",
    [{"expected": -1}, {"expected": 2**53}, {"expected": True}, {"expire_after": 5}, {"expire_after": timedelta(0)}],
    ids=repr,
)
def test_an_append_with_arguments_that_its_journal_would_refuse_is_refused(how: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        journal_message("orders", "o-1", [Event(1)], **how)


def test_a_payload_that_is_not_an_append_is_corrupt() -> None:
    with pytest.raises(Corrupt):
        read_journal_message(b"\xff")
    with pytest.raises(Corrupt):
        read_journal_message(None)


def test_append_ids_differ_between_outboxes_rows_and_values() -> None:
    made = {append_id(a, id, value) for a in (b"a" * 16, b"b" * 16) for id in (1, 2) for value in (b"x", b"y")}
    assert len(made) == 8
    assert all(len(each) == 16 for each in made)
    assert append_id(b"a" * 16, 1, b"x") in made


def test_databases_have_several_names() -> None:
    assert [dialect(name) for name in ("PostgreSQL", "mariadb", "sqlite")] == ["postgresql", "mysql", "sqlite"]
    with pytest.raises(InvalidInput, match="oracle"):
        dialect("oracle")


@pytest.mark.parametrize("wrapped", [0, 1, 5])
def test_a_fatal_error_is_found_however_often_callbacks_wrapped_it(wrapped: int) -> None:
    error: BaseException = KafkaException(KafkaError(KafkaError._GAPLESS_GUARANTEE, "Invalid timestamp"))
    for _ in range(wrapped):
        outer = SystemError("returned a result with an exception set")
        outer.__cause__ = error
        error = outer
    assert fatal_cause(error, RelayProducer({})).str() == "Invalid timestamp"


def test_a_fatal_error_that_was_lost_is_read_from_the_clients_log() -> None:
    producer = RelayProducer({})
    producer.client_log.log(50, "%s [%s] %s", "FATAL", "producer-1", "[thrd:main]: Fatal error: Invalid timestamp")
    assert fatal_cause(SystemError("returned NULL"), producer).str() == "Invalid timestamp"
    assert fatal_cause(SystemError("odd"), RelayProducer({})).str() == "odd"


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_producer_is_closed_with_its_last_reference_in_a_separate_thread() -> None:
    """Closing does not depend on garbage collection, which could run in any thread."""
    ended_in: list[int] = []
    producer = RelayProducer({})
    gone = weakref.ref(producer, lambda _: ended_in.append(threading.get_ident()))
    gc.disable()
    try:
        del producer
        until(lambda: ended_in and gone() is None)
    finally:
        gc.enable()
    assert ended_in != [threading.get_ident()]
    until(lambda: closing_count() == 0)


def test_a_call_that_does_not_return_is_counted_until_it_does() -> None:
    go = threading.Event()
    call = ClientCall(go.wait)
    assert not call.wait(0.01)
    call.abandon()
    assert closing_count() == 1
    go.set()
    assert call.wait(5)
    call.result()
    until(lambda: closing_count() == 0)
    call.abandon()
    assert closing_count() == 0


def test_an_error_of_the_call_is_raised() -> None:
    call = ClientCall(lambda: 1 // 0)
    assert call.wait(5)
    with pytest.raises(ZeroDivisionError):
        call.result()

"""Saved offsets of a topic that was deleted and created again identify no records of the new one."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("pyspark")

from tests.pipeline.workloads import lose_log, replicate_here
from tidebook.core.errors import Corrupt, InvalidInput
from tidebook.core.event import Event
from tidebook.core.key import partition_of
from tidebook.log.port import Outgoing
from tidebook.pipeline.jobs.export import _spans
from tidebook.pipeline.source.journal_stream import JournalStream
from tidebook.pipeline.source.records import TOPIC_ID
from tidebook.replication.status import topic_configs
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wiring.book import Book

TOPIC = "orders"


def write(book: Book, portal: BlockingPortal, *payloads: int) -> None:
    for payload in payloads:
        portal.run(book.journal(TOPIC).append("a", [Event(payload)]))
    portal.run(replicate_here(book, book.store, TOPIC))


def recreate(book: Book, portal: BlockingPortal, *payloads: int) -> None:
    portal.run(book.delete_topic(TOPIC))
    write(book, portal, *payloads)


def stream(book: Book, **options: str) -> JournalStream:
    return JournalStream({"book": str(book.settings.folder), "topic": TOPIC, **options})


def trigger(stream: JournalStream, start: Any) -> Any:
    return stream.latestOffset(start, stream.getDefaultReadLimit())


def rows(stream: JournalStream, start: Any, end: Any) -> list[bytes]:
    batches = [batch for part in stream.partitions(start, end) for batch in stream.read(part)]
    return [payload for batch in batches for payload in batch.column("payload").to_pylist()]


def test_a_stream_does_not_continue_in_the_new_topic(book: Book, portal: BlockingPortal) -> None:
    write(book, portal, 1, 2)
    before = stream(book)
    start = before.initialOffset()
    end = trigger(before, start)
    assert rows(before, start, end) == [b"1", b"2"]
    recreate(book, portal, 3, 4, 5)
    with pytest.raises(Corrupt, match="topic orders: it was deleted and created again since the stream has read it"):
        trigger(stream(book), end)
    with pytest.raises(Corrupt, match="deleted and created again"):
        rows(stream(book), start, end)  # a batch that Spark repeats after a crash
    after = stream(book)
    start = after.initialOffset()
    assert rows(after, start, trigger(after, start)) == [b"3", b"4", b"5"]


def test_a_stream_with_offsets_of_an_earlier_version_continues_and_notices_a_recreated_topic(
    book: Book, portal: BlockingPortal
) -> None:
    write(book, portal, 1, 2)
    reader = stream(book)
    start = reader.initialOffset()
    stored = {TOPIC: {name: number for name, number in start[TOPIC].items() if name != TOPIC_ID}}
    end = trigger(reader, stored)
    assert end == trigger(reader, start)
    assert rows(reader, stored, end) == [b"1", b"2"]
    recreate(book, portal, 3, 4, 5)
    with pytest.raises(Corrupt, match="deleted and created again"):
        trigger(stream(book), end)


def test_a_log_that_is_replaced_between_the_plan_and_the_read_of_a_batch_is_an_error(
    book: Book, portal: BlockingPortal
) -> None:
    """Its records would be returned with the numbers of those that were at their offsets."""
    write(book, portal, 1, 2)
    reader = stream(book)
    start = reader.initialOffset()
    end = trigger(reader, start)
    config = portal.run(book.store.topic_config(TOPIC))
    assert config is not None
    records = [
        record
        for number in range(config.partitions)
        for record in portal.run(book.log.read(TOPIC, number, start=0, stop=10)).records
    ]
    portal.run(lose_log(book, TOPIC))
    for record in records:
        assert record.key is not None
        home = partition_of(record.key.decode(), config.partitions)
        portal.run(book.log.append(Outgoing(TOPIC, home, record.key, record.value or b"")))
    with pytest.raises(Corrupt, match="the log holds another incarnation of it than the store was filled from"):
        rows(reader, start, end)


def test_starting_offsets_of_an_epoch_that_has_not_begun_are_an_error_of_the_option(
    book: Book, portal: BlockingPortal
) -> None:
    write(book, portal, 1)
    given = json.dumps({TOPIC: {"epoch": 2, **{str(number): 0 for number in range(4)}}})
    with pytest.raises(InvalidInput, match="the option startingOffsets names epoch 2 of topic orders, which is in ep"):
        stream(book, startingOffsets=given).initialOffset()
    with pytest.raises(InvalidInput, match="the option startingOffsets must be JSON"):
        stream(book, startingOffsets=json.dumps({TOPIC: {TOPIC_ID: 1, "0": 0}}))


def test_an_export_takes_all_events_of_the_new_topic(book: Book, portal: BlockingPortal) -> None:
    write(book, portal, 1, 2, 3)
    spans = portal.run(_spans(book, portal.run(topic_configs(book.store)), {}))
    reached = {TOPIC: spans[TOPIC].stops}
    assert portal.run(_spans(book, portal.run(topic_configs(book.store)), reached)) == {}
    recreate(book, portal, 4, 5, 6)
    span = portal.run(_spans(book, portal.run(topic_configs(book.store)), reached))[TOPIC]
    assert not span.in_log
    assert set(span.starts.values()) == {0}
    assert span.stops != reached[TOPIC]

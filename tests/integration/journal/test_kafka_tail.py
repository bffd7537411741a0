"""Reads on Kafka: which of them open a consumer, and how much memory an unreplicated tail takes."""

from __future__ import annotations

import gc
import os
import uuid
from pathlib import Path

import pytest

from tests.integration.journal.conftest import OpenBook
from tidebook.core.event import Event
from tidebook.testing.replicating import replicate

pytestmark = [pytest.mark.kafka, pytest.mark.cassandra]


def topic_name() -> str:
    return f"tail-{uuid.uuid4().hex[:8]}"


async def test_no_consumer_is_opened_if_the_pointer_has_passed_the_barrier(open_book: OpenBook) -> None:
    topic = topic_name()
    async with open_book(partitions=1) as book:
        await book.journal(topic).append("a", [Event(n) for n in range(3)])
        await replicate(book.log, book.store, topic)
    async with open_book() as book:
        read = [event.payload async for event in book.journal(topic).read("a", barrier="offset")]
        assert read == [0, 1, 2]
        assert book.metrics.counted("read_store_only") == 1
        assert book.metrics.counted("kafka_consumer_opened") == 0
    async with open_book() as book:  # only the default barrier is after the pointer
        assert [event.payload async for event in book.journal(topic).read("a")] == [0, 1, 2]
        assert book.metrics.counted("kafka_consumer_opened") == 0


async def test_no_further_consumer_is_opened_if_the_head_cache_has_the_tail(open_book: OpenBook) -> None:
    topic = topic_name()
    async with open_book(partitions=1) as book:
        journal = book.journal(topic)
        for n in range(20):
            await journal.append(f"j-{n % 4}", [Event(n)])
        assert [event.payload async for event in journal.read("j-1")] == [1, 5, 9, 13, 17]
        opened = book.metrics.counted("kafka_consumer_opened")
        scanned = book.metrics.counted("tail_read_from_log")
        for n in range(4):
            assert len([event async for event in journal.read(f"j-{n}")]) == 5
            assert await journal.pointer(f"j-{n}") == 5
        assert book.metrics.counted("kafka_consumer_opened") == opened
        assert book.metrics.counted("tail_read_from_log") == scanned


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "bounds",
    [{}, {"cached_bytes_max": 2_000_000, "cached_offsets_max": 20_000, "tail_bytes_max": 1_000_000}],
    ids=["default", "small"],
)
async def test_a_long_unreplicated_tail_is_read_in_bounded_memory(
    open_book: OpenBook, long_form: bool, bounds: dict[str, int]
) -> None:
    topic = topic_name()
    count = 100_000 if long_form or not bounds else 30_000
    async with open_book(partitions=1, **bounds) as book:
        journal = book.journal(topic)
        await journal.create()
        gc.collect()
        at_first_mb = resident_mb()
        for start in range(0, count, 5_000):
            items = [(f"o-{n % 500}", [Event(b"x" * 200)]) for n in range(start, start + 4_990)]
            await journal.append_many([*items, *([("mine", [Event(b"y" * 200)])] * 10)], confirm=False)
        gc.collect()
        appended_mb = resident_mb()
        assert appended_mb - at_first_mb < 40
        for _ in range(2):
            assert len([event async for event in journal.read("mine")]) == count // 500
        assert resident_mb() - appended_mb < (100 if bounds else 200)
        assert (await journal.append("mine", [Event("last")])).last == count // 500 + 1


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

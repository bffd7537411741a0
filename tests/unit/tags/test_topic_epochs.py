"""Streams by tag across the epochs of a topic."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.replication.ticking import replicate_ticks
from tidebook.core.event import Event
from tidebook.testing.clock import ManualClock
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings


@pytest.mark.parametrize("back_ms", [0, 3_600_000])
async def test_a_journal_keeps_its_order_when_offsets_restart(tmp_path: Path, back_ms: int) -> None:
    """The new log's clock is stopped or slow: its events still come after all earlier ones."""
    clock = ManualClock()
    settings = Settings(tmp_path, {"journal": Section(None, {"partitions": 1})})
    async with Book(settings, clock=clock) as book:
        for n in range(5):
            await book.journal("t").append("a", [Event(n, tags={"paid"})])
        await replicate(book.log, book.store, "t")
        await book.log.delete_topic("t")
        await book.log.create_topic("t", 1)
    clock.set(clock.now_ms() - back_ms)
    async with Book(settings, clock=clock) as book:
        await book.journal("t").adopt()
        for n in range(5, 8):
            await book.journal("t").append("a", [Event(n, tags={"paid"})])
        await replicate(book.log, book.store, "t")
        await replicate_ticks(book.log, book.store)
        assert [event.payload async for event in book.tags.read("paid")] == list(range(8))

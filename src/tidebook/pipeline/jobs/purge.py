"""Purge expired journals: find them in the store, and purge them through the log, where a newer append wins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec

from tidebook.core.head import Head
from tidebook.core.key import partition_of
from tidebook.core.position import Position
from tidebook.core.replication_plan import may_remove_grave
from tidebook.wiring.book import Book

JOURNALS_PER_BATCH = 100


class ExpiredJournal(msgspec.Struct, frozen=True):
    """A journal whose expiry has passed."""

    topic: str
    id: str
    seq_nr: int
    expires_at_ms: int
    #: False in a dry run, or if the journal was appended to or purged meanwhile.
    purged: bool


async def purge_expired(
    book: Book, topics: Sequence[str] = (), *, dry_run: bool = False
) -> AsyncIterator[ExpiredJournal]:
    """Purge every journal whose expiry has passed, and yield each of them.

    A purge takes effect only if the journal has not changed since its head in the store was written.
    """
    now_ms = book.clock.now_ms()
    for topic in topics or await book.topics():
        async for found in _batches(book.store.expired(topic, now_ms=now_ms)):
            journal = book.journal(topic)
            purged = [False] * len(found)
            if not dry_run:
                purged = await asyncio.gather(*(journal.purge_expired(id, head) for id, head in found))
            for (id, head), done in zip(found, purged, strict=True):
                yield ExpiredJournal(topic, id, head.seq_nr, head.expires_at_ms or 0, done)
        if not dry_run:
            await sweep_graves(book, topic)


async def _batches(found: AsyncIterator[tuple[str, Head]]) -> AsyncIterator[list[tuple[str, Head]]]:
    batch: list[tuple[str, Head]] = []
    async for each in found:
        batch.append(each)
        if len(batch) == JOURNALS_PER_BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


async def sweep_graves(book: Book, topic: str) -> int:
    """Remove the graves of a topic that no replay or late slice can need any more; return how many were removed."""
    config = await book.store.topic_config(topic)
    if config is None:
        return 0
    # The log's starts are read before the pointers, which only advance.
    starts = [Position(config.epoch, await book.log.start(topic, number)) for number in range(config.partitions)]
    pointers = await book.store.pointers(topic)
    removed = 0
    async for graves in _batches(book.store.graves(topic)):
        numbers = [partition_of(id, config.partitions) for id, _ in graves]
        old = [
            each
            for each, number in zip(graves, numbers, strict=True)
            if may_remove_grave(each[1], pointers.get(number), starts[number])
        ]
        if old:
            await book.store.remove_graves(topic, old)
        removed += len(old)
    return removed

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

    A purge takes effect only if the journal has not changed since the store's head.
    """
    now_ms = book.clock.now_ms()
    for topic in topics or await book.topics():
        found: list[tuple[str, Head]] = []
        async for each in book.store.expired(topic, now_ms=now_ms):
            found.append(each)
            if len(found) == JOURNALS_PER_BATCH:
                for done in await _purge(book, topic, found, dry_run=dry_run):
                    yield done
                found = []
        for done in await _purge(book, topic, found, dry_run=dry_run):
            yield done
        if not dry_run:
            await sweep_graves(book, topic)


async def sweep_graves(book: Book, topic: str) -> int:
    """Remove the graves of a topic whose earlier records can no longer be replicated; return their number."""
    config = await book.store.topic_config(topic)
    if config is None:
        return 0
    # The log's starts are read before the pointers, which only advance.
    starts = [Position(config.epoch, await book.log.start(topic, number)) for number in range(config.partitions)]
    pointers = await book.store.pointers(topic)
    removed = 0
    found: list[tuple[str, Head]] = []
    async for id, grave in book.store.graves(topic):
        number = partition_of(id, config.partitions)
        if may_remove_grave(grave, pointers.get(number), starts[number]):
            found.append((id, grave))
        if len(found) == JOURNALS_PER_BATCH:
            await book.store.remove_graves(topic, found)
            removed, found = removed + len(found), []
    if found:
        await book.store.remove_graves(topic, found)
    return removed + len(found)


async def _purge(book: Book, topic: str, found: list[tuple[str, Head]], *, dry_run: bool) -> list[ExpiredJournal]:
    journal = book.journal(topic)

    async def one(id: str, head: Head) -> ExpiredJournal:
        purged = not dry_run and await journal.purge_expired(id, head)
        return ExpiredJournal(topic, id, head.seq_nr, head.expires_at_ms or 0, purged)

    return list(await asyncio.gather(*(one(id, head) for id, head in found)))

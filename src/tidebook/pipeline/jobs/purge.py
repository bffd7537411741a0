"""Purge what has expired: found in the store, purged through the log, where a fresh append always wins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec

from tidebook.core.head import Head
from tidebook.wiring.book import Book

AT_ONCE = 100


class Expired(msgspec.Struct, frozen=True):
    """A journal whose expiry has passed."""

    topic: str
    id: str
    seq_nr: int
    expires_at_ms: int
    #: False: it was appended to, or purged, since.
    purged: bool


async def purge_expired(book: Book, topics: Sequence[str] = (), *, dry_run: bool = False) -> AsyncIterator[Expired]:
    """Purge every journal whose expiry lies in the past, however long ago, and tell of each.

    The purge counts only if the journal still stands where the store has it.
    """
    now_ms = book.clock.now_ms()
    for topic in topics or await book.topics():
        found: list[tuple[str, Head]] = []
        async for each in book.store.expired(topic, now_ms=now_ms):
            found.append(each)
            if len(found) == AT_ONCE:
                for done in await _purge(book, topic, found, dry_run=dry_run):
                    yield done
                found = []
        for done in await _purge(book, topic, found, dry_run=dry_run):
            yield done


async def _purge(book: Book, topic: str, found: list[tuple[str, Head]], *, dry_run: bool) -> list[Expired]:
    journal = book.journal(topic)

    async def one(id: str, head: Head) -> Expired:
        purged = not dry_run and await journal.purge_expired(id, head)
        return Expired(topic, id, head.seq_nr, head.expires_at_ms or 0, purged)

    return list(await asyncio.gather(*(one(id, head) for id, head in found)))

"""The journals of a book as a relay target of its outbox."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tidebook.core.errors import Fenced, OutcomeUnknown
from tidebook.outbox.journal import JournalTopic
from tidebook.outbox.message import JournalAppend

#: Returns a new `Book`. The class is not imported here because `Book` imports its outbox.
MakeBook = Callable[[], Any]


class BookJournals:
    """Append to journals through a separate book, opened at the first use on the event loop of the caller."""

    def __init__(self, make_book: MakeBook) -> None:
        self._make = make_book
        self._book: Any = None
        self._open_lock = asyncio.Lock()

    async def _open_book(self) -> Any:
        async with self._open_lock:
            if self._book is None:
                self._book = await self._make().__aenter__()
            return self._book

    async def topic(self, topic: str) -> JournalTopic:
        """Return the identity of a topic; create the topic if it is missing, since an append follows."""
        config = await (await self._open_book()).journal(topic).create()
        return JournalTopic(config.topic_id, config.epoch, config.partitions)

    async def holds(self, topic: str) -> bool:
        """Return whether the store has the topic as a topic of journals."""
        return await (await self._open_book()).store.topic_config(topic) is not None

    async def ends(self, topic: str) -> dict[int, int]:
        """Return the end offset of each partition of the topic."""
        book = await self._open_book()
        config = await book.journal(topic).topic_config()
        return {partition: await book.log.end(topic, partition) for partition in range(config.partitions)}

    async def append(
        self, topic: str, append: JournalAppend, *, append_id: bytes, floor: int, epoch: int | None
    ) -> None:
        """Append as a retry of `append_id`, which may be in the log from `floor` on; a duplicate has no effect."""
        journal = (await self._open_book()).journal(topic)
        try:
            await journal.append(
                append.id,
                append.decoded_events(),
                expected=append.expected,
                expire_after=append.expiry(),
                retry=OutcomeUnknown("relayed by the outbox", append_id=append_id, floor=floor, epoch=epoch),
            )
        except Fenced:
            await journal.close()  # the topic has a new epoch: the next batch opens it again
            raise

    async def close(self) -> None:
        """Close the book if it is open."""
        if self._book is not None:
            await self._book.__aexit__(None, None, None)
            self._book = None
            self._open_lock = asyncio.Lock()

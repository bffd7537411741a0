"""A book's journals, for its outbox: opened when the first append is relayed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tidebook.core.errors import Fenced, OutcomeUnknown
from tidebook.outbox.journal_message import JournalAppend
from tidebook.outbox.journal_target import JournalTopic

#: Makes a `Book`, which is not imported here: a book imports its outbox.
MakeBook = Callable[[], Any]


class BookJournals:
    """Journals of a book of its own, which lives on the loop that these are called on."""

    def __init__(self, make_book: MakeBook) -> None:
        self._make = make_book
        self._book: Any = None
        self._opening = asyncio.Lock()

    async def _opened(self) -> Any:
        async with self._opening:
            if self._book is None:
                self._book = await self._make().__aenter__()
            return self._book

    async def topic(self, topic: str) -> JournalTopic:
        """The topic's frozen facts."""
        facts = await (await self._opened()).journal(topic).facts()
        return JournalTopic(facts.topic_id, facts.epoch, facts.partitions)

    async def ends(self, topic: str) -> dict[int, int]:
        """Where each partition of the log ends."""
        book = await self._opened()
        facts = await book.journal(topic).facts()
        return {partition: await book.log.end(topic, partition) for partition in range(facts.partitions)}

    async def append(
        self, topic: str, append: JournalAppend, *, append_id: bytes, floor: int, epoch: int | None
    ) -> None:
        """Every append is made as a retry: with its floor, one that comes late can never count twice."""
        journal = (await self._opened()).journal(topic)
        try:
            await journal.append(
                append.id,
                append.decoded_events(),
                expected=append.expected,
                expire_after=append.expiry(),
                retry=OutcomeUnknown("relayed by the outbox", append_id=append_id, floor=floor, epoch=epoch),
            )
        except Fenced:
            await journal.close()  # the topic has a new epoch: it is opened anew for the next batch
            raise

    async def close(self) -> None:
        """Close the book, if it was opened."""
        if self._book is not None:
            await self._book.__aexit__(None, None, None)
            self._book = None
            self._opening = asyncio.Lock()

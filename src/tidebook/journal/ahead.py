"""Rows of a journal, asked for before they are wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.replication import EventRow
from tidebook.store.port import StoreReader

#: A read that goes on asks for twice as much each time, up to so many pages: one look at the head serves them all.
PAGES_AT_ONCE_MAX = 4


class RowsAhead:
    """The rows of one read, in order, a page or some at a time."""

    def __init__(self, store: StoreReader, key: Key, head: Head, *, to: int, limit: int) -> None:
        self._store = store
        self._key = key
        self._head = head
        self._to = to
        self._limit = limit
        self._limit_max = limit * PAGES_AT_ONCE_MAX
        self._asked: asyncio.Future[Sequence[EventRow]] | None = None

    def ask(self, after: int) -> None:
        """Ask for what comes behind `after`, which `take` will want, and for more of it than the last time."""
        if after < self._to:
            self._limit = min(self._limit * 2, self._limit_max)
            self._asked = asyncio.ensure_future(self._rows(after))

    async def take(self, after: int) -> Sequence[EventRow]:
        """What comes behind `after`: what was asked for, or asked for now."""
        asked, self._asked = self._asked, None
        return await (asked or self._rows(after))

    async def _rows(self, after: int) -> Sequence[EventRow]:
        return await self._store.events(self._key, self._head, after=after, to=self._to, limit=self._limit)

    def close(self) -> None:
        """Give up what nobody will take."""
        if self._asked is not None:
            self._asked.cancel()

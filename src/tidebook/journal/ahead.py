"""Rows of a journal, asked for before they are wanted."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Sequence
from typing import NamedTuple

from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.replication import EventRow
from tidebook.core.settle import give_up
from tidebook.store.port import StoreReader

#: The first page is asked for in so many parts, side by side: one is used while the other is on its way. Those that
#: follow come whole, for each question costs both sides.
FIRST_PARTS = 2
PARTS_AT_ONCE = 3


class Part(NamedTuple):
    """The first `limit` rows with after < seq_nr ≤ to, on their way."""

    after: int
    to: int
    limit: int
    rows: Awaitable[Sequence[EventRow]]


class RowsAhead:
    """The rows of one read, in order, some at a time.

    While every number has its event, what follows is asked for in parts before it is wanted. Behind a gap, or where
    rows are too large to come together, one answer tells where the next question begins.
    """

    def __init__(self, store: StoreReader, key: Key, *, limit: int) -> None:
        self._store = store
        self._key = key
        self._limit = limit
        self._head: Head | None = None
        self._to = 0
        #: From where, and through where, it was asked for.
        self._begin = 0
        self._end = 0
        self._asked: deque[Part] = deque()
        #: The last answer was all that had been asked for, an event for each number.
        self.full = True

    def begin(self, head: Head, *, after: int, to: int) -> bool:
        """Read with this head from here on. False if that makes what was asked for with an earlier one useless.

        It serves if that head told of this life, and of no later moment: one that was on its way may be seen once
        and then not for a while.
        """
        earlier, asked = self._head, self._asked
        serves = not asked or (
            earlier is not None
            and asked[0].after == after
            and earlier.incarnation == head.incarnation
            and earlier.position <= head.position
        )
        if not serves:
            self.close()
        if not asked:
            self._begin = self._end = after
        self._head, self._to = head, to
        return serves

    def ask(self) -> None:
        """Ask for what follows; the questions go out in the loop's next turn."""
        while self.full and self._end < self._to and len(self._asked) < PARTS_AT_ONCE:
            after, to = self.next_part()
            self._send(after, to, to - after)
        if not self._asked and self._end < self._to:
            self._send(self._end, self._to, self._limit)

    def _send(self, after: int, to: int, limit: int) -> None:
        self.hold(Part(after, to, limit, asyncio.ensure_future(self._rows(after, to, limit))))

    def hold(self, part: Part) -> None:
        """The next part that will be taken."""
        self._asked.append(part)
        self._end = part.to

    def next_part(self) -> tuple[int, int]:
        """Within one segment, for else the store would ask twice for it."""
        assert self._head is not None
        size = self._head.segment_size
        first = self._end < self._begin + self._limit
        part = max(1, self._limit // FIRST_PARTS) if first else self._limit
        return self._end, min(self._end + part, (self._end // size + 1) * size, self._to)

    async def take(self, after: int) -> Sequence[EventRow]:
        """What comes next behind `after`; empty only where there is nothing."""
        part = self._asked.popleft() if self._asked else self._rest(after)
        rows = await part.rows
        if not rows and part.to < self._to:  # which says nothing of what follows
            self.close()
            part = self._rest(after)
            rows = await part.rows
        last = rows[-1].seq_nr if rows else after
        self.full = last - after == len(rows) > 0 and (len(rows) == part.limit or last == part.to)
        if not self.full:
            self.close()
        if not self._asked:
            self._end = last if rows else self._to
        return rows

    def _rest(self, after: int) -> Part:
        return Part(after, self._to, self._limit, self._rows(after, self._to, self._limit))

    async def _rows(self, after: int, to: int, limit: int) -> Sequence[EventRow]:
        assert self._head is not None
        return await self._store.events(self._key, self._head, after=after, to=to, limit=limit)

    def close(self) -> None:
        """Give up what nobody will take."""
        for part in self._asked:
            if isinstance(part.rows, asyncio.Future):
                give_up(part.rows)
        self._asked.clear()

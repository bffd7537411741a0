"""All events of topics from the store, journal after journal, for those that the log no longer has.

A scan yields the events after a position `base` and before a time `until_ms`, once each, by topic, id and number.
A position within it is that of `base`, then `until_ms`, topic, id and number: it is after `base` and before all
remaining events, and determines where to continue. Below the horizon no event is added, so any process can continue
any scan.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Final

from tidebook.core.head import Head
from tidebook.core.key import Key, partition_of
from tidebook.core.replication_plan import EventRow
from tidebook.domain.event_source import PAGE_ROWS, At, SourcePage, SourcePosition, SourceRow
from tidebook.store.port import StoreReader

#: How many elements the position of an event has: time, topic, epoch, offset, id, number.
PLACE_SIZE: Final = 6
_BEFORE_ALL: Final[At] = (0, "", -1, -1, "", -1)
#: How many journals are read at once.
JOURNALS: Final = 32
_AFTER_ALL: Final = 2**62


def topic_place(topic: str, id: str, row: EventRow) -> At:
    """Return the position of an event in the stream of whole topics."""
    return (row.time_ms, topic, row.position.epoch, row.position.offset, id, row.seq_nr)


class TopicScan:
    """One scan; it continues after any of its positions."""

    def __init__(self, store: StoreReader, base: At, until_ms: int) -> None:
        self._store = store
        self._base = (*base, *_BEFORE_ALL[len(base) :])
        self.until_ms = until_ms
        #: All ids of a topic in order. They are kept because a scan is often interrupted and continued.
        self._ids: dict[str, list[str]] = {}

    @property
    def place(self) -> At:
        """The position before the scan's first event."""
        return (*self._base, self.until_ms)

    async def pages(self, topics: Sequence[str], after: SourcePosition) -> AsyncGenerator[SourcePage, None]:
        """Yield pages of the scan after a position, with positions that keep the log's offsets of `after`."""
        reached = after.at[len(self.place) :]
        for topic in topics:
            config = await self._store.topic_config(topic)
            if config is None or (reached and topic < reached[0]):
                continue
            if topic not in self._ids:
                self._ids[topic] = sorted([id async for id in self._store.ids(topic)])
            ids = self._ids[topic]
            first = bisect_left(ids, reached[1]) if reached and topic == reached[0] else 0
            for begin in range(first, len(ids), JOURNALS):
                some = ids[begin : begin + JOURNALS]
                async for rows in self._rows(topic, config.partitions, some):
                    found = [row for row in rows if row.at > after.at]
                    if found:
                        yield SourcePage(found, SourcePosition(found[-1].at, after.log))
                yield SourcePage((), SourcePosition((*self.place, topic, some[-1], _AFTER_ALL), after.log))

    async def _rows(self, topic: str, partitions: int, ids: Sequence[str]) -> AsyncIterator[list[SourceRow]]:
        """Yield the events of some journals that the scan has; journals are read ahead by one page each."""
        heads = {id: head for id, head in (await self._store.heads(topic, ids)).items() if head.live}
        live = [id for id in ids if id in heads]
        pages = await asyncio.gather(*(self._page(Key(topic, id), heads[id], heads[id].delete_to) for id in live))
        waiting: list[SourceRow] = []
        for id, first in zip(live, pages, strict=True):
            page: Sequence[EventRow] = first
            while page and page[0].time_ms < self.until_ms:
                waiting += (
                    SourceRow((*self.place, topic, id, row.seq_nr), topic, id, partition_of(id, partitions), row)
                    for row in page
                    if self._base < topic_place(topic, id, row) and row.time_ms < self.until_ms
                )
                if len(waiting) >= PAGE_ROWS:
                    yield waiting
                    waiting = []
                page = await self._page(Key(topic, id), heads[id], page[-1].seq_nr)
        if waiting:
            yield waiting

    async def _page(self, key: Key, head: Head, after: int) -> Sequence[EventRow]:
        if after >= head.seq_nr:
            return ()
        return await self._store.events(key, head, after=after, to=head.seq_nr, limit=PAGE_ROWS)


def in_scan(at: At) -> bool:
    """Return whether a position is within a scan."""
    return len(at) > PLACE_SIZE


def can_join(at: At, other: At) -> bool:
    """Return whether a stream that continues from `at` to `other` has then delivered the same events as one at `other`.

    Outside scans it always has; otherwise both positions must be in the same scan.
    """
    size = PLACE_SIZE + 1
    return at[:size] == other[:size] if in_scan(at) or in_scan(other) else True

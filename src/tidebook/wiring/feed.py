"""Work from events: a subscription to a tag whose events are put into a queue, each exactly once.

The queue keeps how far the tag was put, and moves that mark in the transaction that puts. So it does not matter who
delivers an event, or how often: one that was put is behind the mark.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final
from urllib.parse import quote

from tidebook.core.errors import InvalidInput, TooLarge
from tidebook.core.payload import encode_payload
from tidebook.core.portal import Portal
from tidebook.queue.ending import end
from tidebook.queue.entry import DATA_BYTES_MAX, Entry
from tidebook.queue.queue import Queue
from tidebook.sql.port.queue import Step
from tidebook.tags.asked import asked_topics, check_tag
from tidebook.tags.event import TaggedEvent
from tidebook.tags.offset import decode_offset
from tidebook.tags.shares import SHARES, share_of
from tidebook.tags.tags import Tags

BATCH_MAX: Final = 500
#: Events that were read and not put yet.
READ_AHEAD_MAX: Final = 2_000

#: Makes an entry of an event; None: nothing is to be done for it.
Make = Callable[[TaggedEvent], Entry | None]


def entry_of(event: TaggedEvent) -> Entry:
    """The event as it is, in an entry without a key; only where it is to be read, if it does not go into an entry."""
    data: dict[str, Any] = {"topic": event.topic, "id": event.id, "seq_nr": event.seq_nr, "tag": event.tag}
    if isinstance(event.payload, bytes):
        whole = {**data, "payload_base64": base64.b64encode(event.payload).decode()}
    else:
        whole = {**data, "payload": event.payload}
    try:
        fits = len(encode_payload(whole)[1]) <= DATA_BYTES_MAX
    except InvalidInput:  # a payload that is nested as deeply as may be has no room inside another
        fits = False
    return Entry(data=whole if fits else {**data, "payload_left_out": True})


class Feed:
    """Puts what a tag brings into a queue. Any number of processes may run the same one, and share its journals."""

    def __init__(
        self,
        tags: Tags,
        tag: str,
        queue: Queue,
        *,
        make: Make | None = None,
        group: str | None = None,
        topics: Iterable[str] | None = None,
    ) -> None:
        check_tag(tag)
        self._tags = tags
        self._tag = tag
        self._queue = queue
        self._make = make or entry_of
        self._group = group or f"queue/{queue.name}"
        self._source = f"tag/{self._group}/{quote(tag, safe='')}"
        self._topics = asked_topics(topics)
        self._marks: dict[int, str] = {}
        self.put = 0

    async def run(self, *, follow: bool = True) -> int:
        """Put until cancelled, or with `follow=False` until all that is there now was put; how many entries it put."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[TaggedEvent | None] = asyncio.Queue(READ_AHEAD_MAX)

        def offsets(parts: Iterable[int]) -> Mapping[int, str]:  # in a thread of the subscription's
            asyncio.run_coroutine_threadsafe(self._read_marks(), loop).result()
            return {part: self._marks[part] for part in parts if part in self._marks}

        async def read() -> None:
            try:
                if not follow:
                    await self._read_all(events)
                    return
                async with self._tags.subscribe(self._tag, self._group, topics=self._topics, offsets=offsets) as member:
                    async for event in member:
                        await events.put(event)
            finally:
                if not _is_cancelled():  # else nobody takes it, and there may be no room
                    await events.put(None)

        reading = asyncio.create_task(read())
        try:
            while batch := await _batch(events):
                await self._put(batch)
            await reading
        finally:
            await end(reading)
        return self.put

    async def _read_all(self, events: asyncio.Queue[TaggedEvent | None]) -> None:
        """Read whoever's journals: a member that died still holds its own for a while, and would leave them unput."""
        await self._read_marks()
        marks = [self._marks.get(part) for part in range(SHARES)]
        known = [mark for mark in marks if mark is not None]
        after = min(known, key=lambda mark: decode_offset(self._tag, mark)) if len(known) == SHARES else None
        async for event in self._tags.read(self._tag, after=after, topics=self._topics, consistency="horizon"):
            await events.put(event)

    async def _read_marks(self) -> None:
        self._marks = await self._queue.marks(self._source)

    async def _put(self, batch: list[TaggedEvent]) -> None:
        """Put what lies behind the marks. Where somebody else has moved one, look again: what is left still follows."""
        while batch := [event for event in batch if self._is_new(event)]:
            last = {share_of(event.topic, event.id): event.tag_offset for event in batch}
            steps = [Step(part, self._marks.get(part), after) for part, after in last.items()]
            entries = [entry for event in batch if (entry := self._make(event)) is not None]
            try:
                put = await self._queue.put_once(entries, source=self._source, steps=steps)
            except TooLarge:
                if len(batch) == 1:
                    raise
                await self._put(batch[: len(batch) // 2])
                continue
            if put is None:
                await self._read_marks()
                continue
            self._marks |= last
            self.put += put.inserted + put.merged
            return

    def _is_new(self, event: TaggedEvent) -> bool:
        mark = self._marks.get(share_of(event.topic, event.id))
        return mark is None or event.place > decode_offset(self._tag, mark)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class SyncFeed:
    """The same without await; `run` blocks."""

    def __init__(self, portal: Portal, feed: Feed) -> None:
        self._portal = portal
        self._feed = feed

    def run(self, *, follow: bool = True) -> int:
        return self._portal.run(self._feed.run(follow=follow))


async def _batch(events: asyncio.Queue[TaggedEvent | None]) -> list[TaggedEvent]:
    """What is there, one at least; none at the end."""
    batch: list[TaggedEvent] = []
    event = await events.get()
    while event is not None:
        batch.append(event)
        if events.empty() or len(batch) == BATCH_MAX:
            return batch
        event = events.get_nowait()
    if batch:
        events.put_nowait(None)  # the end is told again, after what was before it
    return batch

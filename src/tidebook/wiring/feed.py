"""Feed a queue from a tag: put each event of the tag into the queue exactly once.

The queue stores a mark for each share of the journals: the tag offset of the last event that was put, or that `make`
skipped. The transaction that puts the entries advances it. An event that is delivered again, by any process, is at or
before the mark and is skipped.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final
from urllib.parse import quote

from tidebook.core.errors import InvalidInput, TooLarge
from tidebook.core.payload import encode_payload
from tidebook.queue.entry import DATA_BYTES_MAX, Entry
from tidebook.queue.port import Step
from tidebook.queue.queue import Queue
from tidebook.runtime.blocking_facade import BlockingFacade, blocking, forwarded
from tidebook.runtime.futures import cancel_and_wait
from tidebook.tags.event import TaggedEvent, check_tag, check_topics, decode_offset
from tidebook.tags.horizon import HorizonStatus
from tidebook.tags.subscription import SHARES, Subscription, share_of
from tidebook.tags.tags import Tags

BATCH_MAX: Final = 500
#: How many events are read ahead at most.
READ_AHEAD_MAX: Final = 2_000

#: Returns the entry for an event, or None to skip the event.
EntryFactory = Callable[[TaggedEvent], Entry | None]


def entry_of(event: TaggedEvent) -> Entry:
    """Return an entry without a key that holds the event, without its payload if that is too large for an entry."""
    data: dict[str, Any] = {"topic": event.topic, "id": event.id, "seq_nr": event.seq_nr, "tag": event.tag}
    if isinstance(event.payload, bytes):
        full_data = {**data, "payload_base64": base64.b64encode(event.payload).decode()}
    else:
        full_data = {**data, "payload": event.payload}
    try:
        fits = len(encode_payload(full_data)[1]) <= DATA_BYTES_MAX
    except InvalidInput:  # a payload at the nesting limit cannot be nested one level deeper
        fits = False
    return Entry(data=full_data if fits else {**data, "payload_left_out": True})


class Feed:
    """Puts the events of a tag into a queue. Any number of processes may run the same feed; they share the journals."""

    def __init__(
        self,
        tags: Tags,
        tag: str,
        queue: Queue,
        *,
        make: EntryFactory | None = None,
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
        self._topics = check_topics(topics)
        self._marks: dict[int, str] = {}
        #: The name of the feed in a supervisor's status.
        self.name = f"feed {tag}/{queue.name}"
        self.put = 0
        self._member: Subscription | None = None

    @property
    def waiting(self) -> HorizonStatus | None:
        """The horizon, while the feed waits for replication that makes no progress; None otherwise."""
        return None if self._member is None else self._member.waiting

    @property
    def problem(self) -> str | None:
        """Why a running feed puts nothing; None if it is not waiting for replication."""
        return None if self.waiting is None else self.waiting.describe()

    async def run(self, *, follow: bool = True) -> int:
        """Put events until cancelled; with `follow=False`, put those that exist now. Return the number of entries."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[TaggedEvent | None] = asyncio.Queue(READ_AHEAD_MAX)

        def offsets(shares: Iterable[int]) -> Mapping[int, str]:  # runs in a thread of the subscription
            asyncio.run_coroutine_threadsafe(self._read_marks(), loop).result()
            return {share: self._marks[share] for share in shares if share in self._marks}

        async def read() -> None:
            try:
                if not follow:
                    await self._read_all(events)
                    return
                async with self._tags.subscribe(self._tag, self._group, topics=self._topics, offsets=offsets) as member:
                    self._member = member
                    async for event in member:
                        await events.put(event)
            finally:
                task = asyncio.current_task()
                if task is None or not task.cancelling():  # when cancelled, nothing consumes a full queue
                    await events.put(None)

        reading = asyncio.create_task(read())
        try:
            while batch := await _next_batch(events):
                await self._put(batch)
            await reading
        finally:
            await cancel_and_wait(reading)
        return self.put

    async def settle(self) -> None:
        """Put the events that exist now; the running feed skips them later."""
        again = Feed(self._tags, self._tag, self._queue, make=self._make, group=self._group, topics=self._topics)
        await again.run(follow=False)

    async def _read_all(self, events: asyncio.Queue[TaggedEvent | None]) -> None:
        """Read all journals, not only one member's share: a crashed member keeps its share until its lease expires."""
        await self._read_marks()
        marks = [self._marks.get(share) for share in range(SHARES)]
        known = [mark for mark in marks if mark is not None]
        after = min(known, key=lambda mark: decode_offset(self._tag, mark)) if len(known) == SHARES else None
        async for event in self._tags.read(self._tag, after=after, topics=self._topics, consistency="horizon"):
            await events.put(event)

    async def _read_marks(self) -> None:
        self._marks = await self._queue.marks(self._source)

    async def _put(self, batch: list[TaggedEvent]) -> None:
        """Put the events after the marks; if another process has advanced a mark, read the marks and retry the rest."""
        while batch := [event for event in batch if self._is_new(event)]:
            last = {share_of(event.topic, event.id): event.tag_offset for event in batch}
            steps = [Step(share, self._marks.get(share), after) for share, after in last.items()]
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


class SyncFeed(BlockingFacade[Feed]):
    """The blocking form of `Feed`."""

    waiting = forwarded(Feed.waiting)
    problem = forwarded(Feed.problem)
    run = blocking(Feed.run)
    settle = blocking(Feed.settle)


async def _next_batch(events: asyncio.Queue[TaggedEvent | None]) -> list[TaggedEvent]:
    """Wait for an event, then return all that are queued, at most `BATCH_MAX`; return an empty list at the end."""
    batch: list[TaggedEvent] = []
    event = await events.get()
    while event is not None:
        batch.append(event)
        if events.empty() or len(batch) == BATCH_MAX:
            return batch
        event = events.get_nowait()
    if batch:
        events.put_nowait(None)  # so that the call after this batch sees the end
    return batch

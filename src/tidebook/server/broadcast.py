"""One live stream for many followers: one task reads the events, and every follower sends them.

A follower that is too slow for the ring of recent events reads the missed ones from the store, so a slow client needs
no more memory than a fast one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, Generic, TypeVar

from tidebook.runtime.futures import cancel_quietly
from tidebook.server.responses import Chunk, ChunkBuffer

E = TypeVar("E")
#: The position of an event in its stream; it grows from event to event.
StreamPosition = tuple[Any, ...]

RING_EVENTS_MAX: Final = 1_000
RING_BYTES_MAX: Final = 4_000_000
#: How many events a follower takes together.
CHUNK_EVENTS: Final = 64


class Line:
    """An event of the ring: its position, the id of its server-sent event, and its encoded form."""

    __slots__ = ("encoded", "id", "position", "topic")

    def __init__(self, position: StreamPosition, topic: str, id: str, encoded: bytes) -> None:
        self.position = position
        self.topic = topic
        self.id = id
        self.encoded = encoded


class Broadcast(Generic[E]):
    """The live part of one stream: reads new events for as long as it has followers."""

    def __init__(self, start: Callable[[], Awaitable[AsyncIterator[E]]], line: Callable[[E], Line]) -> None:
        self._start = start
        self._line = line
        self._ring: deque[Line] = deque()
        self._bytes = 0
        #: The index of the next event; the ring holds those before it.
        self._next = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.followers = 0

    @property
    def has_ended(self) -> bool:
        """Whether an error has ended the stream: its followers end with that error."""
        return self._task is not None and self._task.done()

    async def follow(
        self,
        catch_up: Callable[[StreamPosition | None], AsyncIterator[E]],
        wanted: Callable[[Line], bool],
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the events that `catch_up` reads after a position (None: from the beginning), then the live ones."""
        last: StreamPosition | None = None
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        await asyncio.shield(self._ready)
        while True:
            index, buffer = self._next, ChunkBuffer(CHUNK_EVENTS)
            async with aclosing(catch_up(last)) as events:  # type: ignore[type-var]
                async for event in events:
                    line = self._line(event)
                    if last is not None and line.position <= last:
                        continue
                    last = line.position
                    if wanted(line) and buffer.add(line.id, line.encoded):
                        yield buffer.take()
            if buffer:
                yield buffer.take()
            while index >= self._next - len(self._ring):
                if index == self._next:
                    await self._wait_for_event()
                    continue
                chunk: list[tuple[str, bytes]] = []
                ring, first = self._ring, self._next - len(self._ring)
                if index < first:
                    break
                for offset in range(index - first, min(len(ring), index - first + CHUNK_EVENTS)):
                    line = ring[offset]
                    index += 1
                    if last is None or line.position > last:
                        last = line.position
                        if wanted(line):
                            chunk.append((line.id, line.encoded))
                if chunk:
                    yield chunk

    async def _wait_for_event(self) -> None:
        task = self._task
        if task is not None and task.done():
            task.result()  # raises the error that ended the stream
            raise RuntimeError("a live stream ended")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if not waiter.done() or waiter.cancelled():
                try:
                    self._waiters.remove(waiter)
                except ValueError:
                    pass  # `_wake` has already removed it

    async def _run(self) -> None:
        try:
            events = await self._start()
            self._ready.set_result(None)
            async with aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    self._publish(self._line(event))
        finally:
            if not self._ready.done():
                self._ready.set_result(None)  # the followers see the error of the task
            self._wake()

    def _publish(self, line: Line) -> None:
        ring = self._ring
        ring.append(line)
        self._next += 1
        self._bytes += len(line.encoded)
        while len(ring) > RING_EVENTS_MAX or (self._bytes > RING_BYTES_MAX and len(ring) > 1):
            self._bytes -= len(ring.popleft().encoded)
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def close(self) -> None:
        """Stop reading."""
        if self._task is not None:
            cancel_quietly(self._task)
            await asyncio.gather(self._task, return_exceptions=True)


class Broadcasts:
    """The live streams by key; the first follower of a key starts its stream, and the last one to leave ends it."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[Any, ...], Broadcast[Any]] = {}

    async def follow(
        self,
        key: tuple[Any, ...],
        start: Callable[[], Awaitable[AsyncIterator[Any]]],
        line: Callable[[Any], Line],
        catch_up: Callable[[StreamPosition | None], AsyncIterator[Any]],
        wanted: Callable[[Line], bool] = lambda line: True,
    ) -> AsyncGenerator[Chunk, None]:
        """Follow the stream of a key."""
        broadcast = self._by_key.get(key)
        if broadcast is None or broadcast.has_ended:  # its last followers may take a while to leave
            broadcast = self._by_key[key] = Broadcast(start, line)
        broadcast.followers += 1
        try:
            async with aclosing(broadcast.follow(catch_up, wanted)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            broadcast.followers -= 1
            if not broadcast.followers:
                if self._by_key.get(key) is broadcast:
                    del self._by_key[key]
                await broadcast.close()

"""`book.outbox` of an async book: the blocking one, in threads. The relay's own work is done by threads in any case."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from datetime import timedelta
from typing import Any

from tidebook.core.event import Event
from tidebook.outbox.backend import BackendName
from tidebook.outbox.message import Message, all_checked
from tidebook.outbox.outbox import COUNT_MAX, LIST_MAX, Outbox
from tidebook.outbox.publish import Pairs, Payload, Value
from tidebook.outbox.relay import Relay
from tidebook.outbox.settings import OutboxSettings
from tidebook.sql.port.outbox import ParkedMessage, TopicStatus


class AsyncOutbox:
    """The same names as `Outbox`, awaited."""

    def __init__(self, outbox: Outbox) -> None:
        self.blocking = outbox

    @property
    def settings(self) -> OutboxSettings:
        """The `[outbox]` section."""
        return self.blocking.settings

    @property
    def url(self) -> str:
        """The database that holds the outbox, as SQLAlchemy takes it; a password in it is not hidden."""
        return self.blocking.url

    def publish(
        self,
        target: Any,
        *,
        topic: str,
        payload: Payload,
        key: Value = None,
        partition_key: Value = None,
        headers: Pairs | None = None,
        ordered: bool = False,
    ) -> Any:
        """`outbox.publish`, through the backend of a `with` block, or the one that the book's settings choose.

        Await it where `target` is async.
        """
        return self.blocking.publish(
            target, topic=topic, payload=payload, key=key, partition_key=partition_key, headers=headers, ordered=ordered
        )

    def publish_list(self, target: Any, messages: Iterable[Message], *, ordered: bool = False) -> Any:
        """`outbox.publish_list`, through the backend of a `with` block, or the one that the book's settings choose."""
        return self.blocking.publish_list(target, messages, ordered=ordered)

    def append(
        self,
        target: Any,
        topic: str,
        id: str,
        events: Sequence[Event],
        *,
        expected: int | None = None,
        expire_after: timedelta | int | None = None,
        ordered: bool = False,
    ) -> Any:
        """Append to a journal when the transaction of `target` commits; await it where `target` is async."""
        return self.blocking.append(
            target, topic, id, events, expected=expected, expire_after=expire_after, ordered=ordered
        )

    async def publish_alone(self, messages: Iterable[Message], *, ordered: bool = False) -> None:
        """Publish in a transaction of their own, where there is nothing else to commit with them."""
        await asyncio.to_thread(self.blocking.publish_alone, all_checked(messages), ordered=ordered)

    def use(self, name: BackendName) -> AbstractContextManager[Any]:
        """Publish through this book's backend of that name inside a `with` block, in this thread or task only."""
        return self.blocking.use(name)

    async def relay(self, *, threads: int | None = None, once: bool = False) -> int:
        """Relay until `once` all that can be sent was sent, or until cancelled; how many messages went."""
        relay = await asyncio.to_thread(self.blocking.new_relay, threads=threads)
        running = asyncio.ensure_future(asyncio.to_thread(relay.run, once=once))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            relay.stop()
            await running
            raise

    @asynccontextmanager
    async def relaying(self, *, threads: int | None = None) -> AsyncIterator[Relay]:
        """A relay in the background of an `async with` block."""
        relay = await asyncio.to_thread(self.blocking.new_relay, threads=threads)
        running = asyncio.ensure_future(asyncio.to_thread(relay.run))
        try:
            yield relay
        finally:
            relay.stop()
            await running

    async def create_tables(self) -> None:
        """Make the tables where they are missing."""
        await asyncio.to_thread(self.blocking.create_tables)

    async def status(self, *, count_max: int = COUNT_MAX) -> list[TopicStatus]:
        """Every topic: how many messages wait, the age of the oldest, who holds it, what went wrong."""
        return await asyncio.to_thread(self.blocking.status, count_max=count_max)

    async def parked(self, topic: str | None = None, *, limit: int = LIST_MAX) -> list[ParkedMessage]:
        """Messages that lie aside: parked, to be tried again, or held behind one of those."""
        return await asyncio.to_thread(self.blocking.parked, topic, limit=limit)

    async def parked_retry(self, topic: str, id: int | None = None) -> int:
        """Send parked messages again (all of the topic's, or one), each in its place; how many."""
        return await asyncio.to_thread(self.blocking.parked_retry, topic, id)

    async def parked_drop(self, topic: str, id: int | None = None) -> int:
        """Delete parked messages and let go on what they held; how many were deleted."""
        return await asyncio.to_thread(self.blocking.parked_drop, topic, id)

    async def close(self) -> None:
        """Let go of what was opened."""
        await asyncio.to_thread(self.blocking.close)

"""The outbox of an async book: `Outbox` run in threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from datetime import timedelta
from typing import Any

from tidebook.core.event import Event
from tidebook.outbox.backend import BackendName
from tidebook.outbox.message import Message, validate_messages
from tidebook.outbox.outbox import COUNT_MAX, LIST_MAX, Outbox
from tidebook.outbox.port import OutboxTopicStatus, ParkedMessage
from tidebook.outbox.publish import Pairs, Payload, Value
from tidebook.outbox.relay import Relay
from tidebook.outbox.settings import OutboxSettings


class AsyncOutbox:
    """The async form of `Outbox`, with the same names."""

    def __init__(self, outbox: Outbox) -> None:
        self.blocking = outbox

    @property
    def settings(self) -> OutboxSettings:
        """The `[outbox]` section of the book's settings."""
        return self.blocking.settings

    @property
    def url(self) -> str:
        """The URL of the outbox's database, as SQLAlchemy takes it; a password in it is not hidden."""
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
        """Publish as `tidebook.outbox.publish`, through the backend of the `use` block or of the book's settings.

        Await the result if `target` is async.
        """
        return self.blocking.publish(
            target, topic=topic, payload=payload, key=key, partition_key=partition_key, headers=headers, ordered=ordered
        )

    def publish_list(self, target: Any, messages: Iterable[Message], *, ordered: bool = False) -> Any:
        """Publish as `tidebook.outbox.publish_list`, through the backend of the `use` block or of the settings."""
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
        """Append to a journal when the transaction of `target` commits; await the result if `target` is async."""
        return self.blocking.append(
            target, topic, id, events, expected=expected, expire_after=expire_after, ordered=ordered
        )

    async def publish_alone(self, messages: Iterable[Message], *, ordered: bool = False) -> None:
        """Publish the messages in a separate transaction, for callers that have none."""
        await asyncio.to_thread(self.blocking.publish_alone, validate_messages(messages), ordered=ordered)

    def use(self, name: BackendName) -> AbstractContextManager[Any]:
        """Publish through this book's backend of that name inside a `with` block, in this thread or task only."""
        return self.blocking.use(name)

    async def relay(self, *, threads: int | None = None, once: bool = False) -> int:
        """Relay until cancelled or, with `once`, until nothing is left that can be sent; return how many were sent."""
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
        """Run a relay in the background of an `async with` block."""
        relay = await asyncio.to_thread(self.blocking.new_relay, threads=threads)
        running = asyncio.ensure_future(asyncio.to_thread(relay.run))
        try:
            yield relay
        finally:
            relay.stop()
            await running

    async def create_tables(self) -> None:
        """Create the missing tables."""
        await asyncio.to_thread(self.blocking.create_tables)

    async def status(self, *, count_max: int = COUNT_MAX) -> list[OutboxTopicStatus]:
        """Return the status of every topic: how many messages wait, the age of the oldest, the lock, and errors."""
        return await asyncio.to_thread(self.blocking.status, count_max=count_max)

    async def parked(self, topic: str | None = None, *, limit: int = LIST_MAX) -> list[ParkedMessage]:
        """Return the messages in `kafka_parked`: parked, retrying, or held by one of those."""
        return await asyncio.to_thread(self.blocking.parked, topic, limit=limit)

    async def parked_retry(self, topic: str, id: int | None = None) -> int:
        """Retry parked messages, all of the topic or one, in their old order; return how many."""
        return await asyncio.to_thread(self.blocking.parked_retry, topic, id)

    async def parked_drop(self, topic: str, id: int | None = None) -> int:
        """Delete parked messages, all of the topic or one, and send those held by them; return how many."""
        return await asyncio.to_thread(self.blocking.parked_drop, topic, id)

    async def close(self) -> None:
        """Close what was opened."""
        await asyncio.to_thread(self.blocking.close)

"""Fixtures of the queue suite: a store, a clock that the test advances, and short forms of put and claim."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from hashlib import blake2b
from typing import ClassVar

import pytest
import pytest_asyncio

from tidebook.core.payload import BYTES
from tidebook.queue.port import (
    NEVER_MS,
    Claimed,
    Failure,
    NewEntry,
    Outcome,
    Put,
    QueueRef,
    QueueSettings,
    QueueStore,
)

#: Opens another store on the same data, as another process would.
OpenQueues = Callable[[], AbstractAsyncContextManager[QueueStore]]
#: Advances the store's clock by this many milliseconds.
Advance = Callable[[int], Awaitable[None]]

LEASE_MS = 10_000
#: The time at which the clock of a case starts.
START_MS = 1_700_000_000_000
_numbers = itertools.count(1)


class QueueTester:
    """Gives test cases a short interface to one queue."""

    def __init__(self, store: QueueStore, ref: QueueRef) -> None:
        self.store = store
        self.ref = ref

    async def put(
        self,
        key: str | None = None,
        *,
        data: str = "",
        priority: int = 100,
        process_at: int | None = None,
        expires_at: int = NEVER_MS,
        inserted_at: int = 0,
    ) -> Put:
        return await self.store.put(
            self.ref, [entry(key, data, priority, process_at, expires_at)], inserted_at=inserted_at
        )

    async def claim(self, limit: int = 1, lease_ms: int = LEASE_MS) -> list[Taken]:
        claimed = await self.store.claim(self.ref, {uuid.uuid4().bytes: limit}, lease_ms=lease_ms)
        return [Taken(each) for each in claimed]

    async def take(self) -> Taken:
        (taken,) = await self.claim()
        return taken

    async def names(self, limit: int = 100) -> list[str]:
        """Claim entries and return their data."""
        return [taken.name for taken in await self.claim(limit)]

    async def finish(self, *taken: Taken) -> list[bool]:
        finished = await self.store.finish(self.ref, [each.held for each in taken])
        return [each.held in finished for each in taken]

    async def fail(self, taken: Taken, delay_ms: int = 0) -> Outcome:
        (outcome,) = await self.store.fail(self.ref, [Failure(taken.held, delay_ms, "no")])
        return outcome

    async def beat(self, *taken: Taken, lease_ms: int = LEASE_MS) -> list[bool]:
        kept = await self.store.heartbeat(self.ref, [each.held for each in taken], lease_ms=lease_ms)
        return [each.held in kept for each in taken]


class Taken:
    """A claimed entry with its lease token."""

    def __init__(self, entry: Claimed) -> None:
        self.entry = entry
        self.held = entry.held
        self.name = entry.data.decode()


def entry(
    key: str | None = None,
    data: str = "",
    priority: int = 100,
    process_at: int | None = None,
    expires_at: int = NEVER_MS,
) -> NewEntry:
    """Return an entry whose data is its name."""
    keyhash = blake2b((key or f"?{next(_numbers)}").encode(), digest_size=16).digest()
    return NewEntry(keyhash, BYTES, (data or key or "").encode(), key, priority, process_at, expires_at)


class QueueBase:
    """Fixtures for the test cases of a queue store."""

    #: Whether `put_within` joins the caller's transaction.
    takes_transactions: ClassVar[bool]

    pytestmark: ClassVar = [pytest.mark.asyncio]

    @pytest.fixture
    def open_queues(self) -> OpenQueues:
        """Return a function that opens another store on the same data; leaving its context closes it."""
        raise NotImplementedError("the subclass must provide open_queues")

    @pytest.fixture
    def advance(self) -> Advance:
        """Return a function that advances the clock of all stores, which starts at START_MS."""
        raise NotImplementedError("the subclass must provide advance")

    @pytest_asyncio.fixture
    async def store(self, open_queues: OpenQueues) -> AsyncIterator[QueueStore]:
        async with open_queues() as store:
            yield store

    @pytest_asyncio.fixture
    async def tester(self, store: QueueStore) -> QueueTester:
        return QueueTester(store, await new_queue(store))


async def new_queue(store: QueueStore, **settings: object) -> QueueRef:
    """Create a queue with a unique name."""
    chosen = QueueSettings(**{"max_timeouts": 2, **settings})  # type: ignore[arg-type]
    return await store.queue(f"q-{uuid.uuid4().hex[:12]}", chosen)

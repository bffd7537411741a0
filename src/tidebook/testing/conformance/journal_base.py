"""Fixtures of the journal suite: books on the same data, both facades, with and without replication."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Literal

import pytest
import pytest_asyncio

from tidebook.core.event import Event, ReadEvent
from tidebook.journal.journal import Journal, Snapshot
from tidebook.journal.outcome import Appended
from tidebook.journal.sync import SyncJournal
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book

#: Opens another book on the same data, as another process would; keywords are `[journal]` options.
BookFactory = Callable[..., AbstractAsyncContextManager[Book]]
Facade = Literal["async", "sync"]
#: What is replicated after each write of a case: nothing, two records of each partition, or everything.
Lag = Literal["nothing", "some", "everything"]

#: Small values, so that the test cases cross pages, segments and partitions.
OPTIONS = {"partitions": 2, "segment_size": 5, "page_events": 3}
#: A test case that takes this long has failed; none needs nearly as much.
CASE_TIMEOUT_S = 60.0


def events(*payloads: Any) -> list[Event]:
    """Return one event for each payload."""
    return [Event(payload) for payload in payloads]


def payloads(read: Sequence[ReadEvent]) -> list[Any]:
    return [event.payload for event in read]


def numbers(read: Sequence[ReadEvent]) -> list[int]:
    return [event.seq_nr for event in read]


class JournalTester:
    """Gives test cases one interface to a topic's journals through either facade, and controls replication."""

    def __init__(self, book: Book, topic: str, facade: Facade, lag: Lag) -> None:
        self.book, self.topic, self.lag = book, topic, lag
        self.journal: Journal = book.journal(topic)
        self._facade = facade
        self._portal: BlockingPortal | None = None

    async def _do(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self._facade == "async":
            return await getattr(self.journal, name)(*args, **kwargs)
        return await asyncio.to_thread(getattr(self._sync(), name), *args, **kwargs)

    async def _each(self, name: str, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        if self._facade == "async":
            async for item in getattr(self.journal, name)(*args, **kwargs):
                yield item
            return
        items: Iterator[Any] = getattr(self._sync(), name)(*args, **kwargs)
        end = object()
        try:
            while (item := await asyncio.to_thread(next, items, end)) is not end:
                yield item
        finally:
            await asyncio.to_thread(items.close)  # type: ignore[attr-defined]

    def _sync(self) -> SyncJournal:
        """Return the sync facade, on a portal into the event loop in which the book was opened."""
        if self._portal is None:
            self._portal = _RunningLoopPortal(asyncio.get_running_loop())
        return SyncJournal(self._portal, self.journal)

    async def _written(self, answer: Any) -> Any:
        if self.lag == "everything":
            await self.replicate()
        elif self.lag == "some":
            await self.replicate(batches_max=1, batch_records=2)
        return answer

    async def replicate(self, *, batch_records: int = 1000, batches_max: int | None = None) -> None:
        """Replicate everything, regardless of the lag of this test case."""
        await replicate(
            self.book.log, self.book.store, self.topic, batch_records=batch_records, batches_max=batches_max
        )

    async def append(self, id: str, new: Sequence[Event], **options: Any) -> Appended:
        done: Appended = await self._written(await self._do("append", id, new, **options))
        return done

    async def append_many(self, items: Sequence[tuple[str, Sequence[Event]]], **options: Any) -> list[Any]:
        done: list[Any] = await self._written(await self._do("append_many", items, **options))
        return done

    async def delete(self, id: str, *, to: int) -> None:
        await self._written(await self._do("delete", id, to=to))

    async def purge(self, id: str) -> None:
        await self._written(await self._do("purge", id))

    async def read(self, id: str, **options: Any) -> list[ReadEvent]:
        return [event async for event in self._each("read", id, **options)]

    def reading(self, id: str, **options: Any) -> AsyncIterator[ReadEvent]:
        return self._each("read", id, **options)

    def tail(self, id: str, **options: Any) -> AsyncIterator[ReadEvent]:
        return self._each("tail", id, **options)

    async def pointer(self, id: str, **options: Any) -> int | None:
        last: int | None = await self._do("pointer", id, **options)
        return last

    async def ids(self) -> list[str]:
        return [id async for id in self._each("ids")]

    async def save_snapshot(self, id: str, *, seq_nr: int, payload: Any) -> None:
        await self._do("save_snapshot", id, seq_nr=seq_nr, payload=payload)

    async def load_snapshot(self, id: str, **options: Any) -> Snapshot | None:
        found: Snapshot | None = await self._do("load_snapshot", id, **options)
        return found

    async def delete_snapshots(self, id: str, **options: Any) -> None:
        await self._do("delete_snapshots", id, **options)


class _RunningLoopPortal(BlockingPortal):
    """A portal into a loop that is already running."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._attach(loop)


class BookSuite:
    """Fixtures for the test cases of a book."""

    @pytest.fixture
    def book_factory(self) -> BookFactory:
        raise NotImplementedError("the subclass must provide book_factory")

    @pytest.fixture
    def topic(self) -> str:
        return f"t-{uuid.uuid4().hex[:12]}"


class JournalSuite(BookSuite):
    """Fixtures for the test cases of a journal."""

    @pytest.fixture(
        params=[("async", "nothing"), ("async", "everything"), ("sync", "some")],
        ids=lambda param: "-".join(param),
    )
    def facade_and_lag(self, request: pytest.FixtureRequest) -> tuple[Facade, Lag]:
        """Return the facade to use, and how much of the log is replicated."""
        facade_and_lag: tuple[Facade, Lag] = request.param
        return facade_and_lag

    @pytest_asyncio.fixture
    async def tester(
        self, open_tester: Callable[..., AbstractAsyncContextManager[JournalTester]]
    ) -> AsyncIterator[JournalTester]:
        async with open_tester() as tester:
            yield tester

    @pytest_asyncio.fixture
    async def plain(self, book_factory: BookFactory, topic: str) -> AsyncIterator[JournalTester]:
        """Yield a tester for test cases that do not depend on the facade or the lag."""
        async with book_factory(**OPTIONS) as book:
            yield JournalTester(book, topic, "async", "nothing")

    @pytest_asyncio.fixture
    async def open_tester(
        self, book_factory: BookFactory, topic: str, facade_and_lag: tuple[Facade, Lag]
    ) -> AsyncIterator[Callable[..., AbstractAsyncContextManager[JournalTester]]]:
        """Yield a function that opens a tester of the same topic in another book."""
        async with AsyncExitStack() as stack:

            @asynccontextmanager
            async def open_tester(**options: Any) -> AsyncIterator[JournalTester]:
                book = await stack.enter_async_context(book_factory(**{**OPTIONS, **options}))
                facade, lag = facade_and_lag
                yield JournalTester(book, topic, facade, lag)

            yield open_tester

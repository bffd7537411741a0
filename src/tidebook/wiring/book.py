"""A book: everything that one folder, or one set of servers, holds."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tidebook.core.clock import Clock, Ids, RandomIds, SystemClock
from tidebook.core.errors import InvalidInput
from tidebook.core.key import topic_name
from tidebook.core.metrics import Metrics
from tidebook.journal.journal import Journal
from tidebook.journal.settings import JournalSettings
from tidebook.wiring.adapters import open_log, open_store
from tidebook.wiring.settings import Settings, options_as, read_settings

if TYPE_CHECKING:
    from tidebook.log.port import Log
    from tidebook.outbox.async_outbox import AsyncOutbox
    from tidebook.queue.queue import Queue
    from tidebook.queue.queues import Queues
    from tidebook.sql.port.queue import QueueSettings
    from tidebook.store.port import StoreWriter
    from tidebook.tags.tags import Tags
    from tidebook.wal.wal import Wal
    from tidebook.wiring.feed import Feed, Make


class Book:
    """Use it as `async with tidebook.open(...) as book`; its parts open when they are first used."""

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Clock | None = None,
        ids: Ids | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.settings = settings
        self.clock = clock or SystemClock()
        self.ids = ids or RandomIds()
        self.metrics = metrics or Metrics()
        self._stack = AsyncExitStack()
        self._log: Log | None = None
        self._store: StoreWriter | None = None
        self._journals: dict[str, Journal] = {}
        self._tags: Tags | None = None
        self._wals: dict[str, Wal] = {}
        self._queues: Queues | None = None
        self._outbox: AsyncOutbox | None = None

    @property
    def log(self) -> Log:
        """The log under this book."""
        if self._log is None:
            raise InvalidInput("the book is not open: use it as 'async with tidebook.open(...) as book'")
        return self._log

    @property
    def store(self) -> StoreWriter:
        """The store under this book."""
        if self._store is None:
            raise InvalidInput("the book is not open: use it as 'async with tidebook.open(...) as book'")
        return self._store

    def journal(self, topic: str) -> Journal:
        """The journals of a topic, which is made when it is first written or read."""
        found = self._journals.get(topic_name(topic))
        if found is None:
            found = self._journals[topic] = Journal(
                topic,
                log=self.log,
                store=self.store,
                clock=self.clock,
                ids=self.ids,
                settings=options_as(self.settings.section("journal"), "journal", JournalSettings),
                metrics=self.metrics,
            )
        return found

    @property
    def tags(self) -> Tags:
        """Streams of events by tag."""
        from tidebook.tags.settings import TagSettings
        from tidebook.tags.tags import Tags

        if self._tags is None:
            settings = options_as(self.settings.section("tags"), "tags", TagSettings)
            self._tags = Tags(store=self.store, clock=self.clock, ids=self.ids, settings=settings, metrics=self.metrics)
        return self._tags

    def wal(self, namespace: str) -> Wal:
        """The write-ahead logs of a namespace."""
        from tidebook.wal.settings import WalSettings
        from tidebook.wal.wal import Wal

        found = self._wals.get(namespace)
        if found is None:
            settings = options_as(self.settings.section("wal"), "wal", WalSettings)
            found = self._wals[namespace] = Wal(
                self.log, namespace, clock=self.clock, ids=self.ids, metrics=self.metrics, settings=settings
            )
        return found

    @property
    def queues(self) -> Queues:
        """All queues; their store opens when one of them is first used."""
        if self._queues is None:
            from tidebook.wiring.queue import make_queues

            self._queues = make_queues(self.settings, clock=self.clock, ids=self.ids, metrics=self.metrics)
            self._stack.push_async_callback(self._queues.close)
        return self._queues

    def queue(self, name: str, *, settings: QueueSettings | None = None, fields: object = None) -> Queue:
        """A work queue by name, made when it is first used; settings that are given are kept with it.

        `fields` declares its user data: a dataclass, a msgspec Struct, a mapping, a `.toml` or an `.xml` file.
        """
        return self.queues.queue(name, settings=settings, fields=fields)

    def feed(
        self, tag: str, queue: str, *, make: Make | None = None, group: str | None = None, topics: Any = None
    ) -> Feed:
        """Work from events: `await book.feed("paid", "mail").run()` puts each event of a tag into a queue, once.

        `make` turns an event into an `Entry`, or into None where there is nothing to do.
        """
        from tidebook.wiring.feed import Feed

        return Feed(self.tags, tag, self.queue(queue), make=make, group=group, topics=topics)

    @property
    def outbox(self) -> AsyncOutbox:
        """The outbox in the book's SQL database; nothing is opened before it is used."""
        if self._outbox is None:
            from tidebook.outbox.async_outbox import AsyncOutbox
            from tidebook.wiring.outbox import make_outbox

            made = make_outbox(self.settings, lambda: Book(self.settings), ids=self.ids, metrics=self.metrics)
            self._outbox = AsyncOutbox(made)
            self._stack.push_async_callback(self._outbox.close)
        return self._outbox

    async def topics(self) -> list[str]:
        """The topics that hold journals."""
        return sorted(await self.store.topics())

    async def __aenter__(self) -> Book:
        try:
            self._log = await open_log(self.settings, clock=self.clock, metrics=self.metrics)
            self._stack.push_async_callback(self._log.close)
            self._store = await open_store(self.settings, metrics=self.metrics)
            self._stack.push_async_callback(self._store.close)
        except BaseException:
            await self._stack.aclose()
            raise
        self._stack.push_async_callback(self._close_journals)
        self._stack.push_async_callback(self._close_wals)
        return self

    async def _close_journals(self) -> None:
        for journal in self._journals.values():
            await journal.close()

    async def _close_wals(self) -> None:
        for wal in self._wals.values():
            await wal.close()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        self._journals.clear()
        self._wals.clear()
        self._log = self._store = self._tags = self._queues = self._outbox = None


def open(where: str | Path = "./tidebook-data") -> Book:
    """Open a book: a folder (made where it is missing), or a `tidebook.toml` that names log, store and sql.

    >>> async def first(folder):
    ...     async with open(folder) as book:
    ...         return book.settings.folder.name
    """
    return Book(read_settings(where))

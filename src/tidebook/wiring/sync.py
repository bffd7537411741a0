"""A book for threads without a loop: `with tidebook.open_sync(...) as book`."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tidebook.core.errors import InvalidInput
from tidebook.core.metrics import Metrics
from tidebook.core.portal import Portal
from tidebook.journal.sync import SyncJournal
from tidebook.wiring.book import Book, open
from tidebook.wiring.settings import Settings

if TYPE_CHECKING:
    from tidebook.outbox.outbox import Outbox
    from tidebook.queue.sync import SyncQueue, SyncQueues
    from tidebook.sql.port.queue import QueueSettings
    from tidebook.tags.sync import SyncTags
    from tidebook.wal.sync import SyncWal
    from tidebook.wiring.feed import Make, SyncFeed


class SyncBook:
    """The same names as `Book`, without await."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._portal: Portal | None = None

    @property
    def settings(self) -> Settings:
        return self._book.settings

    @property
    def metrics(self) -> Metrics:
        return self._book.metrics

    def journal(self, topic: str) -> SyncJournal:
        return SyncJournal(self._portal_open(), self._book.journal(topic))

    def wal(self, namespace: str) -> SyncWal:
        from tidebook.wal.sync import SyncWal

        return SyncWal(self._portal_open(), self._book.wal(namespace))

    @property
    def tags(self) -> SyncTags:
        from tidebook.tags.sync import SyncTags

        return SyncTags(self._portal_open(), self._book.tags)

    def queue(self, name: str, *, settings: QueueSettings | None = None, fields: object = None) -> SyncQueue:
        from tidebook.queue.sync import SyncQueue

        return SyncQueue(self._portal_open(), self._book.queue(name, settings=settings, fields=fields))

    @property
    def queues(self) -> SyncQueues:
        from tidebook.queue.sync import SyncQueues

        return SyncQueues(self._portal_open(), self._book.queues)

    def feed(
        self, tag: str, queue: str, *, make: Make | None = None, group: str | None = None, topics: Any = None
    ) -> SyncFeed:
        from tidebook.wiring.feed import SyncFeed

        return SyncFeed(self._portal_open(), self._book.feed(tag, queue, make=make, group=group, topics=topics))

    @property
    def outbox(self) -> Outbox:
        return self._book.outbox.blocking

    def _portal_open(self) -> Portal:
        if self._portal is None:
            raise InvalidInput("the book is not open: use it as 'with tidebook.open_sync(...) as book'")
        return self._portal

    def __enter__(self) -> SyncBook:
        self._portal = Portal()
        try:
            self._portal.run(self._book.__aenter__())
        except BaseException:
            self._close_portal()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._portal_open().run(self._book.__aexit__(kind, error, trace))
        finally:
            self._close_portal()

    def _close_portal(self) -> None:
        if self._portal is not None:
            self._portal.close()
            self._portal = None


def open_sync(where: str | Path = "./tidebook-data") -> SyncBook:
    """Open a book for code without a loop: `with open_sync("./data") as book: ...`."""
    return SyncBook(open(where))

"""`SyncBook`, the entry point of the blocking API: `with tidebook.open_sync(...) as book`."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tidebook.core.errors import InvalidInput
from tidebook.journal.sync import SyncJournal
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.runtime.metrics import Metrics
from tidebook.wiring.book import Book, open
from tidebook.wiring.settings import Settings

if TYPE_CHECKING:
    from tidebook.log.port import Log
    from tidebook.outbox.log_topic import SyncLogTopic
    from tidebook.outbox.outbox import Outbox
    from tidebook.queue.port import QueueSettings
    from tidebook.queue.sync import SyncQueue, SyncQueues
    from tidebook.runtime.clock import Clock, Ids
    from tidebook.store.port import StoreWriter
    from tidebook.tags.sync import SyncTags
    from tidebook.wal.sync import SyncWal
    from tidebook.wiring.feed import EntryFactory, SyncFeed
    from tidebook.wiring.topics import TopicDescription


class SyncBook:
    """The blocking form of `Book`: the same methods without `await`, callable from any thread.

    Open it with `with tidebook.open_sync(...) as book`. It runs an event loop in a background thread, which ends when
    the block is left.
    """

    def __init__(self, book: Book) -> None:
        self._book = book
        self._portal: BlockingPortal | None = None

    @property
    def settings(self) -> Settings:
        """The settings that the book was opened with."""
        return self._book.settings

    @property
    def metrics(self) -> Metrics:
        """The metrics that all parts of the book count into."""
        return self._book.metrics

    @property
    def forked(self) -> bool:
        """Whether the book was opened in a parent of this process; such a book cannot be used here."""
        return self._book.forked

    def journal(self, topic: str) -> SyncJournal:
        """Return the journals of a topic; the first append creates it, reads of a missing one return nothing."""
        return SyncJournal(self._portal_open(), self._book.journal(topic))

    def wal(self, namespace: str) -> SyncWal:
        """Return the write-ahead log of a namespace; open its regions with `open_region`."""
        from tidebook.wal.sync import SyncWal

        return SyncWal(self._portal_open(), self._book.wal(namespace))

    @property
    def tags(self) -> SyncTags:
        """Events by tag, across all journals."""
        from tidebook.tags.sync import SyncTags

        return SyncTags(self._portal_open(), self._book.tags)

    def queue(self, name: str, *, settings: QueueSettings | None = None, fields: object = None) -> SyncQueue:
        """Return a work queue by name; its first use creates it. See `Book.queue` for the arguments."""
        from tidebook.queue.sync import SyncQueue

        return SyncQueue(self._portal_open(), self._book.queue(name, settings=settings, fields=fields))

    @property
    def queues(self) -> SyncQueues:
        """All work queues of this book."""
        from tidebook.queue.sync import SyncQueues

        return SyncQueues(self._portal_open(), self._book.queues)

    def feed(
        self, tag: str, queue: str, *, make: EntryFactory | None = None, group: str | None = None, topics: Any = None
    ) -> SyncFeed:
        """Return a feed that puts each event of a tag into a queue exactly once. See `Book.feed` for the arguments."""
        from tidebook.wiring.feed import SyncFeed

        return SyncFeed(self._portal_open(), self._book.feed(tag, queue, make=make, group=group, topics=topics))

    @property
    def outbox(self) -> Outbox:
        """The outbox in the book's SQL database: publish in your own transaction, relay afterwards."""
        return self._book.outbox.blocking

    def log_topic(self, topic: str) -> SyncLogTopic:
        """Return a consumer of the messages that the outbox relayed to a topic of an embedded log."""
        from tidebook.outbox.log_topic import SyncLogTopic

        return SyncLogTopic(self._portal_open(), self._book.log_topic(topic))

    def topics(self) -> list[str]:
        """Return the names of the topics that hold journals, sorted."""
        return self._portal_open().run(self._book.topics())

    def describe_topic(self, topic: str) -> TopicDescription:
        """Return a topic's kind, partitions, epoch, offsets and replication lag; raise `NotFound` if there is none."""
        return self._portal_open().run(self._book.describe_topic(topic))

    def delete_topic(self, topic: str) -> None:
        """Delete a topic and all its data permanently. See `Book.delete_topic` for what cannot be deleted."""
        self._portal_open().run(self._book.delete_topic(topic))

    def create(self) -> None:
        """Create the missing folder and files of an embedded log and store now, instead of at the first write."""
        self._portal_open().run(self._book.create())

    @property
    def clock(self) -> Clock:
        """The clock that the book takes timestamps from."""
        return self._book.clock

    @property
    def ids(self) -> Ids:
        """The source of the book's random ids."""
        return self._book.ids

    @property
    def log(self) -> Log:
        """The log that this book writes to. Its methods are async and must run on the book's own event loop."""
        return self._book.log

    @property
    def store(self) -> StoreWriter:
        """The store that this book reads from. Its methods are async and must run on the book's own event loop."""
        return self._book.store

    def _portal_open(self) -> BlockingPortal:
        if self._portal is None:
            raise InvalidInput("the book is not open: use it as 'with tidebook.open_sync(...) as book'")
        return self._portal

    def __enter__(self) -> SyncBook:
        self._portal = BlockingPortal()
        try:
            self._portal.run(self._book.__aenter__())
        except BaseException:
            self._close_portal()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._book.forked:  # the connections and files belong to the parent, which closes them
            return
        try:
            self._portal_open().run(self._book.__aexit__(kind, error, trace))
        finally:
            self._close_portal()

    def _close_portal(self) -> None:
        if self._portal is not None:
            self._portal.close()
            self._portal = None


def open_sync(where: str | Path = "./tidebook-data", *, create: bool = False) -> SyncBook:
    """Return a book for code without an event loop, to be used with `with`; see `open` for the arguments.

    >>> def first(folder):
    ...     with open_sync(folder) as book:
    ...         return book.settings.folder.name
    """
    return SyncBook(open(where, create=create))

"""`SyncBook`, the entry point of the blocking API: `with tidebook.open_sync(...) as book`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from tidebook.core.errors import InvalidInput
from tidebook.journal.sync import SyncJournal
from tidebook.runtime.blocking_facade import BlockingFacade, blocking, forwarded, wrapping
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.runtime.supervisor import GRACE_S
from tidebook.wiring.book import Book, open

if TYPE_CHECKING:  # each part is imported at its first use, as in `Book`
    from tidebook.domain.decider import SyncDecider
    from tidebook.domain.projection import Projection, SyncProjection
    from tidebook.domain.typed_journal import SyncTypedJournal
    from tidebook.outbox.log_topic import LogTopic, SyncLogTopic
    from tidebook.outbox.outbox import Outbox
    from tidebook.queue.port import QueueSettings
    from tidebook.queue.sync import SyncQueue, SyncQueues
    from tidebook.queue.worker import Handler, Worker, WorkerOptions
    from tidebook.tags.sync import SyncTags
    from tidebook.wal.sync import SyncWal
    from tidebook.wal.wal import Wal
    from tidebook.wiring.feed import Feed, SyncFeed
    from tidebook.wiring.running import OutboxRelay, SyncRunning

Part = TypeVar("Part")
D = TypeVar("D")


# The facades of the objects that a book returns, each imported at its first use.


def _sync_projection(portal: BlockingPortal, target: Projection) -> SyncProjection:
    from tidebook.domain.projection import SyncProjection

    return SyncProjection(portal, target)


def _sync_wal(portal: BlockingPortal, target: Wal) -> SyncWal:
    from tidebook.wal.sync import SyncWal

    return SyncWal(portal, target)


def _sync_feed(portal: BlockingPortal, target: Feed) -> SyncFeed:
    from tidebook.wiring.feed import SyncFeed

    return SyncFeed(portal, target)


def _sync_log_topic(portal: BlockingPortal, target: LogTopic) -> SyncLogTopic:
    from tidebook.outbox.log_topic import SyncLogTopic

    return SyncLogTopic(portal, target)


class SyncBook(BlockingFacade[Book]):
    """The blocking form of `Book`: the same methods without `await`, callable from any thread.

    Open it with `with tidebook.open_sync(...) as book`. It runs an event loop in a background thread, which ends when
    the block is left. The methods of its `log` and `store` are async and must run on that loop.
    """

    def __init__(self, book: Book) -> None:
        self._target = book
        self._opened_portal: BlockingPortal | None = None
        self.settings, self.metrics, self.clock, self.ids = book.settings, book.metrics, book.clock, book.ids

    @property
    def _portal(self) -> BlockingPortal:  # type: ignore[override]
        if self._opened_portal is None:
            raise InvalidInput("the book is not open: use it as 'with tidebook.open_sync(...) as book'")
        return self._opened_portal

    forked = forwarded(Book.forked)
    log = forwarded(Book.log)
    store = forwarded(Book.store)
    replication = forwarded(Book.replication)
    topics = blocking(Book.topics)
    describe_topic = blocking(Book.describe_topic)
    delete_topic = blocking(Book.delete_topic)
    create = blocking(Book.create)
    health = blocking(Book.health)
    settle = blocking(Book.settle)

    @overload
    def journal(self, topic: str) -> SyncJournal: ...
    @overload
    def journal(self, topic: str, *, events: Iterable[type[Any]], lenient: bool = False) -> SyncTypedJournal: ...
    def journal(
        self, topic: str, *, events: Iterable[type[Any]] | None = None, lenient: bool = False
    ) -> SyncJournal | SyncTypedJournal:
        """Return the journals of a topic, to append to them and to read them. See `Book.journal` for the arguments."""
        if events is None:
            return SyncJournal(self._portal, self._target.journal(topic))
        from tidebook.domain.typed_journal import SyncTypedJournal

        return SyncTypedJournal(self._portal, self._target.journal(topic, events=events, lenient=lenient))

    def decider(
        self,
        topic: str,
        decider: Any,
        *,
        events: Iterable[type[Any]] | None = None,
        snapshot_every: int | None = None,
        snapshot_version: int = 1,
        conflicts_max: int | None = None,
        cached_max: int | None = None,
    ) -> SyncDecider:
        """Return a decider, which executes commands on entities. See `Book.decider` for the arguments."""
        from tidebook.domain.decider import SyncDecider

        return SyncDecider(
            self._portal,
            self._target.decider(
                topic, decider, events=events, snapshot_every=snapshot_every, snapshot_version=snapshot_version,
                conflicts_max=conflicts_max, cached_max=cached_max,
            ),
        )  # fmt: skip

    projection = wrapping(Book.projection, _sync_projection)
    process = wrapping(Book.process, _sync_projection)
    wal = wrapping(Book.wal, _sync_wal)
    feed = wrapping(Book.feed, _sync_feed)
    log_topic = wrapping(Book.log_topic, _sync_log_topic)

    @overload
    def queue(self, name: str, *, settings: QueueSettings | None = None, fields: type[D]) -> SyncQueue[D]: ...
    @overload
    def queue(self, name: str, *, settings: QueueSettings | None = None, fields: object = None) -> SyncQueue[Any]: ...
    def queue(self, name: str, *, settings: QueueSettings | None = None, fields: object = None) -> SyncQueue[Any]:
        """Return a work queue by name; its first use creates it. See `Book.queue` for the arguments."""
        from tidebook.queue.sync import SyncQueue

        return SyncQueue(self._portal, self._target.queue(name, settings=settings, fields=fields))

    def worker(self, queue: str, handler: Handler, **options: Unpack[WorkerOptions]) -> Worker:
        """Return a worker, to be started with `running`; its handlers run in threads. See `Book.worker`."""
        return self._portal.run(_made(lambda: self._target.worker(queue, handler, **options)))

    def relay(self, *, threads: int | None = None) -> OutboxRelay:
        """Return a relay of the outbox, to be started with `running`."""
        return self._target.relay(threads=threads)

    def running(self, *parts: object, grace_s: float = GRACE_S) -> AbstractContextManager[SyncRunning]:
        """Run feeds, workers, relays, projections and your own parts within a `with` block. See `Book.running`."""
        from tidebook.wiring.running import run_on_portal

        targets = [part._target if isinstance(part, BlockingFacade) else part for part in parts]
        return run_on_portal(self._portal, self._target.running(*targets, grace_s=grace_s))

    @property
    def tags(self) -> SyncTags:
        """Events by tag, across all journals."""
        from tidebook.tags.sync import SyncTags

        return SyncTags(self._portal, self._target.tags)

    @property
    def queues(self) -> SyncQueues:
        """All work queues of this book."""
        from tidebook.queue.sync import SyncQueues

        return SyncQueues(self._portal, self._target.queues)

    @property
    def outbox(self) -> Outbox:
        """The outbox in the book's SQL database: publish in your own transaction, relay afterwards."""
        return self._target._blocking_outbox(self._portal)

    def __enter__(self) -> SyncBook:
        self._opened_portal = BlockingPortal()
        try:
            self._portal.run(self._target.__aenter__())
        except BaseException:
            self._close_portal()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.forked:  # the connections and files belong to the parent, which closes them
            return
        try:
            self._portal.run(self._target.__aexit__(kind, error, trace))
        finally:
            self._close_portal()

    def _close_portal(self) -> None:
        if self._opened_portal is not None:
            self._opened_portal.close()
            self._opened_portal = None


async def _made(make: Callable[[], Part]) -> Part:
    """Call `make` on the event loop to which its result belongs, and return the result."""
    return make()


def open_sync(
    where: str | Path = "./tidebook-data",
    *,
    create: bool = False,
    replicate: bool = False,
    token: str | None = None,
    tls_ca: str | None = None,
) -> SyncBook:
    """Return a book for code without an event loop, to be used with `with`; see `open` for the arguments.

    >>> def first(folder):
    ...     with open_sync(folder) as book:
    ...         return book.settings.folder.name
    """
    return SyncBook(open(where, create=create, replicate=replicate, token=token, tls_ca=tls_ca))

"""`Book`, the entry point of the async API: the journals, tags, write-ahead logs, queues and outbox of one book."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from tidebook.core.errors import InvalidInput, Unavailable
from tidebook.core.key import topic_name
from tidebook.domain.topic_types import TopicTypes
from tidebook.journal.journal import Journal
from tidebook.journal.settings import JournalSettings
from tidebook.log.port import Log
from tidebook.runtime.clock import Clock, RandomIds, SystemClock
from tidebook.runtime.metrics import Metrics
from tidebook.runtime.named_parts import NamedParts
from tidebook.runtime.process import generation, refuse_fork
from tidebook.runtime.supervisor import GRACE_S, Supervisor
from tidebook.store.port import StoreWriter
from tidebook.wiring.adapters import extra, open_log, open_store
from tidebook.wiring.settings import Settings, read_settings

if TYPE_CHECKING:  # each part is imported at its first use: commands start often, and need only one or two of them
    from tidebook.domain.decider import Decider, DeciderOptions, HasInitial
    from tidebook.domain.process import ProcessManager
    from tidebook.domain.projection import Projection
    from tidebook.domain.typed_journal import TypedJournal
    from tidebook.outbox.log_topic import LogTopic
    from tidebook.outbox.outbox import AsyncOutbox, Outbox
    from tidebook.queue.port import QueueSettings
    from tidebook.queue.queue import Queue
    from tidebook.queue.queues import Queues
    from tidebook.queue.worker import Handler, Worker, WorkerOptions
    from tidebook.replication.inline import InlineReplication
    from tidebook.runtime.blocking_portal import BlockingPortal
    from tidebook.tags.event import Decode
    from tidebook.tags.tags import Tags
    from tidebook.wal.wal import Wal
    from tidebook.wiring.feed import EntryFactory, Feed
    from tidebook.wiring.running import Health, OutboxRelay
    from tidebook.wiring.topics import TopicDescription

Part = TypeVar("Part")
E = TypeVar("E")
D = TypeVar("D")
S = TypeVar("S")


def _decoder_of(events: Iterable[type[Any]]) -> Decode:
    """Return the decoder of a typed subscription. Imported only here: a book without types does not load the codecs."""
    from tidebook.domain.typed_event import tag_row_decoder

    return tag_row_decoder(events)


class Book:
    """All data of one folder, or of one set of servers: journals, tags, write-ahead logs, queues and the outbox.

    Open it with `async with tidebook.open(...) as book`. The log and the store are opened on entry, every other part at
    its first use; leaving the block closes all of them. A book belongs to one event loop and one process: in a forked
    child its methods raise `InvalidInput`.

    `clock` is the clock of this process. Dates of an embedded queue are compared with `folder_clock`, by default the
    machine's clock, so that a process whose clock is wrong neither claims early nor ends the leases of others.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Clock | None = None,
        folder_clock: Clock | None = None,
        create: bool = False,
        replicate: bool = False,
    ) -> None:
        self.settings = settings
        self._folder_clock = folder_clock
        self._create = create
        self._replicate = replicate
        if replicate:
            from tidebook.wiring.replication import require_embedded

            require_embedded(settings)
        self.clock = clock or SystemClock()
        self.ids = RandomIds()
        self.metrics = Metrics()
        self._stack = AsyncExitStack()
        self._generation = generation()
        self._forget_parts()

    def _forget_parts(self) -> None:
        self._log: Log | None = None
        self._store: StoreWriter | None = None
        self._journals: NamedParts[Journal] = NamedParts()
        self._event_types = TopicTypes()
        self._tags: Tags | None = None
        self._wals: NamedParts[Wal] = NamedParts()
        self._queues: Queues | None = None
        self._outbox: AsyncOutbox | None = None
        self._replication: InlineReplication | None = None
        self._supervisors: list[Supervisor] = []

    @property
    def log(self) -> Log:
        """The log that this book writes to; raise `InvalidInput` if the book is not open."""
        return self._opened(self._log)

    @property
    def store(self) -> StoreWriter:
        """The store that this book reads from; raise `InvalidInput` if the book is not open."""
        return self._opened(self._store)

    def _opened(self, part: Part | None) -> Part:
        self._refuse_fork()
        if part is None:
            raise InvalidInput("the book is not open: use it as 'async with tidebook.open(...) as book'")
        return part

    def _shared(self) -> dict[str, Any]:
        """Return the arguments with which every part of the book is created."""
        return {"clock": self.clock, "ids": self.ids, "metrics": self.metrics}

    @overload
    def journal(self, topic: str) -> Journal: ...
    @overload
    def journal(self, topic: str, *, events: Iterable[type[E]], lenient: bool = False) -> TypedJournal[E]: ...
    @overload  # of classes with a metaclass, such as a list of msgspec Structs
    def journal(self, topic: str, *, events: Iterable[type], lenient: bool = False) -> TypedJournal[Any]: ...
    def journal(
        self, topic: str, *, events: Iterable[type[Any]] | None = None, lenient: bool = False
    ) -> Journal | TypedJournal[Any]:
        """Return the journals of a topic, to append to them and to read them.

        Nothing is created here: the first append creates the topic, and reads of a missing topic return nothing. With
        `events`, the classes of the topic's events, the journals take and return objects of these classes; with
        `lenient`, events of other types are returned raw instead of raising.
        """
        if events is None:
            return self._journal(topic)
        from tidebook.domain.event_type import EventTypes
        from tidebook.domain.typed_journal import TypedJournal

        types = EventTypes(events, lenient=lenient)
        self._event_types.add(topic, types.classes)
        return TypedJournal(self._journal(topic), types)

    def _journal(self, topic: str) -> Journal:
        self._refuse_fork()
        found = self._journals.opened.get(topic_name(topic)) or self._journals.find(topic)
        if found is None:
            settings, opened = self.settings.options("journal", JournalSettings), self._keep_journal
            found = Journal(topic, log=self.log, store=self.store, settings=settings, on_open=opened, **self._shared())
            self._journals.add(topic, found)
        return found

    def _keep_journal(self, journal: Journal) -> None:
        self._journals.keep(journal.topic, journal)
        self._stack.push_async_callback(journal.close)

    @overload  # the state is what `initial` returns
    def decider(self, topic: str, decider: HasInitial[S], **options: Unpack[DeciderOptions]) -> Decider[S]: ...
    @overload  # the state is an object of the class
    def decider(self, topic: str, decider: type[S], **options: Unpack[DeciderOptions]) -> Decider[S]: ...
    @overload
    def decider(self, topic: str, decider: object, **options: Unpack[DeciderOptions]) -> Decider[Any]: ...
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
    ) -> Decider[Any]:
        """Return a decider, which executes commands on the entities of a topic: one journal each.

        `decider` has `initial()`, `decide(command, state)` and `evolve(state, event)`, or is a class whose instances
        are the state. `events` are the classes of its events, by default those that `evolve` is annotated with. With
        `snapshot_every`, the state is saved whenever that many events were appended; snapshots of another
        `snapshot_version`, or of a state class that has changed since, are ignored. At most `cached_max` states are
        kept in memory.
        """
        from tidebook.domain.decider import CACHED_MAX, CONFLICTS_MAX, Decider, Rules

        rules: Rules[Any] = Rules(decider, events)
        self._event_types.add(topic, rules.types.classes)
        return Decider(
            self._journal(topic),
            rules,
            snapshot_every=snapshot_every,
            snapshot_version=snapshot_version,
            conflicts_max=CONFLICTS_MAX if conflicts_max is None else conflicts_max,
            cached_max=CACHED_MAX if cached_max is None else cached_max,
        )

    def projection(
        self,
        name: str,
        *,
        into: Any,
        topics: Iterable[str] | None = None,
        tags: Iterable[str] | None = None,
        events: Iterable[type[Any]] | None = None,
        tables: Iterable[Any] = (),
        slices: int | None = None,
        retries: int | None = None,
        on_failure: Literal["stop", "park"] = "stop",
    ) -> Projection:
        """Return a projection: decorate its handler `(tx, event)` with it, or add one handler per type with `on`.

        It follows the events of `tags`, or all events of `topics`; with both, the events of these tags in these topics.
        `into` is a SQLAlchemy engine, sync or async. `event.data` is decoded by `events`, by default the types that the
        topic's deciders and typed journals declare. `tables` are created if missing, and copied by a rebuild. An event
        whose handler still fails after `retries` retries stops its slice, or is parked.
        """
        extra("tidebook.wiring.projection", "projections")
        from tidebook.domain.projection import SLICES, Projection
        from tidebook.domain.sql_engine import SqlEngine
        from tidebook.wiring.projection import projection_arguments

        shared = projection_arguments(
            self.log, self.store, self._event_types, topics=topics, tags=tags, events=events, retries=retries,
            on_failure=on_failure,
        )  # fmt: skip
        slices = SLICES if slices is None else slices
        return Projection(
            name, engine=SqlEngine(into), tables=tables, slices=slices, clock=self.clock, ids=self.ids, **shared
        )

    def process(
        self,
        name: str,
        *,
        topics: Iterable[str] | None = None,
        tags: Iterable[str] | None = None,
        into: Any = None,
        events: Iterable[type[Any]] | None = None,
        retries: int | None = None,
        on_failure: Literal["stop", "park"] = "stop",
    ) -> ProcessManager:
        """Return a process manager: decorate its handler `(effects, event)` with it, or use `on` for one type.

        The handler declares the effects of an event: commands of deciders, queue entries, outbox messages. `into` is
        the engine of the database that stores its offsets, by default a file in the folder of an embedded book; to
        publish outbox messages it must be the outbox's database. The other arguments are those of `projection`.
        """
        extra("tidebook.wiring.projection", "projections")
        from tidebook.domain.process import ProcessManager
        from tidebook.domain.sql_engine import SqlEngine
        from tidebook.wiring.projection import process_engine, projection_arguments

        def publish(connection: Any, **fields: Any) -> None:
            self.outbox.blocking.publish(connection, **fields)

        shared = projection_arguments(
            self.log, self.store, self._event_types, topics=topics, tags=tags, events=events, retries=retries,
            on_failure=on_failure,
        )  # fmt: skip
        engine = SqlEngine(process_engine(self.settings) if into is None else into)
        made = ProcessManager(
            name, engine=engine, queue_of=self.queue, publish=publish, clock=self.clock, ids=self.ids, **shared
        )
        if into is None:
            self._stack.callback(made.dispose)
        return made

    @property
    def tags(self) -> Tags:
        """Events by tag, across all journals: read them, follow them, or share them among a group of consumers."""
        self._refuse_fork()
        if self._tags is None:
            from tidebook.tags.settings import TagSettings
            from tidebook.tags.tags import Tags

            settings = self.settings.options("tags", TagSettings)
            self._tags = Tags(
                log=self.log, store=self.store, settings=settings, decoder_of=_decoder_of, **self._shared()
            )
        return self._tags

    def wal(self, namespace: str) -> Wal:
        """Return the write-ahead log of a namespace; open its regions with `open_region`."""
        self._refuse_fork()
        found = self._wals.find(namespace)
        if found is None:
            from tidebook.wal.settings import WalSettings
            from tidebook.wal.wal import Wal

            settings = self.settings.options("wal", WalSettings)
            found = Wal(self.log, namespace, settings=settings, on_open=self._keep_wal, **self._shared())
            self._wals.add(namespace, found)
        return found

    def _keep_wal(self, wal: Wal) -> None:
        if wal.namespace not in self._wals.opened:
            self._wals.keep(wal.namespace, wal)
            self._stack.push_async_callback(wal.close)

    @property
    def queues(self) -> Queues:
        """All work queues of this book; the queue store opens when a queue is first used."""
        self._refuse_fork()
        if self._queues is None:
            from tidebook.wiring.queue import make_queues

            self._queues = make_queues(self.settings, folder_clock=self._folder_clock, **self._shared())
            self._stack.push_async_callback(self._queues.close)
        return self._queues

    @overload
    def queue(self, name: str, *, settings: QueueSettings | None = None, fields: type[D]) -> Queue[D]: ...
    @overload
    def queue(self, name: str, *, settings: QueueSettings | None = None, fields: object = None) -> Queue[Any]: ...
    def queue(self, name: str, *, settings: QueueSettings | None = None, fields: object = None) -> Queue[Any]:
        """Return a work queue by name; its first use creates it.

        `settings`, if given, are stored with the queue. `fields` declares the user data of its entries: a dataclass, a
        msgspec Struct, a pydantic model, a mapping, or the path of a `.toml` or `.xml` file. If it is a class, the data
        of a job is an object of this class.
        """
        return self.queues.queue(name, settings=settings, fields=fields)

    def feed(
        self, tag: str, queue: str, *, make: EntryFactory | None = None, group: str | None = None, topics: Any = None
    ) -> Feed:
        """Return a feed that puts each event of a tag into a queue exactly once; start it with `run()`.

        `make` turns an event into an `Entry`, or returns None to skip it; without it, the entry holds the event itself.
        `group` names the feed's progress, `topics` restricts it to the journals of these topics.

        >>> async def mail_paid_orders(book):
        ...     await book.feed("paid", "mail").run()
        """
        from tidebook.wiring.feed import Feed

        return Feed(self.tags, tag, self.queue(queue), make=make, group=group, topics=topics)

    def worker(self, queue: str, handler: Handler, **options: Unpack[WorkerOptions]) -> Worker:
        """Return a worker that runs a handler for each due entry of a queue; start it with `running` or `run()`.

        >>> async def send_mails(book, send):
        ...     async with book.running(book.worker("mail", send, concurrency=8)) as running:
        ...         await running.until_stopped()
        """
        from tidebook.queue.worker import Worker

        return Worker(self.queue(queue), handler, **options)

    def relay(self, *, threads: int | None = None) -> OutboxRelay:
        """Return a relay of the outbox, to be started with `running`; `book.outbox.relay()` runs one directly."""
        from tidebook.wiring.running import OutboxRelay

        return OutboxRelay(self.outbox, threads=threads)

    @asynccontextmanager
    async def running(self, *parts: object, grace_s: float = GRACE_S) -> AsyncIterator[Supervisor]:
        """Run feeds, workers, relays, projections and your own parts within the block.

        A part has `async def run()`, or is a coroutine function. A part that fails is restarted after a growing pause,
        and reported by `book.health()` and by `status()` of the yielded supervisor. At the end of the block all parts
        are stopped; those with `stop()`, like workers, may finish their current work within `grace_s`.
        """
        supervisor = Supervisor(parts, clock=self.clock, metrics=self.metrics, grace_s=grace_s)
        self._supervisors.append(supervisor)
        try:
            async with supervisor:
                yield supervisor
        finally:
            self._supervisors.remove(supervisor)

    async def health(self) -> Health:
        """Return the problems of the log and the store, and the state of everything that runs in this process.

        >>> async def is_healthy(book):
        ...     return (await book.health()).ok
        """
        from tidebook.wiring.running import book_health

        return await book_health(self.log, self.store, self._replication, self._supervisors)

    async def settle(self, *, timeout_s: float = 30.0) -> None:
        """Wait until everything appended so far is visible everywhere; for tests.

        The log is replicated, the horizon of streams by tag has passed all of it, and the parts of `running` have
        processed the results. Raise `Unavailable` if that takes longer than `timeout_s`.
        """
        from tidebook.wiring.running import settle_book
        from tidebook.wiring.spark import clears_tags

        try:
            async with asyncio.timeout(timeout_s):
                await settle_book(self.log, self.store, self._supervisors, clear_tags=clears_tags(self.settings))
        except TimeoutError as error:
            health = await self.health()
            names = ", ".join(["replication", *(each.name for each in health.running)])
            why = "; ".join(health.problems) or f"waiting for {names}"
            raise Unavailable(f"the book has not settled within {timeout_s:g} s: {why}") from error

    @property
    def outbox(self) -> AsyncOutbox:
        """The outbox in the book's SQL database: publish in your own transaction, relay afterwards."""
        self._refuse_fork()
        if self._outbox is None:
            from tidebook.outbox.outbox import AsyncOutbox
            from tidebook.wiring.outbox import make_outbox

            made = make_outbox(self.settings, lambda: Book(self.settings), ids=self.ids, metrics=self.metrics)
            self._outbox = AsyncOutbox(made)
            self._stack.push_async_callback(self._outbox.close)
        return self._outbox

    def _blocking_outbox(self, portal: BlockingPortal) -> Outbox:
        """Return the outbox for threads without an event loop."""
        return self.outbox.blocking

    def log_topic(self, topic: str) -> LogTopic:
        """Return a consumer of the messages that the outbox relayed to a topic of an embedded log.

        Raise `InvalidInput` if the log is Kafka: read the topic with any Kafka consumer instead.
        """
        from tidebook.outbox.log_topic import LogTopic

        if not self.settings.section("log").embedded:
            raise InvalidInput(f"topic {topic} is on Kafka: read it with a Kafka consumer; log_topic reads a folder")
        return LogTopic(self.log, topic)

    @property
    def replication(self) -> InlineReplication | None:
        """The replication that this process runs; None if the book was opened without `replicate=True`."""
        return self._replication

    async def topics(self) -> list[str]:
        """Return the names of the topics that hold journals, sorted."""
        return sorted(await self.store.topics())

    @property
    def forked(self) -> bool:
        """Whether the book was opened in a parent of this process; such a book cannot be used here."""
        return self._log is not None and self._generation != generation()

    def _refuse_fork(self) -> None:
        if self._log is not None:
            refuse_fork(self._generation, "the book")

    async def describe_topic(self, topic: str) -> TopicDescription:
        """Return a topic's kind, partitions, epoch, offsets and lag; raise `NotFound` if it does not exist."""
        from tidebook.wiring.topics import describe_topic

        return await describe_topic(self.log, self.store, topic)

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic and all its data permanently; raise `NotFound` if it does not exist.

        Stop its writers and its replicator first. Raise `InvalidInput` for journals on Cassandra, which cannot be
        deleted as a whole (purge each of them), and for the topics of a write-ahead log (delete the region).
        """
        from tidebook.wiring.topics import delete_topic

        await delete_topic(self.log, self.store, topic)
        if (journal := self._journals.remove(topic)) is not None:
            await journal.close()

    async def create(self) -> None:
        """Create a missing log and store in the folder, or a missing keyspace, now instead of on the first write."""
        from tidebook.wiring.lazy_adapters import LazyKeyspace, LazyLog, LazyStore

        for part in (self.log, self.store):
            if isinstance(part, LazyLog | LazyStore):
                part.open_or_create()
            elif isinstance(part, LazyKeyspace):
                await part.open_or_create()

    async def __aenter__(self) -> Book:
        self._refuse_fork()
        self._generation = generation()
        try:
            self._log = await open_log(self.settings, clock=self.clock, metrics=self.metrics)
            self._stack.push_async_callback(self._log.close)
            self._store = await open_store(self.settings, metrics=self.metrics)
            self._stack.push_async_callback(self._store.close)
            if self._create:
                await self.create()
            if self._replicate:
                from tidebook.wiring.replication import inline_replication

                self._replication = inline_replication(
                    self.settings, self.log, self.store, clock=self.clock, metrics=self.metrics
                )
                self._replication.start()
                self._stack.push_async_callback(self._replication.close)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.forked:  # the connections and files belong to the parent, which closes them
            return
        await self._stack.aclose()
        self._forget_parts()


def open(
    where: str | Path = "./tidebook-data",
    *,
    create: bool = False,
    replicate: bool = False,
    token: str | None = None,
    tls_ca: str | None = None,
) -> Book:
    """Return a book to be used with `async with`; `where` is a folder, or a `tidebook.toml` with the servers to use.

    A missing folder is created by the first write, or on entry with `create=True`. Reads never create anything.
    With `replicate=True` this process replicates the log to the store, from which streams by tag are read; of several
    such processes one is active, and another takes over when it ends. With servers, run `tidebook pipeline replicate`
    instead.

    `where` may also be the address of a server that `tidebook serve` runs, such as "https://host:8470": `token` is what
    `tidebook token create` printed there, and `tls_ca` a file with the authority that signed the server's certificate.

    >>> async def first(folder):
    ...     async with open(folder) as book:
    ...         return book.settings.folder.name
    """
    if isinstance(where, str) and where.lower().startswith(("http://", "https://")):
        if create or replicate:
            raise InvalidInput("create and replicate are for a book in a folder: a server replicates its own book")
        return open_remote(where, token=token, tls_ca=tls_ca)
    if token is not None or tls_ca is not None:
        raise InvalidInput("token and tls_ca are for the address of a server, such as https://host:8470")
    return Book(read_settings(where), create=create, replicate=replicate)


def open_remote(url: str, *, token: str | None = None, tls_ca: str | None = None) -> Book:
    """Return the book of a server; raise `InvalidInput` if the extra `remote` is not installed."""
    book: Book = extra("tidebook.wiring.remote_book", "remote").RemoteBook(url, token=token, tls_ca=tls_ca)
    return book

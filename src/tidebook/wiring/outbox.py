"""Build the outbox of a book from its settings: the SQL database and the targets of the relay."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tidebook.core.errors import Fenced, InvalidInput, OutcomeUnknown
from tidebook.outbox.journal import JournalTarget, JournalTopic
from tidebook.outbox.log_topic import LogTarget, OrderedLog
from tidebook.outbox.message import JournalAppend
from tidebook.outbox.outbox import Outbox
from tidebook.outbox.port import RelayTarget, RelayTargets
from tidebook.outbox.publish import Sender
from tidebook.outbox.relay import RoutedTargets
from tidebook.outbox.settings import OutboxSettings
from tidebook.outbox.store import OutboxDatabase
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.runtime.clock import Ids
from tidebook.runtime.metrics import Metrics
from tidebook.wiring.adapters import extra, kafka_settings, scheme
from tidebook.wiring.settings import Settings

#: The outbox has a separate file, because the application opens it with its own SQLite connections.
FILE = "outbox.db"
#: Returns a new `Book`. The class is not imported here because `Book` imports its outbox.
MakeBook = Callable[[], Any]


class BookJournals:
    """Appends to journals through a separate book, which is opened at its first use, on the caller's event loop."""

    def __init__(self, make_book: MakeBook) -> None:
        self._make = make_book
        self._book: Any = None
        self._open_lock = asyncio.Lock()

    async def _open_book(self) -> Any:
        async with self._open_lock:
            if self._book is None:
                self._book = await self._make().__aenter__()
            return self._book

    async def topic(self, topic: str) -> JournalTopic:
        """Return the identity of a topic; create the topic if it is missing, since an append follows."""
        config = await (await self._open_book()).journal(topic).create()
        return JournalTopic(config.topic_id, config.epoch, config.partitions)

    async def holds(self, topic: str) -> bool:
        """Return whether the topic holds journals, according to the store."""
        return await (await self._open_book()).store.topic_config(topic) is not None

    async def ends(self, topic: str) -> dict[int, int]:
        """Return the end offset of each partition of the topic."""
        book = await self._open_book()
        config = await book.journal(topic).topic_config()
        return {partition: await book.log.end(topic, partition) for partition in range(config.partitions)}

    async def append(
        self, topic: str, append: JournalAppend, *, append_id: bytes, floor: int, epoch: int | None
    ) -> None:
        """Append as a retry of `append_id`, which may be in the log from `floor` on; a duplicate has no effect."""
        journal = (await self._open_book()).journal(topic)
        try:
            await journal.append(
                append.id,
                append.decoded_events(),
                expected=append.expected,
                expire_after=append.expiry(),
                retry=OutcomeUnknown("relayed by the outbox", append_id=append_id, floor=floor, epoch=epoch),
            )
        except Fenced:
            await journal.close()  # the topic has a new epoch: the next batch opens it again
            raise

    async def close(self) -> None:
        """Close the book if it is open."""
        if self._book is not None:
            await self._book.__aexit__(None, None, None)
            self._book = None
            self._open_lock = asyncio.Lock()


class BookParts:
    """The database, the Kafka sender and the relay targets of an outbox, each opened at its first use."""

    def __init__(self, settings: Settings, *, metrics: Metrics, make_book: MakeBook) -> None:
        self._book_settings = settings
        self._journals = BookJournals(make_book)
        self._metrics = metrics
        self.settings = settings.options("outbox", OutboxSettings)
        self.embedded = settings.section("sql").embedded
        self.url, self.database = _database(settings, self.settings)
        self._sender: Any = None
        self._portal: BlockingPortal | None = None
        self._lock = threading.RLock()
        self._log: OrderedLog | None = None

    @property
    def missing(self) -> bool:
        """Whether the outbox is embedded and its file does not exist."""
        return self.embedded and not (self._book_settings.folder / FILE).exists()

    def targets(self, outbox: bytes) -> RelayTargets:
        """Return the relay's targets: messages go to the log of the book, appends to its journals."""
        return RoutedTargets(
            lambda: (
                self._embedded_target() if self._book_settings.section("log").embedded else self._kafka_target(outbox)
            ),
            lambda: JournalTarget(self._journals, self._open_portal(), outbox),
        )

    def _open_portal(self) -> BlockingPortal:
        with self._lock:
            if self._portal is None:
                self._portal = BlockingPortal()
            return self._portal

    def _kafka_target(self, outbox: bytes) -> RelayTarget:
        adapter = extra("tidebook.outbox.kafka.target", "kafka")
        target: RelayTarget = adapter.KafkaTarget(kafka_settings(self._book_settings), self.settings, outbox=outbox)
        return target

    def sender(self) -> Sender:
        """Return the Kafka sender that all users of the outbox share; raise `InvalidInput` without a Kafka log."""
        if self._book_settings.section("log").embedded:
            raise InvalidInput("backends 'kafka' and 'kafka_async' need a Kafka log: set [log] url in tidebook.toml")
        with self._lock:
            if self._sender is None:
                adapter = extra("tidebook.outbox.kafka.sender", "kafka")
                self._sender = adapter.KafkaSender(kafka_settings(self._book_settings), self._metrics)
            sender: Sender = self._sender
        return sender

    def _embedded_target(self) -> RelayTarget:
        from tidebook.log.sqlite.log import SqliteLog
        from tidebook.log.sqlite.relay_lock import RelayLocks

        async def open_log() -> OrderedLog:
            return await asyncio.to_thread(lambda: SqliteLog(self._book_settings.folder, metrics=self._metrics))

        portal = self._open_portal()
        with self._lock:
            if self._log is None:
                self._log = portal.run(open_log())
            # Do not query a store on a server: messages must not depend on it, and the log shows a topic's kind too.
            embedded = self._book_settings.section("store").embedded
            return LogTarget(
                self._log,
                portal.run,
                RelayLocks(self._book_settings.folder),
                holds_journals=self._journals.holds if embedded else None,
                create_topics=self.settings.create_topics,
            )

    def close(self) -> None:
        """Send the queued messages, then close the sender, the journals and the log."""
        if self._sender is not None:
            self._sender.close()
        if self._portal is not None:
            self._portal.run(self._journals.close())
            if self._log is not None:
                self._portal.run(self._log.close())
            self._portal.close()
        self._sender = self._portal = self._log = None


def _database(settings: Settings, outbox: OutboxSettings) -> tuple[str, OutboxDatabase]:
    url = settings.section("sql").url
    if url is None or scheme(url) == "sqlite":
        from tidebook.outbox.sqlite import SqliteOutboxDatabase

        path = (settings.folder / FILE).absolute() if url is None else Path(url.split("://", 1)[1].removeprefix("/"))
        return f"sqlite:///{path}", SqliteOutboxDatabase(path, outbox)
    if scheme(url) in {"postgresql", "postgres"}:
        postgres = extra("tidebook.outbox.postgres", "postgres")
        return "postgresql+psycopg://" + url.split("://", 1)[1], postgres.PostgresOutboxDatabase(url, outbox)
    if scheme(url) in {"mysql", "mariadb"}:
        mysql = extra("tidebook.outbox.mysql", "mysql")
        return "mysql+pymysql://" + url.split("://", 1)[1], mysql.MysqlOutboxDatabase(url, outbox)
    raise InvalidInput(f"[sql] url: {scheme(url)}:// is unknown; use postgresql://, mysql:// or sqlite:///")


def make_outbox(
    settings: Settings, make_book: MakeBook, *, ids: Ids | None = None, metrics: Metrics | None = None
) -> Outbox:
    """Return the outbox of a book; the relay opens a separate book with `make_book` when it first needs journals."""
    metrics = metrics or Metrics()
    return Outbox(BookParts(settings, metrics=metrics, make_book=make_book), ids=ids, metrics=metrics)

"""Build the outbox of a book from its settings: the SQL database and the targets of the relay."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidebook.core.errors import InvalidInput
from tidebook.outbox.journal import JournalTarget
from tidebook.outbox.outbox import Outbox
from tidebook.outbox.publish import Sender
from tidebook.outbox.relay import RoutedTargets
from tidebook.outbox.settings import OutboxSettings
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.runtime.clock import Ids
from tidebook.runtime.metrics import Metrics
from tidebook.wiring.adapters import extra, scheme
from tidebook.wiring.outbox_journals import BookJournals, MakeBook
from tidebook.wiring.settings import Settings, adapter_options, options_as

if TYPE_CHECKING:
    from tidebook.outbox.log_topic import OrderedLog
    from tidebook.outbox.port import RelayTarget, RelayTargets
    from tidebook.outbox.store import OutboxDatabase

#: A separate file, because the application opens it with its own SQLite connections.
FILE = "outbox.db"


class BookParts:
    """The database, the Kafka sender and the relay targets of an outbox, each opened at its first use."""

    def __init__(self, settings: Settings, *, metrics: Metrics, make_book: MakeBook) -> None:
        self._book = settings
        self._journals = BookJournals(make_book)
        self._metrics = metrics
        self.settings: OutboxSettings = options_as(settings.section("outbox"), "outbox", OutboxSettings)
        self.embedded = settings.section("sql").embedded
        self.url, self.database = _database(settings, self.settings)
        self._sender: Any = None
        self._portal: BlockingPortal | None = None
        self._lock = threading.RLock()
        self._log: OrderedLog | None = None

    @property
    def missing(self) -> bool:
        """Whether the outbox is embedded and its file does not exist."""
        return self.embedded and not (self._book.folder / FILE).exists()

    def targets(self, outbox: bytes) -> RelayTargets:
        """Return the relay's targets: messages go to the log of the book, appends to its journals."""
        return RoutedTargets(lambda: self._log_target(outbox), lambda: self._journal_target(outbox))

    def _journal_target(self, outbox: bytes) -> RelayTarget:
        return JournalTarget(self._journals, self._open_portal(), outbox)

    def _open_portal(self) -> BlockingPortal:
        with self._lock:
            if self._portal is None:
                self._portal = BlockingPortal()
            return self._portal

    def _log_target(self, outbox: bytes) -> RelayTarget:
        section = self._book.section("log")
        if section.url is None:
            return self._embedded_target()
        adapter = extra("tidebook.outbox.kafka.target", "kafka")
        target: RelayTarget = adapter.KafkaTarget(self._kafka(), self.settings, outbox=outbox)
        return target

    def sender(self) -> Sender:
        """Return the Kafka sender that all users of the outbox share; raise `InvalidInput` without a Kafka log."""
        if self._book.section("log").url is None:
            raise InvalidInput("backends 'kafka' and 'kafka_async' need a Kafka log: set [log] url in tidebook.toml")
        with self._lock:
            if self._sender is None:
                adapter = extra("tidebook.outbox.kafka.sender", "kafka")
                self._sender = adapter.KafkaSender(self._kafka(), self._metrics)
            sender: Sender = self._sender
        return sender

    def _kafka(self) -> Any:
        section = self._book.section("log")
        if section.url is None or scheme(section.url) != "kafka":
            raise InvalidInput(f"[log] url: {scheme(section.url or '')}:// is unknown; there is kafka://")
        return adapter_options(section, "log", extra("tidebook.kafka.settings", "kafka").KafkaSettings)

    def _embedded_target(self) -> RelayTarget:
        from tidebook.log.sqlite.log import SqliteLog
        from tidebook.log.sqlite.relay_lock import RelayLocks
        from tidebook.outbox.log_topic import LogTarget

        portal = self._open_portal()
        with self._lock:
            if self._log is None:
                self._log = portal.run(_call_in_thread(lambda: SqliteLog(self._book.folder, metrics=self._metrics)))
            # Do not query a store on a server: messages must not depend on it, and the log shows a topic's kind too.
            embedded = self._book.section("store").embedded
            return LogTarget(
                self._log,
                portal.run,
                RelayLocks(self._book.folder),
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


async def _call_in_thread(make: Any) -> Any:
    return await asyncio.to_thread(make)


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
    raise InvalidInput(f"[sql] url: {scheme(url)}:// is unknown; there are postgresql://, mysql:// and sqlite:///")


def make_outbox(
    settings: Settings, make_book: MakeBook, *, ids: Ids | None = None, metrics: Metrics | None = None
) -> Outbox:
    """Return the outbox of a book; the relay opens a separate book with `make_book` when it first needs journals."""
    metrics = metrics or Metrics()
    return Outbox(BookParts(settings, metrics=metrics, make_book=make_book), ids=ids, metrics=metrics)

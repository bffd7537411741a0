"""From the settings to an outbox: its database, and where its relay sends."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidebook.core.clock import Ids
from tidebook.core.errors import InvalidInput
from tidebook.core.metrics import Metrics
from tidebook.core.portal import Portal
from tidebook.outbox.backend import Sender
from tidebook.outbox.journal_target import JournalTarget
from tidebook.outbox.outbox import Outbox
from tidebook.outbox.routed_target import RoutedTarget
from tidebook.outbox.settings import OutboxSettings
from tidebook.wiring.adapters import extra, scheme
from tidebook.wiring.outbox_journals import BookJournals, MakeBook
from tidebook.wiring.settings import Settings, options_as

if TYPE_CHECKING:
    from tidebook.log.relay_port import RelayTarget
    from tidebook.outbox.log_target import OrderedLog
    from tidebook.sql.port.outbox import OutboxDatabase

#: A file of its own: the application opens it with a SQLite of its own.
FILE = "outbox.db"


class BookParts:
    """The parts that the settings name, opened when they are first used."""

    def __init__(self, settings: Settings, *, metrics: Metrics, make_book: MakeBook) -> None:
        self._book = settings
        self._journals = BookJournals(make_book)
        self._metrics = metrics
        self.settings: OutboxSettings = options_as(settings.section("outbox"), "outbox", OutboxSettings)
        self.embedded = settings.section("sql").embedded
        self.url, self.database = _database(settings, self.settings)
        self._sender: Any = None
        self._portal: Portal | None = None
        self._opening = threading.RLock()
        self._log: OrderedLog | None = None

    def target(self, outbox: bytes) -> RelayTarget:
        """Kafka or the book's own log, and its journals."""
        return RoutedTarget(lambda: self._log_target(outbox), lambda: self._journal_target(outbox))

    def _journal_target(self, outbox: bytes) -> RelayTarget:
        return JournalTarget(self._journals, self._loop(), outbox)

    def _loop(self) -> Portal:
        with self._opening:
            if self._portal is None:
                self._portal = Portal()
            return self._portal

    def _log_target(self, outbox: bytes) -> RelayTarget:
        section = self._book.section("log")
        if section.url is None:
            return self._embedded_target()
        settings = self.settings
        adapter = extra("tidebook.log.kafka.relay_target", "kafka")
        target: RelayTarget = adapter.KafkaTarget(
            self._kafka(),
            outbox=outbox,
            fence=settings.fence,
            fence_ms=settings.fence_ms,
            fence_ms_most=settings.lock_limit_ms // 2,
            configure_topics=settings.configure_topics,
        )
        return target

    def sender(self) -> Sender:
        """One producer for the whole book."""
        if self._book.section("log").url is None:
            raise InvalidInput("backends 'kafka' and 'kafka_async' need a Kafka log: set [log] url in tidebook.toml")
        with self._opening:
            if self._sender is None:
                adapter = extra("tidebook.log.kafka.relay_sender", "kafka")
                self._sender = adapter.KafkaSender(self._kafka(), self._metrics)
            sender: Sender = self._sender
        return sender

    def _kafka(self) -> Any:
        section = self._book.section("log")
        if section.url is None or scheme(section.url) != "kafka":
            raise InvalidInput(f"[log] url: {scheme(section.url or '')}:// is unknown; there is kafka://")
        return extra("tidebook.log.kafka.settings", "kafka").KafkaSettings.read(section.url, section.options)

    def _embedded_target(self) -> RelayTarget:
        from tidebook.log.embedded.log import EmbeddedLog
        from tidebook.log.embedded.relay_lock import RelayLocks
        from tidebook.outbox.log_target import LogTarget

        loop = self._loop()
        with self._opening:
            if self._log is None:
                self._log = loop.run(_opened(lambda: EmbeddedLog(self._book.folder, metrics=self._metrics)))
            return LogTarget(self._log, loop.run, RelayLocks(self._book.folder))

    def close(self) -> None:
        """Send what is queued, then let go."""
        if self._sender is not None:
            self._sender.close()
        if self._portal is not None:
            self._portal.run(self._journals.close())
            if self._log is not None:
                self._portal.run(self._log.close())
            self._portal.close()
        self._sender = self._portal = self._log = None


async def _opened(make: Any) -> Any:
    return await asyncio.to_thread(make)


def _database(settings: Settings, outbox: OutboxSettings) -> tuple[str, OutboxDatabase]:
    url = settings.section("sql").url
    options: dict[str, Any] = {
        "lock_limit_ms": outbox.lock_limit_ms,
        "hold_parked": outbox.parked == "hold_key",
    }
    if url is None or scheme(url) == "sqlite":
        from tidebook.sql.sqlite.outbox import SqliteOutboxDatabase

        path = (settings.folder / FILE).absolute() if url is None else Path(url.split("://", 1)[1].removeprefix("/"))
        return f"sqlite:///{path}", SqliteOutboxDatabase(path, **options)
    if scheme(url) in {"postgresql", "postgres"}:
        postgres = extra("tidebook.sql.postgres.outbox", "postgres")
        return "postgresql+psycopg://" + url.split("://", 1)[1], postgres.PostgresOutboxDatabase(url, **options)
    if scheme(url) in {"mysql", "mariadb"}:
        mysql = extra("tidebook.sql.mysql.outbox", "mysql")
        return "mysql+pymysql://" + url.split("://", 1)[1], mysql.MysqlOutboxDatabase(url, **options)
    raise InvalidInput(f"[sql] url: {scheme(url)}:// is unknown; there are postgresql://, mysql:// and sqlite:///")


def make_outbox(
    settings: Settings, make_book: MakeBook, *, ids: Ids | None = None, metrics: Metrics | None = None
) -> Outbox:
    """The outbox of a book; log, store and journals (of a book that `make_book` makes) wait until they are needed."""
    counted = metrics or Metrics()
    return Outbox(BookParts(settings, metrics=counted, make_book=make_book), ids=ids, metrics=counted)

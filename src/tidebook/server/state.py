"""The state that all requests of a server share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

from tidebook.core.errors import TidebookError
from tidebook.server.audit import Audit
from tidebook.server.book_checks import BookChecks
from tidebook.server.broadcast import Broadcasts
from tidebook.server.browser_sessions import BrowserSessions
from tidebook.server.database import ServerDatabase
from tidebook.server.deadlines import Deadlines
from tidebook.server.gate import Gate
from tidebook.server.history import History
from tidebook.server.idempotency import IdempotencyKeys
from tidebook.server.masking import Masks
from tidebook.server.pipeline_jobs import PipelineJobs
from tidebook.server.rate_limit import RateLimit
from tidebook.server.region_sessions import RegionSessions
from tidebook.server.settings import ServerSettings
from tidebook.server.streams import LiveStreams, StreamSlots
from tidebook.server.tokens import USED_EVERY_MS, Tokens
from tidebook.wiring.book import Book

logger = logging.getLogger("tidebook.server")

#: How often idle regions are closed and streams are kept alive.
MAINTAIN_S = 1.0


class ServerState:
    """The book, the settings, and all components of the server that requests use."""

    def __init__(
        self,
        book: Book,
        *,
        host: str = "127.0.0.1",
        loopback: bool = True,
        tls: bool = False,
        where: str | None = None,
        settings: ServerSettings | None = None,
    ) -> None:
        self.book = book
        self.settings = settings = settings or book.settings.options("server", ServerSettings)
        self.tls = tls
        self.started_s = time.monotonic()
        #: Set when the server is about to stop: it is no longer ready, and live streams end.
        self.draining = asyncio.Event()
        #: The open connections, once there is a server.
        self.connections: Collection[object] = ()
        self.database = ServerDatabase(book.settings.folder, book.metrics)
        self.tokens = Tokens(self.database, book.clock)
        self.sessions = BrowserSessions(session_s=settings.session_s)
        self.gate = Gate(
            self.tokens,
            self.sessions,
            RateLimit(settings.rate_per_s, settings.rate_burst),
            loopback=loopback,
            host=host,
            allowed_hosts=settings.allowed_hosts,
        )
        self.keys = IdempotencyKeys(
            self.database, book.clock, keys_max=settings.idempotency_keys_max, keep_s=settings.idempotency_s
        )
        self.audit = Audit(book, self.database)
        self.masks = Masks(book.settings.section("mask").options)
        self.slots = StreamSlots(settings.streams_max, settings.streams_per_token_max)
        self.live = LiveStreams(send_s=settings.send_s, keepalive_s=settings.keepalive_s)
        self.broadcasts = Broadcasts()
        self.book_checks = BookChecks(book)
        self.deadlines = Deadlines()
        self.jobs = PipelineJobs(where or str(book.settings.folder), jobs_max=settings.jobs_max)
        self.regions = RegionSessions(book, idle_s=settings.region_idle_s, sessions_max=settings.region_sessions_max)
        self.history = History(book, self.database)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the maintenance and the history."""
        self._tasks = [
            asyncio.create_task(self._watch()),
            asyncio.create_task(self._maintain()),
            asyncio.create_task(self.history.run()),
        ]

    async def _watch(self) -> None:
        """Enforce time limits; nothing here waits for the book, which may hang."""
        while True:
            await asyncio.sleep(MAINTAIN_S)
            self.deadlines.expire()
            self.live.keep_alive()
            try:
                self.live.end_unless(self.gate.is_current)
            except TidebookError as error:
                logger.warning("tokens cannot be read, and are tried again: %s", error)

    async def _maintain(self) -> None:
        uses_written_s = time.monotonic()
        while True:
            await asyncio.sleep(MAINTAIN_S)
            try:
                await self.regions.close_idle()
                if time.monotonic() - uses_written_s > USED_EVERY_MS / 1000:
                    uses_written_s = time.monotonic()
                    await self.tokens.write_uses()
            except TidebookError as error:
                logger.warning("maintenance failed and will be retried: %s", error)

    def drain(self) -> None:
        """Report that the server is no longer ready, and end live streams with a retry hint."""
        self.draining.set()
        self.live.end_all()

    async def close(self) -> None:
        """Close everything that the requests have opened."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.book_checks.close()
        await self.jobs.close()
        await self.regions.close()
        await self.audit.close()
        try:
            await self.tokens.write_uses()
        except TidebookError as error:
            logger.warning("the last uses of tokens could not be written: %s", error)
        await self.database.close()

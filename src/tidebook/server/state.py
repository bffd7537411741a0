"""What all requests of a server share."""

from __future__ import annotations

import asyncio
import time

from tidebook.server.pipeline_jobs import PipelineJobs
from tidebook.server.region_sessions import RegionSessions
from tidebook.server.settings import ServerSettings
from tidebook.wiring.book import Book


class ServerState:
    """The book, the settings, and the parts of the server."""

    def __init__(self, book: Book, *, where: str | None = None, settings: ServerSettings | None = None) -> None:
        self.book = book
        self.settings = settings or book.settings.options("server", ServerSettings)
        self.started_s = time.monotonic()
        #: Set when the server is about to stop: it is no longer ready, and streams end.
        self.draining = asyncio.Event()
        self.jobs = PipelineJobs(where or str(book.settings.folder), jobs_max=self.settings.jobs_max)
        self.regions = RegionSessions(
            book, idle_s=self.settings.region_idle_s, sessions_max=self.settings.region_sessions_max
        )

    async def close(self) -> None:
        """Close what the requests have opened."""
        await self.jobs.close()
        await self.regions.close()

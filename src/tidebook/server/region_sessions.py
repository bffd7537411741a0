"""Sessions of remote writers: the regions of write-ahead logs that this server has claimed for its clients."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from tidebook.api.errors import TooManyRequests
from tidebook.core.errors import Fenced
from tidebook.wal.region import Region
from tidebook.wal.settings import WalSettings
from tidebook.wal.wal import Wal
from tidebook.wiring.book import Book

RegionKey = tuple[str, int]


class RegionSession:
    """A region that is claimed for one client."""

    def __init__(self, id: str, wal: Wal, region: Region, now_s: float) -> None:
        self.id = id
        self.wal = wal
        self.region = region
        self.used_s = now_s
        #: The number of requests that use it now.
        self.uses = 0


class RegionSessions:
    """The sessions of all regions, at most one for each; a session that is idle for `idle_s` is closed.

    Opening a session first closes the previous one, which finishes its writes, and then claims the region with a new
    term. The state that the new owner recovers thus contains all writes of the previous one.
    """

    def __init__(self, book: Book, *, idle_s: float, sessions_max: int) -> None:
        self._book = book
        self._idle_s = idle_s
        self._max = sessions_max
        self._sessions: dict[RegionKey, RegionSession] = {}
        #: The locks that calls hold or wait for.
        self._locks: WeakValueDictionary[RegionKey, asyncio.Lock] = WeakValueDictionary()

    async def open(self, namespace: str, region: int, *, create: bool) -> RegionSession:
        """Claim a region for a new session."""
        key = (namespace, region)
        async with self._lock(key):
            if key not in self._sessions and len(self._sessions) >= self._max:
                raise TooManyRequests(f"{self._max:,} regions are open for writing: close some", retry_after_s=5.0)
            book = self._book
            settings = book.settings.options("wal", WalSettings)
            wal = Wal(book.log, namespace, clock=book.clock, ids=book.ids, metrics=book.metrics, settings=settings)
            before = self._sessions.pop(key, None)
            if before is not None:
                await before.wal.close()
            try:
                opened = await wal.open_region(region, create=create)
            except BaseException:
                await wal.close()
                raise
            session = RegionSession(secrets.token_urlsafe(16), wal, opened, time.monotonic())
            self._sessions[key] = session
            return session

    @asynccontextmanager
    async def use(self, namespace: str, region: int, session: str) -> AsyncIterator[Region]:
        """Use the region of a session; raise `Fenced` if the session has ended."""
        found = self._sessions.get((namespace, region))
        if found is None or not secrets.compare_digest(found.id.encode(), session.encode()):
            raise Fenced(
                f"{namespace}/{region}: this session has ended: it was closed or idle, another writer has claimed the "
                "region, or the server was restarted: open a new one"
            )
        found.uses += 1
        try:
            yield found.region
        finally:
            found.uses -= 1
            found.used_s = time.monotonic()

    async def close_session(self, namespace: str, region: int, session: str) -> None:
        """Close a session and release its claim; do nothing if it has ended."""
        key = (namespace, region)
        async with self._lock(key):
            found = self._sessions.get(key)
            if found is not None and secrets.compare_digest(found.id.encode(), session.encode()):
                del self._sessions[key]
                await found.wal.close()

    async def close_region(self, namespace: str, region: int) -> None:
        """Close the session of a region, if there is one, whatever its id."""
        key = (namespace, region)
        async with self._lock(key):
            if (found := self._sessions.pop(key, None)) is not None:
                await found.wal.close()

    async def close_idle(self) -> None:
        """Close the sessions that were not used for `idle_s` seconds."""
        now_s = time.monotonic()
        for key, session in list(self._sessions.items()):
            if not session.uses and now_s - session.used_s > self._idle_s:
                await self.close_session(*key, session.id)

    async def close(self) -> None:
        """Finish the writes of all sessions and close them."""
        for key in list(self._sessions):
            await self.close_region(*key)

    def _lock(self, key: RegionKey) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

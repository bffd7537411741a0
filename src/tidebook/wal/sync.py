"""Write-ahead logs for threads without an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from inspect import isawaitable

from tidebook.runtime.blocking_facade import BlockingFacade, blocking, forwarded, iterating
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wal.meta import Pinned
from tidebook.wal.reading import Handler, OnProgress, Replay
from tidebook.wal.region import OnPinned, Region
from tidebook.wal.wal import Wal

#: How many pages a replay prefetches while its handlers run.
PREFETCH_PAGES_MAX = 2


class SyncRegion(BlockingFacade[Region]):
    """The blocking form of `Region`."""

    def __init__(self, portal: BlockingPortal, target: Region) -> None:
        super().__init__(portal, target)
        self.id = target.id

    meta = forwarded(Region.meta)
    writable = forwarded(Region.writable)
    write = blocking(Region.write)
    write_many = blocking(Region.write_many)
    read = iterating(Region.read)
    read_table = iterating(Region.read_table)
    refresh = blocking(Region.refresh)
    mark_deleted = blocking(Region.mark_deleted)
    request_flush = blocking(Region.request_flush)
    drop_table = blocking(Region.drop_table)
    snapshot = blocking(Region.snapshot)
    clean = blocking(Region.clean)
    status = blocking(Region.status)
    close = blocking(Region.close)

    def replay(
        self, handlers: Mapping[int, Handler], *, other: Handler | None = None, progress: OnProgress | None = None
    ) -> dict[int, int]:
        """Pass each entry to the handler of its table; see `Region.replay`.

        The handlers run in the calling thread and may use the region.
        """
        replay = Replay(handlers, other=other, progress=progress)
        for page in self._portal.iterate(self._target.replay_pages(), ahead_max=PREFETCH_PAGES_MAX):
            for handler, run in replay.take(page):
                for entry in run:
                    result = handler(entry)
                    if result is not None and isawaitable(result):
                        self._portal.run(_awaited(result))
        return replay.counts

    def pinned(self) -> list[Pinned]:
        """Return the tables with entries, oldest entry first: the first one keeps the log from being truncated."""
        return self._target.pinned()


class SyncWal(BlockingFacade[Wal]):
    """The blocking form of `Wal`."""

    def __init__(self, portal: BlockingPortal, target: Wal) -> None:
        super().__init__(portal, target)
        self.namespace = target.namespace

    regions = blocking(Wal.regions)
    delete_region = blocking(Wal.delete_region)

    def open_region(
        self, id: int, *, create: bool = False, writable: bool = True, on_pinned: OnPinned | None = None
    ) -> SyncRegion:
        """Open a region; see `Wal.open_region`. `on_pinned` is called in a worker thread and may use the region."""
        callback = _in_worker_thread(on_pinned) if callable(on_pinned) else on_pinned
        opening = self._target.open_region(id, create=create, writable=writable, on_pinned=callback)
        return SyncRegion(self._portal, self._portal.run(opening))


def _in_worker_thread(on_pinned: OnPinned) -> OnPinned:
    """Return a callback that runs `on_pinned` in a worker thread: its blocking calls would deadlock the loop."""

    async def call(pinned: Pinned) -> None:
        result = await asyncio.to_thread(on_pinned, pinned)
        if result is not None and isawaitable(result):
            await result

    return call


async def _awaited(result: Awaitable[None]) -> None:
    await result

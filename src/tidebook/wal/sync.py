"""The blocking forms of `Wal` and `Region`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from inspect import isawaitable
from typing import Any

from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wal.meta import Pinned, RegionMeta
from tidebook.wal.reading import Handler, OnProgress, Replay
from tidebook.wal.record import WalEntry, Writes, Written
from tidebook.wal.region import Cleaned, OnPinned, Region, RegionStatus
from tidebook.wal.snapshot import RegionSnapshot
from tidebook.wal.wal import Wal

#: How many pages a replay prefetches while its handlers run.
PREFETCH_PAGES_MAX = 2


class SyncRegion:
    """The blocking form of `Region`: the same methods without `await`, callable from any thread."""

    def __init__(self, portal: BlockingPortal, region: Region) -> None:
        self._portal = portal
        self._region = region
        self.id = region.id

    @property
    def meta(self) -> RegionMeta:
        """The state of the tables, folded from acknowledged records only."""
        return self._region.meta

    @property
    def writable(self) -> bool:
        """Whether the region was opened for writing and no other writer has claimed it since."""
        return self._region.writable

    def write(self, table: int, payloads: Sequence[Any]) -> Written:
        """Write payloads to a table, atomically and in order; return their sequence numbers."""
        return self._portal.run(self._region.write(table, payloads))

    def write_many(self, writes: Writes) -> list[Written]:
        """Write to several tables atomically; see `Region.write_many`."""
        return self._portal.run(self._region.write_many(writes))

    def read(self, *, from_offset: int = 0) -> Iterator[WalEntry]:
        """Yield the entries of all tables in log order, without those marked deleted; see `Region.read`."""
        return self._portal.iterate(self._region.read(from_offset=from_offset))

    def read_table(self, table: int, *, start: int = 1) -> Iterator[WalEntry]:
        """Yield one table's entries from sequence number `start` on; see `Region.read_table`."""
        return self._portal.iterate(self._region.read_table(table, start=start))

    def replay(
        self, handlers: Mapping[int, Handler], *, other: Handler | None = None, progress: OnProgress | None = None
    ) -> dict[int, int]:
        """Pass each entry to the handler of its table; see `Region.replay`.

        The handlers run in the calling thread and may use the region.
        """
        replay = Replay(handlers, other=other, progress=progress)
        for page in self._portal.iterate(self._region.replay_pages(), ahead_max=PREFETCH_PAGES_MAX):
            for handler, run in replay.take(page):
                for entry in run:
                    result = handler(entry)
                    if result is not None and isawaitable(result):
                        self._portal.run(_awaited(result))
        return replay.counts

    def refresh(self) -> None:
        """Fold the records that other processes have written; see `Region.refresh`."""
        self._portal.run(self._region.refresh())

    def mark_deleted(self, table: int, seq: int, *, incarnation: int | None = None) -> None:
        """Mark a table's entries below `seq` as no longer needed; see `Region.mark_deleted`."""
        self._portal.run(self._region.mark_deleted(table, seq, incarnation=incarnation))

    def drop_table(self, table: int) -> None:
        """Drop a table; its next write starts again at sequence number 1."""
        self._portal.run(self._region.drop_table(table))

    def snapshot(self) -> RegionSnapshot:
        """Write a snapshot of the region's state to the meta topic, and return it."""
        return self._portal.run(self._region.snapshot())

    def clean(self) -> Cleaned:
        """Truncate the part of the log that no table needs any more; see `Region.clean`."""
        return self._portal.run(self._region.clean())

    def pinned(self) -> list[Pinned]:
        """Return the tables with entries, oldest entry first: the first one keeps the log from being truncated."""
        return self._region.pinned()

    def status(self) -> RegionStatus:
        """Return the region's size, owner term, snapshot age and the last error of the cleaner."""
        return self._portal.run(self._region.status())

    def close(self) -> None:
        """Finish the pending writes, stop the cleaner and refuse further writes."""
        self._portal.run(self._region.close())


class SyncWal:
    """The blocking form of `Wal`: the same methods without `await`, callable from any thread."""

    def __init__(self, portal: BlockingPortal, wal: Wal) -> None:
        self._portal = portal
        self._wal = wal
        self.namespace = wal.namespace

    def open_region(
        self, id: int, *, create: bool = False, writable: bool = True, on_pinned: OnPinned | None = None
    ) -> SyncRegion:
        """Open a region; see `Wal.open_region`. `on_pinned` is called in a worker thread and may use the region."""
        called = _in_worker_thread(on_pinned) if callable(on_pinned) else on_pinned
        opening = self._wal.open_region(id, create=create, writable=writable, on_pinned=called)
        return SyncRegion(self._portal, self._portal.run(opening))

    def regions(self) -> list[int]:
        """Return the ids of the regions in this namespace, sorted."""
        return self._portal.run(self._wal.regions())

    def delete_region(self, id: int) -> None:
        """Delete a region and all its entries permanently; raise `NotFound` if it does not exist."""
        self._portal.run(self._wal.delete_region(id))


def _in_worker_thread(on_pinned: OnPinned) -> OnPinned:
    """Run a callback that may block or call the region in a worker thread: on the event loop it would deadlock."""

    async def call(pinned: Pinned) -> None:
        result = await asyncio.to_thread(on_pinned, pinned)
        if result is not None and isawaitable(result):
            await result

    return call


async def _awaited(result: Awaitable[None]) -> None:
    await result

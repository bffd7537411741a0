"""Regions for threads without a loop: the same names, without await, over the one async body."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from inspect import isawaitable
from typing import Any

from tidebook.core.portal import Portal
from tidebook.wal.cleaner import Cleaned, OnPinned
from tidebook.wal.cleaning import Pinned
from tidebook.wal.entry import Entry, Written
from tidebook.wal.meta import RegionMeta
from tidebook.wal.record import Writes
from tidebook.wal.region import Region
from tidebook.wal.replay import Handler, OnProgress, Replay
from tidebook.wal.snapshot import Snapshot
from tidebook.wal.status import RegionStatus
from tidebook.wal.wal import Wal

#: Pages that a replay fetches ahead of its handlers.
PAGES_AHEAD_MAX = 2


class SyncRegion:
    """See `Region` for what each name does."""

    def __init__(self, portal: Portal, region: Region) -> None:
        self._portal = portal
        self._region = region
        self.id = region.id

    @property
    def meta(self) -> RegionMeta:
        return self._region.meta

    @property
    def writable(self) -> bool:
        return self._region.writable

    def write(self, table: int, payloads: Sequence[Any]) -> Written:
        return self._portal.run(self._region.write(table, payloads))

    def write_many(self, writes: Writes) -> list[Written]:
        return self._portal.run(self._region.write_many(writes))

    def read(self, *, from_offset: int = 0) -> Iterator[Entry]:
        return self._portal.iterate(self._region.read(from_offset=from_offset))

    def read_table(self, table: int, *, start: int = 1) -> Iterator[Entry]:
        return self._portal.iterate(self._region.read_table(table, start=start))

    def replay(
        self, handlers: Mapping[int, Handler], *, other: Handler | None = None, progress: OnProgress | None = None
    ) -> dict[int, int]:
        """The handlers run in the calling thread, and may use the region."""
        replay = Replay(handlers, other=other, progress=progress)
        for page in self._portal.iterate(self._region.replaying(), ahead_max=PAGES_AHEAD_MAX):
            for handler, run in replay.take(page):
                for entry in run:
                    waiting = handler(entry)
                    if waiting is not None and isawaitable(waiting):
                        self._portal.run(_awaited(waiting))
        return replay.counts

    def refresh(self) -> None:
        self._portal.run(self._region.refresh())

    def mark_deleted(self, table: int, seq: int, *, life: int | None = None) -> None:
        self._portal.run(self._region.mark_deleted(table, seq, life=life))

    def drop_table(self, table: int) -> None:
        self._portal.run(self._region.drop_table(table))

    def snapshot(self) -> Snapshot:
        return self._portal.run(self._region.snapshot())

    def clean(self) -> Cleaned:
        return self._portal.run(self._region.clean())

    def pinned(self) -> list[Pinned]:
        return self._region.pinned()

    def status(self) -> RegionStatus:
        return self._portal.run(self._region.status())

    def close(self) -> None:
        self._portal.run(self._region.close())


class SyncWal:
    """See `Wal` for what each name does."""

    def __init__(self, portal: Portal, wal: Wal) -> None:
        self._portal = portal
        self._wal = wal
        self.namespace = wal.namespace

    def open_region(
        self, id: int, *, create: bool = False, writable: bool = True, on_pinned: OnPinned | None = None
    ) -> SyncRegion:
        """`on_pinned` is called in a thread of its own, and may use the region."""
        called = _off_the_loop(on_pinned) if callable(on_pinned) else on_pinned
        opening = self._wal.open_region(id, create=create, writable=writable, on_pinned=called)
        return SyncRegion(self._portal, self._portal.run(opening))

    def regions(self) -> list[int]:
        return self._portal.run(self._wal.regions())

    def delete_region(self, id: int) -> None:
        self._portal.run(self._wal.delete_region(id))


def _off_the_loop(on_pinned: OnPinned) -> OnPinned:
    """A callback that may block, and may call the region: in the loop's thread that would wait for itself."""

    async def call(pinned: Pinned) -> None:
        waiting = await asyncio.to_thread(on_pinned, pinned)
        if waiting is not None and isawaitable(waiting):
            await waiting

    return call


async def _awaited(waiting: Awaitable[None]) -> None:
    await waiting

"""`Wal`: the regions of one namespace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import WeakValueDictionary

from tidebook.core.errors import InvalidInput, NotFound
from tidebook.log.port import Log
from tidebook.runtime.clock import Clock, Ids
from tidebook.runtime.metrics import Metrics
from tidebook.wal.region import OnPinned, Region
from tidebook.wal.settings import WalSettings
from tidebook.wal.topics import RegionId, RegionTopics, namespace_name, region_id, region_of


class Wal:
    """The write-ahead log of a namespace: open, list and delete its regions. Get it with `book.wal(namespace)`.

    A region that is open is reused by later calls, so this process claims it for writing only once.
    """

    def __init__(
        self,
        log: Log,
        namespace: str,
        *,
        clock: Clock,
        ids: Ids,
        metrics: Metrics,
        settings: WalSettings | None = None,
        on_open: Callable[[Wal], object] | None = None,
    ) -> None:
        self.namespace = namespace_name(namespace)
        self._log = log
        self._clock = clock
        self._ids = ids
        self._metrics = metrics
        self._settings = settings or WalSettings()
        self._open: dict[tuple[RegionId, bool], Region] = {}
        #: Called with this object after it has opened a region, which must be closed.
        self._on_open = on_open
        #: The lock of each region that a call is opening or deleting.
        self._open_locks: WeakValueDictionary[RegionId, asyncio.Lock] = WeakValueDictionary()

    async def open_region(
        self, id: int, *, create: bool = False, writable: bool = True, on_pinned: OnPinned | None = None
    ) -> Region:
        """Open a region, recover its state and, unless `writable=False`, claim it for writing.

        A claim fences the previous owner: its later writes raise `Fenced`. Readers need no claim. A second call returns
        the same object, refreshed if it is a reader, unless another writer has claimed the region or it was deleted.
        `on_pinned` is called with each table that retains more than `force_flush_bytes` of the log, so that the
        application can flush the table. Raise `NotFound` if the region does not exist and `create` is false, and
        `LogLost` if records that are still needed are lost.

        >>> async def example(book):
        ...     return await book.wal("metrics").open_region(7, create=True)
        """
        region = region_id(id)
        if on_pinned is not None and not callable(on_pinned):
            raise InvalidInput(f"on_pinned must be callable, not {type(on_pinned).__name__}")
        async with self._open_lock(region):
            known = self._open.get((region, writable))
            if known is not None and (not writable or known.writable) and await known.exists():
                await known.reopen(on_pinned)
                return known
            topics = self._topics(region)
            found = await topics.find_id()
            if found is None and not create:
                raise NotFound(f"namespace {self.namespace!r} has no region {region}: open it with create=True")
            topics.topic_id = found or ""
            if writable or create:
                await topics.create()  # or check existing ones: a topic with time-based retention is rejected
            opened = Region(topics, clock=self._clock, ids=self._ids, metrics=self._metrics, on_pinned=on_pinned)
            await opened.open(writable=writable)
            if known is not None:
                await known.close()
            self._open[region, writable] = opened
            if self._on_open is not None:
                self._on_open(self)
            return opened

    def _open_lock(self, region: RegionId) -> asyncio.Lock:
        return self._open_locks.setdefault(region, asyncio.Lock())

    def _topics(self, region: RegionId) -> RegionTopics:
        return RegionTopics(self._log, self.namespace, region, self._settings)

    async def regions(self) -> list[int]:
        """Return the ids of the regions in this namespace, sorted."""
        found = (region_of(topic, self.namespace) for topic in await self._log.topics())
        return sorted(region for region in found if region is not None)

    async def delete_region(self, id: int) -> None:
        """Delete a region and all its entries permanently; raise `NotFound` if it does not exist."""
        region = region_id(id)
        topics = self._topics(region)
        async with self._open_lock(region):
            if await topics.find_id() is None:
                raise NotFound(f"namespace {self.namespace!r} has no region {region}")
            for writable in (True, False):
                known = self._open.pop((region, writable), None)
                if known is not None:
                    await known.close()
            # The meta topic is deleted first. After a crash in between, a region without snapshots can still be
            # recovered by a full scan; snapshots without data would be reported as a loss.
            if await self._log.topic(topics.meta) is not None:
                await self._log.delete_topic(topics.meta)
            await self._log.delete_topic(topics.data)

    async def close(self) -> None:
        """Close every open region."""
        for region in self._open.values():
            await region.close()
        self._open.clear()

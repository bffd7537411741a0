"""A namespace of regions."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from tidebook.core.clock import Clock, Ids
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.core.metrics import Metrics
from tidebook.log.port import Log
from tidebook.wal.cleaner import OnPinned
from tidebook.wal.names import RegionId, namespace_name, region_id, region_of
from tidebook.wal.region import Region
from tidebook.wal.settings import WalSettings
from tidebook.wal.topics import RegionTopics


class Wal:
    """Opens regions and keeps them: what is open for writing is claimed once."""

    def __init__(
        self,
        log: Log,
        namespace: str,
        *,
        clock: Clock,
        ids: Ids,
        metrics: Metrics,
        settings: WalSettings | None = None,
    ) -> None:
        self.namespace = namespace_name(namespace)
        self._log = log
        self._clock = clock
        self._ids = ids
        self._metrics = metrics
        self._settings = settings or WalSettings()
        self._open: dict[tuple[RegionId, bool], Region] = {}
        self._opening: defaultdict[RegionId, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def open_region(
        self, id: int, *, create: bool = False, writable: bool = True, on_pinned: OnPinned | None = None
    ) -> Region:
        """Find the region, or make it with `create=True`; recover it, and claim it where it is to be written.

        A second call gives the same region object (a reader's brought up to date), until it was taken over.

        >>> async def example(book):
        ...     return await book.wal("metrics").open_region(7, create=True)
        """
        region = region_id(id)
        if on_pinned is not None and not callable(on_pinned):
            raise InvalidInput(f"on_pinned is something to call, not {type(on_pinned).__name__}")
        async with self._opening[region]:
            known = self._open.get((region, writable))
            if known is not None and (not writable or known.writable) and await known.is_there():
                await known.reopen(on_pinned)
                return known
            opened = await self._find(region, create=create, writable=writable, on_pinned=on_pinned)
            if known is not None:
                await known.close()
            self._open[region, writable] = opened
            return opened

    async def _find(self, region: RegionId, *, create: bool, writable: bool, on_pinned: OnPinned | None) -> Region:
        topics = RegionTopics(self._log, self.namespace, region, limit_bytes=self._settings.limit_bytes)
        if not await topics.find() and not create:
            raise NotFound(f"namespace {self.namespace!r} has no region {region}: open it with create=True")
        if writable or create:
            await topics.create()  # and where they are there: a topic that forgets by time is refused
        return await Region.open(
            topics,
            id=region,
            writable=writable,
            settings=self._settings,
            clock=self._clock,
            ids=self._ids,
            metrics=self._metrics,
            labels={"namespace": self.namespace, "region": region},
            on_pinned=on_pinned,
        )

    async def regions(self) -> list[int]:
        """The ids of the namespace's regions."""
        found = (region_of(topic, self.namespace) for topic in await self._log.topics())
        return sorted(region for region in found if region is not None)

    async def delete_region(self, id: int) -> None:
        """Remove a region and all it holds."""
        region = region_id(id)
        topics = RegionTopics(self._log, self.namespace, region, limit_bytes=self._settings.limit_bytes)
        async with self._opening[region]:
            if not await topics.find():
                raise NotFound(f"namespace {self.namespace!r} has no region {region}")
            for writable in (True, False):
                known = self._open.pop((region, writable), None)
                if known is not None:
                    await known.close()
            # The meta topic first: a region without snapshots is scanned, one without data would be lost.
            if await self._log.topic(topics.meta) is not None:
                await self._log.delete_topic(topics.meta)
            await self._log.delete_topic(topics.data)

    async def close(self) -> None:
        """Close every region."""
        for region in self._open.values():
            await region.close()
        self._open.clear()

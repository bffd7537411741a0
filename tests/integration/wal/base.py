"""Fixtures of the region tests: a log, a separate namespace, and a second process's view of it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar

import pytest
import pytest_asyncio

from tidebook.log.port import Log, Record, read_all
from tidebook.runtime.clock import RandomIds, SystemClock
from tidebook.runtime.metrics import Metrics
from tidebook.wal.meta import RegionMeta
from tidebook.wal.record import WalEntry
from tidebook.wal.region import Region
from tidebook.wal.settings import WalSettings
from tidebook.wal.wal import Wal

OpenLog = Callable[[], AbstractAsyncContextManager[Log]]


def make_wal(log: Log, namespace: str, **settings: Any) -> Wal:
    return Wal(
        log,
        namespace,
        clock=SystemClock(),
        ids=RandomIds(),
        metrics=Metrics(),
        settings=WalSettings(**{"clean_every_s": 0, **settings}),
    )


class RegionBase:
    """Base of the region tests. Subclasses implement `open_log`, which returns a new instance on the same data."""

    pytestmark: ClassVar = [pytest.mark.asyncio]

    @pytest.fixture
    def open_log(self) -> OpenLog:
        raise NotImplementedError("give the fixture open_log")

    @pytest_asyncio.fixture
    async def log(self, open_log: OpenLog) -> AsyncIterator[Log]:
        async with open_log() as log:
            yield log

    @pytest.fixture
    def namespace(self) -> str:
        return f"t-{uuid.uuid4().hex[:12]}"

    @pytest_asyncio.fixture
    async def wal(self, log: Log, namespace: str) -> AsyncIterator[Wal]:
        wal = make_wal(log, namespace)
        yield wal
        for region in await wal.regions():
            await wal.delete_region(region)
        await wal.close()

    @pytest_asyncio.fixture
    async def region(self, wal: Wal) -> Region:
        return await wal.open_region(7, create=True)

    @pytest_asyncio.fixture
    async def other(self, log: Log, namespace: str, wal: Wal) -> AsyncIterator[Wal]:
        """Open the same namespace as another process does."""
        other = make_wal(log, namespace)
        yield other
        await other.close()


def state_of(meta: RegionMeta) -> dict[int, Any]:
    """Return the part of the state that must survive a recovery, as comparable values."""
    return {
        table: (t.incarnation, t.next_seq_num, t.latest_marked_deleted, t.current_high_watermark, dict(t.mapping))
        for table, t in meta.tables.items()
    }


async def held_records(log: Log, topic: str) -> list[Record]:
    """Return all records of a topic."""
    start, stop = await log.start(topic, 0), await log.end(topic, 0)
    return list(await read_all(log, topic, 0, start=start, stop=stop))


async def entries(reading: AsyncIterator[WalEntry]) -> list[tuple[int, int, Any]]:
    return [(e.table, e.seq, e.payload) async for e in reading]


async def contents(region: Region) -> dict[int, list[tuple[int, Any]]]:
    """Return the entries of each table by sequence number."""
    held: dict[int, list[tuple[int, Any]]] = {}
    async for entry in region.read():
        held.setdefault(entry.table, []).append((entry.seq, entry.payload))
    return held

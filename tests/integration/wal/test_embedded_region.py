"""Regions on the embedded log, with contiguous offsets and with gaps."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.integration.wal.base import OpenLog
from tests.integration.wal.faulty import SparseLog
from tests.integration.wal.region_cases import RegionCases
from tidebook.log.port import Log
from tidebook.log.sqlite import SqliteLog


class TestEmbeddedRegion(RegionCases):
    @pytest.fixture
    def open_log(self, tmp_path: Path) -> OpenLog:
        @asynccontextmanager
        async def open_log() -> AsyncIterator[Log]:
            log = SqliteLog(tmp_path)
            yield log
            await log.close()

        return open_log


class TestRegionWithSparseOffsets(RegionCases):
    @pytest.fixture
    def open_log(self, tmp_path: Path) -> OpenLog:
        @asynccontextmanager
        async def open_log() -> AsyncIterator[Log]:
            log = SqliteLog(tmp_path)
            yield SparseLog(log)
            await log.close()

        return open_log

"""Regions on the embedded log: whole, and with holes between its offsets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.integration.wal.base import OpenLog
from tests.integration.wal.faulty import SparseLog
from tests.integration.wal.region_cases import RegionCases
from tidebook.log.embedded import EmbeddedLog
from tidebook.log.port import Log


class TestEmbeddedRegion(RegionCases):
    @pytest.fixture
    def open_log(self, tmp_path: Path) -> OpenLog:
        @asynccontextmanager
        async def open_log() -> AsyncIterator[Log]:
            log = EmbeddedLog(tmp_path)
            yield log
            await log.close()

        return open_log


class TestRegionWithSparseOffsets(RegionCases):
    @pytest.fixture
    def open_log(self, tmp_path: Path) -> OpenLog:
        @asynccontextmanager
        async def open_log() -> AsyncIterator[Log]:
            log = EmbeddedLog(tmp_path)
            yield SparseLog(log)
            await log.close()

        return open_log

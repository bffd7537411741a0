"""Regions on the embedded log, with contiguous offsets and with gaps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.wal.base import OpenLog
from tests.integration.wal.faulty import SparseLog
from tests.integration.wal.region_cases import RegionCases
from tests.open_adapters import embedded_logs


class TestEmbeddedRegion(RegionCases):
    @pytest.fixture
    def open_log(self, tmp_path: Path) -> OpenLog:
        return embedded_logs(tmp_path)


class TestRegionWithSparseOffsets(RegionCases):
    @pytest.fixture
    def open_log(self, tmp_path: Path) -> OpenLog:
        return embedded_logs(tmp_path, SparseLog)

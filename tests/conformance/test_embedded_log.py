"""The embedded log is a log, with an index by key and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.open_adapters import embedded_logs
from tidebook.testing.conformance.log import LogContract, OpenLog


class TestEmbeddedLog(LogContract):
    indexed_by_key = True
    end_is_linearizable = True

    @pytest.fixture
    def open_log(self, tmp_path: Path) -> OpenLog:
        return embedded_logs(tmp_path)

"""Run the log's conformance suite on the embedded log, with and without an index by key."""

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

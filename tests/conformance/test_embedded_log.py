"""The embedded log is a log, with an index by key and without."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tidebook.log.port import Log
from tidebook.log.sqlite import SqliteLog
from tidebook.testing.conformance.log import LogContract, OpenLog


class TestEmbeddedLog(LogContract):
    indexed_by_key = True
    end_is_linearizable = True

    @pytest.fixture
    def open_log(self, tmp_path: Path) -> OpenLog:
        @asynccontextmanager
        async def open_log() -> AsyncIterator[Log]:
            log = SqliteLog(tmp_path)
            yield log
            await log.close()

        return open_log

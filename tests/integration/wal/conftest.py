"""Fixtures: an embedded log, and the same log with injected faults."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.integration.wal.faulty import FaultyLog
from tidebook.log.sqlite import SqliteLog


@pytest_asyncio.fixture
async def inner(tmp_path: Path) -> AsyncIterator[SqliteLog]:
    log = SqliteLog(tmp_path)
    yield log
    await log.close()


@pytest.fixture
def log(inner: SqliteLog) -> FaultyLog:
    return FaultyLog(inner)

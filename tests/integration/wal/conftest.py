"""A log in a folder, and the same with faults to order."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.integration.wal.faulty import FaultyLog
from tidebook.log.embedded import EmbeddedLog


@pytest_asyncio.fixture
async def inner(tmp_path: Path) -> AsyncIterator[EmbeddedLog]:
    log = EmbeddedLog(tmp_path)
    yield log
    await log.close()


@pytest.fixture
def log(inner: EmbeddedLog) -> FaultyLog:
    return FaultyLog(inner)

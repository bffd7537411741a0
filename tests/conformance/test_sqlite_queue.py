"""Run the conformance suite of queue stores on SQLite in a folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tidebook.queue.port import QueueStore
from tidebook.queue.sqlite.store import SqliteQueues
from tidebook.testing.clock import ManualClock
from tidebook.testing.conformance.queue import Advance, OpenQueues, QueueContract
from tidebook.testing.conformance.queue_base import START_MS


class TestSqliteQueues(QueueContract):
    takes_transactions = False

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock(START_MS)

    @pytest.fixture
    def open_queues(self, tmp_path: Path, clock: ManualClock) -> OpenQueues:
        @asynccontextmanager
        async def open_queues() -> AsyncIterator[QueueStore]:
            store = SqliteQueues(tmp_path, clock=clock)
            yield store
            await store.close()

        return open_queues

    @pytest.fixture
    def advance(self, clock: ManualClock) -> Advance:
        async def advance(by_ms: int) -> None:
            clock.advance(by_ms)

        return advance

"""Queues over HTTP pass the suite of queue stores, through a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.server.http_queues import HandClock, HttpQueues
from tests.integration.server.running import not_remote, served_book
from tidebook.queue.port import QueueStore
from tidebook.queue.sqlite.store import SqliteQueues
from tidebook.runtime.clock import SystemClock
from tidebook.testing.conformance.queue import Advance, OpenQueues, QueueContract
from tidebook.wiring.book import Book
from tidebook.wiring.remote_book import RemoteBook
from tidebook.wiring.settings import Settings


def _with_clock(clock: SystemClock) -> Any:
    original = SqliteQueues.__init__

    def init(self: SqliteQueues, folder: Path, **options: Any) -> None:
        original(self, folder, **{**options, "clock": clock})

    return init


class TestHttpQueues(QueueContract):
    takes_transactions = False

    test_callers_of_one_claim_are_served_in_turn_each_with_its_own_token = not_remote("the server chooses the tokens")

    @pytest.fixture
    def clock(self) -> HandClock:
        return HandClock()

    @pytest.fixture
    def open_queues(self, tmp_path: Path, clock: HandClock, monkeypatch: pytest.MonkeyPatch) -> OpenQueues:
        # The store of a served book uses the machine's clock; here it uses the clock that the cases move.
        monkeypatch.setattr("tidebook.queue.sqlite.store.SqliteQueues.__init__", _with_clock(clock))

        puts = HandClock()  # the server's own clock, by which it dates puts

        @asynccontextmanager
        async def open_queues() -> AsyncIterator[QueueStore]:
            async with (
                Book(Settings(tmp_path), clock=puts) as local,
                served_book(local) as url,
                RemoteBook(url) as book,
            ):
                store = HttpQueues(book, puts, folder=tmp_path, clock=clock)
                yield store
                await store.close()

        return open_queues

    @pytest.fixture
    def advance(self, clock: HandClock) -> Advance:
        async def advance(by_ms: int) -> None:
            clock.ms += by_ms

        return advance

"""Run the store's conformance suite on the embedded store, which refuses a slice that does not begin at the pointer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tidebook.store.port import StoreWriter
from tidebook.store.sqlite import SqliteStore
from tidebook.testing.conformance.store import StoreContract
from tidebook.testing.conformance.store_suite import OpenStore


class TestEmbeddedStore(StoreContract):
    last_write_wins = False

    @pytest.fixture
    async def open_store(self, tmp_path: Path) -> AsyncIterator[OpenStore]:
        opened: list[SqliteStore] = []

        async def open_store() -> StoreWriter:
            opened.append(SqliteStore(tmp_path))
            return opened[-1]

        yield open_store
        for store in opened:
            await store.close()

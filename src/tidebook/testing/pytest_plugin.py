"""Fixtures for pytest, which finds them if Tidebook is installed: `book`, `sync_book`, `manual_clock`.

    async def test_an_order_is_paid(book):
        await book.journal("orders").append("o-1", [tidebook.Event({"total": 3}, tags={"paid"})])
        await book.settle()                                        # visible everywhere
        assert [event.id async for event in book.tags.read("paid")] == ["o-1"]

A test that also takes `manual_clock` gets a book whose time it sets.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # pytest imports this module in every project, so it must load fast
    from tidebook.runtime.clock import Clock
    from tidebook.testing.clock import ManualClock
    from tidebook.wiring.book import Book
    from tidebook.wiring.sync import SyncBook

async_fixture: Any
try:
    from pytest_asyncio import fixture as async_fixture
except ImportError:  # without pytest-asyncio, only `sync_book` can be used
    async_fixture = None


@pytest.fixture
def manual_clock() -> ManualClock:
    """A clock that only the test advances; the test's book uses it."""
    from tidebook.testing.clock import ManualClock

    return ManualClock()


@pytest.fixture
def tidebook_folder(tmp_path: Path) -> Path:
    """The folder of the test's book, which is created by the first write."""
    return tmp_path / "tidebook"


def _new_book(folder: Path, request: pytest.FixtureRequest) -> Book:
    from tidebook.wiring.book import Book
    from tidebook.wiring.settings import Settings

    clock: Clock | None = request.getfixturevalue("manual_clock") if "manual_clock" in request.fixturenames else None
    return Book(Settings(folder), clock=clock, folder_clock=clock, replicate=True)


async def _open_book(tidebook_folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[Book]:
    """A book in a temporary folder, replicated by the test; `await book.settle()` makes all events visible."""
    async with _new_book(tidebook_folder, request) as opened:
        yield opened


def _explain_missing_plugin() -> Any:
    """A book in a temporary folder; it needs pytest-asyncio."""
    pytest.fail("the fixture 'book' needs pytest-asyncio: install it, or use 'sync_book'", pytrace=False)


book = (
    pytest.fixture(_explain_missing_plugin, name="book")
    if async_fixture is None
    else async_fixture(_open_book, name="book")
)


@pytest.fixture
def sync_book(tidebook_folder: Path, request: pytest.FixtureRequest) -> Iterator[SyncBook]:
    """The same book for tests without an event loop; `sync_book.settle()` makes all events visible."""
    from tidebook.wiring.sync import SyncBook

    with SyncBook(_new_book(tidebook_folder, request)) as opened:
        yield opened

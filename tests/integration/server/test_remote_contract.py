"""A remote book passes the suites of journals and of streams by tag, through a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import tidebook
from tests.integration.server.running import served_book
from tidebook.log.port import Log
from tidebook.store.port import StoreWriter
from tidebook.testing.conformance.journal import BookFactory, JournalContract
from tidebook.testing.conformance.tags import TagsContract
from tidebook.wiring.book import Book
from tidebook.wiring.remote_book import RemoteBook
from tidebook.wiring.settings import Section, Settings


class ReplicatedRemoteBook(RemoteBook):
    """A remote book with the log and the store of the book that is served, by which the suites replicate."""

    def __init__(self, url: str, local: Book) -> None:
        super().__init__(url)
        self._local = local

    @property
    def log(self) -> Log:
        return self._local.log

    @property
    def store(self) -> StoreWriter:
        return self._local.store


def remote_books(folder: Path) -> BookFactory:
    @asynccontextmanager
    async def open_book(**journal: Any) -> AsyncIterator[Book]:
        async with (
            Book(Settings(folder, {"journal": Section(None, dict(journal))})) as local,
            served_book(local) as url,
            ReplicatedRemoteBook(url, local) as book,
        ):
            yield book

    def factory(**journal: Any) -> AbstractAsyncContextManager[Book]:
        return open_book(**journal)

    return factory


class TestRemoteJournal(JournalContract):
    @pytest.fixture
    def book_factory(self, tmp_path: Path) -> BookFactory:
        return remote_books(tmp_path)


class TestRemoteTags(TagsContract):
    @pytest.fixture
    def book_factory(self, tmp_path: Path) -> BookFactory:
        return remote_books(tmp_path)


def test_every_public_name_of_a_book_is_there() -> None:
    assert issubclass(RemoteBook, tidebook.Book)

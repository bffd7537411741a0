"""Run the conformance suite of streams by tag in a folder."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tidebook.testing.conformance.journal_base import BookFactory
from tidebook.testing.conformance.tags import TagsContract
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings


class TestEmbeddedTags(TagsContract):
    @pytest.fixture
    def book_factory(self, tmp_path: Path) -> BookFactory:
        def open_book(**journal: int) -> AbstractAsyncContextManager[Book]:
            return Book(Settings(tmp_path, {"journal": Section(None, dict(journal))}))

        return open_book

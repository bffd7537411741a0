"""Run the journals' conformance suite in a folder, and on a log without a key index or a linearizable end."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tidebook.log.sqlite import SqliteLog
from tidebook.runtime.clock import Clock
from tidebook.runtime.metrics import Metrics
from tidebook.testing.conformance.journal import BookFactory, JournalContract
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings


def books_in(folder: Path) -> BookFactory:
    def open_book(**journal: int) -> AbstractAsyncContextManager[Book]:
        return Book(Settings(folder, {"journal": Section(None, dict(journal))}))

    return open_book


class TestEmbeddedJournal(JournalContract):
    @pytest.fixture
    def book_factory(self, tmp_path: Path) -> BookFactory:
        return books_in(tmp_path)


class TestJournalOverALogLikeKafka(JournalContract):
    @pytest.fixture
    def book_factory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BookFactory:
        async def open_log(settings: Settings, *, clock: Clock, metrics: Metrics) -> SqliteLog:
            return SqliteLog(
                settings.folder, clock=clock, metrics=metrics, indexed_by_key=False, end_is_linearizable=False
            )

        monkeypatch.setattr("tidebook.wiring.book.open_log", open_log)
        return books_in(tmp_path)

"""Run the journals' conformance suite on a real Kafka and a real Cassandra."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tidebook.testing.conformance.journal import BookFactory, JournalContract
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings

pytestmark = [pytest.mark.kafka, pytest.mark.cassandra]


class TestKafkaCassandraJournal(JournalContract):
    @pytest.fixture
    def book_factory(self, tmp_path: Path, kafka_bootstrap: str, cassandra_address: str) -> BookFactory:
        def open_book(**journal: int) -> AbstractAsyncContextManager[Book]:
            sections = {
                "log": Section(f"kafka://{kafka_bootstrap}"),
                "store": Section(f"cassandra://{cassandra_address}/journal_contract"),
                "journal": Section(None, dict(journal)),
            }
            return Book(Settings(tmp_path, sections))

        return open_book

"""Fixtures: books on the real Kafka and Cassandra."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings

OpenBook = Callable[..., Book]


@pytest.fixture
def open_book(tmp_path: Path, kafka_bootstrap: str, cassandra_address: str) -> OpenBook:
    """Return a function that opens another book on the same servers, with options of `[log]` and `[journal]`."""

    def open_book(*, log: dict[str, Any] | None = None, servers: str = kafka_bootstrap, **journal: Any) -> Book:
        sections = {
            "log": Section(f"kafka://{servers}", log or {}),
            "store": Section(f"cassandra://{cassandra_address}/journal_integration"),
            "journal": Section(None, journal),
        }
        return Book(Settings(tmp_path, sections))

    return open_book

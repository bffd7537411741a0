"""Fixtures: an embedded book that blocking tests of the pipeline use through a portal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tidebook
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wiring.book import Book


@pytest.fixture
def portal() -> Iterator[BlockingPortal]:
    portal = BlockingPortal()
    yield portal
    portal.close()


@pytest.fixture
def book(tmp_path: Path, portal: BlockingPortal) -> Iterator[Book]:
    book = tidebook.open(tmp_path / "book")
    portal.run(book.__aenter__())
    yield book
    portal.run(book.__aexit__(None, None, None))

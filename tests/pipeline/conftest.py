"""One Spark session a run, books on temporary folders, and their rows for comparison."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tidebook
from tidebook.core.portal import Portal
from tidebook.pipeline.settings import PipelineSettings
from tidebook.wiring.book import Book

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    from tidebook.pipeline.session import spark_session

    session = spark_session("tidebook tests", PipelineSettings(master="local[2]"))
    yield session
    session.stop()


@pytest.fixture
def portal() -> Iterator[Portal]:
    portal = Portal()
    yield portal
    portal.close()


@pytest.fixture
def book(tmp_path: Path, portal: Portal) -> Iterator[Book]:
    """An embedded book, open on the portal's loop."""
    book = tidebook.open(tmp_path / "book")
    portal.run(book.__aenter__())
    yield book
    portal.run(book.__aexit__(None, None, None))

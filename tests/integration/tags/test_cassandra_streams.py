"""On Cassandra too: whatever the interleaving, lag and crash, the stream is the filter of the journals."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.tags.test_stream_properties import PARTITIONS, World, steps
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings

pytestmark = pytest.mark.cassandra

#: The servers outlive a run: its topics have their own names.
topics = (f"t-{uuid.uuid4().hex[:12]}" for _ in itertools.count())


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, cassandra_address: str) -> Iterator[tuple[asyncio.Runner, Book]]:
    sections = {
        "store": Section(f"cassandra://{cassandra_address}/tag_streams"),
        "journal": Section(None, {"partitions": PARTITIONS, "segment_size": 3}),
    }
    book = Book(Settings(tmp_path_factory.mktemp("book"), sections))
    with asyncio.Runner() as runner:
        runner.run(book.__aenter__())
        yield runner, book
        runner.run(book.__aexit__(None, None, None))


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(history=st.lists(steps, min_size=15, max_size=40))
def test_the_stream_is_the_filter_of_the_journals_on_cassandra(
    opened: tuple[asyncio.Runner, Book], history: list[tuple[Any, ...]]
) -> None:
    runner, book = opened

    async def go() -> None:
        await World(book, next(topics)).play(history)

    runner.run(go())

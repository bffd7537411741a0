"""A projection or process manager that waits for replication reports it: in the log, its status and the health."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

import tidebook
from tests.unit.domain.projecting import replicate_and_tick, sqlite_engine
from tidebook.core.event import Event
from tidebook.tags import horizon
from tidebook.wiring.book import Book


@pytest.fixture(autouse=True)
def _stalls_are_reported_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horizon, "STALL_MS", 50)
    monkeypatch.setattr(horizon, "CHECK_EVERY_MS", 10)


def projection_of(book: Book, folder: Path, topics: list[str] | None, tags: list[str] | None) -> Any:
    return book.projection("seen", topics=topics, tags=tags, into=sqlite_engine(folder))(lambda tx, event: None)


def process_of(book: Book, folder: Path, topics: list[str] | None, tags: list[str] | None) -> Any:
    return book.process("seen", topics=topics, tags=tags)(lambda effects, event: None)


@pytest.mark.parametrize("make", [projection_of, process_of])
@pytest.mark.parametrize(("topics", "tags"), [(["orders"], None), (None, ["paid"])])
async def test_a_projection_that_waits_for_replication_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Any, topics: list[str] | None, tags: list[str] | None
) -> None:
    async with tidebook.open(tmp_path) as book:
        await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
        part = make(book, tmp_path, topics, tags)
        with caplog.at_level(logging.WARNING, "tidebook.tags"):
            async with book.running(part) as running, asyncio.timeout(20):
                while (waiting := part.status().waiting) is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                assert (waiting.lag, waiting.topic, waiting.horizon) == (1, "orders", None)
                assert "replicate=True" in (running.status()[0].problem or "")
                assert not (await book.health()).ok
                await replicate_and_tick(book, "orders")
                while part.status().waiting is not None:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                assert (await book.health()).ok
    assert "projection 'seen' has waited" in caplog.text


async def test_a_feed_that_waits_for_replication_is_unhealthy(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
        async with book.running(book.feed("paid", "mail")) as running, asyncio.timeout(20):
            while "replicate=True" not in (running.status()[0].problem or ""):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert not (await book.health()).ok

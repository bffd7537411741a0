"""An unreachable PostgreSQL is reported soon, in one line."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator

import pytest

from tidebook.core.errors import Unavailable
from tidebook.outbox.postgres import PostgresOutboxDatabase
from tidebook.outbox.settings import OutboxSettings
from tidebook.postgres import connect
from tidebook.queue.postgres.store import PostgresQueues

WITHIN_S = 5.0


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port without a listener."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


@pytest.fixture(params=["closed_port", "silent_port"])
def url(request: pytest.FixtureRequest) -> str:
    return f"postgresql://nobody@localhost:{request.getfixturevalue(request.param)}/none"


def test_the_limits_add_up_to_less_than_five_seconds() -> None:
    assert connect.OPEN_S_MAX < WITHIN_S
    assert connect.CONNECT_S_MAX < WITHIN_S


async def test_a_queue_says_so_in_one_line_and_logs_nothing(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connect, "OPEN_S_MAX", 0.5)
    with caplog.at_level(logging.WARNING), pytest.raises(Unavailable) as caught:
        async with asyncio.timeout(WITHIN_S):
            await PostgresQueues.open(url)
    assert "PostgreSQL" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not caplog.records


def test_an_outbox_says_so_in_one_line(closed_port: int) -> None:
    database = PostgresOutboxDatabase(f"postgresql://nobody@localhost:{closed_port}/none", OutboxSettings())
    with pytest.raises(Unavailable) as caught:
        database.connect()
    assert "\n" not in str(caught.value)
    assert "refused" in str(caught.value)

"""An unreachable PostgreSQL is reported quickly and in one line."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture(params=["closed", "silent", "silent at two addresses"])
def url(request: pytest.FixtureRequest) -> str:
    """A server at `localhost`, which may have two addresses."""
    port = request.getfixturevalue("closed_port" if request.param == "closed" else "silent_port")
    hosts = f"localhost:{port}" + (f",127.0.0.1:{port}" if request.param == "silent at two addresses" else "")
    return f"postgresql://nobody@{hosts}/none"


def test_the_limits_add_up_to_less_than_five_seconds() -> None:
    assert connect.OPEN_S_MAX < WITHIN_S
    assert connect.CONNECT_S_MAX < WITHIN_S


async def test_a_queue_reports_an_unreachable_server_in_one_line_and_logs_nothing(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connect, "OPEN_S_MAX", 0.5)
    with caplog.at_level(logging.WARNING), pytest.raises(Unavailable) as caught:
        async with asyncio.timeout(WITHIN_S):
            await PostgresQueues.open(url)
    assert "PostgreSQL" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not caplog.records


def test_an_outbox_reports_an_unreachable_server_in_one_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "OPEN_S_MAX", 0.5)
    began = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        PostgresOutboxDatabase(url, OutboxSettings()).connect()
    assert time.monotonic() - began < connect.CONNECT_S_MAX - 1  # less than a single address may take
    assert "PostgreSQL" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("command", ["outbox status", "queue status"])
def test_the_command_line_reports_an_unreachable_server_in_one_line(
    tmp_path: Path, silent_port: int, command: str
) -> None:
    file = tmp_path / "tidebook.toml"
    hosts = f"localhost:{silent_port},127.0.0.1:{silent_port}"
    file.write_text(f'folder = "data"\n[sql]\nurl = "postgresql://nobody@{hosts}/none"\n')
    program = [sys.executable, "-m", "tidebook.cli", *command.split(), "--book", str(file)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (5, "")
    assert len(done.stderr.splitlines()) == 1
    assert "no connection within 3.5 s" in done.stderr

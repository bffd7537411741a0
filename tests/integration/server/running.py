"""A real server on a free port, in this process or in a separate one, and a client for it."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import tidebook
from tidebook.server.serve import serve

START_S = 60.0


@asynccontextmanager
async def served(where: Path, **options: Any) -> AsyncIterator[tuple[str, tidebook.Book]]:
    """Serve a book in this process; yield the server's address and the book."""
    async with tidebook.open(where, create=True) as book, served_book(book, where=str(where), **options) as url:
        yield url, book


@asynccontextmanager
async def served_book(book: tidebook.Book, **options: Any) -> AsyncIterator[str]:
    """Serve an open book in this process, and yield the server's address."""
    stop, urls = asyncio.Event(), asyncio.Queue[str]()
    running = asyncio.create_task(
        serve(book, stop, **{"port": 0, "where": str(book.settings.folder), **options}, on_ready=urls.put_nowait)
    )
    try:
        getting = asyncio.create_task(urls.get())
        await asyncio.wait((running, getting), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            getting.cancel()
            await running
        yield await getting
    finally:
        stop.set()
        await running


def client(url: str, token: str | None = None, **options: Any) -> httpx.AsyncClient:
    """Return a client of a server; it loads certificates only for TLS, because that takes a while."""
    options.setdefault("verify", url.startswith("https:"))
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    return httpx.AsyncClient(base_url=url, headers=headers, **{"timeout": 30, **options})


@contextmanager
def served_by_command(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `tidebook serve` in a process; kill it at the end if it is still running."""
    command = [sys.executable, "-m", "tidebook.cli", "serve", "--json", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield json.loads(line)["url"], process
    finally:
        process.kill()
        process.communicate()


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the lines of an NDJSON answer."""
    return [json.loads(line) for line in response.text.splitlines()]


async def live_rows(
    http: httpx.AsyncClient, path: str, fields: dict[str, Any], count: int, *, after: str | None = None
) -> list[tuple[str, str]]:
    """Follow a live view of the console from the row after an id; return the ids and the HTML of `count` rows."""
    headers = {} if after is None else {"last-event-id": after}
    found: list[tuple[str, str]] = []
    async with asyncio.timeout(30), http.stream("GET", path, params=fields, headers=headers) as stream:
        assert stream.status_code == 200, await stream.aread()
        id = ""
        async for line in stream.aiter_lines():
            name, _, value = line.partition(": ")
            id = value if name == "id" else id
            if name == "data":
                found.append((id, value))
            if len(found) == count:
                break
    return found


def not_remote(reason: str) -> Any:
    """Replace a test case of a feature that a remote book does not have, so that it is reported as skipped."""

    @pytest.mark.skip(reason=f"declared: {reason}")
    def test_not_remote(self: object) -> None: ...

    return test_not_remote

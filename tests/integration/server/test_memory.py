"""The memory of the server does not depend on what clients ask for: neither on unknown names nor on large events."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import msgspec

from tests.integration.server.running import client, served
from tidebook import Event
from tidebook.api.routes import BY_NAME, ROUTES
from tidebook.server.console.catalog import PAGES
from tidebook.server.console.page import Page
from tidebook.server.responses import CHUNK_BYTES
from tidebook.wiring.remote_book import RemoteBook

#: Names and the number of a region that are nowhere else.
NAME, REGION = "never-created", 987_654_321
#: How many names a book is asked for that it never uses.
NAMES = 2_000
QUERIES = {"journals.load_snapshot": "", "tags.read": f"?topics={NAME}", "tags.horizon": f"?topics={NAME}"}


FIELDS = dict.fromkeys(("topic", "id", "tag", "queue", "namespace", "job", "act"), NAME) | {"region": REGION}
DELETES = ("topics.delete", "journals.purge", "wal.delete_region")


def paths() -> list[str]:
    """Return a path for each route that reads, and for each page; a live stream does not end."""
    reads = [each for each in ROUTES if each.method == "GET" and each.name != "queues.listen"]
    pages = [f"{each.path}?{urlencode(asked(each))}" for each in PAGES]
    return [*pages, *(each.path.format_map(FIELDS) + QUERIES.get(each.name, "") for each in reads)]


def asked(page: Page) -> dict[str, Any]:
    """Return the parameters of a page that are names."""
    return {each.name: FIELDS[each.name] for each in msgspec.structs.fields(page.query) if each.name in FIELDS}


def is_kept_by(found: Any) -> bool:
    """Return whether an object has one of the names as a key or as an item."""
    if type(found) not in (dict, set):
        return False
    # Objects of other tests' libraries may refuse to be compared.
    keys = [each for each in found if type(each) in (str, int, tuple)]
    return any(each in (NAME, REGION) or (type(each) is tuple and NAME in each) for each in keys)


async def test_names_that_do_not_exist_are_forgotten(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await book.journal("orders").append("o-1", [Event(1)])
        await book.queue("mail").put(1)
        for path in paths():
            assert (await http.get(path)).status_code < 500
        for name in DELETES:
            assert (await http.delete(BY_NAME[name].path.format_map(FIELDS))).status_code < 500
        gc.collect()
        assert [each for each in gc.get_objects() if is_kept_by(each)] == []


async def test_many_names_that_are_not_used_leave_nothing_in_a_book(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, local), RemoteBook(url) as remote:
        for book in (local, remote):
            asked = [
                weakref.ref(part)
                for n in range(NAMES)
                for part in (book.journal(f"topic-{n}"), book.queue(f"queue-{n}"), book.wal(f"namespace-{n}"))
            ]
            gc.collect()
            assert [each for each in asked if each() is not None] == []


async def test_a_remote_book_keeps_what_it_has_used(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, _), RemoteBook(url) as book:
        await book.journal("orders").append("o-1", [Event(1)])
        region = await book.wal("metrics").open_region(7, create=True)
        parts = [id(each) for each in (book.journal("orders"), book.wal("metrics"))]
        gc.collect()
        assert parts == [id(each) for each in (book.journal("orders"), book.wal("metrics"))]
    assert not region.writable


async def test_journals_queues_and_logs_that_exist_are_shared_by_all_requests(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (_, book):
        await book.journal("orders").append("o-1", [Event(1)])
        await book.queue("mail").put(1)
        await book.wal("metrics").open_region(7, create=True)
        parts = [id(each) for each in (book.journal("orders"), book.queue("mail"), book.wal("metrics"))]
        gc.collect()
        assert parts == [id(each) for each in (book.journal("orders"), book.queue("mail"), book.wal("metrics"))]


async def chunk_sizes(url: str, path: str, *, stop_at: int = 2**40) -> list[int]:
    """Return the sizes of the chunks of an answer, up to `stop_at` bytes."""
    where = httpx.URL(url)
    reader, writer = await asyncio.open_connection(where.host, where.port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
    sizes: list[int] = []
    while sum(sizes) < stop_at and (size := int(await reader.readline(), 16)):
        sizes.append(size)
        await reader.readexactly(size + 2)
    writer.close()
    return sizes


async def test_large_events_are_sent_in_small_chunks(tmp_path: Path) -> None:
    payload, count = {"text": "x" * 200_000}, 40
    async with served(tmp_path / "book") as (url, book):
        orders = book.journal("orders")
        await orders.append("o-1", [Event(1) for _ in range(300)])
        for _ in range(count):
            await orders.append("o-1", [Event(payload)])
        region = await book.wal("metrics").open_region(7, create=True)
        for _ in range(count):
            await region.write(1, [payload])
        for path in ("/v1/journals/orders/o-1/events", "/v1/wal/metrics/7/entries"):
            sizes = await chunk_sizes(url, path)
            assert sum(sizes) > 200_000 * count
            assert max(sizes) < CHUNK_BYTES + 300_000
        sizes = await chunk_sizes(url, "/v1/journals/orders/o-1/events?follow=true", stop_at=200_000 * count)
        assert max(sizes) < CHUNK_BYTES + 300_000

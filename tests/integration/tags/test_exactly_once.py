"""A group that counts events in PostgreSQL: members are killed, and each event counts exactly once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest

import tidebook
from tidebook.core.event import Event
from tidebook.replication.ticks import tick
from tidebook.tags.sql_offsets import TABLE, TABLE_MYSQL, SqlOffsets
from tidebook.testing.replicating import replicate

EVENTS = 120
#: Counts events, each in a transaction with its offset, and is killed in the middle of one.
MEMBER = textwrap.dedent(
    """
    import asyncio, os, signal, sys
    import psycopg
    import tidebook
    from tidebook.tags.sql_offsets import SqlOffsets

    async def main(folder, url, group, last):
        offsets = SqlOffsets("paid", group, lambda: psycopg.connect(url), paramstyle="format")
        done = 0
        with psycopg.connect(url) as connection:
            async with tidebook.open(folder) as book:
                async with book.tags.subscribe("paid", group, follow=False, offsets=offsets, lease_s=0.5) as events:
                    async for event in events:
                        if offsets.advance(connection, event):
                            connection.execute(
                                "INSERT INTO tag_seen (who, payload) VALUES (%s, %s)", (group, event.payload)
                            )
                        done += 1
                        if done == int(last):
                            os.kill(os.getpid(), signal.SIGKILL)
                        connection.commit()

    asyncio.run(main(*sys.argv[1:]))
    """
)


async def fill(folder: Path) -> None:
    async with tidebook.open(folder) as book:
        for n in range(EVENTS):
            await book.journal("t").append(f"j-{n % 30}", [Event(n, tags={"paid"})])
        await replicate(book.log, book.store, "t")
        await tick(book.log, book.store, ["t"])
        await replicate(book.log, book.store, "t")


async def finish(folder: Path, connection: psycopg.Connection, offsets: SqlOffsets, group: str) -> None:
    """Start two more members at once, repeatedly, until the leases of the killed members have expired."""

    async def member(book: tidebook.Book) -> None:
        async with book.tags.subscribe("paid", group, follow=False, offsets=offsets, lease_s=0.5) as events:
            async for event in events:
                with connection.transaction():
                    if offsets.advance(connection, event):
                        connection.execute(
                            "INSERT INTO tag_seen (who, payload) VALUES (%s, %s)", (group, event.payload)
                        )

    deadline = time.monotonic() + 60
    async with tidebook.open(folder) as book:
        while len(seen(connection, group)) < EVENTS and time.monotonic() < deadline:
            await asyncio.gather(member(book), member(book))


def seen(connection: psycopg.Connection, group: str) -> list[int]:
    with connection.transaction():
        rows = connection.execute("SELECT payload FROM tag_seen WHERE who = %s", (group,)).fetchall()
    return sorted(payload for (payload,) in rows)


@pytest.mark.postgres
def test_events_are_counted_once_though_members_are_killed_in_mid_transaction(
    tmp_path: Path, postgres_url: str
) -> None:
    asyncio.run(fill(tmp_path))
    group = f"g-{uuid.uuid4().hex}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(TABLE)
        connection.execute("CREATE TABLE IF NOT EXISTS tag_seen (who TEXT, payload INTEGER)")
        offsets = SqlOffsets("paid", group, lambda: psycopg.connect(postgres_url), paramstyle="format")
        counted = 0
        for last in (1, 40):
            argv = [sys.executable, "-c", MEMBER, str(tmp_path), postgres_url, group, str(last)]
            assert subprocess.run(argv, timeout=120, check=False).returncode in (0, -9)
            assert len(seen(connection, group)) >= counted
            counted = len(seen(connection, group))
        assert counted < EVENTS
        asyncio.run(finish(tmp_path, connection, offsets, group))
        assert seen(connection, group) == list(range(EVENTS))


@pytest.mark.mariadb
def test_on_mariadb_tags_that_differ_in_case_alone_have_offsets_of_their_own(tmp_path: Path, mariadb_url: str) -> None:
    asyncio.run(fill(tmp_path))
    url, group = urlsplit(mariadb_url), f"g-{uuid.uuid4().hex}"

    def connect() -> pymysql.Connection[Any]:
        return pymysql.connect(host=url.hostname, port=url.port or 0, user=url.username, database=url.path[1:])

    with tidebook.open_sync(tmp_path) as book, connect() as connection, connection.cursor() as cursor:
        cursor.execute(TABLE_MYSQL)
        event = next(book.tags.read("paid"))
        for name in (group, group.upper()):
            assert SqlOffsets("paid", name, connect, paramstyle="format").advance(connection, event)
            assert not SqlOffsets("paid", name, connect, paramstyle="format").advance(connection, event)
        connection.rollback()

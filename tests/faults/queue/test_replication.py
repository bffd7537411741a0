"""The setting `synchronous` of a queue: nothing is acknowledged before the replicas have it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import pytest_asyncio

import tidebook
from tidebook.queue.port import QueueSettings, Step, Synchronous
from tidebook.queue.queue import Queue
from tidebook.testing.servers import Postgres
from tidebook.testing.servers.standby import PostgresStandby

pytestmark = pytest.mark.postgres
WAITING: list[Synchronous] = ["remote_write", "on", "remote_apply"]


def configure(postgres: Postgres, names: str) -> None:
    """Which standbys a commit waits for."""
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = local")
        connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
        connection.execute("SELECT pg_reload_conf()")


@pytest.fixture
def nobody(own_postgres: Postgres) -> Iterator[Callable[[], None]]:
    """A primary whose standby is down; calling it makes the primary stop waiting for the standby."""
    yield lambda: configure(own_postgres, "")
    configure(own_postgres, "")


@pytest_asyncio.fixture
async def book(settings_file: Path) -> AsyncIterator[tidebook.Book]:
    async with tidebook.open(settings_file) as book:
        yield book


async def leave_alone(postgres: Postgres) -> None:
    """Let commits wait for a standby that is down; return when one waits, since a reload takes its time."""
    configure(postgres, "nobody")
    async with await psycopg.AsyncConnection.connect(postgres.url, autocommit=True) as connection:
        await connection.execute("SET synchronous_commit = on")
        async with asyncio.timeout(30):
            while True:
                commits = "SELECT pg_logical_emit_message(true, 'tidebook', 'a commit')"
                asked = asyncio.ensure_future(connection.execute(commits))
                done, _ = await asyncio.wait([asked], timeout=0.2)
                if not done:
                    connection.cancel()
                    await asked
                    return


async def waiting(postgres: Postgres) -> None:
    """Until a commit waits for a standby."""
    async with await psycopg.AsyncConnection.connect(postgres.url, autocommit=True) as connection:
        async with asyncio.timeout(30):
            while True:
                cursor = await connection.execute("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
                row = await cursor.fetchone()
                if row is not None and row[0]:
                    return
                await asyncio.sleep(0.02)


def calls(queue: Queue, jobs: list[Any]) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Every call that commits."""
    return {
        "put": lambda: queue.put("x"),
        "put_once": lambda: queue.put_once(["x"], source="s", steps=[Step(1, None, "a")]),
        "claim": lambda: queue.claim(1),
        "claim of many": lambda: queue.claim(50),
        "heartbeat": lambda: queue.heartbeat(jobs[0]),
        "done": lambda: queue.done(jobs[0]),
        "done of many": lambda: queue.done(jobs[1:3]),
        "fail": lambda: queue.fail(jobs[3]),
    }


async def test_no_call_of_a_local_queue_waits_for_anybody(
    book: tidebook.Book, own_postgres: Postgres, nobody: Callable[[], None]
) -> None:
    queue = book.queue("local")
    await queue.put_many(list(range(10)))
    await leave_alone(own_postgres)
    jobs = await queue.claim(5)
    for call in calls(queue, jobs).values():
        await asyncio.wait_for(call(), 30)


@pytest.mark.parametrize("level", WAITING)
async def test_every_call_of_a_synchronous_queue_waits_for_the_replicas(
    book: tidebook.Book, own_postgres: Postgres, nobody: Callable[[], None], level: Synchronous
) -> None:
    queue = book.queue(level, settings=QueueSettings(synchronous=level))
    for call in calls(queue, []):
        await queue.put_many(list(range(10)))
        jobs = await queue.claim(5)
        await leave_alone(own_postgres)
        asked = asyncio.ensure_future(calls(queue, jobs)[call]())
        await waiting(own_postgres)
        assert not asked.done(), call
        nobody()
        await asyncio.wait_for(asked, 30)


async def test_a_put_in_the_callers_transaction_makes_its_commit_wait(
    book: tidebook.Book, own_postgres: Postgres, nobody: Callable[[], None]
) -> None:
    queue = await book.queue("strict", settings=QueueSettings(synchronous="remote_apply")).open()
    async with await psycopg.AsyncConnection.connect(own_postgres.url) as connection:
        await connection.execute("SET synchronous_commit = local")
        await connection.commit()
        await leave_alone(own_postgres)
        await queue.put("x", transaction=connection)
        committing = asyncio.ensure_future(connection.commit())
        await waiting(own_postgres)
        assert not committing.done()
        nobody()
        await asyncio.wait_for(committing, 30)


@pytest.mark.timeout(300)
async def test_with_three_servers_a_put_that_was_acknowledged_survives_the_loss_of_the_primary(tmp_path: Path) -> None:
    primary = Postgres(tmp_path / "primary")
    standbys = [PostgresStandby(tmp_path / name, primary, name) for name in ("second", "third")]
    try:
        primary.start()
        primary.stop()
        for standby in standbys:
            standby.prepare()
        primary.start()
        for standby in standbys:
            standby.start()
        configure(primary, "2 (second, third)")
        settings = QueueSettings(synchronous="remote_apply")
        async with tidebook.open(book_on(tmp_path, primary)) as book:
            queue = book.queue("mail", settings=settings)
            await queue.put_many(list(range(100)))
            (done,) = await queue.claim()
            await queue.done(done)
            for standby in standbys:  # visible there at once, since it is applied
                with psycopg.connect(standby.url) as connection:
                    row = connection.execute("SELECT count(*) FROM tidebook_queue.entry").fetchone()
                    assert row == (99,)
        primary.kill9()
        with psycopg.connect(standbys[0].url, autocommit=True) as connection:
            connection.execute("SELECT pg_promote()")
            connection.execute("SET synchronous_commit = local")
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = ''")
            connection.execute("SELECT pg_reload_conf()")
        async with tidebook.open(book_on(tmp_path, standbys[0])) as book:
            jobs = await book.queue("mail").claim(200)
            assert sorted(job.data for job in jobs) == sorted(set(range(100)) - {done.data})
    finally:
        for server in [primary, *standbys]:
            server.kill9()
            server.remove()


def book_on(folder: Path, postgres: Postgres) -> Path:
    file = folder / f"{postgres.folder.name}.toml"
    file.write_text(f'folder = "data"\n[sql]\nurl = "{postgres.url}"\n')
    return file

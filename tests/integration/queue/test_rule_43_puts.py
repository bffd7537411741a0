"""Rule 43: puts merge within a call, never deadlock, and take part in the caller's transaction."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import tidebook
from tidebook import outbox
from tidebook.core.errors import Unavailable
from tidebook.postgres import connect
from tidebook.queue.entry import Entry
from tidebook.queue.port import QueueSettings, Step
from tidebook.queue.postgres import statement_runner
from tidebook.queue.postgres.store import PostgresQueues
from tidebook.testing.conformance.queue_base import QueueTester, entry, new_queue

pytestmark = pytest.mark.postgres


async def test_puts_of_the_same_keys_in_any_order_never_deadlock(tester: QueueTester) -> None:
    keys = [f"k{number}" for number in range(40)]

    async def put(seed: int) -> None:
        order = random.Random(seed).sample(keys, len(keys))
        for _ in range(5):
            await tester.store.put(tester.ref, [entry(key) for key in order], inserted_at=0)

    await asyncio.gather(*(put(seed) for seed in range(8)))
    assert (await tester.store.counts(tester.ref)).due == len(keys)


async def test_entries_with_the_same_key_in_one_call_become_one(book: tidebook.Book) -> None:
    queue = book.queue("mail")
    put = await queue.put_many(
        [Entry(data=1, key="k", priority=50), Entry(data=2, key="k", priority=60), Entry(data=3)]
    )
    jobs = await queue.claim(5)
    assert (put.inserted, put.merged) == (2, 0)
    assert sorted((job.data, job.priority) for job in jobs) == [(2, 50), (3, 100)]


async def test_an_entry_is_committed_with_a_psycopg_transaction(settings_file: Path, postgres_url: str) -> None:
    async with tidebook.open(settings_file) as book:
        queue = book.queue("mail")
        async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
            await queue.put("x", transaction=connection)
            assert await queue.claim() == []
            await connection.commit()
        assert [job.data for job in await queue.claim(5)] == ["x"]


async def test_an_entry_is_committed_with_a_sync_session(settings_file: Path, postgres_url: str) -> None:
    engine = create_engine(postgres_url.replace("postgresql://", "postgresql+psycopg://"))
    async with tidebook.open(settings_file) as book:
        queue = await book.queue("mail").open()
        with Session(engine) as session, session.begin():
            queue.put_in(session, "x", key="k")
            queue.put_in(session, "y", key="k")
        with Session(engine) as session:
            queue.put_in(session, "never")
            session.rollback()
        with engine.begin() as connection:
            queue.put_in(connection, "z")
        assert [job.data for job in await queue.claim(5)] == ["y", "z"]
    engine.dispose()


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_an_entry_is_committed_with_an_async_session(settings_file: Path, postgres_url: str, driver: str) -> None:
    engine = create_async_engine(postgres_url.replace("postgresql://", f"postgresql+{driver}://"))
    async with tidebook.open(settings_file) as book:
        queue = book.queue("mail")
        async with AsyncSession(engine) as session, session.begin():
            await queue.put_many([Entry(data=b"\x00x", key="k%s"), {"n": "%s"}], transaction=session)
            assert await queue.claim() == []
        assert [(job.key, job.data) for job in await queue.claim(5)] == [("k%s", b"\x00x"), (None, {"n": "%s"})]
        async with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            with pytest.raises(tidebook.InvalidInput, match="autocommit"):
                await queue.put("x", transaction=connection)
    await engine.dispose()


async def test_a_session_on_another_database_is_refused(settings_file: Path) -> None:
    engine = create_engine("sqlite://")
    async with tidebook.open(settings_file) as book:
        queue = await book.queue("mail").open()
        with engine.begin() as connection, pytest.raises(tidebook.InvalidInput, match="sqlite on pysqlite"):
            queue.put_in(connection, "x")
    engine.dispose()


async def test_work_and_a_message_are_committed_with_the_callers_own_rows(
    settings_file: Path, postgres_url: str, schema: str
) -> None:
    """The order, its outbox message and its queue entry are committed together or not at all."""
    engine = create_engine(
        postgres_url.replace("postgresql://", "postgresql+psycopg://"),
        connect_args={"options": f"-c search_path={schema}"},
    )
    async with tidebook.open(settings_file) as book:
        queue = await book.queue("mail").open()
        with Session(engine) as session, session.begin():
            session.execute(text("CREATE TABLE orders (id integer)"))
            outbox.create_tables(session)
        for number, kept in ((1, True), (2, False), (3, True)):
            with Session(engine) as session:
                session.execute(text("INSERT INTO orders VALUES (:id)"), {"id": number})
                outbox.publish(session, topic="orders", key=b"k", payload=b"%d" % number)
                queue.put_in(session, number, key=f"o-{number}")
                session.commit() if kept else session.rollback()
        with engine.connect() as connection:
            orders = connection.execute(text("SELECT id FROM orders ORDER BY id")).scalars().all()
            messages = connection.execute(text("SELECT count(*) FROM kafka_messages")).scalar()
        assert orders == [1, 3]
        assert messages == 2
        assert [job.data for job in await queue.claim(5)] == [1, 3]
    engine.dispose()


async def test_a_connection_in_autocommit_is_refused(settings_file: Path, postgres_url: str) -> None:
    async with tidebook.open(settings_file) as book:
        queue = book.queue("mail")
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
            with pytest.raises(tidebook.InvalidInput, match="autocommit"):
                await queue.put("x", transaction=connection)


@pytest.mark.parametrize(
    ("theirs", "ours", "both"),
    [
        ("local", "remote_apply", "remote_apply"),
        ("off", "local", "local"),
        ("on", "local", "on"),
        ("remote_apply", "on", "remote_apply"),
    ],
)
async def test_the_synchronous_level_of_the_callers_transaction_is_raised_and_never_lowered(
    tester: QueueTester, postgres_url: str, theirs: str, ours: Any, both: str
) -> None:
    strict = await tester.store.queue("strict", QueueSettings(synchronous=ours))
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        await connection.execute(f"SET synchronous_commit = {theirs}")
        await tester.store.put_within(connection, strict, [entry("k")], inserted_at=0)  # type: ignore[misc]
        row = await (await connection.execute("SHOW synchronous_commit")).fetchone()
        assert row == (both,)
        await connection.rollback()


async def test_an_embedded_queue_does_not_join_a_transaction(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        with pytest.raises(tidebook.InvalidInput, match="PostgreSQL"):
            await book.queue("mail").put("x", transaction=object())


async def test_puts_that_wait_for_an_open_transaction_leave_a_connection_for_leases(
    tester: QueueTester, postgres_url: str
) -> None:
    await tester.put("other")
    taken = await tester.take()
    async with await psycopg.AsyncConnection.connect(postgres_url) as holder:
        await tester.store.put_within(holder, tester.ref, [entry("k")], inserted_at=0)  # type: ignore[misc]
        waiting = [asyncio.create_task(tester.put("k")) for _ in range(6)]
        await asyncio.wait(waiting, timeout=0.5)
        assert await asyncio.wait_for(tester.beat(taken), 10) == [True]
        assert await asyncio.wait_for(tester.finish(taken), 10) == [True]
        await holder.commit()
    assert sum(put.merged for put in await asyncio.gather(*waiting)) == 6


async def test_a_put_waits_for_a_lock_once(postgres_url: str, schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (connect, statement_runner):
        monkeypatch.setattr(module, "LOCK_MS_MAX", 500, raising=False)
    store = await PostgresQueues.open(postgres_url, schema=schema)
    tester = QueueTester(store, await new_queue(store))
    async with await psycopg.AsyncConnection.connect(postgres_url) as holder:
        await store.put_within(holder, tester.ref, [entry("k")], inserted_at=0)  # type: ignore[misc]
        began = time.monotonic()
        with pytest.raises(Unavailable):
            await tester.put("k")
        assert time.monotonic() - began < 3
    await store.close()


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_errors_in_a_session_are_reported_as_everywhere_else(
    settings_file: Path, postgres_url: str, schema: str, driver: str
) -> None:
    engine = create_async_engine(postgres_url.replace("postgresql://", f"postgresql+{driver}://"))
    async with tidebook.open(settings_file) as book:
        queue = await book.queue("mail").open()
        async with AsyncSession(engine) as session:
            await session.execute(text(f"DROP TABLE {schema}.wake"))
            with pytest.raises(Unavailable, match="wake"):
                await queue.put("x", transaction=session)
            await session.rollback()
    await engine.dispose()


async def test_a_sync_queue_puts_in_transactions_and_puts_once(settings_file: Path, postgres_url: str) -> None:
    def work() -> None:
        with tidebook.open_sync(settings_file) as book, psycopg.connect(postgres_url) as connection:
            queue = book.queue("mail")
            assert queue.put_in(connection, "a", key="k").inserted == 1
            assert queue.put_many_in(connection, ["b", "c"]).inserted == 2
            connection.commit()
            assert queue.put_once(["d"], source="s", steps=[Step(0, None, "1")]) is not None
            assert queue.put_once(["d"], source="s", steps=[Step(0, None, "1")]) is None
            assert queue.marks("s") == {0: "1"}
            assert [job.data for job in queue.claim(10)] == ["a", "b", "c", "d"]

    await asyncio.to_thread(work)

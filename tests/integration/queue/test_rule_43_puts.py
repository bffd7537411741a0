"""Rule 43: puts merge within a call, never deadlock, and take part in the caller's transaction."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import tidebook
from tidebook import outbox
from tidebook.queue.entry import Entry
from tidebook.testing.conformance.queue_base import Desk, entry

pytestmark = pytest.mark.postgres


async def test_puts_of_the_same_keys_in_any_order_never_deadlock(desk: Desk) -> None:
    keys = [f"k{number}" for number in range(40)]

    async def put(seed: int) -> None:
        order = random.Random(seed).sample(keys, len(keys))
        for _ in range(5):
            await desk.store.put(desk.ref, [entry(key) for key in order], inserted_at=0)

    await asyncio.gather(*(put(seed) for seed in range(8)))
    assert (await desk.store.counts(desk.ref)).due == len(keys)


async def test_equal_keys_within_a_call_become_one(book: tidebook.Book) -> None:
    queue = book.queue("mail")
    put = await queue.put_many(
        [Entry(data=1, key="k", priority=50), Entry(data=2, key="k", priority=60), Entry(data=3)]
    )
    jobs = await queue.claim(5)
    assert (put.inserted, put.merged) == (2, 0)
    assert sorted((job.data, job.priority) for job in jobs) == [(2, 50), (3, 100)]


async def test_an_entry_is_put_with_what_a_psycopg_transaction_commits(settings_file: Path, postgres_url: str) -> None:
    async with tidebook.open(settings_file) as book:
        queue = book.queue("mail")
        async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
            await queue.put("x", transaction=connection)
            assert await queue.claim() == []
            await connection.commit()
        assert [job.data for job in await queue.claim(5)] == ["x"]


async def test_an_entry_is_put_with_what_a_sync_session_commits(settings_file: Path, postgres_url: str) -> None:
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


async def test_an_entry_is_put_with_what_an_async_session_commits(settings_file: Path, postgres_url: str) -> None:
    engine = create_async_engine(postgres_url.replace("postgresql://", "postgresql+psycopg://"))
    async with tidebook.open(settings_file) as book:
        queue = book.queue("mail")
        async with AsyncSession(engine) as session, session.begin():
            await queue.put("x", transaction=session)
            assert await queue.claim() == []
        assert [job.data for job in await queue.claim(5)] == ["x"]
    await engine.dispose()


async def test_work_and_a_message_are_committed_with_the_callers_own_rows(
    settings_file: Path, postgres_url: str, schema: str
) -> None:
    """The order's row, the message to the broker and the work on it: all three, or none."""
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


async def test_a_waiting_synchronous_level_is_raised_in_the_callers_transaction(desk: Desk, postgres_url: str) -> None:
    from tidebook.sql.port.queue import QueueSettings

    strict = await desk.store.queue("strict", QueueSettings(synchronous="remote_apply"))
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        await connection.execute("SET synchronous_commit = local")
        await desk.store.put_within(connection, strict, [entry("k")], inserted_at=0)  # type: ignore[misc]
        row = await (await connection.execute("SHOW synchronous_commit")).fetchone()
        assert row == ("remote_apply",)
        await connection.rollback()


async def test_a_folder_takes_no_part_in_a_transaction(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        with pytest.raises(tidebook.InvalidInput, match="PostgreSQL"):
            await book.queue("mail").put("x", transaction=object())

"""A paused queue returns no entry to any process; resuming wakes the workers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psycopg
import pytest

import tidebook
from tests.integration.queue.patience import until
from tidebook.core.errors import NotFound
from tidebook.queue.job import Job
from tidebook.queue.postgres.store import PostgresQueues
from tidebook.queue.waker import SLOW_POLL_S
from tidebook.queue.worker import Worker
from tidebook.testing.conformance.queue_base import QueueTester

pytestmark = pytest.mark.postgres


async def test_a_worker_gets_nothing_while_its_queue_is_paused_by_another_process(where: Path) -> None:
    seen: list[object] = []
    processed = asyncio.Event()

    def handle(job: Job) -> None:
        seen.append(job.data)
        processed.set()

    async with tidebook.open(where) as working, tidebook.open(where) as operating:
        queue, operator = working.queue("mail"), operating.queue("mail")
        await queue.open()
        await operator.pause()
        worker = Worker(queue, lambda job: loop.call_soon_threadsafe(handle, job))
        loop = asyncio.get_running_loop()
        running = asyncio.create_task(worker.run())
        await operator.put("a")
        await queue.put("b")
        assert await queue.claim() == []
        assert (await operator.status()).paused_at is not None
        assert (await operator.status()).due == 2
        await operator.resume()
        await asyncio.wait_for(processed.wait(), 60)
        await until(lambda: len(seen) == 2)
        assert (await queue.status()).paused_at is None
        worker.stop()
        await asyncio.wait_for(running, 60)


async def test_a_pause_outlives_the_book(where: Path) -> None:
    async with tidebook.open(where) as book:
        await book.queue("mail").put("a")
        await book.queue("mail").pause()
    async with tidebook.open(where) as book:
        assert await book.queue("mail").claim() == []
        await book.queue("mail").resume()
        assert [job.data for job in await book.queue("mail").claim()] == ["a"]


async def test_a_queue_that_does_not_exist_is_neither_paused_nor_created(book: tidebook.Book) -> None:
    for act in (book.queue("none").pause, book.queue("none").resume):
        with pytest.raises(NotFound, match="there is no queue 'none'"):
            await act()
    assert await book.queues.names() == []


async def test_a_listener_of_a_paused_queue_is_not_notified_until_it_is_resumed(book: tidebook.Book) -> None:
    queue = book.queue("mail")
    await queue.put("a")
    await queue.pause()
    listening = asyncio.ensure_future(anext(queue.listen()))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(listening), 0.3)
    await queue.resume()
    await asyncio.wait_for(listening, SLOW_POLL_S + 60)


async def test_a_pause_on_postgres_waits_for_a_concurrent_claim(
    tester: QueueTester, store: PostgresQueues, postgres_url: str, schema: str
) -> None:
    await tester.put("a")
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        arguments = "%s, 1, '{1}', ARRAY[gen_random_uuid()], 60000, 5::smallint, true, true"
        claim = f"SELECT id FROM {schema}.entry_claim({arguments})"
        cursor = await connection.execute(claim, (tester.ref.id,))
        assert len(await cursor.fetchall()) == 1
        pausing = asyncio.create_task(store.pause(tester.ref))
        done, _ = await asyncio.wait([pausing], timeout=0.3)
        assert not done
        await connection.commit()
    await asyncio.wait_for(pausing, 60)
    assert await tester.claim() == []

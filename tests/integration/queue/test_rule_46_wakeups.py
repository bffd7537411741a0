"""Rule 46: listeners wake exactly when work becomes due, and puts notify only processes that would sleep past it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest

import tidebook
from tests.integration.queue.patience import until
from tidebook.queue.port import NEVER_MS
from tidebook.queue.queue import Queue
from tidebook.testing.conformance.queue_base import QueueTester

pytestmark = pytest.mark.postgres
CASE_TIMEOUT_S = 30


class NotificationRecorder:
    """Records every notification of a schema."""

    def __init__(self, connection: psycopg.AsyncConnection) -> None:
        self._connection = connection

    async def notifications(self) -> list[str]:
        """Return all notifications so far, up to a marker that this call sends."""
        channel = "tidebook_test_end"
        await self._connection.execute(f"LISTEN {channel}")
        async with await psycopg.AsyncConnection.connect(self._connection.info.dsn, autocommit=True) as other:
            await other.execute(f"NOTIFY {channel}")
        found = []
        async for notification in self._connection.notifies(timeout=CASE_TIMEOUT_S):
            if notification.channel == channel:
                break
            found.append(notification.payload)
        return found


@asynccontextmanager
async def recorded_notifications(url: str, schema: str) -> AsyncIterator[NotificationRecorder]:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute(f'LISTEN "{schema}"')
        yield NotificationRecorder(connection)


async def test_a_put_sends_no_notification_while_no_process_sleeps(
    tester: QueueTester, postgres_url: str, schema: str
) -> None:
    async with recorded_notifications(postgres_url, schema) as recorder:
        await tester.put("k")
        assert await recorder.notifications() == []


async def test_a_put_notifies_only_if_a_process_sleeps_past_its_date(
    tester: QueueTester, postgres_url: str, schema: str
) -> None:
    soon = int(time.time() * 1000) + 100_000
    await tester.store.sleep(b"s" * 16, {tester.ref.id: (soon, False)})
    async with recorded_notifications(postgres_url, schema) as recorder:
        await tester.put("later", process_at=soon + 1)
        assert await recorder.notifications() == []
        await tester.put("sooner", process_at=soon - 1)
        assert await recorder.notifications() == [f"{tester.ref.id} {soon - 1}"]
        await tester.store.awake(b"s" * 16, [tester.ref.id])
        await tester.put("now")
        assert await recorder.notifications() == []


async def test_done_notifies_a_process_that_waits_for_a_held_key(
    tester: QueueTester, postgres_url: str, schema: str
) -> None:
    await tester.put("k")
    taken = await tester.take()
    await tester.store.sleep(b"s" * 16, {tester.ref.id: (NEVER_MS, True)})
    async with recorded_notifications(postgres_url, schema) as recorder:
        await tester.finish(taken)
        assert await recorder.notifications() == [f"{tester.ref.id}"]


async def next_job(queue: Queue) -> tuple[object, float]:
    """Listen until a job is claimed; return its data and the time."""
    async with aclosing(queue.listen()) as dues:
        async for _ in dues:
            if jobs := await queue.claim():
                woken = time.time()
                await queue.done(jobs)
                return jobs[0].data, woken
    raise AssertionError("listening never ends")


async def settled(book: tidebook.Book) -> None:
    """Wait until the listener has polled, found nothing, and published its sleep."""
    await until(lambda: book.metrics.counted("queue_due_date_reads") >= 3)


async def test_a_put_elsewhere_wakes_a_listener(where: Path) -> None:
    async with tidebook.open(where) as here, tidebook.open(where) as there:
        waiting = asyncio.create_task(next_job(here.queue("mail")))
        await settled(here)
        put_at = time.time()
        await there.queue("mail").put("x")
        data, woken = await asyncio.wait_for(waiting, CASE_TIMEOUT_S)
        assert data == "x"
        assert woken - put_at < 4.5, "only the slow poll found it"


async def test_a_foreign_notification_does_not_disable_a_listener(
    settings_file: Path, postgres_url: str, schema: str
) -> None:
    async with tidebook.open(settings_file) as here, tidebook.open(settings_file) as there:
        await there.queue("mail").open()
        waiting = asyncio.create_task(next_job(here.queue("mail")))
        await settled(here)
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
            for payload in ("x", "", "1 2 3", "-1", "1 " + "9" * 400):
                await connection.execute("SELECT pg_notify(%s, %s)", (schema, payload))
        put_at = time.time()
        await there.queue("mail").put("x")
        _, woken = await asyncio.wait_for(waiting, CASE_TIMEOUT_S)
        assert woken - put_at < 2.5, "only the slow poll found it"


async def test_a_listener_wakes_at_the_process_date_of_a_put_elsewhere(where: Path) -> None:
    async with tidebook.open(where) as here, tidebook.open(where) as there:
        waiting = asyncio.create_task(next_job(here.queue("mail")))
        await settled(here)
        at = datetime.now(UTC) + timedelta(milliseconds=700)
        await there.queue("mail").put("x", process_at=at)
        _, woken = await asyncio.wait_for(waiting, CASE_TIMEOUT_S)
        assert at.timestamp() - 0.01 <= woken < at.timestamp() + 2.5


async def test_a_listener_wakes_at_the_end_of_a_lease(book: tidebook.Book) -> None:
    queue = book.queue("mail")
    await queue.put("x")
    await queue.claim(lease=0.5)
    claimed_at = time.time()
    data, woken = await asyncio.wait_for(next_job(queue), CASE_TIMEOUT_S)
    assert data == "x"
    assert 0.4 < woken - claimed_at < 4.5


async def test_a_listener_wakes_when_a_held_key_is_released(where: Path) -> None:
    async with tidebook.open(where) as here, tidebook.open(where) as there:
        await there.queue("mail").put("first", key="k")
        (job,) = await there.queue("mail").claim()
        await there.queue("mail").put("second", key="k")
        waiting = asyncio.create_task(next_job(here.queue("mail")))
        await settled(here)
        await there.queue("mail").done(job)
        assert (await asyncio.wait_for(waiting, CASE_TIMEOUT_S))[0] == "second"


async def test_an_idle_listener_rarely_polls(book: tidebook.Book) -> None:
    waiting = asyncio.create_task(next_job(book.queue("mail")))
    await settled(book)
    before = book.metrics.counted("queue_due_date_reads")
    done, _ = await asyncio.wait([waiting], timeout=3)
    assert not done
    assert book.metrics.counted("queue_due_date_reads") - before <= 2
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def listen_once(queue: Queue) -> int:
    async with aclosing(queue.listen()) as dues:
        await anext(dues)
    return 1


async def test_thousands_of_listeners_share_one_connection(settings_file: Path, postgres_url: str, schema: str) -> None:
    async with tidebook.open(settings_file) as book:
        queue = await book.queue("mail").open()
        listeners = [asyncio.create_task(listen_once(queue)) for _ in range(3_000)]
        await settled(book)
        await queue.put("x")
        woken = await asyncio.wait_for(asyncio.gather(*listeners), CASE_TIMEOUT_S)
        assert sum(woken) == 3_000
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
            cursor = await connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tidebook queue listener'"
                " AND query LIKE %s",
                (f"%{schema}%",),
            )
            row = await cursor.fetchone()
        assert row is not None
        assert row[0] <= 1


async def test_thousands_of_listeners_in_a_folder_are_notified_of_a_put_elsewhere(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as here, tidebook.open(tmp_path) as there:
        queue = await here.queue("mail").open()
        listeners = [asyncio.create_task(listen_once(queue)) for _ in range(3_000)]
        await settled(here)
        await there.queue("mail").put("x")
        woken = await asyncio.wait_for(asyncio.gather(*listeners), CASE_TIMEOUT_S)
        assert sum(woken) == 3_000


async def test_a_listener_outlives_its_connections(settings_file: Path, postgres_url: str, schema: str) -> None:
    async with tidebook.open(settings_file) as here, tidebook.open(settings_file) as there:
        await there.queue("mail").open()
        waiting = asyncio.create_task(next_job(here.queue("mail")))
        await settled(here)
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name LIKE 'tidebook queue listener' AND query LIKE %s",
                (f"%{schema}%",),
            )
        await there.queue("mail").put("x")
        assert (await asyncio.wait_for(waiting, CASE_TIMEOUT_S))[0] == "x"


async def test_work_that_is_not_claimed_is_not_reported_in_a_loop(book: tidebook.Book) -> None:
    queue = book.queue("mail")
    await queue.put("x")
    reported = 0
    async with aclosing(queue.listen()) as dues:
        try:
            async with asyncio.timeout(2):
                async for _ in dues:
                    reported += 1
        except TimeoutError:
            pass
    assert 1 <= reported <= 6


async def test_a_worker_that_claims_a_part_is_woken_for_the_rest_at_once(book: tidebook.Book) -> None:
    queue = book.queue("mail")
    for number in range(30):
        await queue.put(number)
    taken = []
    began = time.monotonic()
    async with aclosing(queue.listen()) as dues:
        async for _ in dues:
            jobs = await queue.claim(3)
            taken += [job.data for job in jobs]
            await queue.done(jobs)
            if len(taken) == 30:
                break
    assert taken == list(range(30))
    assert time.monotonic() - began < 20


async def test_claimed_work_is_not_reported_again(book: tidebook.Book) -> None:
    queue = book.queue("mail")
    await queue.put("x")
    reported: list[float] = []

    async def receive() -> None:
        async with aclosing(queue.listen()) as dues:
            async for _ in dues:
                reported.append(time.monotonic())

    listening = asyncio.create_task(receive())
    await until(
        lambda: len(reported) == 2
    )  # the second report, because no claim followed the first; a timer for a third is now set
    await queue.done(await queue.claim(10))
    taken_at = time.monotonic()
    await asyncio.sleep(1.0)  # longer than the timer of a third report
    listening.cancel()
    assert [moment for moment in reported if moment > taken_at] == []

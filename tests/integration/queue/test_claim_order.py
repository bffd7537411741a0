"""Claims on PostgreSQL are in order even if entries are committed, finished or expire meanwhile."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

import tidebook
from tidebook.queue.postgres.store import PostgresQueues
from tidebook.testing.conformance.queue_base import QueueTester, entry

postgres = pytest.mark.postgres


async def work_off_one(tester: QueueTester, priority: int = 100) -> None:
    await tester.put(data="before", priority=priority)
    assert await tester.finish(await tester.take()) == [True]
    await tester.store.sweep(tester.ref)


@postgres
async def test_an_entry_that_is_committed_late_is_claimed_in_order(
    tester: QueueTester, store: PostgresQueues, postgres_url: str
) -> None:
    with psycopg.connect(postgres_url) as caller:
        store.put_within(caller, tester.ref, [entry(data="late")], inserted_at=0)
        for _ in range(3):
            await work_off_one(tester)
        await tester.put(data="after")
    assert await tester.names() == ["late", "after"]


@postgres
async def test_an_empty_claim_has_scanned_everything(tester: QueueTester, postgres_url: str, schema: str) -> None:
    await work_off_one(tester)
    await tester.put(data="below")
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        await connection.execute(f"UPDATE {schema}.entry SET process_at = 1 WHERE data = 'below'")
    await tester.put(data="above")
    assert await tester.names() == ["below", "above"]


@postgres
async def test_priorities_between_finished_ones_are_found(tester: QueueTester) -> None:
    for _ in range(2):
        for priority in (50, 100, 150):
            await work_off_one(tester, priority)
    for priority in (200, 160, 150, 120, 100, 50, 10):
        await tester.put(data=f"{priority}", priority=priority)
    assert await tester.names() == ["10", "50", "100", "120", "150", "160"]
    assert await tester.names() == ["200"]


@postgres
async def test_an_expired_entry_that_became_more_urgent_is_claimed_in_order(
    tester: QueueTester, postgres_url: str, schema: str
) -> None:
    await tester.put("k", data="urgent", priority=10)
    await tester.take()
    await tester.put("k", data="merged", priority=100)
    for _ in range(2):
        await work_off_one(tester, 10)
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        await connection.execute(f"UPDATE {schema}.entry SET lease_until = 1 WHERE status = 'P'")
    await tester.put(data="after", priority=10)
    assert await tester.names() == ["merged", "after"]


async def test_some_of_several_concurrent_claims_return_slow_entries(book: tidebook.Book) -> None:
    queue = book.queue("mail")
    for priority in (200, 100, 200):
        await queue.put(f"{priority}", priority=priority)
    claims = await asyncio.gather(*(queue.claim(9) for _ in range(3)))
    assert sorted([job.data for job in claim] for claim in claims) == [[], ["100"], ["200", "200"]]

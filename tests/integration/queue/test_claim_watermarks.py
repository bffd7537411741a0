"""Claims start at their watermark, before which nothing waits, and never miss an entry."""

from __future__ import annotations

import asyncio
import math

import psycopg
import pytest

from tidebook.queue.postgres import claim_watermarks
from tidebook.queue.postgres.store import PostgresQueues
from tidebook.testing.conformance.queue_base import Desk, entry

pytestmark = pytest.mark.postgres
PATIENCE_S = 60


@pytest.fixture(autouse=True)
def read_after_every_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a reading after every claimed entry, and trust it for the whole test."""
    monkeypatch.setattr(claim_watermarks, "CLAIMED_LEAST", 1)
    monkeypatch.setattr(claim_watermarks, "TRUSTED_S_MAX", math.inf)


async def work_off_one(desk: Desk, priority: int = 100) -> None:
    await desk.put(data="before", priority=priority)
    assert await desk.finish(await desk.take()) == [True]
    await desk.store.sweep(desk.ref)


async def find_watermarks(desk: Desk, store: PostgresQueues) -> None:
    """Work until two readings prove the watermarks; an open transaction on the server delays them."""
    async with asyncio.timeout(PATIENCE_S):
        while not store._watermarks.for_claim(desk.ref):
            await work_off_one(desk)


async def put_before_watermark(desk: Desk, url: str, schema: str, name: str) -> None:
    """Store an entry with a date long ago, which no put does."""
    await desk.put(data=name, process_at=None)
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute(f"UPDATE {schema}.entry SET process_at = 1 WHERE data = %s", (name.encode(),))


async def test_a_claim_begins_at_the_watermark(
    desk: Desk, store: PostgresQueues, postgres_url: str, schema: str
) -> None:
    await find_watermarks(desk, store)
    await put_before_watermark(desk, postgres_url, schema, "below")
    await desk.put(data="above")
    assert await desk.names(1) == ["above"]


async def test_an_empty_claim_has_scanned_everything(
    desk: Desk, store: PostgresQueues, postgres_url: str, schema: str
) -> None:
    await find_watermarks(desk, store)
    await put_before_watermark(desk, postgres_url, schema, "below")
    assert await desk.names() == ["below"]


async def test_everything_is_scanned_when_the_watermark_was_trusted_long_enough(
    desk: Desk, store: PostgresQueues, postgres_url: str, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await find_watermarks(desk, store)
    await put_before_watermark(desk, postgres_url, schema, "below")
    await desk.put(data="above")
    monkeypatch.setattr(claim_watermarks, "TRUSTED_S_MAX", 0.0)
    assert await desk.names() == ["below", "above"]


async def test_an_entry_that_is_committed_late_is_claimed_in_order(
    desk: Desk, store: PostgresQueues, postgres_url: str
) -> None:
    with psycopg.connect(postgres_url) as caller:
        store.put_within(caller, desk.ref, [entry(data="late")], inserted_at=0)
        for _ in range(3):
            await work_off_one(desk)
        await desk.put(data="after")
    assert await desk.names() == ["late", "after"]


async def test_an_open_transaction_with_the_newest_id_holds_the_watermark(
    desk: Desk, store: PostgresQueues, postgres_url: str
) -> None:
    """The snapshot's xmax does not include the transaction, because no later one has ended."""
    await desk.put(data="before")
    await desk.finish(await desk.take())
    with psycopg.connect(postgres_url) as caller:
        store.put_within(caller, desk.ref, [entry(data="late")], inserted_at=0)
        await store._watermarks.refresh(desk.ref, store._statements(desk.ref))
        for name in ("first", "second"):
            await desk.put(data=name)
        assert await desk.names(1) == ["first"]
        await store._watermarks.refresh(desk.ref, store._statements(desk.ref))
    assert await desk.names() == ["late", "second"]


async def test_a_claim_from_before_a_watermark_resets_it(
    desk: Desk, store: PostgresQueues, postgres_url: str, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await find_watermarks(desk, store)
    for name in ("below", "beside"):
        await put_before_watermark(desk, postgres_url, schema, name)
    await desk.put(data="above")
    with monkeypatch.context() as patch:
        patch.setattr(claim_watermarks, "TRUSTED_S_MAX", 0.0)
        assert await desk.names(1) == ["below"]
    assert await desk.names() == ["beside", "above"]


async def test_priorities_between_those_with_watermarks_are_found(desk: Desk) -> None:
    for _ in range(2):
        for priority in (50, 100, 150):
            await work_off_one(desk, priority)
    for priority in (200, 160, 150, 120, 100, 50, 10):
        await desk.put(data=f"{priority}", priority=priority)
    assert await desk.names() == ["10", "50", "100", "120", "150", "160"]
    assert await desk.names() == ["200"]


async def test_an_expired_entry_that_became_more_urgent_is_claimed_in_order(
    desk: Desk, postgres_url: str, schema: str
) -> None:
    await desk.put("k", data="urgent", priority=10)
    await desk.take()
    await desk.put("k", data="merged", priority=100)
    for _ in range(2):
        await work_off_one(desk, 10)
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        await connection.execute(f"UPDATE {schema}.entry SET lease_until = 1 WHERE status = 'P'")
    await desk.put(data="after", priority=10)
    assert await desk.names() == ["merged", "after"]

"""Claims begin their look where it is proven that nothing waits below; and nothing that is put is ever missed."""

from __future__ import annotations

import asyncio
import math

import psycopg
import pytest

from tidebook.sql.postgres import queue_floors
from tidebook.sql.postgres.queue import PostgresQueues
from tidebook.testing.conformance.queue_base import Desk, entry

pytestmark = pytest.mark.postgres
PATIENCE_S = 60


@pytest.fixture(autouse=True)
def soon_and_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look after every claimed entry, trusted for as long as the test takes."""
    monkeypatch.setattr(queue_floors, "CLAIMED_LEAST", 1)
    monkeypatch.setattr(queue_floors, "TRUSTED_S_MAX", math.inf)


async def work_off_one(desk: Desk, priority: int = 100) -> None:
    await desk.put(data="before", priority=priority)
    assert await desk.finish(await desk.take()) == [True]
    await desk.store.sweep(desk.ref)


async def find_floors(desk: Desk, store: PostgresQueues) -> None:
    """Two readings find them, unless a transaction that somebody has open on the server lies between."""
    async with asyncio.timeout(PATIENCE_S):
        while not store._floors.of(desk.ref):
            await work_off_one(desk)


async def put_below(desk: Desk, url: str, schema: str, name: str) -> None:
    """What no put does: an entry with a date long ago."""
    await desk.put(data=name, process_at=None)
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute(f"UPDATE {schema}.entry SET process_at = 1 WHERE data = %s", (name.encode(),))


async def test_a_claim_begins_at_the_floor(desk: Desk, store: PostgresQueues, postgres_url: str, schema: str) -> None:
    await find_floors(desk, store)
    await put_below(desk, postgres_url, schema, "below")
    await desk.put(data="above")
    assert await desk.names(1) == ["above"]


async def test_that_nothing_is_due_is_said_only_after_a_look_at_everything(
    desk: Desk, store: PostgresQueues, postgres_url: str, schema: str
) -> None:
    await find_floors(desk, store)
    await put_below(desk, postgres_url, schema, "below")
    assert await desk.names() == ["below"]


async def test_everything_is_looked_at_when_the_floor_was_trusted_long_enough(
    desk: Desk, store: PostgresQueues, postgres_url: str, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await find_floors(desk, store)
    await put_below(desk, postgres_url, schema, "below")
    await desk.put(data="above")
    monkeypatch.setattr(queue_floors, "TRUSTED_S_MAX", 0.0)
    assert await desk.names() == ["below", "above"]


async def test_what_is_committed_late_comes_in_its_order(desk: Desk, store: PostgresQueues, postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as caller:
        store.put_within(caller, desk.ref, [entry(data="late")], inserted_at=0)
        for _ in range(3):
            await work_off_one(desk)
        await desk.put(data="after")
    assert await desk.names() == ["late", "after"]


async def test_an_open_transaction_of_the_newest_number_holds_the_floor(
    desk: Desk, store: PostgresQueues, postgres_url: str
) -> None:
    """A snapshot's upper end does not tell of it: nothing above it has ended."""
    await desk.put(data="before")
    await desk.finish(await desk.take())
    with psycopg.connect(postgres_url) as caller:
        store.put_within(caller, desk.ref, [entry(data="late")], inserted_at=0)
        await store._floors.look(desk.ref, store._of(desk.ref))
        for name in ("first", "second"):
            await desk.put(data=name)
        assert await desk.names(1) == ["first"]
        await store._floors.look(desk.ref, store._of(desk.ref))
    assert await desk.names() == ["late", "second"]


async def test_who_claims_from_below_a_floor_forgets_it(
    desk: Desk, store: PostgresQueues, postgres_url: str, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await find_floors(desk, store)
    for name in ("below", "beside"):
        await put_below(desk, postgres_url, schema, name)
    await desk.put(data="above")
    with monkeypatch.context() as looking:
        looking.setattr(queue_floors, "TRUSTED_S_MAX", 0.0)
        assert await desk.names(1) == ["below"]
    assert await desk.names() == ["beside", "above"]


async def test_priorities_between_those_with_floors_are_found(desk: Desk) -> None:
    for _ in range(2):
        for priority in (50, 100, 150):
            await work_off_one(desk, priority)
    for priority in (200, 160, 150, 120, 100, 50, 10):
        await desk.put(data=f"{priority}", priority=priority)
    assert await desk.names() == ["10", "50", "100", "120", "150", "160"]
    assert await desk.names() == ["200"]


async def test_what_ran_out_and_became_more_urgent_comes_in_its_order(
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

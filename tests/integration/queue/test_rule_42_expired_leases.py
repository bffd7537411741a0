"""Rule 42: an entry with an expired lease is claimed in place, without waiting for open transactions."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from tidebook.queue.postgres.store import PostgresQueues
from tidebook.testing.conformance.queue_base import Desk, entry, new_queue

pytestmark = pytest.mark.postgres
SOON_S = 10


async def put_and_hold(desk: Desk, url: str, key: str, data: str) -> psycopg.AsyncConnection:
    """Put inside a transaction, and keep it open."""
    connection = await psycopg.AsyncConnection.connect(url)
    put = desk.store.put_within(connection, desk.ref, [entry(key, data)], inserted_at=0)
    await put  # type: ignore[misc]
    return connection


async def test_a_claim_does_not_wait_for_an_open_transaction_that_has_put_the_same_key(
    desk: Desk, postgres_url: str
) -> None:
    await desk.put("k", data="old")
    await desk.claim(1, lease_ms=1)
    holder = await put_and_hold(desk, postgres_url, "k", "new")
    again = await asyncio.wait_for(desk.claim(1), SOON_S)
    assert [(taken.name, taken.entry.timeouts) for taken in again] == [("old", 1)]
    await holder.commit()
    await holder.close()
    assert await desk.claim(1) == []
    await desk.finish(*again)
    assert await desk.names() == ["new"]


async def test_fail_does_not_wait_for_an_open_transaction_that_has_put_the_same_key(
    desk: Desk, postgres_url: str
) -> None:
    await desk.put("k", data="old")
    taken = await desk.take()
    holder = await put_and_hold(desk, postgres_url, "k", "new")
    assert await asyncio.wait_for(desk.fail(taken), SOON_S) == "waiting"
    await holder.commit()
    await holder.close()
    merged = await desk.claim(5)
    assert [(each.name, each.entry.timeouts) for each in merged] == [("new", 1)]


async def test_a_worker_that_failed_an_entry_cannot_finish_it(desk: Desk, postgres_url: str) -> None:
    await desk.put("k", data="old")
    taken = await desk.take()
    holder = await put_and_hold(desk, postgres_url, "k", "new")
    await desk.fail(taken)
    assert await desk.finish(taken) == [False]
    await holder.rollback()
    await holder.close()
    again = await desk.take()
    assert (again.name, again.entry.timeouts) == ("old", 1)


async def test_an_expired_lease_merges_only_into_a_sibling_that_nobody_has_locked(
    desk: Desk, postgres_url: str
) -> None:
    await desk.put("k", data="old")
    await desk.claim(1, lease_ms=1)
    await desk.put("k", data="new")
    holder = await put_and_hold(desk, postgres_url, "k", "newest")
    taken = await asyncio.wait_for(desk.take(), SOON_S)
    assert (taken.name, taken.entry.timeouts) == ("old", 1)
    await holder.commit()
    await holder.close()
    await desk.finish(taken)
    assert await desk.names() == ["newest"]


async def test_a_sweep_does_not_wait_for_an_open_transaction(desk: Desk, postgres_url: str) -> None:
    await desk.put("k")
    await desk.claim(1, lease_ms=1)
    holder = await put_and_hold(desk, postgres_url, "k", "new")
    swept = await asyncio.wait_for(desk.store.sweep(desk.ref), SOON_S)
    assert swept.leases_expired == 1
    await holder.rollback()
    await holder.close()


async def test_an_expired_lease_merges_into_the_entry_of_its_key_once_that_is_committed(
    desk: Desk, postgres_url: str
) -> None:
    await desk.put("k", data="old", priority=30)
    await desk.claim(1, lease_ms=1)
    holder = await put_and_hold(desk, postgres_url, "k", "new")
    assert (await desk.store.sweep(desk.ref)).leases_expired == 1
    await holder.commit()
    await holder.close()
    await desk.store.sweep(desk.ref)
    assert (await desk.store.counts(desk.ref)).due == 1
    (taken,) = await desk.claim(5)
    assert (taken.name, taken.entry.timeouts, taken.entry.priority) == ("new", 1, 30)


async def test_a_put_that_is_rolled_back_leaves_an_expired_lease_to_the_next_claim(
    desk: Desk, postgres_url: str
) -> None:
    await desk.put("k", data="old")
    await desk.claim(1, lease_ms=1)
    await desk.store.sweep(desk.ref)
    holder = await put_and_hold(desk, postgres_url, "k", "new")
    assert await asyncio.wait_for(desk.claim(1), SOON_S) == []
    await holder.rollback()
    await holder.close()
    assert await desk.names() == ["old"]


async def test_a_put_that_is_rolled_back_was_never_there(desk: Desk, store: PostgresQueues, postgres_url: str) -> None:
    holder = await put_and_hold(desk, postgres_url, "k", "new")
    assert await desk.claim(1) == []
    await holder.rollback()
    await holder.close()
    assert await desk.claim(1) == []


async def test_an_expired_lease_and_a_waiting_entry_of_its_parallel_key_are_finished_one_by_one(
    store: PostgresQueues, postgres_url: str
) -> None:
    desk = Desk(store, await new_queue(store, parallel_keys=True))
    await desk.put("k", data="old")
    await desk.claim(1, lease_ms=1)
    holder = await put_and_hold(desk, postgres_url, "k", "new")
    await store.sweep(desk.ref)
    await holder.commit()
    await holder.close()
    taken = [*await desk.claim(5), *await desk.claim(5)]
    assert sorted(each.name for each in taken) == ["new", "old"]
    assert [await desk.finish(each) for each in taken] == [[True], [True]]


async def test_expired_leases_of_a_parallel_key_are_finished_one_by_one(store: PostgresQueues) -> None:
    desk = Desk(store, await new_queue(store, parallel_keys=True))
    for data in ("first", "second"):
        await desk.put("k", data=data)
        await desk.claim(1, lease_ms=500)
    await asyncio.sleep(0.6)
    taken = [*await desk.claim(5), *await desk.claim(5)]
    assert [each.name for each in taken] == ["first", "second"]
    assert [await desk.finish(each) for each in taken] == [[True], [True]]

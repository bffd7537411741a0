"""Rule 42: an entry with an expired lease is claimed in place, without waiting for open transactions."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from tidebook.queue.postgres.store import PostgresQueues
from tidebook.testing.conformance.queue_base import QueueTester, entry, new_queue

pytestmark = pytest.mark.postgres
SOON_S = 10


async def put_and_hold(tester: QueueTester, url: str, key: str, data: str) -> psycopg.AsyncConnection:
    """Put inside a transaction, and keep it open."""
    connection = await psycopg.AsyncConnection.connect(url)
    put = tester.store.put_within(connection, tester.ref, [entry(key, data)], inserted_at=0)
    await put  # type: ignore[misc]
    return connection


async def test_a_claim_does_not_wait_for_an_open_transaction_that_has_put_the_same_key(
    tester: QueueTester, postgres_url: str
) -> None:
    await tester.put("k", data="old")
    await tester.claim(1, lease_ms=1)
    holder = await put_and_hold(tester, postgres_url, "k", "new")
    again = await asyncio.wait_for(tester.claim(1), SOON_S)
    assert [(taken.name, taken.entry.timeouts) for taken in again] == [("old", 1)]
    await holder.commit()
    await holder.close()
    assert await tester.claim(1) == []
    await tester.finish(*again)
    assert await tester.names() == ["new"]


async def test_fail_does_not_wait_for_an_open_transaction_that_has_put_the_same_key(
    tester: QueueTester, postgres_url: str
) -> None:
    await tester.put("k", data="old")
    taken = await tester.take()
    holder = await put_and_hold(tester, postgres_url, "k", "new")
    assert await asyncio.wait_for(tester.fail(taken), SOON_S) == "waiting"
    await holder.commit()
    await holder.close()
    merged = await tester.claim(5)
    assert [(each.name, each.entry.timeouts) for each in merged] == [("new", 1)]


async def test_a_worker_that_failed_an_entry_cannot_finish_it(tester: QueueTester, postgres_url: str) -> None:
    await tester.put("k", data="old")
    taken = await tester.take()
    holder = await put_and_hold(tester, postgres_url, "k", "new")
    await tester.fail(taken)
    assert await tester.finish(taken) == [False]
    await holder.rollback()
    await holder.close()
    again = await tester.take()
    assert (again.name, again.entry.timeouts) == ("old", 1)


async def test_an_expired_lease_merges_only_into_an_unlocked_sibling(tester: QueueTester, postgres_url: str) -> None:
    await tester.put("k", data="old")
    await tester.claim(1, lease_ms=1)
    await tester.put("k", data="new")
    holder = await put_and_hold(tester, postgres_url, "k", "newest")
    taken = await asyncio.wait_for(tester.take(), SOON_S)
    assert (taken.name, taken.entry.timeouts) == ("old", 1)
    await holder.commit()
    await holder.close()
    await tester.finish(taken)
    assert await tester.names() == ["newest"]


async def test_a_sweep_does_not_wait_for_an_open_transaction(tester: QueueTester, postgres_url: str) -> None:
    await tester.put("k")
    await tester.claim(1, lease_ms=1)
    holder = await put_and_hold(tester, postgres_url, "k", "new")
    swept = await asyncio.wait_for(tester.store.sweep(tester.ref), SOON_S)
    assert swept.leases_expired == 1
    await holder.rollback()
    await holder.close()


async def test_an_expired_lease_merges_into_a_new_entry_of_its_key_after_the_commit_of_the_put(
    tester: QueueTester, postgres_url: str
) -> None:
    await tester.put("k", data="old", priority=30)
    await tester.claim(1, lease_ms=1)
    holder = await put_and_hold(tester, postgres_url, "k", "new")
    assert (await tester.store.sweep(tester.ref)).leases_expired == 1
    await holder.commit()
    await holder.close()
    await tester.store.sweep(tester.ref)
    assert (await tester.store.counts(tester.ref)).due == 1
    (taken,) = await tester.claim(5)
    assert (taken.name, taken.entry.timeouts, taken.entry.priority) == ("new", 1, 30)


async def test_a_put_that_is_rolled_back_leaves_an_expired_lease_to_the_next_claim(
    tester: QueueTester, postgres_url: str
) -> None:
    await tester.put("k", data="old")
    await tester.claim(1, lease_ms=1)
    await tester.store.sweep(tester.ref)
    holder = await put_and_hold(tester, postgres_url, "k", "new")
    assert await asyncio.wait_for(tester.claim(1), SOON_S) == []
    await holder.rollback()
    await holder.close()
    assert await tester.names() == ["old"]


async def test_a_put_that_is_rolled_back_leaves_no_entry(
    tester: QueueTester, store: PostgresQueues, postgres_url: str
) -> None:
    holder = await put_and_hold(tester, postgres_url, "k", "new")
    assert await tester.claim(1) == []
    await holder.rollback()
    await holder.close()
    assert await tester.claim(1) == []


async def test_an_expired_lease_and_a_waiting_entry_of_its_parallel_key_are_finished_one_by_one(
    store: PostgresQueues, postgres_url: str
) -> None:
    tester = QueueTester(store, await new_queue(store, parallel_keys=True))
    await tester.put("k", data="old")
    await tester.claim(1, lease_ms=1)
    holder = await put_and_hold(tester, postgres_url, "k", "new")
    await store.sweep(tester.ref)
    await holder.commit()
    await holder.close()
    taken = [*await tester.claim(5), *await tester.claim(5)]
    assert sorted(each.name for each in taken) == ["new", "old"]
    assert [await tester.finish(each) for each in taken] == [[True], [True]]


async def test_expired_leases_of_a_parallel_key_are_finished_one_by_one(store: PostgresQueues) -> None:
    tester = QueueTester(store, await new_queue(store, parallel_keys=True))
    for data in ("first", "second"):
        await tester.put("k", data=data)
        await tester.claim(1, lease_ms=500)
    await asyncio.sleep(0.6)
    taken = [*await tester.claim(5), *await tester.claim(5)]
    assert [each.name for each in taken] == ["first", "second"]
    assert [await tester.finish(each) for each in taken] == [[True], [True]]

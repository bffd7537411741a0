"""Rule 45: claims are in order across partitions, which are cleared even under an old snapshot."""

from __future__ import annotations

import asyncio
import time

import psycopg
import pytest

from tidebook.core.errors import Unavailable
from tidebook.queue.port import NEVER_MS, Failure, QueueSettings
from tidebook.queue.postgres.partitions import period_end
from tidebook.queue.postgres.store import PostgresQueues
from tidebook.testing.conformance.queue_base import QueueTester, entry, new_queue

pytestmark = pytest.mark.postgres


async def rotate(tester: QueueTester, url: str, schema: str) -> None:
    """Rotate to a new partition."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute(f"UPDATE {schema}.period SET finished = 1000000")
    await tester.store.sweep(tester.ref)


async def slots(url: str, schema: str) -> dict[int, int]:
    """Return the number of entries in each partition."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        cursor = await connection.execute(f"SELECT slot, count(*) FROM {schema}.entry GROUP BY slot ORDER BY slot")
        return dict(await cursor.fetchall())


async def draining(url: str, schema: str) -> list[int]:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        cursor = await connection.execute(f"SELECT draining FROM {schema}.period WHERE table_name = 'entry'")
        row = await cursor.fetchone()
        assert row is not None
        found: list[int] = row[0]
        return found


async def test_entries_are_put_into_the_partition_of_the_period(
    tester: QueueTester, postgres_url: str, schema: str
) -> None:
    await tester.put("a")
    await rotate(tester, postgres_url, schema)
    await tester.put("b")
    assert sorted((await slots(postgres_url, schema)).values()) == [1, 1]


async def test_claims_are_in_order_across_partitions(tester: QueueTester, postgres_url: str, schema: str) -> None:
    for number, priority in enumerate([30, 10, 20, 10]):
        await tester.put(f"{number}", priority=priority)
        await rotate(tester, postgres_url, schema)
    assert await tester.names() == ["1", "3", "2", "0"]


async def test_one_claim_leases_from_two_partitions_only_what_it_returns(
    tester: QueueTester, postgres_url: str, schema: str
) -> None:
    for number in range(3):
        await tester.put(f"old {number}")
    await rotate(tester, postgres_url, schema)
    for number in range(3):
        await tester.put(f"new {number}")
    assert await tester.names(4) == ["old 0", "old 1", "old 2", "new 0"]
    assert await tester.names(4) == ["new 1", "new 2"]
    assert sum((await slots(postgres_url, schema)).values()) == 6  # each is leased, in a separate row


async def test_a_key_has_one_waiting_entry_across_partitions(
    tester: QueueTester, postgres_url: str, schema: str
) -> None:
    await tester.put("k", data="old", priority=5, inserted_at=1)
    await rotate(tester, postgres_url, schema)
    put = await tester.put("k", data="new", priority=9, inserted_at=2)
    (taken,) = await tester.claim(5)
    found = taken.entry
    assert (put.merged, taken.name, found.priority, found.inserted_at) == (1, "new", 5, 1)


async def test_a_key_processed_in_an_old_partition_is_held_in_the_new_one(
    tester: QueueTester, postgres_url: str, schema: str
) -> None:
    await tester.put("k")
    taken = await tester.take()
    await rotate(tester, postgres_url, schema)
    await tester.put("k", data="new")
    assert await tester.claim(5) == []
    assert await tester.finish(taken) == [True]
    assert await tester.names() == ["new"]


async def test_a_failed_entry_moves_to_the_current_partition(
    tester: QueueTester, postgres_url: str, schema: str
) -> None:
    await tester.put("k")
    taken = await tester.take()
    await rotate(tester, postgres_url, schema)
    assert await tester.fail(taken) == "waiting"
    await tester.store.sweep(tester.ref)
    assert await draining(postgres_url, schema) == []
    assert await tester.names() == ["k"]


async def test_a_failed_entry_does_not_wait_for_a_locked_entry_of_its_key_in_an_old_partition(
    tester: QueueTester, postgres_url: str, schema: str
) -> None:
    await tester.put("k", data="old")
    taken = await tester.take()
    await tester.put("k", data="new")
    await rotate(tester, postgres_url, schema)
    async with await psycopg.AsyncConnection.connect(postgres_url) as holder:
        await holder.execute(f"SELECT FROM {schema}.entry WHERE status = 'W' FOR UPDATE")
        assert await tester.fail(taken) == "waiting"
    assert [(each.name, each.entry.timeouts) for each in await tester.claim(5)] == [("new", 1)]


async def test_stragglers_move_when_the_next_period_ends_and_can_still_be_finished(
    tester: QueueTester, postgres_url: str, schema: str
) -> None:
    await tester.put("held")
    taken = await tester.take()
    await tester.put("waiting", process_at=NEVER_MS // 2)
    for _ in range(3):
        await rotate(tester, postgres_url, schema)
    assert len(await slots(postgres_url, schema)) == 1
    assert await tester.finish(taken) == [True]


@pytest.mark.parametrize("drained", ["truncate", "drop", "reset"])
async def test_a_drained_partition_is_cleared_as_configured(
    store: PostgresQueues, postgres_url: str, schema: str, drained: str
) -> None:
    tester = QueueTester(store, await new_queue(store, drained=drained, own_table=True))
    for number in range(6):
        await tester.put(f"{number}")
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
            await connection.execute(f"UPDATE {schema}.period SET finished = 1000000")
        await store.sweep(tester.ref)
        assert await tester.finish(await tester.take()) == [True]
        await store.sweep(tester.ref)
    assert (await store.counts(tester.ref)).tables == 1


async def test_a_drained_partition_is_cleared_while_an_old_snapshot_is_held(
    tester: QueueTester, postgres_url: str, schema: str
) -> None:
    async with await psycopg.AsyncConnection.connect(postgres_url) as holder:
        await holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        await holder.execute("SELECT txid_current()")
        await tester.store.put(tester.ref, [entry(f"{number}") for number in range(500)], inserted_at=0)
        while taken := await tester.claim(100):
            await tester.finish(*taken)
        await rotate(tester, postgres_url, schema)
        assert await draining(postgres_url, schema) == []
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
            cursor = await connection.execute(f"SELECT pg_relation_size('{schema}.entry_0')")
            assert await cursor.fetchone() == (0,)


async def test_a_partition_that_an_open_transaction_has_read_is_cleared_later(
    tester: QueueTester, postgres_url: str, schema: str
) -> None:
    async with await psycopg.AsyncConnection.connect(postgres_url) as reader:
        await reader.execute(f"SELECT count(*) FROM {schema}.entry")
        await tester.put("k")
        await tester.finish(await tester.take())
        await rotate(tester, postgres_url, schema)
        assert await draining(postgres_url, schema) == [0]
        await asyncio.wait_for(tester.put("still"), 10)
    await tester.store.sweep(tester.ref)
    assert await draining(postgres_url, schema) == []


async def test_a_period_does_not_end_under_an_open_transaction_that_has_put(
    tester: QueueTester, postgres_url: str, schema: str
) -> None:
    async with await psycopg.AsyncConnection.connect(postgres_url) as holder:
        await tester.store.put_within(holder, tester.ref, [entry("k", "1")], inserted_at=0)  # type: ignore[misc]
        await rotate(tester, postgres_url, schema)
        assert await draining(postgres_url, schema) == []
        await holder.commit()
    await tester.store.sweep(tester.ref)
    assert await draining(postgres_url, schema) == [0]
    await tester.put("k", data="2")
    assert await tester.names() == ["2"]


async def test_a_put_on_a_snapshot_from_before_a_rotation_fails_and_is_not_misplaced(
    tester: QueueTester, postgres_url: str, schema: str
) -> None:
    await tester.put("other")
    async with await psycopg.AsyncConnection.connect(postgres_url) as old:
        await old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        await old.execute("SELECT txid_current()")
        await rotate(tester, postgres_url, schema)
        with pytest.raises(Unavailable):
            await tester.store.put_within(old, tester.ref, [entry("k")], inserted_at=0)  # type: ignore[misc]


async def test_a_period_ends_after_the_configured_number_of_finished_entries(
    store: PostgresQueues, postgres_url: str, schema: str
) -> None:
    tester = QueueTester(store, await new_queue(store, finished_max=20))
    await store.put(tester.ref, [entry(f"{number}") for number in range(20)], inserted_at=0)
    await tester.finish(*await tester.claim(20))
    await store.sweep(tester.ref)
    await tester.put("next")
    assert await slots(postgres_url, schema) == {1: 1}


@pytest.mark.parametrize("how", ["failed", "expired", "merged"])
async def test_a_period_ends_by_any_change_that_leaves_old_rows(
    store: PostgresQueues, postgres_url: str, schema: str, how: str
) -> None:
    tester = QueueTester(store, await new_queue(store, finished_max=20))
    expires_at = int(time.time() * 1000) + 50 if how == "expired" else NEVER_MS
    many = [entry(f"{number}", expires_at=expires_at) for number in range(20)]
    await store.put(tester.ref, many, inserted_at=0)
    match how:
        case "failed":
            await store.fail(tester.ref, [Failure(taken.held) for taken in await tester.claim(20)])
        case "expired":
            await asyncio.sleep(0.1)  # until they have expired
        case "merged":
            await store.put(tester.ref, many, inserted_at=0)
    await store.sweep(tester.ref)
    await tester.put("next", priority=1)
    assert (await slots(postgres_url, schema))[1] == 1


async def test_a_period_ends_during_continuous_puts(tester: QueueTester, postgres_url: str, schema: str) -> None:
    over = False

    async def put(key: str) -> None:
        async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
            while not over:
                await tester.store.put_within(connection, tester.ref, [entry(key)], inserted_at=0)  # type: ignore[misc]
                await asyncio.sleep(0.04)  # the transaction stays open for a while
                await connection.commit()

    putting = [asyncio.create_task(put(f"{number}")) for number in range(6)]
    try:
        async with asyncio.timeout(30):
            while not await slots(postgres_url, schema):  # noqa: ASYNC110  there is no event to await
                await asyncio.sleep(0.01)
        for _ in range(15):
            await rotate(tester, postgres_url, schema)
            if await draining(postgres_url, schema):
                break
        assert await draining(postgres_url, schema)
    finally:
        over = True
        await asyncio.gather(*putting)


async def test_a_queue_without_periods_never_rotates(store: PostgresQueues, postgres_url: str, schema: str) -> None:
    ref = await store.queue("for-ever", QueueSettings(period="ever", own_table=True))
    tester = QueueTester(store, ref)
    await tester.put("k")
    await rotate(tester, postgres_url, schema)
    assert (await store.counts(ref)).tables == 1


def test_periods_end_by_the_calendar() -> None:
    at = 1_700_000_000_000  # 2023-11-14T22:13:20Z
    assert period_end("hour", at) == 1_700_002_800_000
    assert period_end("day", at) == 1_700_006_400_000
    assert period_end("month", at) == 1_701_388_800_000
    assert period_end("ever", at) is None

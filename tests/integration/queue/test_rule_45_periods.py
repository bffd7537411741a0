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
from tidebook.testing.conformance.queue_base import Desk, entry, new_queue

pytestmark = pytest.mark.postgres


async def turn(desk: Desk, url: str, schema: str) -> None:
    """Rotate to a new partition."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute(f"UPDATE {schema}.period SET finished = 1000000")
    await desk.store.sweep(desk.ref)


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


async def test_what_is_put_goes_to_the_table_of_the_period(desk: Desk, postgres_url: str, schema: str) -> None:
    await desk.put("a")
    await turn(desk, postgres_url, schema)
    await desk.put("b")
    assert sorted((await slots(postgres_url, schema)).values()) == [1, 1]


async def test_the_order_is_right_across_tables(desk: Desk, postgres_url: str, schema: str) -> None:
    for number, priority in enumerate([30, 10, 20, 10]):
        await desk.put(f"{number}", priority=priority)
        await turn(desk, postgres_url, schema)
    assert await desk.names() == ["1", "3", "2", "0"]


async def test_one_claim_takes_from_two_tables_what_it_hands_out_and_nothing_else(
    desk: Desk, postgres_url: str, schema: str
) -> None:
    for number in range(3):
        await desk.put(f"old {number}")
    await turn(desk, postgres_url, schema)
    for number in range(3):
        await desk.put(f"new {number}")
    assert await desk.names(4) == ["old 0", "old 1", "old 2", "new 0"]
    assert await desk.names(4) == ["new 1", "new 2"]
    assert sum((await slots(postgres_url, schema)).values()) == 6  # each is held, in a separate row


async def test_a_key_waits_once_across_tables(desk: Desk, postgres_url: str, schema: str) -> None:
    await desk.put("k", data="old", priority=5, inserted_at=1)
    await turn(desk, postgres_url, schema)
    put = await desk.put("k", data="new", priority=9, inserted_at=2)
    (taken,) = await desk.claim(5)
    found = taken.entry
    assert (put.merged, taken.name, found.priority, found.inserted_at) == (1, "new", 5, 1)


async def test_a_key_that_is_processed_in_an_old_table_holds_it_in_the_new_one(
    desk: Desk, postgres_url: str, schema: str
) -> None:
    await desk.put("k")
    taken = await desk.take()
    await turn(desk, postgres_url, schema)
    await desk.put("k", data="new")
    assert await desk.claim(5) == []
    assert await desk.finish(taken) == [True]
    assert await desk.names() == ["new"]


async def test_what_failed_goes_to_the_current_table(desk: Desk, postgres_url: str, schema: str) -> None:
    await desk.put("k")
    taken = await desk.take()
    await turn(desk, postgres_url, schema)
    assert await desk.fail(taken) == "waiting"
    await desk.store.sweep(desk.ref)
    assert await draining(postgres_url, schema) == []
    assert await desk.names() == ["k"]


async def test_what_failed_does_not_wait_beside_a_locked_entry_of_its_key_in_an_old_table(
    desk: Desk, postgres_url: str, schema: str
) -> None:
    await desk.put("k", data="old")
    taken = await desk.take()
    await desk.put("k", data="new")
    await turn(desk, postgres_url, schema)
    async with await psycopg.AsyncConnection.connect(postgres_url) as holder:
        await holder.execute(f"SELECT FROM {schema}.entry WHERE status = 'W' FOR UPDATE")
        assert await desk.fail(taken) == "waiting"
    assert [(each.name, each.entry.timeouts) for each in await desk.claim(5)] == [("new", 1)]


async def test_stragglers_move_on_when_the_next_period_ends_and_can_still_be_finished(
    desk: Desk, postgres_url: str, schema: str
) -> None:
    await desk.put("held")
    taken = await desk.take()
    await desk.put("waiting", process_at=NEVER_MS // 2)
    for _ in range(3):
        await turn(desk, postgres_url, schema)
    assert len(await slots(postgres_url, schema)) == 1
    assert await desk.finish(taken) == [True]


@pytest.mark.parametrize("drained", ["truncate", "drop", "reset"])
async def test_a_drained_table_is_cleared_as_configured(
    store: PostgresQueues, postgres_url: str, schema: str, drained: str
) -> None:
    desk = Desk(store, await new_queue(store, drained=drained, own_table=True))
    for number in range(6):
        await desk.put(f"{number}")
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
            await connection.execute(f"UPDATE {schema}.period SET finished = 1000000")
        await store.sweep(desk.ref)
        assert await desk.finish(await desk.take()) == [True]
        await store.sweep(desk.ref)
    assert (await store.counts(desk.ref)).tables == 1


async def test_a_drained_table_is_cleared_while_an_old_snapshot_is_held(
    desk: Desk, postgres_url: str, schema: str
) -> None:
    async with await psycopg.AsyncConnection.connect(postgres_url) as holder:
        await holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        await holder.execute("SELECT txid_current()")
        await desk.store.put(desk.ref, [entry(f"{number}") for number in range(500)], inserted_at=0)
        while taken := await desk.claim(100):
            await desk.finish(*taken)
        await turn(desk, postgres_url, schema)
        assert await draining(postgres_url, schema) == []
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
            cursor = await connection.execute(f"SELECT pg_relation_size('{schema}.entry_0')")
            assert await cursor.fetchone() == (0,)


async def test_a_table_that_an_open_transaction_has_read_is_cleared_later(
    desk: Desk, postgres_url: str, schema: str
) -> None:
    async with await psycopg.AsyncConnection.connect(postgres_url) as reader:
        await reader.execute(f"SELECT count(*) FROM {schema}.entry")
        await desk.put("k")
        await desk.finish(await desk.take())
        await turn(desk, postgres_url, schema)
        assert await draining(postgres_url, schema) == [0]
        await asyncio.wait_for(desk.put("still"), 10)
    await desk.store.sweep(desk.ref)
    assert await draining(postgres_url, schema) == []


async def test_a_period_does_not_end_under_an_open_transaction_that_has_put(
    desk: Desk, postgres_url: str, schema: str
) -> None:
    async with await psycopg.AsyncConnection.connect(postgres_url) as holder:
        await desk.store.put_within(holder, desk.ref, [entry("k", "1")], inserted_at=0)  # type: ignore[misc]
        await turn(desk, postgres_url, schema)
        assert await draining(postgres_url, schema) == []
        await holder.commit()
    await desk.store.sweep(desk.ref)
    assert await draining(postgres_url, schema) == [0]
    await desk.put("k", data="2")
    assert await desk.names() == ["2"]


async def test_a_put_on_a_snapshot_from_before_the_turn_fails_instead_of_going_astray(
    desk: Desk, postgres_url: str, schema: str
) -> None:
    await desk.put("other")
    async with await psycopg.AsyncConnection.connect(postgres_url) as old:
        await old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        await old.execute("SELECT txid_current()")
        await turn(desk, postgres_url, schema)
        with pytest.raises(Unavailable):
            await desk.store.put_within(old, desk.ref, [entry("k")], inserted_at=0)  # type: ignore[misc]


async def test_a_period_ends_after_so_many_finished_entries(
    store: PostgresQueues, postgres_url: str, schema: str
) -> None:
    desk = Desk(store, await new_queue(store, finished_max=20))
    await store.put(desk.ref, [entry(f"{number}") for number in range(20)], inserted_at=0)
    await desk.finish(*await desk.claim(20))
    await store.sweep(desk.ref)
    await desk.put("next")
    assert await slots(postgres_url, schema) == {1: 1}


@pytest.mark.parametrize("how", ["failed", "expired", "merged"])
async def test_a_period_ends_by_whatever_leaves_old_rows(
    store: PostgresQueues, postgres_url: str, schema: str, how: str
) -> None:
    desk = Desk(store, await new_queue(store, finished_max=20))
    expires_at = int(time.time() * 1000) + 50 if how == "expired" else NEVER_MS
    many = [entry(f"{number}", expires_at=expires_at) for number in range(20)]
    await store.put(desk.ref, many, inserted_at=0)
    match how:
        case "failed":
            await store.fail(desk.ref, [Failure(taken.held) for taken in await desk.claim(20)])
        case "expired":
            await asyncio.sleep(0.1)  # until they are
        case "merged":
            await store.put(desk.ref, many, inserted_at=0)
    await store.sweep(desk.ref)
    await desk.put("next", priority=1)
    assert (await slots(postgres_url, schema))[1] == 1


async def test_a_period_ends_while_there_is_always_somebody_who_puts(
    desk: Desk, postgres_url: str, schema: str
) -> None:
    over = False

    async def put(key: str) -> None:
        async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
            while not over:
                await desk.store.put_within(connection, desk.ref, [entry(key)], inserted_at=0)  # type: ignore[misc]
                await asyncio.sleep(0.04)  # the transaction stays open for a while
                await connection.commit()

    putting = [asyncio.create_task(put(f"{number}")) for number in range(6)]
    try:
        async with asyncio.timeout(30):
            while not await slots(postgres_url, schema):  # noqa: ASYNC110  nothing else reports it
                await asyncio.sleep(0.01)
        for _ in range(15):
            await turn(desk, postgres_url, schema)
            if await draining(postgres_url, schema):
                break
        assert await draining(postgres_url, schema)
    finally:
        over = True
        await asyncio.gather(*putting)


async def test_one_table_for_ever_never_turns(store: PostgresQueues, postgres_url: str, schema: str) -> None:
    ref = await store.queue("for-ever", QueueSettings(period="ever", own_table=True))
    desk = Desk(store, ref)
    await desk.put("k")
    await turn(desk, postgres_url, schema)
    assert (await store.counts(ref)).tables == 1


def test_periods_end_by_the_calendar() -> None:
    at = 1_700_000_000_000  # 2023-11-14T22:13:20Z
    assert period_end("hour", at) == 1_700_002_800_000
    assert period_end("day", at) == 1_700_006_400_000
    assert period_end("month", at) == 1_701_388_800_000
    assert period_end("ever", at) is None

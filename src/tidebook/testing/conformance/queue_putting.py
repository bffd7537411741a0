"""Test cases of a queue store: putting and merging."""

from __future__ import annotations

import asyncio

from tidebook.queue.port import NEVER_MS, Put, QueueStore, Step
from tidebook.testing.conformance.queue_base import (
    LEASE_MS,
    START_MS,
    Advance,
    OpenQueues,
    QueueBase,
    QueueTester,
    entry,
    new_queue,
)


class PuttingCases(QueueBase):
    """Test cases of put: an entry waits, and a key has at most one waiting entry."""

    async def test_a_claimed_entry_is_as_it_was_put(self, tester: QueueTester) -> None:
        await tester.put("k", data='"\\ü{}', priority=7, expires_at=START_MS + 99, inserted_at=123)
        taken = await tester.take()
        found = taken.entry
        assert (found.key, taken.name, found.priority, found.timeouts) == ("k", '"\\ü{}', 7, 0)
        assert (found.inserted_at, found.process_at, found.expires_at) == (123, START_MS, START_MS + 99)
        assert (found.started_at, found.lease_until) == (START_MS, START_MS + LEASE_MS)

    async def test_entries_without_a_key_are_never_merged(self, tester: QueueTester) -> None:
        await tester.put(data="a")
        await tester.put(data="a")
        assert await tester.names() == ["a", "a"]

    async def test_a_put_returns_how_many_were_inserted_and_merged(self, tester: QueueTester) -> None:
        first = await tester.put("k")
        second = await tester.store.put(tester.ref, [entry("k"), entry("l")], inserted_at=0)
        assert (first.inserted, first.merged) == (1, 0)
        assert (second.inserted, second.merged) == (1, 1)

    async def test_merging_keeps_the_insertion_date_and_replaces_the_data(self, tester: QueueTester) -> None:
        await tester.put("k", data="old", inserted_at=1)
        await tester.put("k", data="new", inserted_at=2)
        taken = await tester.take()
        assert (taken.entry.inserted_at, taken.name) == (1, "new")

    async def test_merging_keeps_the_smallest_priority(self, tester: QueueTester) -> None:
        await tester.put("k", priority=50)
        await tester.put("k", priority=20)
        await tester.put("k", priority=70)
        assert (await tester.take()).entry.priority == 20

    async def test_merging_keeps_the_largest_process_date(self, tester: QueueTester, advance: Advance) -> None:
        await tester.put("k", process_at=START_MS + 500)
        await tester.put("k", process_at=START_MS + 100)
        await advance(100)
        assert await tester.claim() == []
        await advance(400)
        assert (await tester.take()).entry.process_at == START_MS + 500

    async def test_merging_keeps_the_largest_expiration_date(self, tester: QueueTester) -> None:
        await tester.put("k", expires_at=START_MS + 10)
        await tester.put("k", expires_at=START_MS + 30)
        await tester.put("k", expires_at=START_MS + 20)
        assert (await tester.take()).entry.expires_at == START_MS + 30

    async def test_never_is_the_largest_expiration_date(self, tester: QueueTester) -> None:
        await tester.put("k")
        await tester.put("k", expires_at=START_MS + 30)
        assert (await tester.take()).entry.expires_at == NEVER_MS

    async def test_merging_sets_the_counter_to_0(self, tester: QueueTester) -> None:
        await tester.put("k")
        await tester.fail(await tester.take())
        await tester.put("k")
        assert (await tester.take()).entry.timeouts == 0

    async def test_an_expired_waiting_entry_counts_as_absent(self, tester: QueueTester, advance: Advance) -> None:
        await tester.put("k", data="old", priority=1, expires_at=START_MS + 10, inserted_at=1)
        await advance(10)
        put = await tester.put("k", data="new", priority=60, inserted_at=2)
        taken = await tester.take()
        assert put.merged == 0
        assert (taken.entry.inserted_at, taken.entry.priority, taken.name) == (2, 60, "new")
        assert taken.entry.expires_at == NEVER_MS

    async def test_a_past_process_date_counts_as_now(self, tester: QueueTester) -> None:
        await tester.put("a")
        await tester.put("b", process_at=START_MS - 10_000)
        assert [taken.entry.process_at for taken in await tester.claim(2)] == [START_MS, START_MS]

    async def test_while_a_key_is_processed_a_new_entry_waits_beside_it(self, tester: QueueTester) -> None:
        await tester.put("k", data="first")
        taken = await tester.take()
        put = await tester.put("k", data="second")
        assert put.merged == 0
        assert await tester.claim() == []
        assert await tester.finish(taken) == [True]
        assert await tester.names() == ["second"]

    async def test_entries_that_wait_beside_a_processed_one_are_merged(self, tester: QueueTester) -> None:
        await tester.put("k", data="1")
        taken = await tester.take()
        await tester.put("k", data="2", priority=9)
        put = await tester.put("k", data="3")
        await tester.finish(taken)
        after = await tester.take()
        assert (put.merged, after.name, after.entry.priority) == (1, "3", 9)

    async def test_many_are_put_at_once_and_keep_their_order(self, tester: QueueTester) -> None:
        names = [f"{number:03}" for number in range(500)]
        await tester.store.put(tester.ref, [entry(name) for name in names], inserted_at=0)
        assert await tester.names(500) == names

    async def test_queues_do_not_see_one_another(self, store: QueueStore, tester: QueueTester) -> None:
        other = QueueTester(store, await new_queue(store))
        await tester.put("k", data="here")
        await other.put("k", data="there")
        assert await other.names() == ["there"]
        assert await tester.names() == ["here"]

    async def test_a_queue_with_a_separate_table_behaves_the_same(self, store: QueueStore) -> None:
        tester = QueueTester(store, await new_queue(store, own_table=True))
        await tester.put("k", data="1")
        await tester.put("k", data="2")
        assert await tester.names() == ["2"]

    async def test_an_event_that_a_source_delivers_twice_is_put_once(self, tester: QueueTester) -> None:
        async def put(name: str, *steps: Step, source: str = "s") -> Put | None:
            entries = [entry(None, name)] if name else []
            return await tester.store.put_once(tester.ref, entries, inserted_at=0, source=source, steps=steps)

        assert await put("a", Step(1, None, "p1")) is not None
        assert await put("again", Step(1, None, "p1")) is None
        assert await put("b", Step(1, "p1", "p2"), Step(2, None, "x")) is not None
        assert await put("zombie", Step(1, "p1", "p9"), Step(2, "x", "y")) is None
        assert await put("", Step(2, "x", "y")) is not None
        assert await put("other", Step(1, None, "p1"), source="t") is not None
        assert await tester.store.marks(tester.ref, "s") == {1: "p2", 2: "y"}
        assert await tester.store.marks(tester.ref, "nothing") == {}
        assert await tester.names() == ["a", "b", "other"]

    async def test_only_one_of_many_concurrent_moves_of_a_mark_puts(self, tester: QueueTester) -> None:
        puts = [
            tester.store.put_once(tester.ref, [entry()], inserted_at=0, source="s", steps=[Step(1, None, f"{number}")])
            for number in range(8)
        ]
        results = await asyncio.gather(*puts)
        assert len([put for put in results if put is not None]) == 1
        assert len(await tester.claim(10)) == 1

    async def test_an_entry_put_by_one_store_is_claimed_by_another(
        self, open_queues: OpenQueues, tester: QueueTester
    ) -> None:
        await tester.put("k")
        async with open_queues() as other:
            other_tester = QueueTester(other, await other.queue(tester.ref.name))
            assert other_tester.ref == tester.ref
            assert await other_tester.names() == ["k"]

    async def test_settings_are_kept_with_the_queue(self, open_queues: OpenQueues, store: QueueStore) -> None:
        ref = await new_queue(store, max_timeouts=7, parallel_keys=True)
        async with open_queues() as other:
            assert (await other.queue(ref.name)).settings == ref.settings
            assert ref.name in [queue.name for queue in await other.queues()]

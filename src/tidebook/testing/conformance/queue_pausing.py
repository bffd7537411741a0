"""Test cases of a queue store: a paused queue returns no entry to any process until it is resumed."""

from __future__ import annotations

import asyncio

from tidebook.queue.port import NEVER_MS, QueueStore
from tidebook.testing.conformance.queue_base import START_MS, Advance, OpenQueues, QueueBase, QueueTester, new_queue


class PausingCases(QueueBase):
    """Test cases of `pause` and `resume`."""

    async def test_a_paused_queue_returns_no_entry_and_accepts_puts(
        self, tester: QueueTester, store: QueueStore
    ) -> None:
        other = QueueTester(store, await new_queue(store))
        await tester.put("before")
        assert await store.pause(tester.ref) == START_MS
        await tester.put("after")
        await other.put("elsewhere")
        assert await tester.names() == []
        assert await other.names() == ["elsewhere"]
        assert (await store.counts(tester.ref)).due == 2
        assert await store.resume(tester.ref)
        assert await tester.names() == ["before", "after"]

    async def test_a_pause_applies_to_other_stores_and_after_a_restart(
        self, tester: QueueTester, open_queues: OpenQueues
    ) -> None:
        await tester.put("k")
        async with open_queues() as first:
            await first.pause(tester.ref)
        async with open_queues() as second:
            assert await QueueTester(second, await second.queue(tester.ref.name)).names() == []
            assert (await second.counts(tester.ref)).paused_at == START_MS
        assert await tester.names() == []

    async def test_a_second_pause_keeps_the_date_of_the_first(self, tester: QueueTester, advance: Advance) -> None:
        assert (await tester.store.counts(tester.ref)).paused_at is None
        await tester.store.pause(tester.ref)
        await advance(5)
        assert await tester.store.pause(tester.ref) == START_MS
        assert (await tester.store.counts(tester.ref)).paused_at == START_MS

    async def test_resuming_a_queue_that_is_not_paused_reports_it(self, tester: QueueTester) -> None:
        assert not await tester.store.resume(tester.ref)

    async def test_a_paused_queue_has_nothing_due(self, tester: QueueTester) -> None:
        await tester.put("now")
        await tester.put("soon", process_at=START_MS + 50)
        await tester.store.pause(tester.ref)
        (due,) = await tester.store.due([tester.ref])
        assert (due.paused, due.ready, due.held, due.lease_end, due.upcoming) == (True, False, False, NEVER_MS, ())
        await tester.store.resume(tester.ref)
        (due,) = await tester.store.due([tester.ref])
        assert (due.paused, due.ready, due.upcoming) == (False, True, (START_MS + 50,))

    async def test_held_entries_stay_with_their_workers_while_a_queue_is_paused(self, tester: QueueTester) -> None:
        await tester.put("a")
        await tester.put("b")
        first, second = await tester.claim(2)
        await tester.store.pause(tester.ref)
        assert await tester.beat(first, second) == [True, True]
        assert await tester.finish(first) == [True]
        assert await tester.fail(second) == "waiting"
        assert await tester.names() == []

    async def test_an_entry_of_a_paused_queue_is_not_claimed_after_its_lease_expired(
        self, tester: QueueTester, advance: Advance
    ) -> None:
        await tester.put("a")
        await tester.take()
        await tester.store.pause(tester.ref)
        await advance(60_000)
        await tester.store.sweep(tester.ref)
        assert await tester.names() == []
        await tester.store.resume(tester.ref)
        assert await tester.names() == ["a"]

    async def test_resuming_wakes_a_client_that_waits(self, tester: QueueTester, open_queues: OpenQueues) -> None:
        wakes = tester.store.wakes()
        await asyncio.wait_for(anext(wakes), 10)
        await tester.store.pause(tester.ref)
        await tester.store.sleep(b"s" * 16, {tester.ref.id: (0, False)})
        waiting = asyncio.ensure_future(anext(wakes))
        await asyncio.sleep(0)
        async with open_queues() as other:
            await other.resume(tester.ref)
            woken = await asyncio.wait_for(waiting, 10)
        assert woken.queue == tester.ref.id
        await wakes.aclose()  # type: ignore[attr-defined]

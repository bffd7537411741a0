"""Test cases of a queue store: a paused queue gives no process any entry until it is resumed."""

from __future__ import annotations

import asyncio

from tidebook.queue.port import NEVER_MS, QueueStore
from tidebook.testing.conformance.queue_base import START_MS, Advance, Desk, OpenQueues, QueueBase, new_queue


class PausingCases(QueueBase):
    """Test cases of `pause` and `resume`."""

    async def test_a_paused_queue_gives_out_nothing_and_takes_puts(self, desk: Desk, store: QueueStore) -> None:
        other = Desk(store, await new_queue(store))
        await desk.put("before")
        assert await store.pause(desk.ref) == START_MS
        await desk.put("after")
        await other.put("elsewhere")
        assert await desk.names() == []
        assert await other.names() == ["elsewhere"]
        assert (await store.counts(desk.ref)).due == 2
        assert await store.resume(desk.ref)
        assert await desk.names() == ["before", "after"]

    async def test_a_pause_holds_for_other_stores_and_after_a_restart(
        self, desk: Desk, open_queues: OpenQueues
    ) -> None:
        await desk.put("k")
        async with open_queues() as first:
            await first.pause(desk.ref)
        async with open_queues() as second:
            assert await Desk(second, await second.queue(desk.ref.name)).names() == []
            assert (await second.counts(desk.ref)).paused_at == START_MS
        assert await desk.names() == []

    async def test_a_second_pause_keeps_the_date_of_the_first(self, desk: Desk, advance: Advance) -> None:
        assert (await desk.store.counts(desk.ref)).paused_at is None
        await desk.store.pause(desk.ref)
        await advance(5)
        assert await desk.store.pause(desk.ref) == START_MS
        assert (await desk.store.counts(desk.ref)).paused_at == START_MS

    async def test_resuming_a_queue_that_is_not_paused_reports_it(self, desk: Desk) -> None:
        assert not await desk.store.resume(desk.ref)

    async def test_a_paused_queue_has_nothing_due(self, desk: Desk) -> None:
        await desk.put("now")
        await desk.put("soon", process_at=START_MS + 50)
        await desk.store.pause(desk.ref)
        (due,) = await desk.store.due([desk.ref])
        assert (due.paused, due.ready, due.held, due.lease_end, due.upcoming) == (True, False, False, NEVER_MS, ())
        await desk.store.resume(desk.ref)
        (due,) = await desk.store.due([desk.ref])
        assert (due.paused, due.ready, due.upcoming) == (False, True, (START_MS + 50,))

    async def test_held_entries_stay_with_their_workers_while_a_queue_is_paused(self, desk: Desk) -> None:
        await desk.put("a")
        await desk.put("b")
        first, second = await desk.claim(2)
        await desk.store.pause(desk.ref)
        assert await desk.beat(first, second) == [True, True]
        assert await desk.finish(first) == [True]
        assert await desk.fail(second) == "waiting"
        assert await desk.names() == []

    async def test_an_expired_lease_of_a_paused_queue_is_not_given_out(self, desk: Desk, advance: Advance) -> None:
        await desk.put("a")
        await desk.take()
        await desk.store.pause(desk.ref)
        await advance(60_000)
        await desk.store.sweep(desk.ref)
        assert await desk.names() == []
        await desk.store.resume(desk.ref)
        assert await desk.names() == ["a"]

    async def test_resuming_wakes_a_client_that_waits(self, desk: Desk, open_queues: OpenQueues) -> None:
        wakes = desk.store.wakes()
        await asyncio.wait_for(anext(wakes), 10)
        await desk.store.pause(desk.ref)
        await desk.store.sleep(b"s" * 16, {desk.ref.id: (0, False)})
        waiting = asyncio.ensure_future(anext(wakes))
        await asyncio.sleep(0)
        async with open_queues() as other:
            await other.resume(desk.ref)
            woken = await asyncio.wait_for(waiting, 10)
        assert woken.queue == desk.ref.id
        await wakes.aclose()  # type: ignore[attr-defined]

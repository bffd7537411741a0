"""Test cases of a queue store: which entries a claim returns, and in which order."""

from __future__ import annotations

import asyncio

from tidebook.queue.port import QueueStore
from tidebook.testing.conformance.queue_base import START_MS, Advance, QueueBase, QueueTester, entry, new_queue


class ClaimingCases(QueueBase):
    """Test cases of claims: only due entries, each to one worker, in order."""

    async def test_a_claim_of_an_empty_queue_returns_nothing(self, tester: QueueTester) -> None:
        assert await tester.claim(10) == []

    async def test_the_smallest_priority_comes_first(self, tester: QueueTester) -> None:
        for priority in (180, 0, 50, 10, 20):
            await tester.put(f"{priority}", priority=priority)
        assert await tester.names() == ["0", "10", "20", "50", "180"]

    async def test_within_a_priority_the_earliest_process_date_comes_first(
        self, tester: QueueTester, advance: Advance
    ) -> None:
        for wait_ms in (30, 10, 20):
            await tester.put(f"{wait_ms}", process_at=START_MS + wait_ms)
        await advance(50)
        assert await tester.names() == ["10", "20", "30"]

    async def test_of_entries_with_equal_dates_the_one_put_first_comes_first(self, tester: QueueTester) -> None:
        for name in "zyxw":
            await tester.put(name)
        assert await tester.names() == list("zyxw")

    async def test_the_order_holds_over_several_claims(self, tester: QueueTester) -> None:
        for number in range(6):
            await tester.put(f"{number}", priority=5 - number)
        assert await tester.names(2) + await tester.names(2) + await tester.names(9) == list("543210")

    async def test_nothing_is_claimed_before_its_process_date(self, tester: QueueTester, advance: Advance) -> None:
        await tester.put("k", process_at=START_MS + 100)
        await advance(99)
        assert await tester.claim() == []
        await advance(1)
        assert await tester.names() == ["k"]

    async def test_many_later_entries_do_not_hide_one_that_is_due(self, tester: QueueTester) -> None:
        later = [entry(f"l{number}", priority=10, process_at=START_MS + 1_000_000) for number in range(300)]
        await tester.store.put(tester.ref, later, inserted_at=0)
        await tester.put("due", priority=11)
        assert await tester.names() == ["due"]

    async def test_an_expired_entry_is_not_claimed(self, tester: QueueTester, advance: Advance) -> None:
        await tester.put("k", expires_at=START_MS + 10)
        await advance(10)
        assert await tester.claim() == []

    async def test_slow_entries_wait_until_a_claim_finds_nothing_else(self, tester: QueueTester) -> None:
        await tester.put("slow", priority=200)
        await tester.put("quick", priority=199)
        await tester.put("last", priority=255)
        assert await tester.names() == ["quick"]
        assert await tester.names() == ["slow", "last"]

    async def test_a_claim_returns_at_most_its_limit(self, tester: QueueTester) -> None:
        await tester.store.put(tester.ref, [entry(f"{number}") for number in range(10)], inserted_at=0)
        assert len(await tester.claim(3)) == 3

    async def test_an_entry_is_claimed_once(self, tester: QueueTester) -> None:
        await tester.put("k")
        assert len(await tester.claim(5)) == 1
        assert await tester.claim(5) == []

    async def test_concurrent_claims_share_the_work_without_overlap(self, tester: QueueTester) -> None:
        await tester.store.put(tester.ref, [entry(f"{number}") for number in range(200)], inserted_at=0)
        taken: list[str] = []
        while batch := await asyncio.gather(*(tester.names(7) for _ in range(6))):
            if not any(batch):
                break
            taken += [name for names in batch for name in names]
        assert sorted(taken) == sorted(f"{number}" for number in range(200))

    async def test_a_key_in_progress_does_not_block_others(self, tester: QueueTester) -> None:
        await tester.put("k")
        await tester.take()
        await tester.put("k", priority=1)
        await tester.put("other", priority=2)
        assert await tester.names() == ["other"]

    async def test_a_setting_allows_entries_of_a_key_side_by_side(self, store: QueueStore) -> None:
        tester = QueueTester(store, await new_queue(store, parallel_keys=True))
        await tester.put("k", data="1")
        first = await tester.take()
        await tester.put("k", data="2")
        second = await tester.take()
        assert [first.name, second.name] == ["1", "2"]
        assert await tester.finish(second) == [True]
        assert await tester.finish(first) == [True]

"""Test cases of a queue store: leases, heartbeats, done and fail, each fenced by a token."""

from __future__ import annotations

import asyncio

import pytest

from tidebook.queue.port import QueueStore
from tidebook.testing.conformance.queue_base import (
    LEASE_MS,
    START_MS,
    Advance,
    QueueBase,
    QueueTester,
    Taken,
    new_queue,
)


async def let_lease_expire(tester: QueueTester, advance: Advance) -> Taken:
    """Let a lease expire, and claim the entry again."""
    await advance(LEASE_MS)
    return await tester.take()


class LeaseCases(QueueBase):
    """Test cases of leases: a worker that lost its lease cannot change the entry."""

    async def test_a_finished_entry_is_removed(self, tester: QueueTester, advance: Advance) -> None:
        await tester.put("k")
        assert await tester.finish(await tester.take()) == [True]
        await advance(LEASE_MS)
        assert await tester.claim() == []

    async def test_a_second_done_reports_a_lost_lease(self, tester: QueueTester) -> None:
        await tester.put("k")
        taken = await tester.take()
        await tester.finish(taken)
        assert await tester.finish(taken) == [False]

    async def test_many_are_done_at_once_by_different_holders(self, tester: QueueTester) -> None:
        for name in "abc":
            await tester.put(name)
        taken = [await tester.take(), await tester.take(), await tester.take()]
        assert await tester.finish(*taken) == [True, True, True]

    async def test_some_of_a_claim_are_done_with_and_without_a_key_and_the_rest_stays(
        self, tester: QueueTester, advance: Advance
    ) -> None:
        for key, name in ((None, "a"), (None, "b"), ("k", "keyed"), ("m", "other")):
            await tester.put(key, data=name)
        taken = {each.name: each for each in await tester.claim(20)}
        assert await tester.finish(taken["a"], taken["keyed"]) == [True, True]
        assert await tester.beat(taken["b"], taken["other"]) == [True, True]
        assert await tester.finish(taken["b"]) == [True]
        await advance(LEASE_MS)
        assert await tester.names() == ["other"]

    async def test_a_token_is_valid_for_its_own_entry_only(self, tester: QueueTester, advance: Advance) -> None:
        await tester.put("a")
        lost = await tester.take()
        await advance(LEASE_MS)
        await tester.put("b")
        newer = await tester.claim(2)
        assert sorted(taken.name for taken in newer) == ["a", "b"]
        b = next(taken for taken in newer if taken.name == "b")
        assert await tester.finish(lost, b) == [False, True]
        assert (await tester.store.counts(tester.ref)).processing == 1

    async def test_a_lost_and_a_held_lease_are_distinguished_in_one_call(
        self, tester: QueueTester, advance: Advance
    ) -> None:
        await tester.put("k")
        lost = await tester.take()
        holder = await let_lease_expire(tester, advance)
        results = tuple(await asyncio.gather(tester.finish(lost), tester.finish(holder), tester.finish(lost)))
        assert results == ([False], [True], [False])

    async def test_an_expired_lease_is_claimed_again_and_counted(self, tester: QueueTester, advance: Advance) -> None:
        await tester.put("k")
        await tester.take()
        await advance(LEASE_MS - 1)
        assert await tester.claim() == []
        await advance(1)
        again = await tester.take()
        assert (again.name, again.entry.timeouts) == ("k", 1)

    async def test_a_worker_that_lost_its_lease_cannot_finish_heartbeat_or_fail(
        self, tester: QueueTester, advance: Advance
    ) -> None:
        await tester.put("k")
        lost = await tester.take()
        holder = await let_lease_expire(tester, advance)
        assert await tester.finish(lost) == [False]
        assert await tester.beat(lost) == [False]
        assert await tester.fail(lost) == "lost"
        assert await tester.finish(holder) == [True]

    async def test_a_late_done_is_accepted_if_no_other_worker_has_claimed_the_entry(
        self, tester: QueueTester, advance: Advance
    ) -> None:
        await tester.put("k")
        taken = await tester.take()
        await advance(LEASE_MS * 2)
        await tester.store.sweep(tester.ref)
        assert await tester.finish(taken) == [True]

    async def test_a_late_heartbeat_is_accepted_if_no_other_worker_has_claimed_it(
        self, tester: QueueTester, advance: Advance
    ) -> None:
        await tester.put("k")
        taken = await tester.take()
        await advance(LEASE_MS * 2)
        await tester.store.sweep(tester.ref)
        assert await tester.beat(taken) == [True]
        assert await tester.claim() == []
        assert await tester.finish(taken) == [True]

    async def test_a_heartbeat_extends_the_lease(self, tester: QueueTester, advance: Advance) -> None:
        await tester.put("k")
        taken = await tester.take()
        await advance(LEASE_MS - 1)
        assert await tester.beat(taken) == [True]
        await advance(LEASE_MS - 1)
        assert await tester.claim() == []
        await advance(1)
        assert await tester.names() == ["k"]

    async def test_an_entry_with_an_expired_lease_keeps_its_place_in_the_order(
        self, tester: QueueTester, advance: Advance
    ) -> None:
        await tester.put("first", priority=10)
        await tester.take()
        await tester.put("later", priority=11)
        await tester.put("soon", priority=9)
        await advance(LEASE_MS)
        assert await tester.names() == ["soon", "first", "later"]

    async def test_an_expired_entry_whose_lease_expired_is_not_claimed_again(
        self, tester: QueueTester, advance: Advance
    ) -> None:
        await tester.put("k", expires_at=START_MS + 5)
        await tester.take()
        await advance(LEASE_MS)
        assert await tester.claim() == []

    async def test_an_entry_past_the_maximum_of_timeouts_becomes_a_dead_letter(
        self, tester: QueueTester, advance: Advance
    ) -> None:
        await tester.put("k", data="poison")
        await tester.take()
        assert (await let_lease_expire(tester, advance)).entry.timeouts == 1
        assert (await let_lease_expire(tester, advance)).entry.timeouts == 2
        await advance(LEASE_MS)
        assert await tester.claim() == []
        (letter,) = await tester.store.dead_letters(tester.ref)
        assert (letter.key, letter.timeouts, letter.data) == ("k", 3, b"poison")

    async def test_an_expired_lease_with_a_sibling_merges_into_it_and_keeps_the_counter(
        self, tester: QueueTester, advance: Advance
    ) -> None:
        await tester.put("k", data="old", priority=30, inserted_at=1)
        await tester.take()
        await tester.put("k", data="new", priority=40, inserted_at=2)
        taken = await let_lease_expire(tester, advance)
        found = taken.entry
        assert (taken.name, found.timeouts, found.priority, found.inserted_at) == ("new", 1, 30, 1)
        assert await tester.claim() == []

    async def test_an_expired_lease_with_a_later_sibling_waits_for_its_date(
        self, tester: QueueTester, advance: Advance
    ) -> None:
        await tester.put("k", data="old")
        await tester.take()
        await tester.put("k", data="new", process_at=START_MS + LEASE_MS + 500)
        await advance(LEASE_MS)
        assert await tester.claim() == []
        await advance(500)
        assert await tester.names() == ["new"]

    async def test_a_put_after_a_lease_expiry_was_found_is_merged_into_that_entry(
        self, tester: QueueTester, advance: Advance
    ) -> None:
        await tester.put("k", data="old", priority=30, inserted_at=1)
        late = await tester.take()
        await advance(LEASE_MS)
        await tester.store.sweep(tester.ref)
        put = await tester.put("k", data="new", priority=40, inserted_at=2)
        assert (put.inserted, put.merged) == (0, 1)
        counts = await tester.store.counts(tester.ref)
        assert (counts.due, counts.processing) == (1, 0)
        assert await tester.finish(late) == [False]
        taken = await tester.take()
        found = taken.entry
        assert (taken.name, found.timeouts, found.priority, found.inserted_at) == ("new", 0, 30, 1)
        assert await tester.claim() == []

    async def test_a_put_after_an_expired_lease_replaces_an_expired_entry(
        self, tester: QueueTester, advance: Advance
    ) -> None:
        await tester.put("k", data="old", priority=30, inserted_at=1, expires_at=START_MS + LEASE_MS + 5)
        await tester.take()
        await advance(LEASE_MS)
        await tester.store.sweep(tester.ref)
        await advance(5)
        assert (await tester.put("k", data="new", inserted_at=2)).inserted == 1
        taken = await tester.take()
        assert (taken.name, taken.entry.priority, taken.entry.inserted_at) == ("new", 100, 2)
        assert await tester.finish(taken) == [True]
        await advance(LEASE_MS)
        assert await tester.claim() == []

    async def test_a_put_merges_all_expired_leases_of_its_key(self, store: QueueStore, advance: Advance) -> None:
        tester = QueueTester(store, await new_queue(store, parallel_keys=True))
        for data, priority in (("one", 30), ("two", 20)):
            await tester.put("k", data=data, priority=priority)
            await tester.take()
        await advance(LEASE_MS)
        await store.sweep(tester.ref)
        await tester.put("k", data="new", priority=40)
        taken = await tester.claim(9)
        assert [(each.name, each.entry.priority) for each in taken] == [("new", 20)]

    async def test_past_the_maximum_of_timeouts_the_old_entry_dies_and_its_sibling_stays(
        self, tester: QueueTester, advance: Advance
    ) -> None:
        await tester.put("k", data="old")
        await tester.take()
        await let_lease_expire(tester, advance)
        await let_lease_expire(tester, advance)
        await tester.put("k", data="new")
        await advance(LEASE_MS)
        taken = await tester.take()
        assert (taken.name, taken.entry.timeouts) == ("new", 0)
        assert [letter.data for letter in await tester.store.dead_letters(tester.ref)] == [b"old"]

    @pytest.mark.parametrize("sweeps", [0, 1, 3])
    async def test_an_expired_lease_counts_once_whichever_call_finds_it(
        self, tester: QueueTester, advance: Advance, sweeps: int
    ) -> None:
        await tester.put("k")
        await tester.take()
        await advance(LEASE_MS)
        for _ in range(sweeps):
            await tester.store.sweep(tester.ref)
        assert (await tester.take()).entry.timeouts == 1

    async def test_a_sweep_without_a_claim_creates_dead_letters(self, store: QueueStore, advance: Advance) -> None:
        tester = QueueTester(store, await new_queue(store, max_timeouts=0))
        await tester.put("k")
        await tester.take()
        await advance(LEASE_MS)
        swept = await store.sweep(tester.ref)
        assert (swept.leases_expired, swept.dead) == (1, 1)
        assert len(await store.dead_letters(tester.ref)) == 1


class FailCases(QueueBase):
    """Test cases of fail: a failed entry waits for its next attempt."""

    async def test_a_failed_entry_is_claimed_again_after_its_delay(self, tester: QueueTester, advance: Advance) -> None:
        await tester.put("k")
        assert await tester.fail(await tester.take(), delay_ms=50) == "waiting"
        await advance(49)
        assert await tester.claim() == []
        await advance(1)
        again = await tester.take()
        assert (again.name, again.entry.timeouts) == ("k", 1)

    async def test_fail_merges_into_a_waiting_sibling_and_keeps_the_counter(
        self, tester: QueueTester, advance: Advance
    ) -> None:
        await tester.put("k", data="old", priority=30, inserted_at=1)
        taken = await tester.take()
        await tester.put("k", data="new", priority=40, inserted_at=2)
        assert await tester.fail(taken, delay_ms=20) == "merged"
        assert await tester.claim() == []
        await advance(20)
        again = await tester.take()
        assert (again.name, again.entry.timeouts) == ("new", 1)
        assert (again.entry.priority, again.entry.inserted_at) == (30, 1)
        assert await tester.claim() == []

    async def test_fail_past_the_maximum_makes_a_dead_letter_and_leaves_the_sibling(self, store: QueueStore) -> None:
        tester = QueueTester(store, await new_queue(store, max_timeouts=0))
        await tester.put("k", data="old")
        taken = await tester.take()
        await tester.put("k", data="new")
        assert await tester.fail(taken) == "dead"
        assert await tester.names() == ["new"]
        (letter,) = await store.dead_letters(tester.ref)
        assert (letter.data, letter.reason, letter.timeouts) == (b"old", "no", 1)

    async def test_fail_of_an_expired_entry_removes_it(self, tester: QueueTester, advance: Advance) -> None:
        await tester.put("k", expires_at=START_MS + 5)
        taken = await tester.take()
        await advance(5)
        assert await tester.fail(taken) == "expired"
        assert await tester.claim() == []

    async def test_an_expired_sibling_counts_as_absent(self, tester: QueueTester, advance: Advance) -> None:
        await tester.put("k", data="old")
        taken = await tester.take()
        await tester.put("k", data="new", expires_at=START_MS + 5)
        await advance(5)
        assert await tester.fail(taken) == "waiting"
        assert await tester.names() == ["old"]

    async def test_a_late_fail_is_not_counted_twice(self, tester: QueueTester, advance: Advance) -> None:
        await tester.put("k")
        taken = await tester.take()
        await advance(LEASE_MS)
        await tester.store.sweep(tester.ref)
        assert await tester.fail(taken) == "waiting"
        assert (await tester.take()).entry.timeouts == 1

    async def test_a_put_is_merged_into_a_failed_entry(self, tester: QueueTester) -> None:
        await tester.put("k", data="old")
        await tester.fail(await tester.take(), delay_ms=0)
        assert (await tester.put("k", data="new")).merged == 1
        assert await tester.names() == ["new"]

    async def test_two_claims_of_a_key_expire_fail_and_merge_independently(
        self, store: QueueStore, advance: Advance
    ) -> None:
        tester = QueueTester(store, await new_queue(store, parallel_keys=True))
        await tester.put("k", data="1")
        first = await tester.take()
        await tester.put("k", data="2")
        second = await tester.take()
        await tester.put("k", data="3")
        assert await tester.fail(first) == "merged"
        assert await tester.finish(second) == [True]
        third = await tester.take()
        assert (third.name, third.entry.timeouts) == ("3", 1)
        await tester.put("k", data="4")
        await advance(LEASE_MS)
        (merged,) = await tester.claim(5)
        assert (merged.name, merged.entry.timeouts) == ("4", 2)
        assert await tester.finish(third) == [False]
        assert await tester.finish(merged) == [True]

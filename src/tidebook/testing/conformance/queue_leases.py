"""Test cases of a queue store: leases, heartbeats, done and fail, each fenced by a token."""

from __future__ import annotations

import asyncio

import pytest

from tidebook.queue.port import QueueStore
from tidebook.testing.conformance.queue_base import LEASE_MS, START_MS, Advance, Desk, QueueBase, Taken, new_queue


async def let_lease_expire(desk: Desk, advance: Advance) -> Taken:
    """Let a lease expire, and claim the entry again."""
    await advance(LEASE_MS)
    return await desk.take()


class LeaseCases(QueueBase):
    """Test cases of leases: a worker that lost its lease cannot change the entry."""

    async def test_a_finished_entry_is_removed(self, desk: Desk, advance: Advance) -> None:
        await desk.put("k")
        assert await desk.finish(await desk.take()) == [True]
        await advance(LEASE_MS)
        assert await desk.claim() == []

    async def test_a_second_done_reports_a_lost_lease(self, desk: Desk) -> None:
        await desk.put("k")
        taken = await desk.take()
        await desk.finish(taken)
        assert await desk.finish(taken) == [False]

    async def test_many_are_done_at_once_by_different_holders(self, desk: Desk) -> None:
        for name in "abc":
            await desk.put(name)
        taken = [await desk.take(), await desk.take(), await desk.take()]
        assert await desk.finish(*taken) == [True, True, True]

    async def test_some_of_a_claim_are_done_with_and_without_a_key_and_the_rest_stays(
        self, desk: Desk, advance: Advance
    ) -> None:
        for key, name in ((None, "a"), (None, "b"), ("k", "keyed"), ("m", "other")):
            await desk.put(key, data=name)
        taken = {each.name: each for each in await desk.claim(20)}
        assert await desk.finish(taken["a"], taken["keyed"]) == [True, True]
        assert await desk.beat(taken["b"], taken["other"]) == [True, True]
        assert await desk.finish(taken["b"]) == [True]
        await advance(LEASE_MS)
        assert await desk.names() == ["other"]

    async def test_a_token_is_valid_for_its_own_entry_only(self, desk: Desk, advance: Advance) -> None:
        await desk.put("a")
        lost = await desk.take()
        await advance(LEASE_MS)
        await desk.put("b")
        newer = await desk.claim(2)
        assert sorted(taken.name for taken in newer) == ["a", "b"]
        b = next(taken for taken in newer if taken.name == "b")
        assert await desk.finish(lost, b) == [False, True]
        assert (await desk.store.counts(desk.ref)).processing == 1

    async def test_a_lost_and_a_held_lease_are_distinguished_in_one_call(self, desk: Desk, advance: Advance) -> None:
        await desk.put("k")
        lost = await desk.take()
        holder = await let_lease_expire(desk, advance)
        results = tuple(await asyncio.gather(desk.finish(lost), desk.finish(holder), desk.finish(lost)))
        assert results == ([False], [True], [False])

    async def test_an_expired_lease_is_claimed_again_and_counted(self, desk: Desk, advance: Advance) -> None:
        await desk.put("k")
        await desk.take()
        await advance(LEASE_MS - 1)
        assert await desk.claim() == []
        await advance(1)
        again = await desk.take()
        assert (again.name, again.entry.timeouts) == ("k", 1)

    async def test_a_worker_that_lost_its_lease_cannot_finish_heartbeat_or_fail(
        self, desk: Desk, advance: Advance
    ) -> None:
        await desk.put("k")
        lost = await desk.take()
        holder = await let_lease_expire(desk, advance)
        assert await desk.finish(lost) == [False]
        assert await desk.beat(lost) == [False]
        assert await desk.fail(lost) == "lost"
        assert await desk.finish(holder) == [True]

    async def test_a_late_done_is_accepted_if_no_other_worker_has_claimed_the_entry(
        self, desk: Desk, advance: Advance
    ) -> None:
        await desk.put("k")
        taken = await desk.take()
        await advance(LEASE_MS * 2)
        await desk.store.sweep(desk.ref)
        assert await desk.finish(taken) == [True]

    async def test_a_late_heartbeat_is_accepted_if_no_other_worker_has_claimed_it(
        self, desk: Desk, advance: Advance
    ) -> None:
        await desk.put("k")
        taken = await desk.take()
        await advance(LEASE_MS * 2)
        await desk.store.sweep(desk.ref)
        assert await desk.beat(taken) == [True]
        assert await desk.claim() == []
        assert await desk.finish(taken) == [True]

    async def test_a_heartbeat_extends_the_lease(self, desk: Desk, advance: Advance) -> None:
        await desk.put("k")
        taken = await desk.take()
        await advance(LEASE_MS - 1)
        assert await desk.beat(taken) == [True]
        await advance(LEASE_MS - 1)
        assert await desk.claim() == []
        await advance(1)
        assert await desk.names() == ["k"]

    async def test_an_entry_with_an_expired_lease_keeps_its_place_in_the_order(
        self, desk: Desk, advance: Advance
    ) -> None:
        await desk.put("first", priority=10)
        await desk.take()
        await desk.put("later", priority=11)
        await desk.put("soon", priority=9)
        await advance(LEASE_MS)
        assert await desk.names() == ["soon", "first", "later"]

    async def test_an_expired_entry_whose_lease_expired_is_not_claimed_again(
        self, desk: Desk, advance: Advance
    ) -> None:
        await desk.put("k", expires_at=START_MS + 5)
        await desk.take()
        await advance(LEASE_MS)
        assert await desk.claim() == []

    async def test_an_entry_past_the_maximum_of_timeouts_becomes_a_dead_letter(
        self, desk: Desk, advance: Advance
    ) -> None:
        await desk.put("k", data="poison")
        await desk.take()
        assert (await let_lease_expire(desk, advance)).entry.timeouts == 1
        assert (await let_lease_expire(desk, advance)).entry.timeouts == 2
        await advance(LEASE_MS)
        assert await desk.claim() == []
        (letter,) = await desk.store.dead_letters(desk.ref)
        assert (letter.key, letter.timeouts, letter.data) == ("k", 3, b"poison")

    async def test_an_expired_lease_with_a_sibling_merges_into_it_and_keeps_the_counter(
        self, desk: Desk, advance: Advance
    ) -> None:
        await desk.put("k", data="old", priority=30, inserted_at=1)
        await desk.take()
        await desk.put("k", data="new", priority=40, inserted_at=2)
        taken = await let_lease_expire(desk, advance)
        found = taken.entry
        assert (taken.name, found.timeouts, found.priority, found.inserted_at) == ("new", 1, 30, 1)
        assert await desk.claim() == []

    async def test_an_expired_lease_with_a_later_sibling_waits_for_its_date(self, desk: Desk, advance: Advance) -> None:
        await desk.put("k", data="old")
        await desk.take()
        await desk.put("k", data="new", process_at=START_MS + LEASE_MS + 500)
        await advance(LEASE_MS)
        assert await desk.claim() == []
        await advance(500)
        assert await desk.names() == ["new"]

    async def test_a_put_after_a_lease_expiry_was_found_is_merged_into_that_entry(
        self, desk: Desk, advance: Advance
    ) -> None:
        await desk.put("k", data="old", priority=30, inserted_at=1)
        late = await desk.take()
        await advance(LEASE_MS)
        await desk.store.sweep(desk.ref)
        put = await desk.put("k", data="new", priority=40, inserted_at=2)
        assert (put.inserted, put.merged) == (0, 1)
        counts = await desk.store.counts(desk.ref)
        assert (counts.due, counts.processing) == (1, 0)
        assert await desk.finish(late) == [False]
        taken = await desk.take()
        found = taken.entry
        assert (taken.name, found.timeouts, found.priority, found.inserted_at) == ("new", 0, 30, 1)
        assert await desk.claim() == []

    async def test_a_put_after_an_expired_lease_replaces_an_expired_entry(self, desk: Desk, advance: Advance) -> None:
        await desk.put("k", data="old", priority=30, inserted_at=1, expires_at=START_MS + LEASE_MS + 5)
        await desk.take()
        await advance(LEASE_MS)
        await desk.store.sweep(desk.ref)
        await advance(5)
        assert (await desk.put("k", data="new", inserted_at=2)).inserted == 1
        taken = await desk.take()
        assert (taken.name, taken.entry.priority, taken.entry.inserted_at) == ("new", 100, 2)
        assert await desk.finish(taken) == [True]
        await advance(LEASE_MS)
        assert await desk.claim() == []

    async def test_a_put_merges_all_expired_leases_of_its_key(self, store: QueueStore, advance: Advance) -> None:
        desk = Desk(store, await new_queue(store, parallel_keys=True))
        for data, priority in (("one", 30), ("two", 20)):
            await desk.put("k", data=data, priority=priority)
            await desk.take()
        await advance(LEASE_MS)
        await store.sweep(desk.ref)
        await desk.put("k", data="new", priority=40)
        taken = await desk.claim(9)
        assert [(each.name, each.entry.priority) for each in taken] == [("new", 20)]

    async def test_past_the_maximum_of_timeouts_the_old_entry_dies_and_its_sibling_stays(
        self, desk: Desk, advance: Advance
    ) -> None:
        await desk.put("k", data="old")
        await desk.take()
        await let_lease_expire(desk, advance)
        await let_lease_expire(desk, advance)
        await desk.put("k", data="new")
        await advance(LEASE_MS)
        taken = await desk.take()
        assert (taken.name, taken.entry.timeouts) == ("new", 0)
        assert [letter.data for letter in await desk.store.dead_letters(desk.ref)] == [b"old"]

    @pytest.mark.parametrize("sweeps", [0, 1, 3])
    async def test_an_expired_lease_counts_once_whichever_call_finds_it(
        self, desk: Desk, advance: Advance, sweeps: int
    ) -> None:
        await desk.put("k")
        await desk.take()
        await advance(LEASE_MS)
        for _ in range(sweeps):
            await desk.store.sweep(desk.ref)
        assert (await desk.take()).entry.timeouts == 1

    async def test_a_sweep_without_a_claim_creates_dead_letters(self, store: QueueStore, advance: Advance) -> None:
        desk = Desk(store, await new_queue(store, max_timeouts=0))
        await desk.put("k")
        await desk.take()
        await advance(LEASE_MS)
        swept = await store.sweep(desk.ref)
        assert (swept.leases_expired, swept.dead) == (1, 1)
        assert len(await store.dead_letters(desk.ref)) == 1


class FailCases(QueueBase):
    """Test cases of fail: a failed entry waits for its next attempt."""

    async def test_a_failed_entry_is_claimed_again_after_its_delay(self, desk: Desk, advance: Advance) -> None:
        await desk.put("k")
        assert await desk.fail(await desk.take(), delay_ms=50) == "waiting"
        await advance(49)
        assert await desk.claim() == []
        await advance(1)
        again = await desk.take()
        assert (again.name, again.entry.timeouts) == ("k", 1)

    async def test_fail_merges_into_a_waiting_sibling_and_keeps_the_counter(self, desk: Desk, advance: Advance) -> None:
        await desk.put("k", data="old", priority=30, inserted_at=1)
        taken = await desk.take()
        await desk.put("k", data="new", priority=40, inserted_at=2)
        assert await desk.fail(taken, delay_ms=20) == "merged"
        assert await desk.claim() == []
        await advance(20)
        again = await desk.take()
        assert (again.name, again.entry.timeouts) == ("new", 1)
        assert (again.entry.priority, again.entry.inserted_at) == (30, 1)
        assert await desk.claim() == []

    async def test_fail_past_the_maximum_makes_a_dead_letter_and_leaves_the_sibling(self, store: QueueStore) -> None:
        desk = Desk(store, await new_queue(store, max_timeouts=0))
        await desk.put("k", data="old")
        taken = await desk.take()
        await desk.put("k", data="new")
        assert await desk.fail(taken) == "dead"
        assert await desk.names() == ["new"]
        (letter,) = await store.dead_letters(desk.ref)
        assert (letter.data, letter.reason, letter.timeouts) == (b"old", "no", 1)

    async def test_fail_of_an_expired_entry_removes_it(self, desk: Desk, advance: Advance) -> None:
        await desk.put("k", expires_at=START_MS + 5)
        taken = await desk.take()
        await advance(5)
        assert await desk.fail(taken) == "expired"
        assert await desk.claim() == []

    async def test_an_expired_sibling_counts_as_absent(self, desk: Desk, advance: Advance) -> None:
        await desk.put("k", data="old")
        taken = await desk.take()
        await desk.put("k", data="new", expires_at=START_MS + 5)
        await advance(5)
        assert await desk.fail(taken) == "waiting"
        assert await desk.names() == ["old"]

    async def test_a_late_fail_is_not_counted_twice(self, desk: Desk, advance: Advance) -> None:
        await desk.put("k")
        taken = await desk.take()
        await advance(LEASE_MS)
        await desk.store.sweep(desk.ref)
        assert await desk.fail(taken) == "waiting"
        assert (await desk.take()).entry.timeouts == 1

    async def test_a_put_is_merged_into_a_failed_entry(self, desk: Desk) -> None:
        await desk.put("k", data="old")
        await desk.fail(await desk.take(), delay_ms=0)
        assert (await desk.put("k", data="new")).merged == 1
        assert await desk.names() == ["new"]

    async def test_two_claims_of_a_key_expire_fail_and_merge_independently(
        self, store: QueueStore, advance: Advance
    ) -> None:
        desk = Desk(store, await new_queue(store, parallel_keys=True))
        await desk.put("k", data="1")
        first = await desk.take()
        await desk.put("k", data="2")
        second = await desk.take()
        await desk.put("k", data="3")
        assert await desk.fail(first) == "merged"
        assert await desk.finish(second) == [True]
        third = await desk.take()
        assert (third.name, third.entry.timeouts) == ("3", 1)
        await desk.put("k", data="4")
        await advance(LEASE_MS)
        (merged,) = await desk.claim(5)
        assert (merged.name, merged.entry.timeouts) == ("4", 2)
        assert await desk.finish(third) == [False]
        assert await desk.finish(merged) == [True]

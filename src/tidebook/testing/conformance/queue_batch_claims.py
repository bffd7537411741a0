"""Test cases of a queue store: claims of many entries, which a store may keep as one row internally."""

from __future__ import annotations

import asyncio
import uuid

from tidebook.queue.port import FinishingClaim, LeasedEntry, QueueStore
from tidebook.testing.conformance.queue_base import (
    LEASE_MS,
    START_MS,
    Advance,
    QueueBase,
    QueueTester,
    Taken,
    new_queue,
)


async def put_and_claim(tester: QueueTester, *names: str) -> list[Taken]:
    """Put entries without a key, and return them from one claim."""
    for name in names:
        await tester.put(data=name)
    taken = await tester.claim(len(names))
    assert [each.name for each in taken] == list(names)
    return taken


async def finish_and_claim(
    tester: QueueTester, *calls: tuple[int, list[LeasedEntry]]
) -> tuple[list[list[bool]], list[list[str]]]:
    """Return the finished entries of each caller, and the data of the entries that it has claimed."""
    claims = [FinishingClaim(uuid.uuid4().bytes, limit, finished) for limit, finished in calls]
    finished, claimed = await tester.store.finish_and_claim(tester.ref, claims, lease_ms=LEASE_MS, together=False)
    names = [[each.data.decode() for each in claimed if each.token == claim.token] for claim in claims]
    return [[each in finished for each in claim.finished] for claim in claims], names


class BatchClaimCases(QueueBase):
    """Test cases of claims of many entries: a change of some entries leaves the others unchanged."""

    async def test_a_whole_claim_is_finished_at_once(self, tester: QueueTester, advance: Advance) -> None:
        taken = await put_and_claim(tester, *"abc")
        assert await tester.finish(*taken) == [True, True, True]
        assert await tester.finish(*taken) == [False, False, False]
        await advance(LEASE_MS)
        assert await tester.claim() == []

    async def test_some_of_a_claim_are_finished_and_the_others_stay_held(self, tester: QueueTester) -> None:
        a, b, c = await put_and_claim(tester, *"abc")
        assert await tester.finish(b) == [True]
        assert await tester.claim(3) == []
        assert await tester.finish(a, b, c) == [True, False, True]
        assert (await tester.store.counts(tester.ref)).processing == 0

    async def test_whole_claims_and_parts_of_others_are_finished_in_one_call(self, tester: QueueTester) -> None:
        first = await put_and_claim(tester, *"abc")
        second = await put_and_claim(tester, *"def")
        await tester.put("key")
        keyed = await tester.take()
        assert await tester.finish(*first, second[1], keyed) == [True] * 5
        assert [each.data for each in await tester.store.entries(tester.ref, limit=9)] == [b"d", b"f"]

    async def test_entries_are_finished_and_others_claimed_in_one_call(self, tester: QueueTester) -> None:
        a, b = await put_and_claim(tester, *"ab")
        for name in "cdef":
            await tester.put(data=name)
        done, names = await finish_and_claim(tester, (1, [a.held]), (2, []), (1, [b.held]))
        assert (done, names) == ([[True], [], [True]], [["c"], ["d", "e"], ["f"]])
        assert (await tester.store.counts(tester.ref)).processing == 4

    async def test_a_caller_that_has_lost_an_entry_claims_nothing_and_the_others_do(self, tester: QueueTester) -> None:
        a, b, c = await put_and_claim(tester, *"abc")
        await tester.finish(a)
        for name in "de":
            await tester.put(data=name)
        done, names = await finish_and_claim(tester, (1, [a.held, b.held]), (2, [c.held]), (1, [c.held]))
        assert (done[0], done[1], names) == ([False, True], [True], [[], ["d", "e"], []])
        assert await tester.finish(b, c) == [False, False]

    async def test_nothing_is_claimed_if_all_callers_have_lost_an_entry(self, tester: QueueTester) -> None:
        [a] = await put_and_claim(tester, "a")
        await tester.finish(a)
        await tester.put(data="b")
        assert await finish_and_claim(tester, (1, [a.held])) == ([[False]], [[]])
        assert (await tester.take()).entry.timeouts == 0

    async def test_finishing_an_entry_frees_its_key_for_the_claim_of_the_same_call(self, tester: QueueTester) -> None:
        await tester.put("k", data="first")
        first = await tester.take()
        await tester.put("k", data="second")
        assert await tester.claim() == []
        assert await finish_and_claim(tester, (1, [first.held])) == ([[True]], [["second"]])

    async def test_an_expired_lease_is_lost_only_to_another_claim(self, tester: QueueTester, advance: Advance) -> None:
        a, b = await put_and_claim(tester, *"ab")
        await advance(LEASE_MS)
        again = await tester.take()
        held, lost = (b, a) if again.name == "a" else (a, b)
        done, names = await finish_and_claim(tester, (1, [lost.held]), (1, [held.held]))
        assert (done, names) == ([[False], [True]], [[], []])
        assert await tester.finish(again) == [True]

    async def test_one_claim_returns_entries_with_and_without_a_key(self, tester: QueueTester) -> None:
        for key, name in ((None, "a"), ("k", "b"), (None, "c"), ("l", "d")):
            await tester.put(key, data=name)
        taken = await tester.claim(9)
        assert [each.name for each in taken] == ["a", "b", "c", "d"]
        await tester.put("k", data="again")
        assert await tester.claim(9) == []
        assert await tester.finish(*taken) == [True] * 4
        assert await tester.names() == ["again"]

    async def test_one_of_a_claim_fails_and_the_others_stay_held(self, tester: QueueTester) -> None:
        a, b, c = await put_and_claim(tester, *"abc")
        assert await tester.fail(b) == "waiting"
        again = await tester.take()
        assert (again.name, again.entry.timeouts) == ("b", 1)
        assert await tester.finish(a, b, c, again) == [True, False, True, True]

    async def test_a_heartbeat_for_some_entries_keeps_only_those(self, tester: QueueTester, advance: Advance) -> None:
        a, b, c = await put_and_claim(tester, *"abc")
        await advance(LEASE_MS - 1)
        assert await tester.beat(b) == [True]
        await advance(1)
        again = await tester.claim(3)
        assert [(each.name, each.entry.timeouts) for each in again] == [("a", 1), ("c", 1)]
        assert await tester.finish(a, b, c) == [False, True, False]
        assert await tester.finish(*again) == [True, True]

    async def test_a_heartbeat_for_all_entries_keeps_all_of_them(self, tester: QueueTester, advance: Advance) -> None:
        taken = await put_and_claim(tester, *"abc")
        await advance(LEASE_MS - 1)
        assert await tester.beat(*taken) == [True] * 3
        await advance(LEASE_MS - 1)
        assert await tester.claim(3) == []
        assert await tester.finish(*taken) == [True] * 3
        assert await tester.beat(*taken) == [False] * 3

    async def test_entries_of_an_expired_claim_are_claimed_again_and_each_is_counted(
        self, tester: QueueTester, advance: Advance
    ) -> None:
        taken = await put_and_claim(tester, *"abc")
        await advance(LEASE_MS)
        again = await tester.claim(2)
        assert [(each.name, each.entry.timeouts) for each in again] == [("a", 1), ("b", 1)]
        assert await tester.finish(*taken) == [False, False, True]  # the last one was not claimed again
        assert await tester.finish(*again) == [True, True]

    async def test_a_late_finish_counts_if_no_other_worker_has_claimed(
        self, tester: QueueTester, advance: Advance
    ) -> None:
        taken = await put_and_claim(tester, *"abc")
        await advance(LEASE_MS)
        assert (await tester.store.sweep(tester.ref)).leases_expired == 3
        assert await tester.finish(*taken) == [True] * 3

    async def test_a_claim_whose_lease_expired_too_often_leaves_dead_letters(
        self, tester: QueueTester, advance: Advance
    ) -> None:
        await put_and_claim(tester, *"abc")
        for _ in range(2):
            await advance(LEASE_MS)
            assert len(await tester.claim(3)) == 3
        await advance(LEASE_MS)
        assert await tester.claim(3) == []
        assert sorted(letter.data for letter in await tester.store.dead_letters(tester.ref)) == [b"a", b"b", b"c"]

    async def test_an_entry_that_has_expired_is_removed_when_its_lease_expires(
        self, tester: QueueTester, advance: Advance
    ) -> None:
        await tester.put(data="short", expires_at=START_MS + 5)
        await tester.put(data="long")
        assert await tester.names() == ["short", "long"]
        await advance(LEASE_MS)
        assert await tester.names() == ["long"]

    async def test_each_entry_of_a_claim_is_listed_and_counted(self, tester: QueueTester, advance: Advance) -> None:
        await advance(7)
        await put_and_claim(tester, *"abc")
        await tester.put(data="later")
        listed = await tester.store.entries(tester.ref, limit=3)
        assert [(each.data, each.status, each.started_at, each.lease_until) for each in listed] == [
            (name, "P", START_MS + 7, START_MS + 7 + LEASE_MS) for name in (b"a", b"b", b"c")
        ]
        counts = await tester.store.counts(tester.ref)
        assert (counts.due, counts.processing) == (1, 3)
        await advance(LEASE_MS)
        counts = await tester.store.counts(tester.ref)
        assert (counts.due, counts.processing) == (4, 0)

    async def test_the_end_of_a_claims_lease_is_reported(self, tester: QueueTester) -> None:
        await put_and_claim(tester, *"abc")
        (due,) = await tester.store.due([tester.ref])
        assert (due.ready, due.lease_end) == (False, START_MS + LEASE_MS)

    async def test_entries_of_several_priorities_are_one_claim(self, tester: QueueTester) -> None:
        for priority in (30, 10, 20):
            await tester.put(data=f"{priority}", priority=priority)
        taken = await tester.claim(9)
        assert [each.name for each in taken] == ["10", "20", "30"]
        assert await tester.finish(*taken) == [True] * 3

    async def test_concurrent_claims_do_not_overlap(self, tester: QueueTester) -> None:
        for number in range(50):
            await tester.put(data=f"{number}")
        claims = await asyncio.gather(*(tester.claim(8) for _ in range(9)))
        names = [each.name for claim in claims for each in claim]
        assert sorted(names, key=int) == [f"{number}" for number in range(50)]
        finished = await asyncio.gather(*(tester.finish(*claim) for claim in claims if claim))
        assert all(all(each) for each in finished)
        assert (await tester.store.counts(tester.ref)).processing == 0

    async def test_callers_of_one_claim_are_served_in_turn_each_with_its_own_token(self, tester: QueueTester) -> None:
        for name in "abcde":
            await tester.put(data=name)
        first, second, third = (uuid.uuid4().bytes for _ in range(3))
        claimed = await tester.store.claim(tester.ref, {first: 2, second: 1, third: 9}, lease_ms=LEASE_MS)
        by_token = {
            token: [each.data.decode() for each in claimed if each.token == token] for token in (first, second, third)
        }
        assert by_token == {first: ["a", "b"], second: ["c"], third: ["d", "e"]}
        taken = [Taken(each) for each in claimed]
        assert await tester.finish(taken[1], taken[2], *taken[3:]) == [True] * 4
        assert await tester.finish(*taken) == [True, False, False, False, False]

    async def test_entries_that_are_claimed_separately_are_not_bundled(self, store: QueueStore) -> None:
        tester = QueueTester(store, await new_queue(store))
        for name in "abc":
            await tester.put(data=name)
        claimed = await store.claim(tester.ref, {b"t" * 16: 3}, lease_ms=LEASE_MS, together=False)
        taken = [Taken(each) for each in claimed]
        assert [each.held.together for each in taken] == [0, 0, 0]
        assert await tester.finish(*taken) == [True] * 3

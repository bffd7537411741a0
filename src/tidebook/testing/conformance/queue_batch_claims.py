"""Test cases of a queue store: claims of many entries, which a store may keep as one row internally."""

from __future__ import annotations

import asyncio
import uuid

from tidebook.queue.port import FinishingClaim, LeasedEntry, QueueStore
from tidebook.testing.conformance.queue_base import LEASE_MS, START_MS, Advance, Desk, QueueBase, Taken, new_queue


async def claim_of(desk: Desk, *names: str) -> list[Taken]:
    """Put entries without a key, and return them from one claim."""
    for name in names:
        await desk.put(data=name)
    taken = await desk.claim(len(names))
    assert [each.name for each in taken] == list(names)
    return taken


async def finish_and_claim(
    desk: Desk, *calls: tuple[int, list[LeasedEntry]]
) -> tuple[list[list[bool]], list[list[str]]]:
    """Return which entries each caller has finished, and the data of what it has claimed."""
    claims = [FinishingClaim(uuid.uuid4().bytes, limit, finished) for limit, finished in calls]
    finished, claimed = await desk.store.finish_and_claim(desk.ref, claims, lease_ms=LEASE_MS, together=False)
    names = [[each.data.decode() for each in claimed if each.token == claim.token] for claim in claims]
    return [[each in finished for each in claim.finished] for claim in claims], names


class BatchClaimCases(QueueBase):
    """Test cases of claims of many entries: a change of some leaves the others unchanged."""

    async def test_a_whole_claim_is_finished_at_once(self, desk: Desk, advance: Advance) -> None:
        taken = await claim_of(desk, *"abc")
        assert await desk.finish(*taken) == [True, True, True]
        assert await desk.finish(*taken) == [False, False, False]
        await advance(LEASE_MS)
        assert await desk.claim() == []

    async def test_some_of_a_claim_are_finished_and_the_others_stay_held(self, desk: Desk) -> None:
        a, b, c = await claim_of(desk, *"abc")
        assert await desk.finish(b) == [True]
        assert await desk.claim(3) == []
        assert await desk.finish(a, b, c) == [True, False, True]
        assert (await desk.store.counts(desk.ref)).processing == 0

    async def test_whole_claims_and_parts_of_others_are_finished_in_one_call(self, desk: Desk) -> None:
        first = await claim_of(desk, *"abc")
        second = await claim_of(desk, *"def")
        await desk.put("key")
        keyed = await desk.take()
        assert await desk.finish(*first, second[1], keyed) == [True] * 5
        assert [each.data for each in await desk.store.entries(desk.ref, limit=9)] == [b"d", b"f"]

    async def test_entries_are_finished_and_others_claimed_in_one_call(self, desk: Desk) -> None:
        a, b = await claim_of(desk, *"ab")
        for name in "cdef":
            await desk.put(data=name)
        done, names = await finish_and_claim(desk, (1, [a.held]), (2, []), (1, [b.held]))
        assert (done, names) == ([[True], [], [True]], [["c"], ["d", "e"], ["f"]])
        assert (await desk.store.counts(desk.ref)).processing == 4

    async def test_a_caller_that_has_lost_an_entry_claims_nothing_and_the_others_do(self, desk: Desk) -> None:
        a, b, c = await claim_of(desk, *"abc")
        await desk.finish(a)
        for name in "de":
            await desk.put(data=name)
        done, names = await finish_and_claim(desk, (1, [a.held, b.held]), (2, [c.held]), (1, [c.held]))
        assert (done[0], done[1], names) == ([False, True], [True], [[], ["d", "e"], []])
        assert await desk.finish(b, c) == [False, False]

    async def test_nothing_is_claimed_if_all_callers_have_lost_an_entry(self, desk: Desk) -> None:
        [a] = await claim_of(desk, "a")
        await desk.finish(a)
        await desk.put(data="b")
        assert await finish_and_claim(desk, (1, [a.held])) == ([[False]], [[]])
        assert (await desk.take()).entry.timeouts == 0

    async def test_finishing_an_entry_frees_its_key_for_the_claim_of_the_same_call(self, desk: Desk) -> None:
        await desk.put("k", data="first")
        first = await desk.take()
        await desk.put("k", data="second")
        assert await desk.claim() == []
        assert await finish_and_claim(desk, (1, [first.held])) == ([[True]], [["second"]])

    async def test_an_expired_lease_is_lost_only_to_another_claim(self, desk: Desk, advance: Advance) -> None:
        a, b = await claim_of(desk, *"ab")
        await advance(LEASE_MS)
        again = await desk.take()
        held, lost = (b, a) if again.name == "a" else (a, b)
        done, names = await finish_and_claim(desk, (1, [lost.held]), (1, [held.held]))
        assert (done, names) == ([[False], [True]], [[], []])
        assert await desk.finish(again) == [True]

    async def test_keys_and_entries_without_one_come_in_one_claim(self, desk: Desk) -> None:
        for key, name in ((None, "a"), ("k", "b"), (None, "c"), ("l", "d")):
            await desk.put(key, data=name)
        taken = await desk.claim(9)
        assert [each.name for each in taken] == ["a", "b", "c", "d"]
        await desk.put("k", data="again")
        assert await desk.claim(9) == []
        assert await desk.finish(*taken) == [True] * 4
        assert await desk.names() == ["again"]

    async def test_one_of_a_claim_fails_and_the_others_stay_held(self, desk: Desk) -> None:
        a, b, c = await claim_of(desk, *"abc")
        assert await desk.fail(b) == "waiting"
        again = await desk.take()
        assert (again.name, again.entry.timeouts) == ("b", 1)
        assert await desk.finish(a, b, c, again) == [True, False, True, True]

    async def test_a_heartbeat_for_some_keeps_those_alone(self, desk: Desk, advance: Advance) -> None:
        a, b, c = await claim_of(desk, *"abc")
        await advance(LEASE_MS - 1)
        assert await desk.beat(b) == [True]
        await advance(1)
        again = await desk.claim(3)
        assert [(each.name, each.entry.timeouts) for each in again] == [("a", 1), ("c", 1)]
        assert await desk.finish(a, b, c) == [False, True, False]
        assert await desk.finish(*again) == [True, True]

    async def test_a_heartbeat_for_all_keeps_all(self, desk: Desk, advance: Advance) -> None:
        taken = await claim_of(desk, *"abc")
        await advance(LEASE_MS - 1)
        assert await desk.beat(*taken) == [True] * 3
        await advance(LEASE_MS - 1)
        assert await desk.claim(3) == []
        assert await desk.finish(*taken) == [True] * 3
        assert await desk.beat(*taken) == [False] * 3

    async def test_entries_of_an_expired_claim_are_claimed_again_and_each_is_counted(
        self, desk: Desk, advance: Advance
    ) -> None:
        taken = await claim_of(desk, *"abc")
        await advance(LEASE_MS)
        again = await desk.claim(2)
        assert [(each.name, each.entry.timeouts) for each in again] == [("a", 1), ("b", 1)]
        assert await desk.finish(*taken) == [False, False, True]  # the last one was not claimed again
        assert await desk.finish(*again) == [True, True]

    async def test_a_late_finish_counts_if_no_other_worker_has_claimed(self, desk: Desk, advance: Advance) -> None:
        taken = await claim_of(desk, *"abc")
        await advance(LEASE_MS)
        assert (await desk.store.sweep(desk.ref)).leases_expired == 3
        assert await desk.finish(*taken) == [True] * 3

    async def test_a_claim_whose_lease_expired_too_often_leaves_dead_letters(
        self, desk: Desk, advance: Advance
    ) -> None:
        await claim_of(desk, *"abc")
        for _ in range(2):
            await advance(LEASE_MS)
            assert len(await desk.claim(3)) == 3
        await advance(LEASE_MS)
        assert await desk.claim(3) == []
        assert sorted(letter.data for letter in await desk.store.dead_letters(desk.ref)) == [b"a", b"b", b"c"]

    async def test_an_entry_that_has_expired_is_removed_when_its_lease_expires(
        self, desk: Desk, advance: Advance
    ) -> None:
        await desk.put(data="short", expires_at=START_MS + 5)
        await desk.put(data="long")
        assert await desk.names() == ["short", "long"]
        await advance(LEASE_MS)
        assert await desk.names() == ["long"]

    async def test_each_entry_of_a_claim_is_listed_and_counted(self, desk: Desk, advance: Advance) -> None:
        await advance(7)
        await claim_of(desk, *"abc")
        await desk.put(data="later")
        listed = await desk.store.entries(desk.ref, limit=3)
        assert [(each.data, each.status, each.started_at, each.lease_until) for each in listed] == [
            (name, "P", START_MS + 7, START_MS + 7 + LEASE_MS) for name in (b"a", b"b", b"c")
        ]
        counts = await desk.store.counts(desk.ref)
        assert (counts.due, counts.processing) == (1, 3)
        await advance(LEASE_MS)
        counts = await desk.store.counts(desk.ref)
        assert (counts.due, counts.processing) == (4, 0)

    async def test_the_end_of_a_claims_lease_is_reported(self, desk: Desk) -> None:
        await claim_of(desk, *"abc")
        (due,) = await desk.store.due([desk.ref])
        assert (due.ready, due.lease_end) == (False, START_MS + LEASE_MS)

    async def test_entries_of_several_priorities_are_one_claim(self, desk: Desk) -> None:
        for priority in (30, 10, 20):
            await desk.put(data=f"{priority}", priority=priority)
        taken = await desk.claim(9)
        assert [each.name for each in taken] == ["10", "20", "30"]
        assert await desk.finish(*taken) == [True] * 3

    async def test_concurrent_claims_do_not_overlap(self, desk: Desk) -> None:
        for number in range(50):
            await desk.put(data=f"{number}")
        claims = await asyncio.gather(*(desk.claim(8) for _ in range(9)))
        names = [each.name for claim in claims for each in claim]
        assert sorted(names, key=int) == [f"{number}" for number in range(50)]
        finished = await asyncio.gather(*(desk.finish(*claim) for claim in claims if claim))
        assert all(all(each) for each in finished)
        assert (await desk.store.counts(desk.ref)).processing == 0

    async def test_callers_of_one_claim_are_served_in_turn_each_with_its_own_token(self, desk: Desk) -> None:
        for name in "abcde":
            await desk.put(data=name)
        first, second, third = (uuid.uuid4().bytes for _ in range(3))
        claimed = await desk.store.claim(desk.ref, {first: 2, second: 1, third: 9}, lease_ms=LEASE_MS)
        by_token = {
            token: [each.data.decode() for each in claimed if each.token == token] for token in (first, second, third)
        }
        assert by_token == {first: ["a", "b"], second: ["c"], third: ["d", "e"]}
        taken = [Taken(each) for each in claimed]
        assert await desk.finish(taken[1], taken[2], *taken[3:]) == [True] * 4
        assert await desk.finish(*taken) == [True, False, False, False, False]

    async def test_entries_asked_for_one_by_one_are_kept_so(self, store: QueueStore) -> None:
        desk = Desk(store, await new_queue(store))
        for name in "abc":
            await desk.put(data=name)
        claimed = await store.claim(desk.ref, {b"t" * 16: 3}, lease_ms=LEASE_MS, together=False)
        taken = [Taken(each) for each in claimed]
        assert [each.held.together for each in taken] == [0, 0, 0]
        assert await desk.finish(*taken) == [True] * 3

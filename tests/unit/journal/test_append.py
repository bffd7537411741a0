"""Appends under faults: a failure differs from an unknown outcome, and a retry never appends a second copy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.unit.journal.rig import TOPIC, Rig
from tidebook.core.errors import Conflict, OutcomeUnknown, Unavailable
from tidebook.core.head import RECENT_MAX

OpenRig = Callable[..., Rig]


async def test_an_append_that_fails_before_it_is_logged_is_unavailable_and_changes_nothing(rig: Rig) -> None:
    await rig.append("a", 1)
    rig.log_faults.fail("send", Unavailable("the log is down"))
    with pytest.raises(Unavailable):
        await rig.append("a", 2)
    assert await rig.read("a") == [1]
    assert (await rig.append("a", 2)).last == 2


async def test_a_lost_acknowledgement_is_unknown_with_all_that_a_retry_needs(rig: Rig) -> None:
    await rig.append("a", 1)
    rig.log_faults.fail("send", OutcomeUnknown("no answer"), after=True)
    with pytest.raises(OutcomeUnknown) as caught:
        await rig.append("a", 2)
    unknown = caught.value
    assert unknown.append_id is not None
    assert (unknown.partition, unknown.floor, unknown.epoch) == (0, rig.first_offset + 1, 1)


async def test_a_retry_of_a_logged_append_returns_its_numbers_and_adds_no_copy(rig: Rig) -> None:
    rig.log_faults.fail("send", OutcomeUnknown("no answer"), after=True)
    with pytest.raises(OutcomeUnknown) as caught:
        await rig.append("a", 1, 2)
    await rig.append("a", 3)
    again = await rig.append("a", 1, 2, retry=caught.value)
    assert (again.first, again.last, again.offset) == (1, 2, rig.first_offset)
    assert await rig.read("a") == [1, 2, 3]


async def test_a_retry_of_an_append_that_was_not_logged_appends_it(rig: Rig) -> None:
    await rig.append("a", 1)
    rig.log_faults.fail("send", OutcomeUnknown("no answer"))
    with pytest.raises(OutcomeUnknown) as caught:
        await rig.append("a", 2)
    assert (await rig.append("a", 2, retry=caught.value)).last == 2
    assert await rig.read("a") == [1, 2]


async def test_a_retry_of_a_retry_keeps_the_first_floor(rig: Rig) -> None:
    await rig.append("a", 1)
    rig.log_faults.fail("send", OutcomeUnknown("no answer"), times=2)
    with pytest.raises(OutcomeUnknown) as first:
        await rig.append("a", 2)
    await rig.write_raw(None, b"others")
    with pytest.raises(OutcomeUnknown) as second:
        await rig.append("a", 2, retry=first.value)
    assert (second.value.append_id, second.value.floor) == (first.value.append_id, first.value.floor)


async def test_a_retry_is_recognized_after_replication_and_in_another_process(open_rig: OpenRig) -> None:
    rig = open_rig()
    rig.log_faults.fail("send", OutcomeUnknown("no answer"), after=True)
    with pytest.raises(OutcomeUnknown) as caught:
        await rig.append("a", 1, expected=0)
    await rig.append("a", 2)
    await rig.replicate()
    await rig.truncate()
    again = await open_rig().append("a", 1, expected=0, retry=caught.value)
    assert (again.first, again.last) == (1, 1)
    assert await rig.read("a") == [1, 2]


async def test_an_append_whose_numbers_cannot_be_read_is_unknown_and_its_retry_finds_it(open_rig: OpenRig) -> None:
    rig, other = open_rig(), open_rig()
    await rig.append("a", 1)
    await other.append("b", "between")
    rig.log_faults.fail("read", Unavailable("the log is down"), times=None)
    with pytest.raises(OutcomeUnknown) as caught:
        await rig.append("a", 2)
    assert caught.value.offset == rig.first_offset + 2
    rig.log_faults.heal()
    again = await rig.append("a", 2, retry=caught.value)
    assert (again.last, again.offset) == (2, rig.first_offset + 2)
    assert await rig.read("a") == [1, 2]


async def test_an_append_that_is_evicted_before_its_outcome_is_read_is_unknown_rather_than_guessed(
    open_rig: OpenRig,
) -> None:
    """It is replicated, evicted from the head and truncated before its writer gets the acknowledgement."""
    rig, other = open_rig(), open_rig()
    await rig.append("a", "first")
    await other.append("b", "between")
    held = rig.log_faults.hold("send", after=True)
    mine = asyncio.create_task(rig.append("a", "mine"))
    await held.reached()
    for i in range(RECENT_MAX + 1):
        await other.append("a", i)
    await other.replicate()
    await other.truncate()
    held.release()
    with pytest.raises(OutcomeUnknown):
        await mine


async def test_a_rejected_append_that_was_replicated_before_its_outcome_was_read_is_a_conflict(
    open_rig: OpenRig,
) -> None:
    rig, other = open_rig(), open_rig()
    await rig.append("a", "first")
    await other.append("a", "second")
    held = rig.log_faults.hold("send", after=True)
    mine = asyncio.create_task(rig.append("a", "mine", expected=1))
    await held.reached()
    await other.replicate()
    await other.truncate()
    held.release()
    with pytest.raises(Conflict) as caught:
        await mine
    assert caught.value.found == 2


@pytest.mark.parametrize("after", ["a purge", "a purge and a new incarnation"])
async def test_a_conflict_reports_the_number_at_the_append_and_not_a_later_one(open_rig: OpenRig, after: str) -> None:
    """`expected=0, found=0` would be no conflict."""
    rig, other = open_rig(), open_rig()
    await other.journal.create()
    assert await rig.journal.pointer("a") is None
    await other.append("a", "first", "second")
    held = rig.log_faults.hold("send", after=True)
    mine = asyncio.create_task(rig.append("a", "mine", expected=0))
    await held.reached()
    await other.journal.purge("a")
    if after == "a purge and a new incarnation":
        await other.append("a", "third")
        await other.journal.purge("a")
    await other.replicate()
    await other.truncate()
    held.release()
    with pytest.raises(Conflict) as caught:
        await mine
    assert caught.value.expected == 0
    assert caught.value.found in ((2,) if after == "a purge" else (2, None))


async def test_the_outcome_of_a_void_first_attempt_is_not_taken_for_that_of_its_retry(open_rig: OpenRig) -> None:
    """The first attempt is void; then the journal reaches the expected number, and the retry is valid."""
    rig, other = open_rig(), open_rig()
    await rig.append("a", 1)
    rig.log_faults.fail("send", OutcomeUnknown("no answer"), after=True)
    with pytest.raises(OutcomeUnknown) as caught:
        await rig.append("a", "mine", expected=2)
    await other.append("a", 2)
    again = await rig.append("a", "mine", expected=2, retry=caught.value)
    assert again.last == 3
    assert await rig.read("a") == [1, 2, "mine"]


async def test_a_cancelled_caller_does_not_undo_its_append(rig: Rig) -> None:
    await rig.append("a", 1)
    held = rig.log_faults.hold("send", after=True)
    mine = asyncio.create_task(rig.append("a", 2))
    await held.reached()
    mine.cancel()
    with pytest.raises(asyncio.CancelledError):
        await mine
    held.release()
    assert await rig.read("a") == [1, 2]
    assert (await rig.append("a", 3, expected=2)).last == 3


async def test_while_the_store_is_unavailable_unconfirmed_appends_succeed(rig: Rig) -> None:
    await rig.append("a", 1)
    rig.store_faults.fail("head", Unavailable("the store is down"), times=None)
    rig.store_faults.fail("pointer", Unavailable("the store is down"), times=None)
    assert (await rig.append("b", 1, confirm=False)).offset >= 0
    assert (await rig.append("a", 2, expected=1)).last == 2  # its head is cached
    with pytest.raises(Unavailable):
        await rig.append("c", 1)
    rig.store_faults.heal()
    assert await rig.journal.pointer("c") is None
    assert await rig.read("b") == [1]


async def test_an_error_in_append_many_is_at_the_index_of_its_append(rig: Rig) -> None:
    from tidebook.core.event import Event

    rig.log_faults.fail("send", Unavailable("the log is down"), where=lambda record, _: record.key == b"b")
    done = await rig.journal.append_many([(id, [Event(id)]) for id in "abc"])
    assert [type(each).__name__ for each in done] == ["Appended", "Unavailable", "Appended"]


async def test_appends_with_a_known_outcome_are_not_kept_in_memory(rig: Rig) -> None:
    await rig.append("a", 1)
    with pytest.raises(Conflict):
        await rig.append("a", 1, expected=0)
    rig.log_faults.fail("send", Unavailable("x"))
    with pytest.raises(Unavailable):
        await rig.append("a", 1)
    assert rig.journal._open is not None
    assert rig.journal._open.partitions[0].cache.pending_outcomes == {}


async def test_unconfirmed_appends_are_not_kept_in_memory_where_only_some_partitions_have_a_tail(
    open_rig: OpenRig,
) -> None:
    from tidebook.core.event import Event

    rig = open_rig(partitions=8)
    await rig.append("a", 1)  # confirmed: its partition has a tail from now on
    ids = [f"j-{n}" for n in range(100)]
    done = await rig.journal.append_many([(id, [Event(id)]) for id in ids], confirm=False)
    assert {type(each).__name__ for each in done} == {"Appended"}
    assert rig.journal._open is not None
    caches = [partition.cache for partition in rig.journal._open.partitions]
    assert any(cache.next_offset >= 0 for cache in caches)
    assert any(cache.next_offset < 0 for cache in caches)
    assert [cache.pending_outcomes for cache in caches] == [{}] * 8


async def test_the_config_of_a_topic_is_read_once(rig: Rig) -> None:
    await asyncio.gather(*(rig.append("a", i) for i in range(5)))
    assert rig.store_faults.calls["topic_config"] == 1
    assert (await rig.store.topics()) == [TOPIC]

"""The tail of a partition: where it begins and ends, how long it is followed, and which records it drops."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.unit.journal.rig import TOPIC, Rig
from tests.unit.journal.test_head_cache import newer_record
from tidebook.core.action import Mark
from tidebook.core.errors import Corrupt, Fenced, LogLost, Unavailable, UnknownVersion
from tidebook.core.fold import AppendApplied
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import Pointer, SliceWrites
from tidebook.journal import head_cache
from tidebook.journal.head_cache import HeadCache
from tidebook.journal.view import ReadView, ViewBase

OpenRig = Callable[..., Rig]
kafka_only = pytest.mark.parametrize("kind", ["like kafka"])
indexed_only = pytest.mark.parametrize("kind", ["indexed"])


async def cache_of(rig: Rig) -> HeadCache:
    await rig.journal.create()
    assert rig.journal._open is not None
    return rig.journal._open.partitions[0].cache


async def let_tasks_run(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class FakeTime(SimpleNamespace):
    """The module `time`, at a time that the test sets."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(head_cache, "time", fake)
    return fake


# ---- where a tail begins


async def test_concurrent_first_calls_begin_the_tail_once(rig: Rig) -> None:
    cache = await cache_of(rig)
    call = "end" if rig.kind == "indexed" else "pointer"
    faults = rig.log_faults if rig.kind == "indexed" else rig.store_faults
    faults.calls.clear()
    held = faults.hold(call)
    begins = [asyncio.create_task(cache.begin()) for _ in range(2)]
    await held.reached()
    await let_tasks_run()
    held.release()
    await asyncio.gather(*begins)
    await cache.begin()
    assert cache.next_offset == 0
    assert faults.calls[call] == 1


async def test_a_tail_that_begins_before_the_end_of_the_log_keeps_the_greatest_offset_seen(open_rig: OpenRig) -> None:
    """The greatest offset seen proves that a log was recreated; a lower one would miss some cases."""
    rig = open_rig()
    for number in range(3):
        await rig.append("a", number)
    late = open_rig()
    cache = await cache_of(late)
    seen = cache.seen
    assert seen == rig.first_offset + 2
    await cache.begin()
    assert cache.seen == seen
    assert cache.next_offset == (seen + 1 if late.kind == "indexed" else 0)


async def test_a_tail_that_begins_after_the_greatest_offset_seen_raises_it(open_rig: OpenRig) -> None:
    rig, other = open_rig(), open_rig()
    cache = await cache_of(rig)
    await other.append("a", 1)
    await other.append("a", 2)
    await other.replicate()
    await cache.begin()
    assert (cache.next_offset, cache.seen) == (rig.first_offset + 2, rig.first_offset + 1)


# ---- how far a tail has been read


@indexed_only
@pytest.mark.parametrize(("missing", "reads"), [(3, 1), (4, 0)])
async def test_a_tail_far_before_the_end_of_an_indexed_log_is_restarted_instead_of_read(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch, missing: int, reads: int
) -> None:
    monkeypatch.setattr(head_cache, "CATCH_UP_RECORDS_MAX", 3)
    rig, other = open_rig(), open_rig()
    cache = await cache_of(rig)
    await rig.append("a", 0)
    for number in range(missing):
        await other.append("a", number + 1)
    rig.log_faults.calls.clear()
    last = cache.next_offset + missing - 1
    await cache.reach(last)
    assert rig.log_faults.calls["read"] == reads
    assert rig.metrics.counted("head_cache_reset") == (reads == 0)
    assert ("a" in cache.heads) is (reads == 1)
    assert (cache.next_offset, cache.seen) == (last + 1, last)
    await cache.reach(last)
    assert rig.log_faults.calls["read"] == reads


@kafka_only
async def test_records_that_the_tail_has_not_taken_are_read_from_the_log(open_rig: OpenRig) -> None:
    rig, other = open_rig(), open_rig()
    await rig.append("a", 1)
    cache = await cache_of(rig)
    await other.append("a", 2)
    key, to = Key(TOPIC, "a"), cache.next_offset
    for reached, from_log in ((to - 1, 0), (to, 1)):
        view = ReadView(ViewBase(None, -1), cache.config)
        before = rig.metrics.counted("tail_read_from_log")
        await cache.fold_tail(key, view, reached)
        assert view.head is not None
        assert (view.as_of, view.head.seq_nr) == (reached, reached - rig.first_offset + 1)
        assert rig.metrics.counted("tail_read_from_log") - before == from_log


@kafka_only
async def test_a_view_past_the_tail_does_not_search_it(rig: Rig) -> None:
    await rig.append("a", 1)
    cache = await cache_of(rig)
    rig.log_faults.calls.clear()
    view = ReadView(ViewBase(None, 7), cache.config)
    await cache.fold_tail(Key(TOPIC, "a"), view, 7)
    await cache.fold_tail(Key(TOPIC, "a"), view, 5)
    assert (view.as_of, rig.log_faults.calls["read"], rig.metrics.counted("tail_read_from_log")) == (7, 0, 0)


@pytest.mark.parametrize("id", [None, "b"], ids=["a mark", "another journal"])
async def test_a_record_of_a_newer_epoch_stops_the_tail_every_time(open_rig: OpenRig, id: str | None) -> None:
    """Otherwise an append after it would be confirmed although it is void."""
    rig = open_rig()
    await rig.append("a", 1)
    if id is not None:
        await rig.append(id, 1)
    cache = await cache_of(rig)
    before = cache.next_offset
    sent = await rig.write(id, Mark(2))
    for _ in range(2):
        with pytest.raises(Fenced):
            await cache.reach(sent.offset)
        assert cache.next_offset == before


async def test_a_record_of_a_newer_format_stops_the_tail_although_its_journal_is_not_known(rig: Rig) -> None:
    await rig.append("a", 1)
    cache = await cache_of(rig)
    before = cache.next_offset
    sent = await rig.write_raw(b"unknown", newer_record())
    with pytest.raises(UnknownVersion):
        await cache.reach(sent.offset)
    assert (cache.next_offset, cache.seen) == (before, before - 1)


@kafka_only
async def test_a_single_record_that_is_truncated_before_its_replication_is_a_loss(open_rig: OpenRig) -> None:
    rig = open_rig(follow_s=0)
    await rig.append("a", 1)
    cache = await cache_of(rig)
    await rig.write("b", Mark(1))
    await rig.replicate()  # the store is now ahead of the tail
    await rig.write("b", Mark(1))
    last = (await rig.write("b", Mark(1))).offset
    await rig.log.truncate(TOPIC, 0, before=last)
    with pytest.raises(LogLost):
        await cache.reach(last, follow=False)
    assert "a" in cache.heads, "a loss does not move the tail"
    await rig.store.apply(
        SliceWrites(TOPIC, 0, await rig.store.pointer(TOPIC, 0), Pointer(Position(1, last - 1), 0), ())
    )
    await cache.reach(last, follow=False)
    assert (cache.next_offset, cache.tail_start) == (last + 1, last)


# ---- how long a tail is followed


async def test_a_follower_starts_after_two_records_of_other_writers_within_the_time_and_not_after_one(
    open_rig: OpenRig, clock: FakeTime
) -> None:
    rig = open_rig(follow_s=60)
    cache = await cache_of(rig)
    assert not cache.note_competing_writer()
    clock.now_s += 59
    assert cache.note_competing_writer()
    clock.now_s += 60
    assert not cache.note_competing_writer()


@kafka_only
async def test_an_appender_follows_the_log_from_the_second_record_of_a_competitor_on(open_rig: OpenRig) -> None:
    rig, other = open_rig(), open_rig()
    await rig.journal.create()
    await rig.replicate()  # the mark of the new topic, which would count as a competitor's record
    await rig.append("a", 0)
    for number in range(1, 3):
        await other.append("a", "other")
        rig.log_faults.calls.clear()
        await rig.append("a", number)
        await let_tasks_run()
        assert (rig.log_faults.calls["wait"] > 0) is (number == 2)


@kafka_only
async def test_a_read_starts_a_follower_which_reads_what_others_write(open_rig: OpenRig) -> None:
    rig, other = open_rig(), open_rig()
    await other.append("a", 1)
    assert await rig.read("a") == [1]
    cache = await cache_of(rig)
    await let_tasks_run()
    taken = rig.log_faults.hold("read", after=True)
    await other.append("a", 2)
    await asyncio.wait_for(taken.reached(), 30)
    taken.release()
    last = await other.log.end(TOPIC, 0) - 1
    while cache.next_offset <= last:  # noqa: ASYNC110 - the follower has read it
        await asyncio.sleep(0)
    rig.log_faults.calls.clear()
    await cache.reach(last)
    assert rig.log_faults.calls["read"] == 0


@kafka_only
async def test_records_of_this_process_are_not_read_again_by_its_follower(open_rig: OpenRig) -> None:
    rig, other = open_rig(), open_rig()
    await other.append("a", 1)
    assert await rig.read("a") == [1]
    held = rig.log_faults.hold("wait", after=True)
    await rig.append("a", 2)
    await asyncio.wait_for(held.reached(), 30)
    rig.log_faults.calls.clear()
    held.release()
    await let_tasks_run()
    assert (rig.log_faults.calls["read"], rig.log_faults.calls["end"]) == (0, 0)


@kafka_only
@pytest.mark.parametrize(("idle_s", "follows"), [(59.0, True), (60.0, False)])
async def test_a_partition_is_followed_for_a_while_after_its_last_use(
    open_rig: OpenRig, clock: FakeTime, monkeypatch: pytest.MonkeyPatch, idle_s: float, follows: bool
) -> None:
    monkeypatch.setattr(head_cache, "DROP_INTERVAL_S", 0.001)
    rig, other = open_rig(follow_s=60), open_rig()
    await other.append("a", 1)
    cache = await cache_of(rig)
    held = rig.log_faults.hold("wait", after=True)
    await cache.reach(await other.log.end(TOPIC, 0) - 1)
    await held.reached()
    rig.log_faults.calls.clear()
    clock.now_s += idle_s
    held.release()
    await let_tasks_run()
    assert (rig.log_faults.calls["wait"] > 0) is follows
    await rig.journal.close()


# ---- which records a tail drops


@kafka_only
@pytest.mark.parametrize(("elapsed_s", "drops"), [(5.0, False), (5.1, True)])
async def test_a_follower_drops_replicated_records_every_few_seconds(
    open_rig: OpenRig, clock: FakeTime, elapsed_s: float, drops: bool
) -> None:
    rig, other = open_rig(), open_rig()
    for number in range(3):
        await other.append("a", number)
    cache = await cache_of(rig)
    held = rig.log_faults.hold("wait", after=True)
    last = await other.log.end(TOPIC, 0) - 1
    await cache.reach(last)
    await other.replicate()
    await other.append("b", "wakes the follower")
    await held.reached()
    clock.now_s += elapsed_s
    rig.store_faults.calls.clear()
    dropping = rig.store_faults.hold("pointer", after=True)
    held.release()
    if drops:
        await dropping.reached()
        dropping.release()
    await let_tasks_run()
    assert cache.tail_start == (last + 1 if drops else 0)
    assert (rig.store_faults.calls["pointer"] > 0) is drops
    await let_tasks_run()
    assert rig.store_faults.calls["pointer"] == drops
    dropping.release()


@kafka_only
async def test_the_last_replicated_record_is_dropped_too_and_nothing_after_it(open_rig: OpenRig) -> None:
    rig = open_rig()
    await rig.append("a", 1)
    await rig.append("a", 2)
    cache = await cache_of(rig)
    await rig.replicate(batch_records=1, batches_max=1)
    replicated = await cache.replicated()
    await cache._drop_replicated()
    assert cache.tail_start == replicated + 1
    await rig.replicate(batch_records=1, batches_max=1)
    await cache._drop_replicated()
    assert cache.tail_start == replicated + 2


# ---- the cached pointer of the store


@kafka_only
@pytest.mark.parametrize(("age_s", "reads"), [(1.0, 0), (1.1, 1)])
async def test_a_pointer_is_recent_for_a_second(open_rig: OpenRig, clock: FakeTime, age_s: float, reads: int) -> None:
    rig = open_rig()
    await rig.append("a", 1)
    await rig.replicate()
    cache = await cache_of(rig)
    known = await cache.pointer()
    rig.store_faults.calls.clear()
    clock.now_s += age_s
    assert await cache.recent_pointer() == known
    assert rig.store_faults.calls["pointer"] == reads


@kafka_only
async def test_a_pointer_from_before_the_tail_is_read_again(open_rig: OpenRig, clock: FakeTime) -> None:
    """The records between that pointer and the tail would be missing."""
    rig = open_rig()
    for number in range(4):
        await rig.append("a", number)
    cache = await cache_of(rig)
    await rig.replicate(batch_records=2, batches_max=1)
    known = await cache.pointer()
    assert known is not None
    rig.store_faults.calls.clear()
    cache._unreplicated.drop_below(known.position.offset + 1)
    assert await cache.recent_pointer() == known
    assert rig.store_faults.calls["pointer"] == 0
    cache._unreplicated.drop_below(known.position.offset + 2)
    assert await cache.recent_pointer() == known
    assert rig.store_faults.calls["pointer"] == 1


async def test_there_is_no_recent_pointer_if_nothing_is_replicated(rig: Rig) -> None:
    cache = await cache_of(rig)
    assert await cache.recent_pointer() is None
    assert await cache.replicated() == -1


# ---- heads


async def test_the_least_recently_used_head_is_evicted_first(open_rig: OpenRig) -> None:
    rig = open_rig(cached_heads_max=2)
    cache = await cache_of(rig)
    await rig.append("a", 1)
    await rig.append("b", 1)
    assert (await cache.head("a")) is not None
    await rig.append("c", 1)
    assert list(cache.heads) == ["a", "c"]


@kafka_only
async def test_calls_that_need_the_same_head_resolve_it_once(open_rig: OpenRig) -> None:
    rig = open_rig()
    cache = await cache_of(rig)
    rig.store_faults.calls.clear()
    held = rig.store_faults.hold("head")
    waiting = [asyncio.create_task(cache.head("a")) for _ in range(3)]
    await held.reached()
    await let_tasks_run()
    held.release()
    assert await asyncio.gather(*waiting) == [None] * 3
    assert rig.store_faults.calls["head"] == 1
    assert cache._resolving == {}


@kafka_only
async def test_a_head_that_a_read_folded_is_cached_only_if_nothing_followed_it(open_rig: OpenRig) -> None:
    rig = open_rig()
    await rig.append("a", 1)
    await rig.append("b", 1)
    cache = await cache_of(rig)
    head = cache.heads["a"]
    end = cache.next_offset
    for as_of, kept in ((end - 1, True), (end, True), (end - 2, True), (end - 3, False)):
        cache.heads.clear()
        cache.remember_head("a", head, as_of)
        assert ("a" in cache.heads) is kept, as_of
    cache.heads.clear()
    cache.heads.keep("a", head)
    cache.remember_head("a", None, end)
    assert cache.heads["a"] is head


async def test_a_head_is_not_kept_before_the_tail_has_begun(rig: Rig) -> None:
    cache = await cache_of(rig)
    cache.remember_head("a", None, 5)
    assert "a" not in cache.heads
    assert cache.base("a") is None
    await cache.begin()
    cache.remember_head("a", None, 5)
    assert cache.base("a") == ViewBase(None, cache.next_offset - 1)


async def test_a_head_from_the_store_that_is_past_the_tail_is_as_of_its_own_position(open_rig: OpenRig) -> None:
    rig, other = open_rig(), open_rig()
    await rig.append("b", 1)
    cache = await cache_of(rig)
    for number in range(3):
        await other.append("a", number)
    await other.replicate()
    head = await cache.head("a")
    assert head is not None
    base = cache.base("a")
    assert base == ViewBase(head, head.position.offset)
    assert base.as_of > cache.next_offset - 1


async def test_the_outcome_of_an_append_is_that_of_its_own_attempt(rig: Rig) -> None:
    cache = await cache_of(rig)
    await rig.append("a", 1)
    assert cache.outcome(b"x" * 16, 0) is None
    cache.pending_outcomes[b"x" * 16] = None
    assert cache.outcome(b"x" * 16, 0) is None
    change = AppendApplied(3, 4, 2)
    cache.pending_outcomes[b"x" * 16] = (5, change)
    assert cache.outcome(b"x" * 16, 5) is change
    assert cache.outcome(b"x" * 16, 6) is None


async def test_a_closed_cache_sends_no_more_requests(rig: Rig) -> None:
    await rig.append("a", 1)
    cache = await cache_of(rig)
    await cache.close()
    await cache.reach(cache.next_offset - 1)
    with pytest.raises(Unavailable, match="closed"):
        await cache.reach(cache.next_offset)


async def test_a_pointer_of_a_newer_epoch_is_refused_and_not_remembered(rig: Rig) -> None:
    await rig.append("a", 1)
    cache = await cache_of(rig)
    await rig.store.apply(SliceWrites(TOPIC, 0, None, Pointer(Position(2, 5), 0), ()))
    for _ in range(2):
        with pytest.raises(Fenced):
            await cache.pointer()
        assert cache.known_pointer is None or cache.known_pointer.position.epoch == 1


async def test_a_tail_that_was_never_used_begins_after_the_pointer(open_rig: OpenRig) -> None:
    """Replicated records are not read from the log again."""
    rig = open_rig()
    for number in range(3):
        await rig.append("a", number)
    await rig.replicate()
    late = open_rig()
    cache = await cache_of(late)
    end = await late.log.end(TOPIC, 0)
    await cache.reach(end - 1)
    assert (cache.next_offset, cache.tail_start) == (end, end)
    assert late.log_faults.calls["read"] == 0


@kafka_only
async def test_a_caller_that_is_cancelled_while_the_cache_is_closed_is_cancelled(rig: Rig) -> None:
    cache = await cache_of(rig)
    held = rig.store_faults.hold("head")
    waiting = asyncio.create_task(cache.head("a"))
    await held.reached()
    shared = cache._resolving["a"]
    shared.add_done_callback(lambda _: waiting.cancel())
    shared.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_closing_returns_when_the_tasks_of_the_cache_have_ended(rig: Rig) -> None:
    cache = await cache_of(rig)
    ended = False

    async def work() -> None:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            await let_tasks_run()
            ended = True

    cache._reach_task = asyncio.create_task(work())
    await asyncio.sleep(0)
    await cache.close()
    assert ended


async def test_a_cached_head_of_a_recreated_log_is_not_returned(rig: Rig) -> None:
    await rig.append("a", 1)
    cache = await cache_of(rig)
    assert cache.is_recreated(0, 5)
    with pytest.raises(Corrupt):
        await cache.head("a")


async def test_a_tail_is_read_up_to_the_requested_offset(open_rig: OpenRig) -> None:
    rig, other = open_rig(), open_rig()
    await rig.append("a", 0)
    cache = await cache_of(rig)
    before = cache.next_offset
    for number in range(3):
        await other.append("a", number)
    for offset in range(before, before + 3):
        await cache.reach(offset, follow=False)
        assert (cache.next_offset, cache.seen) == (offset + 1, offset)


@kafka_only
async def test_a_failed_read_of_the_tail_that_is_not_awaited_raises_nowhere(open_rig: OpenRig) -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    rig = open_rig(follow_s=0)
    await rig.append("a", 1)
    cache = await cache_of(rig)
    last = (await rig.write(None, Mark(1))).offset
    held = rig.log_faults.hold("read")
    rig.log_faults._faults["read"][-1].error = Unavailable("the log is down")
    leaving = asyncio.create_task(cache.reach(last, follow=False))
    await held.reached()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    held.release()
    await let_tasks_run()
    rig.log_faults.heal()
    await cache.reach(last, follow=False)  # replaces the task that failed
    gc.collect()
    await let_tasks_run()
    assert reported == []

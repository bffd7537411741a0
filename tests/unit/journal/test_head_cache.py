"""The head cache: exact as of its tail, bounded, and never the only copy; damaged records do not stall it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from zlib import crc32

import pytest

from tests.unit.journal.rig import TOPIC, Rig
from tidebook.core.action import Mark
from tidebook.core.errors import Conflict, Fenced, LogLost, UnknownVersion
from tidebook.core.event import Event
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.record import MAGIC, VERSION
from tidebook.core.replication_plan import Pointer, SliceWrites
from tidebook.testing.action_histories import append, placed_at

OpenRig = Callable[..., Rig]


def newer_record() -> bytes:
    rest = b"whatever a newer version holds"
    return bytes([MAGIC, VERSION + 1]) + crc32(bytes([VERSION + 1]) + rest).to_bytes(4, "big") + rest


# ---- outcomes without extra reads


async def test_the_outcome_of_an_undisturbed_append_is_known_at_its_acknowledgement(rig: Rig) -> None:
    await rig.append("a", 1)
    rig.log_faults.calls.clear()
    rig.store_faults.calls.clear()
    for number in range(2, 6):
        assert (await rig.append("a", number, expected=number - 1)).last == number
    assert rig.log_faults.calls == {"send": 4}
    assert not rig.store_faults.calls


async def test_an_append_after_another_writers_append_reads_only_the_records_between(open_rig: OpenRig) -> None:
    one, other = open_rig(), open_rig()
    await one.append("a", 1)
    await other.append("a", 2)
    one.store_faults.calls.clear()
    with pytest.raises(Conflict) as caught:
        await one.append("a", "lost", expected=1)
    assert caught.value.found == 2
    assert one.store_faults.calls["head"] == 0


async def test_a_head_from_the_store_that_is_past_the_tail_is_not_folded_again(open_rig: OpenRig) -> None:
    """A second fold would recognize an append by its id, but a purge would remove the next incarnation."""
    one, other = open_rig(), open_rig()
    await one.append("b", "the tail begins")
    await other.append("a", "old")
    await other.journal.purge("a")
    await other.append("a", 1, 2)
    await other.replicate()
    assert (await one.append("a", 3)).last == 3
    assert await one.journal.pointer("a") == 3
    assert await one.read("a") == [1, 2, 3]


@pytest.mark.parametrize("kind", ["indexed"])  # on other logs a mark always follows the pointer
async def test_a_replicated_journal_is_read_without_the_log(rig: Rig) -> None:
    await rig.append("a", 1, 2, 3)
    await rig.replicate()
    rig.log_faults.calls.clear()
    assert await rig.read("a") == [1, 2, 3]
    assert rig.log_faults.calls["read"] == 0
    assert rig.metrics.counted("read_store_only") == 1


@pytest.mark.parametrize("kind", ["like kafka"])
async def test_the_first_read_of_a_replicated_journal_does_not_read_its_own_mark_from_the_log(
    open_rig: OpenRig,
) -> None:
    rig = open_rig()
    await rig.append("a", 1, 2, 3)
    await rig.replicate()
    cold = open_rig()
    assert await cold.read("a") == [1, 2, 3]
    assert await cold.journal.pointer("a") == 3
    assert (cold.log_faults.calls["send"], cold.log_faults.calls["read"], cold.log_faults.calls["wait"]) == (2, 0, 0)


@pytest.mark.parametrize("kind", ["like kafka"])  # an indexed log is read by key instead
async def test_a_known_tail_is_read_without_the_log(open_rig: OpenRig) -> None:
    rig = open_rig(follow_s=0)
    await rig.append("a", 1, 2, 3)
    rig.log_faults.calls.clear()
    assert await rig.read("a") == [1, 2, 3]
    assert rig.log_faults.calls["read"] == 0


@pytest.mark.parametrize("kind", ["like kafka"])
async def test_a_second_read_of_a_replicated_journal_requests_only_its_rows_from_the_store(open_rig: OpenRig) -> None:
    rig = open_rig()
    await rig.append("a", 1, 2, 3)
    await rig.replicate()
    reader = open_rig()
    assert await reader.read("a") == [1, 2, 3]
    reader.store_faults.calls.clear()
    assert await reader.read("a") == [1, 2, 3]
    assert set(reader.store_faults.calls) == {"events"}
    assert reader.metrics.counted("read_head_cached") == 1


@pytest.mark.parametrize("kind", ["like kafka"])
@pytest.mark.parametrize("replicated", [True, False])
async def test_a_second_read_includes_what_others_wrote_since_the_first(open_rig: OpenRig, replicated: bool) -> None:
    other, reader = open_rig(), open_rig()
    await other.append("a", 1, 2, 3)
    await other.replicate()

    async def reads(*payloads: int) -> None:
        if replicated:
            await other.replicate()
        for _ in range(2):
            assert await reader.read("a") == list(payloads)

    await reads(1, 2, 3)
    await other.append("a", 4)
    await reads(1, 2, 3, 4)
    await other.journal.delete("a", to=2)
    await reads(3, 4)
    await other.journal.purge("a")
    await reads()
    await other.append("a", 5, 6)
    await reads(5, 6)


@pytest.mark.parametrize("kind", ["like kafka"])
@pytest.mark.parametrize("next_call", ["mark", "offset", "pointer", "expected", "next"])
async def test_a_head_that_was_read_before_the_tail_began_is_not_taken_for_one_of_the_tail(
    open_rig: OpenRig, next_call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidebook.journal.head_cache.RECENT_S_MAX", 0)
    other, reader = open_rig(), open_rig()
    await other.append("a", 1, 2, 3)
    await other.replicate()
    assert await reader.read("a", barrier="offset") == [1, 2, 3]
    await other.append("a", 4)
    await other.replicate()
    match next_call:
        case "pointer":
            assert await reader.journal.pointer("a") == 4
        case "expected":
            assert (await reader.append("a", 5, expected=4)).last == 5
        case "next":
            assert (await reader.append("a", 5)).last == 5
        case barrier:
            assert await reader.read("a", barrier=barrier) == [1, 2, 3, 4]


# ---- bounds


@pytest.mark.parametrize(
    "bounds",
    [
        {"cached_heads_max": 1},
        {"cached_head_bytes_max": 1},
        {"cached_bytes_max": 1},
        {"cached_offsets_max": 2},
        {"tail_bytes_max": 1},
        {"cached_heads_max": 1, "cached_bytes_max": 1, "cached_offsets_max": 2, "tail_bytes_max": 1},
    ],
    ids=lambda bounds: "+".join(bounds),
)
async def test_a_cache_past_its_bounds_does_not_change_any_result(open_rig: OpenRig, bounds: dict[str, int]) -> None:
    rig = open_rig(**bounds)
    for i in range(6):
        for id in ("a", "b", "c"):
            assert (await rig.append(id, f"{id}{i}", expected=i)).last == i + 1
        if i == 2:
            await rig.replicate(batch_records=4)
    for id in ("a", "b", "c"):
        assert await rig.read(id) == [f"{id}{i}" for i in range(6)]
        assert await rig.read(id, start=3, end=5) == [f"{id}{i}" for i in range(2, 5)]
        assert await rig.journal.pointer(id) == 6


async def test_heads_are_evicted_by_their_bytes_and_read_again(open_rig: OpenRig) -> None:
    rig = open_rig(cached_head_bytes_max=30_000)
    for turn in range(1, 4):
        for id in ("a", "b", "c"):
            tagged = [Event(turn, tags={f"{turn} {number}"}) for number in range(50)]
            assert (await rig.journal.append(id, tagged)).last == 50 * turn
    # They are small at first and each is read once; from the third round on, any two of them exceed the bound.
    assert rig.metrics.counted("head_cache_resolved") > 3
    assert await rig.read("a") == [turn for turn in (1, 2, 3) for _ in range(50)]


async def test_a_tail_too_long_to_hold_is_read_twice_with_the_same_result(open_rig: OpenRig) -> None:
    rig = open_rig(tail_bytes_max=10)
    await rig.append("a", "old", "older")
    await rig.replicate()
    await rig.append("a", "x" * 20)
    await rig.journal.purge("a")
    for i in range(4):
        await rig.append("a", f"new {i}")
    assert await rig.read("a") == [f"new {i}" for i in range(4)]
    assert rig.metrics.counted("read_tail_retried") == 1


async def test_a_tail_truncated_during_its_second_pass_continues_from_the_store(open_rig: OpenRig) -> None:
    rig = open_rig(tail_bytes_max=1)
    for i in range(6):
        await rig.append("a", i)
    reading = rig.journal.read("a")
    rig.log_faults.fail(
        "read", LogLost(topic=TOPIC, partition=0, first=0, last=5), where=lambda *_, start, stop, **__: start == 0
    )
    await rig.replicate()
    await rig.append("a", "later")
    assert [event.payload async for event in reading][:6] == [0, 1, 2, 3, 4, 5]


async def test_heads_stay_exact_after_many_writes_of_others(open_rig: OpenRig) -> None:
    one, other = open_rig(), open_rig()
    await one.append("a", 1)
    for _ in range(3):
        await other.journal.append_many([(f"k{i}", [Event(i)]) for i in range(800)], confirm=False)
    await other.append("a", 2)
    assert (await one.append("a", 3, expected=2)).last == 3
    assert await one.read("a") == [1, 2, 3]


# ---- damaged and newer records


@pytest.mark.parametrize("value", [b"", b"poison", b"\x7b\x01....", b"\x00" * 100], ids=repr)
async def test_a_damaged_record_of_this_journal_is_void_and_stalls_no_call(rig: Rig, value: bytes) -> None:
    await rig.append("a", 1)
    await rig.write_raw(b"a", value)
    await rig.append("a", 2, expected=1)
    assert await rig.read("a") == [1, 2]
    await rig.replicate()
    assert await rig.read("a") == [1, 2]
    assert [parked.id async for parked in rig.store.parked(TOPIC)] == ["a"]


@pytest.mark.parametrize("key", [b"\xff\xfe", b"", b"a\x00b", b"x" * 2000], ids=lambda key: repr(key)[:20])
async def test_a_record_whose_key_names_no_journal_stalls_no_call(rig: Rig, key: bytes) -> None:
    await rig.append("a", 1)
    await rig.write_raw(key, b"poison")
    await rig.append("a", 2)
    assert [id async for id in rig.journal.ids()] == ["a"]
    assert await rig.read("a") == [1, 2]
    await rig.replicate()
    assert [id async for id in rig.journal.ids()] == ["a"]


async def test_a_record_over_the_topics_limit_is_void_for_every_reader(open_rig: OpenRig) -> None:
    rig = open_rig(limit_bytes=300)
    await rig.make_topic()
    await rig.append("a", 1)
    await rig.write("a", placed_at(append(100), 99))
    assert await rig.read("a") == [1]
    assert (await rig.append("a", 2, expected=1)).last == 2
    await rig.replicate()
    assert await rig.read("a") == [1, 2]


async def test_a_newer_record_fails_every_call_of_its_journal(rig: Rig) -> None:
    await rig.append("a", 1)
    await rig.write_raw(b"a", newer_record())
    for _ in range(3):
        with pytest.raises(UnknownVersion):
            await rig.journal.pointer("a")
        with pytest.raises(UnknownVersion):
            await rig.read("a")


async def test_a_newer_record_is_not_void_for_a_process_with_a_cached_head(rig: Rig) -> None:
    await rig.append("a", 1)
    await rig.write_raw(b"a", newer_record())
    with pytest.raises(Exception, match="version"):
        await rig.append("a", 2)
    with pytest.raises(Exception, match="version"):
        await rig.append("a", 3)
    with pytest.raises(UnknownVersion):
        await rig.journal.pointer("a")


async def test_replication_stops_before_a_newer_record_and_applies_those_before_it(rig: Rig) -> None:
    await rig.append("a", 1)
    sent = await rig.write_raw(b"b", newer_record())
    with pytest.raises(UnknownVersion):
        await rig.replicate()
    pointer = await rig.store.pointer(TOPIC, 0)
    assert pointer is not None
    assert pointer.position.offset == sent.offset - 1


# ---- retention


async def test_a_log_truncated_after_replication_loses_nothing(open_rig: OpenRig) -> None:
    rig = open_rig()
    await rig.append("a", 1, 2)
    await rig.replicate()
    await rig.truncate()
    for fresh in (rig, open_rig()):
        assert await fresh.read("a") == [1, 2]
        assert await fresh.journal.pointer("a") == 2
        assert [id async for id in fresh.journal.ids()] == ["a"]
    assert (await rig.append("a", 3, expected=2)).last == 3
    assert await open_rig().read("a") == [1, 2, 3]


async def test_a_read_starts_over_if_the_log_is_truncated_after_it_read_the_pointer(rig: Rig) -> None:
    """Everything was replicated and truncated after the pointer was read: nothing is lost."""
    await rig.append("a", 1, 2)
    fresh = rig.store_faults.hold("head", after=True)
    reading = _spawn(rig.read("a"))
    await fresh.reached()
    await rig.replicate()
    await rig.truncate()
    fresh.release()
    assert await reading == [1, 2]


async def test_a_head_resolved_while_the_log_is_truncated_is_read_again(open_rig: OpenRig) -> None:
    rig, late = open_rig(), open_rig()
    await rig.append("a", 1, 2)
    held = late.store_faults.hold("head", after=True)
    asking = _spawn(late.journal.pointer("a"))
    await held.reached()
    await rig.replicate()
    await rig.truncate()
    held.release()
    assert await asking == 2


async def test_a_log_truncated_before_replication_raises_with_the_lost_range(open_rig: OpenRig) -> None:
    rig = open_rig()
    await rig.append("a", 1)
    await rig.replicate()
    await rig.append("a", 2)
    await rig.append("a", 3)
    await rig.truncate()
    with pytest.raises(LogLost) as caught:
        await rig.replicate()
    assert (caught.value.topic, caught.value.partition) == (TOPIC, 0)
    fresh = open_rig()
    for attempt in (fresh.read, fresh.journal.pointer, fresh.append):
        with pytest.raises(Exception, match="lost offsets"):
            await attempt("a", *(["x"] if attempt == fresh.append else []))


# ---- epochs


async def test_a_process_of_an_older_epoch_is_fenced(rig: Rig) -> None:
    await rig.append("a", 1)
    pointer = Pointer(Position(2, 5), 0)
    await rig.store.apply(SliceWrites(TOPIC, 0, None, pointer, ()))
    with pytest.raises(Fenced, match="epoch"):
        await rig.read("a")


async def test_a_misplaced_record_is_void_for_every_reader(open_rig: OpenRig) -> None:
    """Its key belongs to another partition: no reader reads it there, and no replicator applies it."""
    rig = open_rig(partitions=2)
    await rig.append("a", 1)
    config = await rig.journal.create()
    stranger = next(f"k{i}" for i in range(100) if crc32(f"k{i}".encode()) % config.partitions == 1)
    await rig.write(stranger, placed_at(append(), 1))
    assert await rig.journal.pointer(stranger) is None
    await rig.replicate()
    assert await rig.store.head(Key(TOPIC, stranger)) is None
    assert await rig.journal.pointer(stranger) is None


async def test_the_key_of_a_mark_is_ignored(rig: Rig) -> None:
    await rig.append("a", 1)
    await rig.write("a", Mark(1))
    await rig.append("a", 2, expected=1)
    await rig.replicate()
    assert await rig.read("a") == [1, 2]


T = TypeVar("T")


def _spawn(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    return asyncio.get_running_loop().create_task(work)


@pytest.mark.parametrize("kind", ["like kafka"])
async def test_two_concurrent_reads_of_a_truncated_tail_leave_no_gap(open_rig: OpenRig) -> None:
    """A reader and the follower both find the log truncated; the slower one must not move the tail back."""
    mine, other = open_rig(), open_rig()
    await mine.append("a", 0)
    for number in range(1, 4):
        await other.append("a", number)
    await mine.replicate()
    cut = await mine.log.end(TOPIC, 0)
    for number in range(4, 7):
        await other.append("a", number)
    await mine.log.truncate(TOPIC, 0, before=cut)
    slower, quicker = mine.log_faults.hold("read"), mine.log_faults.hold("read")
    reading = asyncio.create_task(mine.read("a"))
    await slower.reached()
    await quicker.reached()
    pointer = mine.store_faults.hold("pointer")
    slower.release()
    await pointer.reached()
    quicker.release()
    assert await reading == list(range(7))
    await other.append("a", 7)
    in_flight = mine.log_faults.hold("read", after=True)
    reading = asyncio.create_task(mine.read("a"))
    await in_flight.reached()
    again = mine.log_faults.hold("read", where=lambda *_, start, **__: start == cut)
    pointer.release()
    for _ in range(100):
        await asyncio.sleep(0)
    in_flight.release()
    assert await reading == list(range(8))
    again.release()
    assert await mine.read("a") == list(range(8))


@pytest.mark.parametrize("kind", ["like kafka"])
async def test_a_log_that_ends_before_the_tail_raises_instead_of_looping(rig: Rig) -> None:
    for number in range(4):
        await rig.append("a", number)
    await rig.replicate(batch_records=1, batches_max=2)
    rig.log_faults.fail("read", LogLost(topic=TOPIC, partition=0, first=1, last=3), times=None)
    await rig.write_raw(b"a", b"another's")
    with pytest.raises(LogLost):
        await asyncio.wait_for(rig.read("a"), 5)

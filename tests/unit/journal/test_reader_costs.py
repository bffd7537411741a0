"""The cost of a read: marks, views, prefetched rows, and tails that are read twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.journal.rig import Rig
from tidebook.core.action import Mark
from tidebook.core.errors import Unavailable
from tidebook.core.record import decode_record
from tidebook.journal import reader as readers
from tidebook.journal.settings import BarrierKind
from tidebook.log.port import Outgoing

OpenRig = Callable[..., Rig]
kafka_only = pytest.mark.parametrize("kind", ["like kafka"])


async def let_tasks_run(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def is_mark(record: Outgoing, *_: object) -> bool:
    return isinstance(decode_record(record.value), Mark)


@kafka_only
@pytest.mark.parametrize("barrier", ["mark", "offset"])
async def test_the_barrier_of_the_settings_is_used_unless_another_is_given(open_rig: OpenRig, barrier: str) -> None:
    rig: Rig = open_rig(barrier=barrier)
    await rig.append("a", 1)
    cases: list[tuple[BarrierKind | None, bool]] = [(None, barrier == "mark"), ("mark", True), ("offset", False)]
    for given, marks in cases:
        rig.log_faults.calls.clear()
        assert await rig.read("a", barrier=given) == [1]
        assert rig.log_faults.calls["send"] == marks
        rig.log_faults.calls.clear()
        assert await rig.journal.pointer("a", barrier=given) == 1
        assert rig.log_faults.calls["send"] == marks


async def test_a_read_that_ends_within_the_rows_of_the_store_does_not_read_a_tail_twice(open_rig: OpenRig) -> None:
    rig = open_rig(tail_bytes_max=1)
    await rig.append("a", 1, 2)
    await rig.replicate()
    await rig.append("a", "a long tail", "that is not kept")
    assert await rig.read("a", end=2) == [1, 2]
    assert rig.metrics.counted("read_tail_retried") == 0
    assert await rig.read("a", end=3) == [1, 2, "a long tail"]
    assert rig.metrics.counted("read_tail_retried") == 1


@kafka_only
async def test_the_sources_of_views_are_counted(open_rig: OpenRig) -> None:
    rig = open_rig()
    await rig.append("a", 1, 2)
    await rig.replicate()
    names = ("read_without_store", "read_head_cached", "read_store_only")

    async def counts(barrier: str) -> list[int]:
        before = [rig.metrics.counted(name) for name in names]
        assert await rig.read("a", barrier=barrier) == [1, 2]
        return [int(rig.metrics.counted(name) - was) for name, was in zip(names, before, strict=True)]

    assert await counts("mark") == [0, 1, 0]
    assert rig.journal._open is not None
    rig.journal._open.partitions[0].cache.heads.clear()
    assert await counts("mark") == [0, 0, 0], "the mark is after the pointer"
    await rig.replicate()
    rig.journal._open.partitions[0].cache.heads.clear()
    rig.journal._open.partitions[0].cache.known_pointer = None
    assert await counts("offset") == [0, 0, 1]
    fresh = open_rig()
    await fresh.append("b", 1)
    fresh.store_faults.fail("pointer", Unavailable("the store is down"), times=None)
    fresh.store_faults.fail("head", Unavailable("the store is down"), times=None)
    assert await fresh.read("b") == [1]
    assert fresh.metrics.counted("read_without_store") == 1


@kafka_only
@pytest.mark.parametrize("given", [{}, {"start": 3}, {"end": 4}, {"start": 1, "end": 3}], ids=str)
async def test_rows_of_a_known_journal_are_prefetched_while_the_mark_is_in_flight(
    open_rig: OpenRig, given: dict[str, int]
) -> None:
    rig = open_rig(page_events=10)
    await rig.append("a", *range(1, 6))
    await rig.journal.delete("a", to=1)
    await rig.replicate()
    expected = [number for number in range(2, 6) if given.get("start", 1) <= number <= given.get("end", 9)]
    assert await rig.read("a", **given) == expected
    rig.store_faults.calls.clear()
    discarded = rig.metrics.counted("read_rows_discarded")
    mark, rows = rig.log_faults.hold("send", where=is_mark), rig.store_faults.hold("events")
    reading = asyncio.create_task(rig.read("a", **given))
    await asyncio.wait_for(rows.reached(), 30)
    rows.release()
    await mark.reached()
    mark.release()
    assert await reading == expected
    assert rig.metrics.counted("read_rows_discarded") == discarded
    assert rig.store_faults.calls["events"] == 1


@kafka_only
@pytest.mark.parametrize("given", [{"start": 6}, {"end": 1}], ids=str)
async def test_no_rows_are_prefetched_for_a_known_journal_without_rows(
    open_rig: OpenRig, given: dict[str, int]
) -> None:
    rig = open_rig(page_events=10)
    await rig.append("a", *range(1, 6))
    await rig.journal.delete("a", to=1)
    await rig.replicate()
    for _ in range(2):
        assert await rig.read("a", **given) == []
    assert rig.store_faults.calls["events"] == 0


@kafka_only
async def test_rows_of_a_journal_with_gaps_are_not_prefetched(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "SPARSE_IDS_MAX", 2)
    rig = open_rig(page_events=4)
    for id in "abc":
        await rig.append(id, 1)
        await rig.append(id, 9, at=9)
    await rig.replicate()
    assert rig.journal._open is not None
    reader = rig.journal._open.partitions[0]
    for id, sparse in (("a", {"a"}), ("b", {"a", "b"}), ("c", {"c"})):
        assert await rig.read(id) == [1, 9]
        assert reader._sparse_ids == sparse
    mark = rig.log_faults.hold("send", where=is_mark)
    rig.store_faults.calls.clear()
    reading = asyncio.create_task(rig.read("c"))
    await mark.reached()
    await let_tasks_run()
    assert rig.store_faults.calls["events"] == 0
    mark.release()
    assert await reading == [1, 9]


@kafka_only
async def test_pages_after_the_first_are_requested_before_they_are_needed(open_rig: OpenRig) -> None:
    rig = open_rig(page_events=4, segment_size=1000)
    await rig.append("a", *range(40))
    await rig.replicate()
    fresh = open_rig(page_events=4, segment_size=1000)
    events = fresh.journal.read("a")
    assert (await anext(events)).payload == 0
    await let_tasks_run()
    assert fresh.store_faults.calls["events"] > 2
    assert [event.payload async for event in events] == list(range(1, 40))
    assert fresh.store_faults.calls["events"] <= 12


async def test_other_tasks_run_between_the_pages_of_a_read(open_rig: OpenRig) -> None:
    rig = open_rig(page_events=2)
    await rig.append("a", *range(20))
    await rig.replicate()
    read: list[Any] = []
    seen: set[int] = set()

    async def watch() -> None:
        while len(read) < 20:
            seen.add(len(read))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    async for event in rig.journal.read("a"):
        read.append(event.payload)
    await watching
    assert len(seen) > 5


@kafka_only
async def test_without_the_store_a_read_may_include_records_after_its_barrier(open_rig: OpenRig) -> None:
    rig = open_rig()
    await rig.append("a", 1)
    for call in ("pointer", "head"):
        rig.store_faults.fail(call, Unavailable("the store is down"), times=None)
    ended = rig.log_faults.hold("end", after=True)
    reading = asyncio.create_task(rig.read("a", barrier="offset"))
    await ended.reached()
    await rig.append("a", 2)
    ended.release()
    assert await reading == [1, 2]


@kafka_only
async def test_prefetched_rows_that_are_not_needed_are_counted(open_rig: OpenRig) -> None:
    rig, other = open_rig(page_events=10, follow_s=0), open_rig()
    await rig.append("a", 1, 2, 3)
    await rig.replicate()
    assert await rig.read("a") == [1, 2, 3]
    await other.journal.delete("a", to=3)
    await other.append("a", 4)
    assert rig.metrics.counted("read_rows_discarded") == 0
    assert await rig.read("a") == [4]
    assert rig.metrics.counted("read_rows_discarded") == 1


@kafka_only
async def test_a_read_whose_range_is_in_the_store_does_not_read_the_log(open_rig: OpenRig) -> None:
    rig, other = open_rig(follow_s=0), open_rig()
    await rig.append("b", "begins the tail")
    await other.append("a", 1)
    await other.replicate()
    rig.log_faults.calls.clear()
    assert await rig.read("a", barrier="offset") == [1]
    assert rig.log_faults.calls["read"] == 0


@kafka_only
async def test_the_next_mark_is_not_sent_before_the_one_in_flight_is_acknowledged(rig: Rig) -> None:
    await rig.append("a", 1)
    rig.log_faults.calls.clear()
    held = rig.log_faults.hold("send", where=is_mark)
    first = asyncio.create_task(rig.read("a"))
    await held.reached()
    second = asyncio.create_task(rig.read("a"))
    await let_tasks_run()
    assert rig.log_faults.calls["send"] == 1
    held.release()
    assert (await first, await second) == ([1], [1])
    assert rig.log_faults.calls["send"] == 2

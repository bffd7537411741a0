"""While the store is down, calls that need only the log succeed, others raise Unavailable, and all recover."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.unit.journal.rig import Rig
from tidebook.core.action import Mark
from tidebook.core.errors import Unavailable
from tidebook.core.event import Event
from tidebook.journal.outcome import Appended


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """Open a rig over a log like Kafka's: an embedded log and store are files of one machine and fail together."""
    rig = Rig(tmp_path, "like kafka")
    yield rig
    await rig.close()


def take_down(rig: Rig) -> None:
    for call in ("pointer", "head", "heads", "events", "topic_config"):
        rig.store_faults.fail(call, Unavailable("the store is down"), times=None)


async def test_unconfirmed_appends_succeed(rig: Rig) -> None:
    await rig.append("a", 1)
    take_down(rig)
    assert (await rig.append("new", 1, confirm=False)).offset > 0
    rig.store_faults.heal()
    assert await rig.read("new") == [1]


async def test_confirmed_appends_succeed_where_the_head_is_cached_and_fail_fast_where_it_is_not(rig: Rig) -> None:
    await rig.append("a", 1)
    take_down(rig)
    assert (await rig.append("a", 2)).last == 2
    with pytest.raises(Unavailable):
        await rig.append("new", 1)


async def test_a_journal_that_is_all_in_the_tail_is_read_without_the_store(rig: Rig) -> None:
    await rig.append("a", 1, 2)
    await rig.append("b", 9)
    await rig.journal.delete("a", to=1)
    await rig.append("a", 3)
    take_down(rig)
    assert await rig.read("a") == [2, 3]
    assert await rig.journal.pointer("a") == 3
    assert rig.metrics.counted("read_without_store") == 1


async def test_an_incarnation_that_began_in_the_tail_is_read_without_the_store(rig: Rig) -> None:
    await rig.append("a", 1)
    await rig.replicate()
    await rig.journal.purge("a")
    await rig.append("a", 5)
    take_down(rig)
    assert await rig.read("a") == [5]


async def test_a_journal_that_the_store_has_in_part_is_unavailable_until_the_store_is_back(rig: Rig) -> None:
    await rig.append("a", 1)
    await rig.replicate()
    other = await rig.append("a", 2)
    assert other.last == 2
    await rig.journal.close()  # a process that starts now reads the tail after the pointer
    await rig.read("a")
    take_down(rig)
    with pytest.raises(Unavailable):
        await rig.read("a")
    rig.store_faults.heal()
    assert await rig.read("a") == [1, 2]


async def test_a_retry_of_an_earlier_incarnation_is_void_even_without_the_store(rig: Rig) -> None:
    """The expected number matches again: only the append ids show that the retry added nothing."""
    await rig.append("a", "old", append_id=b"0123456789abcdef")
    await rig.replicate()
    await rig.journal.purge("a")
    await rig.append("a", "new")
    again = await rig.append("a", "old", append_id=b"0123456789abcdef")
    assert (again.first, again.last) == (1, 1)
    await rig.append("a", "last", at=10)
    assert await rig.read("a") == ["new", "last"]
    take_down(rig)
    assert await rig.read("a") == ["new", "last"]


async def test_of_many_confirmed_appends_those_with_cached_heads_succeed(rig: Rig) -> None:
    await rig.append("a", 1)
    take_down(rig)
    reported = await rig.journal.append_many([("new", [Event(1)]), ("a", [Event(2)]), ("newer", [Event(1)])])
    assert [type(each) for each in reported] == [Unavailable, Appended, Unavailable]
    assert isinstance(reported[1], Appended)
    assert reported[1].last == 2
    rig.store_faults.heal()
    assert await rig.read("new") == []


async def test_many_appends_do_not_wait_for_each_head_of_a_store_that_is_down(rig: Rig) -> None:
    await rig.append("a", 1)
    take_down(rig)
    rig.store_faults.calls.clear()
    reported = await rig.journal.append_many([(f"new {n}", [Event(1)]) for n in range(2000)])
    assert {type(each) for each in reported} == {Unavailable}
    assert rig.store_faults.calls["pointer"] <= 256


async def test_a_truncated_tail_is_unavailable_and_not_lost_while_the_store_is_down(tmp_path: Path) -> None:
    """It was replicated before it was truncated, which only the store knows."""
    rig = Rig(tmp_path, "like kafka", cached_bytes_max=1)
    try:
        await rig.append("a", 1)
        await rig.append("a", 2)
        await rig.replicate()
        await rig.truncate()
        await rig.write(None, Mark(1))
        take_down(rig)
        with pytest.raises(Unavailable, match="the store is down"):
            await rig.read("a")
        rig.store_faults.heal()
        assert await rig.read("a") == [1, 2]
    finally:
        await rig.close()


async def test_truncated_records_of_others_are_not_lost_while_the_store_is_down(
    open_rig: Callable[..., Rig],
) -> None:
    """The tail of this process is before the start of the log, and only the store knows that nothing is missing."""
    rig, other = open_rig(), open_rig()
    await rig.append("a", 1)
    await rig.read("a")
    _, partition = await rig.journal._locate("a")
    assert partition is not None
    last = (await other.append("a", 2)).offset
    await rig.replicate()
    await rig.truncate()
    take_down(rig)
    with pytest.raises(Unavailable, match="the store is down"):
        await partition.cache.reach(last, follow=False)
    with pytest.raises(Unavailable, match="the store is down"):
        await rig.read("a")
    rig.store_faults.heal()
    assert await rig.read("a") == [1, 2]

"""A cleaner truncates the log between two steps of another process; outcomes of truncated records are determined."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
import pytest_asyncio

from tests.integration.wal.base import contents, make_wal, state_of
from tests.integration.wal.faulty import FaultyLog
from tests.integration.wal.overtaken_cases import overtake
from tidebook.core.errors import Fenced, OutcomeUnknown
from tidebook.log.port import RecordPage
from tidebook.log.sqlite import SqliteLog
from tidebook.wal.record import DropTable, MarkDeleted, Write, Written, read_record
from tidebook.wal.region import Region
from tidebook.wal.wal import Wal

DATA, META = "wal.o.7.data", "wal.o.7.meta"


@pytest_asyncio.fixture
async def other(inner: SqliteLog) -> AsyncIterator[Wal]:
    """Return the process that truncates the log; its own log has no faults."""
    other = make_wal(inner, "o")
    yield other
    await other.close()


async def two_in_flight(log: FaultyLog) -> tuple[Region, asyncio.Future[Written], asyncio.Future[Written]]:
    """Return a region with one finished write to table 1, and two in-flight writes whose acknowledgements are held."""
    region = await make_wal(log, "o", pack_bytes=1).open_region(7, create=True)
    await region.write(1, [b"a"])
    log.fault = lambda record: "held" if isinstance(read_record(record.value), Write) else None
    first, second = asyncio.ensure_future(region.write(1, [b"b"])), asyncio.ensure_future(region.write(2, [b"c"]))
    await log.holds(2)
    return region, first, second


async def check_outcome(flushed: asyncio.Future[Written], reported: bool) -> None:
    """Check that acknowledged writes are resolved although truncated, and that the others are unknown."""
    if reported:
        assert (await flushed).first == 2
    else:
        with pytest.raises(OutcomeUnknown):
            await flushed


@pytest.mark.parametrize("step", ["start", "end", "read"])
@pytest.mark.parametrize("topic", [DATA, META])
@pytest.mark.parametrize("writable", [True, False])
async def test_cleaning_between_any_two_steps_of_an_opening_loses_nothing(
    log: FaultyLog, other: Wal, step: str, topic: str, writable: bool
) -> None:
    owner = await other.open_region(7, create=True)
    await overtake(owner)
    left = 6
    ask = getattr(log._log, step)

    async def overtaken(asked: str, partition: int, **named: Any) -> Any:
        nonlocal left
        if asked == topic and left:
            left -= 1
            with suppress(Fenced):  # the opening process has claimed it already
                await overtake(owner, rounds=1)
        return await ask(asked, partition, **named)

    setattr(log, step, overtaken)
    opened = await make_wal(log, "o").open_region(7, writable=writable)
    await opened.refresh()
    reader = await other.open_region(7, writable=False)
    assert state_of(opened.meta) == state_of(reader.meta)


@pytest.mark.parametrize("reported", [(True, True), (False, False), (False, True)])
async def test_an_owner_learns_the_outcome_of_writes_in_the_truncated_log(
    log: FaultyLog, other: Wal, reported: tuple[bool, bool]
) -> None:
    region, flushed, kept = await two_in_flight(log)
    reader = await other.open_region(7, writable=False)
    await reader.mark_deleted(1, 3)
    await reader.clean()
    assert (await reader.status()).log_start > region.meta.next_offset
    log.fault = lambda _: None
    log.release(reported)
    assert (await kept).offset == reader.meta.tables[2].mapping[1]
    await check_outcome(flushed, reported[0])
    written = await asyncio.gather(region.write(1, [b"d"]), region.write(2, [b"e"]))
    assert [w.first for w in written] == [3, 2]
    assert await contents(region) == {1: [(3, b"d")], 2: [(1, b"c"), (2, b"e")]}
    assert state_of((await other.open_region(7)).meta) == state_of(region.meta)


@pytest.mark.parametrize("reported", [(True, True, True), (False, False, False), (False, True, True)])
async def test_a_former_owner_learns_the_outcome_of_writes_in_the_truncated_log(
    log: FaultyLog, other: Wal, reported: tuple[bool, bool, bool]
) -> None:
    region, flushed, kept = await two_in_flight(log)
    second = await other.open_region(7)
    late = asyncio.ensure_future(region.write(2, [b"void"]))
    await log.holds(3)
    await second.mark_deleted(1, 3)
    await second.write(2, [b"d"])
    await second.clean()
    log.fault = lambda _: None
    log.release(reported)
    assert (await kept).offset == second.meta.tables[2].mapping[1]
    await check_outcome(flushed, reported[0])
    with pytest.raises(Fenced):
        await late
    assert await contents(second) == {2: [(1, b"c"), (2, b"d")]}


async def test_a_former_owner_is_fenced_although_its_late_write_is_truncated(log: FaultyLog, other: Wal) -> None:
    region = await make_wal(log, "o").open_region(7, create=True)
    await region.write(1, [b"a"])
    second = await other.open_region(7)
    log.fault = lambda _: "held"
    late = asyncio.ensure_future(region.write(1, [b"late"]))
    await log.holds(1)
    await overtake(second)
    log.fault = lambda _: None
    log.release([True])
    with pytest.raises(Fenced):
        await late
    assert (await second.write(1, [b"b"])).first == 5


async def test_a_truncated_write_whose_table_was_dropped_is_unknown(log: FaultyLog, other: Wal) -> None:
    region = await make_wal(log, "o").open_region(7, create=True)
    log.fault = lambda record: "held" if isinstance(read_record(record.value), Write) else None
    writing = asyncio.ensure_future(region.write(1, [b"a"]))
    await log.holds(1)
    reader = await other.open_region(7, writable=False)
    await reader.drop_table(1)
    await reader.clean()
    log.fault = lambda _: None
    log.release([False])
    with pytest.raises(OutcomeUnknown):
        await writing
    assert (await region.write(1, [b"b"])).first == 1
    assert await contents(region) == {1: [(1, b"b")]}


async def test_a_truncated_write_that_created_its_table_is_resolved(log: FaultyLog, other: Wal) -> None:
    region = await make_wal(log, "o").open_region(7, create=True)
    await region.write(2, [b"a"])
    reader = await other.open_region(7, writable=False)
    await reader.mark_deleted(2, 2)  # so that the next acknowledgement leaves a gap, and the log is read
    log.fault = lambda record: "held" if isinstance(read_record(record.value), Write) else None
    writing = asyncio.ensure_future(region.write(1, [b"b"]))
    await log.holds(1)
    await reader.mark_deleted(1, 2)
    await reader.clean()
    assert (await reader.status()).log_start > region.meta.next_offset
    log.fault = lambda _: None
    log.release([True])
    assert (await writing).first == 1
    assert (await region.write(1, [b"c"])).first == 2
    assert await contents(region) == {1: [(2, b"c")]}


@pytest.mark.parametrize("kind", [MarkDeleted, DropTable])
async def test_an_acknowledged_mark_that_is_not_in_the_log_is_resolved(log: FaultyLog, other: Wal, kind: type) -> None:
    region = await make_wal(log, "o", attempts_max=1).open_region(7, create=True)
    await region.write(1, [b"a"])
    log.fault = lambda record: "acknowledged and lost" if isinstance(read_record(record.value), kind) else None
    with pytest.raises(OutcomeUnknown, match="no longer holds"):
        await asyncio.wait_for(region.mark_deleted(1, 2) if kind is MarkDeleted else region.drop_table(1), 10)
    log.fault = lambda _: None
    assert (await region.write(1, [b"b"])).first == 2


async def test_an_outdated_end_of_the_log_does_not_make_a_written_record_absent(log: FaultyLog) -> None:
    """A broker that is cut off reports an end below the record, and below the claim that was acknowledged after it."""
    region = await make_wal(log, "o").open_region(7, create=True)
    await region.write(1, [b"a"])

    async def outdated(*_: Any, start: int, **__: Any) -> RecordPage:
        return RecordPage((), start)

    log.end_is_linearizable = False
    log.fault = lambda record: "unknown" if isinstance(read_record(record.value), Write) else None
    log.read = outdated  # type: ignore[method-assign]
    with pytest.raises(OutcomeUnknown):
        await region.write(1, [b"b"])
    log.fault = lambda _: None
    del log.read
    assert (await region.write(1, [b"c"])).first == 3
    assert await contents(region) == {1: [(1, b"a"), (2, b"b"), (3, b"c")]}

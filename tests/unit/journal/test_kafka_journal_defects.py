"""Tidebook has none of the eight defects that were found in kafka-journal; most are tested over both kinds of log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from tests.unit.journal.rig import TOPIC, Rig
from tidebook.core.errors import Conflict, Fenced, LogLost, TidebookError
from tidebook.core.key import Key
from tidebook.log.port import read_all
from tidebook.replication.slice import plan_slice
from tidebook.sqlite.database import Database, Schema
from tidebook.testing.action_histories import append, placed_at

OpenRig = Callable[..., Rig]


async def test_defect_1_a_purge_and_an_append_are_read_before_they_are_replicated(rig: Rig) -> None:
    """In kafka-journal, the read returns the events of the old incarnation."""
    await rig.append("a", "old", "older")
    await rig.replicate()
    await rig.journal.purge("a")
    await rig.append("a", "new")
    assert await rig.read("a") == ["new"]
    assert await rig.journal.pointer("a") == 1


async def test_defect_2_an_event_after_a_gap_over_the_end_of_a_segment_is_read(rig: Rig) -> None:
    """In kafka-journal, event 11 is lost if the events are 1, 2, 3 and 11 and segments have 5 numbers."""
    await rig.append("a", 1, 2, 3)
    await rig.append("a", 11, at=11)
    for _ in range(2):
        assert await rig.read("a") == [1, 2, 3, 11]
        await rig.replicate()


async def test_defect_3_only_one_of_two_writers_gets_a_number(open_rig: OpenRig) -> None:
    """In kafka-journal, both are accepted, and the store then refuses to read the journal."""
    one, other = open_rig(), open_rig()
    await one.append("a", 0)
    done = await asyncio.gather(
        one.append("a", "one", expected=1), other.append("a", "other", expected=1), return_exceptions=True
    )
    assert sum(isinstance(each, Conflict) for each in done) == 1
    winner = "one" if not isinstance(done[0], Conflict) else "other"
    for _ in range(2):
        assert await one.read("a") == await other.read("a") == [0, winner]
        await one.replicate()


async def test_defect_3_an_append_of_a_zombie_that_expects_an_old_number_is_void(rig: Rig) -> None:
    await rig.append("a", 1)
    await rig.append("a", 2)
    await rig.write("a", placed_at(append(expected=1), 99))
    assert await rig.read("a") == [1, 2]
    await rig.replicate()
    assert await rig.read("a") == [1, 2]


async def test_defect_4_a_slice_of_a_zombie_replicator_changes_nothing(rig: Rig) -> None:
    """In kafka-journal, nothing fences the late replicator. A store with cell timestamps is modelled in tests/model."""
    await rig.append("a", 1, 2, 3)
    config = await rig.journal.create()
    end = await rig.log.end(TOPIC, 0)
    records = await read_all(rig.log, TOPIC, 0, start=0, stop=end)
    zombie = await plan_slice(rig.store, TOPIC, 0, records, config)
    assert zombie.writes is not None
    await rig.journal.delete("a", to=2)
    await rig.journal.purge("a")
    await rig.append("a", "new")
    await rig.replicate(batch_records=1)
    try:
        await rig.store.apply(zombie.writes)
    except Fenced:
        pass  # otherwise it changes nothing
    assert await rig.read("a") == ["new"]
    head = await rig.store.head(Key(TOPIC, "a"))
    assert head is not None
    assert [row.seq_nr for row in await rig.store.events(Key(TOPIC, "a"), head, after=0, to=99, limit=99)] == [1]


async def test_defect_5_records_that_are_truncated_before_replication_are_reported_as_lost(open_rig: OpenRig) -> None:
    """In kafka-journal, the loss is silent."""
    rig = open_rig()
    await rig.append("a", 1)
    await rig.replicate()
    await rig.append("a", "lost")
    await rig.truncate()
    with pytest.raises(LogLost):
        await rig.replicate()
    with pytest.raises(LogLost):
        await open_rig().read("a")


async def test_defect_6_a_fresh_append_wins_over_an_expiry(rig: Rig) -> None:
    """In kafka-journal, the expiry wins."""
    await rig.append("a", 1, expire_after=timedelta(milliseconds=1))
    await rig.replicate()
    rig.clock.advance(1000)
    [(id, expired)] = [each async for each in rig.store.expired(TOPIC, now_ms=rig.clock.now_ms())]
    await rig.append("a", "fresh")
    await rig.journal.purge_expired(id, expired)
    for _ in range(2):
        assert await rig.read("a") == [1, "fresh"]
        await rig.replicate()


def test_defect_7_a_failed_schema_migration_raises_and_leaves_the_version(tmp_path: Path) -> None:
    """In kafka-journal, its error is ignored and the version increased."""
    one = Schema(name="numbers", application_id=77, steps=("CREATE TABLE number (n)",))
    Database(tmp_path / "numbers.db", one).close()
    broken = Schema(name="numbers", application_id=77, steps=(*one.steps, "CREATE TABLE number (again)"))
    with pytest.raises(TidebookError):
        Database(tmp_path / "numbers.db", broken)
    database = Database(tmp_path / "numbers.db", one)
    with database.reading() as connection:
        assert connection.pragma("user_version") == 1
    database.close()


@pytest.mark.parametrize("kind", ["like kafka"])
async def test_defect_8_a_cache_miss_reads_each_offset_once(open_rig: OpenRig) -> None:
    """In kafka-journal, the tail is read twice."""
    writer = open_rig()
    for i in range(10):
        await writer.append(f"k{i % 3}", i)
    reader = open_rig(follow_s=0)
    read: list[int] = []

    def note(*_: object, start: int, stop: int, **__: object) -> bool:
        read.extend(range(start, stop))
        return False

    reader.log_faults.fail("read", LogLost(topic=TOPIC, partition=0, first=0, last=0), where=note)
    assert await reader.read("k1") == [1, 4, 7]
    assert await reader.journal.pointer("k2") == 3
    assert sorted(read) == sorted(set(read))


async def test_defect_8_a_poison_record_does_not_stall_the_cache(rig: Rig) -> None:
    await rig.append("a", 1)
    await rig.write_raw(b"a", b"poison")
    await rig.write_raw(b"\xff", b"poison")
    await rig.append("a", 2, expected=1)
    assert await rig.read("a") == [1, 2]
    assert await rig.journal.pointer("a") == 2

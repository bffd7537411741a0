"""Slices that `replicate_slice` refuses or trims, and records that it parks or stops at, on the embedded store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from tidebook.core.action import Mark
from tidebook.core.errors import Fenced, InvalidInput, LogLost, UnknownVersion
from tidebook.core.head import Head
from tidebook.core.key import Key, partition_of
from tidebook.core.position import FIRST_EPOCH, Position
from tidebook.core.replication_plan import Pointer, PutEvents, SliceWrites
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Record
from tidebook.replication import slice as slices
from tidebook.replication.slice import plan_slice
from tidebook.runtime.metrics import Metrics
from tidebook.store.port import StoreWriter
from tidebook.store.sqlite.store import SqliteStore
from tidebook.testing.conformance.journal_records import FIRST_MS, append, records_of, topic_config
from tidebook.testing.conformance.store_slices import newer_version
from tidebook.testing.replicating import replicate_slice

TOPIC = "orders"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[StoreWriter]:
    store = SqliteStore(tmp_path, metrics=Metrics())
    yield store
    await store.close()


@pytest.fixture
async def config(store: StoreWriter) -> TopicConfig:
    return await store.set_topic_config(TOPIC, topic_config(TOPIC), expected=None)


async def parked(store: StoreWriter) -> list[tuple[int, str | None]]:
    return [(each.position.offset, each.id) async for each in store.parked(TOPIC)]


async def test_an_empty_slice_writes_nothing(store: StoreWriter, config: TopicConfig) -> None:
    assert await replicate_slice(store, TOPIC, 0, [], config) is None
    assert await store.pointer(TOPIC, 0) is None


async def test_a_range_without_records_moves_the_pointer_over_a_gap(store: StoreWriter, config: TopicConfig) -> None:
    pointer = await replicate_slice(store, TOPIC, 0, [], config, start=0, stop=7)
    assert pointer == Pointer(Position(FIRST_EPOCH, 6), 0)


async def test_a_range_without_a_start_and_records_begins_at_offset_0(store: StoreWriter, config: TopicConfig) -> None:
    assert await replicate_slice(store, TOPIC, 0, [], config, stop=3) == Pointer(Position(FIRST_EPOCH, 2), 0)


async def test_gaps_within_a_known_range_are_no_loss(store: StoreWriter, config: TopicConfig) -> None:
    records = records_of([("a", append()), ("a", append())], start=3)
    await replicate_slice(store, TOPIC, 0, records, config, start=0, stop=9)
    assert (await store.pointer(TOPIC, 0)) == Pointer(Position(FIRST_EPOCH, 8), FIRST_MS + 4000)


async def test_a_first_slice_that_does_not_begin_at_offset_0_is_refused(
    store: StoreWriter, config: TopicConfig
) -> None:
    with pytest.raises(LogLost) as reported:
        await replicate_slice(store, TOPIC, 0, records_of([("a", append())], start=4), config)
    assert (reported.value.first, reported.value.last) == (0, 3)


async def test_a_slice_begins_at_the_pointers_next_record_and_not_one_later(
    store: StoreWriter, config: TopicConfig
) -> None:
    records = records_of([("a", append()) for _ in range(3)])
    await replicate_slice(store, TOPIC, 0, records[:1], config)
    with pytest.raises(LogLost) as reported:
        await replicate_slice(store, TOPIC, 0, records[2:], config)
    assert (reported.value.first, reported.value.last) == (1, 1)
    await replicate_slice(store, TOPIC, 0, records[1:], config)
    assert await numbers(store) == [(1, 0), (2, 1), (3, 2)]


class Overtaken:
    """A store in which another replicator applies its slice right after the first read of a plan."""

    def __init__(self, store: StoreWriter, records: list[Record], config: TopicConfig) -> None:
        self._store = store
        self._records = records
        self._config = config
        self._asked = False

    async def _overtake(self) -> None:
        if not self._asked:
            self._asked = True
            await replicate_slice(self._store, TOPIC, 0, self._records, self._config)

    async def pointer(self, topic: str, partition: int) -> Pointer | None:
        found = await self._store.pointer(topic, partition)
        await self._overtake()
        return found

    async def heads(self, topic: str, ids: Sequence[str]) -> Mapping[str, Head]:
        found = await self._store.heads(topic, ids)
        await self._overtake()
        return found


async def test_the_pointer_is_read_before_the_heads(store: StoreWriter, config: TopicConfig) -> None:
    """With an old head and a new pointer, the rest would be folded onto no head, and event 3 would become event 1."""
    records = records_of([("a", append()) for _ in range(3)])
    overtaken: Any = Overtaken(store, records[:2], config)
    plan = await plan_slice(overtaken, TOPIC, 0, records, config)
    assert plan.writes is not None
    rows = [
        row.seq_nr for of_key in plan.writes.keys for put in of_key if isinstance(put, PutEvents) for row in put.rows
    ]
    assert rows == [3]
    with pytest.raises(Fenced):  # and the embedded store rejects the slice, because the pointer has moved
        await store.apply(plan.writes)


async def numbers(store: StoreWriter) -> list[tuple[int, int]]:
    """Return the events of the journal `a` as (seq_nr, offset)."""
    head = await store.head(Key(TOPIC, "a"))
    assert head is not None
    rows = await store.events(Key(TOPIC, "a"), head, after=0, to=head.seq_nr, limit=100)
    return [(row.seq_nr, row.position.offset) for row in rows]


async def test_records_up_to_the_pointer_are_skipped(store: StoreWriter, config: TopicConfig) -> None:
    records = records_of([("a", append()), ("a", append()), ("a", append())])
    await replicate_slice(store, TOPIC, 0, records[:2], config)
    assert (await plan_slice(store, TOPIC, 0, records[:2], config)).writes is None
    plan = await plan_slice(store, TOPIC, 0, records, config)
    assert plan.writes is not None
    [[events, _]] = plan.writes.keys
    assert [row.seq_nr for row in events.rows] == [3]  # type: ignore[union-attr]


@pytest.mark.parametrize("at", [0, 5])
async def test_an_empty_range_changes_nothing_wherever_it_begins(
    store: StoreWriter, config: TopicConfig, at: int
) -> None:
    plan = await plan_slice(store, TOPIC, 0, [], config, start=at, stop=at)
    assert (plan.pointer, plan.writes, plan.stopped_by) == (None, None, None)


async def test_a_range_that_ends_at_the_pointer_changes_nothing(store: StoreWriter, config: TopicConfig) -> None:
    pointer = await replicate_slice(store, TOPIC, 0, records_of([("a", append())]), config, start=0, stop=3)
    plan = await plan_slice(store, TOPIC, 0, [], config, start=0, stop=3)
    assert (plan.pointer, plan.writes) == (pointer, None)


async def test_a_record_of_a_newer_version_stops_the_slice_after_the_records_before_it(
    store: StoreWriter, config: TopicConfig
) -> None:
    records = [*records_of([("a", append()), ("a", append())]), Record(2, FIRST_MS, b"a", newer_version())]
    with pytest.raises(UnknownVersion):
        await replicate_slice(store, TOPIC, 0, records, config, start=0, stop=9)
    assert await numbers(store) == [(1, 0), (2, 1)]
    pointer = await store.pointer(TOPIC, 0)
    assert pointer is not None
    assert pointer.position == Position(FIRST_EPOCH, 1)


@pytest.mark.parametrize("offsets", [(0, 0), (1, 0), (0, 2, 2)])
async def test_records_of_one_offset_or_out_of_order_are_refused(
    store: StoreWriter, config: TopicConfig, offsets: tuple[int, ...]
) -> None:
    [record] = records_of([("a", append())])
    records = [msgspec.structs.replace(record, offset=offset) for offset in offsets]
    with pytest.raises(InvalidInput):
        await replicate_slice(store, TOPIC, 0, records, config, start=0, stop=3)
    assert await store.pointer(TOPIC, 0) is None


async def test_records_out_of_order_are_refused(store: StoreWriter, config: TopicConfig) -> None:
    one, two = records_of([("a", append()), ("a", append())])
    with pytest.raises(InvalidInput):
        await replicate_slice(store, TOPIC, 0, [two, one], config, start=0, stop=2)


async def test_records_outside_their_range_are_refused(store: StoreWriter, config: TopicConfig) -> None:
    with pytest.raises(InvalidInput):
        await replicate_slice(store, TOPIC, 0, records_of([("a", append())], start=5), config, start=0, stop=5)


@pytest.mark.parametrize("key", [None, b"", b"\xff\xfe", b"x" * 1001, b"nul\x00"])
async def test_a_record_whose_key_names_no_journal_is_parked(
    store: StoreWriter, config: TopicConfig, key: bytes | None
) -> None:
    [record] = records_of([("a", append())])
    await replicate_slice(store, TOPIC, 0, [msgspec.structs.replace(record, key=key)], config)
    assert await parked(store) == [(0, None)]


async def test_a_record_outside_its_journals_partition_is_parked(store: StoreWriter) -> None:
    config = await store.set_topic_config(TOPIC, topic_config(TOPIC, partitions=4), expected=None)
    home = partition_of("a", 4)
    records = records_of([("a", append())])
    for partition in range(4):
        await replicate_slice(store, TOPIC, partition, records, config)
    assert {each.partition async for each in store.parked(TOPIC)} == set(range(4)) - {home}
    head = await store.head(Key(TOPIC, "a"))
    assert head is not None
    assert head.seq_nr == 1


async def test_a_mark_needs_no_key_and_advances_the_time(store: StoreWriter, config: TopicConfig) -> None:
    [record] = records_of([("a", Mark(FIRST_EPOCH, time_ms=FIRST_MS + 99_000))])
    pointer = await replicate_slice(store, TOPIC, 0, [msgspec.structs.replace(record, key=None)], config)
    assert pointer == Pointer(Position(FIRST_EPOCH, 0), FIRST_MS + 99_000)
    assert await parked(store) == []


async def test_a_parked_record_keeps_its_bytes_and_one_without_a_value_has_none(
    store: StoreWriter, config: TopicConfig
) -> None:
    records = [Record(0, FIRST_MS, b"a", b"damaged"), Record(1, FIRST_MS, b"a", None)]
    await replicate_slice(store, TOPIC, 0, records, config)
    assert [each.value async for each in store.parked(TOPIC)] == [b"damaged", b""]


async def test_a_record_over_the_topics_limit_is_parked(store: StoreWriter, config: TopicConfig) -> None:
    records = records_of([("a", append(payload=b"x" * 2000)), ("a", append())])
    small = msgspec.structs.replace(config, limit_bytes=1000)
    await replicate_slice(store, TOPIC, 0, records, small)
    assert await parked(store) == [(0, "a")]


async def test_an_unknown_version_at_the_very_next_record_stops_without_a_write(
    store: StoreWriter, config: TopicConfig
) -> None:
    with pytest.raises(UnknownVersion) as reported:
        await replicate_slice(store, TOPIC, 0, [Record(0, FIRST_MS, b"a", newer_version())], config)
    assert reported.value.__notes__ == ["at orders/0, offset 0"]
    assert await store.pointer(TOPIC, 0) is None


async def test_a_new_epoch_starts_at_offset_0(store: StoreWriter, config: TopicConfig) -> None:
    await replicate_slice(store, TOPIC, 0, records_of([("a", append()), ("a", append())]), config)
    later = msgspec.structs.replace(config, epoch=FIRST_EPOCH + 1)
    await replicate_slice(store, TOPIC, 0, records_of([("a", append(epoch=later.epoch, append_id=b"n" * 16))]), later)
    head = await store.head(Key(TOPIC, "a"))
    assert head is not None
    assert (head.seq_nr, head.position) == (3, Position(later.epoch, 0))


async def test_a_replicator_with_the_config_of_an_older_epoch_is_fenced(
    store: StoreWriter, config: TopicConfig
) -> None:
    ahead = Pointer(Position(FIRST_EPOCH + 1, 0), FIRST_MS)
    await store.apply(SliceWrites(TOPIC, 0, None, ahead, ()))
    with pytest.raises(Fenced):
        await replicate_slice(store, TOPIC, 0, records_of([("a", append())]), config)


async def test_other_tasks_run_while_a_long_slice_is_planned(
    config: TopicConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests of another slice are sent and answered meanwhile."""
    monkeypatch.setattr(slices, "RECORDS_PER_YIELD", 10)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await asyncio.sleep(0)
    began = turns
    records = records_of([(f"j-{n % 20}", append()) for n in range(40)])
    await plan_slice(cast(Any, EmptyStore()), TOPIC, 0, records, config)
    task.cancel()
    # Other tasks run while records are read and journals are planned, but not after every record.
    assert 4 + 3 <= turns - began <= 4 + 5


class EmptyStore:
    """An empty store that answers at once."""

    async def pointer(self, topic: str, partition: int) -> Pointer | None:
        return None

    async def heads(self, topic: str, ids: Sequence[str]) -> Mapping[str, Head]:
        return {}

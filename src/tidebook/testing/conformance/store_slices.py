"""Test cases of a store's `apply`: the store equals the fold, regardless of how the log is cut into slices."""

from __future__ import annotations

import asyncio
import random
from zlib import crc32

import pytest

from tidebook.core.action import Mark
from tidebook.core.errors import LogLost, UnknownVersion
from tidebook.core.position import FIRST_EPOCH, Position
from tidebook.core.replication_plan import Pointer, SliceWrites
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Record
from tidebook.replication.slice import plan_slice
from tidebook.store.port import StoreWriter
from tidebook.testing.conformance.journal_records import (
    FIRST_MS,
    Step,
    append,
    delete,
    expected_journals,
    purge,
    records_of,
)
from tidebook.testing.conformance.store_suite import OpenStore, StoreSuite, assert_equals_fold
from tidebook.testing.replicating import replicate_slice

#: Histories of every kind of action; each is replicated in one slice, record by record, and in two slices, cut at each
#: record.
HISTORIES: dict[str, list[Step]] = {
    "one event": [("a", append())],
    "appends of all kinds": [
        ("a", append(2, expected=0)),
        ("a", append(3)),
        ("a", append(1, expected=5)),
        ("a", append(1, expected=2)),
        ("a", append(2, at=9)),
        ("a", append(1, at=4)),
    ],
    "a gap over segment borders": [("a", append(3)), ("a", append(1, at=11))],
    "a jump": [("a", append(3)), ("a", append(2, at=10**15)), ("a", append(12))],
    "an append over three segments": [("a", append(13))],
    "a delete within a segment": [("a", append(4)), ("a", delete(2)), ("a", append(1))],
    "deletes step by step into appends": [
        ("a", append(4)),
        ("a", delete(1)),
        ("a", append(4)),
        ("a", delete(3)),
        ("a", delete(6)),
        ("a", append(2)),
        ("a", delete(9)),
    ],
    "a new incarnation as long as the deleted range": [
        ("a", append(4)),
        ("a", delete(2)),
        ("a", purge()),
        ("a", append(4)),
    ],
    "a delete over segments": [("a", append(13)), ("a", delete(11)), ("a", delete(12))],
    "a delete of more than there is": [("a", append(4)), ("a", delete(99)), ("a", append(2))],
    "a delete on nothing": [("a", delete(7)), ("a", append(1, expected=0)), ("a", append(1, expected=7))],
    "a delete over a jump": [("a", append(2)), ("a", append(8, at=10**12)), ("a", delete(10**12 + 3))],
    "a purge": [("a", append(7)), ("a", purge())],
    "a purge of nothing": [("a", purge())],
    "a purge over a jump": [("a", append(2)), ("a", append(8, at=10**12)), ("a", purge())],
    "jumps, a delete between them, and a jump": [
        ("a", append(2)),
        ("a", append(7, at=10**6)),
        ("a", append(1, at=10**9)),
        ("a", delete(10**6 + 2)),
        ("a", append(2, at=10**12)),
        ("a", delete(10**9)),
        ("a", append(1, at=10**15)),
    ],
    "jumps in two incarnations": [
        ("a", append(2)),
        ("a", append(1, at=10**6)),
        ("a", append(1, at=10**9)),
        ("a", purge()),
        ("a", append(1, at=10**6)),
        ("a", append(1, at=10**12)),
    ],
    "a jump after a reset, purged": [("a", delete(10**12)), ("a", append()), ("a", append(at=10**15)), ("a", purge())],
    "a new incarnation": [("a", append(8)), ("a", purge()), ("a", append(2)), ("a", append(1))],
    "a delete, a purge, and an incarnation that begins after it": [
        ("a", append(8)),
        ("a", delete(7)),
        ("a", purge()),
        ("a", append(1, at=9)),
    ],
    "a delete and a purge over jumps, and an incarnation that begins after them": [
        ("a", append(8)),
        ("a", append(2, at=21)),
        ("a", append(2, at=41)),
        ("a", delete(40)),
        ("a", purge()),
        ("a", append(1, at=61)),
        ("a", delete(1)),
    ],
    "a shorter incarnation after a delete": [("a", append(8)), ("a", delete(3)), ("a", purge()), ("a", append(1))],
    "three incarnations": [("a", append(6)), ("a", purge()), ("a", delete(3)), ("a", purge()), ("a", append(2))],
    "an append that is repeated": [("a", append(2, append_id=b"x" * 16)), ("a", append(2, append_id=b"x" * 16))],
    "three journals": [
        ("a", append(3)),
        ("b", append(1)),
        ("c", append(6)),
        ("b", purge()),
        ("a", delete(1)),
        ("c", append(1)),
        ("b", append(2)),
        ("a", purge()),
    ],
    "marks between": [("a", append(1)), ("a", Mark(FIRST_EPOCH)), ("a", append(1))],
}


class SliceCases(StoreSuite):
    """Test cases of replication into the store, including repeated slices and late writes of zombies."""

    @pytest.mark.parametrize("steps", HISTORIES.values(), ids=HISTORIES)
    async def test_a_history_in_one_slice_equals_its_fold(
        self, store: StoreWriter, topic: str, config: TopicConfig, steps: list[Step]
    ) -> None:
        await replicate_slice(store, topic, 0, records_of(steps), config)
        await assert_equals_fold(store, topic, config, steps)

    @pytest.mark.parametrize("steps", HISTORIES.values(), ids=HISTORIES)
    async def test_a_history_record_by_record_equals_its_fold_at_every_step(
        self, store: StoreWriter, topic: str, config: TopicConfig, steps: list[Step]
    ) -> None:
        for i, record in enumerate(records_of(steps)):
            await replicate_slice(store, topic, 0, [record], config)
            await assert_equals_fold(store, topic, config, steps[: i + 1])

    async def test_the_cost_of_events_does_not_depend_on_the_gaps_between_them(
        self, store: StoreWriter, topic: str, config: TopicConfig
    ) -> None:
        """An implementation that iterates over the skipped numbers would not finish."""
        steps: list[Step] = [("a", append(at=10**13 * i)) for i in range(1, 101)]
        async with asyncio.timeout(60):
            for more in ([], [("a", delete(10**13 * 60))], [("a", append())], [("a", purge())], [("a", append())]):
                done = len(steps) if more else 0
                steps += more
                await replicate_slice(store, topic, 0, records_of(steps)[done:], config)
                await assert_equals_fold(store, topic, config, steps)

    @pytest.mark.parametrize("seed", range(3))
    async def test_a_history_with_randomly_skipped_numbers_equals_its_fold(
        self, store: StoreWriter, topic: str, config: TopicConfig, seed: int
    ) -> None:
        dice = random.Random(seed)
        steps: list[Step] = []
        last = done = 0
        while len(steps) < 40:
            what = dice.random()
            if what < 0.75:
                first = last + 1 + dice.choice([0, 0, 1, 4, 9, 30, 10**9])
                count = dice.randint(1, 7)
                steps.append(("a", append(count, at=first)))
                last = first + count - 1
            elif what < 0.95:
                steps.append(("a", delete(dice.randint(1, last) if last else 1)))
                last = last or 1
            else:
                steps.append(("a", purge()))
                last = 0
            if dice.random() < 0.3 or len(steps) == 40:
                # Start at any earlier record: replicating a record twice must change nothing.
                await replicate_slice(store, topic, 0, records_of(steps)[dice.randint(0, done) :], config)
                done = len(steps)
                await assert_equals_fold(store, topic, config, steps)

    @pytest.mark.parametrize("steps", HISTORIES.values(), ids=HISTORIES)
    async def test_a_slice_that_is_replicated_again_changes_nothing(
        self, store: StoreWriter, open_store: OpenStore, topic: str, config: TopicConfig, steps: list[Step]
    ) -> None:
        records = records_of(steps)
        for stop in range(1, len(records) + 1):
            await replicate_slice(store, topic, 0, records[:stop], config)
        await replicate_slice(await open_store(), topic, 0, records, config)
        await assert_equals_fold(store, topic, config, steps)

    @pytest.mark.parametrize("steps", HISTORIES.values(), ids=HISTORIES)
    async def test_the_writes_of_a_zombie_change_nothing_however_late(
        self, store: StoreWriter, open_store: OpenStore, topic: str, config: TopicConfig, steps: list[Step]
    ) -> None:
        zombie, records = await open_store(), records_of(steps)
        held: list[SliceWrites] = []
        for at in range(len(records)):
            for stop in range(at + 1, len(records) + 1):
                plan = await plan_slice(zombie, topic, 0, records[at:stop], config)
                assert plan.writes is not None
                held.append(plan.writes)
            await replicate_slice(store, topic, 0, records[at : at + 1], config)
        for writes in held:
            with self.late():
                await zombie.apply(writes)
        await assert_equals_fold(store, topic, config, steps)

    async def test_the_pointer_never_moves_back(self, store: StoreWriter, topic: str, config: TopicConfig) -> None:
        ahead = Pointer(Position(FIRST_EPOCH, 5), FIRST_MS)
        await store.apply(SliceWrites(topic, 0, None, ahead, ()))
        with self.late():
            await store.apply(SliceWrites(topic, 0, None, Pointer(Position(FIRST_EPOCH, 3), FIRST_MS), ()))
        assert await store.pointer(topic, 0) == ahead
        higher = Pointer(Position(FIRST_EPOCH + 1, 0), FIRST_MS)
        await store.apply(SliceWrites(topic, 0, ahead, higher, ()))
        assert await store.pointer(topic, 0) == higher

    async def test_each_partition_has_its_own_pointer(
        self, store: StoreWriter, topic: str, config: TopicConfig
    ) -> None:
        for partition in range(3):
            pointer = Pointer(Position(FIRST_EPOCH, partition), FIRST_MS + partition)
            await store.apply(SliceWrites(topic, partition, None, pointer, ()))
            assert await store.replicated_ms() >= pointer.time_ms
        assert [(await store.pointer(topic, p)) for p in range(4)] == [
            *(Pointer(Position(FIRST_EPOCH, p), FIRST_MS + p) for p in range(3)),
            None,
        ]

    async def test_a_slice_after_a_gap_is_refused(self, store: StoreWriter, topic: str, config: TopicConfig) -> None:
        steps = [("a", append()), ("a", append()), ("a", append())]
        records = records_of(steps)
        await replicate_slice(store, topic, 0, records[:1], config)
        with pytest.raises(LogLost) as raised:
            await replicate_slice(store, topic, 0, records[2:], config)
        assert (raised.value.first, raised.value.last) == (1, 1)
        await assert_equals_fold(store, topic, config, steps[:1])

    async def test_an_unknown_version_stops_the_partition_after_the_records_before_it(
        self, store: StoreWriter, topic: str, config: TopicConfig
    ) -> None:
        steps = [("a", append()), ("a", append()), ("a", append())]
        records = records_of(steps)
        records[1] = Record(1, records[1].timestamp_ms, b"a", newer_version())
        for _ in range(2):
            with pytest.raises(UnknownVersion):
                await replicate_slice(store, topic, 0, records, config)
            await assert_equals_fold(store, topic, config, steps[:1])

    async def test_ids_of_any_text_are_distinct(self, store: StoreWriter, topic: str, config: TopicConfig) -> None:
        ids = ["a", "A", " ", "ä", "a/b", "'; --", "\U0001f40b", "x" * 1000, "ß", "ss", "1", "é", "e\u0301"]
        steps = [(id, append(i + 1)) for i, id in enumerate(ids)]
        await replicate_slice(store, topic, 0, records_of(steps), config)
        await assert_equals_fold(store, topic, config, steps)

    async def test_topics_do_not_see_one_another(self, store: StoreWriter, topic: str, config: TopicConfig) -> None:
        other = f"{topic}.other"
        await store.set_topic_config(other, config, expected=None)
        await replicate_slice(store, topic, 0, records_of([("a", append(2))]), config)
        await replicate_slice(store, other, 0, records_of([("a", append(1)), ("b", append(1))]), config)
        await assert_equals_fold(store, topic, config, [("a", append(2))])
        await assert_equals_fold(store, other, config, [("a", append(1)), ("b", append(1))])

    async def test_a_large_event_is_kept_whole(self, store: StoreWriter, topic: str, config: TopicConfig) -> None:
        roomy = TopicConfig(**{f: getattr(config, f) for f in config.__struct_fields__} | {"limit_bytes": 4_000_000})
        steps = [("a", append(3, payload=b"x" * 1_000_000)), ("a", append(1))]
        await replicate_slice(store, topic, 0, records_of(steps), roomy)
        await assert_equals_fold(store, topic, roomy, steps)

    async def test_many_journals_in_one_slice(self, store: StoreWriter, topic: str, config: TopicConfig) -> None:
        steps = [(f"j-{i % 700}", append(1 + i % 3)) for i in range(1400)]
        await replicate_slice(store, topic, 0, records_of(steps), config)
        heads = await store.heads(topic, [f"j-{i}" for i in range(1000)])
        truth = expected_journals(steps, config)
        assert heads == {id: each.head for id, each in truth.items()}
        assert sorted([id async for id in store.ids(topic)]) == sorted(truth)
        assert await store.heads(topic, []) == {}


def newer_version() -> bytes:
    """Return a record in the format of a later version of Tidebook."""
    rest = b"\x90"
    return b"\x7b\xfe" + crc32(rest, crc32(b"\xfe")).to_bytes(4, "big") + rest

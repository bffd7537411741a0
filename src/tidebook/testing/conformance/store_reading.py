"""Test cases of a store: pages of events, snapshots, expiry, parked records, waiting."""

from __future__ import annotations

import asyncio

from tidebook.core.action import NEVER
from tidebook.core.key import Key
from tidebook.core.position import FIRST_EPOCH, Position
from tidebook.core.replication_plan import Pointer, PutHead, SliceWrites
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Record
from tidebook.store.port import StoredSnapshot, StoreWriter
from tidebook.testing.conformance.journal_records import FIRST_MS, Step, append, expected_journals, purge, records_of
from tidebook.testing.conformance.store_suite import OpenStore, StoreSuite, read_pages
from tidebook.testing.replicating import replicate_slice


class StoreReadingCases(StoreSuite):
    """Test cases of the methods that readers, snapshots and pipeline jobs call."""

    async def test_pages_continue_across_gaps_and_segment_boundaries(
        self, store: StoreWriter, topic: str, config: TopicConfig
    ) -> None:
        steps = [("a", append(3)), ("a", append(1, at=11)), ("a", append(2, at=10**15)), ("a", append(6))]
        await replicate_slice(store, topic, 0, records_of(steps), config)
        head = await store.head(Key(topic, "a"))
        assert head is not None
        numbers = [1, 2, 3, 11, *range(10**15, 10**15 + 8)]
        for limit in (1, 2, 3, 5, 100):
            assert [row.seq_nr for row in await read_pages(store, Key(topic, "a"), head, limit=limit)] == numbers

    async def test_a_page_is_within_its_bounds(self, store: StoreWriter, topic: str, config: TopicConfig) -> None:
        steps = [("a", append(13)), ("a", append(4, at=31))]
        await replicate_slice(store, topic, 0, records_of(steps), config)
        numbers = [*range(1, 14), *range(31, 35)]
        key = Key(topic, "a")
        head = await store.head(key)
        assert head is not None
        for after in (0, 1, 4, 5, 6, 12, 13, 20, 30, 33, 34):
            for to in (after, 1, 5, 6, 13, 14, 30, 31, 34):
                within = [n for n in numbers if after < n <= to]
                for limit in (1, 4, 50):
                    page = await store.events(key, head, after=after, to=to, limit=limit)
                    found = [row.seq_nr for row in page]
                    assert found == within[: len(found)]
                    assert len(found) <= limit
                    assert bool(found) == bool(within)

    # Snapshots

    async def test_the_newest_snapshots_are_kept(self, store: StoreWriter, open_store: OpenStore, topic: str) -> None:
        key, incarnation = Key(topic, "a"), Position(FIRST_EPOCH, 0)
        for seq_nr in (3, 9, 5, 7):
            await store.save_snapshot(key, incarnation, snapshot(seq_nr), slots=3)
        assert await (await open_store()).snapshots(key, incarnation) == [snapshot(9), snapshot(7), snapshot(5)]

    async def test_a_snapshot_of_the_same_number_overwrites(self, store: StoreWriter, topic: str) -> None:
        key, incarnation = Key(topic, "a"), Position(FIRST_EPOCH, 0)
        await store.save_snapshot(key, incarnation, snapshot(3, b"old"), slots=2)
        await store.save_snapshot(key, incarnation, snapshot(3, b"new"), slots=2)
        assert await store.snapshots(key, incarnation) == [snapshot(3, b"new")]

    async def test_each_incarnation_has_its_own_snapshots(self, store: StoreWriter, topic: str) -> None:
        key, one, two = Key(topic, "a"), Position(FIRST_EPOCH, 0), Position(FIRST_EPOCH, 7)
        await store.save_snapshot(key, one, snapshot(9), slots=1)
        await store.save_snapshot(key, two, snapshot(1), slots=1)
        assert await store.snapshots(key, one) == [snapshot(9)]
        assert await store.snapshots(key, two) == [snapshot(1)]

    async def test_snapshots_are_deleted_up_to_a_number_and_can_be_saved_again(
        self, store: StoreWriter, topic: str
    ) -> None:
        key, incarnation = Key(topic, "a"), Position(FIRST_EPOCH, 0)
        for seq_nr in (1, 2, 3):
            await store.save_snapshot(key, incarnation, snapshot(seq_nr), slots=5)
        await store.delete_snapshots(key, incarnation, to=2)
        assert await store.snapshots(key, incarnation) == [snapshot(3)]
        await store.save_snapshot(key, incarnation, snapshot(2, b"again"), slots=5)
        assert await store.snapshots(key, incarnation) == [snapshot(3), snapshot(2, b"again")]

    async def test_a_purge_clears_only_the_snapshots_of_its_incarnation(
        self, store: StoreWriter, topic: str, config: TopicConfig
    ) -> None:
        key, one, two = Key(topic, "a"), Position(FIRST_EPOCH, 0), Position(FIRST_EPOCH, 2)
        records = records_of([("a", append(3)), ("a", purge()), ("a", append(3))])
        await replicate_slice(store, topic, 0, records[:1], config)
        await store.save_snapshot(key, one, snapshot(3), slots=2)
        await store.save_snapshot(key, two, snapshot(1), slots=2)
        await replicate_slice(store, topic, 0, records[1:], config)
        assert await store.snapshots(key, one) == []
        assert await store.snapshots(key, two) == [snapshot(1)]

    # Expiry, parked records, waiting

    async def test_expired_journals_are_found(self, store: StoreWriter, topic: str, config: TopicConfig) -> None:
        steps: list[Step] = [
            ("over", append(1, expire_after_ms=1000)),
            ("later", append(1, expire_after_ms=60_000)),
            ("without", append(1)),
            ("no more", append(1, expire_after_ms=1000)),
            ("no more", append(1, expire_after_ms=NEVER)),
            ("purged", append(1, expire_after_ms=1000)),
            ("purged", purge()),
        ]
        await replicate_slice(store, topic, 0, records_of(steps), config)
        truth = expected_journals(steps, config)
        assert [each async for each in store.expired(topic, now_ms=FIRST_MS + 999)] == []
        found = [each async for each in store.expired(topic, now_ms=FIRST_MS + 30_000)]
        assert found == [("over", truth["over"].head)]
        later = {id async for id, _ in store.expired(topic, now_ms=FIRST_MS + 10**6)}
        assert later == {"over", "later"}

    async def test_graves_are_found_and_removed_unless_a_new_incarnation_follows(
        self, store: StoreWriter, topic: str, config: TopicConfig
    ) -> None:
        ids = [f"j-{i}" for i in range(5)]
        steps: list[Step] = [*((id, append(3)) for id in ids), *((id, purge()) for id in ids[:4])]
        await replicate_slice(store, topic, 0, records_of(steps), config)
        graves = [each async for each in store.graves(topic)]
        truth = expected_journals(steps, config)
        assert dict(graves) == {id: truth[id].head for id in ids[:4]}
        more: list[Step] = [*steps, ("j-1", append(1))]
        await replicate_slice(store, topic, 0, records_of(more)[len(steps) :], config)
        await store.remove_graves(topic, [each for each in graves if each[0] != "j-3"])
        assert await store.heads(topic, ids) == {
            id: each.head for id, each in expected_journals(more, config).items() if id not in ("j-0", "j-2")
        }
        assert [id async for id, _ in store.graves(topic)] == ["j-3"]
        # A zombie writes its purged head a second time.
        with self.late():
            await store.apply(SliceWrites(topic, 0, None, Pointer(Position(FIRST_EPOCH, 0), FIRST_MS), (
                (PutHead(Key(topic, "j-0"), dict(graves)["j-0"]),),
            )))  # fmt: skip
        assert await store.head(Key(topic, "j-0")) is None

    async def test_a_damaged_record_is_parked_and_removed(
        self, store: StoreWriter, topic: str, config: TopicConfig
    ) -> None:
        steps = [("a", append()), ("a", append()), ("a", append())]
        records = records_of(steps)
        records[1] = Record(1, records[1].timestamp_ms, b"a", b"no record at all")
        await replicate_slice(store, topic, 0, records, config)
        parked = [each async for each in store.parked(topic)]
        assert [(each.position.offset, each.id, each.value) for each in parked] == [(1, "a", b"no record at all")]
        assert parked[0] in [each async for each in store.parked()]
        assert [each async for each in store.parked(f"{topic}.other")] == []
        await store.unpark(parked)
        assert [each async for each in store.parked(topic)] == []
        head = await store.head(Key(topic, "a"))
        assert head is not None
        assert (head.seq_nr, head.position.offset) == (2, 2)

    async def test_waiting_ends_when_the_pointer_has_moved(
        self, store: StoreWriter, open_store: OpenStore, topic: str, config: TopicConfig
    ) -> None:
        second, records = await open_store(), records_of([("a", append()), ("a", append())])
        for i, record in enumerate(records):
            beyond = Position(FIRST_EPOCH, i - 1) if i else None
            waiting = asyncio.create_task(second.wait(topic, 0, beyond=beyond, timeout_s=30))
            await replicate_slice(store, topic, 0, [record], config)
            assert await waiting is True
        assert await second.wait(topic, 0, beyond=Position(FIRST_EPOCH, 0), timeout_s=0) is True

    async def test_waiting_ends_when_the_time_runs_out(
        self, store: StoreWriter, topic: str, config: TopicConfig
    ) -> None:
        assert await store.wait(topic, 0, beyond=None, timeout_s=0.02) is False
        await replicate_slice(store, topic, 0, records_of([("a", append())]), config)
        assert await store.wait(topic, 0, beyond=Position(FIRST_EPOCH, 0), timeout_s=0.02) is False


def snapshot(seq_nr: int, payload: bytes = b"state") -> StoredSnapshot:
    return StoredSnapshot(seq_nr, 2, payload, FIRST_MS + seq_nr)

"""Events whose numbers are far apart: reading, deleting and purging take as many statements as there are events."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from tests.open_adapters import OpenCassandra
from tidebook.core.head import Head, Jump
from tidebook.core.key import Key
from tidebook.core.position import Position, write_stamp
from tidebook.core.repair import Repair
from tidebook.core.replication_plan import EventRow, Pointer, PutSegments
from tidebook.core.topic_config import TopicConfig
from tidebook.replication.journal_state import FoldedJournal, JournalState, plan_repair
from tidebook.replication.slice import plan_slice
from tidebook.store.cassandra import CassandraStore
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.mutations import Batch, CqlStatement
from tidebook.testing.conformance.journal_records import Step, append, delete, purge, records_of
from tidebook.testing.replicating import replicate_slice

pytestmark = pytest.mark.cassandra

#: A call that visits every number between the events is cancelled after this time.
LONG_S = 120


class Counted:
    """Counts the statements that a store sends, by their text."""

    def __init__(self, store: CassandraStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count: Counter[str] = Counter()
        read, write = store._session.read, store.write

        async def counted_read(query: str, *values: Any, **how: Any) -> Any:
            self.count[query] += 1
            return await read(query, *values, **how)

        async def counted_write(batch: Batch) -> None:
            self.count.update(statement.cql for statement in batch)
            await write(batch)

        monkeypatch.setattr(store._session, "read", counted_read)
        store.write = counted_write

    def take(self) -> Counter[str]:
        counted, self.count = self.count, Counter()
        return counted


@pytest.mark.parametrize(
    ("count", "apart"),
    [(66, 10**13), (5000, 60_000_000)],
    ids=["66 appends far apart", "5,000 events numbered by microseconds"],
)
@pytest.mark.timeout(600)
async def test_events_far_apart_take_as_many_statements_as_there_are_events(
    open_store: OpenCassandra, monkeypatch: pytest.MonkeyPatch, count: int, apart: int
) -> None:
    store = await open_store()
    topic = f"t-{uuid4().hex}"
    config = await store.set_topic_config(
        topic, TopicConfig(topic_id=topic, partitions=1, segment_size=1000), expected=None
    )
    numbers = [apart * i for i in range(1, count + 1)]
    steps: list[Step] = [("a", append(at=number)) for number in numbers]
    key = Key(topic, "a")
    counted = Counted(store, monkeypatch)
    async with asyncio.timeout(LONG_S):
        await replicate_slice(store, topic, 0, records_of(steps), config)
        written = counted.take()
        assert written[cql.PUT_EVENT] == count
        assert written[cql.PUT_SEGMENT] == count - 1
        head = await store.head(key)
        assert head is not None

        found: list[int] = []
        while page := await store.events(key, head, after=found[-1] if found else 0, to=head.seq_nr, limit=1000):
            found += [row.seq_nr for row in page]
        assert found == numbers
        read = counted.take()
        assert read[cql.EVENTS] <= count + 100
        assert read[cql.SEGMENTS] <= 2 + count / 10

        half = numbers[count // 2]
        records = records_of([("a", delete(half))], start=count)
        await replicate_slice(store, topic, 0, records, config)
        deleted = counted.take()
        assert deleted[cql.CLEAR_SEGMENT] + deleted[cql.CLEAR_EVENTS] <= count // 2 + 1
        head = await store.head(key)
        assert head is not None
        assert (await store.events(key, head, after=half, to=head.seq_nr, limit=1))[0].seq_nr == numbers[count // 2 + 1]

        counted.take()
        await replicate_slice(store, topic, 0, records_of([("a", purge())], start=count + 1), config)
        # What was deleted is no longer listed.
        purged = counted.take()
        assert purged[cql.CLEAR_SEGMENT] <= count - count // 2
        listed = await store._session.read(cql.SEGMENTS, [key.id, topic, config.epoch, 0, 0, 2**53, 10])
        assert list(listed.all()) == []


async def replicated(store: CassandraStore, numbers: Sequence[int]) -> tuple[Key, TopicConfig, Pointer, Head]:
    """Replicate a journal of events with these numbers."""
    topic = f"t-{uuid4().hex}"
    config = await store.set_topic_config(
        topic, TopicConfig(topic_id=topic, partitions=1, segment_size=1000), expected=None
    )
    await replicate_slice(store, topic, 0, records_of([("a", append(at=number)) for number in numbers]), config)
    key = Key(topic, "a")
    pointer, head = await store.pointer(topic, 0), await store.head(key)
    assert pointer is not None
    assert head is not None
    return key, config, pointer, head


def old_head_of(head: Head, numbers: Sequence[int]) -> Head:
    """Return the head as an earlier version encoded it, with the jumps in the head itself."""
    return msgspec.structs.replace(head, run_start=0, jumps=tuple(Jump(last, next) for last, next in pairwise(numbers)))


async def test_a_repair_of_an_old_head_lists_the_segments_of_all_events(open_store: OpenCassandra) -> None:
    """The head differs from the result of today's fold; its rows do not, and none of their segments is listed."""
    store = await open_store()
    numbers = [1, 10**6, 10**9, 10**12]
    key, config, pointer, head = await replicated(store, numbers)
    assert await found(store, key, head) == numbers
    earlier = old_head_of(head, numbers)
    await store.repair(Repair(key=key, partition=0, pointer=pointer, rev=1, head=earlier))
    unlist = [write_stamp(head.incarnation), key.id, key.topic, *head.incarnation]
    await store.write([CqlStatement(cql.CLEAR_ALL_SEGMENTS, unlist)])
    assert await found(store, key, head) == numbers[-1:]
    assert await found(store, key, earlier) == numbers

    journal = JournalState(head, {number: row async for number, row in rows(store, key, earlier)})
    await store.repair(plan_repair(FoldedJournal(key, 0, journal, Position(1, 0), False), journal, pointer, config, 2))
    assert await store.head(key) == head
    assert await found(store, key, head) == numbers


async def test_the_next_jump_of_an_old_head_lists_the_segments_around_its_gaps(open_store: OpenCassandra) -> None:
    store = await open_store()
    numbers = [1, 10**6, 10**9]
    key, config, pointer, head = await replicated(store, numbers)
    await store.repair(Repair(key=key, partition=0, pointer=pointer, rev=1, head=old_head_of(head, numbers)))
    plan = await plan_slice(store, key.topic, 0, records_of([("a", append(at=10**12))], start=3), config)
    assert plan.writes is not None
    [of_key] = plan.writes.keys
    listed = [[*each] for write in of_key if isinstance(write, PutSegments) for each in write.segments]
    assert listed == [[0], [999], [999_999]]


async def rows(store: CassandraStore, key: Key, head: Head) -> AsyncIterator[tuple[int, EventRow]]:
    after = 0
    while page := await store.events(key, head, after=after, to=head.seq_nr, limit=100):
        for row in page:
            yield row.seq_nr, row
        after = page[-1].seq_nr


async def found(store: CassandraStore, key: Key, head: Head) -> list[int]:
    return [number async for number, _ in rows(store, key, head)]

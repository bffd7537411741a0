"""One log partition: gaps, retries, and errors that stop only this partition."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tidebook.core.action import Mark
from tidebook.core.errors import Fenced, LogLost, OutcomeUnknown, TidebookError, Unavailable
from tidebook.core.key import Key
from tidebook.core.record import encode_record, read_record
from tidebook.core.replication_plan import SliceWrites
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Outgoing, Record
from tidebook.log.sqlite.log import SqliteLog
from tidebook.pipeline.task import ConcurrentPartitions
from tidebook.replication import partition as partitions
from tidebook.replication import slice as slices
from tidebook.replication.partition import PartitionReplicator
from tidebook.replication.slice import plan_slice
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.runtime.clock import SystemClock
from tidebook.runtime.metrics import Metrics
from tidebook.store.sqlite.store import SqliteStore
from tidebook.testing.conformance.journal_records import FIRST_MS, append, records_of, topic_config
from tidebook.wiring.settings import Settings

TOPIC = "orders"
KEY = Key(TOPIC, "a")


class FakeWorker:
    """A fake worker with a log, a store, and errors that `apply` raises before or after it writes."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(folder)
        self.opened_log = SqliteLog(folder, clock=SystemClock(), metrics=Metrics())
        self.opened_store = SqliteStore(folder, metrics=Metrics())
        self.applied = 0
        self.before: list[TidebookError] = []
        self.after: list[TidebookError] = []
        self._apply = self.opened_store.apply
        self.opened_store.apply = self.apply  # type: ignore[method-assign]

    async def log(self) -> SqliteLog:
        return self.opened_log

    async def store(self) -> SqliteStore:
        return self.opened_store

    async def apply(self, writes: SliceWrites) -> None:
        if self.before:
            raise self.before.pop(0)
        await self._apply(writes)
        self.applied += 1
        if self.after:
            raise self.after.pop(0)

    async def numbers(self) -> list[tuple[int, int]]:
        """Return the events of the journal as (seq_nr, offset)."""
        head = await self.opened_store.head(KEY)
        if head is None:
            return []
        rows = await self.opened_store.events(KEY, head, after=0, to=head.seq_nr, limit=100)
        return [(row.seq_nr, row.position.offset) for row in rows]

    async def close(self) -> None:
        await self.opened_store.close()
        await self.opened_log.close()


@pytest.fixture
async def fake_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeWorker]:
    for name in ("FENCED_WAIT_S", "RETRY_FIRST_S"):
        monkeypatch.setattr(partitions, name, 0.0)
    fake_worker = FakeWorker(tmp_path)
    yield fake_worker
    await fake_worker.close()


@pytest.fixture
async def config(fake_worker: FakeWorker) -> TopicConfig:
    return await fake_worker.opened_store.set_topic_config(TOPIC, topic_config(TOPIC), expected=None)


def replicator(fake_worker: Any, config: TopicConfig, *, wait_s: float = 30.0) -> PartitionReplicator:
    return PartitionReplicator(fake_worker, TOPIC, 0, config, wait_s=wait_s)


def offset(replicator: PartitionReplicator) -> int | None:
    return None if replicator.pointer is None else replicator.pointer.position.offset


def appends(n: int, start: int = 0) -> list[Record]:
    return records_of([("a", append()) for _ in range(n)], start=start)


async def test_a_gap_between_two_batches_of_a_task_is_a_hole_that_the_pointer_passes(
    fake_worker: FakeWorker, config: TopicConfig
) -> None:
    """Offsets are sparse. The log is not read again: Spark has read the whole range."""
    task = replicator(fake_worker, config)
    await task.replicate(appends(2))
    await task.replicate(appends(2, start=7))
    assert await fake_worker.numbers() == [(1, 0), (2, 1), (3, 7), (4, 8)]
    assert offset(task) == 8


async def test_a_gap_before_the_first_batch_is_read_from_the_log(fake_worker: FakeWorker, config: TopicConfig) -> None:
    await fake_worker.opened_log.create_topic(TOPIC, 1)
    records = appends(5)
    for record in records:
        await fake_worker.opened_log.append(Outgoing(TOPIC, 0, record.key, record.value or b""))
    task = replicator(fake_worker, config)
    await task.replicate(records[3:])
    assert await fake_worker.numbers() == [(n + 1, n) for n in range(5)]
    assert task.records == 2  # the records that it was given


async def test_a_gap_before_the_first_batch_that_the_log_has_lost_is_an_error(
    fake_worker: FakeWorker, config: TopicConfig
) -> None:
    await fake_worker.opened_log.create_topic(TOPIC, 1)
    records = appends(5)
    for record in records:
        await fake_worker.opened_log.append(Outgoing(TOPIC, 0, record.key, record.value or b""))
    await fake_worker.opened_log.truncate(TOPIC, 0, before=3)
    with pytest.raises(LogLost):
        await replicator(fake_worker, config).replicate(records[3:])
    assert await fake_worker.numbers() == []


@pytest.mark.timeout(20)
async def test_a_replicator_of_a_topic_that_was_created_again_is_fenced_and_neither_loses_nor_parks_a_record(
    fake_worker: FakeWorker,
) -> None:
    """Its configuration is that of the deleted topic, in which some of these journals belonged to another partition."""
    store, ids = fake_worker.opened_store, [str(number) for number in range(20)]
    old = await store.set_topic_config(TOPIC, topic_config("old", partitions=2), expected=None)
    await store.delete_topic(TOPIC)
    new = await store.set_topic_config(TOPIC, topic_config("new", partitions=1), expected=None)
    await fake_worker.opened_log.create_topic(TOPIC, 1)
    records = records_of([(id, append()) for id in ids])
    for record in records:
        await fake_worker.opened_log.append(Outgoing(TOPIC, 0, record.key, record.value or b""))
    with pytest.raises(Fenced):
        await replicator(fake_worker, old).catch_up(len(records))
    with pytest.raises(Fenced):
        await replicator(fake_worker, old).replicate(records[5:])  # it reads those before them from the log
    assert await store.pointers(TOPIC) == {}
    assert [each async for each in store.parked()] == []
    await replicator(fake_worker, new).catch_up(len(records))
    assert (await store.heads(TOPIC, ids)).keys() == set(ids)


async def test_a_replicator_is_overtaken_only_if_another_one_has_replicated_its_events(
    fake_worker: FakeWorker, config: TopicConfig
) -> None:
    """A driver replicates its own ticks, and the tail of a lease must not end because of them."""
    tick = Record(0, FIRST_MS, None, encode_record(Mark(1), limit_bytes=1_000))
    events = appends(1, start=1)
    await replicator(fake_worker, config).replicate([tick, *events])
    late = replicator(fake_worker, config)
    await late.replicate([tick])
    assert not late.overtaken
    await late.replicate(events)
    assert late.overtaken


@pytest.mark.parametrize("remaining", [0, 2])
async def test_a_log_that_became_shorter_is_an_error_and_is_not_read_for_ever(
    fake_worker: FakeWorker, config: TopicConfig, remaining: int
) -> None:
    """It is another log now, so the run ends, and its next start checks the topic."""
    await fake_worker.opened_log.create_topic(TOPIC, 1)
    for record in appends(remaining):
        await fake_worker.opened_log.append(Outgoing(TOPIC, 0, record.key, record.value or b""))
    task = replicator(fake_worker, config)
    with pytest.raises(LogLost, match="that it contained before") as lost:
        await task.replicate(appends(2, start=5))
    assert (lost.value.first, lost.value.last) == (remaining, 4)
    assert await fake_worker.numbers() == [(n + 1, n) for n in range(remaining)]


async def test_a_partition_catches_up_with_the_log_page_by_page(
    fake_worker: FakeWorker, config: TopicConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partition reads the log itself, and skips what another replicator has written in between."""
    monkeypatch.setattr(partitions, "PAGE_RECORDS", 2)
    await fake_worker.opened_log.create_topic(TOPIC, 1)
    for record in appends(5):
        await fake_worker.opened_log.append(Outgoing(TOPIC, 0, record.key, record.value or b""))
    fake_worker.after = [Fenced("another was faster")]
    task = replicator(fake_worker, config)
    await task.catch_up(4)
    assert (await task.next_offset(), task.stopped) == (4, None)
    assert task.records == 2  # the other replicator wrote the first page
    await task.catch_up(5)
    assert task.records == 3
    assert await fake_worker.numbers() == [(n + 1, n) for n in range(5)]


@pytest.mark.parametrize(
    "error", [Fenced("another was faster"), OutcomeUnknown("no answer"), Unavailable("it is down")]
)
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_task_plans_and_writes_again_after_a_transient_failure(
    fake_worker: FakeWorker, config: TopicConfig, error: TidebookError, when: str
) -> None:
    """Each event exists once, whether or not the failed write took effect."""
    getattr(fake_worker, when).extend([error, error])
    task = replicator(fake_worker, config)
    await task.replicate(appends(3))
    await task.replicate(appends(1, start=3))
    assert await fake_worker.numbers() == [(n + 1, n) for n in range(4)]
    assert (fake_worker.before, fake_worker.after, offset(task)) == ([], [], 3)


async def test_a_task_gives_up_if_it_is_always_fenced_or_the_store_never_responds(
    fake_worker: FakeWorker, config: TopicConfig
) -> None:
    fake_worker.before = [Fenced("another was faster") for _ in range(partitions.FENCED_MAX + 1)]
    with pytest.raises(Fenced):
        await replicator(fake_worker, config).replicate(appends(1))
    fake_worker.before = [OutcomeUnknown("no answer")]
    with pytest.raises(OutcomeUnknown):
        await replicator(fake_worker, config, wait_s=-1.0).replicate(appends(1))


async def test_an_unexpected_error_stops_one_partition_and_the_next_batch_retries_it(
    fake_worker: FakeWorker, config: TopicConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    poison = appends(2)[1].value

    def failing(value: bytes | None, *, limit_bytes: int) -> Any:
        if value == poison:
            raise RecursionError("too deep")
        return read_record(value, limit_bytes=limit_bytes)

    monkeypatch.setattr(slices, "read_record", failing)
    records = appends(3)
    task = replicator(fake_worker, config)
    await task.replicate(records[:1])
    await task.replicate(records[1:])
    await task.replicate(appends(1, start=3))
    assert task.stopped == "replicating offsets 1 to 2 failed: RecursionError: too deep"
    assert (offset(task), task.records) == (0, 4)
    assert "orders/0 is stopped" in caplog.text
    monkeypatch.setattr(slices, "read_record", read_record)
    again = replicator(fake_worker, config)
    await again.replicate(records[1:])
    assert (again.stopped, await fake_worker.numbers()) == (None, [(1, 0), (2, 1), (3, 2)])


async def test_an_unexpected_error_does_not_stop_other_partitions(
    fake_worker: FakeWorker, config: TopicConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(store: Any, topic: str, partition: int, *more: Any, **named: Any) -> Any:
        if partition == 1:
            raise AssertionError("nobody thought of this")
        return await plan_slice(store, topic, partition, *more, **named)

    monkeypatch.setattr(partitions, "plan_slice", failing)
    portal = BlockingPortal()
    try:
        worker: Any = fake_worker
        worker.submit = portal.submit
        task = ConcurrentPartitions(worker, {TOPIC: config}, wait_s=1)

        def run() -> list[Any]:
            for partition in (1, 0):
                task.begin(TOPIC, partition, appends(2))
            return [(done.partition, done.stopped is None, done.records) for done in task.finish()]

        found = await asyncio.to_thread(run)
    finally:
        portal.close()
    assert found == [(1, False, 2), (0, True, 2)]
    assert await fake_worker.numbers() == [(1, 0), (2, 1)]

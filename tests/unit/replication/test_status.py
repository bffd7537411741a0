"""The replication progress of a topic: lag, its age, offsets that the log lost, and the last report of a run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tidebook.core.errors import LogLost, TidebookError, Unavailable
from tidebook.core.event import Event
from tidebook.core.position import Position
from tidebook.core.topic_config import TopicConfig
from tidebook.replication import status as statuses
from tidebook.replication.status import (
    JobStatus,
    LostOffsets,
    accept_losses,
    find_lag,
    find_starts,
    partition_statuses,
    read_job_status,
    topic_configs,
    write_job_status,
)
from tidebook.replication.ticks import tick
from tidebook.testing.clock import ManualClock
from tidebook.testing.faults import Faults
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings

TOPIC = "orders"
BEGAN_MS = 1_700_000_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(BEGAN_MS)


@pytest.fixture
async def book(tmp_path: Path, clock: ManualClock) -> AsyncIterator[Book]:
    async with Book(Settings(tmp_path, {"journal": Section(None, {"partitions": 1})}), clock=clock) as opened:
        yield opened


async def append(book: Book, clock: ManualClock, count: int = 1) -> None:
    """Append events, each a second after the previous one."""
    for n in range(count):
        await book.journal(TOPIC).append("a", [Event(n)])
        clock.advance(1_000)


async def one_status(book: Book, now_ms: int) -> statuses.PartitionStatus:
    [found] = await partition_statuses(book.log, book.store, await topic_configs(book.store), now_ms=now_ms)
    return found


async def test_a_topic_that_was_never_written_has_no_config(book: Book, clock: ManualClock) -> None:
    await append(book, clock)
    config = await book.journal(TOPIC).topic_config()
    assert await topic_configs(book.store) == {TOPIC: config}
    assert await topic_configs(book.store, [TOPIC, "nobody"]) == {TOPIC: config}
    assert await topic_configs(book.store, ["nobody"]) == {}


async def test_the_lag_is_counted_from_the_first_record_that_is_not_replicated(book: Book, clock: ManualClock) -> None:
    await append(book, clock, 3)
    never = await one_status(book, BEGAN_MS + 10_000)
    assert (never.topic, never.partition, never.start, never.end, never.replicated) == (TOPIC, 0, 0, 3, 0)
    assert (never.lag, never.lag_s, never.lost) == (3, 10.0, None)
    await replicate(book.log, book.store, TOPIC)
    done = await one_status(book, BEGAN_MS + 10_000)
    assert (done.replicated, done.lag, done.lag_s) == (3, 0, 0.0)
    await append(book, clock, 2)
    more = await one_status(book, BEGAN_MS + 10_000)
    assert (more.replicated, more.end, more.lag, more.lag_s) == (3, 5, 2, 7.0)
    assert (await one_status(book, 0)).lag_s == 0.0  # a clock that is earlier than the log's


async def test_the_age_is_that_of_the_pointer_if_the_log_is_unavailable(book: Book, clock: ManualClock) -> None:
    await append(book, clock, 2)
    await replicate(book.log, book.store, TOPIC)
    await append(book, clock, 2)
    faults = Faults()
    faults.fail("read", Unavailable("the log is down"), times=None)
    configs = await topic_configs(book.store)
    [found] = await partition_statuses(faults.around(book.log), book.store, configs, now_ms=BEGAN_MS + 10_000)
    assert (found.lag, found.lag_s) == (2, 9.0)


async def test_offsets_that_the_log_lost_are_named_refused_and_skipped_when_accepted(
    book: Book, clock: ManualClock
) -> None:
    await append(book, clock, 2)
    await replicate(book.log, book.store, TOPIC)
    await append(book, clock, 4)
    configs = await topic_configs(book.store)
    assert await find_starts(book.log, book.store, configs) == {TOPIC: {"0": 2}}
    assert await accept_losses(book.log, book.store) == []
    await book.log.truncate(TOPIC, 0, before=2)
    assert (await one_status(book, BEGAN_MS)).lost is None
    await book.log.truncate(TOPIC, 0, before=5)
    lost = LostOffsets(TOPIC, 0, 2, 4)
    found = await one_status(book, BEGAN_MS + 10_000)
    assert (found.lost, found.lag, found.lag_s) == (lost, 1, 5.0)
    with pytest.raises(LogLost, match="--accept-loss") as caught:
        await find_starts(book.log, book.store, configs)
    assert (caught.value.topic, caught.value.partition, caught.value.first, caught.value.last) == (TOPIC, 0, 2, 4)
    before = await book.store.pointer(TOPIC, 0)
    assert before is not None
    assert await accept_losses(book.log, book.store, [TOPIC]) == [lost]
    after = await book.store.pointer(TOPIC, 0)
    assert after is not None
    assert (after.position, after.time_ms) == (Position(before.position.epoch, 4), before.time_ms)
    assert await find_starts(book.log, book.store, configs) == {TOPIC: {"0": 5}}
    assert await accept_losses(book.log, book.store) == []


async def test_losses_before_the_first_replication_can_be_accepted(book: Book, clock: ManualClock) -> None:
    await append(book, clock, 3)
    await book.log.truncate(TOPIC, 0, before=2)
    assert await accept_losses(book.log, book.store) == [LostOffsets(TOPIC, 0, 0, 1)]
    pointer = await book.store.pointer(TOPIC, 0)
    assert pointer is not None
    assert (pointer.position.offset, pointer.time_ms) == (1, 0)


async def lag_of(book: Book, config: TopicConfig, *, stops: dict[int, int] | None = None) -> str | None:
    pointers = await book.store.pointers(TOPIC)
    return await find_lag(
        book.log, TOPIC, config, pointers, partitions=[0], stops=stops or {}, now_ms=BEGAN_MS + 10_000
    )


async def test_a_warning_counts_the_records_and_reports_the_age_of_the_oldest(
    book: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await append(book, clock, 2)
    config = await book.journal(TOPIC).topic_config()
    await replicate(book.log, book.store, TOPIC)
    assert await lag_of(book, config) is None
    await append(book, clock, 3)
    assert str(await lag_of(book, config)).startswith(
        "topic orders: 3 records of the log are not in the store yet, the oldest for 8.0 s: "
    )
    assert await lag_of(book, config, stops={0: 2}) is None
    assert "orders: 1 records" in str(await lag_of(book, config, stops={0: 3}))
    assert "orders: 3 records" in str(await lag_of(book, config, stops={0: 99}))
    monkeypatch.setattr(statuses, "LOOK_RECORDS_MAX", 1)
    assert "orders: 3 records" in str(await lag_of(book, config))
    await book.log.truncate(TOPIC, 0, before=4)
    assert "orders: 1 records of the log are not in the store yet, the oldest for 6.0 s" in str(
        await lag_of(book, config)
    )


async def test_marks_that_are_not_replicated_are_no_lag_and_do_not_count_as_the_oldest(
    book: Book, clock: ManualClock
) -> None:
    await append(book, clock)
    await replicate(book.log, book.store, TOPIC)
    config = await book.journal(TOPIC).topic_config()
    await tick(book.log, book.store)
    clock.advance(1_000)
    assert await lag_of(book, config) is None
    await append(book, clock)
    assert "orders: 1 records of the log are not in the store yet, the oldest for 8.0 s" in str(
        await lag_of(book, config)
    )


async def test_a_recreated_topic_is_refused_and_a_new_epoch_begins_after_adopt(book: Book, clock: ManualClock) -> None:
    await append(book, clock, 2)
    await replicate(book.log, book.store, TOPIC)
    configs = await topic_configs(book.store)
    await book.log.delete_topic(TOPIC)
    await book.log.create_topic(TOPIC, 1)
    with pytest.raises(TidebookError, match="adopt"):
        await find_starts(book.log, book.store, configs)


async def test_the_last_report_of_a_run_is_read_as_it_was_written(book: Book, clock: ManualClock) -> None:
    assert await read_job_status(book.store) is None
    for records in (1, 2):
        written = JobStatus(5, 1, records, 0, 1.5, 0.1, {"orders/0": "it is stopped"})
        await write_job_status(book.store, written)
        assert await read_job_status(book.store) == written

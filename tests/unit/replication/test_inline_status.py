"""The status of the replication of a process, its counters, and the end of its waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from tidebook.core.action import Mark
from tidebook.core.errors import Corrupt, Unavailable
from tidebook.core.event import Event
from tidebook.core.position import Position
from tidebook.core.record import decode_record
from tidebook.core.replication_plan import Pointer, SliceWrites
from tidebook.log.port import Outgoing, read_all
from tidebook.replication import inline
from tidebook.replication.inline import InlineReplication, InlineStatus, replicate_to_end
from tidebook.replication.status import read_job_status
from tidebook.tags.horizon import renew_followed
from tidebook.testing.conformance.store_slices import newer_version
from tidebook.testing.faults import Faults
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings

TOPIC = "orders"
WITHIN_S = 20.0


@pytest.fixture
async def book(tmp_path: Path) -> AsyncIterator[Book]:
    async with Book(Settings(tmp_path, {"journal": Section(None, {"partitions": 2})})) as opened:
        yield opened


def replication_of(book: Book, faults: Faults | None = None, **how: Any) -> InlineReplication:
    log, store = (book.log, book.store) if faults is None else (faults.around(book.log), faults.around(book.store))
    return InlineReplication(log, store, clock=book.clock, metrics=book.metrics, **how)


async def eventually(reached: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not await reached():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def replicated(book: Book, topic: str = TOPIC) -> bool:
    pointers = await book.store.pointers(topic)
    ends = {number: await book.log.end(topic, number) for number in range(2)}
    return all(end == 0 or (n in pointers and pointers[n].position.offset == end - 1) for n, end in ends.items())


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (InlineStatus(state="starting"), "starting"),
        (InlineStatus(state="active"), "running"),
        (InlineStatus(state="passive"), "passive: another process replicates"),
        (InlineStatus(state="waiting"), "waiting: there is no topic yet"),
        (InlineStatus(state="waiting", last_error="it is down"), "waiting: it is down"),
        (
            InlineStatus(state="active", stopped={"orders/0": "newer", "orders/1": "x"}),
            "running, 2 partitions are stopped: orders/0: newer",
        ),
    ],
)
def test_a_status_is_one_line_of_text_and_a_row(status: InlineStatus, text: str) -> None:
    assert status.describe() == text
    row = status.as_row()
    assert (row["state"], row["stopped"], row["failures"]) == (status.state, status.stopped, 0)


async def test_records_are_counted_once_and_parked_ones_separately(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline, "STATUS_EVERY_S", 0.0)
    journal = book.journal(TOPIC)
    done = await journal.append("a", [Event(1), Event(2)])
    await journal.append("a", [Event(3)])
    await book.log.append(Outgoing(TOPIC, done.partition, b"a", b"damaged"))
    replication = replication_of(book)
    assert replication.status().state == "starting"
    replication.start()
    await eventually(lambda: replicated(book))
    await eventually(lambda: _reported(book, 3))
    status = replication.status()
    assert (status.state, status.batches, status.records, status.parked, status.failures) == ("active", 1, 3, 1, 0)
    await journal.append("a", [Event(4)])
    await eventually(lambda: _reported(book, 4))
    reported = await read_job_status(book.store)
    assert reported is not None
    assert (reported.batches, reported.parked, reported.engine) == (2, 1, "inline")
    assert reported.process is not None
    assert reported.records_per_s > 0
    assert book.metrics.counted("pipeline_records") == 4
    await replication.close()
    assert replication.status().state == "closed"


async def _reported(book: Book, records: int) -> bool:
    status = await read_job_status(book.store)
    return status is not None and status.records == records


async def test_events_appended_right_before_closing_are_replicated_with_their_ticks(book: Book) -> None:
    replication = replication_of(book)
    journal = book.journal(TOPIC)
    await journal.append("a", [Event(1, tags={"x"})])
    replication.start()
    await eventually(lambda: replicated(book))
    for n in range(3):
        await journal.append(f"j-{n}", [Event(n, tags={"x"})])
    await replication.close()
    assert await replicated(book)
    assert len([event async for event in book.tags.read("x")]) == 4
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("tidebook-replication")]
    again = replication_of(book)
    await again.close()  # this replication was never started
    assert again.status().state == "closed"


async def test_only_the_given_topics_are_replicated(book: Book) -> None:
    for topic in (TOPIC, "users"):
        await book.journal(topic).append("a", [Event(1)])
    replication = replication_of(book, topics=["users"])
    replication.start()
    await eventually(lambda: replicated(book, "users"))
    await replication.close()
    assert await book.store.pointers(TOPIC) == {}


async def test_tags_that_are_not_cleared_keep_deleted_events(book: Book) -> None:
    journal = book.journal(TOPIC)
    await journal.append("a", [Event(n, tags={"x"}) for n in range(3)])
    await journal.delete("a", to=2)
    await replicate_to_end(book.log, book.store, clear_tags=False)
    assert len([event async for event in book.tags.read("x")]) == 3


@pytest.mark.parametrize("call", ["topics", "pointer", "end"])
async def test_a_failure_is_not_retried_without_a_pause(book: Book, call: str) -> None:
    await book.journal(TOPIC).append("a", [Event(1)])
    faults = Faults()
    faults.fail(call, Unavailable("it is down"), times=None)
    replication = replication_of(book, faults)
    replication.start()
    await asyncio.sleep(0.4)  # there is no event to wait for
    assert 1 <= faults.calls[call] <= 30
    status = replication.status()
    assert status.failures >= 1
    assert "it is down" in str(status.last_error)
    faults.heal()
    await eventually(lambda: replicated(book))
    await replication.close()


@pytest.mark.parametrize(
    ("error", "is_stopped"),
    [(Unavailable("it is down"), False), (Corrupt("it is damaged"), True), (ZeroDivisionError("a payload"), True)],
    ids=["transient", "permanent", "unexpected"],
)
async def test_a_partition_is_stopped_only_by_an_error_that_is_not_transient(
    book: Book, caplog: pytest.LogCaptureFixture, error: Any, is_stopped: bool
) -> None:
    done = await book.journal(TOPIC).append("a", [Event(1)])
    at, faults = f"{TOPIC}/{done.partition}", Faults()
    faults.fail("wait", error, times=None, where=lambda topic, partition, offset: partition == done.partition)
    replication = replication_of(book, faults)
    replication.start()

    async def has_failed() -> bool:
        return replication.status().failures >= 3

    await eventually(has_failed)
    reason = "ZeroDivisionError" if isinstance(error, ZeroDivisionError) else str(error)
    assert replication.status().stopped == ({at: reason} if is_stopped else {})
    assert replication.status().last_error == f"{at}: {reason}"
    faults.heal()
    await eventually(lambda: replicated(book))
    assert replication.status().stopped == {}
    await replication.close()
    assert caplog.text.count("failed, and is retried") == 1, "the same failure is logged once"


async def test_a_topic_that_the_log_has_lost_is_stopped_with_the_reason_until_it_exists_again(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inline, "RETRY_MAX_S", 0.1)
    await book.journal(TOPIC).append("a", [Event(1)])
    faults = Faults()
    faults.fail("topic", cast(Any, Corrupt("the log does not know it")), times=2)
    replication = replication_of(book, faults)
    replication.start()

    async def is_stopped() -> bool:
        return set(replication.status().stopped) == {f"{TOPIC}/0", f"{TOPIC}/1"}

    await eventually(is_stopped)
    assert replication.status().stopped[f"{TOPIC}/0"] == "the log does not know it"
    await eventually(lambda: replicated(book))

    async def is_running() -> bool:
        return not replication.status().stopped

    await eventually(is_running)
    await replication.close()


async def test_a_stopped_partition_continues_when_another_replicator_has_passed_its_record(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inline, "RETRY_MAX_S", 0.05)
    done = await book.journal(TOPIC).append("a", [Event(1)])
    offset = (await book.log.append(Outgoing(TOPIC, done.partition, None, newer_version()))).offset
    replication = replication_of(book)
    replication.start()
    at = f"{TOPIC}/{done.partition}"

    async def is_stopped() -> bool:
        return at in replication.status().stopped

    async def continues() -> bool:
        return not await is_stopped()

    await eventually(is_stopped)
    pointer = await book.store.pointer(TOPIC, done.partition)
    assert pointer is not None
    assert pointer.position.offset == offset - 1
    moved = Pointer(Position(pointer.position.epoch, offset), pointer.time_ms)
    await book.store.apply(SliceWrites(TOPIC, done.partition, pointer, moved, ()))
    await eventually(continues)
    await replication.close()


async def ticks(book: Book) -> int:
    found = 0
    for number in range(2):
        records = await read_all(book.log, TOPIC, number, start=0, stop=await book.log.end(TOPIC, number))
        actions = [decode_record(record.value or b"") for record in records if record.key is None]
        found += sum(isinstance(action, Mark) for action in actions)
    return found


async def test_replicating_to_the_end_counts_records_and_ticks_only_if_needed(book: Book) -> None:
    journal = book.journal(TOPIC)
    done = await journal.append("a", [Event(1)])
    await book.log.append(Outgoing(TOPIC, done.partition, b"a", b"damaged"))
    first = await replicate_to_end(book.log, book.store)
    assert (first.batches, first.records, first.parked, first.stopped, await ticks(book)) == (1, 2, 1, {}, 0)
    assert (await replicate_to_end(book.log, book.store, ["nobody"], tick=True)).records == 0
    forced = await replicate_to_end(book.log, book.store, [TOPIC], tick=True)
    assert (forced.records, await ticks(book)) == (2, 2)
    await renew_followed(book.store, book.clock)
    followed = await replicate_to_end(book.log, book.store)
    assert (followed.records, await ticks(book)) == (2, 4)
    await book.log.append(Outgoing(TOPIC, done.partition, None, newer_version()))
    stopped = await replicate_to_end(book.log, book.store)
    assert list(stopped.stopped) == [f"{TOPIC}/{done.partition}"]

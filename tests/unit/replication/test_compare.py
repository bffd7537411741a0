"""Journals of an embedded store are compared with the log and repaired from it, one by one and without Spark."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from tests.pipeline.spoiling import Spoiler
from tidebook.core.errors import Fenced
from tidebook.core.event import Event
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.record import read_record
from tidebook.core.repair import Damage
from tidebook.core.replication_plan import EventRow, Pointer, TagRow, advance_time, segments_between
from tidebook.core.segments import event_segment
from tidebook.log.port import read_all
from tidebook.replication import compare
from tidebook.replication.compare import CompareBounds, JournalComparer, TimedRecord
from tidebook.replication.journal_state import Difference, JournalState
from tidebook.replication.partition import LogAndStore
from tidebook.sqlite.checksums import connect
from tidebook.testing.clock import ManualClock
from tidebook.testing.faults import Faults
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book
from tidebook.wiring.lazy_adapters import LazyStore
from tidebook.wiring.settings import Section, Settings

TOPIC = "orders"
KEY = Key(TOPIC, "a")


@pytest.fixture
async def book(tmp_path: Path) -> AsyncIterator[Book]:
    async with Book(Settings(tmp_path, {"journal": Section(None, {"partitions": 1})})) as opened:
        journal = opened.journal(TOPIC)
        await journal.append("a", [Event(n, tags={"x"}) for n in range(3)])
        await journal.append("b", [Event(0, tags={"x"})])
        await journal.append("a", [Event(n, tags={"y"}) for n in range(3)])
        await journal.delete("a", to=1)
        await replicate(opened.log, opened.store, TOPIC)
        yield opened


async def state_of(book: Book, key: Key = KEY) -> JournalState:
    """Return what a scan of the store finds of a journal."""
    state, damaged = JournalState(), list[Damage]()
    for split in await book.store.splits(TOPIC, count=1):
        async for page in book.store.inspect(TOPIC, split):
            for id, found in page:
                if id != key.id:
                    continue
                match found:
                    case Head():
                        state.head = found
                    case EventRow():
                        state.rows[found.seq_nr] = found
                    case Damage():
                        damaged.append(found)
    for tag in ("x", "y"):
        for row in await book.store.inspect_tag(tag, after=None, from_ms=0, until_ms=2**62, limit=100):
            if isinstance(row, Damage):
                damaged.append(row)
            elif row.id == key.id:
                state.tags[row.place] = row
    state.damaged = tuple(damaged)
    return state


class Comparing:
    """A comparison of one journal, bounded by what is replicated at its start."""

    def __init__(self, book: Book, pointer: Pointer, records: list[TimedRecord], comparer: JournalComparer) -> None:
        self._book = book
        self.pointer = pointer
        self.records = records
        self.comparer = comparer

    @classmethod
    async def of(
        cls,
        book: Book,
        key: Key = KEY,
        *,
        rev: int = 0,
        start: int = 0,
        parts: object = None,
        bound: Pointer | None = None,
    ) -> Comparing:
        config, pointer = await book.journal(TOPIC).topic_config(), bound or await book.store.pointer(TOPIC, 0)
        assert pointer is not None
        records, time_ms = list[TimedRecord](), 0
        for record in await read_all(book.log, TOPIC, 0, start=start, stop=pointer.position.offset + 1):
            action = read_record(record.value, limit_bytes=config.limit_bytes)
            time_ms = advance_time(time_ms, record.timestamp_ms, action)
            if record.key == key.id.encode():
                records.append((record, time_ms))
        bounds = {TOPIC: {0: CompareBounds(start, pointer)}}
        on = parts or LogAndStore(book.log, book.store)
        return cls(book, pointer, records, JournalComparer(on, {TOPIC: config}, bounds, rev=rev))  # type: ignore[arg-type]

    async def reported(self, first: JournalState | None = None) -> list[Difference]:
        first = await state_of(self._book) if first is None else first
        return await self.comparer.compare(KEY, 0, first, self.records)


def summaries(found: list[Difference]) -> list[tuple[str, int | None, bool]]:
    return [(each.what, each.seq_nr, each.repaired) for each in found]


def change(book: Book, sql: str, *values: object) -> None:
    """Change a row directly in the database file."""
    store = book.store
    assert isinstance(store, LazyStore)
    connection = connect(store.path)
    connection.execute(sql, values)
    assert connection.changes() >= 1
    connection.close()


async def events(book: Book) -> list[int]:
    return [event.seq_nr async for event in book.journal(TOPIC).read("a")]


async def test_a_journal_that_equals_its_log_has_no_difference(book: Book) -> None:
    comparing = await Comparing.of(book)
    found = await state_of(book)
    assert len(found.tags) == 5
    assert comparing.comparer.is_equal(KEY, 0, found, comparing.records)
    assert await comparing.reported() == []


async def test_one_read_does_not_decide_on_damage_or_a_head_past_the_bounds(book: Book) -> None:
    comparing = await Comparing.of(book)
    found = await state_of(book)
    found.damaged = (Damage("event", *KEY, "unreadable", 1),)
    assert not comparing.comparer.is_equal(KEY, 0, found, comparing.records)
    await book.journal(TOPIC).append("a", [Event(9)])
    await replicate(book.log, book.store, TOPIC)
    assert not comparing.comparer.is_equal(KEY, 0, await state_of(book), comparing.records)
    assert await comparing.reported() == []  # `reported` also reads the later records


async def test_one_read_that_finds_no_head_or_an_old_one_is_not_equal(book: Book) -> None:
    comparing = await Comparing.of(book)
    found = await state_of(book)
    head = found.head
    assert head is not None
    found.head = None
    assert not comparing.comparer.is_equal(KEY, 0, found, comparing.records)
    found.head = msgspec.structs.replace(head, seq_nr=5)
    assert not comparing.comparer.is_equal(KEY, 0, found, comparing.records)
    found.head = head
    assert comparing.comparer.is_equal(KEY, 0, found, comparing.records)


async def test_a_journal_that_has_begun_or_grown_since_the_first_read_is_compared_in_its_new_state(book: Book) -> None:
    comparing, before = await Comparing.of(book), await state_of(book)
    await book.journal(TOPIC).append("a", [Event(n, tags={"x"}) for n in range(2)])
    await book.journal(TOPIC).append("c", [Event(n, tags={"x"}) for n in range(2)])
    await replicate(book.log, book.store, TOPIC)
    assert await comparing.reported(before) == []
    assert await comparing.comparer.compare(Key(TOPIC, "c"), 0, JournalState(), []) == []
    change(book, "DELETE FROM journal WHERE id = 'a' AND seq_nr = 8")
    assert summaries(await comparing.reported(before)) == [("event missing", 8, False)]
    change(book, "DELETE FROM journal WHERE id = 'c' AND seq_nr = 1")
    found = await comparing.comparer.compare(Key(TOPIC, "c"), 0, JournalState(), [])
    assert summaries(found) == [("event missing", 1, False)]


class OldPointerStore:
    """A store whose pointer is older than its heads, as after a crash between the two."""

    def __init__(self, store: Any, pointer: Pointer) -> None:
        self._store, self._pointer = store, pointer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def pointer(self, topic: str, partition: int) -> Pointer:
        return self._pointer


async def test_a_head_past_the_pointer_is_compared_with_the_log_up_to_the_head(book: Book) -> None:
    comparing = await Comparing.of(book)
    await book.journal(TOPIC).append("a", [Event(7)])
    await replicate(book.log, book.store, TOPIC)
    old_pointer = LogAndStore(book.log, cast(Any, OldPointerStore(book.store, comparing.pointer)))
    assert await (await Comparing.of(book, parts=old_pointer)).reported() == []
    assert await (await Comparing.of(book, parts=old_pointer, bound=comparing.pointer)).reported() == []


async def test_wrong_log_times_of_rows_are_reported_if_the_log_is_complete(book: Book) -> None:
    change(book, "UPDATE journal SET log_ms = log_ms + 5 WHERE id = 'a' AND seq_nr = 4")
    assert summaries(await (await Comparing.of(book)).reported()) == [("event differs", 4, False)]


async def test_a_row_in_a_segment_that_the_head_does_not_list_is_found(book: Book) -> None:
    journal = book.journal(TOPIC)
    await journal.append("a", [Event("far")], at=1_000_000)
    await replicate(book.log, book.store, TOPIC)
    assert await (await Comparing.of(book)).reported() == []
    change(book, "UPDATE journal SET seq_nr = 500000 WHERE id = 'a' AND seq_nr = 6")
    reported = await (await Comparing.of(book, rev=1)).reported()
    assert summaries(reported) == [("event missing", 6, True), ("event extra", 500_000, True)]
    assert sorted((await state_of(book)).rows) == [2, 3, 4, 5, 6, 1_000_000]


class SegmentedStore:
    """A store that reads by segments, as Cassandra does, and whose list of earlier segments is lost."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def events(self, key: Key, head: Head, *, after: int, to: int, limit: int) -> list[EventRow]:
        rows = await self._store.events(key, head, after=after, to=to, limit=limit)
        segments = {segment for each in segments_between(head, after, to) for segment in each}
        return [row for row in rows if event_segment(row.seq_nr, head.segment_size) in segments]


async def test_rows_of_unlisted_segments_are_found_by_the_numbers_of_the_scan(book: Book) -> None:
    await book.journal(TOPIC).append("a", [Event("far")], at=1_000_000)
    await replicate(book.log, book.store, TOPIC)
    segmented = LogAndStore(book.log, cast(Any, SegmentedStore(book.store)))
    assert await (await Comparing.of(book, parts=segmented)).reported() == []


@pytest.mark.parametrize("rev", [0, 1])
async def test_rows_that_differ_are_reported_and_repaired_on_request(book: Book, rev: int) -> None:
    intact = await state_of(book)
    change(book, "DELETE FROM journal WHERE id = 'a' AND seq_nr = 3")
    change(book, "UPDATE journal SET time_ms = 7 WHERE id = 'a' AND seq_nr = 5")
    change(book, "DELETE FROM tag_views WHERE id = 'a' AND seq_nr = 6")
    repaired = bool(rev)
    expected = [("event missing", 3, repaired), ("event differs", 5, repaired), ("tag missing", 6, repaired)]
    assert summaries(await (await Comparing.of(book, rev=rev)).reported()) == expected
    assert summaries(await (await Comparing.of(book)).reported()) == ([] if rev else expected)
    if rev:
        assert await state_of(book) == intact
        assert await events(book) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("spoiled", ["head", "event", "tag"])
async def test_data_that_cannot_be_decoded_is_reported_and_repaired(book: Book, spoiled: str) -> None:
    intact, spoiler = await state_of(book), Spoiler(book)
    match spoiled:
        case "head":
            await spoiler.head(KEY)
        case "event":
            await spoiler.event(KEY, 4)
        case _:
            await spoiler.tag(next(iter(intact.tags.values())))
    reported = await (await Comparing.of(book)).reported()
    assert [each.what for each in reported] == [f"{spoiled} damaged"]
    assert not reported[0].repaired
    assert [each.repaired for each in await (await Comparing.of(book, rev=1)).reported()] == [True]
    assert await state_of(book) == intact


async def test_rows_past_the_head_that_a_scan_finds_are_reported_and_removed(book: Book) -> None:
    change(book, "UPDATE journal SET seq_nr = seq_nr + 895 WHERE id = 'a' AND seq_nr > 4")
    reported = await (await Comparing.of(book, rev=1)).reported()
    assert summaries(reported) == [
        *[("event missing", number, True) for number in (5, 6)],
        *[("event extra", number, True) for number in (900, 901)],
    ]
    assert sorted((await state_of(book)).rows) == [2, 3, 4, 5, 6]


async def test_a_journal_without_records_in_the_log_is_removed(book: Book) -> None:
    comparing = await Comparing.of(book, rev=1)
    comparing.records.clear()
    reported = await comparing.reported()
    assert summaries(reported)[0] == ("head extra", None, True)
    assert await book.journal(TOPIC).pointer("b") == 1
    head = await book.store.head(KEY)
    assert head is not None
    assert (head.live, head.position) == (False, comparing.pointer.position)


async def test_records_appended_during_a_comparison_are_read_from_the_log(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "PAGE", 2)
    comparing = await Comparing.of(book)
    for n in range(5):
        await book.journal(TOPIC).append("a", [Event(n, tags={"x"})])
    await book.journal(TOPIC).append("b", [Event(1)])
    await replicate(book.log, book.store, TOPIC)
    assert await comparing.reported() == []
    change(book, "DELETE FROM journal WHERE id = 'a' AND seq_nr = 11")
    assert summaries(await comparing.reported()) == [("event missing", 11, False)]


async def test_tag_rows_of_one_time_that_exceed_a_page_are_all_compared(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An append may have 10,000 events with one tag, and all their rows have the same time."""
    monkeypatch.setattr(compare, "PAGE", 3)
    await book.journal(TOPIC).append("a", [Event(n, tags={"x"}) for n in range(7)])
    await replicate(book.log, book.store, TOPIC)
    assert await (await Comparing.of(book)).reported() == []
    change(book, "DELETE FROM tag_views WHERE id = 'a' AND seq_nr = 12")
    assert summaries(await (await Comparing.of(book)).reported()) == [("tag missing", 12, False)]


async def test_a_truncated_log_decides_only_on_the_records_it_has(book: Book) -> None:
    await book.log.truncate(TOPIC, 0, before=2)
    assert await (await Comparing.of(book, start=2)).reported() == []
    change(book, "DELETE FROM journal WHERE id = 'a' AND seq_nr IN (3, 5)")
    assert summaries(await (await Comparing.of(book, start=2, rev=1)).reported()) == [("event missing", 5, True)]
    assert sorted((await state_of(book)).rows) == [2, 4, 5, 6]


@pytest.mark.parametrize("start", [1, 2])
async def test_times_of_rows_are_taken_from_the_store_if_the_log_is_truncated(book: Book, start: int) -> None:
    """The log time is the greatest of all records so far, and the log may no longer have them."""
    await book.log.truncate(TOPIC, 0, before=start)
    change(book, "UPDATE journal SET log_ms = log_ms + 5 WHERE id = 'a' AND seq_nr > 3")
    change(book, "UPDATE tag_views SET log_ms = log_ms + 5 WHERE id = 'a' AND tag = 'y'")
    assert await (await Comparing.of(book, start=start)).reported() == []


async def test_a_fenced_repair_is_retried_and_a_journal_that_always_changes_is_reported(
    book: Book,
) -> None:
    change(book, "DELETE FROM journal WHERE id = 'a' AND seq_nr = 3")
    for times, expected in ((None, [("moving", None, False)]), (2, [("event missing", 3, True)])):
        faults = Faults()
        faults.fail("repair", Fenced("another was faster"), times=times)
        parts = LogAndStore(book.log, faults.around(book.store))
        reported = await (await Comparing.of(book, rev=1, parts=parts)).reported()
        assert summaries(reported) == expected
        assert (reported[0].topic, reported[0].id, reported[0].partition) == (TOPIC, "a", 0)
    assert await events(book) == [2, 3, 4, 5, 6]


async def test_a_tag_row_of_another_journal_at_the_same_time_is_ignored_even_if_it_is_damaged(
    tmp_path: Path,
) -> None:
    settings = Settings(tmp_path, {"journal": Section(None, {"partitions": 1})})
    async with Book(settings, clock=ManualClock(1_700_000_000_000)) as book:
        for id in ("a", "b"):
            await book.journal(TOPIC).append(id, [Event(0, tags={"x"})])
        await replicate(book.log, book.store, TOPIC)
        first = await state_of(book)
        [row] = (await state_of(book, Key(TOPIC, "b"))).tags.values()
        assert [each.time_ms for each in first.tags] == [row.time_ms]
        assert await (await Comparing.of(book)).reported(first) == []
        await Spoiler(book).tag(row)
        assert await (await Comparing.of(book)).reported(first) == []


async def test_tag_rows_of_other_journals_are_not_changed(book: Book) -> None:
    of_b = [row async for row in book.tags.read("x")]
    rows = await book.store.inspect_tag("x", after=None, from_ms=0, until_ms=2**62, limit=100)
    assert {row.id for row in rows if isinstance(row, TagRow)} == {"a", "b"}
    change(book, "DELETE FROM tag_views WHERE id = 'a'")
    assert [each.what for each in await (await Comparing.of(book, rev=1)).reported()] == ["tag missing"] * 5
    again = await book.store.inspect_tag("x", after=None, from_ms=0, until_ms=2**62, limit=100)
    assert (again, len(of_b)) == (rows, len(of_b))

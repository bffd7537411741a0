"""Pages of events are sized by the journal's earlier events, and smaller after a timeout."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("acsylla")

from acsylla import errors

from tidebook.core.errors import Unavailable
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import (
    ClearEvents,
    ClearJournal,
    EventRow,
    Pointer,
    PositionedAction,
    PutEvents,
    PutHead,
    PutSegments,
    SliceWrites,
    plan_key,
)
from tidebook.core.topic_config import TopicConfig
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.mutations import event_batches
from tidebook.store.cassandra.rows import encode_row
from tidebook.store.cassandra.scan import PAGE_BYTES, PAGE_ROWS_MIN, EventPages, listed_segments
from tidebook.testing.action_histories import append, placed_at

LARGE, SMALL = Key("t", "large"), Key("t", "small")
BYTES = {"large": 500_000, "small": 200}


class Row:
    def __init__(self, cell: bytes | int) -> None:
        self._cell = cell

    def column_value_by_index(self, _: int) -> bytes | int:
        return self._cell


class Rows(list[Row]):
    """Rows as the driver returns them."""

    def has_more_pages(self) -> bool:
        return False


class Node:
    """A session whose node times out if a page has more than this many bytes."""

    def __init__(self, in_time_bytes: float = 20_000_000) -> None:
        self.in_time_bytes = in_time_bytes
        self.requested: list[tuple[str, int]] = []

    async def read(self, _: str, values: Sequence[Any], *, page_size: int) -> Rows:
        id, after, to = values[0], values[3], values[4]
        self.requested.append((id, page_size))
        rows = min(page_size, to - after)
        if rows * BYTES[id] > self.in_time_bytes:
            raise Unavailable("too late") from errors.CassErrorLibRequestTimedOut("too late")
        return Rows([Row(encode_row(event(after + 1 + i, BYTES[id]))) for i in range(rows)])


class Table:
    """A session over the rows of one journal, in segments of ten."""

    def __init__(self, rows: Sequence[EventRow]) -> None:
        head = msgspec.structs.replace(HEAD, segment_size=10)
        written = [each for batch in event_batches(PutEvents(SMALL, head, tuple(rows))) for each in batch]
        self.cells = {(each.values[2], each.values[3]): each.values[4] for each in written}
        self.requested: list[int] = []
        self.listed: set[int] = set()

    async def read(self, query: str, values: Sequence[Any], *, page_size: int) -> Rows:
        if query == cql.SEGMENTS:
            *_, first, stop, limit = values
            return Rows([Row(each) for each in sorted(self.listed) if first <= each < stop][:limit])
        _, _, segment, after, to, limit = values
        self.requested.append(limit)
        keys = sorted(key for key in self.cells if key[0] == segment and after < key[1] <= to)
        return Rows([Row(self.cells[key]) for key in keys[:limit]])


def event(seq_nr: int, size: int) -> EventRow:
    return EventRow(seq_nr, b"x" * size, 5, Position(1, seq_nr), 0)


def appended(counts: Sequence[int], *, gaps: Sequence[int] = ()) -> list[EventRow]:
    """Return the events of appends with these counts, each followed by a gap."""
    rows: list[EventRow] = []
    seq_nr = 1
    for at, (count, gap) in enumerate(zip(counts, [*gaps, *[0] * len(counts)], strict=False)):
        position = Position(1, at)
        rows += (EventRow(seq_nr + i, b"%d" % i, 5, position, i, 6) for i in range(count))
        seq_nr += count + gap
    return rows


HEAD = Head(True, 5000, 0, Position(1, 0), Position(1, 9), 10_000, None, 0, (), None, ())


async def page(pages: EventPages, key: Key) -> list[EventRow]:
    return await pages.read(key, HEAD, after=0, to=5000, limit=1000)


async def test_a_page_that_times_out_is_read_in_a_smaller_part() -> None:
    pages = EventPages(node := Node())  # type: ignore[arg-type]
    for _ in range(2):
        await page(pages, SMALL)
    assert len(await page(pages, SMALL)) == 1000
    assert len(await page(pages, LARGE)) == PAGE_ROWS_MIN
    assert len(await page(pages, LARGE)) * BYTES["large"] <= PAGE_BYTES
    assert [requested for id, requested in node.requested if id == "large"][:2] == [1000, PAGE_ROWS_MIN]


async def test_a_journal_of_large_events_does_not_shrink_the_pages_of_others() -> None:
    pages = EventPages(Node())  # type: ignore[arg-type]
    for key in (SMALL, LARGE, LARGE):
        await page(pages, key)
    assert len(await page(pages, SMALL)) == 1000


async def test_a_node_that_does_not_respond_is_queried_only_twice() -> None:
    pages = EventPages(node := Node(in_time_bytes=0))  # type: ignore[arg-type]
    with pytest.raises(Unavailable):
        await page(pages, SMALL)
    assert len(node.requested) == 2
    with pytest.raises(Unavailable):
        await page(pages, SMALL)
    assert len(node.requested) <= 4


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.lists(st.integers(0, 25), max_size=8),
    st.integers(1, 60),
    st.data(),
)
async def test_pages_of_packed_rows_hold_every_event_once(
    counts: list[int], gaps: list[int], limit: int, data: st.DataObject
) -> None:
    rows = appended(counts, gaps=gaps)
    last = rows[-1].seq_nr
    head = msgspec.structs.replace(HEAD, segment_size=10, seq_nr=last)
    after = data.draw(st.integers(0, last))
    to = data.draw(st.integers(after, last))
    pages = EventPages(Table(rows))  # type: ignore[arg-type]
    wanted = [row for row in rows if after < row.seq_nr <= to]
    found: list[EventRow] = []
    while some := await pages.read(SMALL, head, after=after, to=to, limit=limit):
        assert len(some) <= limit
        found += some
        after = some[-1].seq_nr
    assert found == wanted


#: How many numbers are skipped before an append, and how many events it has.
jumps = st.lists(st.tuples(st.sampled_from([0, 1, 9, 25, 10**9]), st.integers(1, 20)), min_size=1, max_size=12)


def replicated(appends: Sequence[tuple[int, int]]) -> tuple[Head, list[EventRow], Table]:
    """Return a journal as a replicator writes it, one append per slice."""
    config = TopicConfig(topic_id="t", partitions=1, segment_size=10)
    head: Head | None = None
    rows: list[EventRow] = []
    listed: set[int] = set()
    for offset, (skipped, count) in enumerate(appends):
        first = (head.seq_nr if head is not None else 0) + 1 + skipped
        action = placed_at(append(count, at=first), offset)
        for write in plan_key(SMALL, head, [PositionedAction(Position(1, offset), 5, action)], config):
            match write:
                case PutEvents():
                    rows += write.rows
                case PutSegments():
                    listed |= set(chain.from_iterable(write.segments))
                case PutHead():
                    head = write.head
    assert head is not None
    table = Table(rows)
    table.listed = listed
    return head, rows, table


@given(jumps, st.integers(1, 60), st.data())
async def test_pages_over_jumps_hold_every_event_once(
    appends: list[tuple[int, int]], limit: int, data: st.DataObject
) -> None:
    head, rows, table = replicated(appends)
    numbers = [0, *(row.seq_nr for row in rows), *(row.seq_nr + 1 for row in rows)]
    after = data.draw(st.sampled_from(numbers))
    to = data.draw(st.sampled_from(numbers))
    pages = EventPages(table)  # type: ignore[arg-type]
    wanted = [row for row in rows if after < row.seq_nr <= to]
    found: list[EventRow] = []
    while some := await pages.read(SMALL, head, after=after, to=to, limit=limit):
        assert len(some) <= limit
        found += some
        after = some[-1].seq_nr
    assert found == wanted


async def test_empty_listed_segments_are_skipped() -> None:
    head, rows, table = replicated([(0, 1), *[(10**6, 1)] * 200])
    table.listed |= {segment + 2 for segment in table.listed} | set(range(1, 101))
    pages = EventPages(table)  # type: ignore[arg-type]
    found: list[EventRow] = []
    while some := await pages.read(SMALL, head, after=found[-1].seq_nr if found else 0, to=head.seq_nr, limit=33):
        found += some
    assert found == rows


@pytest.mark.parametrize("live", [True, False], ids=["delete", "purge"])
async def test_a_clear_finds_the_listed_segments_it_reaches(live: bool) -> None:
    """A purge finds all of them, even deleted ones, because the delete may never have been applied."""
    head, _, table = replicated([(0, 1), (99, 1), (99, 1), (99, 1)])
    head = msgspec.structs.replace(head, live=live, delete_to=150)
    clear = ClearEvents(SMALL, head, 15) if live else ClearJournal(SMALL, head)
    writes = SliceWrites("t", 0, None, Pointer(Position(1, 9), 5), ((clear,),))
    found = await listed_segments(EventPages(table), writes, at_once=2)  # type: ignore[arg-type]
    assert {key: [*segments] for key, segments in found.items()} == {
        (SMALL, head.incarnation): [10] if live else [0, 10, 20]
    }


async def test_fewer_rows_are_requested_where_events_are_packed() -> None:
    rows = appended([10] * 100)
    table = Table(rows)
    pages = EventPages(table)  # type: ignore[arg-type]
    head = msgspec.structs.replace(HEAD, segment_size=10, seq_nr=1000)
    await pages.read(SMALL, head, after=0, to=1000, limit=50)
    assert len(await pages.read(SMALL, head, after=10, to=1000, limit=50)) <= 50
    assert table.requested[-1] == 6
    # A range with as many numbers as requested events is read whole, however its rows are packed.
    assert [row.seq_nr for row in await pages.read(SMALL, head, after=13, to=18, limit=5)] == [14, 15, 16, 17, 18]

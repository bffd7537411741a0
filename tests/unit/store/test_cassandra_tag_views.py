"""Pages of a stream if Cassandra aborts reads: a shorter time range is read, and no row is omitted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from acsylla import errors
from hypothesis import given
from hypothesis import strategies as st

from tidebook.core.errors import Unavailable
from tidebook.core.event import Event, encode_event
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import ClearJournal, EventRow, Pointer, SliceWrites
from tidebook.core.topic_config import TopicConfig
from tidebook.runtime.metrics import Metrics
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.tag_views import TagBuckets, TagViews
from tidebook.store.cassandra.tag_writes import TagCell, _encode
from tidebook.tags.tags import Tags
from tidebook.testing.clock import ManualClock

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
TOMBSTONES_MAX = 100


class Row:
    def __init__(self, *columns: Any) -> None:
        self._columns = columns

    def as_tuple(self) -> tuple[Any, ...]:
        return self._columns

    def column_value_by_index(self, index: int) -> Any:
        return self._columns[index]


class Page(list[Row]):
    """The only page of an answer."""

    def has_more_pages(self) -> bool:
        return False


class Server:
    """Rows and tombstones of one tag by time; a page over too many tombstones is aborted."""

    def __init__(self, live: list[int], gone: list[int], bucket_ms: int = HOUR_MS) -> None:
        self.live, self.gone = sorted(live), sorted(gone)
        self.buckets = sorted({each // bucket_ms * bucket_ms for each in (*live, *gone)})
        self.bucket_ms = bucket_ms
        self.reads = self.reading = self.most_at_once = 0
        self.down = self.frozen = False
        self.given_up_as: type[errors.CassException] = errors.CassErrorServerReadFailure

    async def read(self, query: str, values: list[Any], **options: Any) -> Page:
        if query == cql.TAG_BUCKETS:
            return Page([Row(each) for each in self.buckets if each > values[1]][: values[2]])
        if query == cql.TAG_BUCKET_AT:
            return Page([Row(each) for each in reversed(self.buckets) if each <= values[1]][:1])
        self.reads += 1
        self.reading += 1
        self.most_at_once = max(self.most_at_once, self.reading)
        await (asyncio.Event().wait() if self.frozen else asyncio.sleep(0))
        self.reading -= 1
        _, bucket, begin_ms, topic, *_, until_ms, limit = values
        until_ms = min(until_ms, bucket + self.bucket_ms)
        begin_ms = max(bucket, begin_ms + (1 if topic else 0))
        found = [each for each in self.live if begin_ms <= each < until_ms][:limit]
        stop_ms = found[-1] if len(found) == limit else until_ms
        if self.down or sum(begin_ms <= each < stop_ms for each in self.gone) > TOMBSTONES_MAX:
            raise Unavailable("given up") from self.given_up_as()
        return Page([Row(each, "t", 0, each, 0, 1, _cell(each)) for each in found])


def _cell(time_ms: int) -> bytes:
    return _encode(TagCell("a", Position(1, 0), 1, EventRow(1, b"", time_ms, Position(1, time_ms), 0, time_ms)))


class Unset:
    """A store without a history of bucket sizes, which accepts any."""

    async def setting(self, name: str) -> str | None:
        return None

    async def set_setting(self, name: str, value: str, *, expected: str | None) -> bool:
        return True


def views(server: Server) -> TagViews:
    return TagViews(server, None, TagBuckets(server, Unset()), Metrics(), batch_rows_max=100)  # type: ignore[arg-type]


async def read_all(server: Server, limit: int) -> list[int]:
    pages, found, after = views(server), [], None
    while rows := await pages.rows("paid", after, 0, 2**62, limit):
        assert len(rows) <= limit
        found += [row.time_ms for row in rows]
        after = rows[-1].place
    return found


times = st.integers(0, 3 * HOUR_MS)
runs = st.lists(st.tuples(times, st.integers(1, 300), st.integers(1, 50)), max_size=4)


@given(
    live=st.sets(times, max_size=40),
    runs=runs,
    limit=st.integers(1, 20),
    given_up_as=st.sampled_from([errors.CassErrorServerReadFailure, errors.CassErrorLibRequestTimedOut]),
)
async def test_no_row_is_omitted_or_repeated(
    live: set[int], runs: list[tuple[int, int, int]], limit: int, given_up_as: type[errors.CassException]
) -> None:
    gone = [begin + n * step for begin, count, step in runs for n in range(count)]
    # One millisecond has fewer tombstones than the limit.
    server = Server(sorted(live), sorted(set(gone)))
    server.given_up_as = given_up_as
    assert await read_all(server, limit) == sorted(live)


async def test_many_tombstones_between_two_rows_need_a_bounded_number_of_reads() -> None:
    server = Server([10, HOUR_MS - 1], list(range(1_000_000, 1_010_000)))
    assert await read_all(server, 1000) == [10, HOUR_MS - 1]
    assert server.reads < 600


async def test_a_server_that_fails_for_another_reason_is_not_queried_for_ever() -> None:
    server = Server([10], [])
    server.down = True
    with pytest.raises(Unavailable):
        await read_all(server, 1000)
    assert server.reads < 10


@pytest.mark.parametrize("late", [errors.CassErrorLibRequestTimedOut, errors.CassErrorServerReadTimeout])
async def test_a_server_that_does_not_respond_in_time_is_probed_once(
    late: type[errors.CassException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidebook.store.cassandra.tag_views.PROBE_S", 0.01)
    server = Server([10], [])
    pages = views(server)
    server.down, server.given_up_as = True, late
    page = asyncio.create_task(pages.rows("paid", None, 0, 2**62, 1000))
    while not server.reads:  # noqa: ASYNC110 - until the page is requested
        await asyncio.sleep(0)
    server.frozen = True  # from now on the server does not respond
    with pytest.raises(Unavailable, match="given up"):
        await page
    assert server.reads == 2
    server.down = server.frozen = False
    assert [row.time_ms for row in await pages.rows("paid", None, 0, 2**62, 1000)] == [10]


async def test_buckets_whose_events_are_all_deleted_are_read_concurrently() -> None:
    live = [5, 500 * HOUR_MS, 500 * HOUR_MS + 1, 501 * HOUR_MS, 502 * HOUR_MS]
    for limit in (1, 2, 3, 1000):
        server = Server(live, [n * HOUR_MS for n in range(1, 500)])
        assert await read_all(server, limit) == live
        assert server.most_at_once == 32


async def test_buckets_with_events_are_read_one_by_one() -> None:
    server = Server([n * HOUR_MS for n in range(50)], [])
    assert await read_all(server, 10) == server.live
    assert server.most_at_once <= 2


async def test_an_aborted_read_below_a_low_horizon_does_not_affect_later_ones() -> None:
    server = Server([1000 * HOUR_MS + n for n in range(20)], [])
    pages = views(server)
    after = (await pages.rows("paid", None, 0, 2**62, 5))[-1].place
    server.down = True
    for until_ms in (-1, 0, 999 * HOUR_MS, after.time_ms):
        assert await pages.rows("paid", after, 0, until_ms, 1000) == []
    server.down = False
    found = await asyncio.wait_for(pages.rows("paid", after, 0, 2**62, 1000), 10)
    assert [row.time_ms for row in found] == server.live[5:]


class LiveStore:
    """The part of a store that a live stream needs, over the pages of one tag; it wakes the stream a few times."""

    def __init__(self, server: Server, polls: int) -> None:
        self.pages, self.server, self.polls = views(server), server, polls
        self.reads: list[int] = []

    async def topics(self) -> list[str]:
        return ["t"]

    async def pointers(self, topic: str) -> dict[int, Pointer]:
        return {0: Pointer(Position(1, 0), 2**50)}

    async def topic_config(self, topic: str) -> TopicConfig:
        return TopicConfig(topic_id="id", partitions=1)

    async def setting(self, name: str) -> str | None:
        return None

    async def set_setting(self, name: str, value: str, *, expected: str | None) -> bool:
        return True

    async def tag_rows(self, tag: str, *, after: Any, from_ms: int, until_ms: int, limit: int) -> Any:
        return await self.pages.rows(tag, after, from_ms, until_ms, limit)

    async def wait_any(self, *, timeout_s: float, since: int = -1) -> int:
        self.reads.append(self.server.reads)
        if len(self.reads) == self.polls:
            raise TimeoutError
        return 0


async def test_a_live_stream_reads_buckets_of_deleted_events_once() -> None:
    store = LiveStore(Server([], [500_000 * HOUR_MS + n * HOUR_MS for n in range(300)]), polls=4)
    with pytest.raises(TimeoutError):
        async for _ in Tags(store=store, clock=ManualClock()).read("paid", follow=True):  # type: ignore[arg-type]
            pass
    assert store.reads[0] >= 300
    assert store.reads[-1] - store.reads[0] <= 3


class Journals:
    """Pages of events that each take some time."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.reading = self.most_at_once = 0

    async def read(self, key: Key, head: Head, *, after: int, to: int, limit: int) -> list[EventRow]:
        self.reading += 1
        self.most_at_once = max(self.most_at_once, self.reading)
        await asyncio.sleep(0)
        self.reading -= 1
        kept = encode_event(Event(0, tags={"paid"}))
        last = min(to, after + limit, self.rows)
        return [EventRow(n, kept, n, Position(1, n), 0, n) for n in range(after + 1, last + 1)]


async def test_journals_are_cleared_concurrently_and_each_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidebook.store.cassandra.tag_views.CLEAR_PAGE", 2)

    journals, at = Journals(5), Position(1, 9)
    pages = TagViews(None, journals, TagBuckets(None, Unset()), Metrics(), batch_rows_max=100)  # type: ignore[arg-type]
    head = Head(False, 5, 0, at, at, 10, None, 0, (), None, (), {"paid": 5})
    keys = [Key("t", f"j-{n}") for n in range(40)]
    clears = tuple((ClearJournal(key, head),) for key in keys)
    writes = SliceWrites("t", 0, None, Pointer(at, 9), clears)
    rounds = [[list(batch) for batch in batches] async for batches in pages.clear_rounds(writes, 4)]
    assert journals.most_at_once == 32
    statements = [each.cql for batches in rounds for batch in batches for each in batch]
    assert statements.count(cql.CLEAR_TAG) == 40 * 5
    assert statements.count(cql.CLEAR_TAG_PROGRESS) == 40
    of_progress = [n for n, batches in enumerate(rounds) for batch in batches if batch[0].cql != cql.CLEAR_TAG]
    assert set(of_progress) == {4, 9}, "after all pages of its journal"

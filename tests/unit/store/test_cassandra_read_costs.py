"""The cost of a read of Cassandra: how many requests, how many at once, and when it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("acsylla")

from acsylla import errors

from tests.simulation.virtual_time import run_in_virtual_time as run
from tests.unit.store.test_cassandra_scan import HEAD, SMALL, Node, Rows, appended, replicated
from tests.unit.store.test_cassandra_scan import Table as EventTable
from tests.unit.store.test_cassandra_tag_buckets import NOW_MS, Listed, Setting, buckets_of
from tests.unit.store.test_cassandra_tag_views import DAY_MS, HOUR_MS, Server, views
from tidebook.core.buckets import FIXED_AHEAD_MS, Buckets, encode_buckets
from tidebook.core.errors import Unavailable
from tidebook.core.head import Head
from tidebook.core.replication_plan import EventRow, PutEvents, TagPosition
from tidebook.runtime.metrics import Metrics
from tidebook.store.cassandra import CassandraSettings, CassandraStore, tag_views
from tidebook.store.cassandra import scan as scans
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.mutations import event_batches
from tidebook.store.cassandra.scan import PAGE_ROWS_MIN, SCANS_AT_ONCE, EventPages, PageSizes, scan_segments
from tidebook.store.cassandra.session import CassandraSession
from tidebook.store.cassandra.token_ranges import token_ranges

SETTINGS = CassandraSettings(hosts=("one",), keyspace="books")

# ---- sizes of pages


def test_half_as_many_rows_are_requested_if_each_holds_two_events() -> None:
    sizes = PageSizes()
    sizes.record("t", 10, 1000, events=20)
    assert sizes.rows_of_events("t", 100) == 51
    sizes.record("u", 10, 1000, events=19)
    assert sizes.rows_of_events("u", 100) == 101


def test_the_known_page_sizes_are_bounded_and_an_update_evicts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "KNOWN_MAX", 2)
    sizes = PageSizes()
    for key in ("a", "b", "a"):
        sizes.record(key, 10, 1000, events=100)
    assert (sizes.knows("a"), sizes.knows("b"), sizes.rows_of_events("a", 100)) == (True, True, 11)
    sizes.record("c", 10, 1000)
    assert [sizes.knows(key) for key in "abc"] == [False, False, True]
    assert sizes.rows_of_events("a", 10) == 11


def test_an_empty_page_does_not_change_the_known_sizes() -> None:
    sizes = PageSizes()
    sizes.record("t", 0, 0)
    assert not sizes.knows("t")


async def test_a_page_of_the_fewest_rows_is_not_retried_after_a_timeout() -> None:
    pages = EventPages(node := Node(in_time_bytes=0))  # type: ignore[arg-type]
    for requests in (2, 3, 4):
        with pytest.raises(Unavailable):
            await pages.read(SMALL, HEAD, after=0, to=5000, limit=1000)
        assert len(node.requested) == requests
    assert node.requested == [("small", 16), *[("small", PAGE_ROWS_MIN)] * 3]


async def test_a_page_that_fails_for_another_reason_is_not_retried() -> None:
    class Down:
        requests = 0

        async def read(self, *_: Any, **__: Any) -> Any:
            self.requests += 1
            raise Unavailable("down") from errors.CassErrorServerUnavailable("down")

    pages = EventPages(node := Down())  # type: ignore[arg-type]
    for requests in (1, 2):
        with pytest.raises(Unavailable):
            await pages.read(SMALL, HEAD, after=0, to=5000, limit=1000)
        assert node.requests == requests


# ---- events over segments


class Rounds(EventTable):
    """A table that records the segments that are read at the same time."""

    def __init__(self, rows: Sequence[EventRow]) -> None:
        super().__init__(rows)
        self.rounds: list[list[int]] = []
        self.lists = 0
        self._reading = 0

    async def read(self, query: str, values: Sequence[Any], *, page_size: int) -> Rows:
        if query == cql.SEGMENTS:
            self.lists += 1
            return await super().read(query, values, page_size=page_size)
        if not self._reading:
            self.rounds.append([])
        self.rounds[-1].append(values[2])
        self._reading += 1
        await asyncio.sleep(0)
        self._reading -= 1
        return await super().read(query, values, page_size=page_size)


def small_head(last: int) -> Head:
    return Head(True, last, 0, HEAD.incarnation, HEAD.position, 10, None, 0, (), None, ())


async def test_empty_segments_are_read_in_growing_groups() -> None:
    rows = [row for row in appended([1] * 1000) if row.seq_nr > 995]
    table = Rounds(rows)
    found = await EventPages(table).read(SMALL, small_head(1000), after=0, to=1000, limit=10)  # type: ignore[arg-type]
    assert [row.seq_nr for row in found] == [996, 997, 998, 999, 1000]
    assert [len(each) for each in table.rounds] == [1, 2, 4, 8, 16, 32, 32, 5]
    assert [segment for each in table.rounds for segment in each] == list(range(100))


async def test_as_many_segments_as_fill_a_page_are_read_concurrently() -> None:
    table = Rounds(appended([1] * 200))
    pages = EventPages(table)  # type: ignore[arg-type]
    await pages.read(SMALL, small_head(200), after=0, to=10, limit=10)
    table.rounds.clear()
    found = await pages.read(SMALL, small_head(200), after=10, to=200, limit=45)
    assert [row.seq_nr for row in found] == list(range(11, 51))
    assert table.rounds == [[1, 2, 3, 4]]


async def test_the_last_event_of_a_page_is_found_in_the_fullest_row() -> None:
    """A row has the number of its last event, which is up to 15 above that of its first."""
    head = Head(True, 40, 0, HEAD.incarnation, HEAD.position, 100, None, 0, (), None, ())
    rows = appended([40])
    table = EventTable(rows)
    batches = event_batches(PutEvents(SMALL, head, tuple(rows)))
    table.cells = {(each.values[2], each.values[3]): each.values[4] for batch in batches for each in batch}
    assert sorted(table.cells) == [(0, 16), (0, 32), (0, 40)]
    pages = EventPages(table)  # type: ignore[arg-type]
    for to in (1, 2, 16, 17, 32, 33):
        found = await pages.read(SMALL, head, after=to - 1, to=to, limit=10)
        assert [row.seq_nr for row in found] == [to]


async def test_a_range_not_longer_than_the_limit_is_read_with_one_request() -> None:
    """The range has no more rows than numbers, however many events earlier rows hold."""
    table = EventTable(appended([10, *[1] * 10]))
    pages = EventPages(table)  # type: ignore[arg-type]
    await pages.read(SMALL, small_head(20), after=0, to=10, limit=10)
    found = await pages.read(SMALL, small_head(20), after=10, to=15, limit=5)
    assert [row.seq_nr for row in found] == [11, 12, 13, 14, 15]


async def test_the_segment_list_of_a_journal_without_jumps_is_not_read() -> None:
    table = Rounds(appended([1] * 20))
    await EventPages(table).read(SMALL, small_head(20), after=0, to=20, limit=10)  # type: ignore[arg-type]
    assert table.lists == 0


async def test_listed_segments_are_read_concurrently_until_the_page_is_full() -> None:
    head, rows, plain = replicated([(0, 1), *[(10**6, 1)] * 100])
    table = Rounds(rows)
    table.listed = plain.listed
    pages = EventPages(table)  # type: ignore[arg-type]
    first = await pages.read(SMALL, head, after=0, to=head.seq_nr, limit=50)
    assert [len(each) for each in table.rounds] == [16]
    assert first == rows[:16]
    table.rounds.clear()
    again = await pages.read(SMALL, head, after=first[-1].seq_nr, to=head.seq_nr, limit=50)
    assert [len(each) for each in table.rounds] == [32, 18, 1], "the first of them has no further event"
    assert again == rows[16:66]
    assert table.lists == 3


@pytest.mark.parametrize("page", [1, 2, 3, 5, 100])
async def test_all_pages_of_a_segment_list_are_read(page: int) -> None:
    head, _, table = replicated([(0, 1), *[(10**6, 1)] * 6])
    pages = EventPages(table)  # type: ignore[arg-type]
    found = [list(each) async for each in pages.listed(SMALL, head, above=0, to=head.seq_nr, page=page)]
    assert [segment for each in found for segment in each] == sorted(table.listed)
    assert all(0 < len(each) <= page for each in found)


# ---- heads over segments


class Segments:
    """Segments of heads, each with a given number of pages; `gate` holds all reads."""

    def __init__(self, pages: int = 1) -> None:
        self.pages, self.requested = pages, list[tuple[int, Any]]()
        self.in_flight = self.most = 0
        self.gate: asyncio.Event | None = None

    async def read(self, query: str, values: Sequence[Any], *, page_size: int, page_state: Any = None) -> Any:
        self.requested.append((values[1], page_state))
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            await (asyncio.sleep(0) if self.gate is None else self.gate.wait())
        finally:
            self.in_flight -= 1
        number = (page_state or 0) + 1
        return _Page([(values[1], number)], number if number < self.pages else None)


class _Page(list[Any]):
    def __init__(self, rows: list[tuple[Any, ...]], more: int | None) -> None:
        super().__init__(_Tuple(each) for each in rows)
        self._more = more

    def has_more_pages(self) -> bool:
        return self._more is not None

    def page_state(self) -> int | None:
        return self._more


class _Tuple:
    def __init__(self, values: tuple[Any, ...]) -> None:
        self._values = values

    def as_tuple(self) -> tuple[Any, ...]:
        return self._values


@pytest.mark.parametrize("segments", [0, 1, 15, 16, 17, 40])
async def test_every_segment_is_read_once_in_order_and_a_few_are_prefetched(segments: int) -> None:
    session = Segments()
    pages = scan_segments(session, "IDS", "t", segments, page_size=5)  # type: ignore[arg-type]
    assert [page async for page in pages] == [[(segment, 1)] for segment in range(segments)]
    assert sorted(session.requested) == [(segment, None) for segment in range(segments)]
    assert session.most == min(segments, SCANS_AT_ONCE)


async def test_all_pages_of_a_segment_come_before_the_next_segment() -> None:
    session = Segments(pages=3)
    pages = scan_segments(session, "IDS", "t", 2, page_size=5)  # type: ignore[arg-type]
    assert [row for page in [page async for page in pages] for row in page] == [
        (segment, number) for segment in (0, 1) for number in (1, 2, 3)
    ]


async def test_a_scan_that_ends_early_cancels_its_prefetched_reads() -> None:
    session = Segments()
    pages = scan_segments(session, "IDS", "t", 40, page_size=5)  # type: ignore[arg-type]
    await anext(pages)
    session.gate = asyncio.Event()
    await anext(pages)
    await asyncio.wait_for(pages.aclose(), 30)  # type: ignore[attr-defined]
    assert session.in_flight == 0


@pytest.mark.parametrize("count", [-1, 0, 1, 2, 3, 7, 256])
def test_token_ranges_cover_the_ring_in_equal_parts(count: int) -> None:
    ranges = [(int(each.low), int(each.high)) for each in token_ranges(count)]
    assert len(ranges) == max(count, 1)
    assert (ranges[0][0], ranges[-1][1]) == (-(2**63), 2**63 - 1)
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    sizes = [high - low for low, high in ranges]
    assert max(sizes) - min(sizes) <= 1


# ---- buckets of tags


async def test_a_history_that_is_fixed_exactly_up_to_a_time_is_fixed_further_for_that_time() -> None:
    """The bucket of rows at that very time may still change."""
    setting = Setting()
    setting.text = encode_buckets(Buckets().fixed(NOW_MS - FIXED_AHEAD_MS))
    found = await buckets_of(setting).fixed_at(NOW_MS)
    assert (found.fixed_ms, setting.sets) == (NOW_MS + FIXED_AHEAD_MS, 1)
    setting.text = encode_buckets(Buckets().fixed(NOW_MS - FIXED_AHEAD_MS + 1))
    setting.sets = 0
    await buckets_of(setting).fixed_at(NOW_MS)
    assert setting.sets == 0


def test_a_reader_beyond_the_fixed_part_reads_the_history_again_every_few_seconds() -> None:
    setting, session = Setting(), Listed(NOW_MS)

    async def program() -> list[int]:
        buckets, reads = buckets_of(setting, session), []
        for pause_s in (0.0, tag_views.READ_EVERY_S, 0.5, 1.0):
            await asyncio.sleep(pause_s)
            await buckets.bucket_start("paid", NOW_MS)
            reads.append(setting.reads)
        return reads

    assert run(program) == [1, 1, 2, 2]
    assert session.requested == 4


def test_a_reader_at_the_end_of_the_fixed_part_queries_the_bucket() -> None:
    setting, session = Setting(), Listed(NOW_MS - 9)
    setting.text = encode_buckets(Buckets().fixed(NOW_MS - FIXED_AHEAD_MS))

    async def program() -> tuple[int, int]:
        buckets = buckets_of(setting, session)
        return await buckets.bucket_start("paid", NOW_MS), await buckets.bucket_start("paid", NOW_MS - 1)

    assert run(program) == (NOW_MS - 9, Buckets().start(NOW_MS - 1))
    assert session.requested == 1


class CountedServer(Server):
    """A server that records the values of its pages and the queries for buckets, and fails as configured."""

    def __init__(self, live: list[int], gone: list[int], bucket_ms: int = HOUR_MS) -> None:
        super().__init__(live, gone, bucket_ms)
        self.pages: list[list[Any]] = []
        self.lists = 0
        #: The hours of the buckets that are read at the same time.
        self.rounds: list[list[int]] = []
        #: Whether each of the next pages fails.
        self.fails: list[bool] = []
        self.sizes: list[int | None] = []

    async def read(self, query: str, values: list[Any], **options: Any) -> Any:
        if query == cql.TAG_BUCKETS:
            self.lists += 1
        if query == cql.TAG_ROWS:
            self.pages.append(values)
            if not self.reading:
                self.rounds.append([])
            self.rounds[-1].append(values[1] // HOUR_MS)
            self.sizes.append(options.get("page_size"))
            if self.fails and self.fails.pop(0):
                raise Unavailable("aborted") from self.given_up_as()
        return await super().read(query, values, **options)

    def windows(self) -> list[tuple[int, int]]:
        """Return the time ranges of the pages."""
        return [(max(values[1], values[2]), values[-2]) for values in self.pages]


def place(time_ms: int, topic: str = "t") -> TagPosition:
    return TagPosition("paid", time_ms, topic, 0, time_ms, 0, 1)


async def test_a_stream_from_the_time_of_its_last_row_does_not_repeat_it() -> None:
    server = CountedServer([10, 20, 30], [])
    pages = views(server)
    assert [row.time_ms for row in await pages.rows("paid", place(20), 20, 2**62, 10)] == [30]
    assert [row.time_ms for row in await pages.rows("paid", place(20), 21, 2**62, 10)] == [30]
    assert [row.time_ms for row in await pages.rows("paid", place(10), 20, 2**62, 10)] == [20, 30]


async def test_a_full_page_queries_no_buckets_and_any_other_queries_them_once() -> None:
    server = CountedServer([1, 2, 3, HOUR_MS + 1], [])
    pages = views(server)
    assert len(await pages.rows("paid", place(0), 0, 2**62, 3)) == 3
    assert (server.lists, len(server.pages)) == (0, 1)
    assert len(await pages.rows("paid", place(0), 0, 2**62, 5)) == 4
    assert (server.lists, len(server.pages)) == (1, 3)
    assert [values[-1] for values in server.pages] == [3, 5, 2], "each request is for the rest of the page"
    assert server.sizes == [3, 5, 2]


@pytest.mark.parametrize("per_query", [1, 2, 3, 5, 10])
async def test_all_buckets_are_found_however_many_a_query_returns(
    monkeypatch: pytest.MonkeyPatch, per_query: int
) -> None:
    monkeypatch.setattr(tag_views, "BUCKETS_PER_QUERY", per_query)
    server = CountedServer([n * HOUR_MS for n in range(6)], [])
    found = await views(server).rows("paid", None, 0, 2**62, 100)
    assert [row.time_ms for row in found] == server.live
    assert server.lists == 5 // per_query + 1


async def test_after_a_bucket_with_rows_the_next_one_is_read_alone() -> None:
    server = CountedServer([n * HOUR_MS for n in range(20)], [])
    assert len(await views(server).rows("paid", None, 0, 2**62, 16)) == 16
    assert server.most_at_once == 1
    server = CountedServer([0, 5 * HOUR_MS, 13 * HOUR_MS], [n * HOUR_MS for n in range(13)])
    assert len(await views(server).rows("paid", None, 0, 2**62, 16)) == 3
    assert server.rounds == [[0], [1], [2, 3], [4, 5, 6, 7], [8], [9, 10], [11, 12, 13]]


async def test_buckets_that_begin_at_or_after_the_end_of_the_stream_are_not_read() -> None:
    server = CountedServer([n * HOUR_MS for n in range(6)], [])
    found = await views(server).rows("paid", None, 0, 3 * HOUR_MS, 100)
    assert [row.time_ms for row in found] == [0, HOUR_MS, 2 * HOUR_MS]
    assert [values[1] for values in server.pages] == [0, HOUR_MS, 2 * HOUR_MS]
    assert server.lists == 1


async def test_no_more_buckets_are_listed_after_one_that_begins_at_the_end_of_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tag_views, "BUCKETS_PER_QUERY", 1)
    server = CountedServer([n * HOUR_MS for n in range(6)], [])
    assert len(await views(server).rows("paid", None, 0, 3 * HOUR_MS, 100)) == 3
    assert server.lists == 3


async def test_an_aborted_page_is_narrowed_at_most_five_times() -> None:
    server = CountedServer([10], [], bucket_ms=DAY_MS)
    server.fails = [True] * 5
    assert [row.time_ms for row in await views(server).rows("paid", place(0), 0, 2**62, 10)] == [10]
    widths = [to - begin for begin, to in server.windows()]
    assert widths[:6] == [DAY_MS, 5_400_000, 337_500, 21_093, 1_318, 82]
    server = CountedServer([10], [], bucket_ms=DAY_MS)
    server.fails = [True] * 6
    with pytest.raises(Unavailable):
        await views(server).rows("paid", place(0), 0, 2**62, 10)
    assert len(server.pages) == 6


async def test_pages_grow_again_after_a_narrow_one_and_each_success_allows_five_more_failures() -> None:
    server = CountedServer([10], [], bucket_ms=DAY_MS)
    server.fails = [True] * 5 + [False] + [True] + [False] * 2 + [True]
    assert [row.time_ms for row in await views(server).rows("paid", place(0), 0, 2**62, 10)] == [10]
    widths = [to - begin for begin, to in server.windows()]
    assert widths[:10] == [DAY_MS, 5_400_000, 337_500, 21_093, 1_318, 82, 328, 20, 80, 320]
    server = CountedServer([10], [], bucket_ms=DAY_MS)
    server.fails = [True] * 2 + [False] + [True] * 2
    pages = views(server)
    assert [row.time_ms for row in await pages.rows("paid", place(0), 0, 2**62, 10)] == [10]


async def test_no_page_is_read_after_a_full_one_of_a_narrowed_range() -> None:
    server = CountedServer([10, 20], [])
    server.fails = [True]
    assert [row.time_ms for row in await views(server).rows("paid", place(0), 0, 2**62, 1)] == [10]
    assert [values[-1] for values in server.pages] == [1, 1]


async def test_a_page_of_one_millisecond_that_is_aborted_cannot_be_narrowed() -> None:
    server = CountedServer([10], [])
    server.fails = [True] * 9
    with pytest.raises(Unavailable):
        await views(server).rows("paid", None, 10, 11, 10)
    assert len(server.pages) == 1


@pytest.mark.parametrize("answers", [True, False])
async def test_after_a_timeout_one_row_of_one_millisecond_shows_whether_the_nodes_answer(answers: bool) -> None:
    server = CountedServer([10], [])
    server.given_up_as = errors.CassErrorServerReadTimeout
    server.fails = [True, not answers]
    pages = views(server)
    if answers:
        assert [row.time_ms for row in await pages.rows("paid", place(5), 0, 2**62, 10)] == [10]
    else:
        with pytest.raises(Unavailable, match="aborted"):
            await pages.rows("paid", place(5), 0, 2**62, 10)
        assert len(server.pages) == 2
    assert server.pages[1] == ["paid", 0, 5, "t", 0, 5, 0, 1, 6, 1]
    assert server.sizes[1] == 1


async def test_an_aborted_page_without_a_timeout_needs_no_probe() -> None:
    server = CountedServer([10], [])
    server.fails = [True]
    assert [row.time_ms for row in await views(server).rows("paid", place(5), 0, 2**62, 10)] == [10]
    assert all(values[-1] == 10 for values in server.pages[:2])


async def test_a_page_that_fails_because_nodes_are_down_is_not_narrowed() -> None:
    server = CountedServer([10], [])
    server.given_up_as = errors.CassErrorServerUnavailable
    server.fails = [True]
    with pytest.raises(Unavailable):
        await views(server).rows("paid", place(5), 0, 2**62, 10)
    assert len(server.pages) == 1


async def test_rows_of_a_tag_whose_page_was_aborted_are_read_in_smaller_pages() -> None:
    server = CountedServer(list(range(100)), [])
    pages = views(server)
    server.fails = [True]
    assert len(await pages.rows("paid", None, 0, 2**62, 64)) == 16
    assert len(await pages.rows("paid", None, 0, 2**62, 64)) == 5
    server.given_up_as, server.fails = errors.CassErrorServerUnavailable, [True]
    with pytest.raises(Unavailable):
        await pages.rows("paid", None, 0, 2**62, 64)
    assert len(await pages.rows("paid", None, 0, 2**62, 64)) == 6


def test_pauses_between_polls_grow_and_end_in_time() -> None:
    async def program() -> list[tuple[int, float]]:
        session = CassandraSession(None, None, SETTINGS, Metrics())
        store = CassandraStore(session, SETTINGS, Metrics())
        loop, found, since = asyncio.get_running_loop(), [], -1
        for _ in range(4):
            began = loop.time()
            since = await store.wait_any(timeout_s=0.03, since=since)
            found.append((since, round(loop.time() - began, 4)))
        return found

    assert run(program) == [(1, 0.02), (2, 0.026), (3, 0.03), (4, 0.03)]

"""Pages of events on a real Cassandra are bounded in bytes, and complete across gaps and segments."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidebook.core.key import Key
from tidebook.core.replication_plan import EventRow
from tidebook.core.topic_config import TopicConfig
from tidebook.store.cassandra import CassandraStore
from tidebook.testing.conformance.journal_records import Step, append, delete, expected_journals, purge, records_of
from tidebook.testing.replicating import replicate_slice

pytestmark = pytest.mark.cassandra

OpenStore = Callable[[], Awaitable[CassandraStore]]
EVENT_BYTES = 1_000_000


async def create_topic(
    store: CassandraStore, segment_size: int = 1000, limit_bytes: int = 1_000_000
) -> tuple[str, TopicConfig]:
    topic = f"t-{uuid4().hex}"
    wanted = TopicConfig(topic_id=topic, partitions=1, segment_size=segment_size, segments=8, limit_bytes=limit_bytes)
    return topic, await store.set_topic_config(topic, wanted, expected=None)


async def test_pages_of_large_events_are_limited_by_their_bytes(open_store: OpenStore) -> None:
    store = await open_store()
    topic, config = await create_topic(store, limit_bytes=2 * EVENT_BYTES)
    for offset in range(40):
        records = records_of([("a", append(payload=b"x" * EVENT_BYTES))], start=offset)
        await replicate_slice(store, topic, 0, records, config)
    key = Key(topic, "a")
    head = await store.head(key)
    assert head is not None
    pages, after = [], 0
    while page := await store.events(key, head, after=after, to=head.seq_nr, limit=1000):
        pages.append(len(page))
        after = page[-1].seq_nr
    assert sum(pages) == 40
    assert pages[0] <= 16
    assert max(pages[1:]) <= 4


async def test_a_long_page_with_a_gap_is_read_completely(open_store: OpenStore) -> None:
    store = await open_store()
    topic, config = await create_topic(store)
    steps: list[Step] = [("a", append(450)), ("a", append(1, at=460)), ("a", append(539)), ("a", delete(7))]
    await replicate_slice(store, topic, 0, records_of(steps), config)
    key = Key(topic, "a")
    head = await store.head(key)
    assert head is not None
    numbers: list[int] = []
    while len(numbers) < 982:  # the first pages are short, because the size of the events is not known yet
        page = await store.events(key, head, after=numbers[-1] if numbers else 7, to=998, limit=1000)
        numbers += [row.seq_nr for row in page]
    whole = await store.events(key, head, after=7, to=998, limit=1000)
    assert numbers == [row.seq_nr for row in whole] == [*range(8, 451), *range(460, 999)]


@pytest.mark.timeout(300)
async def test_pages_of_any_size_across_gaps_and_segments_return_the_events_of_the_fold(open_store: OpenStore) -> None:
    store = await open_store()
    pending: list[tuple[list[Step], int, int]] = []
    action = st.one_of(
        st.builds(append, st.integers(1, 9)),
        st.builds(lambda at: append(1, at=at), st.sampled_from([3, 8, 20, 41, 10**6, 10**15])),
        st.builds(delete, st.sampled_from([1, 4, 11, 10**6])),
        st.just(purge()),
    )

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.lists(action, min_size=1, max_size=7), st.integers(1, 7), st.integers(1, 12))
    def collect(actions: list[object], segment_size: int, limit: int) -> None:
        pending.append(([("a", each) for each in actions], segment_size, limit))  # type: ignore[misc]

    collect()
    for steps, segment_size, limit in pending:
        topic, config = await create_topic(store, segment_size)
        await replicate_slice(store, topic, 0, records_of(steps), config)
        truth = expected_journals(steps, config)["a"]
        key = Key(topic, "a")
        rows: list[EventRow] = []
        if truth.head is not None:
            while page := await store.events(
                key, truth.head, after=rows[-1].seq_nr if rows else 0, to=truth.head.seq_nr, limit=limit
            ):
                rows += page
        assert tuple(rows) == truth.rows, (steps, segment_size, limit)

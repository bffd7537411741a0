"""The sequence numbers of replicated appends, looked up in the store."""

from __future__ import annotations

import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidebook.core.action import Action
from tidebook.core.errors import UnknownVersion
from tidebook.core.head import RECENT_MAX
from tidebook.core.key import partition_of
from tidebook.log.port import Record
from tidebook.replication import event_numbers
from tidebook.replication.event_numbers import number_events
from tidebook.store.sqlite import SqliteStore
from tidebook.testing.conformance.journal_records import (
    FIRST_MS,
    append,
    delete,
    expected_journals,
    purge,
    records_of,
    topic_config,
)
from tidebook.testing.conformance.store_slices import newer_version
from tidebook.testing.faults import Faults
from tidebook.testing.replicating import replicate_slice

TOPIC = "t"
CONFIG = topic_config()

ACTIONS = st.one_of(
    st.builds(append, st.integers(1, 3)),
    st.builds(append, st.integers(1, 3)),
    st.builds(lambda n: append(1, expected=n), st.integers(0, 6)),
    st.builds(lambda n: append(2, at=n), st.integers(1, 60)),
    st.builds(delete, st.integers(1, 30)),
    st.just(purge()),
)
STEPS = st.lists(st.tuples(st.sampled_from(["a", "b"]), ACTIONS), min_size=1, max_size=60)


@settings(max_examples=25, deadline=None)
@given(STEPS, st.integers(1, 20))
async def test_every_existing_event_is_numbered_once_in_the_order_of_the_log(
    steps: list[tuple[str, Action]], size: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(folder)
        await store.set_topic_config(TOPIC, CONFIG, expected=None)
        records = records_of(steps)
        await replicate_slice(store, TOPIC, 0, records, CONFIG)
        found = []
        for start in range(0, len(records), size):
            found += await number_events(store, TOPIC, 0, records[start : start + size], CONFIG)
        await store.close()
    truth = {
        (id, row.seq_nr, row.position.offset, row.encoded)
        for id, each in expected_journals(steps, CONFIG).items()
        for row in each.rows
    }
    offsets = [row.position.offset for _, row in found]
    assert offsets == sorted(offsets)
    assert len(found) == len(truth)
    assert {(id, row.seq_nr, row.position.offset, row.encoded) for id, row in found} == truth


@pytest.mark.parametrize("appends", [10, 100])
async def test_appends_that_the_head_no_longer_lists_are_looked_up(appends: int, tmp_path: object) -> None:
    store = SqliteStore(str(tmp_path))
    await store.set_topic_config(TOPIC, CONFIG, expected=None)
    records = records_of([("a", append(3)) for _ in range(appends)])
    await replicate_slice(store, TOPIC, 0, records, CONFIG)
    found = await number_events(store, TOPIC, 0, records[4:6], CONFIG)
    await store.close()
    assert [row.seq_nr for _, row in found] == [13, 14, 15, 16, 17, 18]


async def test_records_in_a_partition_that_is_not_their_journals_are_not_numbered(tmp_path: object) -> None:
    """Such records are void. Their offsets may equal those of valid appends in the journal's own partition."""
    config = topic_config(partitions=4)
    store = SqliteStore(str(tmp_path))
    await store.set_topic_config(TOPIC, config, expected=None)
    home = partition_of("a", config.partitions)
    records = records_of([("a", append(2)), ("a", append(1))])
    await replicate_slice(store, TOPIC, home, records, config)
    strays = records_of([("a", append(2, payload=b"stray")), ("a", append(1, payload=b"stray"))])
    assert await number_events(store, TOPIC, (home + 1) % config.partitions, strays, config) == []
    found = await number_events(store, TOPIC, home, records, config)
    await store.close()
    assert [row.seq_nr for _, row in found] == [1, 2, 3]


@pytest.mark.parametrize("appends", [RECENT_MAX, RECENT_MAX + 1, RECENT_MAX + 2])
async def test_the_first_append_of_a_journal_is_numbered_although_the_head_has_just_evicted_it(
    appends: int, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_numbers, "PAGE_ROWS", 2)
    store = SqliteStore(str(tmp_path))
    await store.set_topic_config(TOPIC, CONFIG, expected=None)
    records = records_of([("a", append(1)), ("a", purge()), *[("a", append(3))] * appends])
    await replicate_slice(store, TOPIC, 0, records, CONFIG)
    found = await number_events(store, TOPIC, 0, records, CONFIG)
    assert [row.seq_nr for _, row in found] == list(range(1, 3 * appends + 1))
    await store.close()


async def test_an_older_append_whose_first_events_are_deleted_keeps_its_numbers(tmp_path: object) -> None:
    store = SqliteStore(str(tmp_path))
    await store.set_topic_config(TOPIC, CONFIG, expected=None)
    records = records_of([*[("a", append(3))] * (RECENT_MAX + 2), ("a", delete(4))])
    await replicate_slice(store, TOPIC, 0, records, CONFIG)
    found = await number_events(store, TOPIC, 0, records[:2], CONFIG)
    assert [(row.seq_nr, row.position.offset, row.index) for _, row in found] == [(5, 1, 1), (6, 1, 2)]
    await store.close()


async def test_appends_whose_events_are_all_deleted_have_no_numbers(tmp_path: object) -> None:
    store = SqliteStore(str(tmp_path))
    await store.set_topic_config(TOPIC, CONFIG, expected=None)
    records = records_of([*[("a", append(2))] * (RECENT_MAX + 4), ("a", delete(100))])
    await replicate_slice(store, TOPIC, 0, records, CONFIG)
    assert await number_events(store, TOPIC, 0, records, CONFIG) == []
    assert await number_events(store, TOPIC, 0, records[:2], CONFIG) == []
    await store.close()


async def test_older_appends_are_looked_up_a_page_at_a_time_and_each_row_once(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_numbers, "PAGE_ROWS", 1)
    opened = SqliteStore(str(tmp_path))
    faults = Faults()
    store = faults.around(opened)
    await store.set_topic_config(TOPIC, CONFIG, expected=None)
    records = records_of([("a", append(1))] * (RECENT_MAX + 4))
    await replicate_slice(store, TOPIC, 0, records, CONFIG)
    found = await number_events(store, TOPIC, 0, records[1:3], CONFIG)
    assert [row.seq_nr for _, row in found] == [2, 3]
    assert faults.calls["events"] <= 5 + 3  # the binary search among 20 rows, then the two rows and the next one
    await opened.close()


@pytest.mark.parametrize(("first", "reads"), [(1, True), (2, False)])
async def test_only_appends_that_the_head_no_longer_lists_are_read_from_the_store(
    first: int, reads: bool, tmp_path: object
) -> None:
    opened = SqliteStore(str(tmp_path))
    faults = Faults()
    store = faults.around(opened)
    await store.set_topic_config(TOPIC, CONFIG, expected=None)
    records = records_of([("a", append(1))] * (RECENT_MAX + 2))
    await replicate_slice(store, TOPIC, 0, records, CONFIG)
    found = await number_events(store, TOPIC, 0, records[first:], CONFIG)
    assert [row.seq_nr for _, row in found] == list(range(first + 1, RECENT_MAX + 3))
    assert bool(faults.calls["events"]) is reads
    await opened.close()


async def test_a_record_that_a_later_build_has_replicated_is_not_skipped(tmp_path: object) -> None:
    store = SqliteStore(str(tmp_path))
    await store.set_topic_config(TOPIC, CONFIG, expected=None)
    records = [*records_of([("a", append())]), Record(1, FIRST_MS, b"a", newer_version())]
    await replicate_slice(store, TOPIC, 0, records[:1], CONFIG)
    with pytest.raises(UnknownVersion):
        await number_events(store, TOPIC, 0, records, CONFIG)
    await store.close()

"""The numbers of appends, found again in the store."""

from __future__ import annotations

import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidebook.core.action import Action
from tidebook.pipeline.numbering import number_events
from tidebook.pipeline.slice import replicate_slice
from tidebook.store.embedded import EmbeddedStore
from tidebook.testing.conformance.journal_records import append, delete, facts_of, purge, records_of, truth_of

TOPIC = "t"
FACTS = facts_of()

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
async def test_every_event_that_is_there_is_numbered_once_in_the_logs_order(
    steps: list[tuple[str, Action]], size: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = EmbeddedStore(folder)
        await store.set_facts(TOPIC, FACTS, expected=None)
        records = records_of(steps)
        await replicate_slice(store, TOPIC, 0, records, FACTS)
        found = []
        for start in range(0, len(records), size):
            found += await number_events(store, TOPIC, 0, records[start : start + size], FACTS)
        await store.close()
    truth = {
        (id, row.seq_nr, row.position.offset, row.kept)
        for id, each in truth_of(steps, FACTS).items()
        for row in each.rows
    }
    offsets = [row.position.offset for _, row in found]
    assert offsets == sorted(offsets)
    assert len(found) == len(truth)
    assert {(id, row.seq_nr, row.position.offset, row.kept) for id, row in found} == truth


@pytest.mark.parametrize("appends", [10, 100])
async def test_old_appends_are_found_where_the_head_has_forgotten_them(appends: int, tmp_path: object) -> None:
    store = EmbeddedStore(str(tmp_path))
    await store.set_facts(TOPIC, FACTS, expected=None)
    records = records_of([("a", append(3)) for _ in range(appends)])
    await replicate_slice(store, TOPIC, 0, records, FACTS)
    found = await number_events(store, TOPIC, 0, records[4:6], FACTS)
    await store.close()
    assert [row.seq_nr for _, row in found] == [13, 14, 15, 16, 17, 18]

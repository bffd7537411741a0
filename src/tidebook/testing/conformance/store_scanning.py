"""Test cases of a store: scans in parts, and repairs of a journal."""

from __future__ import annotations

import pytest

from tidebook.core.errors import Fenced
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.repair import Repair
from tidebook.core.replication_plan import EventRow, Pointer, PutEvents, SliceWrites
from tidebook.core.topic_config import TopicConfig
from tidebook.store.port import StoreWriter
from tidebook.testing.conformance.journal_records import Step, append, delete, expected_journals, purge, records_of
from tidebook.testing.conformance.store_suite import StoreSuite, assert_equals_fold, read_pages
from tidebook.testing.replicating import replicate_slice

STEPS: list[Step] = [
    *((f"j-{i}", append(1 + i % 7)) for i in range(40)),
    ("j-3", purge()),
    ("j-5", delete(4)),
    *((f"j-{i}", append(2)) for i in range(20)),
]


class ScanningCases(StoreSuite):
    """Test cases of the calls that the data source, `verify` and `rebuild` use."""

    @pytest.mark.parametrize("count", [1, 3, 16])
    async def test_the_splits_cover_all_rows(
        self, store: StoreWriter, topic: str, config: TopicConfig, count: int
    ) -> None:
        await replicate_slice(store, topic, 0, records_of(STEPS), config)
        splits = await store.splits(topic, count=count)
        assert 1 <= len(splits) <= count
        heads: list[tuple[str, Head]] = []
        events: list[tuple[str, EventRow]] = []
        for split in splits:
            async for page in store.heads_in(topic, split):
                heads += page
            async for rows in store.events_in(topic, split):
                events += rows
        inspected = [each for split in splits async for page in store.inspect(topic, split) for each in page]
        assert [each for each in inspected if isinstance(each[1], Head)] == heads
        assert [each for each in inspected if isinstance(each[1], EventRow)] == events
        assert len(inspected) == len(heads) + len(events)
        truth = expected_journals(STEPS, config)
        assert len(heads) == len(dict(heads))
        assert dict(heads) == {id: each.head for id, each in truth.items()}
        rows_of = sorted((id, row.seq_nr) for id, row in events)
        assert rows_of == sorted((id, row.seq_nr) for id, each in truth.items() for row in each.rows)
        assert {(id, row.seq_nr): row for id, row in events} == {
            (id, row.seq_nr): row for id, each in truth.items() for row in each.rows
        }

    async def test_the_splits_of_an_empty_topic_have_no_rows(
        self, store: StoreWriter, topic: str, config: TopicConfig
    ) -> None:
        for split in await store.splits(topic, count=4):
            assert [page async for page in store.heads_in(topic, split) if page] == []
            assert [page async for page in store.events_in(topic, split) if page] == []

    async def test_a_repair_writes_rows_and_head_and_removes_extra_rows(
        self, store: StoreWriter, topic: str, config: TopicConfig
    ) -> None:
        steps: list[Step] = [("a", append(4)), ("a", append(2))]
        await replicate_slice(store, topic, 0, records_of(steps), config)
        pointer, [truth] = await store.pointer(topic, 0), expected_journals(steps, config).values()
        assert pointer is not None
        assert truth.head is not None
        await self._damage(store, topic, truth.head, pointer)
        repair = Repair(
            key=Key(topic, "a"), partition=0, pointer=pointer, rev=1, head=truth.head,
            rows=truth.rows[1:3], extra_rows=(7, 9),
        )  # fmt: skip
        await store.repair(repair)
        await store.repair(repair)
        await assert_equals_fold(store, topic, config, steps)
        beyond = await self._all(store, topic)
        assert sorted(row.seq_nr for _, row in beyond) == [1, 2, 3, 4, 5, 6]

    async def test_a_repair_of_some_events_leaves_the_others_of_their_appends(
        self, store: StoreWriter, topic: str, config: TopicConfig
    ) -> None:
        steps: list[Step] = [("a", append(4)), ("a", append(4)), ("a", append(3))]
        await replicate_slice(store, topic, 0, records_of(steps), config)
        pointer, [truth] = await store.pointer(topic, 0), expected_journals(steps, config).values()
        assert pointer is not None
        assert truth.head is not None
        spoil = Repair(
            key=Key(topic, "a"), partition=0, pointer=pointer, rev=1, head=truth.head,
            rows=(EventRow(2, b"wrong", 1, truth.rows[1].position, 1, 1),), extra_rows=(4, 6, 9, 11),
        )  # fmt: skip
        await store.repair(spoil)
        assert sorted(row.seq_nr for _, row in await self._all(store, topic)) == [1, 2, 3, 5, 7, 8, 10]
        rows = tuple(row for row in truth.rows if row.seq_nr in {2, 4, 6, 9, 11})
        await store.repair(Repair(key=Key(topic, "a"), partition=0, pointer=pointer, rev=2, head=truth.head, rows=rows))
        await assert_equals_fold(store, topic, config, steps)
        # Deleted events are removed, regardless of how their rows are packed.
        more: list[Step] = [*steps, ("a", delete(6))]
        await replicate_slice(store, topic, 0, records_of(more)[3:], config)
        await assert_equals_fold(store, topic, config, more)
        assert sorted(row.seq_nr for _, row in await self._all(store, topic)) == [7, 8, 9, 10, 11]

    async def test_later_records_of_the_log_win_over_a_repair(
        self, store: StoreWriter, topic: str, config: TopicConfig
    ) -> None:
        steps: list[Step] = [("a", append(4)), ("a", purge()), ("a", append(1))]
        await replicate_slice(store, topic, 0, records_of(steps[:1]), config)
        pointer, [truth] = await store.pointer(topic, 0), expected_journals(steps[:1], config).values()
        assert pointer is not None
        assert truth.head is not None
        await store.repair(
            Repair(key=Key(topic, "a"), partition=0, pointer=pointer, rev=7, head=truth.head, rows=truth.rows)
        )
        await replicate_slice(store, topic, 0, records_of(steps)[1:], config)
        await assert_equals_fold(store, topic, config, steps)

    async def test_a_repair_of_a_changed_journal_changes_nothing_newer(
        self, store: StoreWriter, topic: str, config: TopicConfig
    ) -> None:
        steps: list[Step] = [("a", append(2)), ("a", append(1))]
        await replicate_slice(store, topic, 0, records_of(steps[:1]), config)
        pointer, [old] = await store.pointer(topic, 0), expected_journals(steps[:1], config).values()
        await replicate_slice(store, topic, 0, records_of(steps)[1:], config)
        assert pointer is not None
        assert old.head is not None
        repair = Repair(key=Key(topic, "a"), partition=0, pointer=pointer, rev=1, head=old.head, rows=old.rows)
        if self.last_write_wins:
            await store.repair(repair)
        else:
            with pytest.raises(Fenced):
                await store.repair(repair)
        await assert_equals_fold(store, topic, config, steps)

    async def _damage(self, store: StoreWriter, topic: str, head: Head, pointer: Pointer) -> None:
        """Write two rows with wrong bytes, and two rows of events that are not in the log."""
        first = head.incarnation
        key = Key(topic, "a")
        wrong = tuple(EventRow(n, b"wrong", 1, first, n, 1) for n in (2, 3))
        none = tuple(EventRow(n, b"nobody's", 1, pointer.position, n, 1) for n in (7, 9))
        writes = (PutEvents(key, head, wrong), PutEvents(key, head, none))
        await store.apply(SliceWrites(topic, 0, pointer, pointer, (writes,)))
        rows = await read_pages(store, key, head)
        if not self.last_write_wins:
            assert [row.encoded for row in rows[1:3]] == [b"wrong", b"wrong"]
        assert Position(*pointer.position) >= first

    async def _all(self, store: StoreWriter, topic: str) -> list[tuple[str, EventRow]]:
        found: list[tuple[str, EventRow]] = []
        for split in await store.splits(topic, count=2):
            async for page in store.events_in(topic, split):
                found += page
        return found

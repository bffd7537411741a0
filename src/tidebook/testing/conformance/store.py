"""The conformance suite of stores. An adapter's tests subclass it and provide one fixture:

    class TestMyStore(StoreContract):
        last_write_wins = True

        @pytest.fixture
        async def open_store(self):
            ...yield an async function that opens another StoreWriter on the same data; close all of them afterwards

Every test uses topics and settings with new names, so the store need not be empty.
"""

from __future__ import annotations

import asyncio

import pytest

from tidebook.core.errors import Fenced, InvalidInput, NotFound
from tidebook.core.key import Key
from tidebook.replication.slice import plan_slice
from tidebook.store.port import StoredSnapshot, StoreWriter
from tidebook.testing.conformance.journal_records import append, records_of, topic_config
from tidebook.testing.conformance.store_reading import StoreReadingCases
from tidebook.testing.conformance.store_scanning import ScanningCases
from tidebook.testing.conformance.store_slices import SliceCases
from tidebook.testing.conformance.store_suite import OpenStore
from tidebook.testing.replicating import replicate_slice


class StoreContract(SliceCases, StoreReadingCases, ScanningCases):
    """Subclass it, provide the fixture `open_store`, and set `last_write_wins` if late slices have no effect."""

    async def test_an_unknown_topic_has_no_configuration_and_no_rows(self, store: StoreWriter, topic: str) -> None:
        assert await store.topic_config(topic) is None
        assert topic not in await store.topics()
        assert await store.head(Key(topic, "a")) is None
        assert await store.pointer(topic, 0) is None
        assert [id async for id in store.ids(topic)] == []

    async def test_deleting_a_topic_removes_all_rows_or_is_refused(self, store: StoreWriter, topic: str) -> None:
        config = await store.set_topic_config(topic, topic_config("x"), expected=None)
        records = records_of([("a", append(2)), ("b", append())])
        await replicate_slice(store, topic, 0, records, config)
        head = await store.head(Key(topic, "a"))
        assert head is not None
        await store.save_snapshot(Key(topic, "a"), head.incarnation, StoredSnapshot(1, 0, b"{}", 0), slots=3)
        if not store.deletes_topics:
            with pytest.raises(InvalidInput):
                await store.delete_topic(topic)
            assert await store.head(Key(topic, "a")) == head
            return
        await store.delete_topic(topic)
        await store.delete_topic(topic)  # a repetition is harmless
        assert await store.topic_config(topic) is None
        assert topic not in await store.topics()
        assert await store.pointers(topic) == {}
        assert await store.heads(topic, ["a", "b"]) == {}
        assert await store.events(Key(topic, "a"), head, after=0, to=9, limit=9) == []
        assert await store.snapshots(Key(topic, "a"), head.incarnation) == []

    @pytest.mark.parametrize("created_again", [False, True])
    async def test_a_slice_of_a_topic_that_was_deleted_since_is_fenced(
        self, store: StoreWriter, topic: str, created_again: bool
    ) -> None:
        if not store.deletes_topics:
            pytest.skip("this store deletes no topics")
        config = await store.set_topic_config(topic, topic_config("x"), expected=None)
        late = (await plan_slice(store, topic, 0, records_of([("a", append(2)), ("a", append(2))]), config)).writes
        assert late is not None
        await store.delete_topic(topic)
        if created_again:
            config = await store.set_topic_config(topic, topic_config("y"), expected=None)
        with pytest.raises(Fenced):
            await store.apply(late)
        assert (await store.pointers(topic), await store.heads(topic, ["a"])) == ({}, {})
        if created_again:
            await replicate_slice(store, topic, 0, records_of([("a", append())]), config)
            head = await store.head(Key(topic, "a"))
            assert head is not None
            assert head.seq_nr == 1

    async def test_a_configuration_is_set_once(self, store: StoreWriter, open_store: OpenStore, topic: str) -> None:
        mine, other = topic_config("mine"), topic_config("other")
        assert await store.set_topic_config(topic, mine, expected=None) == mine
        assert await store.set_topic_config(topic, other, expected=None) == mine
        second = await open_store()
        assert await second.topic_config(topic) == mine
        assert topic in await second.topics()

    async def test_a_configuration_changes_only_from_the_expected_one(self, store: StoreWriter, topic: str) -> None:
        first = await store.set_topic_config(topic, topic_config("1"), expected=None)
        second = topic_config("2", partitions=4)
        assert await store.set_topic_config(topic, topic_config("3"), expected=second) == first
        assert await store.set_topic_config(topic, second, expected=first) == second
        assert await store.topic_config(topic) == second
        assert await store.set_topic_config(topic, topic_config("3"), expected=first) == second

    async def test_a_missing_configuration_cannot_be_expected(self, store: StoreWriter, topic: str) -> None:
        with pytest.raises(NotFound):
            await store.set_topic_config(topic, topic_config("1"), expected=topic_config("2"))
        assert await store.topic_config(topic) is None

    async def test_one_of_two_concurrent_configurations_wins(
        self, store: StoreWriter, open_store: OpenStore, topic: str
    ) -> None:
        second = await open_store()
        results = await asyncio.gather(
            store.set_topic_config(topic, topic_config("1"), expected=None),
            second.set_topic_config(topic, topic_config("2"), expected=None),
        )
        assert results[0] == results[1] == await store.topic_config(topic)

    async def test_a_setting_changes_only_from_the_expected_value(
        self, store: StoreWriter, open_store: OpenStore, topic: str
    ) -> None:
        assert await store.setting(topic) is None
        assert not await store.set_setting(topic, "1", expected="0")
        assert await store.setting(topic) is None
        assert await store.set_setting(topic, "1", expected=None)
        assert not await store.set_setting(topic, "2", expected=None)
        assert await (await open_store()).setting(topic) == "1"
        assert await store.set_setting(topic, "2", expected="1")
        assert await store.setting(topic) == "2"
        assert await store.set_setting(f"{topic}/more", "1", expected=None)
        assert await store.setting_names(topic) == [topic, f"{topic}/more"]
        assert await store.setting_names(f"{topic}/none") == []

    async def test_one_of_many_concurrent_increments_of_a_setting_wins_each_step(
        self, store: StoreWriter, open_store: OpenStore, topic: str
    ) -> None:
        second = await open_store()
        await store.set_setting(topic, "0", expected=None)
        for step in range(3):
            results = await asyncio.gather(
                *(each.set_setting(topic, str(step + 1), expected=str(step)) for each in (store, second, store))
            )
            assert sorted(results) == [False, False, True]

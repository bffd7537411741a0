"""What a store must do, as tests. An adapter binds to it with one fixture:

    class TestMyStore(StoreContract):
        last_write_wins = True

        @pytest.fixture
        async def open_store(self):
            ...yield an async function that opens one more StoreWriter on the same data; close them all afterwards

Topics and settings have names of their own in every test, so the data need not be empty.
"""

from __future__ import annotations

import asyncio

import pytest

from tidebook.core.errors import NotFound
from tidebook.core.key import Key
from tidebook.store.port import StoreWriter
from tidebook.testing.conformance.journal_records import facts_of
from tidebook.testing.conformance.store_reading import ReadingCases
from tidebook.testing.conformance.store_scanning import ScanningCases
from tidebook.testing.conformance.store_slices import SliceCases
from tidebook.testing.conformance.store_suite import OpenStore


class StoreContract(SliceCases, ReadingCases, ScanningCases):
    """Bind with a fixture `open_store`, and say by `last_write_wins` how late slices lose."""

    async def test_a_topic_without_facts_has_none(self, store: StoreWriter, topic: str) -> None:
        assert await store.facts(topic) is None
        assert topic not in await store.topics()
        assert await store.head(Key(topic, "a")) is None
        assert await store.pointer(topic, 0) is None
        assert [id async for id in store.ids(topic)] == []

    async def test_facts_are_set_once(self, store: StoreWriter, open_store: OpenStore, topic: str) -> None:
        mine, other = facts_of("mine"), facts_of("other")
        assert await store.set_facts(topic, mine, expected=None) == mine
        assert await store.set_facts(topic, other, expected=None) == mine
        second = await open_store()
        assert await second.facts(topic) == mine
        assert topic in await second.topics()

    async def test_facts_change_only_from_what_was_expected(self, store: StoreWriter, topic: str) -> None:
        first = await store.set_facts(topic, facts_of("1"), expected=None)
        second = facts_of("2", partitions=4)
        assert await store.set_facts(topic, facts_of("3"), expected=second) == first
        assert await store.set_facts(topic, second, expected=first) == second
        assert await store.facts(topic) == second
        assert await store.set_facts(topic, facts_of("3"), expected=first) == second

    async def test_facts_of_nothing_do_not_come_from_an_expectation(self, store: StoreWriter, topic: str) -> None:
        with pytest.raises(NotFound):
            await store.set_facts(topic, facts_of("1"), expected=facts_of("2"))
        assert await store.facts(topic) is None

    async def test_one_of_two_who_set_facts_at_once_wins(
        self, store: StoreWriter, open_store: OpenStore, topic: str
    ) -> None:
        second = await open_store()
        told = await asyncio.gather(
            store.set_facts(topic, facts_of("1"), expected=None), second.set_facts(topic, facts_of("2"), expected=None)
        )
        assert told[0] == told[1] == await store.facts(topic)

    async def test_a_setting_changes_only_from_what_was_expected(
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

    async def test_one_of_many_who_raise_a_setting_wins_each_step(
        self, store: StoreWriter, open_store: OpenStore, topic: str
    ) -> None:
        second = await open_store()
        await store.set_setting(topic, "0", expected=None)
        for step in range(3):
            told = await asyncio.gather(
                *(each.set_setting(topic, str(step + 1), expected=str(step)) for each in (store, second, store))
            )
            assert sorted(told) == [False, False, True]

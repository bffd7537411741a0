"""Fixtures of the store suite, and the comparison of a store with the fold."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Awaitable, Callable, Sequence

import pytest

from tidebook.core.errors import Fenced
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import EventRow, Pointer
from tidebook.core.topic_config import TopicConfig
from tidebook.store.port import StoreWriter
from tidebook.testing.conformance.journal_records import FIRST_MS, Step, expected_journals, topic_config

OpenStore = Callable[[], Awaitable[StoreWriter]]


class StoreSuite:
    """Fixtures for the test cases of a store; an adapter adds `open_store`."""

    #: True: a late slice of a zombie may be applied at any time and changes nothing. False: it is refused with Fenced.
    last_write_wins = False

    @pytest.fixture
    async def store(self, open_store: OpenStore) -> StoreWriter:
        return await open_store()

    @pytest.fixture
    def topic(self) -> str:
        return f"t-{uuid.uuid4().hex}"

    @pytest.fixture
    async def config(self, store: StoreWriter, topic: str) -> TopicConfig:
        return await store.set_topic_config(topic, topic_config(topic), expected=None)

    def late(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a late slice may be rejected, unless the store ignores it silently."""
        return contextlib.nullcontext() if self.last_write_wins else contextlib.suppress(Fenced)


async def read_pages(store: StoreWriter, key: Key, head: Head, *, after: int = 0, limit: int = 3) -> list[EventRow]:
    """Read all rows of a journal, page by page."""
    rows: list[EventRow] = []
    while page := await store.events(key, head, after=after, to=head.seq_nr, limit=limit):
        rows += page
        after = page[-1].seq_nr
    return rows


async def assert_equals_fold(store: StoreWriter, topic: str, config: TopicConfig, steps: Sequence[Step]) -> None:
    """Assert that the store has exactly the content of the fold of the history."""
    truth = expected_journals(steps, config)
    pointer = await store.pointer(topic, 0)
    assert pointer is not None
    assert pointer == Pointer(Position(config.epoch, len(steps) - 1), FIRST_MS + (len(steps) - 1) * 1000)
    heads = await store.heads(topic, list(truth))
    assert heads == {id: each.head for id, each in truth.items() if each.head is not None}
    listed = [id async for id in store.ids(topic)]
    assert sorted(listed) == sorted(id for id, each in truth.items() if each.head is not None and each.head.live)
    for id, each in truth.items():
        assert await store.head(Key(topic, id)) == each.head
        if each.head is not None:
            assert tuple(await read_pages(store, Key(topic, id), each.head)) == each.rows

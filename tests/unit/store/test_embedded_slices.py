"""The embedded store has no cell timestamps: a slice counts only where the pointer is the one that it began from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tidebook.core.errors import Fenced
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication import Placed, Pointer, SliceWrites, plan_key
from tidebook.core.topic import TopicFacts
from tidebook.folder.rows import put_rows
from tidebook.store.embedded import EmbeddedStore, slices
from tidebook.testing.histories import append, placed_at

KEY = Key("orders", "o-1")
FACTS = TopicFacts(topic_id="t", partitions=1)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[EmbeddedStore]:
    store = EmbeddedStore(tmp_path)
    yield store
    await store.close()


def pointer(offset: int) -> Pointer:
    return Pointer(Position(1, offset), 0)


async def apply(store: EmbeddedStore, began: Pointer | None, offset: int) -> None:
    """One append at `offset`, planned from the head as it is."""
    record = Placed(Position(1, offset), 0, placed_at(append(1), offset))
    writes = plan_key(KEY, await store.head(KEY), [record], FACTS)
    await store.apply(SliceWrites(KEY.topic, 0, began, pointer(offset), (writes,)))


async def test_a_slice_that_began_from_another_pointer_is_fenced_and_writes_nothing(store: EmbeddedStore) -> None:
    await apply(store, None, 0)
    for began in (None, pointer(7)):
        with pytest.raises(Fenced, match="plan anew"):
            await apply(store, began, 1)
    head = await store.head(KEY)
    assert head is not None
    assert head.seq_nr == 1
    assert await store.pointer(KEY.topic, 0) == pointer(0)


async def test_a_slice_that_somebody_has_done_already_writes_nothing(store: EmbeddedStore) -> None:
    await apply(store, None, 0)
    await apply(store, pointer(0), 5)
    await apply(store, None, 3)
    head = await store.head(KEY)
    assert head is not None
    assert (head.seq_nr, head.position) == (2, Position(1, 5))
    assert await store.pointer(KEY.topic, 0) == pointer(5)


async def test_tag_rows_of_many_journals_are_written_in_the_order_of_their_stream(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Journal by journal they would go all over the tree, at more than twice the cost."""
    put: list[int] = []

    def spy(connection: Any, sql: str, width: int, values: Any) -> None:
        if "INTO tag_views VALUES" in sql:
            put.extend(values[4::width])
        put_rows(connection, sql, width, values)

    monkeypatch.setattr(slices, "put_rows", spy)
    keys = []
    for id, offsets in (("b", (0, 2, 4)), ("a", (1, 3))):
        tagged = [
            Placed(Position(1, at), 0, msgspec.structs.replace(placed_at(append(1), at), tagged=(("paid", 1),)))
            for at in offsets
        ]
        keys.append(plan_key(Key(KEY.topic, id), None, tagged, FACTS))
    await store.apply(SliceWrites(KEY.topic, 0, None, pointer(4), tuple(keys)))
    assert put == [0, 1, 2, 3, 4]

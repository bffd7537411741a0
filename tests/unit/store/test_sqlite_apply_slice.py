"""The SQLite store has no cell timestamps: a slice only applies if the pointer is the one that it started from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tidebook.core.action import Delete, Purge
from tidebook.core.errors import Fenced
from tidebook.core.event import Event, encode_event, pack_events
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.repair import Damage
from tidebook.core.replication_plan import Pointer, PositionedAction, PutHead, SliceWrites, plan_key
from tidebook.core.topic_config import TopicConfig
from tidebook.sqlite.multi_insert import insert_rows
from tidebook.store.sqlite import SqliteStore, writes
from tidebook.testing.action_histories import append, delete, placed_at, purge

KEY = Key("orders", "o-1")
CONFIG = TopicConfig(topic_id="t", partitions=1)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path)
    yield store
    await store.close()


def pointer(offset: int) -> Pointer:
    return Pointer(Position(1, offset), 0)


async def apply(store: SqliteStore, began: Pointer | None, offset: int) -> None:
    """Apply one append at `offset`, planned from the current head."""
    record = PositionedAction(Position(1, offset), 0, placed_at(append(1), offset))
    writes = plan_key(KEY, await store.head(KEY), [record], CONFIG)
    await store.apply(SliceWrites(KEY.topic, 0, began, pointer(offset), (writes,)))


async def test_a_slice_from_another_pointer_is_fenced_and_writes_nothing(store: SqliteStore) -> None:
    await apply(store, None, 0)
    for began in (None, pointer(7)):
        with pytest.raises(Fenced, match="plan the slice again"):
            await apply(store, began, 1)
    head = await store.head(KEY)
    assert head is not None
    assert head.seq_nr == 1
    assert await store.pointer(KEY.topic, 0) == pointer(0)


async def test_a_slice_that_was_applied_already_writes_nothing(store: SqliteStore) -> None:
    await apply(store, None, 0)
    await apply(store, pointer(0), 5)
    await apply(store, None, 3)
    head = await store.head(KEY)
    assert head is not None
    assert (head.seq_nr, head.position) == (2, Position(1, 5))
    assert await store.pointer(KEY.topic, 0) == pointer(5)


async def test_tag_rows_of_many_journals_are_written_in_the_order_of_their_stream(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing them journal by journal would scatter them over the B-tree, at more than twice the cost."""
    put: list[int] = []

    def spy(connection: Any, sql: str, width: int, values: Any) -> None:
        if "INTO tag_views VALUES" in sql:
            put.extend(values[4::width])
        insert_rows(connection, sql, width, values)

    monkeypatch.setattr(writes, "insert_rows", spy)
    keys = []
    for id, offsets in (("b", (0, 2, 4)), ("a", (1, 3))):
        tagged = [
            PositionedAction(
                Position(1, at), 0, msgspec.structs.replace(placed_at(append(1), at), tagged=(("paid", 1),))
            )
            for at in offsets
        ]
        keys.append(plan_key(Key(KEY.topic, id), None, tagged, CONFIG))
    await store.apply(SliceWrites(KEY.topic, 0, None, pointer(4), tuple(keys)))
    assert put == [0, 1, 2, 3, 4]


def tagged_at(offset: int) -> PositionedAction:
    tagged = msgspec.structs.replace(
        placed_at(append(1), offset),
        body=pack_events([encode_event(Event(b"", tags={"paid"}))]),
        tagged=(("paid", 1),),
    )
    return PositionedAction(Position(1, offset), 0, tagged, time_ms=offset)


async def tag_offsets(store: SqliteStore) -> list[int]:
    rows = await store.tag_rows("paid", after=None, from_ms=0, until_ms=10**9, limit=100)
    return [row.offset for row in rows]


@pytest.mark.parametrize("at_once", [True, False], ids=["in one slice", "in two"])
@pytest.mark.parametrize(("end", "left"), [(delete(2), [2, 4]), (purge(), [4])], ids=["delete", "purge"])
async def test_tag_rows_that_a_delete_or_purge_finds_unwritten_are_never_written(
    store: SqliteStore, end: Delete | Purge, left: list[int], at_once: bool
) -> None:
    records = [
        tagged_at(0),
        tagged_at(1),
        tagged_at(2),
        PositionedAction(Position(1, 3), 0, end, time_ms=3),
        tagged_at(4),
    ]
    began = None
    for part in [records] if at_once else [records[:3], records[3:]]:
        until = pointer(part[-1].position.offset)
        writes = plan_key(KEY, await store.head(KEY), part, CONFIG)
        await store.apply(SliceWrites(KEY.topic, 0, began, until, (writes,)))
        began = until
    assert await tag_offsets(store) == left


async def test_a_purge_removes_the_tags_that_its_own_slice_wrote_before_it(store: SqliteStore) -> None:
    """Rows that a plan writes before a purge are removed by it, as if they had been written by another slice."""
    before = plan_key(KEY, None, [tagged_at(0)], CONFIG)
    head = next(write.head for write in before if isinstance(write, PutHead))
    after = plan_key(KEY, head, [PositionedAction(Position(1, 1), 0, purge(), time_ms=1)], CONFIG)
    await store.apply(SliceWrites(KEY.topic, 0, None, pointer(1), ((*before, *after),)))
    assert await tag_offsets(store) == []
    assert list(await store.events(KEY, head, after=0, to=10, limit=10)) == []


async def test_an_event_that_became_a_number_is_reported_as_damage(store: SqliteStore) -> None:
    await apply(store, None, 0)
    with store._database.writing as connection:
        connection.execute("UPDATE journal SET encoded = 5")
    [split] = await store.splits(KEY.topic, count=1)
    found = [row async for page in store.inspect(KEY.topic, split) for _, row in page]
    assert [row.what for row in found if isinstance(row, Damage)] == ["event"]

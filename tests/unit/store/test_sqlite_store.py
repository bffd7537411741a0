"""The SQLite store: bounds of pages, splits and streams, wake-ups, and the rows that a purge or repair removes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.store.test_sqlite_apply_slice import CONFIG, KEY, pointer, tag_offsets, tagged_at
from tidebook.core.errors import Corrupt, Fenced, NotFound, Unavailable
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.repair import Repair
from tidebook.core.replication_plan import (
    Parked,
    Pointer,
    PositionedAction,
    PutHead,
    SliceWrites,
    TopicPosition,
    plan_key,
)
from tidebook.core.topic_config import TopicConfig
from tidebook.store.port import ScanSplit, StoredSnapshot
from tidebook.store.sqlite import SqliteStore, writes
from tidebook.store.sqlite import store as stores
from tidebook.testing.action_histories import append, placed_at, purge

TOPIC = KEY.topic


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path)
    yield store
    await store.close()


async def fill(store: SqliteStore, *ids: str, events: int = 1) -> None:
    """Replicate one append of each journal, in one slice."""
    keys = []
    for offset, id in enumerate(ids):
        record = PositionedAction(Position(1, offset), offset, placed_at(append(events), offset), time_ms=offset)
        keys.append(plan_key(Key(TOPIC, id), None, [record], CONFIG))
    await store.apply(SliceWrites(TOPIC, 0, None, pointer(len(ids) - 1), tuple(keys)))


# ---- scans


@pytest.mark.parametrize("heads", [0, 1, 2, 6, 7, 8, 20])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
async def test_splits_have_about_the_same_size_and_hold_each_journal_once(
    store: SqliteStore, heads: int, count: int
) -> None:
    ids = [f"j-{number:02}" for number in range(heads)]
    await fill(store, *ids)
    splits = await store.splits(TOPIC, count=count)
    found = [[id async for page in store.heads_in(TOPIC, split) for id, _ in page] for split in splits]
    assert [id for of_split in found for id in of_split] == ids
    assert len(splits) <= max(count, 1)
    if heads >= count > 0:
        even = -(-heads // count)
        assert max(map(len, found)) == even
        assert len([each for each in found if each]) == -(-heads // even) if heads else True


async def test_a_split_includes_its_high_end_and_excludes_its_low_end(store: SqliteStore) -> None:
    await fill(store, "a", "b", "c", events=2)
    split = ScanSplit("a", "b")
    assert [id async for page in store.heads_in(TOPIC, split) for id, _ in page] == ["b"]
    events = [(id, row.seq_nr) async for page in store.events_in(TOPIC, split) for id, row in page]
    assert events == [("b", 1), ("b", 2)]


async def test_scans_continue_after_a_page_that_ends_within_a_journal(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "SCAN_PAGE_MAX", 2)
    monkeypatch.setattr(stores, "PAGE_MAX", 2)
    await fill(store, "a", "b", "c", events=3)
    [split] = await store.splits(TOPIC, count=1)
    pages = [[(id, row.seq_nr) for id, row in page] async for page in store.events_in(TOPIC, split)]
    assert [each for page in pages for each in page] == [(id, number) for id in "abc" for number in (1, 2, 3)]
    assert [len(page) for page in pages] == [2, 2, 2, 2, 1]
    assert [len(page) async for page in store.heads_in(TOPIC, split)] == [2, 1]
    assert [id async for id in store.ids(TOPIC)] == ["a", "b", "c"]


async def test_a_page_ends_with_the_item_that_exceeds_its_bytes(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "STEP_ROWS", 2)
    await fill(store, "a", events=10)
    head = await store.head(Key(TOPIC, "a"))
    assert head is not None
    rows = await store.events(Key(TOPIC, "a"), head, after=0, to=10, limit=100)
    assert len(rows) == 10
    step_bytes = sum(len(row.encoded) for row in rows[:2])
    for bytes_max, length in ((step_bytes - 1, 2), (step_bytes, 4), (2 * step_bytes - 1, 4), (2 * step_bytes, 6)):
        monkeypatch.setattr(stores, "PAGE_BYTES_MAX", bytes_max)
        assert len(await store.events(Key(TOPIC, "a"), head, after=0, to=10, limit=100)) == length


# ---- streams


async def test_a_stream_from_the_time_of_its_last_row_does_not_repeat_it(store: SqliteStore) -> None:
    writes_of = plan_key(KEY, None, [tagged_at(offset) for offset in range(4)], CONFIG)
    await store.apply(SliceWrites(TOPIC, 0, None, pointer(3), (writes_of,)))
    rows = await store.tag_rows("paid", after=None, from_ms=0, until_ms=10, limit=10)
    assert [row.offset for row in rows] == [0, 1, 2, 3]
    for after, from_ms, found in ((1, 1, [2, 3]), (1, 2, [2, 3]), (0, 2, [2, 3]), (2, 0, [3])):
        page = await store.tag_rows("paid", after=rows[after].place, from_ms=from_ms, until_ms=10, limit=10)
        assert [row.offset for row in page] == found
    assert [row.offset for row in await store.tag_rows("paid", after=None, from_ms=1, until_ms=3, limit=10)] == [1, 2]
    assert len(await store.tag_rows("paid", after=None, from_ms=0, until_ms=10, limit=3)) == 3


async def test_the_stream_of_a_topic_begins_with_its_first_event(store: SqliteStore) -> None:
    await fill(store, "a", "b")
    rows = await store.topic_rows(TOPIC, after=None, until_ms=10, limit=10)
    assert [(row.id, row.time_ms) for row in rows] == [("a", 0), ("b", 1)]
    place: TopicPosition = rows[0].place
    assert [row.id for row in await store.topic_rows(TOPIC, after=place, until_ms=10, limit=10)] == ["b"]
    assert [row.id for row in await store.topic_rows(TOPIC, after=None, until_ms=1, limit=10)] == ["a"]


async def test_tags_are_listed_once_in_order(store: SqliteStore) -> None:
    assert [tag async for tag in store.tags()] == []
    writes_of = plan_key(KEY, None, [tagged_at(offset) for offset in range(3)], CONFIG)
    await store.apply(SliceWrites(TOPIC, 0, None, pointer(2), (writes_of,)))
    assert [tag async for tag in store.tags()] == ["paid"]


async def test_the_earliest_expiry_comes_first_and_later_pages_continue_after_it(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "PAGE_MAX", 2)
    keys = []
    for offset, (id, after_ms) in enumerate((("a", 30), ("b", 10), ("c", 10), ("d", 20), ("e", None))):
        action = msgspec.structs.replace(placed_at(append(1), offset), expire_after_ms=after_ms)
        keys.append(plan_key(Key(TOPIC, id), None, [PositionedAction(Position(1, offset), 0, action)], CONFIG))
    await store.apply(SliceWrites(TOPIC, 0, None, pointer(4), tuple(keys)))
    for now_ms, found in ((9, ""), (10, "bc"), (20, "bcd"), (29, "bcd"), (30, "bcda")):
        assert "".join([id async for id, _ in store.expired(TOPIC, now_ms=now_ms)]) == found
    assert [id async for id, _ in store.expired("nobody", now_ms=99)] == []


async def test_parked_records_of_one_topic_are_found_among_those_of_others(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "PAGE_MAX", 2)
    for topic in ("a", "b", "c"):
        parked = tuple(Parked(topic, 0, Position(1, n), 5, None, "damaged", b"x") for n in range(3))
        await store.apply(SliceWrites(topic, 0, None, pointer(3), (), parked))

    async def listed(topic: str | None) -> list[tuple[str, int]]:
        return [(each.topic, each.position.offset) async for each in store.parked(topic)]

    assert await listed("b") == [("b", 0), ("b", 1), ("b", 2)]
    assert await listed("aa") == []
    assert await listed(None) == [(topic, n) for topic in "abc" for n in range(3)]
    [first] = [each async for each in store.parked("a") if each.position.offset == 0]
    assert first == Parked("a", 0, Position(1, 0), 5, None, "damaged", b"x")
    await store.unpark([first])
    assert await listed("a") == [("a", 1), ("a", 2)]


# ---- wake-ups


async def woken(store: SqliteStore, act: Callable[[], Awaitable[Any]]) -> bool:
    """Return whether a call wakes the streams that wait for any pointer."""
    since = await store.wait_any(timeout_s=0.0)
    waiting = asyncio.create_task(store.wait_any(timeout_s=60.0, since=since))
    await asyncio.sleep(0)
    await act()
    try:
        return await asyncio.wait_for(waiting, 5) > since
    except TimeoutError:
        return False


async def test_streams_are_woken_by_slices_repairs_and_new_topics(store: SqliteStore) -> None:
    """A new topic has no pointers yet, and a replicator waits for it."""
    assert await woken(store, lambda: fill(store, "a"))
    assert await woken(store, lambda: store.set_topic_config("new", CONFIG, expected=None))
    head = await store.head(Key(TOPIC, "a"))
    assert head is not None
    at = await store.pointer(TOPIC, 0)
    assert at is not None
    repair = Repair(key=Key(TOPIC, "a"), partition=0, pointer=at, rev=1, head=head)
    assert await woken(store, lambda: store.repair(repair))


async def test_a_wait_for_one_partition_ends_when_its_pointer_passes_the_given_position(store: SqliteStore) -> None:
    assert not await store.wait(TOPIC, 0, beyond=None, timeout_s=0.0)
    waiting = asyncio.create_task(store.wait(TOPIC, 0, beyond=None, timeout_s=60.0))
    await asyncio.sleep(0)
    await store.apply(SliceWrites(TOPIC, 0, None, pointer(4), ()))
    assert await asyncio.wait_for(waiting, 30)
    assert await store.wait(TOPIC, 0, beyond=Position(1, 3), timeout_s=0.0)
    assert not await store.wait(TOPIC, 0, beyond=Position(1, 4), timeout_s=0.0)
    assert not await store.wait(TOPIC, 1, beyond=None, timeout_s=0.0)
    waiting = asyncio.create_task(store.wait(TOPIC, 0, beyond=Position(1, 4), timeout_s=60.0))
    await asyncio.sleep(0)
    await store.apply(SliceWrites(TOPIC, 0, pointer(4), pointer(5), ()))
    assert await asyncio.wait_for(waiting, 30)


# ---- writes


async def test_a_slice_that_ends_before_the_pointer_does_not_move_it_back(store: SqliteStore) -> None:
    await fill(store, *(f"j-{number}" for number in range(6)))
    record = PositionedAction(Position(1, 3), 0, placed_at(append(1), 3))
    late = plan_key(Key(TOPIC, "late"), None, [record], CONFIG)
    await store.apply(SliceWrites(TOPIC, 0, pointer(5), pointer(3), (late,)))
    assert await store.pointer(TOPIC, 0) == pointer(5)
    assert await store.head(Key(TOPIC, "late")) is None
    await store.apply(SliceWrites(TOPIC, 0, pointer(2), pointer(5), (late,)))
    assert await store.head(Key(TOPIC, "late")) is None, "all of it was applied by another replicator"
    with pytest.raises(Fenced, match=r"planned from .*2.*, 0 ms, but the pointer is at .*5.*, 0 ms"):
        await store.apply(SliceWrites(TOPIC, 0, pointer(2), pointer(6), (late,)))
    with pytest.raises(Fenced, match="planned from nothing"):
        await store.apply(SliceWrites(TOPIC, 0, None, pointer(6), (late,)))
    later = Pointer(Position(1, 5), 77)
    await store.apply(SliceWrites(TOPIC, 0, pointer(5), later, ()))
    assert await store.pointer(TOPIC, 0) == later, "the time of the pointer may rise"


@pytest.mark.parametrize("count", [1, 2, 3, 5])
async def test_a_purge_removes_all_tag_rows_of_its_journal_however_many(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(writes, "CLEAR_PAGE", 2)
    records = [tagged_at(offset) for offset in range(count)]
    other = plan_key(Key(TOPIC, "other"), None, [tagged_at(50)], CONFIG)
    await store.apply(SliceWrites(TOPIC, 0, None, pointer(50), (plan_key(KEY, None, records, CONFIG), other)))
    assert await tag_offsets(store) == [*range(count), 50]
    end = PositionedAction(Position(1, 60), 0, purge(), time_ms=60)
    await store.apply(
        SliceWrites(TOPIC, 0, pointer(50), pointer(60), (plan_key(KEY, await store.head(KEY), [end], CONFIG),))
    )
    assert await tag_offsets(store) == [50]
    head = await store.head(KEY)
    assert head is not None
    assert not head.live
    assert list(await store.events(KEY, head, after=0, to=2**62, limit=10)) == []
    progress = [row[0] for row in store._select("SELECT id FROM tag_views_progress", ())]
    assert progress == ["other"]


async def test_a_purge_removes_snapshots_of_its_incarnation_and_of_earlier_ones(store: SqliteStore) -> None:
    writes_of = plan_key(KEY, None, [tagged_at(5)], CONFIG)
    await store.apply(SliceWrites(TOPIC, 0, None, pointer(5), (writes_of,)))
    for offset in (4, 5, 6):
        await store.save_snapshot(KEY, Position(1, offset), StoredSnapshot(1, 0, b"x", 5), slots=3)
    end = PositionedAction(Position(1, 9), 0, purge(), time_ms=9)
    await store.apply(
        SliceWrites(TOPIC, 0, pointer(5), pointer(9), (plan_key(KEY, await store.head(KEY), [end], CONFIG),))
    )
    left = [offset for offset in (4, 5, 6) if await store.snapshots(KEY, Position(1, offset))]
    assert left == [6]


async def test_the_number_of_snapshots_of_an_incarnation_is_bounded(store: SqliteStore) -> None:
    at, other = Position(1, 0), Position(1, 1)
    await store.save_snapshot(KEY, other, StoredSnapshot(1, 0, b"other", 5), slots=3)
    for seq_nr in range(1, 6):
        await store.save_snapshot(KEY, at, StoredSnapshot(seq_nr, 0, b"%d" % seq_nr, 5), slots=3)
        kept = [each.seq_nr for each in await store.snapshots(KEY, at)]
        assert kept == list(range(seq_nr, max(0, seq_nr - 3), -1))
    await store.delete_snapshots(KEY, at, to=4)
    assert [each.seq_nr for each in await store.snapshots(KEY, at)] == [5]
    assert len(await store.snapshots(KEY, other)) == 1


async def test_a_repair_removes_extra_rows_writes_missing_ones_and_leaves_the_rest(store: SqliteStore) -> None:
    planned = plan_key(KEY, None, [tagged_at(0), tagged_at(1), tagged_at(2)], CONFIG)
    await store.apply(SliceWrites(TOPIC, 0, None, pointer(2), (planned,)))
    head = next(write.head for write in planned if isinstance(write, PutHead))
    rows = await store.events(KEY, head, after=0, to=9, limit=9)
    tags = await store.tag_rows("paid", after=None, from_ms=0, until_ms=10, limit=10)
    changed = msgspec.structs.replace(rows[0], encoded=tags[1].encoded, timestamp_ms=99)
    given: dict[str, Any] = {
        "rows": (changed,), "extra_rows": (3,), "extra_tags": (tags[2].place,), "tags": (tags[0],), "rev": 1,
    }  # fmt: skip
    with pytest.raises(Fenced, match="more of its partition was replicated"):
        await store.repair(Repair(key=KEY, partition=0, pointer=pointer(1), head=head, **given))
    assert len(await store.events(KEY, head, after=0, to=9, limit=9)) == 3
    await store.repair(Repair(key=KEY, partition=0, pointer=pointer(2), head=head, **given))
    assert list(await store.events(KEY, head, after=0, to=9, limit=9)) == [changed, rows[1]]
    assert await tag_offsets(store) == [0, 1]


async def test_graves_that_have_changed_are_not_removed(store: SqliteStore) -> None:
    await fill(store, "a", "b")
    for offset, id in ((2, "a"), (3, "b")):
        end = PositionedAction(Position(1, offset), 0, purge(), time_ms=offset)
        head = await store.head(Key(TOPIC, id))
        await store.apply(
            SliceWrites(
                TOPIC, 0, pointer(offset - 1), pointer(offset), (plan_key(Key(TOPIC, id), head, [end], CONFIG),)
            )
        )
    graves: dict[str, Head] = {id: head async for id, head in store.graves(TOPIC)}
    assert sorted(graves) == ["a", "b"]
    await store.remove_graves(TOPIC, [("a", graves["a"]), ("b", graves["a"])])
    assert [id async for id, _ in store.graves(TOPIC)] == ["b"]


async def test_a_configuration_changes_only_from_the_one_expected(store: SqliteStore) -> None:
    changed = msgspec.structs.replace(CONFIG, epoch=2)
    with pytest.raises(NotFound):
        await store.set_topic_config(TOPIC, changed, expected=CONFIG)
    assert await store.set_topic_config(TOPIC, CONFIG, expected=None) == CONFIG
    assert await store.set_topic_config(TOPIC, changed, expected=None) == CONFIG
    assert await store.set_topic_config(TOPIC, changed, expected=CONFIG) == changed
    assert (await store.topic_config(TOPIC), await store.topics()) == (changed, [TOPIC])
    with store._database.writing as connection:
        connection.execute("UPDATE topic_config SET config = 'no json'")
    with pytest.raises(Corrupt, match="restore a copy"):
        await store.topic_config(TOPIC)


async def test_a_deleted_topic_leaves_no_row_in_any_table(store: SqliteStore) -> None:
    other = TopicConfig(topic_id="o", partitions=1)
    for topic in (TOPIC, "other"):
        key = Key(topic, "a")
        await store.set_topic_config(topic, other, expected=None)
        parked = (Parked(topic, 0, Position(1, 0), 5, None, "damaged", b"x"),)
        await store.apply(
            SliceWrites(topic, 0, None, pointer(1), (plan_key(key, None, [tagged_at(1)], CONFIG),), parked)
        )
        await store.save_snapshot(key, Position(1, 1), StoredSnapshot(1, 0, b"x", 5), slots=3)
    await store.delete_topic(TOPIC)
    for table in writes._TABLES.split(", "):
        assert store._select(f"SELECT DISTINCT topic FROM {table}", ()) == [("other",)], table


async def test_a_wait_on_a_closed_store_ends_at_once(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    await store.close()
    with pytest.raises(Unavailable, match="closed"):
        await store.wait_any(timeout_s=0.0)

"""Rows that cannot be decoded: a read raises, and the scan of a repair returns them as damage with their place."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("acsylla")

from tests.unit.store.test_cassandra_scan import HEAD, appended
from tests.unit.store.test_sqlite_apply_slice import CONFIG, KEY, pointer, tagged_at
from tidebook.core.errors import Corrupt
from tidebook.core.head import encode_head
from tidebook.core.position import Position
from tidebook.core.repair import Damage
from tidebook.core.replication_plan import EventRow, SliceWrites, TagPosition, TagRow, plan_key
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.rows import decode_rows, decode_rows_of, encode_row, encode_rows, is_packed
from tidebook.store.cassandra.tag_writes import TagCell, _encode, tag_row, tag_row_or_damage
from tidebook.store.cassandra.token_ranges import heads_in, inspect_rows
from tidebook.store.port import ScanSplit
from tidebook.store.sqlite import SqliteStore

# ---- Cassandra


class Row:
    def __init__(self, *columns: Any) -> None:
        self.as_tuple = lambda: columns


class Session:
    """Pages of heads and of events."""

    def __init__(self, heads: list[tuple[str, bytes]], events: list[tuple[str, int, bytes]]) -> None:
        self._pages: dict[str, list[Any]] = {cql.HEADS_IN: heads, cql.INSPECTED_EVENTS_IN: events}
        self.requested: list[list[object]] = []

    async def pages(self, query: str, values: list[object], *, page_size: int) -> AsyncIterator[list[Row]]:
        self.requested.append(values)
        yield [Row(*each) for each in self._pages[query]]


async def test_damaged_heads_and_events_are_returned_with_their_journal_and_number() -> None:
    rows = appended([2, 1])
    heads = [("a", encode_head(HEAD)), ("b", b"\xc1")]
    events = [("a", 2, encode_rows(rows[:2])), ("a", 3, b"\xc1"), ("b", 7, b""), ("b", 8, encode_row(rows[2]))]
    session: Any = Session(heads, events)
    found = [page async for page in inspect_rows(session, "t", ScanSplit("-5", "9"))]
    assert [len(page) for page in found] == [2, 5]
    assert found[0][0] == ("a", HEAD)
    damaged = [
        (id, each.what, each.topic, each.id, each.seq_nr)
        for page in found
        for id, each in page
        if isinstance(each, Damage)
    ]
    assert damaged == [("b", "head", "t", "b", None), ("a", "event", "t", "a", 3), ("b", "event", "t", "b", 7)]
    assert [(id, each) for id, each in found[1] if isinstance(each, EventRow)] == [
        ("a", rows[0]), ("a", rows[1]), ("b", rows[2]),
    ]  # fmt: skip
    assert session.requested == [[-5, 9, "t"]] * 2
    with pytest.raises(Corrupt):
        [page async for page in heads_in(session, "t", ScanSplit("-5", "9"))]


def test_a_packed_row_replaces_every_single_row_of_its_numbers() -> None:
    rows = appended([1, 4, 1])
    before, *packed, after = rows
    singles = [encode_row(row) for row in packed]
    for some in (singles, singles[:1], singles[-1:], []):
        cells = [encode_row(before), *some, encode_rows(packed), encode_row(after)]
        assert decode_rows(cells) == rows
    assert [is_packed(cell) for cell in (encode_row(before), encode_rows(packed))] == [False, True]
    other = [("a", encode_row(before)), ("b", encode_rows(packed)), ("b", encode_row(after))]
    assert decode_rows_of(other) == [("a", before), *(("b", row) for row in (*packed, after))]


@pytest.mark.parametrize("cell", [b"", b"\xc1", b"\x97", encode_row(appended([1])[0])[:-1]])
def test_a_damaged_cell_is_corrupt(cell: bytes) -> None:
    with pytest.raises(Corrupt, match="repair it from the log"):
        decode_rows([cell])


def test_a_damaged_tag_row_is_returned_with_its_place() -> None:
    event = EventRow(4, b"x", 5, Position(1, 3), 2, 7)
    columns = (7, "t", 0, 3, 2, 1)
    good = tag_row_or_damage("paid", (*columns, _encode(TagCell("a", Position(1, 0), 9, event))))
    assert isinstance(good, TagRow)
    assert (good.id, good.seq_nr, good.tag_seq_nr, good.position) == ("a", 4, 9, Position(1, 3))
    bad = tag_row_or_damage("paid", (*columns, b"\xc1"))
    assert isinstance(bad, Damage)
    assert (bad.what, bad.topic, bad.id, bad.place) == ("tag", "t", None, TagPosition("paid", 7, "t", 0, 3, 2, 1))
    with pytest.raises(Corrupt, match="'paid'"):
        tag_row("paid", (*columns, b"\xc1"))


# ---- SQLite


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path)
    writes = plan_key(KEY, None, [tagged_at(0), tagged_at(1)], CONFIG)
    await store.apply(SliceWrites(KEY.topic, 0, None, pointer(1), (writes,)))
    yield store
    await store.close()


async def inspected(store: SqliteStore) -> list[Any]:
    [split] = await store.splits(KEY.topic, count=1)
    return [row async for page in store.inspect(KEY.topic, split) for _, row in page]


async def inspected_tags(store: SqliteStore) -> list[Any]:
    return list(await store.inspect_tag("paid", after=None, from_ms=0, until_ms=10**9, limit=100))


async def test_undamaged_rows_are_returned_unchanged(store: SqliteStore) -> None:
    assert [type(row).__name__ for row in await inspected(store)] == ["Head", "EventRow", "EventRow"]
    assert [type(row).__name__ for row in await inspected_tags(store)] == ["TagRow", "TagRow"]


@pytest.mark.parametrize(
    "change",
    [
        "encoded = 5", "encoded = 'text'", "encoded = x'c1'", "time_ms = 'late'", "epoch = 1.5", '"offset" = \'x\'',
        '"index" = \'x\'', "log_ms = 'x'",
    ],
)  # fmt: skip
async def test_a_damaged_event_of_sqlite_is_reported_and_the_others_are_not(store: SqliteStore, change: str) -> None:
    with store._database.writing as connection:
        connection.execute(f"UPDATE journal SET {change} WHERE seq_nr = 2")
    _, first, second = await inspected(store)
    assert isinstance(first, EventRow)
    assert isinstance(second, Damage)
    assert (second.what, second.topic, second.id, second.seq_nr) == ("event", KEY.topic, KEY.id, 2)


@pytest.mark.parametrize("change", ["head = x'c1'", "head = 5", "head = 'text'"])
async def test_a_damaged_head_of_sqlite_is_reported(store: SqliteStore, change: str) -> None:
    with store._database.writing as connection:
        connection.execute(f"UPDATE metajournal SET {change}")
    damage, *events = await inspected(store)
    assert isinstance(damage, Damage)
    assert (damage.what, damage.topic, damage.id) == ("head", KEY.topic, KEY.id)
    assert len(events) == 2


@pytest.mark.parametrize(
    "change",
    [
        "encoded = 5", "id = x'ff'", "incarnation_epoch = 'x'", "incarnation_offset = 'x'", "tag_seq_nr = 'x'",
        "seq_nr = 'x'", "time_ms = 'x'",
    ],
)  # fmt: skip
async def test_a_damaged_tag_row_of_sqlite_is_reported_with_its_place(store: SqliteStore, change: str) -> None:
    with store._database.writing as connection:
        connection.execute(f'UPDATE tag_views SET {change} WHERE "offset" = 1')
    first, damage = await inspected_tags(store)
    assert isinstance(first, TagRow)
    assert isinstance(damage, Damage)
    expected = msgspec.structs.replace(first.place, time_ms=1, offset=1)
    assert (damage.what, damage.topic, damage.id, damage.place) == ("tag", KEY.topic, None, expected)

"""Streams of tags and topics: order, completeness, resuming at any position, and the horizon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tidebook
from tests.unit.domain.projecting import replicate_and_tick
from tidebook.core.errors import UnknownVersion
from tidebook.core.event import Event
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import Pointer, SliceWrites
from tidebook.domain import log_topic_source, topic_scan
from tidebook.domain.event_source import SourcePosition, TagSource, TopicSource, decode_position, encode_position
from tidebook.domain.log_topic_source import LogTopicSource
from tidebook.domain.topic_scan import in_scan
from tidebook.log.port import Outgoing
from tidebook.tags.horizon import Horizons
from tidebook.testing.conformance.store_slices import newer_version
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book

TOPICS = frozenset({"t-0", "t-1"})


def sources(book: Book) -> dict[str, Any]:
    return {
        "store": TopicSource(book.store, Horizons(book.store), TOPICS),
        "log": LogTopicSource(book.log, book.store, Horizons(book.store), TOPICS),
        "tags": TagSource(book.store, Horizons(book.store), ["all", "odd"], TOPICS),
    }


async def fill(book: Book, count: int) -> None:
    for n in range(count):
        tags = {"all", "odd"} if n % 2 else {"all"}
        await book.journal(f"t-{n % 2}").append(f"a-{n % 7}", [Event(n, tags=tags), Event(-n, tags=tags)])


async def read(source: Any, after: SourcePosition) -> tuple[list[Any], SourcePosition]:
    rows = list[Any]()
    async for page in source.pages(after):
        rows += page.rows
        after = page.position
    return rows, after


@pytest.mark.parametrize("kind", ["store", "log", "tags"])
async def test_a_stream_has_every_event_once_in_order_from_any_position(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_topic_source, "PAGE_RECORDS", 5)
    async with tidebook.open(tmp_path) as book:
        await fill(book, 60)
        await replicate_and_tick(book, *TOPICS)
        source = sources(book)[kind]
        rows, end = await read(source, SourcePosition())
        assert len({(row.topic, row.id, row.row.seq_nr) for row in rows}) == len(rows) == 120
        assert [row.at for row in rows] == sorted(row.at for row in rows)
        for key in {(row.topic, row.id) for row in rows}:
            numbers = [row.row.seq_nr for row in rows if (row.topic, row.id) == key]
            assert numbers == list(range(1, len(numbers) + 1))
        assert await read(source, end) == ([], end)
        # A stream can resume after the position of every page and after every row.
        seen, before = 0, SourcePosition()
        async for page in source.pages(SourcePosition()):
            for row in page.rows:
                seen += 1
                place = decode_position(encode_position(SourcePosition(row.at, before.log)))
                if seen % 10 == 0:
                    assert [each.at for each in (await read(source, place))[0]] == [each.at for each in rows[seen:]]
                assert await source.place(Key(row.topic, row.id), row.partition, row.row) == row.at
            before = page.position
            again = await read(source, decode_position(encode_position(before)))
            assert [each.at for each in again[0]] == [each.at for each in rows[seen:]]
        await fill(book, 4)
        await replicate_and_tick(book, *TOPICS)
        assert len((await read(source, end))[0]) == 8


async def test_the_store_and_the_log_give_the_same_stream(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        await fill(book, 40)
        await replicate_and_tick(book, *TOPICS)
        await fill(book, 10)
        await replicate(book.log, book.store, "t-0")  # the other topic holds the horizon back
        found = {kind: (await read(each, SourcePosition()))[0] for kind, each in sources(book).items()}
        assert [(row.at, row.row) for row in found["store"]] == [(row.at, row.row) for row in found["log"]]
        assert len(found["store"]) == 80


async def truncate(book: Book, topic: str) -> None:
    """Remove all replicated records from the log."""
    for partition in range(4):
        pointer = await book.store.pointer(topic, partition)
        if pointer is not None:
            await book.log.truncate(topic, partition, before=pointer.position.offset + 1)


async def read_on(book: Book, source: Any, after: SourcePosition) -> tuple[list[Any], SourcePosition]:
    """Read as a runner does, continuing from the position of each jump, while the horizon moves."""
    rows = list[Any]()
    jumps = True
    while jumps:
        jumps = False
        await replicate_and_tick(book, *TOPICS)
        async for page in source.pages(after):
            rows += page.rows
            after, jumps = decode_position(encode_position(page.position)), page.jumps
            if jumps:
                break
    return rows, after


def keys(rows: list[Any]) -> list[Any]:
    return [(row.topic, row.id, row.row.seq_nr) for row in rows]


@pytest.mark.parametrize("journals", [1, 32])
async def test_events_that_the_log_has_lost_come_from_the_store_without_gaps_or_duplicates(
    tmp_path: Path, journals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_scan, "JOURNALS", journals)
    monkeypatch.setattr(topic_scan, "PAGE_ROWS", 5)
    async with tidebook.open(tmp_path) as book:
        source = sources(book)["log"]
        await fill(book, 12)
        first, after = await read_on(book, source, SourcePosition())
        await fill(book, 20)
        await replicate_and_tick(book, *TOPICS)
        for topic in sorted(TOPICS):
            await truncate(book, topic)
        await fill(book, 8)
        rows, end = await read_on(book, source, after)
        whole, _ = await read_on(book, source, SourcePosition())
        assert len(first) == 24
        assert len(set(keys(first + rows))) == len(first + rows) == 80
        assert sorted(keys(whole)) == sorted(keys(first + rows))
        for found in (first + rows, whole):
            for key in {(row.topic, row.id) for row in found}:
                numbers = [row.row.seq_nr for row in found if (row.topic, row.id) == key]
                assert numbers == list(range(1, len(numbers) + 1))
        # A scan can resume after each of its positions and after each page.
        begun = [page.position async for page in source.pages(after)]
        assert [in_scan(each.at) for each in begun] == [True]
        place, seen = begun[0], first[:]
        await replicate_and_tick(book, *TOPICS)
        async for page in source.pages(place):
            for row in page.rows:
                seen.append(row)
                again, _ = await read_on(book, source, SourcePosition(row.at, place.log))
                assert len(set(keys(seen + again))) == len(seen + again) == 80
        assert (await read_on(book, source, end))[0] == []
        await fill(book, 4)
        assert len((await read_on(book, source, end))[0]) == 8


async def test_a_scan_waits_for_the_horizon_if_the_log_has_lost_events_above_it(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        source = sources(book)["log"]
        await fill(book, 20)
        await replicate_and_tick(book, *TOPICS)
        await fill(book, 20)
        await replicate(book.log, book.store, "t-0")  # the other topic holds the horizon back
        await truncate(book, "t-0")
        [begun] = [page.position async for page in source.pages(SourcePosition())]
        horizon = await Horizons(book.store).read(TOPICS)
        assert begun.at[topic_scan.PLACE_SIZE] > horizon.time_ms
        assert [page async for page in source.pages(begun)] == []
        rows, _ = await read_on(book, source, begun)
        assert len(set(keys(rows))) == len(rows) == 80


async def test_a_record_that_a_later_build_has_replicated_ends_the_stream_of_the_log(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        await fill(book, 4)
        await replicate_and_tick(book, *TOPICS)
        pointer = await book.store.pointer("t-0", 0)
        sent = await book.log.append(Outgoing("t-0", 0, b"a-0", newer_version()))
        later = Pointer(Position(1, sent.offset), sent.timestamp_ms)
        await book.store.apply(SliceWrites("t-0", 0, pointer, later, ()))
        with pytest.raises(UnknownVersion):
            await read(sources(book)["log"], SourcePosition())

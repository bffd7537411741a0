"""Streams of tags and topics: order, completeness, resuming anywhere, the horizon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tidebook
from tests.unit.domain.projecting import bring
from tidebook.core.errors import LogLost
from tidebook.core.event import Event
from tidebook.core.key import Key
from tidebook.domain import log_topic_source
from tidebook.domain.event_source import SourcePosition, TagSource, TopicSource, decode_position, encode_position
from tidebook.domain.log_topic_source import LogTopicSource
from tidebook.tags.horizon import Horizons
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
        await bring(book, *TOPICS)
        source = sources(book)[kind]
        rows, end = await read(source, SourcePosition())
        assert len({(row.topic, row.id, row.row.seq_nr) for row in rows}) == len(rows) == 120
        assert [row.at for row in rows] == sorted(row.at for row in rows)
        for key in {(row.topic, row.id) for row in rows}:
            numbers = [row.row.seq_nr for row in rows if (row.topic, row.id) == key]
            assert numbers == list(range(1, len(numbers) + 1))
        assert await read(source, end) == ([], end)
        # Every page's position, and every row's place with the offsets before its page, resumes after it.
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
        await bring(book, *TOPICS)
        assert len((await read(source, end))[0]) == 8


async def test_the_store_and_the_log_give_the_same_stream(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        await fill(book, 40)
        await bring(book, *TOPICS)
        await fill(book, 10)
        await replicate(book.log, book.store, "t-0")  # the other topic holds the horizon back
        found = {kind: (await read(each, SourcePosition()))[0] for kind, each in sources(book).items()}
        assert [(row.at, row.row) for row in found["store"]] == [(row.at, row.row) for row in found["log"]]
        assert len(found["store"]) == 80


async def test_a_truncated_log_is_lost_for_a_stream_that_needs_it(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        await fill(book, 20)
        await bring(book, *TOPICS)
        source = sources(book)["log"]
        _, end = await read(source, SourcePosition())
        for partition in range(4):
            await book.log.truncate("t-0", partition, before=await book.log.end("t-0", partition))
        with pytest.raises(LogLost, match="follow tags"):
            await read(source, SourcePosition())
        assert (await read(source, end))[0] == []
        assert len((await read(sources(book)["store"], SourcePosition()))[0]) == 40

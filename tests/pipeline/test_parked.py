"""Parked records are replayed as new appends at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

import tidebook
from tests.pipeline.workloads import replicate_here, write_garbage
from tidebook.core.action import Append
from tidebook.core.event import Event, encode_events
from tidebook.core.key import partition_of
from tidebook.core.record import encode_record
from tidebook.core.replication_plan import Parked
from tidebook.log.port import Outgoing
from tidebook.pipeline.parked import replay_parked
from tidebook.wiring.book import Book

TOPIC = "orders"


@pytest.fixture
async def book(tmp_path: Path) -> AsyncIterator[Book]:
    async with tidebook.open(tmp_path / "book") as book:
        yield book


async def parked(book: Book) -> list[Parked]:
    await replicate_here(book, book.store, TOPIC)
    return [each async for each in book.store.parked(TOPIC)]


async def payloads(book: Book, id: str) -> list[object]:
    return [each.payload async for each in book.journal(TOPIC).read(id)]


async def test_a_record_of_another_program_becomes_an_event_of_its_journal(book: Book) -> None:
    await book.journal(TOPIC).append("o-1", [Event("first")])
    await write_garbage(book, TOPIC, "o-1", value=b'{"total": 3}')
    [found] = await parked(book)
    done = await replay_parked(book, found, raw=True)
    assert (done.first, done.last, done.error) == (2, 2, None)
    assert await payloads(book, "o-1") == ["first", {"total": 3}]
    assert await parked(book) == []


async def test_a_damaged_record_stays_parked_unless_its_bytes_are_requested(book: Book) -> None:
    await write_garbage(book, TOPIC, "o-1", value=b"\x00\x01garbage")
    [found] = await parked(book)
    done = await replay_parked(book, found)
    assert done.error is not None
    assert "raw" in done.error
    assert await parked(book) == [found]


async def test_a_record_in_the_wrong_partition_is_replayed_to_its_journal(book: Book) -> None:
    config = await book.journal(TOPIC).create()
    body, tagged = encode_events([Event("stray", tags={"paid"})])
    value = encode_record(Append(config.epoch, b"x" * 16, 1, body, tagged=tagged), limit_bytes=1000)
    wrong = (partition_of("o-1", config.partitions) + 1) % config.partitions
    await book.log.append(Outgoing(TOPIC, wrong, b"o-1", value))
    [found] = await parked(book)
    assert found.id == "o-1"
    await replay_parked(book, found)
    [event] = [each async for each in book.journal(TOPIC).read("o-1")]
    assert (event.payload, event.tags) == ("stray", frozenset({"paid"}))


async def test_replaying_again_adds_nothing(book: Book) -> None:
    await write_garbage(book, TOPIC, "o-1", value=b"7")
    [found] = await parked(book)
    await replay_parked(book, found, raw=True)
    await replay_parked(book, found, raw=True)
    assert await payloads(book, "o-1") == [7]


async def test_a_record_that_was_stored_in_part_is_replayed_completely_or_not_at_all(book: Book) -> None:
    """Cassandra keeps the first bytes of a large record; the rest is only in the log, until it is truncated."""
    offset = await write_garbage(book, TOPIC, "o-1", value=b'"a long text"')
    [found] = await parked(book)
    cut = msgspec.structs.replace(found, value=found.value[:6], whole_bytes=len(found.value))
    await replay_parked(book, cut, raw=True)
    assert await payloads(book, "o-1") == ["a long text"]
    await write_garbage(book, TOPIC, "o-1", value=b'"another text"')
    [found] = await parked(book)
    cut = msgspec.structs.replace(found, value=found.value[:6], whole_bytes=len(found.value))
    await book.log.truncate(TOPIC, cut.partition, before=cut.position.offset + 1)
    done = await replay_parked(book, cut, raw=True)
    assert done.error is not None
    assert "the log no longer has it" in done.error
    assert offset < cut.position.offset
    assert await payloads(book, "o-1") == ["a long text"]
    assert len(await parked(book)) == 1


async def test_an_interrupted_replay_is_not_applied_twice_although_its_append_id_was_evicted(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal remembers only its most recent appends."""

    async def dying(parked: object) -> None:
        raise RuntimeError("died here")

    await write_garbage(book, TOPIC, "o-1", value=b"7")
    [found] = await parked(book)
    with monkeypatch.context() as patch:
        patch.setattr(book.store, "unpark", dying)
        with pytest.raises(RuntimeError, match="died here"):
            await replay_parked(book, found, raw=True)
    for n in range(40):
        await book.journal(TOPIC).append("o-1", [Event(n)])
    done = await replay_parked(book, found, raw=True)
    assert done.error is not None
    assert await payloads(book, "o-1") == [7, *range(40)]

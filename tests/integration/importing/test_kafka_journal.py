"""`tidebook import kafka-journal` on tables as kafka-journal writes them, in a real Cassandra."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import tidebook
from tests.integration.importing.command import run_command
from tests.integration.importing.source_tables import KafkaJournal
from tidebook.core.errors import Unavailable
from tidebook.importing.journal_import import ImportState, ImportSummary, JournalImport, JournalResult
from tidebook.importing.kafka_journal_tables import KafkaJournalTables
from tidebook.journal.journal import Journal
from tidebook.wiring.book import Book

pytestmark = pytest.mark.cassandra
TODAY = datetime.now(UTC).date()

Copy = Callable[..., Awaitable[tuple[ImportSummary, list[JournalResult]]]]


@pytest.fixture
def copy(source: KafkaJournal) -> Copy:
    async def run(book: Book, **options: Any) -> tuple[ImportSummary, list[JournalResult]]:
        results: list[JournalResult] = []
        tables = await KafkaJournalTables.find(source.session, source.keyspace)
        summary = await JournalImport(tables, book, today=TODAY, **options).run(results.append)
        return summary, results

    return run


async def test_payloads_tags_metadata_and_numbers_are_copied(source: KafkaJournal, copy: Copy, tmp_path: Path) -> None:
    metadata = json.dumps({"header": {"data": {"user": "u-1"}}, "payload": {}})
    await source.event("orders", "o-1", 1, '{"total": 3}', kind="json", tags={"paid", "new"}, metadata=metadata)
    await source.event("orders", "o-1", 2, "text", offset=1, origin="host-1", version="1.0", headers={"a": "b"})
    await source.event("orders", "o-1", 3, b"\x00\xff", kind="binary", offset=1)
    await source.event("orders", "o-1", 4, None, kind=None, offset=2)
    await source.head("orders", "o-1", 4)
    async with tidebook.open(tmp_path / "book") as book:
        summary, [result] = await copy(book)
        events = [event async for event in book.journal("orders").read("o-1")]
    assert (result.state, result.events, result.appended) == (ImportState.IMPORTED, 4, 4)
    assert (summary.journals, summary.imported, summary.appended) == (1, 1, 4)
    assert [(event.seq_nr, event.payload) for event in events] == [
        (1, {"total": 3}),
        (2, "text"),
        (3, b"\x00\xff"),
        (4, None),
    ]
    assert events[0].tags == {"paid", "new"}
    assert events[0].metadata == {
        "kafka_journal": {
            "partition": 0,
            "offset": 0,
            "timestamp": "2023-11-14T22:13:20.001+00:00",
            "metadata": {"header": {"data": {"user": "u-1"}}, "payload": {}},
        }
    }
    assert events[1].metadata is not None
    known = events[1].metadata["kafka_journal"]
    assert (known["origin"], known["version"], known["headers"]) == ("host-1", "1.0", {"a": "b"})


@pytest.mark.parametrize(
    ("numbers", "delete_to", "left"),
    [
        ([1, 2, 3], None, [1, 2, 3]),
        ([1, 2, 3, 11], None, [1, 2, 3, 11]),  # the gap ends a segment, where kafka-journal's reader stops
        ([3, 4, 5, 6, 7], 2, [3, 4, 5, 6, 7]),
        ([1, 2, 3], 2, [3]),  # a delete whose rows are not removed yet
        ([], 5, []),
        ([1, 2], 9, []),  # deleted past the last number
    ],
)
async def test_deletes_and_gaps_give_the_same_journal(
    source: KafkaJournal, copy: Copy, tmp_path: Path, numbers: list[int], delete_to: int | None, left: list[int]
) -> None:
    await source.journal("orders", "o-1", numbers, delete_to=delete_to)
    async with tidebook.open(tmp_path / "book") as book:
        _, [result] = await copy(book)
        assert result.state is ImportState.IMPORTED
        orders = book.journal("orders")
        head = await orders.head("o-1")
        assert [event.seq_nr async for event in orders.read("o-1")] == left
        assert head is not None
        assert (head.seq_nr, head.delete_to) == (max([*numbers, delete_to or 0]), delete_to or 0)
        done = await orders.append("o-1", [tidebook.Event("next")])
        assert done.first == head.seq_nr + 1
        _, [result] = await copy(book)  # the source has grown since
        assert (result.state, result.appended) == (ImportState.COMPLETE, 0)


async def test_an_interrupted_import_continues_and_copies_nothing_twice(
    source: KafkaJournal, copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for id in ("a", "b", "c"):
        await source.journal("orders", id, [1, 2, 3, 5, 6, 8, 9])
    appends = 0
    original = Journal.append

    async def fail_at_the_fifth(self: Journal, *args: Any, **options: Any) -> Any:
        nonlocal appends
        appends += 1
        if appends == 5:
            await original(self, *args, **options)
            raise Unavailable("the process ends here")
        return await original(self, *args, **options)

    async with tidebook.open(tmp_path / "book") as book:
        with monkeypatch.context() as patching:
            patching.setattr(Journal, "append", fail_at_the_fifth)
            patching.setattr("tidebook.importing.journal_import.ATTEMPTS_MAX", 1)
            with pytest.raises(Unavailable):
                await copy(book, at_once=1)
    async with tidebook.open(tmp_path / "book") as book:
        summary, _ = await copy(book)
        assert (summary.imported + summary.complete, summary.refused) == (3, 0)
        for id in ("a", "b", "c"):
            numbers = [event.seq_nr async for event in book.journal("orders").read(id)]
            assert numbers == [1, 2, 3, 5, 6, 8, 9]
        summary, _ = await copy(book)
        assert (summary.complete, summary.appended) == (3, 0)


async def test_two_concurrent_imports_write_each_event_once(source: KafkaJournal, copy: Copy, tmp_path: Path) -> None:
    for number in range(6):
        await source.journal("orders", f"o-{number}", [1, 2, 4, 5])
    async with tidebook.open(tmp_path / "book") as one, tidebook.open(tmp_path / "book") as two:
        (first, _), (second, _) = await asyncio.gather(copy(one), copy(two))
        assert (first.refused, second.refused) == (0, 0)
        for number in range(6):
            assert [event.seq_nr async for event in one.journal("orders").read(f"o-{number}")] == [1, 2, 4, 5]


async def test_a_dry_run_checks_and_creates_nothing(source: KafkaJournal, copy: Copy, tmp_path: Path) -> None:
    await source.journal("orders", "o-1", [1, 2])
    await source.event("orders", "o-2", 1, "{", kind="json")
    await source.head("orders", "o-2", 1)
    async with tidebook.open(tmp_path / "book") as book:
        summary, _ = await copy(book, dry_run=True)
    assert (summary.imported, summary.appended, summary.refused) == (1, 2, 1)
    assert not (tmp_path / "book").exists()


async def test_journals_that_cannot_be_copied_are_refused_with_the_reason(
    source: KafkaJournal, copy: Copy, tmp_path: Path
) -> None:
    await source.journal("orders", "fine", [1])
    await source.journal("orders", "twice", [1, 2])
    await source.event("orders", "twice", 2, "other", at_ms=1_600_000_000_000)
    await source.event("orders", "ahead", 1, "x")
    await source.event("orders", "ahead", 2, "y")
    await source.head("orders", "ahead", 1)
    await source.event("orders", "short", 1, "x")
    await source.head("orders", "short", 3)
    await source.event("orders", "unknown", 1, "x", kind="avro")
    await source.head("orders", "unknown", 1)
    await source.journal("a topic with spaces", "t", [1])
    async with tidebook.open(tmp_path / "book") as book:
        await book.journal("orders").append("mine", [tidebook.Event("not from there")])
        await source.journal("orders", "mine", [1])
        summary, results = await copy(book)
    reasons = {result.id: result.reason or "" for result in results if result.state is ImportState.REFUSED}
    assert (summary.imported, summary.refused) == (1, 6)
    assert "number 2 was written twice" in reasons["twice"]
    assert "let kafka-journal's replicator finish" in reasons["ahead"]
    assert "the head is at 3 and the last event is 1" in reasons["short"]
    assert "unknown payload type 'avro'" in reasons["unknown"]
    assert "topic" in reasons["t"]
    assert "was not imported" in reasons["mine"]


async def test_rows_that_a_purge_left_are_not_copied(source: KafkaJournal, copy: Copy, tmp_path: Path) -> None:
    old, new = uuid.uuid4(), uuid.uuid4()
    await source.event("orders", "o-1", 1, "new", record_id=new)
    await source.event("orders", "o-1", 2, "old", record_id=old)
    await source.head("orders", "o-1", 1, record_id=new)
    async with tidebook.open(tmp_path / "book") as book:
        _, [result] = await copy(book)
        assert result.state is ImportState.IMPORTED
        assert [event.payload async for event in book.journal("orders").read("o-1")] == ["new"]


async def test_expired_journals_are_skipped_and_others_keep_their_expiry(
    source: KafkaJournal, copy: Copy, tmp_path: Path
) -> None:
    day = timedelta(days=1)
    await source.journal("orders", "gone", [1], expire_after=day, expire_on=TODAY)
    await source.journal("orders", "later", [1], expire_after=30 * day, expire_on=TODAY + 30 * day)
    async with tidebook.open(tmp_path / "book") as book:
        summary, _ = await copy(book)
        head = await book.journal("orders").head("later")
        assert await book.journal("orders").head("gone") is None
    assert (summary.expired, summary.imported) == (1, 1)
    assert head is not None
    assert head.expire_after_ms == 30 * day // timedelta(milliseconds=1)


async def test_many_events_are_joined_into_few_records(source: KafkaJournal, copy: Copy, tmp_path: Path) -> None:
    await source.journal("orders", "o-1", range(1, 451), segment_size=100)
    async with tidebook.open(tmp_path / "book") as book:
        _, [result] = await copy(book)
        assert result.appended == 450
        events = [event async for event in book.journal("orders").read("o-1")]
    assert [event.payload for event in events] == [f"o-1-{number}" for number in range(1, 451)]
    assert len({event.offset for event in events}) == 3


async def test_tables_of_an_older_version_without_some_columns_are_copied(
    source: KafkaJournal, copy: Copy, tmp_path: Path
) -> None:
    for column in ("meta_record_id", "version", "headers"):
        await source.session.define(f"ALTER TABLE {source.keyspace}.journal DROP {column}")
    await source.session.define(f"ALTER TABLE {source.keyspace}.metajournal DROP record_id")
    await source.journal("orders", "o-1", [1, 2])
    async with tidebook.open(tmp_path / "book") as book:
        summary, _ = await copy(book)
    assert summary.appended == 2


async def test_the_command_prints_pointers_refusals_and_totals(
    source: KafkaJournal, cassandra_address: str, tmp_path: Path
) -> None:
    await source.journal("orders", "o-1", [1, 2])
    await source.journal("other", "x", [1])
    await source.event("orders", "o-2", 1, "{", kind="json")
    await source.head("orders", "o-2", 1)
    await source.insert("pointer2", {"topic": "orders", "partition": 0, "offset": 12})
    line = f"import kafka-journal --cassandra {cassandra_address} --keyspace {source.keyspace} --topic orders"
    done = await asyncio.to_thread(run_command, *line.split(), "--book", str(tmp_path / "book"))
    assert done.code == 1, done.err
    pointer, refused, totals = map(json.loads, done.out.splitlines())
    assert pointer == {"topic": "orders", "partition": 0, "offset": 12}
    assert (refused["id"], refused["state"]) == ("o-2", "refused")
    assert (totals["journals"], totals["imported"], totals["appended"], totals["refused"]) == (2, 1, 2, 1)


@pytest.mark.parametrize(
    ("keyspace", "code", "reason"),
    [("nothing_here", 4, "no table metajournal"), ("system", 4, "no table metajournal")],
)
async def test_a_keyspace_without_the_tables_is_not_found(
    cassandra_address: str, tmp_path: Path, keyspace: str, code: int, reason: str
) -> None:
    line = f"import kafka-journal --cassandra {cassandra_address} --keyspace {keyspace}"
    done = await asyncio.to_thread(run_command, *line.split(), "--book", str(tmp_path / "book"))
    assert (done.code, done.out) == (code, "")
    assert reason in done.err
    assert not (tmp_path / "book").exists()


async def test_the_commands_of_the_how_to_page_run(
    source: KafkaJournal, cassandra_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await source.journal("orders", "o-1", [1, 2])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tidebook.toml").write_text("")
    page = Path(__file__).parents[3] / "docs" / "howto" / "moving-from-kafka-journal.md"
    lines = [line.split() for line in page.read_text().splitlines() if line.strip().startswith("tidebook import")]
    replaced = {"127.0.0.1:9042": cassandra_address, "journal": source.keyspace}
    appended = []
    for words in lines:
        done = await asyncio.to_thread(run_command, *(replaced.get(word, word) for word in words[1:]))
        assert done.code == 0, done.err
        appended.append(json.loads(done.out.splitlines()[-1])["appended"])
    assert appended == [2, 2]

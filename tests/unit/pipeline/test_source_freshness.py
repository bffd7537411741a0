"""`format("tidebook")` with unreplicated events: the rows of a table are those of plain reads, without Spark."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyspark")

import tidebook
from tests.pipeline.workloads import lose_log, newer_record, replicate_here, write_garbage
from tidebook.core.action import Mark
from tidebook.core.errors import Fenced, InvalidInput, LogLost, NotFound, UnknownVersion
from tidebook.core.event import Event
from tidebook.core.key import partition_of
from tidebook.core.record import encode_record
from tidebook.log.port import Outgoing, read_all
from tidebook.pipeline.source import tail as tail_module
from tidebook.pipeline.source.format import TidebookSource
from tidebook.pipeline.source.journals import JournalsReader
from tidebook.pipeline.source.tail import RECORDS_PER_SHARE, TailRange, assign_shares
from tidebook.pipeline.worker import SparkWorker
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.testing.replicating import replicate_slice
from tidebook.wiring.book import Book
from tidebook.wiring.settings import read_settings, settings_to_json

IDS = ("a", "b", "c")
Row = tuple[str, int, int, int, Any]


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    portal = BlockingPortal()
    yield portal
    portal.close()


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory, portal: BlockingPortal) -> Iterator[Book]:
    """One book for all examples, each of which has its own topic."""
    toml = tmp_path_factory.mktemp("freshness") / "tidebook.toml"
    toml.write_text("[journal]\npartitions = 2\nsegment_size = 10\n")
    book = tidebook.open(toml)
    portal.run(book.__aenter__())
    yield book
    portal.run(book.__aexit__(None, None, None))


@pytest.fixture
def topic() -> str:
    return f"t{uuid.uuid4().hex[:12]}"


# Table rows and plain reads


def reader(book: Book, topic: str, **options: str) -> JournalsReader:
    where = {"book": str(book.settings.folder), "topic": topic, "splits": "2"}
    return JournalsReader({**where, **options})


def rows_of(reader: JournalsReader, parts: Sequence[Any] | None = None) -> list[Row]:
    found: list[Row] = []
    for part in reader.partitions() if parts is None else parts:
        for batch in reader.read(part):
            columns = (batch.column(name).to_pylist() for name in ("id", "seq_nr", "partition", "offset", "payload"))
            found += zip(*columns, strict=True)
    return sorted(found)


def table(book: Book, topic: str, **options: str) -> list[Row]:
    return rows_of(reader(book, topic, **options))


async def plain_reads(book: Book, topic: str) -> list[Row]:
    """Return all events as journals return them."""
    found: list[Row] = []
    for id in IDS:
        async for event in book.journal(topic).read(id):
            payload = json.dumps(event.payload, separators=(",", ":")).encode()
            found.append((id, event.seq_nr, event.partition, event.offset, payload))
    return sorted(found)


# Histories to compare

KINDS = st.sampled_from(["append", "append", "append", "three", "at", "expected", "delete", "purge", "garbage", "mark"])
STEPS = st.lists(st.tuples(st.sampled_from(IDS), KINDS, st.integers(1, 25)), max_size=25)


async def run_steps(book: Book, topic: str, steps: Sequence[tuple[str, str, int]], *, deletes: bool = True) -> None:
    journal = book.journal(topic)
    for id, kind, number in steps:
        try:
            match kind:
                case "append" | "three":
                    await journal.append(id, [Event({"n": number, "i": i}) for i in range(3 if kind == "three" else 1)])
                case "at":
                    await journal.append(id, [Event({"at": number})], at=number)
                case "expected":
                    await journal.append(id, [Event({"expected": number})], expected=number)
                case "delete" if deletes:
                    await journal.delete(id, to=number)
                case "purge" if deletes:
                    await journal.purge(id)
                case "garbage":
                    await write_garbage(book, topic, id)
                case "mark":
                    mark = encode_record(Mark(1), limit_bytes=1000)
                    await book.log.append(Outgoing(topic, number % 2, None, mark))
        except tidebook.Conflict:
            pass  # the record is in the log, and has no effect


async def replicate_some(book: Book, topic: str, share: float) -> None:
    """Replicate this share of each partition's unreplicated records."""
    config = await book.store.topic_config(topic)
    assert config is not None
    for number in range(config.partitions):
        pointer = await book.store.pointer(topic, number)
        start = 0 if pointer is None else pointer.position.offset + 1
        stop = start + round(share * (await book.log.end(topic, number) - start))
        records = await read_all(book.log, topic, number, start=start, stop=stop)
        await replicate_slice(book.store, topic, number, records, config, start=start, stop=stop)


SHARES = st.sampled_from([0.0, 0.3, 0.7, 1.0])


@settings(max_examples=60, deadline=None)
@given(before=STEPS, replicated=SHARES, after=STEPS, by_id=st.booleans())
def test_a_table_has_the_rows_of_plain_reads_however_much_is_replicated(
    book: Book, portal: BlockingPortal, before: Any, replicated: float, after: Any, by_id: bool
) -> None:
    topic = f"t{uuid.uuid4().hex[:12]}"
    portal.run(book.journal(topic).create())
    portal.run(run_steps(book, topic, before))
    portal.run(replicate_some(book, topic, replicated))
    portal.run(run_steps(book, topic, after))
    options = {"id": ",".join(IDS)} if by_id else {}
    assert table(book, topic, **options) == portal.run(plain_reads(book, topic))


@settings(max_examples=40, deadline=None)
@given(before=STEPS, first=SHARES, tail=STEPS, second=SHARES, later=STEPS, third=SHARES, deletes=st.booleans())
def test_a_planned_table_does_not_change_while_replication_moves(
    book: Book,
    portal: BlockingPortal,
    before: Any,
    first: float,
    tail: Any,
    second: float,
    later: Any,
    third: float,
    deletes: bool,
) -> None:
    """The table is as of its planning; only events that are deleted during the read may be missing."""
    topic = f"t{uuid.uuid4().hex[:12]}"
    portal.run(book.journal(topic).create())
    portal.run(run_steps(book, topic, before))
    portal.run(replicate_some(book, topic, first))
    portal.run(run_steps(book, topic, tail))
    planned = reader(book, topic)
    parts, expected = planned.partitions(), portal.run(plain_reads(book, topic))
    portal.run(replicate_some(book, topic, second))
    portal.run(run_steps(book, topic, later, deletes=deletes))
    half = len(parts) // 2
    found = rows_of(planned, parts[:half])
    portal.run(replicate_some(book, topic, third))
    found = sorted(found + rows_of(planned, parts[half:]))
    assert len(set(found)) == len(found)
    assert set(found) <= set(expected)
    kept = set(portal.run(plain_reads(book, topic)))
    assert set(expected) & kept <= set(found)
    if not deletes:
        assert found == expected


# The tail


def append(book: Book, portal: BlockingPortal, topic: str, id: str, *payloads: Any, tags: Sequence[str] = ()) -> None:
    portal.run(book.journal(topic).append(id, [Event(payload, tags=tags) for payload in payloads]))


def test_more_appends_than_a_head_remembers_are_replicated_while_a_table_is_read(
    book: Book, portal: BlockingPortal, topic: str
) -> None:
    append(book, portal, topic, "a", 0)
    portal.run(replicate_here(book, book.store, topic))
    for n in range(1, 60):
        append(book, portal, topic, "a", n)
    planned = reader(book, topic)
    parts = planned.partitions()
    portal.run(replicate_some(book, topic, 0.8))
    assert [row[1] for row in rows_of(planned, parts)] == list(range(1, 61))


def test_the_tail_is_read_in_two_passes_if_it_does_not_fit_in_memory(
    book: Book, portal: BlockingPortal, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_module, "KEPT_BYTES_MAX", 100)
    monkeypatch.setattr(tail_module, "PAGE_RECORDS", 3)
    for n in range(20):
        append(book, portal, topic, "ab"[n % 2], n)
    portal.run(book.journal(topic).delete("a", to=4))
    assert table(book, topic) == portal.run(plain_reads(book, topic))


def test_the_shares_of_a_tail_are_bounded_and_cover_each_journal_once() -> None:
    ranges = [TailRange(0, 0, 10, 0), TailRange(1, 5, 20, 0), TailRange(2, 0, 3 * RECORDS_PER_SHARE, 0)]
    tasks = assign_shares(ranges)
    assert [[(each.range.partition, each.number) for each in task] for task in tasks] == [
        [(0, 0), (1, 0)], [(2, 0)], [(2, 1)], [(2, 2)],
    ]  # fmt: skip
    large = [task[0] for task in tasks[1:]]
    takers = [[share.takes(f"id-{n}") for share in large].count(True) for n in range(100)]
    assert set(takers) == {1}
    assert assign_shares([]) == []


@pytest.mark.parametrize("partitions", [1, 4, 8, 12])
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_the_journals_of_a_partition_are_spread_over_the_shares_of_its_tail(partitions: int, count: int) -> None:
    ids = [id for id in (f"o-{n}" for n in range(1000 * partitions)) if partition_of(id, partitions) == 0]
    tasks = assign_shares([TailRange(0, 0, count * RECORDS_PER_SHARE, 0)])
    sizes = [sum(map(share.takes, ids)) for (share,) in tasks]
    assert len(sizes) == count
    assert min(sizes) > len(ids) / count / 2


def test_a_tag_selects_from_the_tail_too(book: Book, portal: BlockingPortal, topic: str) -> None:
    append(book, portal, topic, "a", 1, tags=["paid"])
    append(book, portal, topic, "a", 2)
    portal.run(replicate_here(book, book.store, topic))
    append(book, portal, topic, "a", 3, tags=["paid"])
    append(book, portal, topic, "b", 4)
    assert [row[:2] for row in table(book, topic, tag="paid")] == [("a", 1), ("a", 3)]
    assert [row[:2] for row in table(book, topic, minSeqNr="3")] == [("a", 3)]
    portal.run(book.journal(topic).delete("a", to=1))
    assert [row[:2] for row in table(book, topic, tag="paid")] == [("a", 3)]


def test_a_table_is_read_across_an_adopt_with_an_unreplicated_tail(
    book: Book, portal: BlockingPortal, topic: str
) -> None:
    append(book, portal, topic, "a", 1, 2)
    portal.run(replicate_here(book, book.store, topic))
    portal.run(lose_log(book, topic))
    with pytest.raises(tidebook.Corrupt, match=r"another incarnation .* or read what is replicated"):
        table(book, topic)
    assert [row[1] for row in table(book, topic, freshness="store")] == [1, 2]
    portal.run(book.journal(topic).adopt())
    append(book, portal, topic, "a", 3)
    assert [row[1] for row in table(book, topic)] == [1, 2, 3]
    _, _, home, offset, _ = portal.run(plain_reads(book, topic))[0]
    old = {"epoch": 1, str(home): offset, str(1 - home): -1}
    assert [row[1] for row in table(book, topic, asOfOffsets=json.dumps({topic: old}))] == [1, 2]
    assert table(book, topic, asOfOffsets=json.dumps({topic: {**old, str(home): offset - 1}})) == []
    with pytest.raises(InvalidInput, match="of epoch 2, not up to offset 0 of epoch 3"):
        table(book, topic, asOfOffsets=json.dumps({topic: {"epoch": 3, "0": 0, "1": 0}}))


@pytest.mark.parametrize("freshness", ["log", "store"])
def test_a_topic_that_is_replicated_and_adopted_while_a_table_is_planned_is_whole(
    book: Book, portal: BlockingPortal, topic: str, monkeypatch: pytest.MonkeyPatch, freshness: str
) -> None:
    append(book, portal, topic, "a", 1)
    portal.run(replicate_here(book, book.store, topic))
    append(book, portal, topic, "a", 2)
    planned = reader(book, topic, freshness=freshness)
    worker = SparkWorker.of(settings_to_json(read_settings(str(book.settings.folder))))
    store: Any = worker.run(worker.store())
    read_config = store.topic_config

    async def adopted_before(topic: str) -> Any:
        monkeypatch.undo()  # the pointers are read by now
        portal.run(replicate_here(book, book.store, topic))
        portal.run(lose_log(book, topic))
        portal.run(book.journal(topic).adopt())
        return await read_config(topic)

    monkeypatch.setattr(store, "topic_config", adopted_before)
    assert [row[1] for row in rows_of(planned)] == [1, 2]


@pytest.mark.parametrize("freshness", ["log", "store"])
def test_a_topic_that_is_deleted_and_created_again_while_a_table_is_planned_is_an_error(
    book: Book, portal: BlockingPortal, topic: str, monkeypatch: pytest.MonkeyPatch, freshness: str
) -> None:
    """The pointers of the deleted topic would hide unreplicated events of the new one."""
    append(book, portal, topic, "a", 1, 2, 3)
    portal.run(replicate_here(book, book.store, topic))
    planned = reader(book, topic, freshness=freshness)
    worker = SparkWorker.of(settings_to_json(read_settings(str(book.settings.folder))))
    store: Any = worker.run(worker.store())
    read_pointers = store.pointers

    async def recreated_after(topic: str) -> Any:
        monkeypatch.undo()
        pointers = await read_pointers(topic)
        portal.run(book.delete_topic(topic))
        append(book, portal, topic, "a", 4)
        return pointers

    monkeypatch.setattr(store, "pointers", recreated_after)
    with pytest.raises(NotFound, match="it was deleted while it was read: load the table again"):
        planned.partitions()


# A table is as of its positions, or it raises


def test_a_log_that_lost_unreplicated_records_is_an_error(book: Book, portal: BlockingPortal, topic: str) -> None:
    for n in range(4):
        append(book, portal, topic, "a", n)
    portal.run(book.log.truncate(topic, partition_of("a", 2), before=2))
    with pytest.raises(LogLost, match="before they were replicated: restore the log from a backup, or read what is"):
        table(book, topic)


def test_retention_that_overtakes_a_planned_read_is_an_error(book: Book, portal: BlockingPortal, topic: str) -> None:
    for n in range(4):
        append(book, portal, topic, "a", n)
    planned = reader(book, topic)
    parts = planned.partitions()
    portal.run(replicate_here(book, book.store, topic))
    portal.run(book.log.truncate(topic, partition_of("a", 2), before=3))
    with pytest.raises(LogLost, match="after this read was planned: load the table again"):
        rows_of(planned, parts)
    assert [row[1] for row in table(book, topic)] == [1, 2, 3, 4]


def test_a_log_that_is_replaced_after_the_planning_is_an_error(book: Book, portal: BlockingPortal, topic: str) -> None:
    append(book, portal, topic, "a", 1)
    planned = reader(book, topic)
    parts = planned.partitions()
    portal.run(lose_log(book, topic))
    with pytest.raises(Fenced, match="its log was replaced after this read was planned: load the table again"):
        rows_of(planned, parts)


def test_a_record_of_a_newer_version_in_the_tail_is_an_error(book: Book, portal: BlockingPortal, topic: str) -> None:
    append(book, portal, topic, "a", 1)
    portal.run(replicate_here(book, book.store, topic))
    portal.run(write_garbage(book, topic, "a", value=newer_record()))
    with pytest.raises(UnknownVersion):
        table(book, topic)
    assert [row[1] for row in table(book, topic, freshness="store")] == [1]


def test_a_book_without_its_log_is_an_error_unless_the_store_suffices(tmp_path: Path, portal: BlockingPortal) -> None:
    lone = tidebook.open(tmp_path / "lone")
    portal.run(lone.__aenter__())
    append(lone, portal, "orders", "a", 1)
    portal.run(replicate_here(lone, lone.store, "orders"))
    portal.run(lone.__aexit__(None, None, None))
    for file in (tmp_path / "lone").glob("log.db*"):
        file.unlink()
    where = {"book": str(tmp_path / "lone"), "topic": "orders"}
    with pytest.raises(NotFound, match=r"it has no log\.db"):
        JournalsReader(where).partitions()
    assert not (tmp_path / "lone" / "log.db").exists()
    assert [row[1] for row in rows_of(JournalsReader({**where, "freshness": "store"}))] == [1]


# As of a position or a time


def test_as_of_offsets_ends_the_rows_and_keeps_later_deletes(book: Book, portal: BlockingPortal, topic: str) -> None:
    for n in range(4):
        append(book, portal, topic, "a", n)
    reads = portal.run(plain_reads(book, topic))
    home, offsets = reads[0][2], [row[3] for row in reads]
    portal.run(replicate_some(book, topic, 0.5))
    pointer = portal.run(book.store.pointer(topic, home))
    assert pointer is not None
    replicated = pointer.position.offset
    assert offsets[0] <= replicated < offsets[3]

    def as_of(offset: int, **options: str) -> list[int]:
        given = json.dumps({topic: {str(home): offset, str(1 - home): -1}})
        return [row[1] for row in table(book, topic, asOfOffsets=given, **options)]

    assert as_of(offsets[0] - 1) == []
    assert [as_of(offset) for offset in offsets] == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    assert as_of(offsets[0], freshness="store") == [1]
    portal.run(book.journal(topic).delete("a", to=1))
    assert as_of(offsets[2]) == [2, 3]
    end = offsets[3] + 1  # the delete
    message = f"partition {home} is written up to offset {end} of epoch 1, not up to offset {end + 1} of epoch 1"
    with pytest.raises(InvalidInput, match=message):
        as_of(end + 1)
    with pytest.raises(InvalidInput, match=f"partition {home} is replicated up to offset {replicated} of epoch 1"):
        as_of(replicated + 1, freshness="store")
    with pytest.raises(InvalidInput, match=f"asOfOffsets of topic {topic}: partition 0 is missing"):
        table(book, topic, asOfOffsets=json.dumps({topic: {"1": 0}}))
    alone = json.dumps({topic: {str(home): offsets[1]}})
    assert [row[1] for row in table(book, topic, id="a", asOfOffsets=alone)] == [2]


def test_as_of_a_time_is_as_of_the_logs_time(book: Book, portal: BlockingPortal, topic: str) -> None:
    append(book, portal, topic, "a", 1)
    portal.run(replicate_here(book, book.store, topic))
    append(book, portal, topic, "a", 2)

    async def times() -> list[str]:
        return [event.timestamp.isoformat() async for event in book.journal(topic).read("a")]

    first, second = portal.run(times())
    assert [row[1] for row in table(book, topic, asOfTimestamp=second)] == [1, 2]
    assert [row[1] for row in table(book, topic, asOfTimestamp=first)] in (
        [1],
        [1, 2],
    )  # both events within a millisecond
    assert table(book, topic, asOfTimestamp="2001-01-01T00:00:00Z") == []
    with pytest.raises(InvalidInput, match="the option asOfTimestamp is in the future: 2999"):
        table(book, topic, asOfTimestamp="2999-01-01T00:00:00Z")


# Columns


def test_the_column_type_has_the_types_of_events_replicated_or_not(
    book: Book, portal: BlockingPortal, topic: str
) -> None:
    def types(**options: str) -> list[str | None]:
        read = reader(book, topic, splits="1", **options)
        batches = [batch for part in read.partitions() for batch in read.read(part)]
        return [name for batch in batches for name in batch.column("type").to_pylist()]

    portal.run(book.journal(topic).append("a", [Event(1, type="opened"), Event(2)]))
    portal.run(replicate_here(book, book.store, topic))
    portal.run(book.journal(topic).append("a", [Event(3, type="closed", version=2, tags={"paid"})]))
    assert types() == ["opened", None, "closed"]
    assert types(freshness="store") == ["opened", None]


@pytest.mark.parametrize("replicated", [True, False])
def test_payloads_are_returned_as_bytes_or_as_json_text(
    book: Book, portal: BlockingPortal, topic: str, replicated: bool
) -> None:
    append(book, portal, topic, "a", {"total": 3}, 'say "hi"', b"\xff\x00", None)
    if replicated:
        portal.run(replicate_here(book, book.store, topic))
    assert [row[4] for row in table(book, topic)] == [b'{"total":3}', b'say "hi"', b"\xff\x00", b"null"]
    assert [row[4] for row in table(book, topic, payload="json")] == ['{"total":3}', '"say \\"hi\\""', None, "null"]
    variants = [row[4] for row in table(book, topic, payload="variant")]
    assert variants[2] is None
    assert [each["metadata"][:1] for each in variants if each is not None] == [b"\x01"] * 3


@pytest.mark.parametrize(("form", "type_"), [("binary", "binary"), ("json", "string"), ("VARIANT", "variant")])
def test_the_schema_names_the_form_of_the_payload(book: Book, form: str, type_: str) -> None:
    source = TidebookSource({"book": str(book.settings.folder), "payload": form})
    assert f" type string, payload {type_}, payload_type string" in str(source.schema())

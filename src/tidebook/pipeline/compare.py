"""Comparing journals with the log, in Spark's workers: all rows of a journal come together, sorted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec
import pyarrow as pa

from tidebook.core.errors import Fenced, InvalidInput
from tidebook.core.event import event_tags
from tidebook.core.head import decode_head, encode_head
from tidebook.core.key import Key, journal_id, partition_of
from tidebook.core.position import Position
from tidebook.core.record import read_record
from tidebook.core.replication import EventRow, Placed, Pointer, TagPlace, TagRow, advance_time
from tidebook.core.topic import TopicFacts
from tidebook.log.port import Record
from tidebook.pipeline.records import runs_of
from tidebook.pipeline.ticking import clears_tags
from tidebook.pipeline.transforms.shelf import Difference, Folded, Shelf, differences, fold_journal, mend_of
from tidebook.pipeline.worker import Worker
from tidebook.store.port import Split, StoreWriter

HEAD, RECORD, EVENT, TAG = range(4)
ROWS = "topic string, key binary, kind int, n long, partition int, timestamp_ms long, time_ms long, data binary"
_ROWS_ARROW = pa.schema(
    [
        ("topic", pa.string()),
        ("key", pa.binary()),
        ("kind", pa.int32()),
        ("n", pa.int64()),
        ("partition", pa.int32()),
        ("timestamp_ms", pa.int64()),
        ("time_ms", pa.int64()),
        ("data", pa.binary()),
    ]
)
RESULT = (
    "what string, topic string, id string, partition int, seq_nr long, expected string, found string, mended boolean, "
    "journals long, events long"
)
_RESULT_ARROW = pa.schema(
    [
        ("what", pa.string()),
        ("topic", pa.string()),
        ("id", pa.string()),
        ("partition", pa.int32()),
        ("seq_nr", pa.int64()),
        ("expected", pa.string()),
        ("found", pa.string()),
        ("mended", pa.bool_()),
        ("journals", pa.int64()),
        ("events", pa.int64()),
    ]
)
#: The row that each task ends with: how much it compared.
CHECKED = "checked"
RESULTS_PER_BATCH = 1000
#: How often a journal is looked at again that moves while it is compared.
LOOKS_MAX = 10
PAGE = 5_000

_encode = msgspec.msgpack.Encoder().encode
_decode_event = msgspec.msgpack.Decoder(EventRow).decode
_decode_tag = msgspec.msgpack.Decoder(TagRow).decode

Batches = Iterable[pa.RecordBatch]
Task = Callable[[Batches], Iterator[pa.RecordBatch]]


class Bounds(msgspec.Struct, frozen=True):
    """What is compared of one partition: the log's records start ≤ offset ≤ pointer."""

    start: int
    pointer: Pointer


class Comparison(msgspec.Struct, frozen=True):
    """What every worker must know."""

    settings: str
    facts: dict[str, TopicFacts]
    #: By topic, then by the partition's number.
    bounds: dict[str, dict[int, Bounds]]
    #: 0: nothing is mended.
    rev: int = 0


# ---- the three sources of rows


def record_rows(batches: Batches) -> Iterator[pa.RecordBatch]:
    """Records with the log's time, which runs through a partition; those of no journal have told theirs then."""
    times: dict[tuple[str, int], int] = {}
    for batch in batches:
        for topic, partition, records in runs_of(batch):
            time_ms = times.get((topic, partition), 0)
            rows: list[tuple[Any, ...]] = []
            for record in records:
                # Only a mark carries a time of its own, and marks have no key.
                action = read_record(record.value, limit_bytes=2**31) if record.key is None else None
                time_ms = max(time_ms, record.timestamp_ms)
                if action is not None:
                    time_ms = advance_time(time_ms, record.timestamp_ms, action)
                if record.key is not None:
                    at = (RECORD, record.offset, partition, record.timestamp_ms, time_ms)
                    rows.append((topic, record.key, *at, record.value))
            times[topic, partition] = time_ms
            if rows:
                yield _to_arrow(rows)


def store_rows(settings: str) -> Task:
    """A function for `mapInArrow` over (topic, low, high): the heads and events of parts of the store."""

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        worker = Worker.of(settings)
        for batch in batches:
            for row in batch.to_pylist():
                split = Split(row["low"], row["high"])
                for page in worker.iterate(_stored(worker, row["topic"], split)):
                    if page:
                        yield _to_arrow(page)

    return run


async def _stored(worker: Worker, topic: str, split: Split) -> AsyncIterator[list[tuple[Any, ...]]]:
    store = await worker.store()
    async for heads in store.heads_in(topic, split):
        yield [(topic, id.encode(), HEAD, 0, 0, 0, 0, encode_head(head)) for id, head in heads]
    async for events in store.events_in(topic, split):
        yield [(topic, id.encode(), EVENT, row.seq_nr, 0, 0, 0, _encode(row)) for id, row in events]


def tag_rows(settings: str, topics: Sequence[str]) -> Task:
    """A function for `mapInArrow` over (tag): the rows of whole tags, those of these topics."""
    wanted = frozenset(topics)

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        worker = Worker.of(settings)
        for batch in batches:
            for tag in batch.column("tag").to_pylist():
                for page in worker.iterate(_tagged(worker, tag, wanted)):
                    if page:
                        yield _to_arrow(page)

    return run


async def _tagged(worker: Worker, tag: str, wanted: frozenset[str]) -> AsyncIterator[list[tuple[Any, ...]]]:
    store = await worker.store()
    after: TagPlace | None = None
    while page := await store.tag_rows(tag, after=after, from_ms=0, until_ms=2**62, limit=PAGE):
        yield [
            (row.topic, row.id.encode(), TAG, row.seq_nr, 0, 0, 0, _encode(row)) for row in page if row.topic in wanted
        ]
        after = page[-1].place


def _to_arrow(rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True))
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _ROWS_ARROW, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_ROWS_ARROW)


# ---- the comparison


def compare_task(comparison: Comparison) -> Task:
    """A function for `mapInArrow` over rows sorted by journal: yields what differs, then how much was compared."""
    sent = msgspec.json.encode(comparison)

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        known = msgspec.json.decode(sent, type=Comparison)
        comparing = Comparing(known, Worker.of(known.settings))
        results: list[dict[str, Any]] = []
        for (topic, key), rows in groupby(_each(batches), lambda row: (row[0], row[1])):
            results += (msgspec.to_builtins(each) for each in comparing.journal(topic, key, rows))
            if len(results) >= RESULTS_PER_BATCH:
                yield pa.RecordBatch.from_pylist(results, schema=_RESULT_ARROW)
                results = []
        results.append({"what": CHECKED, "journals": comparing.journals, "events": comparing.events})
        yield pa.RecordBatch.from_pylist(results, schema=_RESULT_ARROW)

    return run


def _each(batches: Batches) -> Iterator[tuple[Any, ...]]:
    for batch in batches:
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


class Comparing:
    """Journals, one after another."""

    def __init__(self, comparison: Comparison, worker: Worker) -> None:
        self._comparison = comparison
        self._worker = worker
        self._later: dict[tuple[str, int], Later] = {}
        self._clear_tags = clears_tags(worker.settings)
        self.journals = self.events = 0

    def journal(self, topic: str, key: bytes, rows: Iterable[tuple[Any, ...]]) -> list[Difference]:
        """Compare one journal; what differs at first sight is looked at again, for the store may be moving."""
        facts = self._comparison.facts[topic]
        try:
            id = journal_id(key.decode())
        except (UnicodeDecodeError, InvalidInput):
            return []  # no journal's record, and kept aside as such
        partition = partition_of(id, facts.partitions)
        bounds = self._comparison.bounds[topic].get(partition)
        if bounds is None:
            return []  # nothing of it is replicated yet
        found, records = _sorted_out(rows, partition)
        self.journals += 1
        self.events += len(found.rows)
        subject = Subject(Key(topic, id), partition, facts, bounds, records, clear_tags=self._clear_tags)
        folded = subject.fold(found, bounds.pointer.position.offset)
        moved = found.head is not None and found.head.position > bounds.pointer.position
        if not moved and not differences(folded, subject.settled(found, bounds.pointer.position)):
            return []
        return self._worker.run(self._look_again(subject, found))

    async def _look_again(self, subject: Subject, first: Shelf) -> list[Difference]:
        store = await self._worker.store()
        for _ in range(LOOKS_MAX):
            pointer = await store.pointer(subject.key.topic, subject.partition)
            assert pointer is not None
            found = await read_shelf(store, subject.key, first)
            upto = pointer.position if found.head is None else max(pointer.position, found.head.position)
            found = subject.settled(found, upto)
            await self._add_later(subject, upto.offset)
            folded = subject.fold(found, upto.offset)
            if await store.head(subject.key) != found.head:
                continue
            differing = differences(folded, found)
            if not differing or not self._comparison.rev:
                return differing
            try:
                await store.mend(mend_of(folded, found, pointer, subject.facts, self._comparison.rev))
            except Fenced:
                continue
            return [msgspec.structs.replace(each, mended=True) for each in differing]
        return [Difference("moving", *subject.key, subject.partition)]

    async def _add_later(self, subject: Subject, upto: int) -> None:
        """The records behind those that Spark brought, up to where the store is now."""
        at = (subject.key.topic, subject.partition)
        if at not in self._later:
            self._later[at] = Later(subject.bounds)
        await self._later[at].reach(self._worker, *at, upto)
        subject.later = self._later[at].by_key.get(subject.key.id.encode(), [])


class Later:
    """A partition's records behind the bounds, read once a task."""

    def __init__(self, bounds: Bounds) -> None:
        self._next = bounds.pointer.position.offset + 1
        self._time_ms = bounds.pointer.time_ms
        self.by_key: dict[bytes, list[tuple[Record, int]]] = {}

    async def reach(self, worker: Worker, topic: str, partition: int, upto: int) -> None:
        log = await worker.log()
        while self._next <= upto:
            page = await log.read(topic, partition, start=self._next, stop=upto + 1, limit=PAGE)
            for record in page.records:
                action = read_record(record.value, limit_bytes=2**31)
                self._time_ms = advance_time(self._time_ms, record.timestamp_ms, action)
                if record.key is not None:
                    self.by_key.setdefault(record.key, []).append((record, self._time_ms))
            self._next = page.next_offset


class Subject:
    """One journal with its records."""

    def __init__(
        self,
        key: Key,
        partition: int,
        facts: TopicFacts,
        bounds: Bounds,
        records: list[tuple[Record, int]],
        *,
        clear_tags: bool,
    ) -> None:
        self.key = key
        self.partition = partition
        self.facts = facts
        self.bounds = bounds
        self.records = records
        self.later: list[tuple[Record, int]] = []
        self._clear_tags = clear_tags

    def fold(self, found: Shelf, upto: int) -> Folded:
        """The journal by the log, up to an offset."""
        records = self.records + self.later
        placed = [self._place(record, time_ms) for record, time_ms in records if record.offset <= upto]
        since = Position(self.facts.epoch, self.bounds.start)
        folded = fold_journal(self.key, self.partition, found, placed, self.facts, since, clear_tags=self._clear_tags)
        if self.bounds.start > 0:
            _trust_times(folded.shelf, found)
        return folded

    def _place(self, record: Record, time_ms: int) -> Placed:
        action = read_record(record.value, limit_bytes=self.facts.limit_bytes)
        return Placed(Position(self.facts.epoch, record.offset), record.timestamp_ms, action, time_ms)

    def settled(self, found: Shelf, upto: Position) -> Shelf:
        """Without rows that a replicator may have written ahead of what it has finished."""
        rows = {seq_nr: row for seq_nr, row in found.rows.items() if row.position <= upto}
        tags = {place: row for place, row in found.tags.items() if row.position <= upto}
        return Shelf(found.head, rows, tags)


def _trust_times(wanted: Shelf, found: Shelf) -> None:
    """The log's time depends on all that came before: where that is gone, the store's word is taken."""
    for seq_nr, row in wanted.rows.items():
        other = found.rows.get(seq_nr)
        if other is not None and other.position == row.position:
            wanted.rows[seq_nr] = msgspec.structs.replace(row, time_ms=other.time_ms)
    tags: dict[TagPlace, TagRow] = {}
    for tag_row in wanted.tags.values():
        event = wanted.rows.get(tag_row.seq_nr)
        if event is not None:
            tag_row = msgspec.structs.replace(tag_row, time_ms=event.time_ms)
        tags[tag_row.place] = tag_row
    wanted.tags = tags


def _sorted_out(rows: Iterable[tuple[Any, ...]], partition: int) -> tuple[Shelf, list[tuple[Record, int]]]:
    found = Shelf()
    records: list[tuple[Record, int]] = []
    for _, key, kind, n, of, timestamp_ms, time_ms, data in rows:
        if kind == HEAD:
            found.head = decode_head(data)
        elif kind == EVENT:
            found.rows[n] = _decode_event(data)
        elif kind == TAG:
            row = _decode_tag(data)
            found.tags[row.place] = row
        elif of == partition:  # elsewhere it is void, and kept aside
            records.append((Record(n, timestamp_ms, key, data), time_ms))
    return found, records


async def read_shelf(store: StoreWriter, key: Key, first: Shelf) -> Shelf:
    """A journal as the store shows it now, with what a first look has found beyond its head."""
    head = await store.head(key)
    found = Shelf(head)
    shape = head or first.head
    if shape is not None:
        to = max([shape.seq_nr, *first.rows])
        shape = msgspec.structs.replace(shape, seq_nr=to, jumps=() if first.rows else shape.jumps)
        after = 0
        while page := await store.events(key, shape, after=after, to=to, limit=PAGE):
            found.rows.update((row.seq_nr, row) for row in page)
            after = page[-1].seq_nr
    else:
        found.rows = dict(first.rows)
    found.tags = dict(await _tags_now(store, key, first, found))
    return found


async def _tags_now(store: StoreWriter, key: Key, first: Shelf, found: Shelf) -> dict[TagPlace, TagRow]:
    """The tag rows that a first look found or that the events speak of, as far as they are there now."""
    moments = {(place.tag, place.time_ms) for place in first.tags}
    for row in [*first.rows.values(), *found.rows.values()]:
        moments |= {(tag, row.time_ms) for tag in event_tags(row.kept)}
    pages = await asyncio.gather(
        *(store.tag_rows(tag, after=None, from_ms=ms, until_ms=ms + 1, limit=PAGE) for tag, ms in moments)
    )
    return {row.place: row for page in pages for row in page if (row.topic, row.id) == key}

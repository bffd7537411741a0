"""Compare journals in the store with the log, in Spark tasks whose rows are grouped and sorted by journal."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby
from typing import Any

import msgspec
import pyarrow as pa

from tidebook.core.errors import Corrupt, Fenced
from tidebook.core.event import event_tags
from tidebook.core.head import Head, decode_head
from tidebook.core.key import Key, journal_of, partition_of
from tidebook.core.position import Position
from tidebook.core.record import read_record
from tidebook.core.repair import Damage
from tidebook.core.replication_plan import EventRow, Pointer, PositionedAction, TagPosition, TagRow, advance_time
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Record
from tidebook.pipeline.compared_rows import DAMAGED, EVENT, HEAD, NO_KEY, PAGE, TAG, Batches, Task
from tidebook.pipeline.task import log_too_short
from tidebook.pipeline.tick_thread import clears_tags
from tidebook.pipeline.worker import SparkWorker
from tidebook.replication.journal_state import (
    Difference,
    FoldedJournal,
    JournalState,
    differences,
    fold_journal,
    is_certain,
    is_repairable,
    repair_of,
)
from tidebook.store.port import StoreWriter

RESULT = (
    "what string, topic string, id string, partition int, seq_nr long, expected string, found string, "
    "repaired boolean, journals long, events long"
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
        ("repaired", pa.bool_()),
        ("journals", pa.int64()),
        ("events", pa.int64()),
    ]
)
#: The `what` of the last row of each task, which counts the compared journals and events.
TOTALS = "checked"
RESULTS_PER_BATCH = 1000
#: How often a journal is read again that changes while it is compared.
ATTEMPTS_MAX = 10

_decode_event = msgspec.msgpack.Decoder(EventRow).decode
_decode_tag = msgspec.msgpack.Decoder(TagRow).decode
_decode_damage = msgspec.msgpack.Decoder(Damage).decode


class CompareBounds(msgspec.Struct, frozen=True):
    """The records of one partition that are compared: start ≤ offset ≤ pointer."""

    start: int
    pointer: Pointer


class Comparison(msgspec.Struct, frozen=True):
    """The parameters of a comparison, sent to every worker."""

    settings: str
    configs: dict[str, TopicConfig]
    #: By topic and partition.
    bounds: dict[str, dict[int, CompareBounds]]
    #: The repair revision; 0 to report differences without repairing them.
    rev: int = 0


def compare_task(comparison: Comparison) -> Task:
    """Return a function for `mapInArrow` over rows sorted by journal; it yields the differences, then the totals."""
    sent = msgspec.json.encode(comparison)

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        decoded = msgspec.json.decode(sent, type=Comparison)
        comparer = JournalComparer(decoded, SparkWorker.of(decoded.settings))
        results: list[dict[str, Any]] = []
        for (topic, key), rows in groupby(_each_row(batches), lambda row: (row[0], row[1])):
            results += (msgspec.to_builtins(each) for each in comparer.journal(topic, key, rows))
            if len(results) >= RESULTS_PER_BATCH:
                yield pa.RecordBatch.from_pylist(results, schema=_RESULT_ARROW)
                results = []
        results.append({"what": TOTALS, "journals": comparer.journals, "events": comparer.events})
        yield pa.RecordBatch.from_pylist(results, schema=_RESULT_ARROW)

    return run


def _each_row(batches: Batches) -> Iterator[tuple[Any, ...]]:
    for batch in batches:
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


class JournalComparer:
    """Compares journals one by one, and repairs them if the comparison has a repair revision."""

    def __init__(self, comparison: Comparison, worker: SparkWorker) -> None:
        self._comparison = comparison
        self._worker = worker
        self._later: dict[tuple[str, int], LaterRecords] = {}
        self._clear_tags = clears_tags(worker.settings)
        self.journals = self.events = 0

    def journal(self, topic: str, key: bytes, rows: Iterable[tuple[Any, ...]]) -> list[Difference]:
        """Compare one journal; if it differs, read it again, because replication may have changed it meanwhile."""
        config = self._comparison.configs[topic]
        if key == NO_KEY:
            return [_orphan_difference(_decode_damage(row[-1])) for row in rows if row[2] == DAMAGED]
        id = journal_of(key)
        if id is None:
            return []  # replication has parked the record
        partition = partition_of(id, config.partitions)
        bounds = self._comparison.bounds[topic].get(partition)
        if bounds is None:
            return []  # the partition is not replicated yet
        found, records = _split_rows(rows, partition)
        self.journals += 1
        self.events += len(found.rows)
        subject = ComparedJournal(Key(topic, id), partition, config, bounds, records, clear_tags=self._clear_tags)
        folded = subject.fold(found, bounds.pointer.position.offset)
        moved = found.head is not None and found.head.position > bounds.pointer.position
        if (
            not moved
            and not found.damaged
            and not differences(folded, subject.without_unfinished(found, bounds.pointer.position))
        ):
            return []
        return self._worker.run(self._compare_again(subject, found))

    async def _compare_again(self, subject: ComparedJournal, first: JournalState) -> list[Difference]:
        """Read the journal until it does not change during a comparison; repair it if a repair is requested."""
        store = await self._worker.store()
        for _ in range(ATTEMPTS_MAX):
            pointer = await store.pointer(subject.key.topic, subject.partition)
            assert pointer is not None
            found = await read_journal_state(store, subject.key, first)
            upto = pointer.position if found.head is None else max(pointer.position, found.head.position)
            found = subject.without_unfinished(found, upto)
            await self._add_later(subject, upto.offset)
            folded = subject.fold(found, upto.offset)
            if await _read_head(store, subject.key) != found.head:
                continue
            differing = differences(folded, found)
            if not differing or not self._comparison.rev or not is_certain(folded, found):
                return differing
            try:
                await store.repair(repair_of(folded, found, pointer, subject.config, self._comparison.rev))
            except Fenced:
                continue
            return [msgspec.structs.replace(each, repaired=is_repairable(each, folded, found)) for each in differing]
        return [Difference("moving", *subject.key, subject.partition)]

    async def _add_later(self, subject: ComparedJournal, upto: int) -> None:
        """Add the records after the bounds, up to the offset that the store has reached now."""
        at = (subject.key.topic, subject.partition)
        if at not in self._later:
            self._later[at] = LaterRecords(subject.bounds)
        await self._later[at].read_to(self._worker, *at, upto)
        subject.later = self._later[at].by_key.get(subject.key.id.encode(), [])


class LaterRecords:
    """A partition's records after the bounds, read once per task."""

    def __init__(self, bounds: CompareBounds) -> None:
        self._next = bounds.pointer.position.offset + 1
        self._time_ms = bounds.pointer.time_ms
        self.by_key: dict[bytes, list[tuple[Record, int]]] = {}

    async def read_to(self, worker: SparkWorker, topic: str, partition: int, upto: int) -> None:
        log = await worker.log()
        while self._next <= upto:
            page = await log.read(topic, partition, start=self._next, stop=upto + 1, limit=PAGE)
            if page.next_offset <= self._next:
                raise log_too_short(topic, partition, upto + 1, page.next_offset)
            for record in page.records:
                action = read_record(record.value, limit_bytes=2**31)
                self._time_ms = advance_time(self._time_ms, record.timestamp_ms, action)
                if record.key is not None:
                    self.by_key.setdefault(record.key, []).append((record, self._time_ms))
            self._next = page.next_offset


class ComparedJournal:
    """One journal with its records in the log."""

    def __init__(
        self,
        key: Key,
        partition: int,
        config: TopicConfig,
        bounds: CompareBounds,
        records: list[tuple[Record, int]],
        *,
        clear_tags: bool,
    ) -> None:
        self.key = key
        self.partition = partition
        self.config = config
        self.bounds = bounds
        self.records = records
        self.later: list[tuple[Record, int]] = []
        self._clear_tags = clear_tags

    def fold(self, found: JournalState, upto: int) -> FoldedJournal:
        """Fold the journal's records up to and including an offset."""
        records = self.records + self.later
        actions = [self._positioned(record, time_ms) for record, time_ms in records if record.offset <= upto]
        since = Position(self.config.epoch, self.bounds.start)
        folded = fold_journal(self.key, self.partition, found, actions, self.config, since, clear_tags=self._clear_tags)
        if self.bounds.start > 0:
            _adopt_stored_times(folded.state, found)
        return folded

    def _positioned(self, record: Record, time_ms: int) -> PositionedAction:
        action = read_record(record.value, limit_bytes=self.config.limit_bytes)
        return PositionedAction(Position(self.config.epoch, record.offset), record.timestamp_ms, action, time_ms)

    def without_unfinished(self, found: JournalState, upto: Position) -> JournalState:
        """Return the state without rows after `upto`: a replicator writes rows before it moves the head and pointer."""
        rows = {seq_nr: row for seq_nr, row in found.rows.items() if row.position <= upto}
        tags = {place: row for place, row in found.tags.items() if row.position <= upto}
        return JournalState(found.head, rows, tags, found.damaged)


def _adopt_stored_times(wanted: JournalState, found: JournalState) -> None:
    """Take the rows' log times from the store: they depend on earlier records, which the log no longer has."""
    for seq_nr, row in wanted.rows.items():
        other = found.rows.get(seq_nr)
        if other is not None and other.position == row.position:
            wanted.rows[seq_nr] = msgspec.structs.replace(row, time_ms=other.time_ms)
    tags: dict[TagPosition, TagRow] = {}
    for tag_row in wanted.tags.values():
        event = wanted.rows.get(tag_row.seq_nr)
        if event is not None:
            tag_row = msgspec.structs.replace(tag_row, time_ms=event.time_ms)
        tags[tag_row.place] = tag_row
    wanted.tags = tags


def _split_rows(rows: Iterable[tuple[Any, ...]], partition: int) -> tuple[JournalState, list[tuple[Record, int]]]:
    found = JournalState()
    records: list[tuple[Record, int]] = []
    for _, key, kind, n, of, timestamp_ms, time_ms, data in rows:
        if kind == HEAD:
            found.head = decode_head(data)
        elif kind == EVENT:
            found.rows[n] = _decode_event(data)
        elif kind == TAG:
            row = _decode_tag(data)
            found.tags[row.place] = row
        elif kind == DAMAGED:
            found.damaged += (_decode_damage(data),)
        elif of == partition:  # in any other partition the record is void and parked
            records.append((Record(n, timestamp_ms, key, data), time_ms))
    return found, records


async def read_journal_state(store: StoreWriter, key: Key, first: JournalState) -> JournalState:
    """Read a journal from the store again, including the rows past its head that the first read found."""
    head, damaged = None, []
    try:
        head = await store.head(key)
    except Corrupt as error:
        damaged.append(Damage("head", *key, str(error)))
    found = JournalState(head)
    shape = head or first.head
    if shape is None or first.damaged_rows:
        # Without a head the segments are undecoded, and a page with a damaged row cannot be read.
        found.rows = dict(first.rows)
        damaged += (each for each in first.damaged if each.what == "event")
    else:
        found.rows = await _read_rows(store, key, shape, first)
    found.tags, damaged_tags = await _read_tags(store, key, first, found)
    found.damaged = (*damaged, *damaged_tags)
    return found


async def _read_rows(store: StoreWriter, key: Key, shape: Head, first: JournalState) -> dict[int, EventRow]:
    found: dict[int, EventRow] = {}
    to = max([shape.seq_nr, *first.rows])
    shape = msgspec.structs.replace(shape, seq_nr=to)
    after = 0
    while page := await store.events(key, shape, after=after, to=to, limit=PAGE):
        found.update((row.seq_nr, row) for row in page)
        after = page[-1].seq_nr
    # `events` skips segments that the head does not list: read rows that were found there by their numbers.
    anywhere = msgspec.structs.replace(shape, run_start=0, jumps=())
    for number in sorted(first.rows.keys() - found.keys()):
        page = await store.events(key, anywhere, after=number - 1, to=number, limit=1)
        found.update((row.seq_nr, row) for row in page)
    return found


async def _read_head(store: StoreWriter, key: Key) -> Head | None:
    try:
        return await store.head(key)
    except Corrupt:
        return None


async def _read_tags(
    store: StoreWriter, key: Key, first: JournalState, found: JournalState
) -> tuple[dict[TagPosition, TagRow], list[Damage]]:
    """Read the tag rows that the first read found or that the events' tags imply."""
    moments = {(place.tag, place.time_ms) for place in (*first.tags, *first.damaged_tags)}
    for row in [*first.rows.values(), *found.rows.values()]:
        moments |= {(tag, row.time_ms) for tag in _tags_of(row)}
    pages = await asyncio.gather(
        *(store.inspect_tag(tag, after=None, from_ms=ms, until_ms=ms + 1, limit=PAGE) for tag, ms in moments)
    )
    rows = [row for page in pages for row in page]
    tags = {row.place: row for row in rows if isinstance(row, TagRow) and (row.topic, row.id) == key}
    damaged = [row for row in rows if isinstance(row, Damage) and row.place in first.damaged_tags]
    return tags, damaged


def _tags_of(row: EventRow) -> Collection[str]:
    """Return the tags of an event; none if it is damaged, because the first read has found its tag rows."""
    try:
        return event_tags(row.kept)
    except Corrupt:
        return ()


def _orphan_difference(damage: Damage) -> Difference:
    """Return the difference for a damaged tag row whose record the log no longer has, so its journal is undecoded."""
    partition = 0 if damage.place is None else damage.place.partition
    remedy = f"the log does not have its record: run 'tidebook pipeline rebuild {damage.topic} --tags'"
    return Difference("tag damaged", damage.topic, "", partition, found=f"{damage.reason}; {remedy}")

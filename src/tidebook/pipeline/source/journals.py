"""Journals as a Spark table: the store's events as of the planning of the query, read in parallel parts as Arrow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from tidebook.core.errors import NotFound, TidebookError
from tidebook.core.event import decode_events
from tidebook.core.head import Head
from tidebook.core.key import Key, partition_of
from tidebook.core.payload import TYPE_NAMES
from tidebook.core.position import Position
from tidebook.core.replication_plan import EventRow, Pointer, TagPosition
from tidebook.core.topic_config import TopicConfig
from tidebook.pipeline.source.options import INT_MAX, TABLE, Options, Selection, one_line_errors, positions
from tidebook.pipeline.source.records import EPOCH
from tidebook.pipeline.worker import SparkWorker, arrow_schema
from tidebook.replication.status import find_lag
from tidebook.runtime.clock import SystemClock
from tidebook.store.port import ScanSplit, StoreWriter
from tidebook.wiring.spark import has_part

SCHEMA = (
    "topic string, id string, seq_nr long, timestamp timestamp, payload binary, payload_type string, "
    "tags array<string>, metadata string, partition int, offset long"
)
_ARROW = arrow_schema(SCHEMA)
PAGE_EVENTS = 10_000
PAGE_BYTES = 16_000_000
SPLITS = 16
IDS_PER_PART = 200
PAGE_ROWS = 5_000
LOGGER = logging.getLogger("tidebook.pipeline")
#: A log that is unavailable must not delay a read that needs only the store.
LOOK_S = 5.0


class EventPage:
    """Collects events of one topic until there are enough for an Arrow batch."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._clear()

    def _clear(self) -> None:
        self._columns: tuple[list[Any], ...] = tuple([] for _ in range(9))
        self._bytes = 0

    def add(self, ids: Sequence[str], partition: int, rows: Sequence[EventRow]) -> None:
        """Add event rows of one log partition, with their journal ids."""
        encoded = [row.encoded for row in rows]
        events = decode_events(encoded)
        added: tuple[Sequence[Any], ...] = (
            ids,
            [row.seq_nr for row in rows],
            [row.timestamp_ms for row in rows],
            [event.payload for event in events],
            [event.payload_type for event in events],
            [event.tags for event in events],
            [event.metadata for event in events],
            [partition] * len(rows),
            [row.position.offset for row in rows],
        )
        for column, more in zip(self._columns, added, strict=True):
            column += more
        self._bytes += sum(map(len, encoded))

    @property
    def full(self) -> bool:
        """Return whether the page has reached a limit and should be taken."""
        return len(self._columns[0]) >= PAGE_EVENTS or self._bytes >= PAGE_BYTES

    def take(self) -> Iterator[pa.RecordBatch]:
        """Yield the page as one Arrow batch, unless it is empty, and clear it."""
        ids, numbers, times, payloads, types, tags, metadata, partitions, offsets = self._columns
        if not ids:
            return
        names = pa.DictionaryArray.from_arrays(pa.array(types, pa.int8()), pa.array(TYPE_NAMES, pa.string()))
        # Building an array of empty lists directly is far cheaper than converting Python lists.
        no_tags = (pa.repeat(pa.scalar(0, pa.int32()), len(ids) + 1), pa.array([], pa.string()))
        arrays = [
            pa.repeat(pa.scalar(self._topic, pa.string()), len(ids)),
            pa.array(ids, pa.string()),
            pa.array(numbers, pa.int64()),
            pa.array(times, pa.timestamp("ms", tz="UTC")).cast(_ARROW.field("timestamp").type),
            pa.array(payloads, pa.binary()),
            names.dictionary_decode(),
            pa.array(tags, pa.list_(pa.string())) if any(tags) else pa.ListArray.from_arrays(*no_tags),
            pa.array(metadata, pa.binary()).cast(pa.string()),
            pa.array(partitions, pa.int32()),
            pa.array(offsets, pa.int64()),
        ]
        self._clear()
        yield pa.RecordBatch.from_arrays(arrays, schema=_ARROW)


class JournalsPlan(msgspec.Struct, frozen=True):
    """The range of a topic that a query reads; rows at `until` or after were replicated after the planning."""

    topic: str
    config: TopicConfig
    #: The first selected position of each partition, and the first position after the selected ones.
    since: dict[int, Position]
    until: dict[int, Position]


class JournalsPart(InputPartition):
    """What one task reads: a split of the store, some journals, or a tag."""

    def __init__(
        self, plan: JournalsPlan, selection: Selection, *, split: ScanSplit | None = None, ids: Sequence[str] = ()
    ) -> None:
        self.plan = msgspec.json.encode(plan)
        self.selection = msgspec.json.encode(selection)
        self.split = None if split is None else (split.low, split.high)
        self.ids = tuple(ids)


class JournalsReader(DataSourceReader):
    """Plans the parts on the driver and reads them in tasks.

    It deliberately has no `pushFilters`: Spark 4.2.0 shares one reader between all scans of a DataFrame, so rows that
    one query's filter excludes would be missing from the other queries (decision 0111).
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        given = Options(options)
        given.check_names(TABLE)
        self._settings = given.settings()
        self._splits = given.number("splits", SPLITS, least=1)
        self._selection = given.selection()
        self._starts = given.offsets("startingOffsets")
        self._stops = given.offsets("endingOffsets")

    def partitions(self) -> Sequence[InputPartition]:
        with one_line_errors():
            worker = SparkWorker.of(self._settings)
            return worker.run(self._parts(worker))

    async def _parts(self, worker: SparkWorker) -> list[InputPartition]:
        store = await worker.store()
        parts: list[InputPartition] = []
        for topic, config in (await self._configs(store)).items():
            pointers = await store.pointers(topic)
            plan = self._plan(topic, config, pointers)
            ids = self._selection.ids
            homes = range(config.partitions) if ids is None else {partition_of(id, config.partitions) for id in ids}
            stops = positions(self._stops.get(topic, {}), config.epoch)
            ends = {number: at.offset for number, at in stops.items() if at.epoch == config.epoch}
            await warn_of_lag(worker, topic, config, pointers, partitions=homes, stops=ends)
            if self._selection.tag is not None:
                parts.append(JournalsPart(plan, self._selection))
            elif ids is not None:
                chosen = sorted(ids)
                groups = [chosen[i : i + IDS_PER_PART] for i in range(0, len(chosen), IDS_PER_PART)]
                parts += (JournalsPart(plan, self._selection, ids=group) for group in groups)
            else:
                splits = await store.splits(topic, count=self._splits)
                parts += (JournalsPart(plan, self._selection, split=split) for split in splits)
        return parts

    async def _configs(self, store: StoreWriter) -> dict[str, TopicConfig]:
        """Return the configurations of the selected topics; raise `NotFound` for a named topic without one."""
        existing = await store.topics()
        for topic in sorted(self._selection.topics or ()):
            if topic not in existing:
                raise NotFound(f"topic {topic}: the store has nothing of it; there are {', '.join(existing) or 'none'}")
        selected = self._selection.topics or existing
        found = {topic: await store.topic_config(topic) for topic in existing if topic in selected}
        return {topic: config for topic, config in found.items() if config is not None}

    def _plan(self, topic: str, config: TopicConfig, pointers: Mapping[int, Pointer]) -> JournalsPlan:
        starts, stops = self._starts.get(topic, {}), self._stops.get(topic, {})
        since = positions(starts, config.epoch)
        if EPOCH not in starts:  # offset 0 without an epoch includes the events of older epochs
            since = {number: at for number, at in since.items() if at.offset > 0}
        until = {number: pointer.position.next for number, pointer in pointers.items()}
        until |= positions(stops, config.epoch)
        return JournalsPlan(topic, config, since, until)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, JournalsPart):  # Spark passes None if there are no partitions
            return iter(())
        return _read_part(self._settings, partition)


async def warn_of_lag(
    worker: SparkWorker,
    topic: str,
    config: TopicConfig,
    pointers: Mapping[int, Pointer],
    *,
    partitions: Collection[int],
    stops: Mapping[int, int],
) -> bool:
    """Log a warning if the log holds records after a read's `pointers` and before its `stops`; return True then."""
    if not has_part(worker.settings, "log"):
        return False
    now_ms = SystemClock().now_ms()
    try:
        async with asyncio.timeout(LOOK_S):
            log = await worker.log()
            lag = await find_lag(log, topic, config, pointers, partitions=partitions, stops=stops, now_ms=now_ms)
    except (TidebookError, TimeoutError) as error:
        LOGGER.warning("topic %s: this read returns what the store holds; the log's end is unknown: %s", topic, error)
        return True
    if lag is not None:
        LOGGER.warning("%s", lag)
    return lag is not None


def _read_part(settings: str, part: JournalsPart) -> Iterator[pa.RecordBatch]:
    """Yield the events of a part as Arrow batches; runs in a worker."""
    plan = msgspec.json.decode(part.plan, type=JournalsPlan)
    selection = msgspec.json.decode(part.selection, type=Selection)
    worker = SparkWorker.of(settings)
    page = EventPage(plan.topic)
    for journals in worker.iterate(_journals(worker, plan, selection, part)):
        for id, partition, rows in journals:
            page.add([id] * len(rows), partition, rows)
            if page.full:
                yield from page.take()
    yield from page.take()


async def _journals(
    worker: SparkWorker, plan: JournalsPlan, selection: Selection, part: JournalsPart
) -> AsyncIterator[list[tuple[str, int, list[EventRow]]]]:
    """Yield pages of the visible rows of a part, grouped by journal, with the journal's partition."""
    store = await worker.store()
    if selection.tag is not None:
        pages = _by_tag(store, plan, selection)
    elif part.split is not None:
        pages = store.events_in(plan.topic, ScanSplit(*part.split))
    else:
        pages = _by_id(store, plan, selection, part.ids)
    async for page in pages:
        # Heads are read after the rows, so that rows deleted or purged meanwhile are not delivered.
        heads = await store.heads(plan.topic, list({id for id, _ in page}))
        found: list[tuple[str, int, list[EventRow]]] = []
        for id, of_id in groupby(page, itemgetter(0)):
            partition = partition_of(id, plan.config.partitions)
            visible = _visible([row for _, row in of_id], heads.get(id), plan, partition)
            if selection.narrows:
                visible = [row for row in visible if selection.takes(id, row.seq_nr, row.timestamp_ms)]
            if visible:
                found.append((id, partition, visible))
        yield found


def _visible(rows: list[EventRow], head: Head | None, plan: JournalsPlan, partition: int) -> list[EventRow]:
    """Return the rows of the journal's current incarnation that are not deleted and within the plan's range."""
    until = plan.until.get(partition)
    if head is None or not head.live or until is None:
        return []
    low, high = head.delete_to, head.seq_nr
    first, last = max(head.incarnation, plan.since.get(partition, head.incarnation)), head.position
    return [row for row in rows if low < row.seq_nr <= high and first <= row.position <= last and row.position < until]


#: Rows with the ids of their journals.
_Page = Sequence[tuple[str, EventRow]]


async def _by_id(
    store: StoreWriter, plan: JournalsPlan, selection: Selection, ids: Sequence[str]
) -> AsyncIterator[_Page]:
    for id, head in (await store.heads(plan.topic, list(ids))).items():
        after, to = max(head.delete_to, selection.seq_nr_from - 1), min(head.seq_nr, selection.seq_nr_to)
        while head.live and after < to:
            page = await store.events(Key(plan.topic, id), head, after=after, to=to, limit=PAGE_ROWS)
            if not page:
                break
            yield [(id, row) for row in page]
            after = page[-1].seq_nr


async def _by_tag(store: StoreWriter, plan: JournalsPlan, selection: Selection) -> AsyncIterator[_Page]:
    # The log's time is never before the record's timestamp, so a lower bound of the timestamp bounds it too.
    after: TagPosition | None = None
    while page := await store.tag_rows(
        selection.tag or "", after=after, from_ms=selection.time_from_ms, until_ms=INT_MAX, limit=PAGE_ROWS
    ):
        yield [(row.id, row.event) for row in page if row.topic == plan.topic]
        after = page[-1].place

"""Journals as a Spark table: what the store holds, read in parts, as of the moment the query was planned."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from tidebook.core.head import Head
from tidebook.core.key import Key, partition_of
from tidebook.core.position import Position
from tidebook.core.replication import EventRow, Pointer, TagPlace
from tidebook.core.topic import TopicFacts
from tidebook.pipeline.source.epochs import EPOCH, positions
from tidebook.pipeline.source.events import EventPage
from tidebook.pipeline.source.records import Offsets
from tidebook.pipeline.source.wanted import MOST, Wanted, narrow, wanted_of
from tidebook.pipeline.worker import Worker
from tidebook.store.port import Split, StoreWriter
from tidebook.wiring.settings import read_settings, settings_to_json

SPLITS = 16
IDS_PER_PART = 200
PAGE_ROWS = 5_000


class Plan(msgspec.Struct, frozen=True):
    """A topic as of the planning: rows behind `until` came later, and are left out."""

    topic: str
    facts: TopicFacts
    #: By partition: the first position that is wanted, and the first behind those that are.
    since: dict[int, Position]
    until: dict[int, Position]


class Part(InputPartition):
    """What one task reads: a part of the store, or some journals, or a tag."""

    def __init__(self, plan: Plan, wanted: Wanted, *, split: Split | None = None, ids: Sequence[str] = ()) -> None:
        self.plan = msgspec.json.encode(plan)
        self.wanted = msgspec.json.encode(wanted)
        self.split = None if split is None else (split.low, split.high)
        self.ids = tuple(ids)


def settings_of(options: Mapping[str, str]) -> str:
    """The settings that a query's options name, as text for the workers."""
    return options.get("settings") or settings_to_json(read_settings(options.get("book", "./tidebook-data")))


class JournalsReader(DataSourceReader):
    """Plans on the driver, reads in tasks. Filters come by `PushedJournalsReader`, where Spark pushes them."""

    def __init__(self, options: Mapping[str, str]) -> None:
        given = {name.lower(): value for name, value in options.items()}
        self._settings = settings_of(given)
        self._splits = int(given.get("splits", SPLITS))
        self._wanted = wanted_of(given)
        self._starts: Offsets = msgspec.json.decode(given.get("startingoffsets", "{}"), type=Offsets)
        self._stops: Offsets = msgspec.json.decode(given.get("endingoffsets", "{}"), type=Offsets)

    def partitions(self) -> Sequence[InputPartition]:
        worker = Worker.of(self._settings)
        return worker.run(self._parts(worker))

    async def _parts(self, worker: Worker) -> list[InputPartition]:
        store = await worker.store()
        parts: list[InputPartition] = []
        for topic in self._wanted.of_topics(await store.topics()):
            facts = await store.facts(topic)
            if facts is None:
                continue
            plan = self._plan(topic, facts, await store.pointers(topic))
            ids = self._wanted.ids
            if self._wanted.tag is not None:
                parts.append(Part(plan, self._wanted))
            elif ids is not None:
                chosen = sorted(ids)
                groups = [chosen[i : i + IDS_PER_PART] for i in range(0, len(chosen), IDS_PER_PART)]
                parts += (Part(plan, self._wanted, ids=group) for group in groups)
            else:
                splits = await store.splits(topic, count=self._splits)
                parts += (Part(plan, self._wanted, split=split) for split in splits)
        return parts

    def _plan(self, topic: str, facts: TopicFacts, pointers: Mapping[int, Pointer]) -> Plan:
        starts, stops = self._starts.get(topic, {}), self._stops.get(topic, {})
        since = positions(starts, facts.epoch)
        if EPOCH not in starts:  # from the very beginning: what older epochs have left in the store as well
            since = {number: at for number, at in since.items() if at.offset > 0}
        until = {number: pointer.position.next for number, pointer in pointers.items()}
        until |= positions(stops, facts.epoch)
        return Plan(topic, facts, since, until)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Part):  # Spark asks with None where there is nothing to read
            return iter(())
        return read_part(self._settings, partition)


class PushedJournalsReader(JournalsReader):
    """The same, and it takes filters."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._wanted, left = narrow(self._wanted, filters)
        return left


def journals_reader(options: Mapping[str, str]) -> JournalsReader:
    """A reader that takes filters only where Spark pushes them: else it would refuse one that can."""
    module = "pyspark.sql.worker.data_source_pushdown_filters"
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    pushes = module in sys.modules or getattr(main, "name", None) == module
    return PushedJournalsReader(options) if pushes else JournalsReader(options)


def read_part(settings: str, part: Part) -> Iterator[pa.RecordBatch]:
    """The events of a part, in a worker."""
    plan = msgspec.json.decode(part.plan, type=Plan)
    wanted = msgspec.json.decode(part.wanted, type=Wanted)
    worker = Worker.of(settings)
    page = EventPage(plan.topic)
    for journals in worker.iterate(_journals(worker, plan, wanted, part)):
        for id, partition, rows in journals:
            page.add([id] * len(rows), partition, rows)
            if page.full:
                yield from page.take()
    yield from page.take()


#: Rows of one journal that lie together.
Run = tuple[str, list[EventRow]]


async def _journals(
    worker: Worker, plan: Plan, wanted: Wanted, part: Part
) -> AsyncIterator[list[tuple[str, int, list[EventRow]]]]:
    """The rows of a part that count, by journal and with its partition, a page at a time."""
    store = await worker.store()
    if wanted.tag is not None:
        pages = _by_tag(store, plan, wanted)
    elif part.split is not None:
        pages = _by_split(store, plan, Split(*part.split))
    else:
        pages = _by_id(store, plan, wanted, part.ids)
    async for runs in pages:
        # Heads are read after the rows: what they say is deleted or purged by then is not delivered.
        heads = await store.heads(plan.topic, list({id for id, _ in runs}))
        found: list[tuple[str, int, list[EventRow]]] = []
        for id, rows in runs:
            partition = partition_of(id, plan.facts.partitions)
            kept = _counting(rows, heads.get(id), plan, partition)
            if wanted.narrows:
                kept = [row for row in kept if wanted.takes(id, row.seq_nr, row.timestamp_ms)]
            if kept:
                found.append((id, partition, kept))
        yield found


def _counting(rows: list[EventRow], head: Head | None, plan: Plan, partition: int) -> list[EventRow]:
    """Those rows that are not deleted, of the journal's present life, and within the offsets of the plan."""
    until = plan.until.get(partition)
    if head is None or not head.live or until is None:
        return []
    low, high = head.delete_to, head.seq_nr
    first, last = max(head.incarnation, plan.since.get(partition, head.incarnation)), head.position
    return [row for row in rows if low < row.seq_nr <= high and first <= row.position <= last and row.position < until]


def _runs(page: Sequence[tuple[str, EventRow]]) -> list[Run]:
    return [(id, [row for _, row in rows]) for id, rows in groupby(page, itemgetter(0))]


async def _by_split(store: StoreWriter, plan: Plan, split: Split) -> AsyncIterator[list[Run]]:
    async for page in store.events_in(plan.topic, split):
        yield _runs(page)


async def _by_id(store: StoreWriter, plan: Plan, wanted: Wanted, ids: Sequence[str]) -> AsyncIterator[list[Run]]:
    for id, head in (await store.heads(plan.topic, list(ids))).items():
        after, to = max(head.delete_to, wanted.seq_nr_from - 1), min(head.seq_nr, wanted.seq_nr_to)
        key = Key(plan.topic, id)
        while head.live and after < to:
            page = await store.events(key, head, after=after, to=to, limit=PAGE_ROWS)
            if not page:
                break
            yield [(id, list(page))]
            after = page[-1].seq_nr


async def _by_tag(store: StoreWriter, plan: Plan, wanted: Wanted) -> AsyncIterator[list[Run]]:
    # The log's time is never below the record's own: a lower bound of the one is one of the other.
    after: TagPlace | None = None
    while page := await store.tag_rows(
        wanted.tag or "", after=after, from_ms=wanted.time_from_ms, until_ms=MOST, limit=PAGE_ROWS
    ):
        yield _runs([(row.id, row.event) for row in page if row.topic == plan.topic])
        after = page[-1].place


def lower(options: Mapping[str, Any]) -> dict[str, str]:
    """Options by lower-case names, as Spark treats them."""
    return {name.lower(): str(value) for name, value in options.items()}

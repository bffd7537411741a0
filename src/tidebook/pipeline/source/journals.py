"""Journals as a Spark table: the events of store and log as of one position per partition, read in parallel as Arrow.

The position is fixed when a query is planned. Rows up to the pointers of that moment are read from the store, later
ones from the log: the tail (`tail.py`). With the option freshness="store" there is no tail.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from tidebook.core.errors import Corrupt, InvalidInput, LogLost, NotFound, TidebookError, Unavailable
from tidebook.core.event import event_tags
from tidebook.core.head import Head
from tidebook.core.key import Key, partition_of
from tidebook.core.position import Position
from tidebook.core.replication_plan import EventRow, Pointer, PositionedAction, TagPosition, first_unreplicated_offset
from tidebook.core.topic_config import TopicConfig
from tidebook.journal.topic import check_topic
from tidebook.log.port import Log
from tidebook.pipeline.source.event_page import EventPage
from tidebook.pipeline.source.options import (
    INT_MAX,
    TABLE,
    Options,
    Selection,
    check_offsets,
    one_line_errors,
    positions,
)
from tidebook.pipeline.source.records import EPOCH, Offsets
from tidebook.pipeline.source.tail import (
    Tail,
    TailRange,
    TailShare,
    assign_shares,
    check_log,
    find_deletes,
    fold_onto,
    tail_events,
)
from tidebook.pipeline.worker import SparkWorker
from tidebook.replication.status import find_lag
from tidebook.runtime.clock import SystemClock
from tidebook.runtime.futures import cancel_quietly
from tidebook.store.port import ScanSplit, StoreWriter
from tidebook.wiring.spark import has_part, require_book

IDS_PER_PART = 200
PAGE_ROWS = 5_000
LOGGER = logging.getLogger("tidebook.pipeline")
#: How long a read that needs only the store waits for the log.
LOOK_S = 5.0
#: The advice in errors: how to read without the log.
STORE_ONLY = 'read what is replicated, with .option("freshness", "store")'


class JournalsPlan(msgspec.Struct, frozen=True):
    """The range of a topic that a query reads, by partition: since ≤ position < until, log time ≤ `as_of_ms`."""

    topic: str
    config: TopicConfig
    since: dict[int, Position]
    until: dict[int, Position]
    #: The first positions that the store lacked when the query was planned: rows from there on come from the tail.
    stored_until: dict[int, Position]
    as_of_ms: int
    #: The unreplicated records, up to the log's end even if `until` is before it, because later ones may be deletes.
    tails: tuple[TailRange, ...] = ()

    def takes(self, row: EventRow, partition: int) -> bool:
        """Return whether a row is within the range."""
        until, since = self.until.get(partition), self.since.get(partition)
        return (
            until is not None
            and row.position < until
            and (since is None or row.position >= since)
            and max(row.time_ms, row.timestamp_ms) <= self.as_of_ms
        )


class JournalsPart(InputPartition):
    """The part of a read that one task performs: a split of the store, some journals, a tag, or shares of the tail."""

    def __init__(
        self,
        plan: JournalsPlan,
        selection: Selection,
        *,
        split: ScanSplit | None = None,
        ids: Sequence[str] = (),
        shares: Sequence[TailShare] = (),
    ) -> None:
        self.plan = msgspec.json.encode(plan)
        self.selection = msgspec.json.encode(selection)
        self.split = None if split is None else (split.low, split.high)
        self.ids = tuple(ids)
        self.shares = msgspec.json.encode(shares) if shares else None


class JournalsReader(DataSourceReader):
    """Plans the parts on the driver and reads them in tasks.

    It deliberately has no `pushFilters`: Spark 4.2.0 shares one reader between all scans of a DataFrame, so rows that
    one query's filter excludes would be missing from the other queries (decision 0111).
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        given = Options(options)
        given.check_names(TABLE)
        self._settings = given.settings()
        self._splits = given.splits()
        self._selection = given.selection()
        self._freshness = given.freshness()
        self._form = given.payload_form()
        self._starts = given.offsets("startingOffsets")
        self._stops = given.offsets("endingOffsets")
        self._as_of = given.offsets("asOfOffsets", least=-1) if "asOfOffsets" in given else None
        self._as_of_ms = given.time_ms("asOfTimestamp", INT_MAX)
        if "asOfTimestamp" in given and self._as_of_ms > SystemClock().now_ms():
            raise InvalidInput(f"the option asOfTimestamp is in the future: {given.text('asOfTimestamp')}")

    def partitions(self) -> Sequence[InputPartition]:
        with one_line_errors():
            worker = SparkWorker.of(self._settings)
            if self._freshness == "log":
                require_book(worker.settings, parts=("log", "store"))
            return worker.run(self._parts(worker))

    async def _parts(self, worker: SparkWorker) -> list[InputPartition]:
        store = await worker.store()
        parts: list[InputPartition] = []
        read: dict[str, TopicConfig] = {}
        for topic in await self._topics(store):
            before = await store.topic_config(topic)
            pointers = await store.pointers(topic)  # read first: the configuration's epoch is not older
            config = await store.topic_config(topic)
            if config is None or before is None:
                continue  # deleted meanwhile
            if config.epoch == before.epoch and config.topic_id != before.topic_id:
                raise _deleted(topic)  # and created again: the pointers may be those of the deleted topic
            read[topic] = config
            ids = self._selection.ids
            homes = sorted({partition_of(id, config.partitions) for id in ids} if ids else range(config.partitions))
            ends = {number: _next(pointers.get(number), config) for number in homes}
            tails: list[TailRange] = []
            if self._freshness == "log":
                tails = await _find_tails(worker, store, topic, config, pointers, homes)
                ends |= {each.partition: Position(config.epoch, each.stop) for each in tails}
            plan = self._plan(topic, config, pointers, ends, tails)
            if self._freshness == "store":
                await warn_of_lag(
                    worker, topic, config, pointers, partitions=homes, stops=self._requested_stops(topic, config)
                )
            if self._selection.tag is not None:
                parts.append(JournalsPart(plan, self._selection))
            elif ids is not None:
                chosen = sorted(ids)
                groups = [chosen[i : i + IDS_PER_PART] for i in range(0, len(chosen), IDS_PER_PART)]
                parts += (JournalsPart(plan, self._selection, ids=group) for group in groups)
            else:
                splits = await store.splits(topic, count=self._splits)
                parts += (JournalsPart(plan, self._selection, split=split) for split in splits)
            parts += (JournalsPart(plan, self._selection, shares=shares) for shares in assign_shares(plan.tails))
        given = {"startingOffsets": self._starts, "endingOffsets": self._stops, "asOfOffsets": self._as_of or {}}
        for name, offsets in given.items():
            check_offsets(name, offsets, read)
        return parts

    async def _topics(self, store: StoreWriter) -> list[str]:
        """Return the selected topics; raise `NotFound` for a named topic that does not exist."""
        existing = await store.topics()
        for topic in sorted(self._selection.topics or ()):
            if topic not in existing:
                raise NotFound(f"topic {topic} is not in the store, which has {', '.join(existing) or 'no topics'}")
        return [topic for topic in existing if self._selection.topics is None or topic in self._selection.topics]

    def _plan(
        self,
        topic: str,
        config: TopicConfig,
        pointers: Mapping[int, Pointer],
        ends: Mapping[int, Position],
        tails: Sequence[TailRange],
    ) -> JournalsPlan:
        starts = self._starts.get(topic, {})
        since = positions(starts, config.epoch)
        if EPOCH not in starts:  # offset 0 without an epoch includes the events of older epochs
            since = {number: position for number, position in since.items() if position.offset > 0}
        stops = positions(self._stops.get(topic, {}), config.epoch)
        until = {number: min(end, stops.get(number, end)) for number, end in ends.items()}
        if self._as_of is not None:
            as_of = as_of_positions(self._as_of, topic, config, ends, replicated=self._freshness == "store")
            until = {number: min(end, as_of[number].next) for number, end in until.items()}
        stored_until = {number: _next(pointers.get(number), config) for number in until}
        tails = tuple(each for each in tails if each.start < each.stop)
        return JournalsPlan(topic, config, since, until, stored_until, self._as_of_ms, tails)

    def _requested_stops(self, topic: str, config: TopicConfig) -> dict[int, int]:
        """Return the offsets of this epoch before which the options end the read, by partition."""
        stops = positions(self._stops.get(topic, {}), config.epoch)
        stops |= {
            number: position.next
            for number, position in positions((self._as_of or {}).get(topic, {}), config.epoch).items()
        }
        return {number: stop.offset for number, stop in stops.items() if stop.epoch == config.epoch}

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, JournalsPart):  # Spark passes None if there are no partitions
            return
        plan = msgspec.json.decode(partition.plan, type=JournalsPlan)
        selection = msgspec.json.decode(partition.selection, type=Selection)
        worker = SparkWorker.of(self._settings)
        page = EventPage(plan.topic, self._form)
        if partition.shares is None:
            found = _stored_events(worker, plan, selection, partition)
        else:
            shares = msgspec.json.decode(partition.shares, type=list[TailShare])
            found = _tail_events(worker, plan, selection, shares)
        for groups in worker.iterate(found):
            for ids, number, rows in groups:
                page.add(ids, number, rows)
                if page.full:
                    yield from page.take()
        yield from page.take()


def _next(pointer: Pointer | None, config: TopicConfig) -> Position:
    """Return the first position that is not replicated.

    If the configuration's epoch began after the pointer was read, it is the start of that epoch: all that the store has
    of older epochs was replicated before, although perhaps after the pointer was read.
    """
    start = Position(config.epoch, 0)
    return start if pointer is None else max(pointer.position.next, start)


def as_of_positions(
    given: Offsets, topic: str, config: TopicConfig, ends: Mapping[int, Position], *, replicated: bool
) -> dict[int, Position]:
    """Return the position of each partition in `ends` up to which `asOfOffsets` reads, inclusive.

    Raise `InvalidInput` if a partition is missing, or if the log or the store does not reach so far: the read would
    not be as of the requested position.
    """
    found = positions(given.get(topic, {}), config.epoch)
    for number, end in ends.items():
        if number not in found:
            raise InvalidInput(
                f"asOfOffsets of topic {topic}: partition {number} is missing: name all partitions that are read"
            )
        if found[number].next > end:
            extent = "is replicated" if replicated else "is written"
            raise InvalidInput(
                f"asOfOffsets of topic {topic}: partition {number} {extent} up to offset {end.offset - 1} of epoch "
                f"{end.epoch}, not up to offset {found[number].offset} of epoch {found[number].epoch}"
            )
    return found


async def _find_tails(
    worker: SparkWorker,
    store: StoreWriter,
    topic: str,
    config: TopicConfig,
    pointers: Mapping[int, Pointer],
    partitions: Collection[int],
) -> list[TailRange]:
    """Return the unreplicated range of each partition, which may be empty.

    Raise if the log does not have all of it, or is not the log from which the store was filled.
    """
    try:
        log = await worker.log()
        ends = await check_topic(log, store, topic, config)
        found = (_find_tail(log, topic, config, pointers.get(number), number, ends[number]) for number in partitions)
        return await asyncio.gather(*found)
    except Corrupt as error:
        raise Corrupt(f"{error}; or {STORE_ONLY}") from error
    except Unavailable as error:
        raise Unavailable(f"{error}; or {STORE_ONLY}") from error


async def _find_tail(
    log: Log, topic: str, config: TopicConfig, pointer: Pointer | None, partition: int, end: int
) -> TailRange:
    time_ms = 0 if pointer is None else pointer.time_ms
    start = first_unreplicated_offset(pointer, topic, partition, config)
    if config.began and (pointer is None or pointer.position.epoch < config.epoch):
        # Records before the mark of the epoch are void, and the log may have lost them.
        start = config.began[partition][0]
    if start >= end:
        return TailRange(partition, end, end, time_ms)
    first = await log.start(topic, partition)
    if first > start:
        remedy = f"restore the log from a backup, or {STORE_ONLY}"
        raise LogLost(topic=topic, partition=partition, first=start, last=first - 1, remedy=remedy)
    return TailRange(partition, start, end, time_ms)


async def warn_of_lag(
    worker: SparkWorker,
    topic: str,
    config: TopicConfig,
    pointers: Mapping[int, Pointer],
    *,
    partitions: Collection[int],
    stops: Mapping[int, int],
) -> bool:
    """Log a warning and return True if the log has records after a read's `pointers` and before its `stops`."""
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


#: Rows with the ids of their journals.
_Page = Sequence[tuple[str, EventRow]]
#: The ids of rows of one partition, the partition, and the rows.
_Group = tuple[Sequence[str], int, Sequence[EventRow]]


async def _stored_events(
    worker: SparkWorker, plan: JournalsPlan, selection: Selection, part: JournalsPart
) -> AsyncIterator[list[_Group]]:
    """Yield pages of the visible rows of a part of the store, grouped by journal."""
    store = await worker.store()
    deletes = await _deletes(worker, plan)
    if selection.tag is not None:
        pages = _by_tag(store, plan, selection)
    elif part.split is not None:
        pages = store.events_in(plan.topic, ScanSplit(*part.split))
    else:
        pages = _by_id(store, plan, selection, part.ids)
    async for page in _prefetched(pages):
        # Heads are read after the rows, so that rows deleted or purged meanwhile are not delivered.
        heads = await store.heads(plan.topic, list({id for id, _ in page}))
        found: list[_Group] = []
        for id, of_id in groupby(page, itemgetter(0)):
            partition = partition_of(id, plan.config.partitions)
            head = heads.get(id)
            if id in deletes:
                head = fold_onto(head, deletes[id], plan.config)
            visible = _visible([row for _, row in of_id], head, plan, partition)
            if selection.narrows:
                visible = [row for row in visible if selection.takes(id, row.seq_nr, row.timestamp_ms)]
            if visible:
                found.append(([id] * len(visible), partition, visible))
        yield found
    await _check_same_topic(store, plan)


async def _check_same_topic(store: StoreWriter, plan: JournalsPlan) -> None:
    """Raise `NotFound` if the topic was deleted during the read: its rows would be missing, or those of a new one."""
    now = await store.topic_config(plan.topic)
    if now is None or (now.epoch == plan.config.epoch and now.topic_id != plan.config.topic_id):
        raise _deleted(plan.topic)


def _deleted(topic: str) -> NotFound:
    return NotFound(f"topic {topic}: it was deleted while it was read: load the table again")


async def _prefetched(pages: AsyncIterator[_Page]) -> AsyncIterator[_Page]:
    """Yield pages, fetching the next one while the heads of the current one are read."""
    following = asyncio.ensure_future(anext(pages, None))
    try:
        while (page := await following) is not None:
            following = asyncio.ensure_future(anext(pages, None))
            yield page
    finally:
        cancel_quietly(following)


def _visible(rows: list[EventRow], head: Head | None, plan: JournalsPlan, partition: int) -> list[EventRow]:
    """Return the rows of the journal's current incarnation that are not deleted and within the plan's range."""
    stored, until = plan.stored_until.get(partition), plan.until.get(partition)
    if head is None or not head.live or stored is None or until is None:
        return []
    low, high, until = head.delete_to, head.seq_nr, min(until, stored)
    first, last = max(head.incarnation, plan.since.get(partition, head.incarnation)), head.position
    rows = [row for row in rows if low < row.seq_nr <= high and first <= row.position <= last and row.position < until]
    return rows if plan.as_of_ms == INT_MAX else [row for row in rows if plan.takes(row, partition)]


#: The deletes of the plan that this process has read last, because it usually runs several tasks of one query.
_last_deletes: tuple[tuple[SparkWorker, JournalsPlan], dict[str, list[PositionedAction]]] | None = None


async def _deletes(worker: SparkWorker, plan: JournalsPlan) -> dict[str, list[PositionedAction]]:
    """Return the actions of the tail on the journals from which it deletes."""
    global _last_deletes
    if not plan.tails:
        return {}
    if _last_deletes is not None and _last_deletes[0] == (worker, plan):
        return _last_deletes[1]
    log = await worker.log()
    await check_log(log, plan.topic, plan.config)
    found: dict[str, list[PositionedAction]] = {}
    for each in await asyncio.gather(
        *(find_deletes(Tail(log, plan.topic, plan.config, range)) for range in plan.tails)
    ):
        found |= each
    await check_log(log, plan.topic, plan.config)
    _last_deletes = ((worker, plan), found)
    return found


async def _tail_events(
    worker: SparkWorker, plan: JournalsPlan, selection: Selection, shares: Sequence[TailShare]
) -> AsyncIterator[list[_Group]]:
    """Yield pages of the visible events of shares of the tail."""
    log, store = await worker.log(), await worker.store()
    await check_log(log, plan.topic, plan.config)
    for share in shares:
        number = share.range.partition

        def takes(id: str, share: TailShare = share) -> bool:
            return share.takes(id) and (selection.ids is None or id in selection.ids)

        async for page in tail_events(store, Tail(log, plan.topic, plan.config, share.range), takes):
            rows = [(id, row) for id, row in page if plan.takes(row, number) and _selects(selection, id, row)]
            yield [([id for id, _ in rows], number, [row for _, row in rows])]
    await check_log(log, plan.topic, plan.config)


def _selects(selection: Selection, id: str, row: EventRow) -> bool:
    if not selection.takes(id, row.seq_nr, row.timestamp_ms):
        return False
    return selection.tag is None or selection.tag in event_tags(row.encoded)


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

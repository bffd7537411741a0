"""The store port on Apache Cassandra."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Final

import msgspec

from tidebook.core.errors import Corrupt, InvalidInput, NotFound, OutcomeUnknown, TooLarge, Unavailable
from tidebook.core.head import Head, decode_head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.repair import Damage, Repair
from tidebook.core.replication_plan import (
    EventRow,
    Parked,
    Pointer,
    PutSegments,
    SliceWrites,
    TagPosition,
    TagRow,
    TopicPosition,
    TopicRow,
)
from tidebook.core.segments import head_segment
from tidebook.core.topic_config import TopicConfig
from tidebook.runtime.backoff import Backoff
from tidebook.runtime.metrics import Metrics
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.migrations import is_created, migrate, use_keyspace
from tidebook.store.cassandra.mutations import (
    Batch,
    CqlStatement,
    batch_rounds,
    clear_graves,
    coalesce_batches,
    head_queries,
    parked_row,
    segment_batches,
    unpark,
)
from tidebook.store.cassandra.repair import repair_rounds, rows_after_delete, split_packed_rows
from tidebook.store.cassandra.scan import EventPages, listed_segments, scan_segments
from tidebook.store.cassandra.session import SERIAL_ATTEMPTS, SINGLES_PER_BATCH, CassandraSession, connect, run_bounded
from tidebook.store.cassandra.settings import CassandraSettings
from tidebook.store.cassandra.tag_views import TagBuckets, TagViews
from tidebook.store.cassandra.token_ranges import events_in, heads_in, inspect_rows, token_ranges
from tidebook.store.port import ScanSplit, StoredSnapshot

CONFIG: Final = "topic_config"
SETTINGS: Final = "setting"
IDS_PAGE: Final = 2000
TAGS_PAGE: Final = 5000
#: How many topics are read concurrently.
TOPICS_AT_ONCE: Final = 64
PARKED_PAGE: Final = 5
SNAPSHOT_BYTES_MAX: Final = 8_000_000
#: A record must fit into one mutation, which Cassandra limits to half a commit log segment, 16 MiB by default.
LIMIT_BYTES_MAX: Final = 15_000_000
POLL_FIRST_S: Final = 0.005
POLL_MAX_S: Final = 0.25
#: How long `wait_any` waits: Cassandra sends no notifications, so its callers poll, less often while they find nothing.
ANY_POINTER_PAUSE: Final = Backoff(first_s=0.02, max_s=POLL_MAX_S, factor=1.3)

_encode_config = msgspec.json.Encoder().encode
_config_decoder = msgspec.json.Decoder(TopicConfig)


def _decode_config(text: str) -> TopicConfig:
    try:
        return _config_decoder.decode(text)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the configuration of a topic is damaged: {error}: repair the row in `setting`") from error


async def open_cassandra_store(settings: CassandraSettings, *, metrics: Metrics) -> CassandraStore:
    """Connect, create or migrate the schema if necessary, and return the store."""
    session = await connect(settings, metrics)
    try:
        return await create_store(session, settings, metrics)
    except BaseException:
        await session.close()
        raise


async def create_store(session: CassandraSession, settings: CassandraSettings, metrics: Metrics) -> CassandraStore:
    """Create or migrate the schema if necessary, and return the store."""
    await use_keyspace(session, settings)
    await migrate(session, settings.keyspace)
    return CassandraStore(session, settings, metrics)


async def find_store(session: CassandraSession, settings: CassandraSettings, metrics: Metrics) -> CassandraStore | None:
    """Return the store, migrated if necessary, or None if its schema was never created."""
    if not await is_created(session, settings.keyspace):
        return None
    return await create_store(session, settings, metrics)


class CassandraStore:
    """A `StoreWriter` for one event loop. Stamps make the outdated writes of late and repeated slices ineffective."""

    #: Stamps consist of epoch and offset, so the old topic's tombstones would cover the rows of a recreated one.
    deletes_topics = False
    orders_topics = False

    def __init__(self, session: CassandraSession, settings: CassandraSettings, metrics: Metrics) -> None:
        self._session = session
        self._settings = settings
        self._metrics = metrics
        self._pages = EventPages(session)
        self._segments: dict[str, int] = {}
        self._buckets = TagBuckets(session, self)
        self._tags = TagViews(
            session, self._pages, self._buckets, metrics, batch_rows_max=settings.max_message_batch_size
        )
        #: All writes of slices go through this attribute; tests replace it to delay single writes.
        self.write: Callable[[Batch], Awaitable[None]] = session.write

    # Reading

    async def pointer(self, topic: str, partition: int) -> Pointer | None:
        row = (await self._session.read(cql.POINTER, [topic, partition])).first()
        if row is None:
            return None
        epoch, offset, time_ms = row.as_tuple()
        return Pointer(Position(epoch, offset), time_ms)

    async def head(self, key: Key) -> Head | None:
        segments = await self._head_segments(key.topic)
        if segments is None:
            return None
        row = (await self._session.read(cql.HEAD, [key.topic, head_segment(key.id, segments), key.id])).first()
        return None if row is None else decode_head(row.as_tuple()[0])

    async def heads(self, topic: str, ids: Sequence[str]) -> Mapping[str, Head]:
        segments = await self._head_segments(topic)
        if segments is None or not ids:
            return {}
        found: dict[str, Head] = {}

        async def read_heads(query: CqlStatement) -> None:
            for row in await self._session.read(query.cql, query.values):
                id, data = row.as_tuple()
                found[id] = decode_head(data)

        queries = head_queries(topic, ids, segments, partitions_max=self._settings.partitions_together_max)
        await run_bounded(read_heads, queries, at_once=self._settings.in_flight_max)
        return found

    async def events(self, key: Key, head: Head, *, after: int, to: int, limit: int) -> Sequence[EventRow]:
        return await self._pages.read(key, head, after=after, to=to, limit=limit)

    async def ids(self, topic: str) -> AsyncIterator[str]:
        segments = await self._head_segments(topic)
        async for page in scan_segments(self._session, cql.IDS, topic, segments or 0, page_size=IDS_PAGE):
            for id, live in page:
                if live:
                    yield id

    async def snapshots(self, key: Key, incarnation: Position) -> Sequence[StoredSnapshot]:
        values = [key.topic, key.id, incarnation.epoch, incarnation.offset]
        found: list[StoredSnapshot] = []
        async for page in self._session.pages(cql.SNAPSHOTS, values, page_size=2):
            found += (StoredSnapshot(*row.as_tuple()) for row in page)
        return found

    async def topic_config(self, topic: str) -> TopicConfig | None:
        value = await self._value(CONFIG, topic)
        if value is None:
            return None
        config = _decode_config(value)
        self._segments[topic] = config.segments
        return config

    async def topics(self) -> Sequence[str]:
        return await self._names(CONFIG)

    async def _names(self, wanted: str) -> list[str]:
        found: list[str] = []
        async for page in self._session.pages(cql.SETTING_NAMES, [], page_size=IDS_PAGE):
            found += (name for section, name in (row.as_tuple() for row in page) if section == wanted)
        return sorted(found)

    async def wait(self, topic: str, partition: int, *, beyond: Position | None, timeout_s: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        backoff = Backoff(first_s=POLL_FIRST_S, max_s=POLL_MAX_S, factor=1.5)
        while True:
            pointer = await self.pointer(topic, partition)
            if pointer is not None and (beyond is None or pointer.position > beyond):
                return True
            left_s = deadline_s - loop.time()
            if left_s <= 0:
                return False
            await asyncio.sleep(min(backoff.next_s(), left_s))

    async def tag_rows(
        self, tag: str, *, after: TagPosition | None, from_ms: int, until_ms: int, limit: int
    ) -> Sequence[TagRow]:
        return await self._tags.rows(tag, after, from_ms, until_ms, limit)

    async def topic_rows(
        self, topic: str, *, after: TopicPosition | None, until_ms: int, limit: int
    ) -> Sequence[TopicRow]:
        # Rows are partitioned by journal, and a second copy of them by time would cost as much again.
        raise InvalidInput(f"topic {topic}: this store does not order the events of a topic: read them from the log")

    async def tags(self) -> AsyncIterator[str]:
        found: list[str] = []
        async for page in self._session.pages(cql.TAGS, [], page_size=TAGS_PAGE):
            found += (row.as_tuple()[0] for row in page)
        for tag in sorted(found):
            yield tag

    async def pointers(self, topic: str) -> Mapping[int, Pointer]:
        found = {}
        for row in await self._session.read(cql.POINTERS, [topic]):
            partition, epoch, offset, time_ms = row.as_tuple()
            found[partition] = Pointer(Position(epoch, offset), time_ms)
        return found

    async def replicated_ms(self) -> int:
        topics = await self.topics()
        times: list[int] = []
        for start in range(0, len(topics), TOPICS_AT_ONCE):
            found = await asyncio.gather(*map(self.pointers, topics[start : start + TOPICS_AT_ONCE]))
            times += (pointer.time_ms for of_topic in found for pointer in of_topic.values())
        return max(times, default=0)

    async def wait_any(self, *, timeout_s: float, since: int = -1) -> int:
        pauses = max(since, 0)  # how many there have been since the caller last found something
        await asyncio.sleep(min(ANY_POINTER_PAUSE.pause_s(pauses), timeout_s))
        return pauses + 1

    async def splits(self, topic: str, *, count: int) -> Sequence[ScanSplit]:
        return token_ranges(count)

    def heads_in(self, topic: str, split: ScanSplit) -> AsyncIterator[Sequence[tuple[str, Head]]]:
        return heads_in(self._session, topic, split)

    def events_in(self, topic: str, split: ScanSplit) -> AsyncIterator[Sequence[tuple[str, EventRow]]]:
        return events_in(self._session, topic, split)

    def inspect(self, topic: str, split: ScanSplit) -> AsyncIterator[Sequence[tuple[str, Head | EventRow | Damage]]]:
        return inspect_rows(self._session, topic, split)

    async def inspect_tag(
        self, tag: str, *, after: TagPosition | None, from_ms: int, until_ms: int, limit: int
    ) -> Sequence[TagRow | Damage]:
        return await self._tags.inspected_rows(tag, after, from_ms, until_ms, limit)

    # Writing

    async def apply(self, writes: SliceWrites) -> None:
        segments = await self._head_segments(writes.topic)
        if segments is None:
            raise NotFound(f"topic {writes.topic} has no configuration in the store: open it as a journal first")
        began = asyncio.get_running_loop().time()
        at_once = self._settings.in_flight_max * SINGLES_PER_BATCH
        partitions_max = self._settings.partitions_together_max
        rows_max = self._settings.max_message_batch_size
        # Segment lists come first: they are needed to find the rows that the slice clears, including tag rows.
        segment_lists = (write for of_key in writes.keys for write in of_key if isinstance(write, PutSegments))
        await run_bounded(self.write, chain.from_iterable(map(segment_batches, segment_lists)), at_once=at_once)
        async for batches in self._tags.clear_rounds(writes, segments):
            await run_bounded(self.write, coalesce_batches(batches, partitions_max, rows_max=rows_max), at_once=at_once)
        tags = coalesce_batches(await self._tags.put_batches(writes, segments), partitions_max, rows_max=rows_max)
        remaining = await rows_after_delete(self._pages, writes, at_once=self._settings.in_flight_max)
        listed = await listed_segments(self._pages, writes, at_once=self._settings.in_flight_max)
        for batches in batch_rounds(writes, segments, remaining, listed):
            # Tag rows are written with the first round: it has no head that counts them, because a key's tags come
            # before its head.
            await run_bounded(self.write, chain(tags, coalesce_batches(batches, partitions_max)), at_once=at_once)
        self._metrics.time("cassandra_slice", asyncio.get_running_loop().time() - began)

    async def repair(self, repair: Repair) -> None:
        segments = await self._head_segments(repair.key.topic)
        if segments is None:
            raise NotFound(f"topic {repair.key.topic} has no configuration in the store: open it as a journal first")
        buckets = await self._buckets.fixed_at(repair.pointer.time_ms)
        for batches in repair_rounds(repair, segments, buckets, await split_packed_rows(self._pages, repair)):
            await run_bounded(self.write, batches, at_once=self._settings.in_flight_max)

    async def save_snapshot(self, key: Key, incarnation: Position, snapshot: StoredSnapshot, *, slots: int) -> None:
        if slots < 1:
            raise InvalidInput(f"the number of snapshot slots must be at least 1, not {slots}")
        if len(snapshot.payload) > SNAPSHOT_BYTES_MAX:
            raise TooLarge("the snapshot", size_bytes=len(snapshot.payload), limit_bytes=SNAPSHOT_BYTES_MAX)
        incarnation_key = [key.topic, key.id, incarnation.epoch, incarnation.offset]
        row = [snapshot.seq_nr, snapshot.payload_type, snapshot.payload, snapshot.timestamp_ms]
        await self._session.write_once(CqlStatement(cql.PUT_SNAPSHOT, [*incarnation_key, *row]))
        with suppress(Unavailable, OutcomeUnknown):  # it is saved, and the next save deletes what is left here
            seq_nrs = [row.as_tuple()[0] for row in await self._session.read(cql.SNAPSHOT_NUMBERS, incarnation_key)]
            if len(seq_nrs) > slots:
                await self._session.write_once(CqlStatement(cql.DELETE_SNAPSHOTS, [*incarnation_key, seq_nrs[slots]]))

    async def delete_snapshots(self, key: Key, incarnation: Position, *, to: int) -> None:
        values = [key.topic, key.id, incarnation.epoch, incarnation.offset, to]
        await self._session.write_once(CqlStatement(cql.DELETE_SNAPSHOTS, values))

    async def set_topic_config(
        self, topic: str, topic_config: TopicConfig, *, expected: TopicConfig | None
    ) -> TopicConfig:
        if topic_config.limit_bytes > LIMIT_BYTES_MAX:
            raise TooLarge(
                f"a record of topic {topic}", size_bytes=topic_config.limit_bytes, limit_bytes=LIMIT_BYTES_MAX
            )
        if expected is not None and expected.segments != topic_config.segments:
            raise InvalidInput(f"topic {topic}: the number of segments decides where its heads are and cannot change")
        for _ in range(SERIAL_ATTEMPTS):
            text = await self._value(CONFIG, topic)
            found = None if text is None else _decode_config(text)
            if found == expected:
                # Compared as values but swapped as the stored text, which may be formatted differently.
                try:
                    await self._swap(CONFIG, topic, _encode_config(topic_config).decode(), text)
                except OutcomeUnknown:
                    pass  # the current value is read below
                found = await self.topic_config(topic)
            if found is not None:
                return found
            if expected is not None:
                raise NotFound(f"topic {topic} has no configuration that could be changed")
        raise Unavailable(
            f"the configuration of topic {topic} could not be set because of concurrent changes: try again"
        )

    async def delete_topic(self, topic: str) -> None:
        raise InvalidInput(f"topic {topic}: a store on Cassandra cannot delete topics: purge its journals instead")

    async def setting(self, name: str) -> str | None:
        return await self._value(SETTINGS, name)

    async def setting_names(self, prefix: str) -> Sequence[str]:
        return [name for name in await self._names(SETTINGS) if name.startswith(prefix)]

    async def set_setting(self, name: str, value: str, *, expected: str | None) -> bool:
        return await self._swap(SETTINGS, name, value, expected)

    async def expired(self, topic: str, *, now_ms: int) -> AsyncIterator[tuple[str, Head]]:
        segments = await self._head_segments(topic)
        async for page in scan_segments(self._session, cql.EXPIRIES, topic, segments or 0, page_size=IDS_PAGE):
            expired_ids = [id for id, expires_at_ms in page if 0 < expires_at_ms <= now_ms]
            heads = await self.heads(topic, expired_ids)
            for id in expired_ids:
                head = heads.get(id)
                if head is not None and head.expires_at_ms is not None and head.expires_at_ms <= now_ms:
                    yield id, head

    async def graves(self, topic: str) -> AsyncIterator[tuple[str, Head]]:
        segments = await self._head_segments(topic)
        async for page in scan_segments(self._session, cql.IDS, topic, segments or 0, page_size=IDS_PAGE):
            heads = await self.heads(topic, [id for id, live in page if not live])
            for id, head in heads.items():
                if not head.live:
                    yield id, head

    async def remove_graves(self, topic: str, graves: Sequence[tuple[str, Head]]) -> None:
        segments = await self._head_segments(topic)
        if segments is not None:
            batches = coalesce_batches(clear_graves(topic, graves, segments), self._settings.partitions_together_max)
            await run_bounded(self.write, batches, at_once=self._settings.in_flight_max)

    async def parked(self, topic: str | None = None) -> AsyncIterator[Parked]:
        queries: list[tuple[str, list[object]]] = [(cql.ALL_PARKED, [])]
        if topic is not None:
            config = await self.topic_config(topic)
            queries = [(cql.PARKED, [topic, number]) for number in range(config.partitions if config else 0)]
        for query, values in queries:
            async for page in self._session.pages(query, values, page_size=PARKED_PAGE):
                for row in page:
                    yield parked_row(row.as_tuple())

    async def unpark(self, parked: Iterable[Parked]) -> None:
        batches: Iterator[Batch] = ([unpark(each)] for each in parked)
        await run_bounded(self.write, batches, at_once=self._settings.in_flight_max * SINGLES_PER_BATCH)

    async def close(self) -> None:
        await self._session.close()

    # Internal

    async def _head_segments(self, topic: str) -> int | None:
        """Return the number of head segments, which never changes, so it is read once."""
        segments = self._segments.get(topic)
        if segments is None:
            config = await self.topic_config(topic)
            segments = None if config is None else config.segments
        return segments

    async def _value(self, section: str, name: str) -> str | None:
        row = (await self._session.read_serial(cql.SETTING, [section, name])).first()
        return None if row is None else row.as_tuple()[0]

    async def _swap(self, section: str, name: str, value: str, expected: str | None) -> bool:
        if expected is None:
            answer = await self._session.compare_and_set(cql.NEW_SETTING, [section, name, value])
        else:
            answer = await self._session.compare_and_set(cql.CHANGE_SETTING, [value, section, name, expected])
        return bool(answer["[applied]"])

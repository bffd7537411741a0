"""The store on Apache Cassandra."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

import msgspec

from tidebook.core.errors import Corrupt, InvalidInput, NotFound, OutcomeUnknown, TooLarge, Unavailable
from tidebook.core.head import Head, decode_head
from tidebook.core.key import Key
from tidebook.core.mend import Mend
from tidebook.core.metrics import Metrics
from tidebook.core.position import Position
from tidebook.core.replication import EventRow, Parked, Pointer, SliceWrites, TagPlace, TagRow
from tidebook.core.segments import head_segment
from tidebook.core.topic import TopicFacts
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.concurrently import each
from tidebook.store.cassandra.gathering import gathered, head_queries
from tidebook.store.cassandra.mending import mend_rounds
from tidebook.store.cassandra.migrate import migrate, use_keyspace
from tidebook.store.cassandra.mutations import Batch, Statement, rounds_of, unpark, whole_bytes
from tidebook.store.cassandra.ring import events_in, heads_in, ring_splits
from tidebook.store.cassandra.scan import EventPages, each_segment
from tidebook.store.cassandra.session import SERIAL_ATTEMPTS, SINGLES_PER_BATCH, Session, connect
from tidebook.store.cassandra.settings import CassandraSettings
from tidebook.store.cassandra.shared import apart, rows_cut
from tidebook.store.cassandra.tag_buckets import TagBuckets
from tidebook.store.cassandra.tag_views import TagViews
from tidebook.store.port import Snapshot, Split

FACTS: Final = "facts"
SETTINGS: Final = "setting"
IDS_PAGE: Final = 2000
PARKED_PAGE: Final = 5
SNAPSHOT_BYTES_MAX: Final = 8_000_000
#: A record must fit into one mutation, which Cassandra bounds by half a commit log segment: 16 MiB by default.
LIMIT_BYTES_MAX: Final = 15_000_000
POLL_FIRST_S: Final = 0.005
POLL_MAX_S: Final = 0.25

_encode_facts = msgspec.json.Encoder().encode
_facts_decoder = msgspec.json.Decoder(TopicFacts)


def _decode_facts(text: str) -> TopicFacts:
    try:
        return _facts_decoder.decode(text)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the facts of a topic are damaged: {error}: mend the row in `setting`") from error


async def open_cassandra_store(settings: CassandraSettings, *, metrics: Metrics) -> CassandraStore:
    """Connect, make or migrate the schema where that is needed, and return the store."""
    session = await connect(settings, metrics)
    try:
        await use_keyspace(session, settings)
        await migrate(session, settings.keyspace)
    except BaseException:
        await session.close()
        raise
    return CassandraStore(session, settings, metrics)


class CassandraStore:
    """A StoreWriter for one event loop. Late and repeated slices lose by their stamps, at any time."""

    def __init__(self, session: Session, settings: CassandraSettings, metrics: Metrics) -> None:
        self._session = session
        self._settings = settings
        self._metrics = metrics
        self._pages = EventPages(session)
        self._segments: dict[str, int] = {}
        self._buckets = TagBuckets(session, self)
        self._tags = TagViews(
            session, self._pages, self._buckets, metrics, batch_rows_max=settings.max_message_batch_size
        )
        #: The one way in which slices are written; tests put themselves between to hold single writes.
        self.write: Callable[[Batch], Awaitable[None]] = session.write

    # Reading

    async def pointer(self, topic: str, partition: int) -> Pointer | None:
        row = (await self._session.read(cql.POINTER, [topic, partition])).first()
        if row is None:
            return None
        epoch, offset, time_ms = row.as_tuple()
        return Pointer(Position(epoch, offset), time_ms)

    async def head(self, key: Key) -> Head | None:
        segments = await self._segments_of(key.topic)
        if segments is None:
            return None
        row = (await self._session.read(cql.HEAD, [key.topic, head_segment(key.id, segments), key.id])).first()
        return None if row is None else decode_head(row.as_tuple()[0])

    async def heads(self, topic: str, ids: Sequence[str]) -> Mapping[str, Head]:
        segments = await self._segments_of(topic)
        if segments is None or not ids:
            return {}
        found: dict[str, Head] = {}

        async def ask(query: Statement) -> None:
            for row in await self._session.read(query.cql, query.values):
                id, data = row.as_tuple()
                found[id] = decode_head(data)

        queries = head_queries(topic, ids, segments, together_max=self._settings.partitions_together_max)
        await each(ask, queries, at_once=self._settings.in_flight_max)
        return found

    async def events(self, key: Key, head: Head, *, after: int, to: int, limit: int) -> Sequence[EventRow]:
        return await self._pages.read(key, head, after=after, to=to, limit=limit)

    async def ids(self, topic: str) -> AsyncIterator[str]:
        segments = await self._segments_of(topic)
        async for page in each_segment(self._session, cql.IDS, topic, segments or 0, page_size=IDS_PAGE):
            for id, live in page:
                if live:
                    yield id

    async def snapshots(self, key: Key, incarnation: Position) -> Sequence[Snapshot]:
        values = [key.topic, key.id, incarnation.epoch, incarnation.offset]
        found: list[Snapshot] = []
        async for page in self._session.pages(cql.SNAPSHOTS, values, page_size=2):
            found += (Snapshot(*row.as_tuple()) for row in page)
        return found

    async def facts(self, topic: str) -> TopicFacts | None:
        value = await self._value(FACTS, topic)
        if value is None:
            return None
        facts = _decode_facts(value)
        self._segments[topic] = facts.segments
        return facts

    async def topics(self) -> Sequence[str]:
        found: list[str] = []
        async for page in self._session.pages(cql.SETTING_NAMES, [], page_size=IDS_PAGE):
            found += (name for section, name in (row.as_tuple() for row in page) if section == FACTS)
        return sorted(found)

    async def wait(self, topic: str, partition: int, *, beyond: Position | None, timeout_s: float) -> bool:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + timeout_s
        pause_s = POLL_FIRST_S
        while True:
            pointer = await self.pointer(topic, partition)
            if pointer is not None and (beyond is None or pointer.position > beyond):
                return True
            left_s = give_up - loop.time()
            if left_s <= 0:
                return False
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, POLL_MAX_S)

    async def tag_rows(
        self, tag: str, *, after: TagPlace | None, from_ms: int, until_ms: int, limit: int
    ) -> Sequence[TagRow]:
        return await self._tags.rows(tag, after, from_ms, until_ms, limit)

    async def tags(self) -> AsyncIterator[str]:
        for tag in await self._tags.names():
            yield tag

    async def pointers(self, topic: str) -> Mapping[int, Pointer]:
        found = {}
        for row in await self._session.read(cql.POINTERS, [topic]):
            partition, epoch, offset, time_ms = row.as_tuple()
            found[partition] = Pointer(Position(epoch, offset), time_ms)
        return found

    async def wait_any(self, *, timeout_s: float, since: int = -1) -> int:
        return await self._tags.pause(timeout_s, since)

    async def splits(self, topic: str, *, count: int) -> Sequence[Split]:
        return ring_splits(count)

    def heads_in(self, topic: str, split: Split) -> AsyncIterator[Sequence[tuple[str, Head]]]:
        return heads_in(self._session, topic, split)

    def events_in(self, topic: str, split: Split) -> AsyncIterator[Sequence[tuple[str, EventRow]]]:
        return events_in(self._session, topic, split)

    # Writing

    async def apply(self, writes: SliceWrites) -> None:
        segments = await self._segments_of(writes.topic)
        if segments is None:
            raise NotFound(f"topic {writes.topic} has no facts in the store: open it as a journal first")
        began = asyncio.get_running_loop().time()
        at_once = self._settings.in_flight_max * SINGLES_PER_BATCH
        together_max = self._settings.partitions_together_max
        rows_max = self._settings.max_message_batch_size
        async for batches in self._tags.clears_of(writes, segments):
            await each(self.write, gathered(batches, together_max, rows_max=rows_max), at_once=at_once)
        tags = gathered(await self._tags.puts_of(writes, segments), together_max, rows_max=rows_max)
        cut = await rows_cut(self._pages, writes, at_once=self._settings.in_flight_max)
        for batches in rounds_of(writes, segments, cut):
            # Tag rows go with the first round: no head that speaks of them is in it, for a key's tags come before.
            await each(self.write, chain(tags, gathered(batches, together_max)), at_once=at_once)
        self._metrics.time("cassandra_slice", asyncio.get_running_loop().time() - began)

    async def mend(self, mend: Mend) -> None:
        segments = await self._segments_of(mend.key.topic)
        if segments is None:
            raise NotFound(f"topic {mend.key.topic} has no facts in the store: open it as a journal first")
        cut = await self._buckets.fixed_at(mend.pointer.time_ms)
        for batches in mend_rounds(mend, segments, cut, await apart(self._pages, mend)):
            await each(self.write, batches, at_once=self._settings.in_flight_max)

    async def save_snapshot(self, key: Key, incarnation: Position, snapshot: Snapshot, *, slots: int) -> None:
        if slots < 1:
            raise InvalidInput(f"a journal has at least one slot for snapshots, not {slots}")
        if len(snapshot.payload) > SNAPSHOT_BYTES_MAX:
            raise TooLarge("the snapshot", size_bytes=len(snapshot.payload), limit_bytes=SNAPSHOT_BYTES_MAX)
        life = [key.topic, key.id, incarnation.epoch, incarnation.offset]
        row = [snapshot.seq_nr, snapshot.payload_type, snapshot.payload, snapshot.timestamp_ms]
        await self._session.write_once(Statement(cql.PUT_SNAPSHOT, [*life, *row]))
        kept = [row.as_tuple()[0] for row in await self._session.read(cql.SNAPSHOT_NUMBERS, life)]
        if len(kept) > slots:
            await self._session.write_once(Statement(cql.DELETE_SNAPSHOTS, [*life, kept[slots]]))

    async def delete_snapshots(self, key: Key, incarnation: Position, *, to: int) -> None:
        values = [key.topic, key.id, incarnation.epoch, incarnation.offset, to]
        await self._session.write_once(Statement(cql.DELETE_SNAPSHOTS, values))

    async def set_facts(self, topic: str, facts: TopicFacts, *, expected: TopicFacts | None) -> TopicFacts:
        if facts.limit_bytes > LIMIT_BYTES_MAX:
            raise TooLarge(f"a record of topic {topic}", size_bytes=facts.limit_bytes, limit_bytes=LIMIT_BYTES_MAX)
        if expected is not None and expected.segments != facts.segments:
            raise InvalidInput(f"topic {topic}: the number of segments places its heads and cannot change")
        for _ in range(SERIAL_ATTEMPTS):
            text = await self._value(FACTS, topic)
            found = None if text is None else _decode_facts(text)
            if found == expected:
                # Compared as values, swapped as the text that is there: an older Tidebook may have written it.
                try:
                    await self._swap(FACTS, topic, _encode_facts(facts).decode(), text)
                except OutcomeUnknown:
                    pass  # what holds now is asked for below
                found = await self.facts(topic)
            if found is not None:
                return found
            if expected is not None:
                raise NotFound(f"topic {topic} has no facts that could be changed")
        raise Unavailable(f"the facts of topic {topic} could not be set, for others set settings too: try again")

    async def setting(self, name: str) -> str | None:
        return await self._value(SETTINGS, name)

    async def set_setting(self, name: str, value: str, *, expected: str | None) -> bool:
        return await self._swap(SETTINGS, name, value, expected)

    async def expired(self, topic: str, *, now_ms: int) -> AsyncIterator[tuple[str, Head]]:
        segments = await self._segments_of(topic)
        async for page in each_segment(self._session, cql.EXPIRIES, topic, segments or 0, page_size=IDS_PAGE):
            over = [id for id, expires_at_ms in page if 0 < expires_at_ms <= now_ms]
            heads = await self.heads(topic, over)
            for id in over:
                head = heads.get(id)
                if head is not None and head.expires_at_ms is not None and head.expires_at_ms <= now_ms:
                    yield id, head

    async def parked(self, topic: str | None = None) -> AsyncIterator[Parked]:
        for query, values in await self._parked_queries(topic):
            async for page in self._session.pages(query, values, page_size=PARKED_PAGE):
                for row in page:
                    of, partition, epoch, offset, timestamp_ms, id, reason, value = row.as_tuple()
                    at, whole = Position(epoch, offset), whole_bytes(reason)
                    yield Parked(of, partition, at, timestamp_ms, id or None, reason, value, whole)

    async def unpark(self, parked: Iterable[Parked]) -> None:
        batches: Iterator[Batch] = ([unpark(each)] for each in parked)
        await each(self.write, batches, at_once=self._settings.in_flight_max * SINGLES_PER_BATCH)

    async def close(self) -> None:
        await self._session.close()

    # Within

    async def _parked_queries(self, topic: str | None) -> list[tuple[str, list[object]]]:
        if topic is None:
            return [(cql.ALL_PARKED, [])]
        facts = await self.facts(topic)
        return [(cql.PARKED, [topic, partition]) for partition in range(facts.partitions if facts else 0)]

    async def _segments_of(self, topic: str) -> int | None:
        """A fact that never changes, so it is asked for once."""
        segments = self._segments.get(topic)
        if segments is None:
            facts = await self.facts(topic)
            segments = None if facts is None else facts.segments
        return segments

    async def _value(self, section: str, name: str) -> str | None:
        row = (await self._session.read_serial(cql.SETTING, [section, name])).first()
        return None if row is None else row.as_tuple()[0]

    async def _swap(self, section: str, name: str, value: str, expected: str | None) -> bool:
        if expected is None:
            told = await self._session.compare_and_set(cql.NEW_SETTING, [section, name, value])
        else:
            told = await self._session.compare_and_set(cql.CHANGE_SETTING, [value, section, name, expected])
        return bool(told["[applied]"])

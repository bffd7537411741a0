"""`Journal`: append to, read, tail, delete, purge and snapshot the journals of one topic."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import msgspec

from tidebook.core import seq_nr as numbers
from tidebook.core.action import Delete, Purge
from tidebook.core.errors import InvalidInput, LogLost, NotFound, OutcomeUnknown, TidebookError, TooLarge, Truncated
from tidebook.core.event import Event, ReadEvent
from tidebook.core.fold import PurgeApplied
from tidebook.core.head import Head
from tidebook.core.key import Key, journal_id, journal_of, topic_name
from tidebook.core.payload import decode_payload, encode_payload
from tidebook.core.position import Position
from tidebook.core.seq_nr import FIRST, LAST
from tidebook.core.topic_config import TopicConfig
from tidebook.journal.append import BATCH_RECORDS, EncodedAppends, PendingAppend, PendingBatch, encode_append
from tidebook.journal.head_cache import HeadCache
from tidebook.journal.outcome import Appended
from tidebook.journal.reader import DecodeRows, E, Reader
from tidebook.journal.settings import BarrierKind, JournalSettings
from tidebook.journal.topic import OpenTopic, adopt_topic, open_topic
from tidebook.journal.view import ReadView, read_events
from tidebook.log.port import Log, Outgoing, RecordColumns, read_page
from tidebook.runtime import tracing
from tidebook.runtime.clock import Clock, Ids
from tidebook.runtime.metrics import Metrics
from tidebook.runtime.process import generation, refuse_fork
from tidebook.store.port import StoredSnapshot, StoreWriter


class Snapshot(msgspec.Struct, frozen=True):
    """An application state as of `seq_nr`."""

    seq_nr: int
    payload: Any
    timestamp_ms: int

    @property
    def timestamp(self) -> datetime:
        """When it was saved, by the clock of the process that saved it."""
        return datetime.fromtimestamp(self.timestamp_ms / 1000, UTC)


#: How many batches of `append_many` may be in flight: this bounds the memory of a call of any size.
BATCHES_IN_FLIGHT_MAX = 20
#: How many heads `append_many` reads concurrently.
HEADS_IN_FLIGHT_MAX = 256
#: How often a tail checks for a topic that does not exist yet.
TOPIC_POLL_S = 0.2


class Journal:
    """The journals of one topic, addressed by id.

    >>> async def first_order(book):
    ...     orders = book.journal("orders")
    ...     return await orders.append("o-1", [Event({"total": 3})], expected=0)
    """

    def __init__(
        self,
        topic: str,
        *,
        log: Log,
        store: StoreWriter,
        clock: Clock,
        ids: Ids,
        settings: JournalSettings | None = None,
        metrics: Metrics | None = None,
        on_open: Callable[[Journal], object] | None = None,
    ) -> None:
        self.topic = topic_name(topic)
        #: Called once the topic is open, because only then the journal must be closed.
        self._on_open = on_open
        self._log = log
        self._store = store
        self._clock = clock
        self._ids = ids
        self._settings = settings or JournalSettings()
        self._metrics = metrics or Metrics()
        self._open: OpenTopic | None = None
        self._opening = asyncio.Lock()
        self._generation = generation()

    async def _open_topic(
        self, check: Callable[[TopicConfig], object] | None = None, *, create: bool = False
    ) -> OpenTopic | None:
        """Open the topic; return None if it does not exist and `create` is not set. Only writes create a topic.

        `check` must accept the configuration that a new topic would have.
        """
        refuse_fork(self._generation, f"topic {self.topic}")
        if self._open is None:
            async with self._opening:
                if self._open is None:
                    config = await self._store.topic_config(self.topic)
                    if check is not None:
                        check(config or self._settings.topic_config("", self._settings.partitions))
                    if config is not None or create:
                        self._open = await open_topic(
                            self._log, self._store, self.topic, config, self._settings, self._metrics
                        )
                        if self._on_open is not None:
                            self._on_open(self)
        return self._open

    async def _open_or_create(self, check: Callable[[TopicConfig], object] | None = None) -> OpenTopic:
        topic = await self._open_topic(check, create=True)
        assert topic is not None
        return topic

    async def _locate(self, id: str, *, create: bool = False) -> tuple[Key, Reader | None]:
        """Return the key of a journal and its partition; the partition is None if the topic does not exist."""
        key = Key(self.topic, journal_id(id))
        topic = self._open or await self._open_topic(create=create)
        if topic is None:
            return key, None
        if topic.check_due:
            topic.check_epoch()
        return key, topic.partition(key.id)

    async def _head(self, id: str, kind: BarrierKind | None = None) -> tuple[Key, Head | None]:
        """Return the key and the head of a journal; the head is None if there is no live journal."""
        key, partition = await self._locate(id)
        head = None if partition is None else await partition.head(key.id, kind or self._settings.barrier)
        return key, head if head is not None and head.live else None

    async def head(self, id: str, *, barrier: BarrierKind | None = None) -> Head | None:
        """Return the head of a journal: its last number, incarnation and recent appends; None if there is none."""
        return (await self._head(id, self._barrier_kind(barrier)))[1]

    async def topic_config(self) -> TopicConfig:
        """Return the configuration of the topic; raise NotFound if the topic does not exist."""
        topic = await self._open_topic()
        if topic is None:
            raise NotFound(f"there is no topic {self.topic}: the first append or 'create' creates it")
        return topic.config

    async def exists(self) -> bool:
        """Return whether the topic exists."""
        return await self._open_topic() is not None

    async def create(self) -> TopicConfig:
        """Create the topic if it does not exist, as the first append would, and return its configuration."""
        return (await self._open_or_create()).config

    # ---- writing

    async def append(
        self,
        id: str,
        events: Sequence[Event],
        *,
        expected: int | None = None,
        at: int | None = None,
        expire_after: timedelta | int | None = None,
        confirm: bool = True,
        append_id: bytes | None = None,
        retry: OutcomeUnknown | None = None,
        incarnation: Position | None = None,
    ) -> Appended:
        """Append events atomically, and return when the outcome is known.

        `expected` is the last number that the journal must have, `at` the number of the first event (numbers may be
        skipped); with neither, the events get the next numbers. `retry` takes the OutcomeUnknown of an earlier attempt.
        `incarnation`, which requires `expected`, is that of the `head` that the caller has seen.
        With `confirm=False` return at the log's acknowledgement, with the numbers only if they are known by then.
        """
        span = tracing.begin("journal.append", topic=self.topic) if tracing.is_on() else None
        try:
            if span is not None:
                events = tracing.with_context(events, span)
            given = (events, expected, at, expire_after, append_id, retry, incarnation)
            topic = self._open or await self._open_or_create(partial(self._validate, [(id, *given)]))
            cache, record_key = topic.address(id)
            action, value = encode_append(topic.config, self._ids, *given)
            if topic.check_due:
                topic.check_epoch()
            if cache.recreated is not None:
                raise cache.recreated_error()
            if confirm and id not in cache.heads:
                await cache.head(id)  # resolved before the send, so that the outcome is known at the acknowledgement
            future: asyncio.Future[Appended] = asyncio.Future(loop=topic.loop)
            record = Outgoing(self.topic, cache.partition, record_key, value)
            PendingAppend(cache, id, action, record, confirm, future).send(self._log)
            appended = await future
        except BaseException as error:
            if span is not None:
                span.end(error)
            raise
        if span is not None:
            span.end()
        return appended

    async def append_many(
        self, items: Iterable[tuple[str, Sequence[Event]]], *, confirm: bool = True
    ) -> list[Appended | TidebookError]:
        """Append to many journals in one call; each append is atomic, and its result or error is at its index.

        Invalid input in any of them raises before anything is sent.
        """
        ids, appends = list[str](), list[Sequence[Event]]()
        try:
            for id, events in items:
                ids.append(id)
                appends.append(events)
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"append_many takes pairs of an id and its events: {error}") from error
        if not tracing.is_on():
            return await self._append_many(ids, appends, confirm=confirm)
        with tracing.span("journal.append_many", topic=self.topic, appends=len(ids)) as span:
            appends = [tracing.with_context(events, span) for events in appends]
            return await self._append_many(ids, appends, confirm=confirm)

    async def _append_many(
        self, ids: list[str], appends: list[Sequence[Event]], *, confirm: bool
    ) -> list[Appended | TidebookError]:
        topic = self._open or await self._open_or_create(partial(self._validate, zip(ids, appends, strict=True)))
        addresses = topic.addresses(ids)
        encoded = EncodedAppends(appends, topic.config, self._ids)
        if topic.check_due:
            topic.check_epoch()
        for partition in topic.partitions:
            partition.cache.check_log()
        if confirm:
            caches = {id: cache for id, (cache, _) in zip(ids, addresses, strict=True)}
            if unresolved := await self._resolve_heads(caches):
                others = [index for index, id in enumerate(ids) if id not in unresolved]
                results = iter(
                    await self._append_many([ids[i] for i in others], [appends[i] for i in others], confirm=True)
                )
                return [unresolved[id] if id in unresolved else next(results) for id in ids]
        outcomes: list[Appended | TidebookError] = []
        sent: deque[PendingBatch] = deque()
        for start in range(0, len(ids), BATCH_RECORDS):
            chunk = slice(start, start + BATCH_RECORDS)
            chunk_caches, keys = zip(*addresses[chunk], strict=True)
            partitions = [cache.partition for cache in chunk_caches]
            columns = RecordColumns(self.topic, partitions, keys, encoded.values(chunk))
            caches_used = {cache.partition: cache for cache in set(chunk_caches)}
            batch = PendingBatch(ids[chunk], caches_used, columns, confirm=confirm)
            batch.send(self._log)
            sent.append(batch)
            await asyncio.sleep(0)  # let the log send this batch while the next one is encoded
            if len(sent) > BATCHES_IN_FLIGHT_MAX:
                outcomes += await sent.popleft().outcomes()
        for batch in sent:
            outcomes += await batch.outcomes()
        return outcomes

    async def _resolve_heads(self, ids: Mapping[str, HeadCache]) -> dict[str, TidebookError]:
        """Resolve the heads that are not cached, a bounded number at a time; return the errors by id."""
        unknown = [(id, cache) for id, cache in ids.items() if id not in cache.heads]
        failed: dict[str, TidebookError] = {}
        for start in range(0, len(unknown), HEADS_IN_FLIGHT_MAX):
            chunk = unknown[start : start + HEADS_IN_FLIGHT_MAX]
            found = await asyncio.gather(*(cache.head(id) for id, cache in chunk), return_exceptions=True)
            for (id, _), result in zip(chunk, found, strict=True):
                if isinstance(result, TidebookError):
                    failed[id] = result
                elif isinstance(result, BaseException):
                    raise result
            # If every head failed so far, the rest would only wait for the same error.
            if len(failed) >= start + len(chunk):
                error = failed[chunk[-1][0]]
                failed.update((id, error) for id, _ in unknown[start + len(chunk) :])
                break
        return failed

    def _validate(self, appends: Iterable[tuple[Any, ...]], config: TopicConfig) -> None:
        """Raise InvalidInput for appends that `append` would reject, before the topic is created."""
        for id, *given in appends:
            journal_id(id)
            encode_append(config, self._ids, *given)

    async def delete(self, id: str, *, to: int) -> None:
        """Delete the events up to and including `to`, never future ones.

        If there is no journal, an empty one is created whose first event will come after `to`.
        """
        numbers.seq_nr(to, name="to")
        key, partition = await self._locate(id, create=True)
        assert partition is not None
        head = await partition.head(key.id, self._settings.barrier)
        incarnation = head.incarnation if head is not None and head.live else None
        await partition.cache.write(Delete(partition.cache.config.epoch, to, incarnation), key.id)

    async def purge(self, id: str) -> None:
        """Remove the journal with all its events, if it exists; the next append starts again at 1."""
        key, partition = await self._locate(id)
        if partition is not None:
            await partition.cache.write(Purge(partition.cache.config.epoch), key.id)

    async def purge_expired(self, id: str, head: Head) -> bool:
        """Purge the journal if its head is still at the position of `head`; return whether it was purged.

        A concurrent append wins: the purge carries the position, so the order of the log decides. If the head is known
        to have another position, nothing is sent: a purge that awaits replication is not repeated. Raise OutcomeUnknown
        if the purge was sent and its effect could not be determined.
        """
        key, partition = await self._locate(id)
        if partition is None:
            return False
        cache = partition.cache
        base = None
        while base is None:  # the head may be evicted before this coroutine resumes
            await cache.head(id)
            base = cache.base(id)
        if base.head is None or not base.head.live or base.head.position != head.position:
            return False
        sent, change = await cache.write(Purge(cache.config.epoch, head.position), id)
        if change is not None:
            return isinstance(change, PurgeApplied)
        view = ReadView(base, cache.config)
        try:
            await cache.reach(sent.offset, follow=False)
            await cache.fold_tail(key, view, sent.offset)
        except TidebookError as error:
            raise OutcomeUnknown(
                f"{key}: the purge is in the log at offset {sent.offset}, but whether it took effect is unknown: "
                f"{error}",
                partition=sent.partition,
                offset=sent.offset,
            ) from error
        return view.head is not None and not view.head.live and view.head.position.offset == sent.offset

    # ---- reading

    def read(
        self, id: str, *, start: int = FIRST, end: int = LAST, barrier: BarrierKind | None = None
    ) -> AsyncIterator[ReadEvent]:
        """Return the events with start ≤ seq_nr ≤ end, in order, as of a moment after this call."""
        return self.read_decoded(id, read_events, start=start, end=end, barrier=barrier)

    def read_decoded(
        self,
        id: str,
        decode: DecodeRows[E],
        *,
        start: int = FIRST,
        end: int = LAST,
        barrier: BarrierKind | None = None,
        incarnation: Position | None = None,
    ) -> AsyncIterator[E]:
        """Return what `read` returns, with the rows decoded by `decode`, which returns one event for each row.

        With `incarnation`, raise Truncated if the journal is no longer that incarnation.
        """
        numbers.seq_nr(start, name="start")
        numbers.seq_nr(end, name="end")
        kind = self._barrier_kind(barrier)
        if self._open is None or self._open.check_due:  # the check runs in the loop, where the events are read
            return self._read(journal_id(id), decode, start, end, kind, incarnation)
        return self._open.partition(journal_id(id)).decoded_events(
            Key(self.topic, id), decode, start=start, to=end, kind=kind, incarnation=incarnation
        )

    async def _read(
        self, id: str, decode: DecodeRows[E], start: int, end: int, kind: BarrierKind, incarnation: Position | None
    ) -> AsyncIterator[E]:
        key, partition = await self._locate(id)
        if partition is None:
            return
        async for event in partition.decoded_events(
            key, decode, start=start, to=end, kind=kind, incarnation=incarnation
        ):
            yield event

    def tail(self, id: str, *, start: int = FIRST) -> AsyncIterator[ReadEvent]:
        """Return the events from `start` on, then each new one as it is appended; the iterator never ends by itself.

        After a purge it continues with the events of the next incarnation.
        """
        return self.tail_decoded(id, read_events, start=start)

    def tail_decoded(self, id: str, decode: DecodeRows[E], *, start: int = FIRST) -> AsyncIterator[E]:
        """Return what `tail` returns, with the rows decoded by `decode`."""
        numbers.seq_nr(start, name="start")
        return self._tail(journal_id(id), decode, start)

    async def _tail(self, id: str, decode: DecodeRows[E], start: int) -> AsyncIterator[E]:
        key, partition = await self._locate(id)
        while partition is None:  # poll, because there is no log yet to wait on
            await asyncio.sleep(TOPIC_POLL_S)
            key, partition = await self._locate(id)
        incarnation = None
        cursor = start - 1
        kind = self._settings.barrier
        while True:
            view = await partition.view(key, kind)
            kind = "offset"  # the marks of many tails would wake each other forever
            head = view.head
            if head is not None and head.live:
                if incarnation is not None and head.incarnation != incarnation:
                    cursor = 0
                incarnation, cursor = head.incarnation, max(cursor, head.delete_to)
                if head.seq_nr > cursor:
                    new = partition.decoded_events(
                        key, decode, start=cursor + 1, to=LAST, kind="offset", incarnation=incarnation
                    )
                    try:
                        async for event in new:
                            cursor = event.seq_nr
                            yield event
                    except Truncated:
                        continue  # deleted or purged during the read: continue with the remaining events
            await self._log.wait(self.topic, partition.cache.partition, offset=view.as_of + 1)

    async def pointer(self, id: str, *, barrier: BarrierKind | None = None) -> int | None:
        """Return the last seq_nr, or None if there is no journal."""
        _, head = await self._head(id, self._barrier_kind(barrier))
        return None if head is None else head.seq_nr

    async def ids(self) -> AsyncIterator[str]:
        """Return the ids of all journals of the topic, each once, in no particular order."""
        topic = await self._open_topic()
        if topic is None:
            return
        unreplicated: set[str] = set()
        for partition in topic.partitions:
            unreplicated |= await self._unreplicated_ids(partition)
        async for id in self._store.ids(self.topic):
            if id not in unreplicated:
                yield id
        for id in unreplicated:
            head = await topic.partition(id).cache.head(id)
            if head is not None and head.live:
                yield id

    async def _unreplicated_ids(self, partition: Reader) -> set[str]:
        """Return the ids of the journals that have unreplicated records."""
        cache = partition.cache
        barrier = await partition.barriers.fix(self._settings.barrier)
        await cache.reach(barrier)
        found: set[str] = set()
        start = await cache.replicated() + 1
        while start <= barrier:
            try:
                batch = await read_page(self._log, self.topic, cache.partition, start=start, stop=barrier + 1)
            except LogLost:
                replicated = await cache.replicated()
                if replicated < start:
                    raise
                start = replicated + 1
                continue
            owners = (journal_of(record.key, cache.partition, cache.config.partitions) for record in batch.records)
            found.update(id for id in owners if id is not None)
            start = batch.next_offset
        return found

    def _barrier_kind(self, barrier: BarrierKind | None) -> BarrierKind:
        if barrier is None:
            return self._settings.barrier
        if barrier not in ("mark", "offset"):
            raise InvalidInput(f"barrier must be 'mark' or 'offset', not {barrier!r}")
        return barrier

    # ---- snapshots

    async def save_snapshot(
        self, id: str, *, seq_nr: int, payload: object, incarnation: Position | None = None
    ) -> None:
        """Save the state as of `seq_nr`; replace a snapshot of that number, and keep the newest `snapshot_slots`.

        A caller that knows the incarnation in which the state was computed passes it: a snapshot of a journal that was
        purged since is then never loaded. Without it, the snapshot belongs to the current incarnation, and `seq_nr`
        must not be beyond its last number.
        """
        numbers.seq_nr(seq_nr)
        payload_type, data = encode_payload(payload)
        key = Key(self.topic, journal_id(id))
        if incarnation is None:
            key, head = await self._live_head(id)
            if seq_nr > head.seq_nr:
                raise InvalidInput(
                    f"{key}: a snapshot at {seq_nr} is beyond the end of the journal, which is at {head.seq_nr}"
                )
            incarnation = head.incarnation
        limit = (await self.topic_config()).limit_bytes
        if len(data) > limit:
            raise TooLarge("the snapshot", size_bytes=len(data), limit_bytes=limit)
        await self._store.save_snapshot(
            key,
            incarnation,
            StoredSnapshot(seq_nr, payload_type, data, self._clock.now_ms()),
            slots=self._settings.snapshot_slots,
        )

    async def load_snapshot(self, id: str, *, to: int = LAST) -> Snapshot | None:
        """Return the newest snapshot at or below `to` of the current incarnation, or None."""
        numbers.seq_nr(to, name="to")
        key, head = await self._head(id)
        if head is None:
            return None
        for stored in await self._store.snapshots(key, head.incarnation):
            if stored.seq_nr <= to:
                payload = decode_payload(stored.payload_type, stored.payload)
                return Snapshot(stored.seq_nr, payload, stored.timestamp_ms)
        return None

    async def snapshots(self, id: str, head: Head) -> Sequence[StoredSnapshot]:
        """Return the snapshots of the incarnation of `head`, the newest first."""
        return await self._store.snapshots(Key(self.topic, journal_id(id)), head.incarnation)

    async def delete_snapshots(self, id: str, *, to: int = LAST) -> None:
        """Delete the snapshots at or below `to`."""
        numbers.seq_nr(to, name="to")
        key, head = await self._live_head(id)
        await self._store.delete_snapshots(key, head.incarnation, to=to)

    async def _live_head(self, id: str) -> tuple[Key, Head]:
        key, head = await self._head(id)
        if head is None:
            raise NotFound(f"{key}: there is no such journal")
        return key, head

    async def adopt(self) -> TopicConfig:
        """Accept a recreated or restored log: a new epoch starts from the state in the store."""
        refuse_fork(self._generation, f"topic {self.topic}")
        async with self._opening:
            config = await adopt_topic(self._log, self._store, self.topic, self._settings)
            if self._open is not None and self._open.config != config:
                await self.close()
            return config

    async def close(self) -> None:
        """Stop following the log."""
        topic, self._open = self._open, None
        if topic is not None:
            await topic.close()

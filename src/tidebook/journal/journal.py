"""The journals of one topic."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from tidebook.core import seq_nr as numbers
from tidebook.core.action import Append, Delete, Purge
from tidebook.core.clock import Clock, Ids
from tidebook.core.errors import InvalidInput, LogLost, NotFound, OutcomeUnknown, TidebookError, TooLarge, Truncated
from tidebook.core.event import Event, ReadEvent
from tidebook.core.head import Head
from tidebook.core.key import Key, journal_id, topic_name
from tidebook.core.metrics import Metrics
from tidebook.core.payload import encode_payload
from tidebook.core.record import encode_record
from tidebook.core.seq_nr import FIRST, LAST
from tidebook.core.topic import TopicFacts
from tidebook.journal.append import Pending, Together, append_action, check_append_id, floor_of
from tidebook.journal.head_cache import HeadCache
from tidebook.journal.many import AHEAD_MAX, Checked, at_once, pairs
from tidebook.journal.outcome import Appended
from tidebook.journal.settings import BarrierKind, JournalSettings
from tidebook.journal.snapshots import Snapshot, read_snapshot
from tidebook.journal.topic import OpenPartition, OpenTopic, adopt_topic, open_topic
from tidebook.log.port import Log, Many, Outgoing
from tidebook.store.port import Snapshot as KeptSnapshot
from tidebook.store.port import StoreWriter

#: Heads that are asked for together, where a call names many journals.
HEADS_AT_ONCE = 256


class Journal:
    """All journals of a topic, by id.

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
    ) -> None:
        self.topic = topic_name(topic)
        self._log = log
        self._store = store
        self._clock = clock
        self._ids = ids
        self._settings = settings or JournalSettings()
        self._metrics = metrics or Metrics()
        self._open: OpenTopic | None = None
        self._opening = asyncio.Lock()

    async def _opened(self, check: Callable[[TopicFacts], object] | None = None) -> OpenTopic:
        """The topic, open. What `check` refuses, by the facts that hold or would hold, makes no topic."""
        if self._open is None:
            async with self._opening:
                if self._open is None:
                    facts = await self._store.facts(self.topic)
                    if check is not None:
                        check(facts or self._settings.facts("", self._settings.partitions))
                    self._open = await open_topic(
                        self._log, self._store, self.topic, facts, self._settings, self._metrics
                    )
        return self._open

    async def _at(self, id: str) -> tuple[Key, OpenPartition]:
        key = Key(self.topic, journal_id(id))
        topic = self._open or await self._opened()
        return key, topic.partition(key.id)

    async def facts(self) -> TopicFacts:
        """The frozen facts of the topic."""
        return (await self._opened()).facts

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
    ) -> Appended:
        """Append events atomically and answer when the outcome is known.

        `expected` is the number the journal must stand at, `at` the number the first event gets (numbers may be
        skipped); with neither, they follow the last. `retry` takes the OutcomeUnknown of an earlier try.
        With `confirm=False` it answers at the log's acknowledgement, with numbers only where they are known by then.
        """
        topic = self._open
        if topic is None:
            given = (events, expected, at, expire_after, append_id, retry)
            topic = await self._opened(partial(self._check, [(id, *given)]))
        partition, raw = topic.address(id)
        action, value = self._record(topic.facts, events, expected, at, expire_after, append_id, retry)
        cache = partition.cache
        if not confirm:
            if topic.due:
                topic.check_epoch()
        elif not cache.known(id):
            await cache.head(id)  # known before the send, so the outcome is known at the acknowledgement
        future: asyncio.Future[Appended] = topic.loop.create_future()
        record = Outgoing(self.topic, partition.number, raw, value)
        Pending(cache, id, action, record, confirm, future).send(self._log)
        return await future

    async def append_many(
        self, items: Iterable[tuple[str, Sequence[Event]]], *, confirm: bool = True
    ) -> list[Appended | TidebookError]:
        """Append to many journals in one call; each is atomic by itself, and an error stands in its own place.

        Bad input in any of them raises before anything is sent.
        """
        ids, appends = pairs(items)
        topic = self._open or await self._opened(partial(self._check, zip(ids, appends, strict=True)))
        addresses = topic.addresses(ids)
        checked = Checked(appends, topic.facts, lambda events: self._record(topic.facts, events)[1])
        if confirm:
            caches = {id: partition.cache for id, (partition, _) in zip(ids, addresses, strict=True)}
            if unresolved := await self._resolve(caches):
                others = [(id, events) for id, events in zip(ids, appends, strict=True) if id not in unresolved]
                answers = iter(await self.append_many(others))
                return [unresolved[id] if id in unresolved else next(answers) for id in ids]
        elif topic.due:
            topic.check_epoch()
        outcomes: list[Appended | TidebookError] = []
        sent: deque[Together] = deque()
        for some in at_once(len(ids)):
            places = addresses[some]
            partitions, keys = [partition.number for partition, _ in places], [key for _, key in places]
            many = Many(self.topic, partitions, keys, checked.values(some, self._ids))
            of_partitions = {partition.number: partition.cache for partition, _ in places}
            together = Together(ids[some], of_partitions, many, confirm=confirm)
            together.send(self._log)
            sent.append(together)
            await asyncio.sleep(0)  # the log takes them while the next are made
            if len(sent) > AHEAD_MAX:
                outcomes += await sent.popleft().told()
        for together in sent:
            outcomes += await together.told()
        return outcomes

    async def _resolve(self, ids: Mapping[str, HeadCache]) -> dict[str, TidebookError]:
        """Learn the heads that are not at hand, some at a time; why not, where one cannot be learned."""
        unknown = [(id, cache) for id, cache in ids.items() if not cache.known(id)]
        failed: dict[str, TidebookError] = {}
        for start in range(0, len(unknown), HEADS_AT_ONCE):
            some = unknown[start : start + HEADS_AT_ONCE]
            found = await asyncio.gather(*(cache.head(id) for id, cache in some), return_exceptions=True)
            for (id, _), result in zip(some, found, strict=True):
                if isinstance(result, TidebookError):
                    failed[id] = result
                elif isinstance(result, BaseException):
                    raise result
            if len(failed) >= start + len(some):  # nothing answers: the rest would wait as long, and in vain
                error = failed[some[-1][0]]
                failed.update((id, error) for id, _ in unknown[start + len(some) :])
                break
        return failed

    def _check(self, appends: Iterable[tuple[Any, ...]], facts: TopicFacts) -> None:
        """What would be refused is refused, before there is a topic."""
        for id, *given in appends:
            journal_id(id)
            self._record(facts, *given)

    def _record(
        self,
        facts: TopicFacts,
        events: Sequence[Event],
        expected: int | None = None,
        at: int | None = None,
        expire_after: timedelta | int | None = None,
        append_id: bytes | None = None,
        retry: OutcomeUnknown | None = None,
    ) -> tuple[Append, bytes]:
        """Check what was given and make the record of it."""
        floor = None
        if retry is not None:
            if append_id is not None or getattr(retry, "append_id", None) is None:
                raise InvalidInput("retry takes the OutcomeUnknown of an append, and no append_id beside it")
            append_id, floor = retry.append_id, floor_of(retry, facts.epoch)
        append_id = self._ids.new() if append_id is None else check_append_id(append_id)
        action = append_action(events, facts.epoch, append_id, expected, at, expire_after, floor)
        return action, encode_record(action, limit_bytes=facts.limit_bytes)

    async def delete(self, id: str, *, to: int) -> None:
        """Delete the events up to and including `to`, never future ones; on no journal, it starts one behind `to`."""
        numbers.seq_nr(to, name="to")
        key, partition = await self._at(id)
        head = await partition.reader.head(key, self._settings.barrier)
        incarnation = head.incarnation if head is not None and head.live else None
        await partition.cache.write(Delete(partition.cache.facts.epoch, to, incarnation), key.id)

    async def purge(self, id: str) -> None:
        """Remove the journal altogether; the next append begins a new one from 1. Nothing there is nothing to do."""
        key, partition = await self._at(id)
        await partition.cache.write(Purge(partition.cache.facts.epoch), key.id)

    async def purge_expired(self, id: str, head: Head) -> bool:
        """Purge the journal only if its head still stands where it stood: a fresh append always wins.

        False where it was seen to have moved already, so that a purge waiting for replication is not repeated.
        """
        key, partition = await self._at(id)
        now = await partition.cache.head(key.id)
        if now is None or not now.live or now.position != head.position:
            return False
        await partition.cache.write(Purge(partition.cache.facts.epoch, head.position), key.id)
        return True

    # ---- reading

    def read(
        self, id: str, *, start: int = FIRST, end: int = LAST, barrier: BarrierKind | None = None
    ) -> AsyncIterator[ReadEvent]:
        """The journal's events with start ≤ seq_nr ≤ end, in order, as of a moment after this call began."""
        numbers.seq_nr(start, name="start")
        numbers.seq_nr(end, name="end")
        if self._open is None:
            return self._read(journal_id(id), start, end, self._kind(barrier))
        reader = self._open.partition(journal_id(id)).reader
        return reader.events(Key(self.topic, id), start=start, to=end, kind=self._kind(barrier))

    async def _read(self, id: str, start: int, end: int, kind: BarrierKind) -> AsyncIterator[ReadEvent]:
        key, partition = await self._at(id)
        async for event in partition.reader.events(key, start=start, to=end, kind=kind):
            yield event

    def tail(self, id: str, *, start: int = FIRST) -> AsyncIterator[ReadEvent]:
        """The journal's events from `start`, then each new one as it is appended; it ends only when it is closed.

        After a purge it goes on with the events of the next life.
        """
        numbers.seq_nr(start, name="start")
        return self._tail(journal_id(id), start)

    async def _tail(self, id: str, start: int) -> AsyncIterator[ReadEvent]:
        key, partition = await self._at(id)
        life = None
        cursor = start - 1
        kind = self._settings.barrier
        while True:
            view = await partition.reader.view(key, kind)
            kind = "offset"  # marks of many followers would wake one another for ever
            head = view.head
            if head is not None and head.live:
                if life is not None and head.incarnation != life:
                    cursor = 0
                life, cursor = head.incarnation, max(cursor, head.delete_to)
                if head.seq_nr > cursor:
                    new = partition.reader.events(key, start=cursor + 1, to=LAST, kind="offset", life=life)
                    try:
                        async for event in new:
                            cursor = event.seq_nr
                            yield event
                    except Truncated:
                        continue  # deleted or purged under it: go on with what is there
            await self._log.wait(self.topic, partition.number, offset=view.as_of + 1)

    async def pointer(self, id: str, *, barrier: BarrierKind | None = None) -> int | None:
        """The last seq_nr, or None where there is no journal."""
        key, partition = await self._at(id)
        head = await partition.reader.head(key, self._kind(barrier))
        return head.seq_nr if head is not None and head.live else None

    async def ids(self) -> AsyncIterator[str]:
        """The ids of all journals of the topic, each once, in no order."""
        topic = await self._opened()
        touched: set[str] = set()
        for partition in topic.partitions:
            touched |= await self._touched(partition)
        async for id in self._store.ids(self.topic):
            if id not in touched:
                yield id
        for id in touched:
            head = await topic.partition(id).cache.head(id)
            if head is not None and head.live:
                yield id

    async def _touched(self, partition: OpenPartition) -> set[str]:
        """The ids that the unreplicated tail speaks of."""
        barrier = await partition.barriers.fix(self._settings.barrier)
        await partition.cache.reach(barrier)
        found: set[str] = set()
        start = await partition.cache.replicated() + 1
        while start <= barrier:
            try:
                batch = await self._log.read(self.topic, partition.number, start=start, stop=barrier + 1)
            except LogLost:
                replicated = await partition.cache.replicated()
                if replicated < start:
                    raise
                start = replicated + 1
                continue
            found.update(id for record in batch.records if (id := _named(record.key)) is not None)
            start = batch.next_offset
        return found

    def _kind(self, barrier: BarrierKind | None) -> BarrierKind:
        if barrier is None:
            return self._settings.barrier
        if barrier not in ("mark", "offset"):
            raise InvalidInput(f"barrier is 'mark' or 'offset', not {barrier!r}")
        return barrier

    # ---- snapshots

    async def save_snapshot(self, id: str, *, seq_nr: int, payload: object) -> None:
        """Save a state as of `seq_nr`, which must exist; the same number overwrites, and only the newest slots stay."""
        numbers.seq_nr(seq_nr)
        payload_type, data = encode_payload(payload)
        key, head = await self._live(id)
        if seq_nr > head.seq_nr:
            raise InvalidInput(f"{key}: a snapshot at {seq_nr} lies beyond the journal, which stands at {head.seq_nr}")
        limit = (await self.facts()).limit_bytes
        if len(data) > limit:
            raise TooLarge("the snapshot", size_bytes=len(data), limit_bytes=limit)
        await self._store.save_snapshot(
            key,
            head.incarnation,
            KeptSnapshot(seq_nr, payload_type, data, self._clock.now_ms()),
            slots=self._settings.snapshot_slots,
        )

    async def load_snapshot(self, id: str, *, to: int = LAST) -> Snapshot | None:
        """The newest snapshot at or below `to` of the journal as it lives now, or None."""
        numbers.seq_nr(to, name="to")
        key, partition = await self._at(id)
        head = await partition.reader.head(key, self._settings.barrier)
        if head is None or not head.live:
            return None
        kept = await self._store.snapshots(key, head.incarnation)
        return next((read_snapshot(each) for each in kept if each.seq_nr <= to), None)

    async def delete_snapshots(self, id: str, *, to: int = LAST) -> None:
        """Remove the snapshots at or below `to`."""
        numbers.seq_nr(to, name="to")
        key, head = await self._live(id)
        await self._store.delete_snapshots(key, head.incarnation, to=to)

    async def _live(self, id: str) -> tuple[Key, Head]:
        key, partition = await self._at(id)
        head = await partition.reader.head(key, self._settings.barrier)
        if head is None or not head.live:
            raise NotFound(f"{key}: there is no such journal")
        return key, head

    async def adopt(self) -> TopicFacts:
        """Accept the log as it is after it was re-made or restored: a new epoch begins on what the store has."""
        async with self._opening:
            facts = await adopt_topic(self._log, self._store, self.topic, self._settings)
            if self._open is not None and self._open.facts != facts:
                await self.close()
            return facts

    async def close(self) -> None:
        """Stop following the log."""
        topic, self._open = self._open, None
        if topic is not None:
            await topic.close()


def _named(key: bytes | None) -> str | None:
    """The id that a record's key names, if it can be one: anybody may write to a log."""
    try:
        return None if key is None else journal_id(key.decode())
    except (UnicodeDecodeError, InvalidInput):
        return None

"""The head cache of one partition: exact heads as of the tail, and the unreplicated records of each journal.

Invariant: the tail is contiguous. Every record below `next_offset` was taken, in order, so a cached head is exact as of
`next_offset - 1`. There are three tiers, each bounded: heads, offsets by journal, and records. What a tier has evicted
is read again from the store or the log; the cache never holds the only copy.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TypeVar

from tidebook.core.action import Action, Append, Damaged
from tidebook.core.errors import LogLost, TidebookError, Unavailable
from tidebook.core.fold import Change, fold
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.record import encode_record, has_other_version
from tidebook.core.replication_plan import Pointer
from tidebook.core.topic_config import TopicConfig
from tidebook.journal.head_lru import HeadLru
from tidebook.journal.log_identity import LogIdentity
from tidebook.journal.pointer_cache import PointerCache
from tidebook.journal.replicated_state import ReplicatedState
from tidebook.journal.settings import JournalSettings
from tidebook.journal.tail import JournalTail, journal_of, read_action
from tidebook.journal.unreplicated import Unreplicated
from tidebook.log.port import Acknowledged, Log, Outgoing, Record, read_page
from tidebook.runtime.futures import ignore_failure, resolve_future
from tidebook.runtime.metrics import Metrics
from tidebook.store.port import StoreReader

#: If the log is indexed by key and more records than this are missing, the tail is restarted instead of read.
CATCH_UP_RECORDS_MAX = 2_000

#: How often a followed partition drops what was replicated since.
DROP_INTERVAL_S = 5.0

T = TypeVar("T")

#: An attempt of an append: its offset, and the change that the fold computed for it.
Attempt = tuple[int, Change]


class HeadCache:
    """The heads and the tail of one partition."""

    def __init__(
        self,
        log: Log,
        store: StoreReader,
        topic: str,
        partition: int,
        config: TopicConfig,
        settings: JournalSettings,
        metrics: Metrics,
    ) -> None:
        self._log = log
        self._store = store
        self.topic = topic
        self.partition = partition
        self.config = config
        self._settings = settings
        self._metrics = metrics
        #: The next offset to take; -1 before the tail has begun.
        self.next_offset = -1
        #: The highest offset that was acknowledged to this process or read by it; never below `next_offset - 1`.
        self.seen = -1
        self.identity = LogIdentity(topic, partition)
        self._heads = HeadLru(count_max=settings.cached_heads_max, bytes_max=settings.cached_head_bytes_max)
        self._unreplicated = Unreplicated(offsets_max=settings.cached_offsets_max, bytes_max=settings.cached_bytes_max)
        #: The last folded attempt of each append of this process whose outcome is not known yet, by append id.
        self.pending_outcomes: dict[bytes, Attempt | None] = {}
        self._resolving: dict[str, asyncio.Task[Head | None]] = {}
        self._reach_task: asyncio.Task[None] | None = None
        self._follower: asyncio.Task[None] | None = None
        self._used_at = 0.0
        self._competed_at = -math.inf
        self._begin_lock = asyncio.Lock()
        self._closed = False
        self._pointers = PointerCache(store, topic, partition)

    # ---- the tail

    async def begin(self) -> None:
        """Begin the tail: at the log's end if the log is indexed by key, else after the store's pointer."""
        if self.next_offset >= 0:
            return
        async with self._begin_lock:
            if self.next_offset >= 0:
                return
            if self._log.indexed_by_key:
                first = await self._log.end(self.topic, self.partition)
            else:
                first = await self.replicated() + 1
            self.next_offset = first
            self._unreplicated.begin(first)
            self.seen = max(self.seen, first - 1)

    async def reach(self, offset: int, *, follow: bool = True) -> None:
        """Take every record up to and including `offset`; with `follow`, keep following the log for a while."""
        self._used_at = time.monotonic()
        if self.next_offset < 0:
            await self.begin()
        if self.next_offset > offset:
            return
        if self._closed:
            raise self._closed_error()
        if self._log.indexed_by_key:
            if offset - self.next_offset >= CATCH_UP_RECORDS_MAX:
                self._metrics.count("head_cache_forgotten")
                self._restart_tail(offset + 1)
            else:
                await self._take_through(offset)
            return
        if follow:
            self._start_following()
        while self.next_offset <= offset:
            if self._reach_task is None or self._reach_task.done():
                self._reach_task = asyncio.create_task(self._take_through(offset))
                self._reach_task.add_done_callback(ignore_failure)
            await self._await_shared(self._reach_task)

    async def _await_shared(self, task: asyncio.Task[T]) -> T:
        """Await a task that other callers may share; raise Unavailable if `close` cancelled it, not the caller."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            waiting = asyncio.current_task()
            if not task.cancelled() or (waiting is not None and waiting.cancelling()):
                raise
            raise self._closed_error() from None

    def _closed_error(self) -> Unavailable:
        return Unavailable(f"{self.topic}/{self.partition}: the journal was closed meanwhile: open it again")

    def note_competing_writer(self) -> bool:
        """Record that another writer's record preceded one of ours; return whether that happened recently before, too.

        A single occurrence does not justify following the log: a follower also receives all records of its own process.
        """
        before, self._competed_at = self._competed_at, time.monotonic()
        return self._competed_at - before < self._settings.follow_s

    def _restart_tail(self, next_offset: int) -> None:
        self._heads.clear()
        self._unreplicated.begin(next_offset)
        self.next_offset = next_offset
        self.seen = max(self.seen, next_offset - 1)

    async def _take_through(self, offset: int) -> None:
        """Read and take the records up to `offset`; calls may run concurrently, because the tail never moves back."""
        while self.next_offset <= offset:
            start = self.next_offset
            try:
                batch = await read_page(self._log, self.topic, self.partition, start=start, stop=offset + 1)
            except LogLost:
                # The log may have been truncated after replication: only what the store does not have is lost.
                replicated = await self.replicated()
                if replicated < await self._log.start(self.topic, self.partition) - 1:
                    raise
                if self.next_offset == start:  # otherwise a concurrent call met this too, and moved the tail
                    if replicated < start:
                        raise
                    self._restart_tail(replicated + 1)
                continue
            for record in batch.records:
                if record.offset >= self.next_offset:  # its acknowledgement may have come first
                    self.take(record)
            self.next_offset = max(self.next_offset, batch.next_offset)
            self.seen = max(self.seen, self.next_offset - 1)

    def _start_following(self) -> None:
        if self._follower is None or self._follower.done():
            self._follower = asyncio.create_task(self._follow_log())

    async def _follow_log(self) -> None:
        """Keep the tail at the log's end while the partition is in use, so that reads need not wait for it."""
        dropped_at = time.monotonic()
        while time.monotonic() - self._used_at < self._settings.follow_s:
            try:
                waited = self.next_offset
                news = await self._log.wait(self.topic, self.partition, offset=waited, timeout_s=DROP_INTERVAL_S)
                if news and self.next_offset == waited:  # otherwise the record was our own, and is taken already
                    await self._take_through(await self._log.end(self.topic, self.partition) - 1)
                if time.monotonic() - dropped_at > DROP_INTERVAL_S:
                    await self._drop_replicated()
                    dropped_at = time.monotonic()
            except TidebookError:
                self._metrics.count("head_cache_follow_failed")
                return  # the next use of the partition starts again and meets the error itself

    async def _drop_replicated(self) -> None:
        replicated = await self.replicated()
        if replicated >= self._unreplicated.base:
            while self._unreplicated.drop_below(replicated + 1):  # noqa: ASYNC110 - only yields to other tasks
                await asyncio.sleep(0)

    def take(self, record: Record) -> None:
        """Take the next record of the tail: fold it if its head is cached, and index it.

        Raise for a record of a newer format or epoch, every time: the tail does not advance past it.
        """
        id = journal_of(record)
        known = id in self._heads
        action = None
        if known or record.key is None or has_other_version(record.value):
            action = read_action(record, self.config)
        self.next_offset = record.offset + 1
        self.seen = max(self.seen, record.offset)
        if id is None:
            return
        if not self._log.indexed_by_key:
            self._unreplicated.add(id, record)
        if known and action is not None:
            self._fold(id, action, record.offset, record.timestamp_ms)

    def take_own(self, sent: Acknowledged, record: Outgoing, id: str | None, action: Action) -> Change | None:
        """Take a record that this process has just written, without decoding it, if it is the next one of the tail.

        Return its change, or None if it could not be folded.
        """
        offset = sent.offset
        if offset > self.seen:
            self.seen = offset
        if offset != self.next_offset:
            return None
        self.next_offset = offset + 1
        if id is None:
            return None
        if not self._log.indexed_by_key:
            self._unreplicated.add(id, Record(offset, sent.timestamp_ms, record.key, record.value))
        return self._fold(id, action, offset, sent.timestamp_ms) if id in self._heads else None

    async def write(self, action: Action, id: str | None = None) -> tuple[Acknowledged, Change | None]:
        """Write a record other than an append and take it; return its change, or None if that is not known yet."""
        self.identity.check()
        value = encode_record(action, limit_bytes=self.config.limit_bytes)
        outgoing = Outgoing(self.topic, self.partition, None if id is None else id.encode(), value)
        future: asyncio.Future[tuple[Acknowledged, Change | None]] = asyncio.get_running_loop().create_future()
        sent_after = self.seen

        def on_sent(sent: Acknowledged | TidebookError) -> None:
            if isinstance(sent, TidebookError):
                resolve_future(future, sent)
            elif self.identity.is_recreated(sent.offset, sent_after):
                resolve_future(future, self.identity.error())
            else:
                resolve_future(future, (sent, self.take_own(sent, outgoing, id, action)))

        self._log.send(outgoing, on_sent)
        return await future

    def _fold(self, id: str, action: Action | Damaged, offset: int, timestamp_ms: int) -> Change | None:
        head, position = self._heads[id], Position(self.config.epoch, offset)
        if head is not None and position <= head.position:
            return None  # the store was ahead of the tail when this head was read
        after, change = fold(head, action, position, timestamp_ms, self.config)
        self._heads.keep(id, after)
        if type(action) is Append and action.append_id in self.pending_outcomes:
            self.pending_outcomes[action.append_id] = (offset, change)
        return change

    # ---- records and heads of one journal

    async def replicated(self) -> int:
        """Return the last offset of this epoch that is replicated, or -1."""
        return ReplicatedState(await self._pointers.fetch(), None, self.config.epoch).as_of

    async def stored(self, key: Key) -> ReplicatedState:
        """Return the state in the store; the pointer is read before the head."""
        pointer = await self._pointers.fetch()
        return ReplicatedState(pointer, await self._store.head(key), self.config.epoch)

    async def recent_pointer(self) -> Pointer | None:
        """Return the store's pointer, which may be a moment old."""
        return await self._pointers.recent(self._unreplicated.base)

    async def fold_tail(self, key: Key, tail: JournalTail, *, after: int, to: int) -> None:
        """Fold the journal's records with after < offset ≤ to onto `tail`."""
        if not self._log.indexed_by_key:
            found = self._unreplicated.find(key.id, after, to) if to < self.next_offset else None
            if found is not None:
                for record in found:
                    tail.take(record)
                return
            self._metrics.count("tail_read_from_log")
        raw, start = key.id.encode(), after + 1
        while start <= to:
            batch = await read_page(self._log, self.topic, self.partition, start=start, stop=to + 1, key=raw)
            for record in batch.records:
                tail.take(record)
            start = batch.next_offset

    def known(self, id: str) -> bool:
        """Return whether the head is cached, and so exact as of the tail."""
        return id in self._heads

    def incarnation_start(self, id: str) -> int | None:
        """Return the offset at which the incarnation of a cached head began, or None if the tail starts after it."""
        if id not in self._heads:
            return None
        head = self._heads[id]
        if head is None:
            return self.next_offset
        incarnation = head.incarnation
        return (
            incarnation.offset
            if incarnation.epoch == self.config.epoch and incarnation.offset >= self._unreplicated.base
            else None
        )

    def cached(self, id: str) -> Head | None:
        """Return the head of an id that is `known`."""
        return self._heads[id]

    def replicated_head(self, id: str, pointer: Pointer | None) -> Head | None:
        """Return the cached head if the journal is live and the store has everything that the head describes."""
        head = self._heads.get(id)
        if head is None or not head.live or pointer is None or head.position > pointer.position:
            return None
        return head

    def remember_head(self, id: str, head: Head | None, as_of: int) -> None:
        """Cache a head that a read has folded up to `as_of`, if the tail has begun and does not extend beyond that.

        A tail that has not begun may begin after `as_of`, and the records between would never be folded.
        """
        if id not in self._heads and 0 <= self.next_offset <= as_of + 1:
            self._heads.keep(id, head)

    async def head(self, id: str) -> Head | None:
        """Return the head as of the tail, from the cache or else from the store and the log."""
        self.identity.check()
        if id in self._heads:
            self._heads.move_to_end(id)
            return self._heads[id]
        if self.next_offset < 0:
            await self.begin()
        if self._log.indexed_by_key:
            return await self._resolve(id)
        task = self._resolving.get(id)
        if task is None:
            task = self._resolving[id] = asyncio.create_task(self._resolve(id))
            task.add_done_callback(ignore_failure)
            task.add_done_callback(lambda _: self._resolving.pop(id, None))
        return await self._await_shared(task)

    async def _resolve(self, id: str) -> Head | None:
        key = Key(self.topic, id)
        stored = await self.stored(key)
        while True:
            tail = _OutcomeTail(stored.head, self.config, self.pending_outcomes)
            try:
                await self._catch_up(key, tail, stored.as_of)
                break
            except LogLost:
                # The records are gone: harmless if they were replicated since.
                before, stored = stored, await self.stored(key)
                if stored.as_of <= before.as_of:
                    raise
        self._metrics.count("head_cache_resolved")
        self._heads.keep(id, tail.head)
        return tail.head

    async def _catch_up(self, key: Key, tail: JournalTail, reached: int) -> None:
        while reached < self.next_offset - 1:  # the tail may advance while records are read
            to = self.next_offset - 1
            await self.fold_tail(key, tail, after=reached, to=to)
            reached = to

    # ---- appends of this process

    def outcome(self, append_id: bytes, offset: int) -> Change | None:
        """Return the change of a pending append's attempt at this offset, if the tail has folded it."""
        attempt = self.pending_outcomes.get(append_id)
        return attempt[1] if attempt is not None and attempt[0] == offset else None

    async def close(self) -> None:
        """Stop following; calls that still wait raise Unavailable."""
        self._closed = True
        tasks = [each for each in (self._follower, self._reach_task, *self._resolving.values()) if each is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _OutcomeTail(JournalTail):
    """A tail that keeps no events, and records the changes of this process's pending appends."""

    def __init__(self, head: Head | None, config: TopicConfig, pending_outcomes: dict[bytes, Attempt | None]) -> None:
        super().__init__(head, config, bytes_max=0)
        self._pending_outcomes = pending_outcomes

    def take(self, record: Record) -> Change:
        change = super().take(record)
        if type(self.action) is Append and self.action.append_id in self._pending_outcomes:
            self._pending_outcomes[self.action.append_id] = (record.offset, change)
        return change

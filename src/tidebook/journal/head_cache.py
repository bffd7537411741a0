"""The head cache of one partition: exact heads as of the tail, and the unreplicated records of each journal.

Invariant: the tail is contiguous. Every record below `next_offset` was taken, in order, so a cached head is exact as of
`next_offset - 1`. There are three tiers, each bounded: heads, offsets by journal, and records. An evicted entry
is read again from the store or the log; the cache never holds the only copy.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, TypeVar

from tidebook.core.action import Action, Append, Damaged
from tidebook.core.errors import Corrupt, LogLost, TidebookError, Unavailable
from tidebook.core.fold import Change, fold
from tidebook.core.head import Head
from tidebook.core.key import Key, journal_of
from tidebook.core.position import Position
from tidebook.core.record import encode_record, has_other_version
from tidebook.core.replication_plan import Pointer, first_unreplicated_offset
from tidebook.core.topic_config import TopicConfig
from tidebook.journal.settings import JournalSettings
from tidebook.journal.unreplicated import Unreplicated
from tidebook.journal.view import ReadView, ViewBase, read_action, stored_base
from tidebook.log.port import Acknowledged, Log, Outgoing, Record, read_page
from tidebook.runtime.futures import ignore_failure, resolve_future
from tidebook.runtime.metrics import Metrics
from tidebook.store.port import StoreReader

#: The measured memory of the parts of a head: the head with its cache entry, each recent append, each jump.
HEAD_BYTES: Final = 600
RECENT_BYTES: Final = 240
JUMP_BYTES: Final = 100
#: The memory of each tag without its characters.
TAG_BYTES: Final = 110


class HeadLru(OrderedDict[str, Head | None]):
    """Heads by journal id; None means that the journal does not exist.

    It is a dict, so that a lookup needs no Python call. Only `keep` may add heads: it maintains `bytes_held`.
    """

    def __init__(self, *, count_max: int, bytes_max: int) -> None:
        super().__init__()
        self._count_max = count_max
        self._bytes_max = bytes_max
        self.bytes_held = 0

    def keep(self, id: str, head: Head | None) -> None:
        """Store a head as the most recently used one, and evict others; the newest stays, however large it is."""
        if id in self:
            growth = _memory_growth(self[id], head)
            self[id] = head
            self.move_to_end(id)
        else:
            growth = len(id) + _memory_bytes(head)
            self[id] = head
        if growth:  # usually zero, and every append calls this
            self.bytes_held += growth
            self._evict()

    def _evict(self) -> None:
        while len(self) > 1 and (self.bytes_held > self._bytes_max or len(self) > self._count_max):
            id, oldest = self.popitem(last=False)
            self.bytes_held -= len(id) + _memory_bytes(oldest)

    def clear(self) -> None:
        """Remove all heads."""
        super().clear()
        self.bytes_held = 0


def _memory_bytes(head: Head | None) -> int:
    if head is None:
        return HEAD_BYTES
    tags = head.tag_counts
    tags_bytes = sum(map(len, tags)) + TAG_BYTES * len(tags) if tags else 0
    return HEAD_BYTES + RECENT_BYTES * len(head.recent) + JUMP_BYTES * len(head.jumps) + tags_bytes


def _memory_growth(before: Head | None, after: Head | None) -> int:
    """Return the difference in memory; add up the tags, of which there may be thousands, only if they have changed."""
    if before is None or after is None or before.tag_counts is not after.tag_counts:
        return _memory_bytes(after) - _memory_bytes(before)
    recent, jumps = len(after.recent) - len(before.recent), len(after.jumps) - len(before.jumps)
    return RECENT_BYTES * recent + JUMP_BYTES * jumps


#: If the log is indexed by key and more records than this are missing, the tail is restarted instead of read.
CATCH_UP_RECORDS_MAX = 2_000

#: How often a followed partition drops the records that were replicated since.
DROP_INTERVAL_S = 5.0
#: The age up to which a read may start from a known pointer: the older it is, the longer the tail that is folded.
RECENT_S_MAX = 1.0

T = TypeVar("T")

#: An attempt of an append: its offset, and the change that the fold computed for it.
Attempt = tuple[int, Change]


def adopt_hint(topic: str) -> str:
    """Return the hint for a store that is ahead of the log, or was filled from another one."""
    return f"to keep this log, run 'tidebook journal adopt {topic}': it starts a new epoch from the store's state"


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
        #: Proof that the log was recreated: an offset that it assigned, and a higher or equal one that was seen before.
        #: It is never cleared: the new log may grow past the old one and then look like it.
        self.recreated: tuple[int, int] | None = None
        #: Heads by id, exact as of the tail. Only `HeadCache` adds to them.
        self.heads = HeadLru(count_max=settings.cached_heads_max, bytes_max=settings.cached_head_bytes_max)
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
        #: The pointer of the store when it was last read.
        self.known_pointer: Pointer | None = None
        self._pointer_read_at = -math.inf

    # ---- the tail

    async def begin(self) -> None:
        """Begin the tail, once: at the log's end if the log is indexed by key, else after the store's pointer."""
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
        await self.begin()
        if self.next_offset > offset:
            return
        if self._closed:
            raise self._closed_error()
        if self._log.indexed_by_key:
            if offset - self.next_offset >= CATCH_UP_RECORDS_MAX:
                self._metrics.count("head_cache_reset")
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
        return Unavailable(f"{self.topic}/{self.partition}: the journal was closed during the call: open it again")

    def note_competing_writer(self) -> bool:
        """Record that another writer's record preceded one of ours; return whether this had already happened recently.

        A single occurrence does not justify following the log: a follower also receives all records of its own process.
        """
        before, self._competed_at = self._competed_at, time.monotonic()
        return self._competed_at - before < self._settings.follow_s

    def _restart_tail(self, next_offset: int) -> None:
        self.heads.clear()
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
                # The log may have been truncated after replication: only records that the store lacks are lost.
                replicated = await self.replicated()
                if replicated < await self._log.start(self.topic, self.partition) - 1:
                    raise
                if self.next_offset == start:  # otherwise a concurrent call has moved the tail
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
                next_offset = self.next_offset
                has_new = await self._log.wait(
                    self.topic, self.partition, offset=next_offset, timeout_s=DROP_INTERVAL_S
                )
                if has_new and self.next_offset == next_offset:  # otherwise this process wrote the record and took it
                    await self._take_through(await self._log.end(self.topic, self.partition) - 1)
                if time.monotonic() - dropped_at > DROP_INTERVAL_S:
                    await self._drop_replicated()
                    dropped_at = time.monotonic()
            except TidebookError:
                self._metrics.count("head_cache_follow_failed")
                return  # the next use of the partition starts again and gets the error itself

    async def _drop_replicated(self) -> None:
        replicated = await self.replicated()
        if replicated >= self._unreplicated.base:
            while self._unreplicated.drop_below(replicated + 1):  # noqa: ASYNC110 - only yields to other tasks
                await asyncio.sleep(0)

    def take(self, record: Record) -> None:
        """Take the next record of the tail: fold it if its head is cached, and index it.

        Raise for a record of a newer format or epoch, every time: the tail does not advance past it.
        """
        id = journal_of(record.key, self.partition, self.config.partitions)
        known = id in self.heads
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
        return self._fold(id, action, offset, sent.timestamp_ms) if id in self.heads else None

    async def write(self, action: Action, id: str | None = None) -> tuple[Acknowledged, Change | None]:
        """Write a record other than an append and take it; return its change, or None if that is not known yet."""
        self.check_log()
        value = encode_record(action, limit_bytes=self.config.limit_bytes)
        outgoing = Outgoing(self.topic, self.partition, None if id is None else id.encode(), value)
        future: asyncio.Future[tuple[Acknowledged, Change | None]] = asyncio.get_running_loop().create_future()
        sent_after = self.seen

        def on_sent(sent: Acknowledged | TidebookError) -> None:
            if isinstance(sent, TidebookError):
                resolve_future(future, sent)
            elif self.is_recreated(sent.offset, sent_after):
                resolve_future(future, self.recreated_error())
            else:
                resolve_future(future, (sent, self.take_own(sent, outgoing, id, action)))

        self._log.send(outgoing, on_sent)
        return await future

    def _fold(self, id: str, action: Action | Damaged, offset: int, timestamp_ms: int) -> Change | None:
        head, position = self.heads[id], Position(self.config.epoch, offset)
        if head is not None and position <= head.position:
            return None  # the store was ahead of the tail when this head was read
        after, change = fold(head, action, position, timestamp_ms, self.config)
        self.heads.keep(id, after)
        self._note_outcome(action, offset, change)
        return change

    def _note_outcome(self, action: Action | Damaged | None, offset: int, change: Change) -> None:
        if type(action) is Append and action.append_id in self.pending_outcomes:
            self.pending_outcomes[action.append_id] = (offset, change)

    # ---- the identity of the log: within one incarnation of a topic, the offsets of new records only rise

    def is_recreated(self, offset: int, sent_after: int) -> bool:
        """Record and return whether the log was recreated: it gave `offset` after `sent_after` had been seen."""
        if offset <= sent_after and self.recreated is None:
            self.recreated = (offset, sent_after)
        return self.recreated is not None

    def check_log(self) -> None:
        """Raise Corrupt if the log was recreated since this process opened it."""
        if self.recreated is not None:
            raise self.recreated_error()

    def recreated_error(self) -> Corrupt:
        """Return the error for a recreated log."""
        assert self.recreated is not None
        offset, seen = self.recreated
        return Corrupt(
            f"{self.topic}/{self.partition}: the log is at offset {offset}, after offset {seen} was seen: its topic "
            "was deleted and created again, or it lost acknowledged records; its records have no effect: open the "
            f"book again; {adopt_hint(self.topic)}"
        )

    # ---- records and heads of one journal

    async def pointer(self) -> Pointer | None:
        """Read the pointer from the store; raise Fenced if it is of a newer epoch."""
        began = time.monotonic()
        pointer = await self._store.pointer(self.topic, self.partition)
        first_unreplicated_offset(pointer, self.topic, self.partition, self.config)
        self.known_pointer, self._pointer_read_at = pointer, began
        return pointer

    async def recent_pointer(self) -> Pointer | None:
        """Return the store's pointer, cached for a second: the older it is, the longer the tail that a read folds."""
        known = self.known_pointer
        is_recent = time.monotonic() - self._pointer_read_at <= RECENT_S_MAX
        return known if is_recent and known and known.position.offset + 1 >= self.tail_start else await self.pointer()

    async def replicated(self) -> int:
        """Return the last offset of this epoch that is replicated, or -1."""
        return first_unreplicated_offset(await self.pointer(), self.topic, self.partition, self.config) - 1

    async def stored(self, key: Key) -> ViewBase:
        """Return the state in the store; the pointer is read before the head."""
        pointer = await self.pointer()
        return stored_base(pointer, await self._store.head(key), self.topic, self.partition, self.config)

    async def stored_after(self, key: Key, as_of: int, error: LogLost) -> ViewBase:
        """Return the state in the store, if it has advanced beyond `as_of`; otherwise raise `error`."""
        base = await self.stored(key)
        if base.as_of <= as_of:
            raise error
        return base

    async def fold_tail(self, key: Key, view: ReadView, to: int, *, note_outcomes: bool = False) -> None:
        """Fold the journal's records after the view up to `to` onto it."""
        in_memory: Sequence[Record] | None = None
        if not self._log.indexed_by_key and view.as_of < to:
            in_memory = self._unreplicated.find(key.id, view.as_of, to) if to < self.next_offset else None
            if in_memory is None:
                self._metrics.count("tail_read_from_log")
        while view.as_of < to:
            records, reached = in_memory, to
            if records is None:
                start, raw = view.as_of + 1, key.id.encode()
                page = await read_page(self._log, self.topic, self.partition, start=start, stop=to + 1, key=raw)
                records, reached = page.records, page.next_offset - 1
            for record in records:
                change = view.take(record)
                if note_outcomes:
                    self._note_outcome(view.action, record.offset, change)
            view.as_of = reached

    @property
    def tail_start(self) -> int:
        """The first offset of the records that the tail still has."""
        return self._unreplicated.base

    def base(self, id: str) -> ViewBase | None:
        """Return the cached head as of the tail, or as of its own position if the store was ahead of the tail."""
        if id not in self.heads:
            return None
        head = self.heads[id]
        as_of = first_unreplicated_offset(head, self.topic, self.partition, self.config) - 1
        return ViewBase(head, max(self.next_offset - 1, as_of))

    def remember_head(self, id: str, head: Head | None, as_of: int) -> None:
        """Cache a head that a read has folded up to `as_of`, if it is exact as of the tail.

        A tail that has not begun may begin after `as_of`, and the records between would never be folded.
        """
        if id in self.heads or self.next_offset < 0:
            return
        if self.next_offset <= as_of + 1 or self._unreplicated.find(id, as_of, self.next_offset - 1) == []:
            self.heads.keep(id, head)

    async def head(self, id: str) -> Head | None:
        """Return the head as of the tail, from the cache or else from the store and the log."""
        self.check_log()
        if id in self.heads:
            self.heads.move_to_end(id)
            return self.heads[id]
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
        base = await self.stored(key)
        while True:
            view = ReadView(base, self.config)
            try:
                while view.as_of < self.next_offset - 1:  # the tail may advance while records are read
                    await self.fold_tail(key, view, self.next_offset - 1, note_outcomes=True)
                break
            except LogLost as error:  # the log lost the records: harmless if they were replicated since
                base = await self.stored_after(key, base.as_of, error)
        self._metrics.count("head_cache_resolved")
        self.heads.keep(id, view.head)
        return view.head

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

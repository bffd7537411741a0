"""What a process knows of one partition: heads as of its tail, and where the unreplicated records of each key lie.

The tail is contiguous: every record below `next_offset` was taken, in order, so a cached head is exact as of
`next_offset - 1`. Three tiers, each bounded: heads, offsets by key, raw records. What a tier has forgotten is
read again from the store or the log; nothing here is ever the only copy.
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
from tidebook.core.metrics import Metrics
from tidebook.core.position import Position
from tidebook.core.record import encode_record, has_other_version
from tidebook.core.replication import Pointer
from tidebook.core.settle import settle
from tidebook.core.topic import TopicFacts
from tidebook.journal.heads import Heads
from tidebook.journal.pointers import Pointers
from tidebook.journal.settings import JournalSettings
from tidebook.journal.stored import Stored
from tidebook.journal.tail import Tail, read_action
from tidebook.journal.unreplicated import Unreplicated
from tidebook.log.port import Log, Outgoing, Record, Sent
from tidebook.store.port import StoreReader

#: Where a log finds records by key, a longer stretch of others' records is not read through but forgotten.
CATCH_UP_RECORDS_MAX = 2_000

#: How often a followed partition forgets what the store has by now.
DROP_EVERY_S = 5.0

T = TypeVar("T")

#: An attempt of an append: its offset, and what came of it.
Met = tuple[int, Change]


class HeadCache:
    """One partition's heads and tail."""

    def __init__(
        self,
        log: Log,
        store: StoreReader,
        topic: str,
        partition: int,
        facts: TopicFacts,
        settings: JournalSettings,
        metrics: Metrics,
    ) -> None:
        self._log = log
        self._store = store
        self.topic = topic
        self.partition = partition
        self.facts = facts
        self._settings = settings
        self._metrics = metrics
        #: The next offset to take; -1 until the tail has begun.
        self.next_offset = -1
        #: The highest offset that this process was acknowledged or has passed: never below `next_offset - 1`.
        self.seen = -1
        self._heads = Heads(count_max=settings.cached_heads_max, bytes_max=settings.cached_head_bytes_max)
        self._unreplicated = Unreplicated(offsets_max=settings.cached_offsets_max, bytes_max=settings.cached_bytes_max)
        #: Appends of this process whose outcome is still open, by append id: the attempt that was met last.
        self.open: dict[bytes, Met | None] = {}
        self._resolving: dict[str, asyncio.Task[Head | None]] = {}
        self._reaching: asyncio.Task[None] | None = None
        self._follower: asyncio.Task[None] | None = None
        self._used_at = 0.0
        self._met_at = -math.inf
        self._began = asyncio.Lock()
        self._closed = False
        self._pointers = Pointers(store, topic, partition)

    # ---- the tail

    async def begin(self) -> None:
        """Start the tail: at the log's end where records are found by key, else behind the store's pointer."""
        if self.next_offset >= 0:
            return
        async with self._began:
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
        """Take every record up to and including `offset`; from then on, stay at the log's end for a while."""
        self._used_at = time.monotonic()
        if self.next_offset < 0:
            await self.begin()
        if self.next_offset > offset:
            return
        if self._closed:
            raise self._over()
        if self._log.indexed_by_key:
            if offset - self.next_offset >= CATCH_UP_RECORDS_MAX:
                self._metrics.count("head_cache_forgotten")
                self._forget(offset + 1)
            else:
                await self._take_up_to(offset)
            return
        if follow:
            self._follow()
        while self.next_offset <= offset:
            if self._reaching is None or self._reaching.done():
                self._reaching = asyncio.create_task(self._take_up_to(offset))
            await self._shared(self._reaching)

    async def _shared(self, task: asyncio.Task[T]) -> T:
        """What others may wait for, too. When the cache is closed they are told so: none of them was cancelled."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            waiting = asyncio.current_task()
            if not task.cancelled() or (waiting is not None and waiting.cancelling()):
                raise
            raise self._over() from None

    def _over(self) -> Unavailable:
        return Unavailable(f"{self.topic}/{self.partition}: the journal was closed meanwhile: open it again")

    def meets_others(self) -> bool:
        """Another's record lay before one of ours: whether that was so a while ago, too.

        Once alone is not worth following, for whoever follows is sent all of its own records as well.
        """
        before, self._met_at = self._met_at, time.monotonic()
        return self._met_at - before < self._settings.follow_s

    def _forget(self, next_offset: int) -> None:
        self._heads.clear()
        self._unreplicated.begin(next_offset)
        self.next_offset = next_offset
        self.seen = max(self.seen, next_offset - 1)

    async def _take_up_to(self, offset: int) -> None:
        """Several may take at once: the tail never moves back, so a batch never begins behind where it stands."""
        while self.next_offset <= offset:
            start = self.next_offset
            try:
                batch = await self._log.read(self.topic, self.partition, start=start, stop=offset + 1)
            except LogLost:
                # Retention may have followed replication: only what the store does not have is lost.
                replicated = await self.replicated()
                if replicated < await self._log.start(self.topic, self.partition) - 1:
                    raise
                if self.next_offset == start:  # else another who takes has met this, too, and went on from there
                    if replicated < start:
                        raise
                    self._forget(replicated + 1)
                continue
            for record in batch.records:
                if record.offset >= self.next_offset:  # an acknowledgement may have come first
                    self.take(record)
            self.next_offset = max(self.next_offset, batch.next_offset)
            self.seen = max(self.seen, self.next_offset - 1)

    def _follow(self) -> None:
        if self._follower is None or self._follower.done():
            self._follower = asyncio.create_task(self._following())

    async def _following(self) -> None:
        """Stay at the log's end while the partition is in use, so that reads find the tail already taken."""
        dropped_at = time.monotonic()
        while time.monotonic() - self._used_at < self._settings.follow_s:
            try:
                waited = self.next_offset
                news = await self._log.wait(self.topic, self.partition, offset=waited, timeout_s=DROP_EVERY_S)
                if news and self.next_offset == waited:  # else it was this process's own, and is taken
                    await self._take_up_to(await self._log.end(self.topic, self.partition) - 1)
                if time.monotonic() - dropped_at > DROP_EVERY_S:
                    await self._drop_replicated()
                    dropped_at = time.monotonic()
            except TidebookError:
                self._metrics.count("head_cache_follow_failed")
                return  # the next use begins again, and meets the error itself

    async def _drop_replicated(self) -> None:
        replicated = await self.replicated()
        if replicated >= self._unreplicated.base:
            while self._unreplicated.drop_below(replicated + 1):  # noqa: ASYNC110 - no wait, only others' turn
                await asyncio.sleep(0)

    def take(self, record: Record) -> None:
        """The next record of the tail: fold it where its head is known, remember where it lies.

        What a newer Tidebook or a newer epoch wrote raises, now and every time: the tail does not move past it.
        """
        id = None if record.key is None else record.key.decode(errors="surrogateescape")
        known = id in self._heads
        action = None
        if known or id is None or has_other_version(record.value):
            action = read_action(record, self.facts)
        self.next_offset = record.offset + 1
        self.seen = max(self.seen, record.offset)
        if id is None:
            return
        if not self._log.indexed_by_key:
            self._unreplicated.add(id, record)
        if known and action is not None:
            self._fold(id, action, record.offset, record.timestamp_ms)

    def take_own(self, sent: Sent, record: Outgoing, id: str | None, action: Action) -> Change | None:
        """The same for a record that this process has just written, without decoding it, if it comes next.

        What came of it, where the fold could be asked.
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

    async def write(self, action: Action, id: str | None = None) -> Sent:
        """Write a record other than an append, and take it."""
        value = encode_record(action, limit_bytes=self.facts.limit_bytes)
        outgoing = Outgoing(self.topic, self.partition, None if id is None else id.encode(), value)
        future: asyncio.Future[Sent] = asyncio.get_running_loop().create_future()

        def on_sent(sent: Sent | TidebookError) -> None:
            if isinstance(sent, Sent):
                self.take_own(sent, outgoing, id, action)
            settle(future, sent)

        self._log.send(outgoing, on_sent)
        return await future

    def _fold(self, id: str, action: Action | Damaged, offset: int, timestamp_ms: int) -> Change | None:
        head, position = self._heads[id], Position(self.facts.epoch, offset)
        if head is not None and position <= head.position:
            return None  # the store was ahead of the tail when this head was read
        after, change = fold(head, action, position, timestamp_ms, self.facts)
        self._heads.keep(id, after)
        if type(action) is Append and action.append_id in self.open:
            self.open[action.append_id] = (offset, change)
        return change

    # ---- records and heads of one key

    async def replicated(self) -> int:
        """The last offset of this epoch that the store has, or -1."""
        return Stored(await self._pointers.now(), None, self.facts.epoch).as_of

    async def stored(self, key: Key) -> Stored:
        """Pointer, then head."""
        pointer = await self._pointers.now()
        return Stored(pointer, await self._store.head(key), self.facts.epoch)

    async def recent_pointer(self) -> Pointer | None:
        """Through where the store had the log by now, or a moment ago."""
        return await self._pointers.recent(self._unreplicated.base)

    async def fold_tail(self, key: Key, tail: Tail, *, after: int, to: int) -> None:
        """Fold the key's records of offsets after < offset ≤ to onto `tail`."""
        if not self._log.indexed_by_key:
            found = self._unreplicated.find(key.id, after, to) if to < self.next_offset else None
            if found is not None:
                for record in found:
                    tail.take(record)
                return
            self._metrics.count("tail_read_from_log")
        raw, start = key.id.encode(), after + 1
        while start <= to:
            batch = await self._log.read(self.topic, self.partition, start=start, stop=to + 1, key=raw)
            for record in batch.records:
                tail.take(record)
            start = batch.next_offset

    def known(self, id: str) -> bool:
        """Whether the head is here, exact as of the tail."""
        return id in self._heads

    def born_in_tail(self, id: str) -> int | None:
        """The offset at which the present life of a known journal began, if the tail still has it."""
        if id not in self._heads:
            return None
        head = self._heads[id]
        if head is None:
            return self.next_offset
        born = head.incarnation
        return born.offset if born.epoch == self.facts.epoch and born.offset >= self._unreplicated.base else None

    def cached(self, id: str) -> Head | None:
        """The head of a known id."""
        return self._heads[id]

    def replicated_head(self, id: str, pointer: Pointer | None) -> Head | None:
        """The head as of the tail, where it is here, has a journal, and the store has all that it speaks of."""
        head = self._heads.get(id)
        if head is None or not head.live or pointer is None or head.position > pointer.position:
            return None
        return head

    def learned(self, id: str, head: Head | None, as_of: int) -> None:
        """A read has folded this head up to `as_of`: it is kept, if that is all that the tail has, and there is one.

        A tail that has yet to begin may begin further on, and what lies between would never be folded.
        """
        if id not in self._heads and 0 <= self.next_offset <= as_of + 1:
            self._heads.keep(id, head)

    async def head(self, id: str) -> Head | None:
        """The head as of the tail, from the cache or from store and log."""
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
            task.add_done_callback(lambda _: self._resolving.pop(id, None))
        return await self._shared(task)

    async def _resolve(self, id: str) -> Head | None:
        key = Key(self.topic, id)
        stored = await self.stored(key)
        while True:
            tail = _Watching(stored.head, self.facts, self.open)
            try:
                await self._catch_up(key, tail, stored.as_of)
                break
            except LogLost:
                # What was needed is gone: harmless if it was replicated meanwhile.
                before, stored = stored, await self.stored(key)
                if stored.as_of <= before.as_of:
                    raise
        self._metrics.count("head_cache_resolved")
        self._heads.keep(id, tail.head)
        return tail.head

    async def _catch_up(self, key: Key, tail: Tail, reached: int) -> None:
        while reached < self.next_offset - 1:  # the tail may move on while records are read
            to = self.next_offset - 1
            await self.fold_tail(key, tail, after=reached, to=to)
            reached = to

    # ---- appends of this process

    def outcome(self, append_id: bytes, offset: int) -> Change | None:
        """What the fold said of a watched append's attempt at this offset, if the tail has met it."""
        met = self.open.get(append_id)
        return met[1] if met is not None and met[0] == offset else None

    async def close(self) -> None:
        """Stop following; whoever still waits is told so."""
        self._closed = True
        tasks = [each for each in (self._follower, self._reaching, *self._resolving.values()) if each is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Watching(Tail):
    """A tail that keeps no events and notes what came of this process's own appends."""

    def __init__(self, head: Head | None, facts: TopicFacts, open_: dict[bytes, Met | None]) -> None:
        super().__init__(head, facts, bytes_max=0)
        self._watched = open_

    def take(self, record: Record) -> Change:
        change = super().take(record)
        if type(self.action) is Append and self.action.append_id in self._watched:
            self._watched[self.action.append_id] = (record.offset, change)
        return change

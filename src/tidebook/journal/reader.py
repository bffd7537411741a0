"""Read a journal: the store's rows, then the unreplicated tail, as of one position of the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import closing

import msgspec

from tidebook.core.errors import LogLost, Truncated, Unavailable
from tidebook.core.event import ReadEvent
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import Pointer
from tidebook.journal.barrier import Barriers
from tidebook.journal.head_cache import HeadCache
from tidebook.journal.page import EventPageOfStore
from tidebook.journal.plan import Nothing, StoreOnly, TailOnly, may_continue, page_is_valid, plan_read
from tidebook.journal.prefetch import RowPrefetcher
from tidebook.journal.replicated_state import ReplicatedState
from tidebook.journal.settings import BarrierKind, JournalSettings
from tidebook.journal.tail import JournalTail
from tidebook.log.port import Log, read_page
from tidebook.runtime.metrics import Metrics
from tidebook.store.port import StoreReader

#: How many plans a read makes, while the journal changes under it, before it raises Truncated.
PLANS_MAX = 100
#: Store heads of earlier reads, for each partition. A head with many tags is large and not kept.
STORED_HEADS_MAX = 4096
STORED_HEAD_TAGS_MAX = 100


class ReadView:
    """A journal as of one position: the state in the store, and the tail folded onto it."""

    __slots__ = ("as_of", "stored", "tail")

    def __init__(self, stored: ReplicatedState, tail: JournalTail, as_of: int) -> None:
        self.stored = stored
        self.tail = tail
        self.as_of = as_of

    @property
    def head(self) -> Head | None:
        return self.tail.head


class Reader:
    """Reads the journals of one partition."""

    def __init__(
        self,
        log: Log,
        store: StoreReader,
        cache: HeadCache,
        barriers: Barriers,
        settings: JournalSettings,
        metrics: Metrics,
    ) -> None:
        self._log = log
        self._store = store
        self._cache = cache
        self._barriers = barriers
        self._settings = settings
        self._metrics = metrics
        #: Store heads of earlier reads, with which the first rows are requested before the current head is known.
        self._stored_heads: dict[str, Head] = {}

    async def view(self, key: Key, kind: BarrierKind) -> ReadView:
        """Return the journal as of a barrier fixed now; on a remote log, read the store at the same time."""
        if self._log.end_is_linearizable:
            barrier = await self._barriers.fix(kind)
            stored = await self._cache.stored(key)
        else:
            fixing = asyncio.ensure_future(self._barriers.fix(kind))
            try:
                stored = await self._cache.stored(key)
            except Unavailable as error:
                return await self._view_without_store(key, await fixing, error)
            except BaseException:
                fixing.cancel()
                raise
            barrier = await fixing
        return await self._view(key, barrier, stored)

    async def _view_without_store(self, key: Key, barrier: int, error: Unavailable) -> ReadView:
        """Return the journal from the tail alone; raise `error` if the tail lacks a part of the current incarnation."""
        await self._cache.reach(barrier)
        began = self._cache.incarnation_start(key.id)
        if began is None:
            raise error
        as_of, known = self._cache.next_offset - 1, self._cache.cached(key.id)
        before = None if known is None else _head_before_incarnation(known)
        tail = JournalTail(before, self._cache.config, bytes_max=self._settings.tail_bytes_max)
        try:
            await self._cache.fold_tail(key, tail, after=began - 1, to=as_of)
        except LogLost:
            raise error from None  # truncated after replication, maybe; only the store knows
        if known is not None and tail.head != known:
            raise error  # depends on what an earlier incarnation left in the head, which only the store has
        self._metrics.count("read_without_store")
        return ReadView(ReplicatedState.empty(began - 1), tail, as_of)

    async def _view(self, key: Key, barrier: int, stored: ReplicatedState) -> ReadView:
        for _ in range(PLANS_MAX):
            tail = JournalTail(stored.head, self._cache.config, bytes_max=self._settings.tail_bytes_max)
            if stored.as_of >= barrier:
                self._metrics.count("read_store_only")
                return ReadView(stored, tail, stored.as_of)
            try:
                if not self._log.indexed_by_key:
                    await self._cache.reach(barrier)
                await self._cache.fold_tail(key, tail, after=stored.as_of, to=barrier)
                return ReadView(stored, tail, barrier)
            except LogLost:
                # The records are gone: harmless if they were replicated since.
                before, stored = stored, await self._cache.stored(key)
                if stored.as_of <= before.as_of:
                    raise
        raise Truncated(f"{key}: the log is cut faster than it can be read: start the read again")

    async def head(self, key: Key, kind: BarrierKind) -> Head | None:
        """Return the head as of a barrier fixed now, from the cache if possible."""
        barrier = await self._barriers.fix(kind)
        await self._cache.reach(barrier)
        return await self._cache.head(key.id)

    async def events(
        self, key: Key, *, start: int, to: int, kind: BarrierKind, incarnation: Position | None = None
    ) -> AsyncIterator[ReadEvent]:
        """Return the events from `start` up to `to` in order, page by page.

        With `incarnation`, raise Truncated if the journal is no longer that incarnation.
        """
        last_yielded: int | None = None
        for _ in range(PLANS_MAX):
            with closing(RowPrefetcher(self._store, key, limit=self._settings.page_events)) as rows:
                if last_yielded is None:
                    view = await self.begin(key, kind, rows, after=start - 1, to=to)
                else:
                    view = await self.view(key, kind)
                # Before the first event is yielded, nothing of an earlier plan counts: that journal may be gone.
                after = start - 1 if last_yielded is None else last_yielded
                if incarnation is not None and not may_continue(incarnation, view.head, after):
                    raise Truncated(f"{key}: events after {after} were deleted or purged during the read: read again")
                plan = plan_read(
                    stored=view.stored.head,
                    folded=view.head,
                    purged=view.tail.purged,
                    appended=view.tail.appended,
                    after=after,
                    to=to,
                )
                if isinstance(plan, Nothing) or view.head is None:
                    return
                if not isinstance(plan, TailOnly):
                    complete = True
                    async for page in self._pages(key, view, rows, plan.after, plan.to):
                        if page is None:
                            complete = False
                            break
                        for event in page:
                            if last_yielded is None:
                                incarnation, to = view.head.incarnation, _limit_to_head(to, view.head)
                            last_yielded = event.seq_nr
                            yield event
                    if not complete:
                        self._metrics.count("read_planned_again")
                        continue
                    if isinstance(plan, StoreOnly):
                        return
            tail_after = plan.after if isinstance(plan, TailOnly) else plan.to
            try:
                async for event in self._tail_events(key, view, after=tail_after, to=to):
                    if last_yielded is None:
                        incarnation, to = view.head.incarnation, _limit_to_head(to, view.head)
                    last_yielded = event.seq_nr
                    yield event
                return
            except LogLost:
                self._metrics.count("read_planned_again")  # replicated and truncated since: the store has it now
        raise Truncated(f"{key}: the journal changes faster than it can be read: start the read again")

    async def begin(self, key: Key, kind: BarrierKind, rows: RowPrefetcher, *, after: int, to: int) -> ReadView:
        """Return the view of a read, and request its first rows concurrently if a head of an earlier read is known.

        Requesting rows with an older head is safe: they existed when it was written. Like all rows, they are then
        validated against the view's head, or against a head that is read after them.
        """
        known = None if self._log.end_is_linearizable else self._stored_heads.get(key.id)
        if known is None or max(after, known.delete_to) >= min(to, known.seq_nr):
            view = await self.view(key, kind)
        else:
            rows.begin(known, after=max(after, known.delete_to), to=min(to, known.seq_nr))
            rows.prefetch()
            await asyncio.sleep(0)  # sends the request for rows first, because it takes longest
            view = await self._view_of_read_before(key, kind)
        head = view.stored.head
        if head is not None and not self._log.end_is_linearizable:
            self._remember_stored_head(key, head)
            self._cache.remember_head(key.id, view.head, view.as_of)
        return view

    async def _view_of_read_before(self, key: Key, kind: BarrierKind) -> ReadView:
        """Return the view of a journal that was read before: pointer and head may be cached."""
        fixing = asyncio.ensure_future(self._barriers.fix(kind))
        try:
            pointer = await self._cache.recent_pointer()
            if self._cache.replicated_head(key.id, pointer) is not None:
                known = await self._view_of_cached_head(key, await fixing, pointer)
                if known is not None:
                    return known
            stored = ReplicatedState(pointer, await self._store.head(key), self._cache.config.epoch)
        except Unavailable as error:
            return await self._view_without_store(key, await fixing, error)
        except BaseException:
            fixing.cancel()
            raise
        return await self._view(key, await fixing, stored)

    async def _view_of_cached_head(self, key: Key, barrier: int, pointer: Pointer | None) -> ReadView | None:
        """Return the view of a cached head that is fully replicated, so that the store has the same head; else None."""
        try:
            await self._cache.reach(barrier)
        except LogLost:
            return None  # harmless if it was replicated since: the store's state shows it
        head = self._cache.replicated_head(key.id, pointer)
        if head is None:
            return None
        self._metrics.count("read_head_known")
        stored = ReplicatedState(pointer, head, self._cache.config.epoch)
        return ReadView(
            stored, JournalTail(head, self._cache.config, bytes_max=0), max(self._cache.next_offset - 1, barrier)
        )

    def _remember_stored_head(self, key: Key, head: Head) -> None:
        self._stored_heads.pop(key.id, None)
        if head.live and len(head.tag_counts) <= STORED_HEAD_TAGS_MAX:
            if len(self._stored_heads) >= STORED_HEADS_MAX:
                del self._stored_heads[next(iter(self._stored_heads))]
            self._stored_heads[key.id] = head

    async def _pages(
        self, key: Key, view: ReadView, rows: RowPrefetcher, after: int, to: int
    ) -> AsyncIterator[Iterator[ReadEvent] | None]:
        """Yield validated pages of events; yield None and stop if a page is invalid."""
        head = view.stored.head
        assert head is not None
        if not rows.begin(head, after=after, to=to):
            self._metrics.count("read_rows_in_vain")
        prefetching = not self._log.end_is_linearizable
        while after < to:
            page = EventPageOfStore(await rows.take(after), after=after, to=to)
            if prefetching:
                rows.prefetch()
            if not page.is_gap_free(head):
                if not page_is_valid(head, await self._store.head(key), after):
                    yield None
                    return
                page.check(head)
            # Send the prefetch requests now, not when this page is consumed; and let other tasks run, because an
            # embedded store answers without suspending.
            await asyncio.sleep(0)
            yield page.events(self._cache.partition)
            after = page.reached
        if not rows.dense:  # large events or gaps: the next read should not request rows in vain
            self._stored_heads.pop(key.id, None)

    async def _tail_events(self, key: Key, view: ReadView, *, after: int, to: int) -> AsyncIterator[ReadEvent]:
        tail, partition = view.tail, self._cache.partition
        if tail.appends is not None:
            for append in tail.appends:
                for event in append.events(partition, after=after, to=to):
                    yield event
            return
        # The tail exceeds the memory limit: fold it a second time, and yield while folding.
        self._metrics.count("read_tail_twice")
        head, offset = tail.restart
        offset = view.stored.as_of if offset is None else offset
        while offset < view.as_of:
            second_pass = JournalTail(head, self._cache.config, bytes_max=1 << 62)
            batch = await read_page(
                self._log, self._cache.topic, partition, start=offset + 1, stop=view.as_of + 1, key=key.id.encode()
            )
            for record in batch.records:
                second_pass.take(record)
            head, offset = second_pass.head, batch.next_offset - 1
            for append in second_pass.appends or ():
                for event in append.events(partition, after=after, to=to):
                    yield event


def _head_before_incarnation(head: Head) -> Head:
    """Return the purged head on which this incarnation began, as far as it is known.

    It is needed because an append may be the retry of one in the earlier incarnation.
    """
    evicted = head.evicted if head.evicted is not None and head.evicted < head.incarnation else None
    recent = tuple(each for each in head.recent if each.position < head.incarnation)
    return msgspec.structs.replace(head, live=False, recent=recent, evicted=evicted)


def _limit_to_head(to: int, head: Head) -> int:
    """Limit `to` to the head of the plan whose events are being yielded: a later plan must not add newer events."""
    return min(to, head.seq_nr)

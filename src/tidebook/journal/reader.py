"""Read a journal: the store's rows, then the unreplicated tail, as of one position of the log."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import closing, suppress
from typing import Protocol, TypeVar

from tidebook.core.action import Mark
from tidebook.core.errors import LogLost, OutcomeUnknown, Truncated, Unavailable
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import EventRow, Pointer
from tidebook.journal.head_cache import HeadCache
from tidebook.journal.prefetch import RowPrefetcher
from tidebook.journal.settings import BarrierKind, JournalSettings
from tidebook.journal.view import (
    ReadPlan,
    ReadView,
    ViewBase,
    check_rows,
    choose_base,
    is_gap_free,
    is_replicated,
    may_continue,
    page_is_valid,
    stored_base,
)
from tidebook.log.port import Log, read_page
from tidebook.runtime.futures import ignore_failure
from tidebook.runtime.metrics import Metrics
from tidebook.store.port import StoreReader


class Barriers:
    """Fixes the barriers of reads in one partition: offsets at or after the log's last record when a read begins.

    Reads share marks. A read may only share a mark that was not yet sent when the read began: an append that was
    acknowledged after the mark in flight would otherwise be missed by a read that starts after that acknowledgement. So
    one mark is in flight, and the next one collects the reads that arrive meanwhile.
    """

    def __init__(self, log: Log, cache: HeadCache) -> None:
        self._log = log
        self._cache = cache
        self._in_flight: asyncio.Task[int] | None = None
        self._next: asyncio.Task[int] | None = None

    async def fix(self, kind: BarrierKind) -> int:
        """Return an offset that is not below any record acknowledged before this call.

        With `kind="offset"`, that only holds for the records of this process if the log's end is not linearizable.
        Raise Unavailable if the end of the log cannot be read, and Corrupt if the log was recreated.
        """
        cache = self._cache
        cache.check_log()
        if kind == "offset" or self._log.end_is_linearizable:
            seen = cache.seen
            last = await self._log.end(cache.topic, cache.partition) - 1
            # Only a linearizable end proves anything: a partitioned leader may report an old one.
            if self._log.end_is_linearizable and last < seen:
                cache.is_recreated(last, seen)
                cache.check_log()
            return max(cache.seen, last)
        if self._next is None:
            self._next = asyncio.create_task(self._send(self._in_flight))
            self._next.add_done_callback(ignore_failure)
        return await asyncio.shield(self._next)

    async def _send(self, before: asyncio.Task[int] | None) -> int:
        if before is not None:
            await asyncio.wait([before])
        else:
            await asyncio.sleep(0)  # reads that start in the same loop iteration share the mark
        self._in_flight, self._next = self._next, None
        try:
            # The tail then takes the mark at its acknowledgement instead of reading it from the log.
            with suppress(Unavailable):  # a caller that needs the store gets the error itself
                await self._cache.begin()
            sent, _ = await self._cache.write(Mark(self._cache.config.epoch))
        except OutcomeUnknown as error:  # only the mark's outcome is unknown: a read writes nothing else
            raise Unavailable(f"the end of the log is unknown: {error}") from error
        finally:
            self._in_flight = None
        return sent.offset


#: How many plans a read makes, while the journal keeps changing, before it raises Truncated.
PLANS_MAX = 100
#: How many journals with gaps or large events are remembered for each partition; their rows are not prefetched.
SPARSE_IDS_MAX = 4096


class Numbered(Protocol):
    """A decoded event, of which a read only needs the number."""

    @property
    def seq_nr(self) -> int:
        """The event's number in its journal."""
        ...


E = TypeVar("E", bound=Numbered)
#: Decodes rows of one partition, one event for each row: `read_events`, or the decoder of a typed journal.
DecodeRows = Callable[[Iterable[EventRow], int], Sequence[E]]


class Reader:
    """Reads the journals of one partition."""

    def __init__(
        self, log: Log, store: StoreReader, cache: HeadCache, settings: JournalSettings, metrics: Metrics
    ) -> None:
        self._log = log
        self._store = store
        self.cache = cache
        self.barriers = Barriers(log, cache)
        self._settings = settings
        self._metrics = metrics
        self._sparse_ids: set[str] = set()

    async def head(self, id: str, kind: BarrierKind) -> Head | None:
        """Return the head as of a barrier fixed now, from the cache if possible."""
        await self.cache.reach(await self.barriers.fix(kind))
        return await self.cache.head(id)

    async def view(self, key: Key, kind: BarrierKind, *, again: bool = False) -> ReadView:
        """Return the journal as of a barrier fixed now; on a remote log, read the store at the same time.

        With `again`, an earlier view was not readable, so use neither the cached head nor the cached pointer.
        """
        cache = self.cache
        if self._log.end_is_linearizable:
            barrier = await self.barriers.fix(kind)
            return await self._view(key, barrier, None, await cache.stored(key))
        fixing = asyncio.ensure_future(self.barriers.fix(kind))
        pointer, stored, down = None, None, None
        try:
            pointer = await (cache.pointer() if again else cache.recent_pointer())
            if again or not is_replicated(cache.heads.get(key.id), pointer):
                stored = stored_base(pointer, await self._store.head(key), cache.topic, cache.partition, cache.config)
        except Unavailable as error:
            pointer, down = None, error
        except BaseException:
            fixing.cancel()
            raise
        return await self._view(key, await fixing, pointer, stored, down)

    async def _view(
        self, key: Key, barrier: int, pointer: Pointer | None, stored: ViewBase | None, down: Unavailable | None = None
    ) -> ReadView:
        """Choose the base of the view and fold the tail onto it, up to the barrier or further.

        `stored` is None if the cached head is replicated, or if the store is unavailable. In the second case `down` is
        its error, and is raised if the tail lacks a part of the current incarnation.
        """
        cache = self.cache
        for _ in range(PLANS_MAX):
            try:
                if stored is None or (stored.as_of < barrier and not self._log.indexed_by_key):
                    await cache.reach(barrier)
                cached = cache.base(key.id)
                base = choose_base(
                    stored=stored, cached=cached, pointer=pointer, tail_start=cache.tail_start, epoch=cache.config.epoch
                )
                if base is not None:
                    view = ReadView(base, cache.config, bytes_max=self._settings.tail_bytes_max)
                    await cache.fold_tail(key, view, barrier if stored is not None or cached is None else cached.as_of)
                    # Without the store, a head may depend on more of an earlier incarnation than the tail has.
                    if down is None or (cached is not None and view.head == cached.head):
                        self._count_source(base, barrier, stored, down)
                        return view
            except LogLost as error:
                # The log lost the records: harmless if they were replicated since.
                if stored is not None:
                    stored = await cache.stored_after(key, stored.as_of, error)
                    continue
            if down is not None:
                raise down
            stored = await cache.stored(key)
        raise Truncated(f"{key}: the log is truncated faster than it can be read: start the read again")

    def _count_source(self, base: ViewBase, barrier: int, stored: ViewBase | None, down: Unavailable | None) -> None:
        if down is not None:
            self._metrics.count("read_without_store")
        elif stored is None:
            self._metrics.count("read_head_cached")
        elif base.as_of >= barrier:
            self._metrics.count("read_store_only")

    async def begin(self, key: Key, kind: BarrierKind, rows: RowPrefetcher, *, after: int, to: int) -> ReadView:
        """Return the view of a read, and request its first rows concurrently if the cached head is replicated.

        Requesting rows with an older head is safe: they existed when it was written. Like all rows, they are then
        validated against the view's head, or against a head that is read after them.
        """
        cache, id = self.cache, key.id
        if self._log.end_is_linearizable:
            return await self.view(key, kind)
        known = cache.heads.get(id)
        if known is not None and id not in self._sparse_ids and is_replicated(known, cache.known_pointer):
            after, to = max(after, known.delete_to), min(to, known.seq_nr)
            if after < to:
                rows.begin(known, after=after, to=to)
                rows.prefetch()
                await asyncio.sleep(0)  # sends the request for rows first, because it takes longest
        view = await self.view(key, kind)
        cache.remember_head(id, view.head, view.as_of)
        return view

    async def decoded_events(
        self,
        key: Key,
        decode: DecodeRows[E],
        *,
        start: int,
        to: int,
        kind: BarrierKind,
        incarnation: Position | None = None,
    ) -> AsyncIterator[E]:
        """Return the events from `start` up to `to` in order, page by page.

        With `incarnation`, raise Truncated if the journal is no longer that incarnation.
        """
        after, again = start - 1, False
        for _ in range(PLANS_MAX):
            with closing(RowPrefetcher(self._store, key, limit=self._settings.page_events)) as rows:
                if again:
                    view = await self.view(key, kind, again=True)
                else:
                    view = await self.begin(key, kind, rows, after=after, to=to)
                if incarnation is not None and not may_continue(incarnation, view.head, after):
                    raise Truncated(f"{key}: events after {after} were deleted or purged during the read: read again")
                plan = view.plan(after, to)
                if plan is None or view.head is None:
                    return
                try:
                    async for page in self._pages(key, view, rows, plan, decode):
                        if page is None:
                            break
                        if page:
                            # A later plan must continue this incarnation, and not add newer events.
                            incarnation, to = view.head.incarnation, plan.to
                            for event in page:
                                yield event
                            after = page[-1].seq_nr
                    else:
                        return
                except LogLost:
                    pass  # replicated and truncated since: the store has it now
                self._metrics.count("read_replanned")
                again = True
        raise Truncated(f"{key}: the journal changes faster than it can be read: start the read again")

    async def _pages(
        self, key: Key, view: ReadView, rows: RowPrefetcher, plan: ReadPlan, decode: DecodeRows[E]
    ) -> AsyncIterator[Sequence[E] | None]:
        """Yield valid pages of the store's events, then those of the tail; yield None and stop if one is invalid."""
        head, after = view.stored, plan.after
        partition, epoch = self.cache.partition, self.cache.config.epoch
        if head is not None:
            if not rows.begin(head, after=after, to=plan.rows_to):
                self._metrics.count("read_rows_discarded")
            while after < plan.rows_to:
                page = await rows.take(after)
                if not self._log.end_is_linearizable:
                    rows.prefetch()
                if not is_gap_free(page, after, head):
                    if not page_is_valid(head, await self._store.head(key), after):
                        yield None
                        return
                    check_rows(page, head)
                # Send the prefetch requests now, not when this page is consumed; and let other tasks run, because an
                # embedded store answers without suspending.
                await asyncio.sleep(0)
                after = page[-1].seq_nr if page else plan.rows_to
                yield decode(page, partition)
            if not rows.dense:  # large events or gaps: the next read should not request rows that it cannot use
                if len(self._sparse_ids) >= SPARSE_IDS_MAX:
                    self._sparse_ids.clear()
                self._sparse_ids.add(key.id)
        if plan.rows_to < plan.to:
            async for tail in self._tails(key, view):
                for append in tail.appends or ():
                    yield decode(append.rows(epoch, after=plan.rows_to, to=plan.to), partition)

    async def _tails(self, key: Key, view: ReadView) -> AsyncIterator[ReadView]:
        """Yield the tail of a view, in parts if it exceeds the memory limit: these are folded a second time."""
        if view.appends is not None:
            yield view
            return
        self._metrics.count("read_tail_retried")
        part, cache = ReadView(view.restart, self.cache.config), self.cache
        start, stop = view.restart.as_of + 1, view.as_of + 1
        while start < stop:
            part = ReadView(ViewBase(part.head, start - 1), cache.config, bytes_max=sys.maxsize)
            page = await read_page(self._log, cache.topic, cache.partition, start=start, stop=stop, key=key.id.encode())
            for record in page.records:
                part.take(record)
            yield part
            start = page.next_offset

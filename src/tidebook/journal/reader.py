"""Reading a journal: the store's rows, then the unreplicated tail, as of one position of the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import closing

import msgspec

from tidebook.core.errors import LogLost, Truncated, Unavailable
from tidebook.core.event import ReadEvent
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.metrics import Metrics
from tidebook.core.position import Position
from tidebook.core.replication import Pointer
from tidebook.journal.ahead import RowsAhead
from tidebook.journal.barrier import Barriers
from tidebook.journal.head_cache import HeadCache
from tidebook.journal.page import Page
from tidebook.journal.plan import Nothing, StoreOnly, TailOnly, may_go_on, page_stands, plan_read
from tidebook.journal.settings import BarrierKind, JournalSettings
from tidebook.journal.stored import Stored
from tidebook.journal.tail import Tail
from tidebook.log.port import Log
from tidebook.store.port import StoreReader

#: How often a read plans again when what it was reading is deleted under it, before it gives up.
PLANS_MAX = 100
#: Heads of earlier reads, a partition; one that counts many tags is large and not kept.
KNOWN_HEADS_MAX = 4096
KNOWN_TAGS_MAX = 100


class View:
    """A journal as of one position: what the store has, and the tail folded onto it."""

    __slots__ = ("as_of", "stored", "tail")

    def __init__(self, stored: Stored, tail: Tail, as_of: int) -> None:
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
        #: Heads that the store gave to earlier reads: what a page is asked for with, before the head is asked for.
        self._known: dict[str, Head] = {}

    async def view(self, key: Key, kind: BarrierKind) -> View:
        """The journal as of a barrier fixed now; the store is asked while the barrier is on its way."""
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

    async def _view_without_store(self, key: Key, barrier: int, error: Unavailable) -> View:
        """The journal from the tail alone, where the store is down and all of its present life is in the tail."""
        await self._cache.reach(barrier)
        born = self._cache.born_in_tail(key.id)
        if born is None:
            raise error
        as_of, known = self._cache.next_offset - 1, self._cache.cached(key.id)
        before = None if known is None else _before_life(known)
        tail = Tail(before, self._cache.facts, bytes_max=self._settings.tail_bytes_max)
        await self._cache.fold_tail(key, tail, after=born - 1, to=as_of)
        if known is not None and tail.head != known:
            raise error  # what an earlier life left in the head decides here, and only the store has that
        self._metrics.count("read_without_store")
        return View(Stored.nothing(born - 1), tail, as_of)

    async def _view(self, key: Key, barrier: int, stored: Stored) -> View:
        for _ in range(PLANS_MAX):
            tail = Tail(stored.head, self._cache.facts, bytes_max=self._settings.tail_bytes_max)
            if stored.as_of >= barrier:
                self._metrics.count("read_store_only")
                return View(stored, tail, stored.as_of)
            try:
                if not self._log.indexed_by_key:
                    await self._cache.reach(barrier)
                await self._cache.fold_tail(key, tail, after=stored.as_of, to=barrier)
                return View(stored, tail, barrier)
            except LogLost:
                # What the tail needed is gone: harmless if it was replicated meanwhile.
                before, stored = stored, await self._cache.stored(key)
                if stored.as_of <= before.as_of:
                    raise
        raise Truncated(f"{key}: the log is cut faster than it can be read: start the read again")

    async def head(self, key: Key, kind: BarrierKind) -> Head | None:
        """The head as of a barrier fixed now, from the cache where it can be."""
        barrier = await self._barriers.fix(kind)
        await self._cache.reach(barrier)
        return await self._cache.head(key.id)

    async def events(
        self, key: Key, *, start: int, to: int, kind: BarrierKind, life: Position | None = None
    ) -> AsyncIterator[ReadEvent]:
        """The events from `start` up to `to`, in order, a page at a time; with `life`, only while that one lives on."""
        done: int | None = None  # the last number that was yielded
        for _ in range(PLANS_MAX):
            with closing(RowsAhead(self._store, key, limit=self._settings.page_events)) as rows:
                if done is None:
                    view = await self.begin(key, kind, rows, after=start - 1, to=to)
                else:
                    view = await self.view(key, kind)
                # Nothing of an earlier plan is carried over until something is yielded: that journal may be gone.
                after = start - 1 if done is None else done
                if life is not None and not may_go_on(life, view.head, after):
                    raise Truncated(f"{key}: events behind {after} were deleted or purged during the read: read again")
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
                    whole = True
                    async for page in self._pages(key, view, rows, plan.after, plan.to):
                        if page is None:
                            whole = False
                            break
                        for event in page:
                            if done is None:
                                life, to = view.head.incarnation, _bound(to, view.head)
                            done = event.seq_nr
                            yield event
                    if not whole:
                        self._metrics.count("read_planned_again")
                        continue
                    if isinstance(plan, StoreOnly):
                        return
            in_tail = plan.after if isinstance(plan, TailOnly) else plan.to
            try:
                async for event in self._tail_events(key, view, after=in_tail, to=to):
                    if done is None:
                        life, to = view.head.incarnation, _bound(to, view.head)
                    done = event.seq_nr
                    yield event
                return
            except LogLost:
                self._metrics.count("read_planned_again")  # replicated and cut meanwhile: the store has it now
        raise Truncated(f"{key}: the journal changes faster than it can be read: start the read again")

    async def begin(self, key: Key, kind: BarrierKind, rows: RowsAhead, *, after: int, to: int) -> View:
        """The view of a read; its first rows are asked for at the same time, where that can be.

        A head that an earlier read was given is no worse to ask with: its rows were there when it was written. They
        then stand or fall, as all rows do, by the view's head or by one that is read after them.
        """
        known = None if self._log.end_is_linearizable else self._known.get(key.id)
        if known is None or max(after, known.delete_to) >= min(to, known.seq_nr):
            view = await self.view(key, kind)
        else:
            rows.begin(known, after=max(after, known.delete_to), to=min(to, known.seq_nr))
            rows.ask()
            await asyncio.sleep(0)  # they take longest, so they go out first
            view = await self._view_beside(key, kind)
        head = view.stored.head
        if head is not None and not self._log.end_is_linearizable:
            self._know(key, head)
            self._cache.learned(key.id, view.head, view.as_of)
        return view

    async def _view_beside(self, key: Key, kind: BarrierKind) -> View:
        """`view` of a journal that was read before, whose pointer may be known from then, and whose head, too."""
        fixing = asyncio.ensure_future(self._barriers.fix(kind))
        try:
            pointer = await self._cache.recent_pointer()
            if self._cache.replicated_head(key.id, pointer) is not None:
                known = await self._view_of_known(key, await fixing, pointer)
                if known is not None:
                    return known
            stored = Stored(pointer, await self._store.head(key), self._cache.facts.epoch)
        except Unavailable as error:
            return await self._view_without_store(key, await fixing, error)
        except BaseException:
            fixing.cancel()
            raise
        return await self._view(key, await fixing, stored)

    async def _view_of_known(self, key: Key, barrier: int, pointer: Pointer | None) -> View | None:
        """The journal by the head that the tail gives, if the store has all of it: then it has that head, too."""
        try:
            await self._cache.reach(barrier)
        except LogLost:
            return None  # harmless if it was replicated meanwhile, which the store will tell
        head = self._cache.replicated_head(key.id, pointer)
        if head is None:
            return None
        self._metrics.count("read_head_known")
        stored = Stored(pointer, head, self._cache.facts.epoch)
        return View(stored, Tail(head, self._cache.facts, bytes_max=0), max(self._cache.next_offset - 1, barrier))

    def _know(self, key: Key, head: Head) -> None:
        self._known.pop(key.id, None)
        if head.live and len(head.tag_counts) <= KNOWN_TAGS_MAX:
            if len(self._known) >= KNOWN_HEADS_MAX:
                del self._known[next(iter(self._known))]
            self._known[key.id] = head

    async def _pages(
        self, key: Key, view: View, rows: RowsAhead, after: int, to: int
    ) -> AsyncIterator[Iterator[ReadEvent] | None]:
        """Pages of events that are whole; None where one is not, and it ends there."""
        head = view.stored.head
        assert head is not None
        if not rows.begin(head, after=after, to=to):
            self._metrics.count("read_rows_in_vain")
        ahead = not self._log.end_is_linearizable
        while after < to:
            page = Page(await rows.take(after), after=after, to=to)
            if ahead:
                rows.ask()
            if not page.proves_itself(head):
                if not page_stands(head, await self._store.head(key), after):
                    yield None
                    return
                page.check(head)
            # What was asked for goes out now, not when this page is used up; and a store on this machine answers at
            # once, so others want their turn too.
            await asyncio.sleep(0)
            yield page.events(self._cache.partition)
            after = page.reached
        if not rows.full:  # events that are large, or numbers without one: the next read is not to ask for much in vain
            self._known.pop(key.id, None)

    async def _tail_events(self, key: Key, view: View, *, after: int, to: int) -> AsyncIterator[ReadEvent]:
        tail, partition = view.tail, self._cache.partition
        if tail.appends is not None:
            for append in tail.appends:
                for event in append.events(partition, after=after, to=to):
                    yield event
            return
        # Too much to hold: fold it a second time, and yield as it goes.
        self._metrics.count("read_tail_twice")
        head, offset = tail.restart
        offset = view.stored.as_of if offset is None else offset
        while offset < view.as_of:
            again = Tail(head, self._cache.facts, bytes_max=1 << 62)
            batch = await self._log.read(
                self._cache.topic, partition, start=offset + 1, stop=view.as_of + 1, key=key.id.encode()
            )
            for record in batch.records:
                again.take(record)
            head, offset = again.head, batch.next_offset - 1
            for append in again.appends or ():
                for event in append.events(partition, after=after, to=to):
                    yield event


def _before_life(head: Head) -> Head:
    """The grave that this life began on, as far as its head still tells: a retry may be one of an earlier life's."""
    evicted = head.evicted if head.evicted is not None and head.evicted < head.incarnation else None
    recent = tuple(each for each in head.recent if each.position < head.incarnation)
    return msgspec.structs.replace(head, live=False, recent=recent, evicted=evicted)


def _bound(to: int, head: Head) -> int:
    """A read that has begun to yield keeps to the moment of that plan: from a later one it takes nothing newer."""
    return min(to, head.seq_nr)

"""What the queues of a book share: the store, opened when it is first needed, and what runs beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from tidebook.core.clock import Clock, Ids
from tidebook.core.errors import InvalidInput
from tidebook.core.metrics import Metrics
from tidebook.core.payload import decode_payload
from tidebook.queue.entry import Entry, chunks, merged, new_entry
from tidebook.queue.fields import Fields
from tidebook.queue.hooks import Announcer, Hooks
from tidebook.queue.job import Read
from tidebook.queue.keeper import Keeper
from tidebook.queue.waker import Waker
from tidebook.sql.port.queue import Claimed, NewEntry, Outcome, Put, QueueRef, QueueSettings, QueueStore

OpenStore = Callable[[], Awaitable[QueueStore]]


class Service:
    """The store under the queues of a book, their wake-ups and their timer."""

    def __init__(
        self,
        open_store: OpenStore,
        *,
        clock: Clock,
        ids: Ids,
        metrics: Metrics,
        settings: Mapping[str, QueueSettings] | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        self.clock = clock
        self.ids = ids
        self.metrics = metrics
        self._open_store = open_store
        self._settings = dict(settings or {})
        self._hooks = hooks or Hooks()
        self._lock = asyncio.Lock()
        self._store: QueueStore | None = None
        self._closed = False
        self._waker: Waker | None = None
        self._keeper: Keeper | None = None
        self._refs: dict[str, QueueRef] = {}
        self._fields: dict[str, Fields] = {}

    def configure(self, name: str, settings: QueueSettings) -> None:
        """Settings that are kept with a queue when it is next used."""
        if not isinstance(settings, QueueSettings):
            raise InvalidInput(f"settings of a queue are QueueSettings, not {type(settings).__name__}")
        if self._settings.get(name) != settings:
            self._refs.pop(name, None)
        self._settings[name] = settings

    async def store(self) -> QueueStore:
        """The store, opened with the first use."""
        if self._closed:
            raise InvalidInput("the book is closed: its queues are too")
        if self._store is None:
            async with self._lock:
                if self._store is None:
                    store = await self._open_store()
                    announce = Announcer(store, self._hooks, metrics=self.metrics)
                    try:
                        await announce.begin()
                    except BaseException:
                        await store.close()
                        raise
                    self._waker = Waker(store, self.ids.new(), metrics=self.metrics)
                    self._keeper = Keeper(store, self._waker.clock, announce, metrics=self.metrics)
                    self._store = store
        return self._store

    async def waker(self) -> Waker:
        """What wakes listeners."""
        await self.store()
        assert self._waker is not None, "it is made with the store"
        return self._waker

    def declare(self, name: str, fields: Fields) -> None:
        """The user fields of a queue, bound to it when it is next used."""
        if name not in self._fields or self._fields[name].schema != fields.schema:
            self._refs.pop(name, None)
        self._fields[name] = fields

    def known(self, name: str) -> QueueRef | None:
        """The queue as the store knows it, if it was used before."""
        return self._refs.get(name)

    async def ref(self, name: str) -> QueueRef:
        """The queue as the store knows it."""
        found = self._refs.get(name)
        if found is None:
            store = await self.store()
            found = await store.queue(name, self._settings.get(name))
            if name in self._fields:
                found = await store.declare(found, self._fields[name].schema)
            self._refs[name] = found
            if self._keeper is not None:
                self._keeper.keep(found)
        return found

    def checker(self, name: str) -> Callable[[Any], Any]:
        """What checks user data before it is put."""
        return self._fields[name].check if name in self._fields else _as_it_is

    def reader(self, name: str) -> Read:
        """What makes user data of what was claimed."""
        fields = self._fields.get(name)
        return _read if fields is None else lambda claimed: fields.read(_read(claimed))

    def new_entries(self, name: str, entries: Iterable[Entry | Any]) -> list[NewEntry]:
        """Entries that were checked, those of the same key merged."""
        if isinstance(entries, str | bytes | Mapping | Entry) or not isinstance(entries, Iterable):
            raise InvalidInput(f"entries are a list of Entry or data, not {type(entries).__name__}")
        check, made = self.checker(name), []
        for each in entries:
            entry = each if isinstance(each, Entry) else Entry(data=each)
            made.append(new_entry(entry, check(entry.data), self.ids))
        return merged(made)

    def put_in(self, transaction: object, name: str, entries: Iterable[Entry | Any]) -> Put:
        """Put inside a sync transaction of the caller's."""
        ref, store = self._refs.get(name), self._store
        if ref is None or store is None:
            raise InvalidInput(f"queue {name!r} is not open yet: await queue.open() once, then put into it")
        new = self.new_entries(name, entries)
        inserted_at, total = self.clock.now_ms(), Put(0, 0, 0)
        for chunk in chunks(new):
            put = store.put_within(transaction, ref, chunk, inserted_at=inserted_at)
            if not isinstance(put, Put):
                if isinstance(put, Coroutine):
                    put.close()  # nothing was begun
                raise InvalidInput("this transaction's driver is async: use 'await queue.put(..., transaction=...)'")
            total = Put(total.inserted + put.inserted, total.merged + put.merged, put.now_ms)
        return total

    def told(self, ref: QueueRef, at_ms: int, now_ms: int, asked_at: float) -> None:
        """Something was put here."""
        if self._waker is not None:
            self._waker.clock.note(now_ms, asked_at)
            self._waker.put(ref, at_ms, now_ms)

    def claimed(self, ref: QueueRef, count: int, lease_ms: int) -> None:
        """Entries were claimed here."""
        if self._waker is None or self._keeper is None:
            return
        self._waker.claimed(ref, count)
        if count:
            self.metrics.count("queue_claimed", count, queue=ref.name)
            self._keeper.keep(ref, lease_ms / 1000)

    def finished(self, ref: QueueRef, count: int) -> None:
        """Entries were finished here."""
        if count and self._waker is not None and self._keeper is not None:
            self.metrics.count("queue_done", count, queue=ref.name)
            self._waker.freed(ref)
            self._keeper.finished(ref, count)

    def failed(self, ref: QueueRef, outcomes: Sequence[Outcome], delay_ms: int) -> None:
        """Entries were given back here."""
        if self._waker is None or self._keeper is None:
            return
        now_ms = self._waker.clock.now_ms()
        if "waiting" in outcomes or "merged" in outcomes:
            self._waker.put(ref, now_ms + delay_ms, now_ms)
        if "dead" in outcomes:
            self._keeper.died(ref)
        self._waker.freed(ref)

    def look(self, ref: QueueRef) -> None:
        """Something may have become due."""
        if self._waker is not None:
            now_ms = self._waker.clock.now_ms()
            self._waker.put(ref, now_ms, now_ms)

    async def close(self) -> None:
        """Wait for what is under way, then let go."""
        self._closed = True
        if self._waker is not None:
            await self._waker.close()
        if self._keeper is not None:
            await self._keeper.close()
        if self._store is not None:
            await self._store.close()
        self._store = self._waker = self._keeper = None
        self._refs.clear()


def _read(claimed: Claimed) -> Any:
    return decode_payload(claimed.kind, claimed.data)


def _as_it_is(data: Any) -> Any:
    return data

"""The resources that the queues of a book share: the store, opened on first use, its wake-ups and its maintenance."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from tidebook.core.errors import InvalidInput
from tidebook.core.payload import decode_payload
from tidebook.queue.browse import BrowsableStore
from tidebook.queue.entry import Entry, merge_same_keys, new_entry
from tidebook.queue.fields import Fields
from tidebook.queue.hooks import Announcer, Hooks
from tidebook.queue.job import Decode
from tidebook.queue.maintenance import QueueMaintenance
from tidebook.queue.port import Claimed, NewEntry, Outcome, QueueRef, QueueSettings, QueueStore
from tidebook.queue.waker import Waker
from tidebook.runtime.clock import Clock, Ids
from tidebook.runtime.metrics import Metrics
from tidebook.runtime.process import generation, refuse_fork

OpenStore = Callable[[], Awaitable[BrowsableStore]]


class QueueRuntime:
    """Owns the store of a book's queues, and the tasks that wake listeners and maintain the store."""

    def __init__(
        self,
        open_store: OpenStore,
        *,
        clock: Clock,
        ids: Ids,
        metrics: Metrics,
        settings: Mapping[str, QueueSettings] | None = None,
        hooks: Hooks | None = None,
        missing: Callable[[], bool] | None = None,
    ) -> None:
        self._missing = missing
        self.clock = clock
        self.ids = ids
        self.metrics = metrics
        self._open_store = open_store
        self._settings = dict(settings or {})
        self._hooks = hooks or Hooks()
        self._lock = asyncio.Lock()
        self._store: BrowsableStore | None = None
        self._closed = False
        self._generation = generation()
        #: Created with the store.
        self._waker: Waker
        self._maintenance: QueueMaintenance
        self._refs: dict[str, QueueRef] = {}
        self._fields: dict[str, Fields] = {}

    def configure(self, name: str, settings: QueueSettings) -> None:
        """Set the settings to store with a queue when it is next used."""
        if not isinstance(settings, QueueSettings):
            raise InvalidInput(f"settings of a queue must be QueueSettings, not {type(settings).__name__}")
        if self._settings.get(name) != settings:
            self._refs.pop(name, None)
        self._settings[name] = settings

    async def store(self) -> BrowsableStore:
        """Return the store, opened on first use."""
        refuse_fork(self._generation, "the queue")
        if self._closed:
            raise InvalidInput("the book is closed, and so are its queues")
        if self._store is None:
            async with self._lock:
                if self._store is None:
                    store = await self._open_store()
                    announce = Announcer(store, self._hooks, metrics=self.metrics)
                    try:
                        await announce.start()
                    except BaseException:
                        await store.close()
                        raise
                    self._waker = Waker(store, self.ids.new(), metrics=self.metrics)
                    self._maintenance = QueueMaintenance(store, self._waker.clock, announce, metrics=self.metrics)
                    self._store = store
        return self._store

    @property
    def is_missing(self) -> bool:
        """Return whether the store is neither open nor on disk: reading a status must not create it."""
        return self._store is None and self._missing is not None and self._missing()

    async def existing(self) -> list[QueueRef]:
        """Return all queues, by name, without creating a store."""
        return [] if self.is_missing else await (await self.store()).queues()

    async def find(self, name: str) -> QueueRef | None:
        """Return the queue as the store identifies it, or None; unlike `ref`, never create it."""
        if (ref := self._refs.get(name)) is not None:
            return ref
        return next((each for each in await self.existing() if each.name == name), None)

    async def waker(self) -> Waker:
        """Return the waker, which wakes listeners."""
        await self.store()
        return self._waker

    def declare(self, name: str, fields: Fields) -> None:
        """Set the declared fields to bind to a queue when it is next used."""
        if name not in self._fields or self._fields[name].schema != fields.schema:
            self._refs.pop(name, None)
        self._fields[name] = fields

    async def ref(self, name: str) -> QueueRef:
        """Return the queue as the store identifies it, created if it is missing."""
        refuse_fork(self._generation, "the queue")
        ref = self._refs.get(name)
        if ref is None:
            store = await self.store()
            ref = await store.queue(name, self._settings.get(name))
            if name in self._fields:
                ref = await store.declare(ref, self._fields[name].schema)
            self._refs[name] = ref
            self._maintenance.schedule(ref)
        return ref

    def check(self, name: str, data: Any) -> Any:
        """Return user data as it is stored; raise InvalidInput if it does not match the declared fields."""
        return self._fields[name].check(data) if name in self._fields else data

    def decoder(self, name: str) -> Decode:
        """Return the function that decodes the user data of a claimed entry."""
        fields = self._fields.get(name)
        return _decode_claimed if fields is None else lambda claimed: fields.read(_decode_claimed(claimed))

    def new_entries(self, name: str, entries: Iterable[Entry | Any]) -> list[NewEntry]:
        """Return checked entries, those of the same key merged."""
        if isinstance(entries, str | bytes | Mapping | Entry) or not isinstance(entries, Iterable):
            raise InvalidInput(f"entries must be a list of Entry or data, not {type(entries).__name__}")
        given = (each if isinstance(each, Entry) else Entry(data=each) for each in entries)
        return merge_same_keys(new_entry(entry, self.check(name, entry.data), self.ids) for entry in given)

    def is_open(self, name: str) -> bool:
        """Return whether a queue was used before."""
        return name in self._refs

    def opened(self, name: str) -> tuple[QueueRef, QueueStore]:
        """Return a queue that was used before, and its store, without waiting; raise InvalidInput otherwise."""
        ref, store = self._refs.get(name), self._store
        if ref is None or store is None:
            raise InvalidInput(f"queue {name!r} is not open yet: await queue.open() once, then put into it")
        return ref, store

    def entries_put(self, ref: QueueRef, entries: Sequence[NewEntry], now_ms: int, asked_at: float) -> None:
        """Wake listeners after a put by this process, at the date on which its first entry is due."""
        self._waker.clock.observe(now_ms, asked_at)
        first_at = min(now_ms if entry.process_at is None else max(entry.process_at, now_ms) for entry in entries)
        self._waker.put(ref, first_at, now_ms)

    def claimed(self, ref: QueueRef, count: int, lease_ms: int) -> None:
        """Record that this process claimed entries."""
        self._waker.claimed(ref, count)
        if count:
            self.metrics.count("queue_claimed", count, queue=ref.name)
            self._maintenance.schedule(ref, lease_ms / 1000)

    def finished(self, ref: QueueRef, count: int) -> None:
        """Record that this process finished entries."""
        if count:
            self.metrics.count("queue_done", count, queue=ref.name)
            self._waker.key_released(ref)
            self._maintenance.finished(ref, count)

    def failed(self, ref: QueueRef, outcomes: Sequence[Outcome], delay_ms: int) -> None:
        """Record that this process returned entries to the queue."""
        self.metrics.count("queue_failed", len(outcomes), queue=ref.name)
        if "waiting" in outcomes or "merged" in outcomes:
            self.wake_listeners(ref, delay_ms)
        if "dead" in outcomes:
            self._maintenance.dead_lettered(ref)
        self._waker.key_released(ref)

    def wake_listeners(self, ref: QueueRef, delay_ms: int = 0) -> None:
        """Wake listeners: an entry becomes due after `delay_ms`."""
        now_ms = self._waker.clock.now_ms()
        self._waker.put(ref, now_ms + delay_ms, now_ms)

    async def close(self) -> None:
        """Finish the calls in flight, then release the store."""
        self._closed = True
        if self._store is not None:
            await self._waker.close()
            await self._maintenance.close()
            await self._store.close()
        self._store = None
        self._refs.clear()


def _decode_claimed(claimed: Claimed) -> Any:
    return decode_payload(claimed.kind, claimed.data)

"""Blocking queues for threads without an event loop: the methods of `Queue`, without await."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from tidebook.queue.entry import Date, Entry
from tidebook.queue.job import Job
from tidebook.queue.port import Outcome, Put, Step
from tidebook.queue.priority import DEFAULT
from tidebook.queue.queue import Queue
from tidebook.queue.queues import Queues
from tidebook.queue.views import DeadLetter, EntryView, QueueStatus
from tidebook.runtime.blocking_portal import BlockingPortal


class SyncQueue:
    """One queue of a book; each method does what its namesake in `Queue` does."""

    def __init__(self, portal: BlockingPortal, queue: Queue) -> None:
        self._portal = portal
        self._queue = queue
        self.name = queue.name

    def put(
        self,
        data: Any,
        *,
        key: str | None = None,
        priority: int = DEFAULT,
        process_at: Date = None,
        expires_at: Date = None,
        transaction: object = None,
    ) -> Put:
        entry = Entry(data=data, key=key, priority=priority, process_at=process_at, expires_at=expires_at)
        return self.put_many([entry], transaction=transaction)

    def put_many(self, entries: Iterable[Entry | Any], *, transaction: object = None) -> Put:
        if transaction is None:
            return self._portal.run(self._queue.put_many(entries))
        self._portal.run(self._queue.open())
        # In the caller's thread, which owns the connection.
        return self._queue.put_many_in(transaction, entries)

    def put_in(self, transaction: object, data: Any, **entry: Any) -> Put:
        return self.put_many([Entry(data=data, **entry)], transaction=transaction)

    def put_many_in(self, transaction: object, entries: Iterable[Entry | Any]) -> Put:
        return self.put_many(entries, transaction=transaction)

    def put_once(self, entries: Iterable[Entry | Any], *, source: str, steps: Sequence[Step]) -> Put | None:
        return self._portal.run(self._queue.put_once(entries, source=source, steps=steps))

    def marks(self, source: str) -> dict[int, str]:
        return self._portal.run(self._queue.marks(source))

    def open(self) -> SyncQueue:
        self._portal.run(self._queue.open())
        return self

    def claim(self, limit: int = 1, lease: timedelta | float | None = None, *, together: bool = True) -> list[Job]:
        return self._portal.run(self._queue.claim(limit, lease, together=together))

    def heartbeat(self, jobs: Job | Sequence[Job], lease: timedelta | float | None = None) -> None:
        self._portal.run(self._queue.heartbeat(jobs, lease))

    def done(self, jobs: Job | Sequence[Job]) -> None:
        self._portal.run(self._queue.done(jobs))

    def fail(
        self, jobs: Job | Sequence[Job], *, delay: timedelta | float = 0, reason: str = "it failed"
    ) -> list[Outcome]:
        return self._portal.run(self._queue.fail(jobs, delay=delay, reason=reason))

    def listen(self) -> Iterator[datetime]:
        return self._portal.iterate(self._queue.listen())

    def entries(self, limit: int = 100) -> list[EntryView]:
        return self._portal.run(self._queue.entries(limit))

    def status(self) -> QueueStatus:
        return self._portal.run(self._queue.status())

    def flags(self, limit: int = 100) -> list[DeadLetter]:
        return self._portal.run(self._queue.flags(limit))

    def retry(self, flag: int) -> None:
        self._portal.run(self._queue.retry(flag))

    def edit(self, flag: int, data: Any) -> None:
        self._portal.run(self._queue.edit(flag, data))

    def drop(self, flag: int) -> None:
        self._portal.run(self._queue.drop(flag))


class SyncQueues:
    """All queues of a book; each method does what its namesake in `Queues` does."""

    def __init__(self, portal: BlockingPortal, queues: Queues) -> None:
        self._portal = portal
        self._queues = queues

    def names(self) -> list[str]:
        return self._portal.run(self._queues.names())

    def status(self) -> list[QueueStatus]:
        return self._portal.run(self._queues.status())

    def flags(self, limit: int = 100) -> list[DeadLetter]:
        return self._portal.run(self._queues.flags(limit))
